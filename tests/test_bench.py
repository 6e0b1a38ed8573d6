"""Evaluations: what is asked, in which order, what is written, and what an interruption leaves."""
from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from shutil import copytree

import pytest

from config.cli import flat, parse, parts
from config.keys import allowed_values, raw_values
from config.methods import METHODS, Method
from config.presets import ROOT
from config.questions import Question
from config.run_config import RunConfig
from eval import results as results_module
from eval.command import evaluate
from eval.evaluation import Evaluation
from eval.keys import EvalConfig, words
from eval.results import Key, Results, is_same_value, read_answers
from launch.pipeline import Pipeline
from model.sample import Sampler
from model.text import Text
from tests.checkpoints import refused
from tests.json_files import change_json, edited_json, load_json, load_json_lines, save_json
from tests.sources import project_text
from tests.tiny import TINY

TALK = {"question_id": 7, "category": "writing", "turns": ["who are you?", "why?"]}
BRIEF = "methods=ar", "sets=chatbot", "temperatures=0"  # an evaluation of few answers
TIMES = ("tstamp", "ttft", "settled", "launch", "requests", "segments")


@pytest.fixture
def run(saved, tmp_path, monkeypatch):
    """An evaluation in threads, of two methods on one question of two turns and two of one; its exit code."""
    data = tmp_path / "data"
    data.mkdir()
    save_json(data / "mt_bench.jsonl", TALK)
    (data / "chatbot.json").write_text('["hello", "where is it?"]')
    monkeypatch.setattr("eval.evaluation.WARM_UP", 2)
    monkeypatch.setattr("eval.command.report", lambda folder, screen: f"{folder}/report.md")

    def run(results, *more):
        given = raw_values(more)
        usual = ("methods=naive,ar", "sets=mt_bench,chatbot", "temperatures=0,1", "seed=5", "max_new_tokens=6")
        whole = () if "base_dir" in given else (f"model_dir={saved / '0+2+2'}",)
        fixed = (*whole, f"data={data}", "template=none", "link=threads",
                 "dtype=float64", "ignore_eos=true", "init_total_token=8", "width=3")
        return evaluate("emulated", [f"results={tmp_path / results}", *fixed, *more,
                                     *(word for word in usual if word.partition("=")[0] not in given)])

    return run


@pytest.fixture
def answers_of(run, tmp_path):
    """The answers by file of evaluations that are complete; all are in one folder."""
    def evaluate_and_read(*words):
        assert run("a", *words) == 0
        return lines(tmp_path / "a")

    return evaluate_and_read


def lines(folder):
    return {str(path.relative_to(folder)): load_json_lines(path)
            for path in sorted(folder.glob("answers/*/*.jsonl"))}


def timeless(folder):
    """The files without what is another every time."""
    found = lines(folder)
    for line in (line for file in found.values() for line in file):
        for name in TIMES:
            assert line.pop(name) is not None
        assert all(seconds > 0 for seconds in line["choices"][0].pop("wall_time"))
    return found


def test_every_method_answers_every_question_at_every_temperature_by_turns(answers_of, tmp_path, capsys):
    files = answers_of()
    assert list(files) == [f"answers/{method}/{name}-t{t}.jsonl" for method in ("ar", "naive")
                           for name in ("chatbot", "mt_bench") for t in (0, 1)]
    answers = sorted((line for file in files.values() for line in file),
                     key=lambda line: line["tstamp"])
    assert [(line["set"], line["temperature"], line["question_id"], line["method"]) for line in answers] == [
        (name, t, question, method)
        for name, ids in (("mt_bench", [7]), ("chatbot", [0, 1]))
        for t in (0, 1)
        for question in ids for method in ("ar", "naive")]
    assert [line["requests"] for line in answers][:4] == [[2, 3],
                                                          [4, 5], [6, 7], [8, 9]], "0 and 1 warmed up"
    shown = capsys.readouterr()
    assert "answers       12 of at most 6 tokens" in shown.out and f"results       {tmp_path / 'a'}\n" in shown.out
    assert shown.out.endswith(f"tables and plots: {tmp_path / 'a'}/report.md\n")
    assert "100 %" in shown.err


