"""SpecInfer's command line: what each flag of its programs means here, as a table, and the keys of a run that follow.

It knows nothing about models but where they lie. A flag may be typed with one dash or two. What a person got wrong is a
ValueError whose sentence names the fix.
"""
from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, NamedTuple, Sequence

from config.keys import nearest
from config.presets import MODELS
from config.ranges import number, whole
from config.run_config import RunConfig
from config.words import typed

SPEC_INFER, INCR_DECODING = "spec_infer", "incr_decoding"
PROGRAMS = {SPEC_INFER: "specinfer", INCR_DECODING: "ar"}  # SpecInfer's two programs, and the method that is each
LENGTH = "1024"  # tokens of prompt and answer together if nothing is said, as in SpecInfer
NUMBERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "N": (whole, "a whole number"), "X": (number, "a number")}


class Flag(NamedTuple):
    """One flag of SpecInfer's programs, without its dashes.

    `takes` names the value behind it: N (a whole number), X (a number), another word for a text; empty: there is none.
    `key` gets the value in this `form`, or as `special` says. A flag without a key is ignored, and `about` says why.
    One that is `beside` another counts only with that one; `only` names the program that has it, if one alone has.
    """

    name: str
    takes: str
    key: str
    about: str
    form: str = "{}"
    special: tuple[tuple[str, str], ...] = ()
    beside: str = ""
    only: str = ""

    @property
    def typed(self) -> str:
        """The flag with its dashes and the name of its value, as SpecInfer's own pages write it."""
        dashes = "-" if self.name in SHORT or ":" in self.name else "--"
        return f"{dashes}{self.name} {self.takes}".rstrip()


# Those that SpecInfer writes with one dash.
SHORT = ("llm-model", "ssm-model", "llm-weight", "ssm-weight", "llm-config", "ssm-config", "tokenizer", "cache-folder",
         "prompt", "output-file", "offload", "offload-reserve-space-size", "data-parallelism-degree",
         "tensor-parallelism-degree", "pipeline-parallelism-degree", "profiling-folder", "trace", "level", "logfile")
CHAIN = "1,1,1,1,1,1,1,1"
WITHOUT_SMALL = "it decodes without small models"
PLACED = "weights and caches take what they need, on the devices that device= names"
ONE = "one answer is made at a time"
SCHEDULED = "requests are answered in the order of the prompt file, with no times of arrival and no latency goals"
SHAPED = "the tree has the shape of --expansion-degree, or of expansion=1,1,3,1"
TRAINED = "models are not trained here"
TOLD = "trace=DIR tells what every rank did, see docs/options.md"

