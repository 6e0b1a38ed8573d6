"""The tiny model of tests/tiny.py in files, with its draft head and a tokenizer of single characters, split over ranks.

And the commands that are run with it: in this process, or as a person types them.
"""
from __future__ import annotations

import os
import shutil
import signal
import string
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, ContextManager, Iterator, Sequence

from cluster.folder import LOCK_FILE
from config.presets import ROOT
from launch.run import run
from launch.split.write import Layout
from model.sample import Sampler
from model.weights.parts import Part
from scripts import generate
from tests.checkpoints import edited_tensors, save_checkpoint, split_quietly
from tests.json_files import load_json, save_json
from tests.tiny import CONFIG, TINY, Tiny, weights

SLOW = 5  # times as long as usual what a machine does may take, if others use it
SPECIAL = ["<unk>", "<s>", "</s>"]
SIGNS = string.ascii_lowercase + " .,:?!'\n" + string.digits  # one token each
SPLITS = ("0+4", "0+2+2", "0+1+1+2", "0+1+1+1+1")
PROMPT = [5, 17, 40, 3, 28, 11, 9, 50, 2, 31, 7, 7, 19]
NEW = 30
ASK = ("prompt_ids=" + ",".join(map(str, PROMPT)), f"max_new_tokens={NEW}", "seed=4", "ignore_eos=true")
FAST = ("init_total_token=20", "width=4", "init_depth=4", "expand_total_token=16")
ENDLESS = ("prompt_ids=5,17,40", "ignore_eos=true", "max_length=30000", "max_new_tokens=30000")
FORM = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "tie_word_embeddings": False,
        "hidden_size": CONFIG.hidden, "num_hidden_layers": CONFIG.layers, "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads, "head_dim": CONFIG.head_dim, "vocab_size": CONFIG.vocab,
        "intermediate_size": CONFIG.intermediate, "max_position_embeddings": 1 << 15,
        "rms_norm_eps": CONFIG.eps, "rope_theta": CONFIG.theta, "bos_token_id": 1, "eos_token_id": 2}


@lru_cache(maxsize=None)
def reference(temperature: float) -> list[int]:
    """The text of the tiny model that ASK requests."""
    return TINY.text(PROMPT, NEW, Sampler(temperature, seed=4))


def token_ids(output: Path) -> list[int]:
    """Those of the answer that a command wrote with output=FILE."""
    answer: dict[str, list[int]] = load_json(output)
    return answer["token_ids"]


def save_model(folder: Path, tiny: Tiny | None = None) -> None:
    tiny = tiny or Tiny()
    tensors = {f"model.{name}": x for name, x in tiny.tensors.items()}
    save_checkpoint(folder, {**FORM, "num_hidden_layers": tiny.config.layers},
                    {**tensors, "lm_head.weight": tiny.lm_head.weight.detach()}, "model.safetensors")
    save_tokenizer(folder)


def save_drafter(base: Path, folder: Path, noise: float) -> None:
    """The model in a folder of its own, its weights a little off."""
    shutil.copytree(base, folder)
    off = weights(Tiny().whole, seed=5, scale=noise)
    with edited_tensors(folder) as tensors:
        for name, x in off.items():
            if x.dim() > 1:
                tensors[f"model.{name}"] += x


def save_head(folder: Path) -> None:
    """As EAGLE publishes its heads."""
    save_checkpoint(folder, {**FORM, "num_hidden_layers": 1}, weights(Tiny().eagle().network, seed=3))