def test_an_answer_has_the_text_of_its_seed_and_the_names_that_spec_bench_reads(answers_of, saved):
    text = Text(saved / "base")
    for file in answers_of("repeats=2", "sets=mt_bench").values():
        assert [(line["repeat"], line["seed"]) for line in file] == [(0, 5), (1, 6)]
        for line in file:
            [choice] = line["choices"]
            sampler = Sampler(line["temperature"], seed=line["seed"])
            first = text.prompt_ids(["who are you?"], "none")
            second = text.prompt_ids(["who are you?", choice["turns"][0], "why?"], "none")
            assert line["token_ids"] == [TINY.text(prompt, 6, sampler) for prompt in (first, second)]
            assert choice["turns"] == [text.decode(ids) for ids in line["token_ids"]]
            assert line["prompt_tokens"] == [len(first), len(second)]
            assert choice["new_tokens"] == [6, 6]
            assert (line["question_id"], line["category"]) == (7, "writing") and choice["index"] == 0
            assert sum(choice["idxs"]) == len(choice["accept_lengths"]) - 2
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - 2, "all but the prefills' tokens"
            assert line["tokens_per_miss"] == [5 / misses for misses in line["misses"]]
            assert line["accepted_length"] == [5 / (last + 1) for last in choice["idxs"]]
            assert line["finish_reason"] == ["length", "length"]
            for settled, seconds, ttft in zip(line["settled"], choice["wall_time"], line["ttft"]):
                assert sum(count for _, count in settled) == 6 and all(count for _, count in settled)
                assert settled[0][0] >= ttft
                assert settled[-1][0] == pytest.approx(seconds) and settled == sorted(settled)
            assert line["same_as_ar"] is (None if line["method"] == "ar" else True)
            assert line["first_difference"] is None and line["emulated"] is False and line["profile"] == "none"


def test_every_field_of_an_answer_stands_in_the_documentation(answers_of):
    ([line],) = answers_of(*BRIEF, "questions=1").values()
    table = project_text("docs/evaluation.md").partition("| field |")[2]
    fields = {*line, *line["choices"][0]} - {"choices", "index"}
    assert [name for name in fields if f"`{name}`" not in table and f"`choices[0].{name}`" not in table] == []


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_files(run, tmp_path, monkeypatch, output_of, capsys):
    assert run("whole") == 0
    add, count = Results.add, iter(range(100))
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # the tests shall stay interruptible

    def fails(self, line):
        if next(count) == 5:
            raise KeyboardInterrupt
        add(self, line)

    monkeypatch.setattr(Results, "add", fails)
    assert run("part") == 130
    assert sum(map(len, lines(tmp_path / "part").values())) == 5
    assert "the same command continues" in capsys.readouterr().err
    last = tmp_path / "part" / "answers" / "ar" / "mt_bench-t1.jsonl"
    last.write_bytes(last.read_bytes()[:-20])  # the power failed while it was written
    monkeypatch.setattr(Results, "add", add)
    assert "of which 4 exist" in output_of(run, "part")
    assert timeless(tmp_path / "part") == timeless(tmp_path / "whole")
    before = lines(tmp_path / "part")
    assert run("part") == 0 and lines(tmp_path / "part") == before, "nothing is done twice"

    env = load_json(tmp_path / "part" / "env.json")
    assert len(env["starts"]) == 3
    assert env["config"]["seed"] == 5 and env["emulated"] is False
    assert {"python", "torch", "transformers"} <= set(env["versions"])
    assert {"cpu", "cores"} <= set(env["machine"])


def test_more_methods_sets_questions_temperatures_and_repeats_may_be_asked_for_later(answers_of):
    before = answers_of(*BRIEF, "questions=1")
    after = answers_of("repeats=2")
    assert sum(map(len, after.values())) == 24
    assert after["answers/ar/chatbot-t0.jsonl"][0] == before["answers/ar/chatbot-t0.jsonl"][0]


def test_results_of_another_configuration_are_refused_in_one_sentence(run, answers_of, tmp_path, sentence_of, capsys):
    before = answers_of(*BRIEF)
    capsys.readouterr()
    assert sentence_of(run, "a", "max_new_tokens=5") == (
        f"flowspec: {tmp_path / 'a'} holds answers with max_new_tokens=6, not 5: choose another results=, or give "
        "max_new_tokens=6\n")
    (tmp_path / "a" / "env.json").unlink()
    assert "has answers, but no env.json" in sentence_of(run, "a")
    assert lines(tmp_path / "a") == before


