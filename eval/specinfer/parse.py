"""Parser of SpecInfer's command line, from flags to the keys of a run. A flag has one dash or two.

The options of its Python programs are flags with other names. A mistake raises a ValueError that names the fix.
"""
from __future__ import annotations

import shlex
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, NoReturn, Sequence

from config.cli import CommandKeys
from config.files import fits
from config.files import read_json_file as read_json
from config.keys import nearest, raw_values, shared_key
from config.presets import MODELS_FOLDER
from config.values import integer, number

SPEC_INFER, INCR_DECODING = "spec_infer", "incr_decoding"  # SpecInfer's two programs
PROGRAMS = {SPEC_INFER: "specinfer", INCR_DECODING: "ar"}  # the method of each program
TABLE = 'write a JSON object, such as {"llm_model": "DIR", "ssms": [{"ssm_model": "DIR"}], "prompt": "FILE.json"}'
LENGTH = "1024"  # default tokens of prompt and answer together, as in SpecInfer
ArgumentOptions = Dict[str, Any]  # of ArgumentParser.add_argument


class Flag(NamedTuple):
    """A flag of SpecInfer's programs."""

    names: str  # without dashes, separated by blanks
    key: str  # of a run, which the flag sets
    help_text: str
    value_options: ArgumentOptions  # how the parser reads the value; without one the flag sets `const`
    only_program: str = ""  # the only program that has the flag; empty: both do


def _const(value: str) -> ArgumentOptions:
    return {"action": "store_const", "const": value}


INT = {"type": integer, "metavar": "N"}
REAL = {"type": number, "metavar": "X"}
NAME = {"metavar": "NAME"}
FILE = {"metavar": "FILE"}
FLAGS = (
    Flag("llm-model llm-weight", "base_dir", "the model: a Hugging Face folder, or its name in models/", NAME),
    Flag("ssm-model ssm-weight", "ssm", "a small model; repeat it for several",
         {"action": "append", **NAME}, SPEC_INFER),
    Flag("cache-folder", "models", "folder of models that are given by name", NAME),
    Flag("prompt", "question_file", "prompts: a JSON list of texts in a .json file", FILE),
    Flag("output-file", "lines", "file to append SpecInfer's lines to", FILE),
    Flag("max-sequence-length max-length", "max_length", "most tokens of prompt and answer together; the least counts",
         {"action": "append", **INT}),
    Flag("max-output-length", "max_new_tokens", "most tokens of the answer", INT),
    Flag("do-sample", "do_sample", "sample tokens, by default at temperature 1", _const("1")),
    Flag("temperature", "temperature", "temperature of sampling, with --do-sample", REAL),
    Flag("topp", "top_p", "sample from the most likely tokens with this total probability, with --do-sample", REAL),
    Flag("sampling-seed", "seed", "seed of sampling", INT),
    Flag("spec-sampling", "verify", "verify by multi-step speculative sampling", _const("mss"), SPEC_INFER),
    Flag("expansion-degree", "expansion", "guesses in the third step of the tree; -1: a chain", INT, SPEC_INFER),
    Flag("use-full-precision", "dtype", "compute in float32; the default on CUDA is float16", _const("float32")),
    Flag("use-bf16-precision use-bf16", "dtype", "compute in bfloat16", _const("bfloat16")),
    Flag("4bit-quantization", "quant", "weights in 4 bits", _const("nf4")),
    Flag("8bit-quantization", "quant", "weights in 8 bits", _const("int8")),
    Flag("pipeline-parallelism-degree", "stages", "number of stages, each with a share of the layers", INT),
    Flag("tensor-parallelism-degree", "tp", "ranks that share the layers of a stage", INT),
    Flag("max-tokens-per-prefilling-batch", "prefill_chunk", "tokens of the prompt per segment", INT),
    Flag("max-requests-per-batch", "max_requests", "requests answered at once", INT),
    Flag("config-file", "config_file", "JSON object with options of SpecInfer's Python programs; each is a flag", FILE),
)
IGNORED = """
    tokenizer llm-config ssm-config refresh-cache max-tree-width max-tree-depth data-parallelism-degree
    max-tokens-per-batch max-tokens-per-ssm-batch num-kv-cache-slots offload
    offload-reserve-space-size ll:gpu ll:cpu ll:util ll:fsize ll:zsize ll:csize ll:rsize ll:streams ll:stacksize
    benchmarking warmup verbose profiling inference-debugging profiling-folder level logfile lg:prof lg:prof_logfile
    fusion enable-peft enable-peft-finetuning no-special-tokens baseline-latency-ms ssm-spec-latency-ms
    llm-verify-latency-ms request-per-second qps trace emission-file-path enable-streaming-cache spec-infer-old-version
    greedy-schedule equal-schedule slo-attainment-early-termination""".split()
