"""SpecInfer's command line: flags in, the keys of a run out, by the table of `spec_flags.py`.

It knows nothing about models but where they lie. A flag may be typed with one dash or two. What a person got wrong is a
ValueError whose sentence names the fix.
"""
from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

from config.command import CommandKeys
from config.files import fits
from config.files import whole as read_json
from config.keys import nearest
from config.presets import MODELS
from config.ranges import number, whole
from config.typed import typed
from eval.specinfer.flags import BY_NAME, CONFIG_FILE, FLAGS, INCR_DECODING, OPTIONS, SPEC_INFER, Flag

Pair = Tuple[Flag, str]  # a flag and the value behind it
Keys = Mapping[str, str]
PROGRAMS = {SPEC_INFER: "specinfer", INCR_DECODING: "ar"}  # and the method that is each
TABLE = 'write a JSON object, as {"llm_model": "DIR", "ssms": [{"ssm_model": "DIR"}], "prompt": "FILE.json"}'
LENGTH = "1024"  # tokens of prompt and answer together if nothing is said, as in SpecInfer
NUMBERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "N": (whole, "a whole number"), "X": (number, "a number")}
REPEATED = ("ssm",)  # keys of flags that may be given several times
# Which value counts where several flags of one key are given, in the order of the table; of other keys one flag is.
JOINED: Mapping[str, Callable[[Sequence[str]], str]] = {
    "ssm": ",".join,
    "max_length": lambda values: min(values, key=int),
    "temperature": lambda values: values[-1],
}


@dataclass(frozen=True)
class SpecInferConfig(CommandKeys):
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
        quoted = (shlex.quote(_as_moved(word)) for word in self.words)
        return " ".join(["bash run_pipe.sh", *quoted])


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


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """The flags that say the same as options of the Python API; of two options with one flag the later counts.

    Raises ValueError for an option that is unknown.
    """
    small = options.get("ssms", [])
    if not fits(small, [{"ssm_model": str}]):
        raise ValueError('ssms is no list of small models: write each as {"ssm_model": "DIR"}')
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        if name not in (*OPTIONS, "ssms"):
            remedy = nearest(name, OPTIONS) or f"choose among {', '.join(OPTIONS)}"
            raise ValueError(f"unknown option {name}: {remedy}")
        if name in OPTIONS:
            chosen[OPTIONS[name]] = value
    words = []
    for flag, value in chosen.items():
        is_said = value is not None and value is not False and value != ""
        if is_said:
            words += [f"-{flag}", f"{value}"] if BY_NAME[flag].takes else [f"-{flag}"]
    for ssm in small:
        words += ["-ssm-model", ssm["ssm_model"]]
    return words


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
             f"  {command} {CONFIG_FILE.typed}", "",
             f"{CONFIG_FILE.typed}: {CONFIG_FILE.about}; each is a flag by another name.",
             "", "flags, and the keys of bash run_pipe.sh that they set:"]
    lines += [_row(flag) for flag in known if flag.key]
    lines += ["", "flags without a meaning here, which are named and ignored:"]
    for about in dict.fromkeys(flag.about for flag in known if not flag.key):
        alike = ", ".join(flag.typed for flag in known if flag.about == about)
        lines.append(f"  {alike}: {about}")
    return "\n".join(lines)


def _row(flag: Flag) -> str:
    key = f"{flag.key}="
    return f"  {flag.typed:<35} {key:<16} {flag.about}"


# --- flags ------------------------------------------------------------------------------------------------------------

def _given(argv: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """The flags with their values, and the words key=value, in the order in which they were typed."""
    found, own, words = [], [], iter(argv)
    for word in words:
        if word.startswith("-"):
            flag = _flag(word)
            value = _value(flag, word, next(words, "")) if flag.takes else ""
            found += [(flag, value)] if flag != CONFIG_FILE else _given(_in_file(value))[0]
        elif "=" in word:
            own.append(word)
        else:
            raise ValueError(f"{word} stands behind no flag: write -FLAG VALUE, or key=value")
    return found, own


def _in_file(path: str) -> list[str]:
    """The flags that a file of options stands for."""
    options = read_json(path, TABLE)
    if not isinstance(options, dict):
        raise ValueError(f"{path} is no table of options: {TABLE}")
    return flags_of(options)


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
    written = [flag.written(value) for flag in ordered for value in found[flag]]
    return JOINED[key](written) if key in JOINED else written[0]


def _dashed(flag: Flag) -> str:
    return flag.typed.split()[0]


def _as_typed(flag: Flag, value: str) -> str:
    return f"{_dashed(flag)} {value}".rstrip()


# --- keys -------------------------------------------------------------------------------------------------------------

def _words(program: str, keys: Keys, own: Sequence[str]) -> list[str]:
    """The words of a run: those that the flags make, those that were typed as keys, and SpecInfer's own defaults."""
    beside = typed(own)
    root = {"models": str(MODELS), **beside, **keys}["models"]
    found = _placed(keys, root)
    prompts = found.get("question_file", ".json")
    if not prompts.endswith(".json"):
        raise ValueError(f"-prompt {prompts} is no file .json: name one that holds a JSON list of texts")
    if prompts == found.get("lines"):
        raise ValueError(f"-output-file {prompts} is the prompt file: choose another -output-file")
    if program == SPEC_INFER and "base_dir" in found and "ssm" not in {**found, **beside}:
        raise ValueError(f"-llm-model {found['base_dir']} has no small model beside it: add -ssm-model DIR, or take "
                         f"scripts/{INCR_DECODING}.sh")
    usual = {"pipeline_type": PROGRAMS[program], "max_length": LENGTH}
    if "question_file" in found:
        usual["template"] = "none"  # prompts of a file stand as they are
    usual["max_new_tokens"] = {**usual, **found, **beside}["max_length"]
    made = {**usual, **found}
    for key in usual.keys() & beside.keys() - found.keys():
        del made[key]
    return [*(f"{key}={value}" for key, value in made.items()), *own]


def _placed(keys: Keys, root: str) -> dict[str, str]:
    """The same keys, with folders in place of the names of models."""
    found = dict(keys)
    if "ssm" in found:
        names = found["ssm"].split(",")
        found["ssm"] = ",".join(_folder(name, root) for name in names)
    if "base_dir" in found:
        folder = _folder(found.pop("base_dir"), root)
        is_split = Path(folder, "stage_0").is_dir()
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
