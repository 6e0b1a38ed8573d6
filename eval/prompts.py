"""Prompts for measurements: questions of a data set, or entries of a public one in a known prompt format.

A set is a NAME, with questions that `questions.py` reads, or FORMAT:FILE, a file of entries with the fields of the
format's data set at Hugging Face. The formats are those of the measurements in the paper on distributed speculative
inference; the text around an entry is ours where the paper's own is not known.
"""
from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from config import questions
from config.files import fits, lines, read_json_file

Entry = Mapping[str, Any]
INSTRUCTED = "Below is an instruction that describes a task"
ANSWERED = "Write a response that appropriately completes the request."
TASK = """\
[INST] Write a Python function for this task: {text}
It must pass this test:
{test}
Write the function between [PYTHON] and [/PYTHON]. [/INST]
[PYTHON]
"""
DOCSTRING = '"""\n{text}\n{test}\n"""\n'
SHOT = TASK.format(text="Write a function that doubles a number.", test="assert double(4) == 8") + """\
def double(number):
    return 2 * number
[/PYTHON]
"""


class Prompt(NamedTuple):
    """A prompt of a model; `ready` means that it needs no conversation template."""

    text: str
    ready: bool


class Format(NamedTuple):
    """A format: how an entry of a data set becomes a prompt, the form of an entry, and this form in words."""

    write: Callable[[Entry], str]
    form: Any  # see `fits` in config/files.py
    needs: str


def _alpaca(entry: Entry) -> str:
    given = entry.get("input")
    paired = ", paired with an input that provides further context" if given else ""
    parts = [f"{INSTRUCTED}{paired}. {ANSWERED}", f"### Instruction:\n{entry['instruction']}"]
    parts += [f"### Input:\n{given}"] if given else []
    return "\n\n".join([*parts, "### Response:\n"])


def _task(entry: Entry) -> dict[str, str]:
    """Return the text and first test of an MBPP task; the sanitized half has another name for the text."""
    return {"text": entry.get("text") or entry["prompt"], "test": entry["test_list"][0]}


def _is_task(entry: Any) -> bool:
    named = any(fits(entry, {name: _is_text}) for name in ("text", "prompt"))
    return named and fits(entry, {"test_list": [str]}) and bool(entry["test_list"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


TESTED = 'a "text" or a "prompt", and a "test_list"'
FORMATS = {
    "cnn_dailymail": Format(lambda entry: f"Summarize:\n{entry['article']}\nSummary:\n",
                            {"article": _is_text}, 'an "article"'),
    "alpaca": Format(_alpaca, {"instruction": _is_text}, 'an "instruction", and perhaps an "input"'),
    "mbpp": Format(lambda entry: SHOT + TASK.format(**_task(entry)), _is_task, TESTED),
    "mbpp_docstring": Format(lambda entry: DOCSTRING.format(**_task(entry)), _is_task, TESTED),
    "openai_humaneval": Format(lambda entry: str(entry["prompt"]), {"prompt": _is_text}, 'a "prompt"'),
}


def problems(sets: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the names of sets, one sentence each, with the fix."""
    for name in sets:
        form, colon, path = name.partition(":")
        if colon and form not in FORMATS:
            yield f"sets: {form} is no format of prompts: choose among {', '.join(FORMATS)}"
        elif colon and not path:
            yield f"sets: {name} names no file: write {form}:FILE"
        elif not colon and "/" in name:
            yield f"sets: {name} is no name of a data set: name its folder with data=, or write FORMAT:FILE"


def draw(name: str, data: str, count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts of a set, drawn with the seed, or all if 0; `data` is the folder of sets with a name.

    Raise ValueError, with the place and the fix, if the set is missing, invalid or too short.
    """
    form, colon, path = name.partition(":")
    if colon:
        found = [Prompt(text, True) for text in _texts(Path(path), form)]
    else:
        asked = questions.load(data, name)
        found = [Prompt(question.turns[0], False) for question in asked]
    if count > len(found):
        raise ValueError(f"num_examples={count} are more than the {len(found)} of {name}: give {len(found)} or less, "
                         "or 0 for all")
    return Random(seed).sample(found, count or len(found))


def _texts(path: Path, name: str) -> Iterator[str]:
    """Yield all entries of a file as prompts: one JSON object per line, or a list of them in a .json file."""
    form = FORMATS[name]
    remedy = f"write JSON objects with {form.needs}, one a line, or a list of them into a file .json"
    kind = "entry" if path.suffix == ".json" else "line"
    entries = read_json_file(path, remedy) if kind == "entry" else list(lines(path, remedy))
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no list: {remedy}")
    if not entries:
        raise ValueError(f"{path} has no entry: {remedy}")
    for number, entry in enumerate(entries, 1) if kind == "entry" else entries:
        is_sound = fits(entry, form.form) and fits(entry.get("input") or "", str)
        if not is_sound:
            raise ValueError(f"{kind} {number} of {path} is none of {name}: {remedy}")
        yield form.write(entry)