NAMES = [name for flag in FLAGS for name in flag.names.split()]
RENAMED = {  # options of its Python programs, each with the different name of its flag
    "cache_path": "cache-folder", "full_precision": "use-full-precision", "max_seq_length": "max-sequence-length",
    "num_gpus": "ll:gpu", "memory_per_gpu": "ll:fsize", "zero_copy_memory_per_node": "ll:zsize", "num_cpus": "ll:cpu",
    "legion_utility_processors": "ll:util", "use_4bit_quantization": "4bit-quantization",
    "use_8bit_quantization": "8bit-quantization"}
OPTIONS = {name.replace("-", "_"): name for name in (*NAMES, *IGNORED)}
OPTIONS.update(RENAMED)


@dataclass(frozen=True)
class SpecInferConfig(CommandKeys):
    """A run that also writes SpecInfer's lines."""

    lines: str = shared_key("", "file to append the figures, token ids and text of each answer to; empty: none",
        heading="SpecInfer's output")


class Call(NamedTuple):
    """The result of parsing: `words`, which are keys of a run, and a sentence about ignored flags, or an empty one."""

    words: list[str]
    ignored: str

    @property
    def command(self) -> str:
        """The equivalent command of this project, which writes the answers as JSON."""
        words = [f"output={word[len('lines='):]}.json" if word.startswith("lines=") else word for word in self.words]
        return shlex.join(["bash", "run_pipe.sh", *words])


