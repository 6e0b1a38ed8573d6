"""SpecInfer's command line: flags in, the keys of a run out. A flag may be typed with one dash or two.

The options of its Python programs are flags by other names. A mistake is a ValueError whose sentence names the fix.
"""
from __future__ import annotations

import shlex
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, NoReturn, Sequence

from config.cli import CommandKeys
from config.files import fits
from config.files import whole as read_json
from config.keys import integer, nearest, number, raw_values
from config.presets import MODELS

SPEC_INFER, INCR_DECODING = "spec_infer", "incr_decoding"  # SpecInfer's two programs
PROGRAMS = {SPEC_INFER: "specinfer", INCR_DECODING: "ar"}  # and the method that is each
TABLE = 'write a JSON object, as {"llm_model": "DIR", "ssms": [{"ssm_model": "DIR"}], "prompt": "FILE.json"}'
LENGTH = "1024"  # tokens of prompt and answer together if nothing is said, as in SpecInfer
Options = Dict[str, Any]  # of ArgumentParser.add_argument


class Flag(NamedTuple):
    """One flag by its names without dashes, the key of a run that it sets, and how its value is read.

    One without a value sets `const`. `only` names the program that has it, if one alone has.
    """

    names: str
    key: str
    about: str
    value: Options
    only: str = ""


def _const(value: str) -> Options:
    return {"action": "store_const", "const": value}


N: Options = {"type": integer, "metavar": "N"}
X: Options = {"type": number, "metavar": "X"}
NAME: Options = {"metavar": "NAME"}
FILE: Options = {"metavar": "FILE"}
FLAGS = (
    Flag("llm-model llm-weight", "base_dir", "the model: a folder in Hugging Face form, or its name in models/", NAME),
    Flag("ssm-model ssm-weight", "ssm", "a small model; repeat it for several",
         {"action": "append", **NAME}, SPEC_INFER),
    Flag("cache-folder", "models", "folder of models that are given by name", NAME),
    Flag("prompt", "question_file", "prompts: a JSON list of texts in a file .json", FILE),
    Flag("output-file", "lines", "file to which SpecInfer's lines are appended", FILE),
    Flag("max-sequence-length max-length", "max_length", "tokens of prompt and answer together; the smaller one counts",
         {"action": "append", **N}),
    Flag("max-output-length", "max_new_tokens", "tokens of the answer, at most", N),
    Flag("do-sample", "do_sample", "draw tokens, at temperature 1 if none is given", _const("1")),
    Flag("temperature", "temperature", "of drawing, with --do-sample", X),
    Flag("topp", "top_p", "draw from the likeliest tokens that have this probability together, with --do-sample", X),
    Flag("sampling-seed", "seed", "of the noise", N),
    Flag("spec-sampling", "verify", "verify by multi-step speculative sampling", _const("mss"), SPEC_INFER),
    Flag("expansion-degree", "expansion", "guesses in the third step of the tree; -1: a chain", N, SPEC_INFER),
    Flag("use-full-precision", "dtype", "compute in float32; else in float16 on CUDA", _const("float32")),
    Flag("use-bf16-precision use-bf16", "dtype", "compute in bfloat16", _const("bfloat16")),
    Flag("4bit-quantization", "quant", "weights in 4 bits", _const("nf4")),
    Flag("8bit-quantization", "quant", "weights in 8 bits", _const("int8")),
    Flag("pipeline-parallelism-degree", "stages", "ranks in a row, each with a share of the layers", N),
    Flag("tensor-parallelism-degree", "tp", "ranks that share the layers of a stage", N),
    Flag("max-tokens-per-prefilling-batch", "prefill_chunk", "tokens of the prompt in one segment", N),
    Flag("config-file", "config_file", "options of SpecInfer's Python programs in a JSON object; each is a flag", FILE),
)
IGNORED = """
    tokenizer llm-config ssm-config refresh-cache max-tree-width max-tree-depth data-parallelism-degree
    max-requests-per-batch max-tokens-per-batch max-tokens-per-ssm-batch num-kv-cache-slots offload
    offload-reserve-space-size ll:gpu ll:cpu ll:util ll:fsize ll:zsize ll:csize ll:rsize ll:streams ll:stacksize
    benchmarking warmup verbose profiling inference-debugging profiling-folder level logfile lg:prof lg:prof_logfile
    fusion enable-peft enable-peft-finetuning no-special-tokens baseline-latency-ms ssm-spec-latency-ms
    llm-verify-latency-ms request-per-second qps trace emission-file-path enable-streaming-cache spec-infer-old-version
    greedy-schedule equal-schedule slo-attainment-early-termination""".split()