def test_two_evaluations_do_not_write_into_one_folder(tmp_path):
    config = EvalConfig.of(results=str(tmp_path))
    first = Results(tmp_path).open(config, 1.0)
    with refused("another evaluation writes to"):
        start_results(tmp_path, config)
    first.close()
    start_results(tmp_path, config)


def start_results(folder, config, split_id=""):
    """Begin a results folder, or continue it."""
    Results(folder).open(config, 1.0, split_id).close()


def test_a_spoiled_line_is_named_and_a_half_one_is_cut_off(tmp_path):
    config, path = EvalConfig.of(), Results(tmp_path).path("ar", "qa", 0.0)
    start_results(tmp_path, config)
    path.parent.mkdir(parents=True)
    path.write_text('{"method": "ar"}\n{"half')
    with refused("line 1 of ", "qa-t0.jsonl is no answer: delete this line"):
        start_results(tmp_path, config)
    assert path.read_text() == '{"method": "ar"}\n'
    assert results_module.current_commit() is None or len(results_module.current_commit()) >= 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_difference_from_ar_is_shown_with_how_much_the_target_prefers_its_token(saved, tmp_path, temperature):
    options = {"model_dir": str(saved / "0+2+2"), "template": "none", "max_new_tokens": 6, "ignore_eos": True,
               "seed": 3, "link": "threads", "dtype": "float64"}
    tiny, config = TINY, EvalConfig.of(methods="naive", sets="a", temperatures=f"{temperature}", **options)
    text, question = Text(saved / "base"), Question(1, "", ("hello",))
    prompt, sampler = text.prompt_ids(["hello"], "none"), Sampler(temperature, seed=3)
    right = tiny.text(prompt, 6, sampler)
    wrong = [*right[:4], (right[4] + 1) % 53, *right[5:]]
    with Pipeline.open("toy", pipeline_type="naive", **options) as pipeline:
        results = Results(tmp_path).open(config, 1.0)
        results.texts[Key("ar", "none", "a", temperature, 0, 1)] = [wrong]
        Evaluation(config, pipeline).run({"a": [question]}, results)
        results.close()
        assert pipeline.ring.num_closed_requests == 3
    [line] = lines(tmp_path)[f"answers/naive/a-t{temperature:g}.jsonl"]
    margin = line["first_difference"].pop("margin")
    assert line["token_ids"] == [right] and line["same_as_ar"] is False
    assert line["first_difference"] == {"turn": 0, "position": 4, "token": right[4], "ar_token": wrong[4]}
    row = tiny.logits([*prompt, *right[:4]])[-1]
    if temperature == 0:
        assert margin == pytest.approx(float(row[wrong[4]] - row[right[4]]))
    assert margin < 0, "the target sides with the method here, since what ar is said to have written is wrong"


def test_every_method_answers_with_every_draft_over_one_start_and_ar_once(answers_of, saved, tmp_path):
    head, model = f"eagle:{saved / 'head'}", f"model:{saved / 'base'}"
    asked = ("sets=chatbot", "temperatures=1", "questions=1", f"drafts={head},eagle,{model},none")
    answers = [line for file in answers_of("methods=naive,ar,continuous", *asked).values() for line in file]
    drafts = (head, "eagle", model, "none")
    assert {(line["method"], line["draft"]) for line in answers} == {
        ("ar", "none"), *((method, draft) for method in ("naive", "continuous") for draft in drafts)}
    assert len(answers) == 9 and len({line["launch"] for line in answers}) == 1
    assert all(line["same_as_ar"] in (None, True) for line in answers)
    means = {line["draft"]: line["accepted_length"] for line in answers if line["method"] == "naive"}
    assert means[head] == means["eagle"] and means[model] > means["eagle"], "the model is the target itself"
    assert means["none"] == [1.0]
    same_answers = answers_of("methods=naive,ar,continuous", *asked[:3], "drafts=eagle")
    assert sum(map(len, same_answers.values())) == 9, "all of it is there"
    tally = load_json_lines(next((tmp_path / "a").glob("tally/*/rank_0.jsonl")))
    for line in answers:
        flight = tally[line["requests"][0]]["flight"]
        assert flight["misses"] == line["misses"][0] and flight["rows"] <= 6