FLAGS = (
    # models
    Flag("llm-model", "NAME", "base_dir", "the model: a folder in Hugging Face form, or its name in models/"),
    Flag("llm-weight", "DIR", "base_dir", "the same in SpecInfer's early days"),
    Flag("ssm-model", "NAME", "ssm", "a small model; repeat it for several", only=SPEC_INFER),
    Flag("ssm-weight", "DIR", "ssm", "the same in SpecInfer's early days", only=SPEC_INFER),
    Flag("cache-folder", "DIR", "models", "folder of models that are given by name"),
    Flag("tokenizer", "FILE", "", "the tokenizer is the one in the model's folder"),
    Flag("llm-config", "FILE", "", "config.json is the one in the model's folder"),
    Flag("ssm-config", "FILE", "", "config.json is the one in the model's folder"),
    Flag("refresh-cache", "", "", "nothing is downloaded"),
    # what is asked and written
    Flag("prompt", "FILE", "question_file", "prompts: a JSON list of texts in a file .json"),
    Flag("output-file", "FILE", "lines", "file to which SpecInfer's lines are appended"),
    Flag("max-sequence-length", "N", "max_length", "tokens of prompt and answer together, at most"),
    Flag("max-length", "N", "max_length", "the same; of both the smaller one counts"),
    Flag("max-output-length", "N", "max_new_tokens", "tokens of the answer, at most"),
    # how a token is chosen
    Flag("do-sample", "", "temperature", "draw tokens, at temperature 1 if none is given", "1"),
    Flag("temperature", "X", "temperature", "of drawing", beside="do-sample"),
    Flag("topp", "X", "top_p", "draw from the likeliest tokens that have this probability together",
         beside="do-sample"),
    Flag("sampling-seed", "N", "seed", "of the noise"),
    Flag("spec-sampling", "", "verify", "verify by multi-step speculative sampling", "mss", only=SPEC_INFER),
    # the tree of guesses
    Flag("expansion-degree", "N", "expansion", "guesses in the third step of the tree; -1: a chain",
         "1,1,{},1,1,1,1,1", (("-1", CHAIN),), only=SPEC_INFER),
    Flag("max-tree-width", "N", "", SHAPED, only=SPEC_INFER),
    Flag("max-tree-depth", "N", "", SHAPED, only=SPEC_INFER),
    # the machine
    Flag("use-full-precision", "", "dtype", "compute in float32; else in float16 on CUDA", "float32"),
    Flag("use-bf16-precision", "", "dtype", "compute in bfloat16", "bfloat16"),
    Flag("use-bf16", "", "dtype", "compute in bfloat16", "bfloat16"),
    Flag("4bit-quantization", "", "quant", "weights in 4 bits", "nf4"),
    Flag("8bit-quantization", "", "quant", "weights in 8 bits", "int8"),
    Flag("pipeline-parallelism-degree", "N", "stages", "ranks in a row, each with a share of the layers"),
    Flag("tensor-parallelism-degree", "N", "tp", "ranks that share the layers of a stage"),
    Flag("data-parallelism-degree", "N", "", "one copy of the model answers"),
    Flag("max-tokens-per-prefilling-batch", "N", "prefill_chunk", "tokens of the prompt in one segment"),
    Flag("max-requests-per-batch", "N", "", ONE),
    Flag("max-tokens-per-batch", "N", "", "a segment has as many rows as its tree"),
    Flag("max-tokens-per-ssm-batch", "N", "", "a small model reads each level of its tree at once"),
    Flag("num-kv-cache-slots", "N", "", "the cache has room for --max-sequence-length and the trees"),
    Flag("offload", "", "", "weights stay on their devices; more stages, or 4 bits, make them fit"),
    Flag("offload-reserve-space-size", "MB", "", "weights stay on their devices"),
    *(Flag(name, "N", "", PLACED) for name in ("ll:gpu", "ll:cpu", "ll:util", "ll:fsize", "ll:zsize", "ll:csize",
                                               "ll:rsize", "ll:streams", "ll:stacksize")),
    # tests and measurements of SpecInfer's own
    Flag("benchmarking", "", "", "weights are always read"),
    Flag("warmup", "", "", "what is measured at the start warms up"),
    *(Flag(name, "", "", TOLD) for name in ("verbose", "profiling", "inference-debugging")),
    *(Flag(name, "TEXT", "", TOLD) for name in ("profiling-folder", "level", "logfile", "lg:prof", "lg:prof_logfile")),
    Flag("fusion", "", "", "torch runs each operator by itself"),
    Flag("enable-peft", "", "", TRAINED),
    Flag("enable-peft-finetuning", "", "", TRAINED),
    # SpecInfer's scheduler
    Flag("no-special-tokens", "", "", "a prompt begins as its tokenizer wants it"),
    *(Flag(name, "X", "", SCHEDULED) for name in ("baseline-latency-ms", "ssm-spec-latency-ms", "llm-verify-latency-ms",
                                                  "request-per-second", "qps")),
    *(Flag(name, "FILE", "", SCHEDULED) for name in ("trace", "emission-file-path")),
    *(Flag(name, "", "", SCHEDULED) for name in ("enable-streaming-cache", "spec-infer-old-version", "greedy-schedule",
                                                 "equal-schedule", "slo-attainment-early-termination")),
)
BY_NAME = {flag.name: flag for flag in FLAGS}
REPEATED = ("ssm",)  # keys of flags that may be given several times
# Which value counts where several flags of one key are given, in the order of the table; of other keys one flag is.
JOINED: Mapping[str, Callable[[Sequence[str]], str]] = {
    "ssm": ",".join,
    "max_length": lambda values: min(values, key=int),
    "temperature": lambda values: values[-1],
}


