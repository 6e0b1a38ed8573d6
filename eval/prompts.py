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
from config.questions import is_text

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


class DrawnPrompt(NamedTuple):
    """A prompt of a model; `ready` means that it needs no conversation template."""

    text: str
    ready: bool


class Format(NamedTuple):
    """A format: how an entry of a data set becomes a prompt, the form of an entry, and this form in words."""

    write: Callable[[Entry], str]
    entry_form: Any  # see `fits` in config/files.py
    entry_needs: str


def _alpaca(entry: Entry) -> str:
    entry_input = entry.get("input")
    paired_text = ", paired with an input that provides further context" if entry_input else ""
    prompt_parts = [f"{INSTRUCTED}{paired_text}. {ANSWERED}", f"### Instruction:\n{entry['instruction']}"]
    prompt_parts += [f"### Input:\n{entry_input}"] if entry_input else []
    return "\n\n".join([*prompt_parts, "### Response:\n"])


def _task(entry: Entry) -> dict[str, str]:
    """Return the text and first test of an MBPP task; the sanitized half has another name for the text."""
    return {"text": entry.get("text") or entry["prompt"], "test": entry["test_list"][0]}


def _is_task(entry: Any) -> bool:
    has_text = any(fits(entry, {name: is_text}) for name in ("text", "prompt"))
    return has_text and fits(entry, {"test_list": [str]}) and bool(entry["test_list"])


NEEDS_OF_TASK = 'a "text" or a "prompt", and a "test_list"'
FORMATS = {
    "cnn_dailymail": Format(lambda entry: f"Summarize:\n{entry['article']}\nSummary:\n",
                            {"article": is_text}, 'an "article"'),
    "alpaca": Format(_alpaca, {"instruction": is_text}, 'an "instruction", and perhaps an "input"'),
    "mbpp": Format(lambda entry: SHOT + TASK.format(**_task(entry)), _is_task, NEEDS_OF_TASK),
    "mbpp_docstring": Format(lambda entry: DOCSTRING.format(**_task(entry)), _is_task, NEEDS_OF_TASK),
    "openai_humaneval": Format(lambda entry: str(entry["prompt"]), {"prompt": is_text}, 'a "prompt"'),
}


def problems(sets: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the names of sets, one sentence each, with the fix."""
    for set_name in sets:
        format_name, colon, file_path = set_name.partition(":")
        if colon and format_name not in FORMATS:
            yield f"sets: {format_name} is no format of prompts: choose among {', '.join(FORMATS)}"
        elif colon and not file_path:
            yield f"sets: {set_name} names no file: write {format_name}:FILE"
        elif not colon and "/" in set_name:
            yield f"sets: {set_name} is no name of a data set: name its folder with data=, or write FORMAT:FILE"


def draw(set_name: str, data_dir: str, num_prompts: int, seed: int) -> list[DrawnPrompt]:
    """Return `num_prompts` prompts of a set, drawn with the seed, or all if 0; `data_dir` has the sets with a name.

    Raise ValueError, with the place and the fix, if the set is missing, invalid or too short.
    """
    format_name, colon, file_path = set_name.partition(":")
    if colon:
        prompts = [DrawnPrompt(text, True) for text in _texts(Path(file_path), format_name)]
    else:
        set_questions = questions.load(data_dir, set_name)
        prompts = [DrawnPrompt(question.turns[0], False) for question in set_questions]

    if num_prompts > len(prompts):
        raise ValueError(f"num_examples={num_prompts} are more than the {len(prompts)} of {set_name}: "
                         f"give {len(prompts)} or less, or 0 for all")
    return Random(seed).sample(prompts, num_prompts or len(prompts))


def _texts(path: Path, format_name: str) -> Iterator[str]:
    """Yield all entries of a file as prompts: one JSON object per line, or a list of them in a .json file."""
    prompt_format = FORMATS[format_name]
    remedy = f"write JSON objects with {prompt_format.entry_needs}, one a line, or a list of them into a file .json"
    is_list = path.suffix == ".json"
    entries = read_json_file(path, remedy) if is_list else list(lines(path, remedy))

    if not isinstance(entries, list):
        raise ValueError(f"{path} is no list: {remedy}")
    if not entries:
        raise ValueError(f"{path} has no entry: {remedy}")

    entry_kind = "entry" if is_list else "line"
    numbered_entries = enumerate(entries, 1) if is_list else entries
    for entry_number, entry in numbered_entries:
        is_sound = fits(entry, prompt_format.entry_form) and fits(entry.get("input") or "", str)
        if not is_sound:
            raise ValueError(f"{entry_kind} {entry_number} of {path} is none of {format_name}: {remedy}")
        yield prompt_format.write(entry)