def test_a_draft_is_named_by_its_kind_and_folder():
    config = EvalConfig.of(drafts="eagle:/a,model:/b,eagle", methods="ar,naive")
    assert [tuple(parts(name)) for name in config.asked_drafts] == [
        ("eagle", "/a", ""), ("model", "", "/b"), ("eagle", "", "")]
    assert [config.with_draft(name).draft_dir for name in config.asked_drafts] == ["", "/b", ""]
    assert [EvalConfig.of(drafts=names).first_draft for names in ("eagle:/a,none,eagle", "model:/b", "")] == [
        "none", "none", "eagle"]
    assert EvalConfig.of(draft="model", draft_dir="/c", drafts="eagle,model").with_draft("model").draft_dir == "/c"
    assert EvalConfig.of(draft="model", draft_dir="/c", drafts="eagle,model").first_draft == "model"
    assert config.contenders(["ar"]) == [("ar", "none")]
    assert len(config.contenders(["ar", "naive"])) == 4


def test_a_head_that_does_not_fit_is_reported_by_its_folder(run, saved, tmp_path, error_of):
    copytree(saved / "head", tmp_path / "other")
    change_json(tmp_path / "other" / "config.json", hidden_size=64)
    printed = error_of(run, "a", "methods=naive", f"drafts=eagle,eagle:{tmp_path / 'other'}").splitlines()[-1]
    head = f"the draft head in {tmp_path / 'other'}"
    assert printed.startswith(f"flowspec: {head} has hidden_size 64, but the model has 32")


def test_decoders_of_one_draft_share_it_and_another_folder_is_another_draft(saved):
    options = {"model_dir": saved / "0+2+2", "template": "none", "link": "threads", "dtype": "float64"}
    with Pipeline.open("toy", **options) as pipeline:
        usual, naive = pipeline.decoder, pipeline.decoder_for(replace(pipeline.config, pipeline_type="naive"))
        other = pipeline.decoder_for(pipeline.config, head=str(saved / "head"))
        model = pipeline.decoder_for(replace(pipeline.config, draft="model", draft_dir=str(saved / "base")))
        assert naive.draft is usual.draft
        assert len({id(decoder.draft) for decoder in (usual, other, model)}) == 3
        assert len(pipeline.drafts) == 3


def test_a_talk_that_does_not_fit_is_refused_before_the_first_answer(run, tmp_path, error_of):
    printed = error_of(run, "a", "max_length=20")
    assert "question 7 of mt_bench needs up to 22 tokens before its last answer, but the context has 20" in printed
    assert lines(tmp_path / "a") == {}


def test_every_method_is_evaluated_and_writes_the_text_of_plain_decoding(answers_of, saved):
    model = f"base_dir={saved / 'base'}", f"eagle_dir={saved / 'head'}", f"ssm={saved / 'base'}", "stages=0+2+2"
    asked = f"methods={','.join(METHODS)}", "sets=chatbot", "questions=1", "temperatures=1"
    written = answers_of(*asked, *model, "max_new_tokens=4")
    assert [*written] == sorted(f"answers/{method}/chatbot-t1.jsonl" for method in METHODS)
    assert {line["same_as_ar"] for (line,) in written.values()} == {None, True}


def test_methods_of_another_target_get_a_start_of_their_own(monkeypatch):
    monkeypatch.setitem(METHODS, "tp", Method("serial", "tp", "eagle", ""))
    monkeypatch.setitem(METHODS, "two", Method("serial", "ring", "two", ""))
    monkeypatch.setattr(allowed_values(RunConfig)["pipeline_type"], "names", tuple(METHODS))
    assert EvalConfig.of(methods="tp,naive,ar,serial").groups == [("ar", "naive", "serial"), ("tp",)]
    assert EvalConfig.of(methods="naive,two,ar").groups == [("ar", "naive"), ("two",)]
    assert EvalConfig.of(methods="ar").groups == [("ar",)]