@dataclass(frozen=True)
class SpecInferConfig(RunConfig):
    """A run that also writes SpecInfer's lines."""

    # What SpecInfer writes
    lines: str = ""  # file to which it appends the figures, token ids and text of each answer; empty: none


class Call(NamedTuple):
    """What was typed: `words`, the keys of a run, and a sentence for each flag that is ignored."""

    words: list[str]
    ignored: list[str]

    @property
    def command(self) -> str:
        """The command of this project that does the same; it writes the answers as JSON."""
        return " ".join(["bash run_pipe.sh", *(shlex.quote(_as_moved(word)) for word in self.words)])


def read(program: str, argv: Sequence[str]) -> Call:
    """What the flags behind one of SpecInfer's programs mean. Words key=value are keys of a run, and stay as they are.

    Raises ValueError for a flag that is unknown, lacks its value or contradicts another, and for what is not there.
    """
    given, own = _given(argv)
    names = [flag.name for flag, _ in given]
    values: dict[str, dict[Flag, list[str]]] = {}
    ignored = []
    for flag, value in given:
        why = _why_ignored(flag, program, names)
        if why:
            ignored.append(f"{_as_typed(flag, value)} is ignored: {why}")
        else:
            values.setdefault(flag.key, {}).setdefault(flag, []).append(value)
    keys = {key: _joined(key, found) for key, found in values.items()}
    return Call(_words(program, keys, own), ignored)


def help_text(program: str) -> str:
    """The text of `--help`: usage, examples, and what becomes of every flag."""
    command = f"bash scripts/{program}.sh"
    models = "-llm-model toy/llama" + " -ssm-model toy/draft_a" * (program == SPEC_INFER)
    known = [flag for flag in FLAGS if flag.only in ("", program)]
    lines = [f"usage: {command} [-FLAG VALUE ...] [key=value ...]", "",
             "SpecInfer's command line. Without a model it takes the bundled one, without -prompt a question to it.",
             "A key of bash run_pipe.sh may stand beside the flags, as threads_per_rank=1.", "",
             "examples:", f"  {command}",
             f"  {command} {models} -prompt FILE.json -output-file OUT",
             "", "flags, and the keys of bash run_pipe.sh that they set:"]
    lines += [f"  {flag.typed:<35} {flag.key + '=':<16} {flag.about}" for flag in known if flag.key]
    lines += ["", "flags without a meaning here, which are named and ignored:"]
    for about in dict.fromkeys(flag.about for flag in known if not flag.key):
        alike = ", ".join(flag.typed for flag in known if flag.about == about)
        lines.append(f"  {alike}: {about}")
    return "\n".join(lines)


# --- flags ------------------------------------------------------------------------------------------------------------

def _given(argv: Sequence[str]) -> tuple[list[tuple[Flag, str]], list[str]]:
    """The flags with their values, and the words key=value, in the order in which they were typed."""
    found, own, words = [], [], iter(argv)
    for word in words:
        if word.startswith("-"):
            flag = _flag(word)
            found.append((flag, _value(flag, word, next(words, "")) if flag.takes else ""))
        elif "=" in word:
            own.append(word)
        else:
            raise ValueError(f"{word} stands behind no flag: write -FLAG VALUE, or key=value")
    return found, own


def _flag(word: str) -> Flag:
    """The flag that a word names, with one dash or two."""
    name, equals, value = word.lstrip("-").partition("=")
    if name in BY_NAME and not equals:
        return BY_NAME[name]
    if name in BY_NAME:
        raise ValueError(f"{word} has its value behind an equals sign: write {word.partition('=')[0]} {value}")
    meant = nearest(name, BY_NAME) or "--help shows them all"
    raise ValueError(f"unknown flag {word}: {meant}")


def _value(flag: Flag, word: str, value: str) -> str:
    """The value behind a flag, looked over."""
    reads, kind = NUMBERS.get(flag.takes, (str, "a text"))
    lacks = not value or (flag.takes not in NUMBERS and value.startswith("-"))
    if lacks:
        raise ValueError(f"{word} has no value: write {flag.typed}")
    try:
        reads(value)
    except ValueError:
        raise ValueError(f"{word} {value} is not {kind}: write {flag.typed}") from None
    return value