def save_tokenizer(folder: Path, more: int = 0) -> None:
    """A token for every sign, and `more` that the model does not know."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [*SPECIAL, *SIGNS, *(chr(0x3b1 + i) for i in range(more))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": SPECIAL[0], "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2]})


def split_shared(saved: Path, folder: Path, stages: str = "", shares: Sequence[float] = (1, 1)) -> Path:
    """The tiny model with its head, split over ranks that share each stage; without stages they share all layers."""
    split_quietly(saved / "base", folder, stages, saved / "head", layout=Layout(shares=shares))
    return folder


def options_of(saved: Path, **options: Any) -> dict[str, Any]:
    """Those with which a program of a person's own opens a pipeline over three ranks."""
    return {"model_dir": str(saved / "0+2+2"), "template": "none", "ignore_eos": True, "dtype": "float64",
            "max_new_tokens": 12, "threads_per_rank": 1, **options}


def ranks_of(folder: Path, world: int = 3) -> list[Part]:
    """What each rank has of a split."""
    return [Part(folder / f"stage_{rank}") for rank in range(world)]


def boards_of(saved: Path, folder: Path) -> Path:
    """The folder with one for each board of three, which has its own part and nothing else."""
    for rank in range(3):
        shutil.copytree(saved / "0+2+2" / f"stage_{rank}", folder / f"board{rank}" / f"stage_{rank}")
    return folder


def models(folder: Path) -> Path:
    """A folder with `base`, `head`, the small models `near` and `far`, and one for each of the SPLITS."""
    if not folder.is_dir():
        save_model(folder / "base")
        save_head(folder / "head")
        for name, noise in (("near", 0.02), ("far", 0.1)):
            save_drafter(folder / "base", folder / name, noise)
        for stages in SPLITS:
            split_quietly(folder / "base", folder / stages, stages, folder / "head")
    return folder


def here(*words: str) -> int:
    """A command with all ranks as threads of this process; its exit code."""
    return run(generate.GENERATE, ["link=threads", "dtype=float64", *words])


def answer_of(folder: Path, *words: str) -> Any:
    """What a command with these words writes into a folder, with all ranks as threads of this process."""
    output = folder / "answer.json"
    assert run(generate.GENERATE, [*words, "link=threads", f"output={output}"]) == 0
    return load_json(output)


def wait_until(happened: Callable[[], Any], seconds: float) -> bool:
    """Whether something has happened, which takes no more than so many seconds on a machine that is not held up."""
    end = time.monotonic() + SLOW * seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(happened())


def run_program(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed; it is run in the project's folder by default."""
    return subprocess.run(words, **{"cwd": ROOT, "text": True, "capture_output": True, **options})


class Command:
    """A command as a person types it in a terminal: `stdout` and `stderr` are what it has printed so far."""

    def __init__(self, folder: Path, module: str, *words: str) -> None:
        self.files = [folder / "stdout", folder / "stderr"]
        self.process = self.start([*module.split(), *words])

    def start(self, words: Sequence[str]) -> Any:
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=out, stderr=err,
                                    stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that have not ended, though the launcher may have."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                name, _, rest = path.read_text().partition("(")[2].rpartition(") ")
                state, _, _, session = rest.split()[:4]
                if name.startswith("flowspec-") and state not in "ZX" and int(session) == self.process.pid:
                    found[int(name.partition("-")[2])] = int(path.parent.name)
        return found

    def folder(self) -> Path:
        """Where the ranks meet, which each of them holds."""
        held = map(Path.resolve, Path(f"/proc/{self.ranks()[1]}/fd").iterdir())
        return next(path.parent for path in held if path.name == LOCK_FILE)

    def end(self, seconds: float) -> int | None:
        """The exit code, once all processes have ended; None if that takes too long."""
        ended = wait_until(lambda: self.process.poll() is not None and not self.ranks(), seconds)
        return self.process.returncode if ended else None


def command(folder: Path, module: str, *words: str) -> ContextManager[Command]:
    """A command that leaves nothing behind, however the test ends."""
    return leaving_nothing(Command(folder, module, *words))


@contextmanager
def leaving_nothing(started: Any) -> Iterator[Any]:
    try:
        yield started
    finally:
        for pid in [*started.ranks().values(),
                    *([started.process.pid] if started.process.poll() is None else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.process.wait()
