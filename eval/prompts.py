"""Prompts for measurements: questions of a data set, or entries of a public one in the words of a known prompt format.

A set is a NAME, whose questions `questions.py` reads, or FORMAT:FILE, a file whose
entries have the fields that the data set of the format has at Hugging Face. The formats are those that the paper on
distributed speculative inference measures with; the words around an entry are ours where its own are not known.
"""
from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from config import questions
from config.files import fits, lines, whole

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
    """What a model is asked; `ready` says that it needs no template of conversations around it."""

    text: str
    ready: bool


class Format(NamedTuple):
    """How an entry of a data set becomes a prompt, what it must hold for that, and this in words."""

    write: Callable[[Entry], str]
    form: Any  # see `fits` in config/files.py
    needs: str


def _alpaca(entry: Entry) -> str:
    given = entry.get("input")
    beside = ", paired with an input that provides further context" if given else ""
    parts = [f"{INSTRUCTED}{beside}. {ANSWERED}", f"### Instruction:\n{entry['instruction']}"]
    parts += [f"### Input:\n{given}"] if given else []
    return "\n\n".join([*parts, "### Response:\n"])


def _task(entry: Entry) -> dict[str, str]:
    """Text and first test of a task of MBPP, whose sanitized half calls the text otherwise."""
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
    """What is wrong with the names of sets, each in a sentence that names the fix."""
    for name in sets:
        form, colon, path = name.partition(":")
        if colon and form not in FORMATS:
            yield f"sets: {form} is no format of prompts: choose among {', '.join(FORMATS)}"
        elif colon and not path:
            yield f"sets: {name} names no file: write {form}:FILE"
        elif not colon and "/" in name:
            yield f"sets: {name} is no name of a data set: name its folder with data=, or write FORMAT:FILE"


def draw(name: str, data: str, count: int, seed: int) -> list[Prompt]:
    """So many prompts of a set, drawn with the seed, or all if `count` is 0; `data` is the folder of sets with a name.

    Raises ValueError, with the place and the fix, if the set is not there, not sound or too short.
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
    """All entries of a file as prompts: one JSON object a line, or a list of them in a file .json."""
    form = FORMATS[name]
    remedy = f"write JSON objects with {form.needs}, one a line, or a list of them into a file .json"
    kind = "entry" if path.suffix == ".json" else "line"
    entries = whole(path, remedy) if kind == "entry" else list(lines(path, remedy))
    if not isinstance(entries, list):
        raise ValueError(f"{path} is no list: {remedy}")
    if not entries:
        raise ValueError(f"{path} has no entry: {remedy}")
    for number, entry in enumerate(entries, 1) if kind == "entry" else entries:
        is_sound = fits(entry, form.form) and fits(entry.get("input") or "", str)
        if not is_sound:
            raise ValueError(f"{kind} {number} of {path} is none of {name}: {remedy}")
        yield form.write(entry)