NAMES = [name for flag in FLAGS for name in flag.names.split()]
RENAMED = {  # options of the Python API whose flags have another name
    "cache_path": "cache-folder", "full_precision": "use-full-precision", "max_seq_length": "max-sequence-length",
    "num_gpus": "ll:gpu", "memory_per_gpu": "ll:fsize", "zero_copy_memory_per_node": "ll:zsize", "num_cpus": "ll:cpu",
    "legion_utility_processors": "ll:util", "use_4bit_quantization": "4bit-quantization",
    "use_8bit_quantization": "8bit-quantization"}
OPTIONS = {name.replace("-", "_"): name for name in (*NAMES, *IGNORED)}
OPTIONS.update(RENAMED)


@dataclass(frozen=True)
class SpecInferConfig(CommandKeys):
    """A run that also writes SpecInfer's lines."""

    # What SpecInfer writes
    lines: str = ""  # file to which it appends the figures, token ids and text of each answer; empty: none


class Call(NamedTuple):
    """What was typed: `words`, the keys of a run, and a sentence about the flags that are ignored, if there are any."""

    words: list[str]
    ignored: str

    @property
    def command(self) -> str:
        """The command of this project that does the same; it writes the answers as JSON."""
        words = [f"output={word[len('lines='):]}.json" if word.startswith("lines=") else word for word in self.words]
        return shlex.join(["bash", "run_pipe.sh", *words])


class Parser(ArgumentParser):
    """Reads the flags of a program. What is wrong is a ValueError."""

    def __init__(self, program: str) -> None:
        command = f"bash scripts/{program}.sh"
        super().__init__(
            usage=f"{command} [-FLAG VALUE ...] [key=value ...]", add_help=False, allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter,
            description="SpecInfer's command line. Without a model it takes the bundled one, without -prompt a "
                        "question to it.\nA key of bash run_pipe.sh may stand beside the flags, as threads_per_rank=1.",
            epilog=f"Accepted and ignored: {', '.join(IGNORED)}.\n\nexamples:\n  {command}\n"
                   f"  {command} -llm-model toy/llama -prompt FILE.json -output-file OUT\n"
                   f"  {command} -config-file FILE")
        quant = self.add_mutually_exclusive_group()
        for flag in FLAGS:
            if flag.only in ("", program):
                dashed = [f"{dashes}{name}" for name in flag.names.split() for dashes in ("-", "--")]
                place = quant if flag.key == "quant" else self
                place.add_argument(*dashed, dest=flag.key, help=f"{flag.about} ({flag.key}=)", **flag.value)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: --help shows every flag")


def read(program: str, argv: Sequence[str]) -> Call:
    """What the flags behind one of SpecInfer's programs mean. Words key=value are keys of a run, and stay as they are.

    Raises ValueError for a flag that is unknown, lacks its value or contradicts another, and for what is not there.
    """
    parser = Parser(program)
    found, rest = parser.parse_known_args(argv)
    if found.config_file:
        options = options_in(found.config_file)
        found, rest = parser.parse_known_args([*flags_of(options), *argv])
    own, ignored = _sorted(rest)
    values = {key: value for key, value in vars(found).items() if value is not None}
    values.pop("config_file", None)
    draws = values.pop("do_sample", None)
    if draws:
        values.setdefault("temperature", draws)
    else:
        alone = [key for key in ("temperature", "top_p") if key in values]
        ignored += [f"{key}={values.pop(key)} without --do-sample" for key in alone]
    if "max_length" in values:
        values["max_length"] = min(values["max_length"])
    if "expansion" in values:
        values["expansion"] = f"1,1,{max(1, values['expansion'])},1,1,1,1,1"
    sentence = f"ignored, since they mean nothing here: {', '.join(ignored)}" if ignored else ""
    return Call(_words(program, values, own), sentence)