def test_specinfer_has_a_start_and_a_draft_of_its_own():
    config = EvalConfig.of(methods="ar,serial,specinfer", drafts="eagle,model:DIR")
    assert config.groups == [("ar", "serial"), ("specinfer",)]
    assert config.contenders(["specinfer", "ar"]) == [("specinfer", "ssm"), ("ar", "none")]
    assert config.with_draft("ssm").draft == "ssm"
    assert EvalConfig.of(methods="ar,specinfer", verify="mss").run.verify == "mss"
    assert parse(["drafts=eagle,ssm", "ssm=a,b"], keys_class=EvalConfig).asked_drafts == ("eagle", "ssm")
    with refused("verify=mss needs guesses that are drawn, but naive chooses"):
        EvalConfig.of(methods="ar,naive,specinfer", verify="mss")


@pytest.mark.parametrize("protocol, given, expected", [
    ("emulated", [], {"profile": "jetson-7b", "questions": "5", "max_new_tokens": 64, "stages": "0+2+2+2+2"}),
    ("emulated", ["smollm2"], {"profile": "jetson-7b", "questions": "5", "max_new_tokens": 128, "stages": "0+7+7+8+8",
                               "drafts": "", "baseline_draft": "", "results": str(ROOT / "results" / "smollm2")}),
    ("emulated", ["profile=wifi"], {"profile": "wifi", "questions": "5"}),
    ("tensor-parallel", ["data=there"], {"profile": "jetson-7b", "questions": "5"}),
    ("paper-7b", [], {"questions": "", "max_new_tokens": 256, "stages": "0+8+8+8+8"}),
    ("paper-7b", ["data=there"], {"questions": "30:50"}),
    ("boards-7b", ["hosts=there"], {"hosts": os.path.abspath("there"), "methods": "naive,pipedec,continuous"}),
    ("paper-13b", ["vicuna-13b", "data=there", "questions=2"], {"questions": "2", "quant": "fp4"}),
])
def test_a_protocol_fills_in_what_the_words_leave_open(protocol, given, expected):
    config = parse(words(protocol, given), keys_class=EvalConfig)
    assert {name: flat(config)[name] for name in expected} == expected
    assert config.run.tree == RunConfig().tree, "the trees are the paper's"


@pytest.mark.parametrize("words, sentence", [
    (["methods=ar,nave"], "nave is unknown: choose one of ar"),
    (["sets=mt_bench,moon"], "there is no data set moon"),
    (["temperatures=0,hot"], "hot is not possible: give 0 for the likeliest token or a number"),
    (["temperature=1"], "temperature is a key of single runs: write temperatures="),
    (["sets=../qa"], "../qa is no name of a data set: name its folder with data="),
    (["drafts=eagle,x"], "drafts=eagle,x: draft=x is unknown: choose"),
    (["drafts=none:x"], "none:x names a folder, but only eagle, dflash, dspark, model take one here: write none"),
    (["drafts=model:"], "model: names no folder: write model:DIR, or only model"),
    (["drafts=eagle:nowhere"], "nowhere: give that of a draft head or a small model"),
    (["drafts=eagle", "baseline_draft=x"], "baseline_draft=x: draft=x is unknown: choose"),
    (["drafts=eagle", "draft=model", "draft_dir=x"], "is ignored with drafts=eagle: write model:DIR there"),
    (["pipeline_type=naive"], "write methods=NAME,NAME"),
    (["questions=30:50"], "leaves no question of"),
])
def test_a_mistake_is_answered_by_one_sentence_before_anything_starts(tmp_path, sentence_of, words, sentence):
    assert sentence in sentence_of(evaluate, "emulated", [f"results={tmp_path / 'r'}", *words])
    assert not (tmp_path / "r").exists()


def test_results_that_cannot_be_written_are_reported_before_the_start(run, tmp_path, monkeypatch, error_of):
    monkeypatch.setattr("eval.command.run", lambda *_: pytest.fail("it started"))
    (tmp_path / "file").write_text("old")
    for name, reason in (("file", "File exists"), ("file/x", "Not a directory"), ("x" * 300, "File name too long")):
        assert error_of(run, name) == (
            f"flowspec: {tmp_path / name} cannot be written ({reason}): choose another results=\n")
    assert (tmp_path / "file").read_text() == "old"