def _why_ignored(flag: Flag, program: str, names: Sequence[str]) -> str:
    """Why a flag counts for nothing; empty if it counts."""
    if flag.only not in ("", program):
        return f"{program} has no small models; scripts/{flag.only}.sh has"
    if flag.beside and flag.beside not in names:
        return f"it counts only beside {BY_NAME[flag.beside].typed}"
    return "" if flag.key else flag.about


def _joined(key: str, found: Mapping[Flag, Sequence[str]]) -> str:
    """The value of a key, out of the values behind each of its flags."""
    for flag, values in found.items():
        if len(values) > 1 and key not in REPEATED:
            raise ValueError(f"{_dashed(flag)} is given {len(values)} times: leave one of them out")
    if len(found) > 1 and key not in JOINED:
        raise ValueError(f"{' and '.join(map(_dashed, found))} are both given: leave one of them out")
    ordered = sorted(found, key=FLAGS.index)
    values = [dict(flag.special).get(value, flag.form.format(value)) for flag in ordered for value in found[flag]]
    return JOINED[key](values) if key in JOINED else values[0]


def _dashed(flag: Flag) -> str:
    return flag.typed.split()[0]


def _as_typed(flag: Flag, value: str) -> str:
    return f"{_dashed(flag)} {value}".rstrip()


# --- keys -------------------------------------------------------------------------------------------------------------

def _words(program: str, keys: Mapping[str, str], own: Sequence[str]) -> list[str]:
    """The words of a run: those that the flags make, those that were typed as keys, and SpecInfer's own defaults."""
    beside = typed(own)
    found = _placed(keys, keys.get("models") or beside.get("models") or str(MODELS))
    prompts = found.get("question_file", ".json")
    if not prompts.endswith(".json"):
        raise ValueError(f"-prompt {prompts} is no file .json: name one that holds a JSON list of texts")
    if prompts == found.get("lines"):
        raise ValueError(f"-output-file {prompts} is the prompt file: choose another -output-file")
    if program == SPEC_INFER and "base_dir" in found and "ssm" not in {**found, **beside}:
        raise ValueError(f"-llm-model {found['base_dir']} has no small model beside it: add -ssm-model DIR, or take "
                         f"scripts/{INCR_DECODING}.sh")
    usual = {"pipeline_type": PROGRAMS[program], "template": "none", "max_length": LENGTH}
    usual["max_new_tokens"] = {**usual, **found, **beside}["max_length"]
    left_open = {key: value for key, value in usual.items() if key not in {**found, **beside}}
    return [*(f"{key}={value}" for key, value in {**left_open, **found}.items()), *own]


def _placed(keys: Mapping[str, str], root: str) -> dict[str, str]:
    """The same keys, with folders in place of the names of models."""
    found = dict(keys)
    if "ssm" in found:
        found["ssm"] = ",".join(_folder(name, root) for name in found["ssm"].split(","))
    if "base_dir" in found:
        folder = _folder(found.pop("base_dir"), root)
        is_split = (Path(folder) / "stage_0").is_dir()
        found["model_dir" if is_split else "base_dir"] = folder
    return found


def _folder(name: str, root: str) -> str:
    """The folder of a model that is named by it, or as at Hugging Face. Raises ValueError if there is none."""
    there = Path(root).expanduser()
    for folder in (Path(name).expanduser(), there / name):
        if folder.is_dir():
            return str(folder)
    binary = there / "weights" / name.lower()
    if binary.is_dir():
        raise ValueError(f"{binary} holds weights in FlexFlow's own form, which is not read here: name a folder of "
                         "the model in Hugging Face form")
    raise ValueError(f"there is no model {name}, and no folder {there / name}: name the model's folder, or type "
                     f"hf download {name} --local-dir {there / name}")


def _as_moved(word: str) -> str:
    """A word as bash run_pipe.sh knows it: SpecInfer's lines become a file of JSON."""
    key, _, value = word.partition("=")
    return f"output={value}.json" if key == "lines" else word
