"""Prompts in the formats of public data sets, out of local files."""
import json

import pytest

from config.questions import BUNDLED_FOLDER
from eval.prompts import FORMATS, DrawnPrompt, draw
from tests.checkpoints import refused

ENTRIES = {
    "cnn_dailymail": {"article": "It rained.", "highlights": "Rain."},
    "alpaca": {"instruction": "Sort.", "input": "b a", "output": "a b"},
    "mbpp": {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
    "mbpp_docstring": {"prompt": "Add two numbers.", "test_list": ["assert add(1, 2) == 3"]},
    "openai_humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n"}}


def save(folder, form, *entries, name="data.jsonl"):
    path = folder / name
    lines = [json.dumps(entry) for entry in entries]
    path.write_text(f"[{', '.join(lines)}]" if path.suffix == ".json" else "\n".join(lines))
    return f"{form}:{path}"


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
@pytest.mark.parametrize("form", FORMATS)
def test_an_entry_of_each_data_set_becomes_a_prompt_that_needs_no_template(form, name, tmp_path):
    [prompt] = draw(save(tmp_path, form, ENTRIES[form], name=name),
                    "", 0, seed=0)
    first = next(value for key, value in ENTRIES[form].items() if key != "task_id")
    assert prompt.ready and first in prompt.text


def test_the_prompts_are_those_of_the_formats(tmp_path):
    def text(form, entry=None):
        return draw(save(tmp_path, form, entry or ENTRIES[form]),
                    "", 1, seed=0)[0].text

    assert text("cnn_dailymail") == "Summarize:\nIt rained.\nSummary:\n"
    assert text("openai_humaneval") == "def add(a, b):\n"
    assert text("mbpp_docstring") == '"""\nAdd two numbers.\nassert add(1, 2) == 3\n"""\n'
    assert text("mbpp").endswith("Add two numbers.\nIt must pass this test:\nassert add(1, 2) == 3\nWrite the function "
                                 "between [PYTHON] and [/PYTHON]. [/INST]\n[PYTHON]\n")
    assert text("mbpp").count("[INST]") == 2  # an example and the task
    assert text("alpaca").endswith("### Instruction:\nSort.\n\n### Input:\nb a\n\n### Response:\n")
    assert text("alpaca", {"instruction": "Sort.", "input": ""}).endswith("### Instruction:\nSort.\n\n### Response:\n")
    assert "Input" not in text("alpaca", {"instruction": "Sort."})


def test_the_seed_draws_prompts_and_0_takes_all(tmp_path):
    name = save(tmp_path, "openai_humaneval", *({"prompt": f"{i}"} for i in range(20)))
    first, again, other = (draw(name, "", 5, seed) for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == 5
    assert sorted(draw(name, "", 0, 1)) == sorted(DrawnPrompt(str(i), True) for i in range(20))
    assert draw("qa", str(BUNDLED_FOLDER), 2, 0)[0].ready is False  # a bundled question, which goes into a template


@pytest.mark.parametrize(("form", "entry", "message"), [
    ("cnn_dailymail", {"text": "x"}, 'write JSON objects with an "article"'),
    ("alpaca", {"input": "x"}, 'with an "instruction"'), ("alpaca", {"instruction": "x", "input": 3}, "line 2"),
    ("mbpp", {"text": "x", "test_list": []}, 'and a "test_list"'),
    ("mbpp", {"test_list": ["x"]}, "line 2"),
    ("mbpp_docstring", "x", "line 2"), ("openai_humaneval", {"prompt": " "}, 'with a "prompt"')])
def test_an_entry_without_its_fields_is_reported_with_its_place_and_the_fix(form, entry, message, tmp_path):
    with refused(message):
        draw(save(tmp_path, form, ENTRIES[form], entry), "", 0, 0)


def test_a_file_without_entries_and_too_many_examples_are_refused(tmp_path):
    with refused("has no entry"):
        draw(save(tmp_path, "mbpp"), "", 0, 0)
    with refused("num_examples=2 are more than the 1 of mbpp"):
        draw(save(tmp_path, "mbpp", ENTRIES["mbpp"]), "", 2, 0)
    (tmp_path / "data.json").write_text("{}")
    with refused("is no list"):
        draw(f"mbpp:{tmp_path / 'data.json'}", "", 0, 0)
    with refused("nowhere.jsonl"):
        draw("mbpp:nowhere.jsonl", "", 0, 0)