def _sorted(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words key=value among those that the parser left over, and the flags that are ignored with their values."""
    own: list[str] = []
    ignored: list[str] = []
    may_follow = False  # whether a value of an ignored flag may come
    for word in rest:
        if word.startswith("-"):
            name = word.lstrip("-")
            if name not in IGNORED and name not in NAMES:  # names of the other program's flags are ignored, too
                raise ValueError(f"unknown flag {word}: {nearest(name, [*NAMES, *IGNORED]) or '--help shows them all'}")
            ignored.append(word)
        elif "=" in word:
            own.append(word)
        elif may_follow:
            ignored[-1] += f" {word}"
        else:
            raise ValueError(f"{word} stands behind no flag: write -FLAG VALUE, or key=value")
        may_follow = word.startswith("-")
    return own, ignored


def options_in(path: str) -> Mapping[str, Any]:
    """The options that a file of JSON holds. Raises ValueError if it holds something else."""
    options = read_json(path, TABLE)
    if not isinstance(options, dict):
        raise ValueError(f"{path} is no table of options: {TABLE}")
    return options


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """The flags that say the same as options of the Python API; of two options with one flag the later counts.

    Raises ValueError for an option that is unknown.
    """
    small = options.get("ssms", [])
    if not fits(small, [{"ssm_model": str}]):
        raise ValueError('ssms is no list of small models: write each as {"ssm_model": "DIR"}')
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        known = name.removeprefix("model_specific_")
        if known not in (*OPTIONS, "ssms"):
            remedy = nearest(name, OPTIONS) or f"choose among {', '.join(OPTIONS)}"
            raise ValueError(f"unknown option {name}: {remedy}")
        if known in OPTIONS:
            chosen[OPTIONS[known]] = value
    words = []
    for flag, value in chosen.items():
        if value is not None and value is not False and value != "":
            words += [f"-{flag}"] if value is True else [f"-{flag}", f"{value}"]
    for ssm in small:
        words += ["-ssm-model", ssm["ssm_model"]]
    return words


# --- keys -------------------------------------------------------------------------------------------------------------

def _words(program: str, found: dict[str, Any], own: Sequence[str]) -> list[str]:
    """The words of a run: those that the flags make, those that were typed as keys, and SpecInfer's own defaults."""
    beside = raw_values(own)
    named = {"models": str(MODELS), **beside, **found}
    root = Path(named["models"]).expanduser()
    if "ssm" in found:
        found["ssm"] = ",".join(_folder(name, root) for name in found["ssm"])
    elif program == SPEC_INFER and "base_dir" in found and "ssm" not in beside:
        raise ValueError(f"-llm-model {found['base_dir']} has no small model beside it: add -ssm-model DIR, or take "
                         f"scripts/{INCR_DECODING}.sh")
    if "base_dir" in found:
        folder = _folder(found.pop("base_dir"), root)
        found["model_dir" if Path(folder, "stage_0").is_dir() else "base_dir"] = folder
    usual = {"pipeline_type": PROGRAMS[program], "max_length": LENGTH}
    if "question_file" in found:
        prompts = found["question_file"]
        if not prompts.endswith(".json"):
            raise ValueError(f"-prompt {prompts} is no file .json: name one that holds a JSON list of texts")
        if prompts == found.get("lines"):
            raise ValueError(f"-output-file {prompts} is the prompt file: choose another -output-file")
        usual["template"] = "none"  # prompts of a file stand as they are
    usual["max_new_tokens"] = {**usual, **beside, **found}["max_length"]
    made = {key: value for key, value in usual.items() if key not in beside}
    made.update(found)
    return [*(f"{key}={value}" for key, value in made.items()), *own]


def _folder(name: str, root: Path) -> str:
    """The folder of a model that is named by it, or as at Hugging Face. Raises ValueError if there is none."""
    for folder in (Path(name).expanduser(), root / name):
        if folder.is_dir():
            return str(folder)
    raise ValueError(f"there is no model {name}, and no folder {root / name}: name the model's folder, or type "
                     f"hf download {name} --local-dir {root / name}")