def test_an_answer_that_fills_the_disk_is_one_sentence_and_is_asked_again(run, tmp_path, monkeypatch, error_of):
    add, count = os.fsync, iter(range(99))

    def full(file):
        if next(count) == 4:  # the first is that of env.json
            raise OSError(28, "No space left on device")
        add(file)

    monkeypatch.setattr(results_module.os, "fsync", full)
    printed = error_of(run, "a", *BRIEF[:2])
    assert "cannot be written (No space left on device): make room there" in printed and "Traceback" not in printed
    assert run("a", *BRIEF[:2]) == 0


def test_a_report_that_cannot_be_written_is_reported_and_the_answers_stay(run, monkeypatch, error_of):
    def fail(folder, screen):
        raise ValueError("summary.csv cannot be written")

    monkeypatch.setattr("eval.command.report", fail)
    printed = error_of(run, "a", *BRIEF)
    assert "flowspec: summary.csv cannot be written\nflowspec: the answers so far are kept" in printed


@pytest.mark.parametrize("junk", ["null", "[]", "[" * 100_000, '{"config": {}}'])
def test_an_env_json_that_is_junk_is_reported(run, tmp_path, junk, error_of, capsys):
    assert run("a", *BRIEF) == 0
    (tmp_path / "a" / "env.json").write_text(junk)
    capsys.readouterr()
    assert error_of(run, "a", *BRIEF).startswith(f"flowspec: {tmp_path / 'a' / 'env.json'} is ")


def begun(folder):
    """A folder of results in which one file of answers was begun."""
    path = Results(folder).path("ar", "qa", 0)
    path.parent.mkdir(parents=True)
    path.touch()
    return folder


def test_a_folder_without_answers_takes_another_configuration(tmp_path):
    start_results(tmp_path, EvalConfig.of(seed=1), "split-a")
    start_results(tmp_path, EvalConfig.of(seed=2), "split-b")
    assert load_json(tmp_path / "env.json")["config"]["seed"] == 2
    with refused("holds answers with seed=2, not 1"):
        Results(begun(tmp_path)).check(EvalConfig.of(seed=1))


def test_a_folder_of_answers_may_be_copied_to_another_clone_of_the_project(tmp_path):
    ours = f"{ROOT}/toy/draft_a,{ROOT}/toy/draft_b"
    assert is_same_value(ours, "/old/toy/draft_a,/old/toy/draft_b") and is_same_value("/models/a", "/models/a")
    for other in ("/old/toy/draft_a,/new/toy/draft_b", "/old/toy/draft_a", "/toy/draft_a,/toy/draft_b", "", 5):
        assert not is_same_value(ours, other)
    assert not is_same_value("/models/a", "/old/models/a")

    config = EvalConfig.of(base_dir=str(ROOT / "toy" / "llama"))
    start_results(tmp_path, config, "split-a")
    begun(tmp_path)
    for folder in ("/old/toy/llama", "/old/toy/eagle"):
        with edited_json(tmp_path / "env.json") as content:
            content["config"]["base_dir"] = folder
        with refused(f"holds answers with base_dir={folder}, not {ROOT}") if "eagle" in folder else nullcontext():
            Results(tmp_path).check(config)


def test_answers_of_another_model_go_into_another_folder(tmp_path):
    config = EvalConfig.of(pipeline_type="naive")
    start_results(tmp_path, config, "split-a")
    begun(tmp_path)
    start_results(tmp_path, EvalConfig.of(pipeline_type="tp"), "split-of-tp")
    start_results(tmp_path, config, "split-a")
    with refused("holds answers of another model"):
        start_results(tmp_path, config, "split-b")


def test_answers_of_an_earlier_version_go_into_another_folder(tmp_path):
    start_results(tmp_path, EvalConfig.of())
    with edited_json(tmp_path / "env.json") as environment:
        environment["config"]["none_expand"] = True
    with refused("of an earlier version, with the key none_expand: choose another results="):
        Results(begun(tmp_path)).check(EvalConfig.of())


def test_an_answer_that_stands_twice_is_named(run, tmp_path):
    assert run("a", *BRIEF, "questions=1") == 0
    path = next((tmp_path / "a" / "answers").glob("*/*.jsonl"))
    path.write_text(path.read_text() * 2)
    with refused("line 2 of ", " repeats the answer of line 1"):
        list(read_answers(path))