class Parser(ArgumentParser):
    """A parser for the flags of a program. A mistake raises ValueError."""

    def __init__(self, program: str) -> None:
        command = f"bash scripts/{program}.sh"
        super().__init__(
            usage=f"{command} [-FLAG VALUE ...] [key=value ...]", add_help=False, allow_abbrev=False,
            formatter_class=RawDescriptionHelpFormatter,
            description="SpecInfer's command line. The default model is the bundled one, the default prompt is a "
                        "question.\nIt also accepts keys of bash run_pipe.sh, such as threads_per_rank=1.",
            epilog=f"Accepted and ignored: {', '.join(IGNORED)}.\n\nexamples:\n  {command}\n"
                   f"  {command} -llm-model toy/llama -prompt FILE.json -output-file OUT\n"
                   f"  {command} -config-file FILE")

        quant_group = self.add_mutually_exclusive_group()
        for flag in FLAGS:
            if flag.only_program in ("", program):
                dashed_names = [f"{dashes}{name}" for name in flag.names.split() for dashes in ("-", "--")]
                flag_help = f"{flag.help_text} ({flag.key}=)"
                group = quant_group if flag.key == "quant" else self
                group.add_argument(*dashed_names, dest=flag.key, help=flag_help, **flag.value_options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: --help shows every flag")


def read(program: str, argv: Sequence[str]) -> Call:
    """Translate the arguments of one of SpecInfer's programs. Words key=value are keys of a run and stay unchanged.

    Raises ValueError for a flag that is unknown, lacks its value or contradicts another, and for missing files.
    """
    parser = Parser(program)
    parsed, other_words = parser.parse_known_args(argv)
    if parsed.config_file:
        options = options_in(parsed.config_file)
        parsed, other_words = parser.parse_known_args([*flags_of(options), *argv])

    key_words, ignored_flags = _sorted(other_words)
    flag_values = {key: value for key, value in vars(parsed).items() if value is not None}
    flag_values.pop("config_file", None)

    sampling_temperature = flag_values.pop("do_sample", None)  # the default one
    if sampling_temperature:
        flag_values.setdefault("temperature", sampling_temperature)
    else:
        unused_keys = [key for key in ("temperature", "top_p") if key in flag_values]
        ignored_flags += [f"{key}={flag_values.pop(key)} without --do-sample" for key in unused_keys]

    if "max_length" in flag_values:
        flag_values["max_length"] = min(flag_values["max_length"])
    if "expansion" in flag_values:
        flag_values["expansion"] = f"1,1,{max(1, flag_values['expansion'])},1,1,1,1,1"

    sentence = f"ignored, since they have no meaning here: {', '.join(ignored_flags)}" if ignored_flags else ""
    return Call(_run_words(program, flag_values, key_words), sentence)


def _sorted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the words that the parser did not know: words key=value, and ignored flags with their values."""
    key_words: list[str] = []
    ignored_flags: list[str] = []
    may_follow = False  # whether the next word may be the value of an ignored flag
    for word in words:
        if word.startswith("-"):
            name = word.lstrip("-")
            if name not in IGNORED and name not in NAMES:  # names of the other program's flags are ignored, too
                raise ValueError(f"unknown flag {word}: {nearest(name, [*NAMES, *IGNORED]) or '--help shows them all'}")
            ignored_flags.append(word)

        elif "=" in word:
            key_words.append(word)
        elif may_follow:
            ignored_flags[-1] += f" {word}"
        else:
            raise ValueError(f"{word} belongs to no flag: write -FLAG VALUE, or key=value")
        may_follow = word.startswith("-")
    return key_words, ignored_flags


def options_in(path: str) -> Mapping[str, Any]:
    """Return the options in a JSON file. Raise ValueError if it holds something else."""
    options = read_json(path, TABLE)
    if not isinstance(options, dict):
        raise ValueError(f"{path} is not an object of options: {TABLE}")
    return options


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Return the flags for options of its Python programs; if two options share a flag, the later one applies.

    Raises ValueError for an unknown option.
    """
    small_models = options.get("ssms", [])
    if not fits(small_models, [{"ssm_model": str}]):
        raise ValueError('ssms is not a list of small models: write each as {"ssm_model": "DIR"}')

    value_by_flag: dict[str, Any] = {}
    for name, value in options.items():
        option_name = name.removeprefix("model_specific_")
        if option_name not in (*OPTIONS, "ssms"):
            remedy = nearest(name, OPTIONS) or f"choose from {', '.join(OPTIONS)}"
            raise ValueError(f"unknown option {name}: {remedy}")
        if option_name in OPTIONS:
            value_by_flag[OPTIONS[option_name]] = value

    words = []
    for flag, value in value_by_flag.items():
        if value is not None and value is not False and value != "":
            words += [f"-{flag}"] if value is True else [f"-{flag}", f"{value}"]
    for small_model in small_models:
        words += ["-ssm-model", small_model["ssm_model"]]
    return words


# --- keys -------------------------------------------------------------------------------------------------------------

def _run_words(program: str, flag_values: dict[str, Any], key_words: Sequence[str]) -> list[str]:
    """Return the words of a run: from the flags, from the words key=value, and from SpecInfer's own defaults."""
    typed_keys = raw_values(key_words)
    models = {"models": str(MODELS_FOLDER), **typed_keys, **flag_values}["models"]
    models_folder = Path(models).expanduser()

    # models
    if "ssm" in flag_values:
        flag_values["ssm"] = ",".join(_folder(name, models_folder) for name in flag_values["ssm"])
    elif program == SPEC_INFER and "base_dir" in flag_values and "ssm" not in typed_keys:
        raise ValueError(f"-llm-model {flag_values['base_dir']} has no small model: add -ssm-model DIR, or use "
                         f"scripts/{INCR_DECODING}.sh")
    if "base_dir" in flag_values:
        folder = _folder(flag_values.pop("base_dir"), models_folder)
        flag_values["model_dir" if Path(folder, "stage_0").is_dir() else "base_dir"] = folder

    # prompts
    default_keys = {"pipeline_type": PROGRAMS[program], "max_length": LENGTH}
    if "question_file" in flag_values:
        prompt_file = flag_values["question_file"]
        if not prompt_file.endswith(".json"):
            raise ValueError(f"-prompt {prompt_file} is not a .json file: name one that holds a JSON list of texts")
        if prompt_file == flag_values.get("lines"):
            raise ValueError(f"-output-file {prompt_file} is the prompt file: choose another -output-file")
        default_keys["template"] = "none"  # prompts of a file need no template

    default_keys["max_new_tokens"] = {**default_keys, **typed_keys, **flag_values}["max_length"]
    run_keys = {key: value for key, value in default_keys.items() if key not in typed_keys}
    run_keys.update(flag_values)
    return [*(f"{key}={value}" for key, value in run_keys.items()), *key_words]


def _folder(name: str, models_folder: Path) -> str:
    """Return the folder of a model, given by a path or by its Hugging Face name. Raise ValueError if none exists."""
    named_folder = models_folder / name
    for folder in (Path(name).expanduser(), named_folder):
        if folder.is_dir():
            return str(folder)
    raise ValueError(f"there is no model {name}, and no folder {named_folder}: name the model's folder, or run "
                     f"hf download {name} --local-dir {named_folder}")
