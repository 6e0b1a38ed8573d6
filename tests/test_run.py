"""Whole commands: from files, over threads or over processes, to the text, its figures and its timeline."""
from itertools import cycle

import pytest

from model.text import Text
from tests.forked import ranks
from tests.json_files import load_json, save_json_lines
from tests.saved import ASK, FAST, NEW, PROMPT, SPLITS, answer_of, command, here, reference

KEYS = """prompt text token_ids prompt_tokens new_tokens prefill_seconds decode_seconds ttft_seconds tokens_per_second
    misses tokens_per_miss mean_accepted_length acceptance_by_position config""".split()


@pytest.mark.parametrize("method, stages, temperature", [
    *zip("ar serial naive pruned continuous pipedec".split(),
         cycle(SPLITS[:3]), cycle("0011"))])
def test_every_method_writes_the_reference_text_whatever_the_split(saved, tmp_path, method, stages, temperature):
    words = f"model_dir={saved / stages}", f"pipeline_type={method}", f"temperature={temperature}", "dtype=float64"
    assert answer_of(tmp_path, *words, *ASK, *FAST)["token_ids"] == reference(float(temperature))


def typed(saved, folder, stages):
    """The words of a command over these stages, which leaves an output and a trace in the folder."""
    return [f"model_dir={saved / stages}", "pipeline_type=continuous", "temperature=1", f"output={folder / 'out.json'}",
            f"trace={folder / 'trace'}", "dtype=float64", "ablate=thrift", *ASK, *FAST]


def test_the_processes_that_a_person_starts_write_what_threads_write(saved, tmp_path):
    with command(tmp_path, "scripts.generate", *typed(saved, tmp_path, "0+2+2")) as run:
        assert run.end(120) == 0, run.stderr
    is_whole(tmp_path, 3, run.stdout, run.stderr)


def test_five_processes_without_their_launcher_write_the_same(saved, tmp_path):
    with ranks(tmp_path / "ranks", typed(saved, tmp_path, "0+1+1+1+1"), 5) as run:
        assert run.codes(120) == [0] * 5, run.text(0)
        assert [run.text(rank) for rank in range(1, 5)] == [""] * 4
        is_whole(tmp_path, 5, run.text(0, 1), run.text(0))


def is_whole(tmp_path, world, stdout, stderr):
    """Output, trace and what was printed are those of the reference text over so many processes."""
    got = load_json(tmp_path / "out.json")
    assert got["token_ids"] == reference(1.0)
    assert " ".join(map(str, got["token_ids"])) in stdout and "mean accepted length" in stdout
    assert stderr.startswith("trace: ") and len(stderr.splitlines()) == 1
    events = load_json(tmp_path / "trace" / "trace.json")["traceEvents"]
    named = {(event["pid"], event["name"]) for event in events}
    for rank in range(1, world):
        assert {(rank, "forward"), (rank, "prune")} <= named
    assert {(0, "send"), (0, "recv"), (0, "wait"), (0, "grow")} <= named


def test_the_text_is_the_one_that_transformers_writes(saved):
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(saved / "base", dtype=torch.float64)
    llama.generation_config.eos_token_id = None
    ids = llama.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW)[0].tolist()
    assert ids == PROMPT + reference(0)


def test_a_result_has_every_figure_and_the_answer_is_printed(saved, tmp_path, capsys):
    assert here(f"model_dir={saved / '0+2+2'}", "prompt=hello there", "template=none", "temperature=1", "seed=1",
                "max_new_tokens=12", "ignore_eos=true", f"output={tmp_path / 'new' / 'out.json'}") == 0
    got, shown = load_json(tmp_path / "new" / "out.json"), capsys.readouterr()
    assert [key for key in KEYS if key not in got] == []
    assert got["prompt"] == "hello there" and got["config"]["seed"] == 1 and got["prompt_tokens"] == 11
    assert got["new_tokens"] == len(got["token_ids"]) == 12 and got["misses"] > 0
    assert 0 < got["prefill_seconds"] == got["ttft_seconds"] and got["tokens_per_second"] > 0
    assert got["text"] == Text(saved / "base").decode(got["token_ids"])
    assert got["text"] in shown.out
    assert shown.err == ""
    assert [path.name for path in tmp_path.glob("**/*") if path.is_file()] == ["out.json"]


def test_questions_are_answered_turn_by_turn_and_saved_as_they_come(saved, tmp_path, capsys, monkeypatch):
    from launch import ask as generate

    lines = [{"question_id": 7, "turns": ["who?", "why?"]}, {"question_id": 8, "turns": ["where?"]}]
    save_json_lines(tmp_path / "ask.jsonl", lines)
    saves, save = [], generate.save
    monkeypatch.setattr(generate, "save",
                        lambda path, data: (saves.append(len(data)), save(path, data)))
    got = answer_of(tmp_path, f"model_dir={saved / '0+2+2'}", f"question_file={tmp_path / 'ask.jsonl'}",
                    "template=none", "temperature=1", "max_new_tokens=5", "ignore_eos=true", "dtype=float64")
    assert saves == [1, 2, 3] and "100 %" in capsys.readouterr().err
    asked = [(r["question_id"], r["turn"], r["prompt"]) for r in got]
    assert asked == [(7, 0, "who?"), (7, 1, "why?"), (8, 0, "where?")]
    talk = len("who?" + got[0]["text"] + "why?")
    assert [r["prompt_tokens"] for r in got] == [4, talk, 6]
    assert [r["new_tokens"] for r in got] == [5, 5, 5]


def test_an_answer_ends_at_a_stop_string_at_the_end_token_and_at_the_end_of_the_context(saved, tmp_path):
    def answer(*words):
        return answer_of(tmp_path, f"model_dir={saved / '0+2+2'}", "prompt=abc", "template=none", "temperature=1",
                         "dtype=float64", *words)

    long = ("max_new_tokens=60", "ignore_eos=true")
    free = answer(*long, "seed=2")
    stop = free["text"][5:8]
    cut = answer(*long, "seed=2", f"stop={stop}")
    assert cut["text"] == free["text"][:free["text"].index(stop)]
    assert cut["new_tokens"] < 60
    assert free["token_ids"][:cut["new_tokens"]] == cut["token_ids"]
    assert answer("max_length=20", "ignore_eos=true")["new_tokens"] == 17  # 3 tokens of prompt
    seed = next(seed for seed in range(100) if 2 in answer(*long, f"seed={seed}")["token_ids"])
    free, ended = answer(*long, f"seed={seed}"), answer("max_new_tokens=60", f"seed={seed}")
    assert ended["token_ids"] == free["token_ids"][:free["token_ids"].index(2) + 1]
