"""pipeline_type=auto: a plan at the first start, what later starts remember, and what it does not take."""
from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from config.cli import parse
from config.files import write_json
from config.serve_config import ServeConfig
from eval.command import evaluate
from eval.keys import EvalConfig
from eval.keys import words as evaluation
from eval.plan import auto as planner
from eval.plan import plan as planning
from eval.plan.candidates import Candidate
from eval.plan.keys import PlanConfig
from eval.plan.measure import check
from eval.plan.trial import Trial
from launch import auto
from launch.auto import plan_words, with_chosen
from launch.pipeline import Pipeline
from launch.run import run
from launch.words import HEADLESS_REASON, resolve
from scripts import generate
from tests.checkpoints import refused
from tests.test_plan import SITE, book, config_of, spent

SERIAL = {"pipeline_type": "serial", "draft": "suffix", "stages": "0+8", "init_depth": "3"}
CHOICE = {"keys": SERIAL, "kind": "measured", "tokens_per_second": 20.0, "plain_tokens_per_second": 10.0}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The words of every plan that is made, each of which chooses the same; the cache is a folder of the test."""
    found = []

    def planned(words):
        found.append(words)
        return CHOICE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "planner", planned)
    return found


def settled(words, kind=None):
    """The words that start the ranks, without the kernel, which depends on the machine."""
    return [word for word in resolve(words, kind).words if not word.startswith("kernel=")]


def kept(folder):
    return sorted((folder / "cache" / "flowspec").glob("*.json"))


# --- what is remembered -----------------------------------------------------------------------------------------------

def test_the_first_start_plans_and_says_so_and_later_ones_remember(asked, tmp_path, capsys):
    words = settled(["toy", "pipeline_type=auto", "prompt=Hello", "temperature=1"])
    chosen = [f"{key}={value}" for key, value in SERIAL.items()]
    assert words == ["toy", "prompt=Hello", "temperature=1", "template=vicuna", *chosen]
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and "measured on this machine" in printed[0]
    assert "20 tokens/s measured, 10 with ar" in printed[1] and str(kept(tmp_path)[0]) in printed[1]
    assert settled(["toy", "pipeline_type=auto", "temperature=1", "max_new_tokens=9"])[-1] == "init_depth=3"
    assert "remembered in" in capsys.readouterr().err and len(asked) == 1
    assert settled(["toy", "pipeline_type=serial"]) == ["toy", "pipeline_type=serial", "template=vicuna"]
    with pytest.raises(SystemExit, match="0"):
        settled(["pipeline_type=auto", "--help"])


def test_another_machine_profile_draft_key_code_or_file_of_the_model_is_planned_for_again(asked, tmp_path, monkeypatch):
    model = tmp_path / "llama"
    shutil.copytree(parse([]).base_dir, model)
    words = [f"base_dir={model}", "pipeline_type=auto"]
    for more in ([], ["profile=lan-1g"], ["profile=wifi"], ["draft=suffix"], ["dtype=float64"], ["stages=0+4+4"],
                 ["temperature=1"]):
        settled([*words, *more])
        settled([*words, *more, "seed=3", "time=virtual"] if "profile=wifi" in more else [*words, *more])
    assert len(asked) == 7 == len(kept(tmp_path))
    os.utime(model / "config.json", (1, 1))
    settled(words)
    monkeypatch.setattr(auto, "code_version", lambda: "other")
    settled(words)
    monkeypatch.setattr(auto, "_machine", lambda: ["other"])
    settled(words)
    settled([*words, "profile=wifi"])
    settled([*words, "profile=wifi"])
    assert len(asked) == 11, "a profile is the same on every machine"


@pytest.mark.parametrize("damage", [
    "no JSON", "[]", '{"keys": {}}', None,
    '{"keys": {"pipeline_type": "none"}, "kind": "", "tokens_per_second": 1, "plain_tokens_per_second": 1, "when": ""}',
    '{"keys": {"pipeline_type": "ar", "trace": "x"}, "kind": "", "tokens_per_second": 1, "plain_tokens_per_second": 1, '
    '"when": ""}'])
def test_what_holds_no_choice_is_planned_again(asked, tmp_path, capsys, damage):
    settled(["pipeline_type=auto"])
    path, = kept(tmp_path)
    if damage is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(damage)
    assert settled(["pipeline_type=auto"])[-1] == "init_depth=3"
    assert len(asked) == 2 and "a new plan is made" in capsys.readouterr().err
    settled(["pipeline_type=auto"])
    assert len(asked) == 2 + (damage is None), "a folder in the way is found each time"


def test_a_program_that_makes_no_plans_remembers_those_of_others_and_names_the_ways_to_one(asked, monkeypatch):
    settled(["pipeline_type=auto"])
    monkeypatch.setattr(auto, "planner", None)
    assert settled(["pipeline_type=auto"])[-1] == "init_depth=3"
    with refused("call eval.plan.auto.allow_plans() before, or run bash run_pipe.sh with the same keys once"):
        settled(["pipeline_type=auto", "temperature=1"])


@pytest.mark.parametrize("cache", ["file", "n" * 300])
def test_a_cache_that_can_hold_nothing_is_planned_without(asked, tmp_path, monkeypatch, capsys, cache):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    assert settled(["pipeline_type=auto"])[-1] == "init_depth=3" and len(asked) == 1
    assert "not remembered, since" in capsys.readouterr().err


def test_of_two_starts_at_once_one_plans_and_the_other_waits_for_its_choice(asked, tmp_path, monkeypatch, capsys):
    flock, planned = fcntl.flock, auto.planner
    second = threading.Thread(target=lambda: settled(["pipeline_type=auto"]))
    waits = threading.Event()

    def watched(file, how):
        if how == fcntl.LOCK_EX:
            waits.set()
        flock(file, how)

    def slow(words):
        second.start()
        assert waits.wait(60), "the second start planned, too"
        return planned(words)

    monkeypatch.setattr(fcntl, "flock", watched)
    monkeypatch.setattr(auto, "planner", slow)
    settled(["pipeline_type=auto"])
    second.join(60)
    assert len(asked) == 1 and "another start is planning" in capsys.readouterr().err


def test_a_pipeline_a_command_and_a_server_take_the_chosen_method(asked, capsys):
    with Pipeline.open("toy", pipeline_type="auto", link="threads", stages="0+8") as pipeline:
        assert (pipeline.config.pipeline_type, pipeline.config.draft) == ("serial", "suffix")
        text = pipeline.generate("What does a baker do?", max_new_tokens=9)
    words = ["pipeline_type=auto", "link=threads", "stages=0+8", "prompt=What does a baker do?", "max_new_tokens=9"]
    assert run(generate.GENERATE, words) == 0
    assert text.text.strip() in capsys.readouterr().out
    assert "pipeline_type=serial" in settled(["pipeline_type=auto", "port=0"], ServeConfig)
    assert evaluate("emulated", ["pipeline_type=auto"]) == 2
    assert "write methods=NAME,NAME" in capsys.readouterr().err


# --- the template and the draft ---------------------------------------------------------------------------------------

def test_template_and_draft_are_judged_by_the_files_of_the_model_wherever_they_are_left_open(tmp_path, capsys):
    model = tmp_path / "llama"
    shutil.copytree(parse([]).base_dir, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    words, found = [f"base_dir={model}", "stages=2"], ["template=own", "draft=suffix"]
    for kind in (None, ServeConfig, EvalConfig):
        assert settled(words, kind) == [*words, *found]
    assert settled([*words, "prompt_ids=1"])[3:] == found[1:]
    assert settled([*words, "pipeline_type=ar"])[3:] == found[:1] == settled([*words, "drafts=none"], EvalConfig)[3:]
    assert settled(["toy", "template=own", "draft=eagle"]) == ["toy", "template=own", "draft=eagle"]
    write_json(tmp_path / "ours.json", {"preset": "toy", "keys": {"base_dir": str(model), "pipeline_type": "ar"}})
    file = [str(tmp_path / "ours.json")]
    assert settled(file) == ["toy", f"base_dir={model}", "pipeline_type=ar", *found[:1]]  # the toy shows a pipeline
    evaluated = parse(settled(evaluation(protocol="emulated", argv=file), EvalConfig), kind=EvalConfig)
    run = evaluated.run
    assert (evaluated.drafts, run.draft, run.template, run.profile) == ("", "suffix", "own", "none")
    assert PlanConfig.of(base_dir=str(model), measure=True).chosen_drafts == ("suffix",)
    resolve(["toy"]).report()
    resolve([*words, "template=none"]).report()
    printed, = capsys.readouterr().err.splitlines()
    assert printed == f"flowspec: draft=suffix, since {HEADLESS_REASON}"


@pytest.mark.parametrize("words, chosen_keys", [
    (["toy"], ("continuous", "eagle")), (["smollm2", "stages=4"], ("continuous", "eagle+suffix")),
    (["toy", "profile=wifi"], ("streaming", "eagle+suffix")), (["toy", "hosts=x"], ("streaming", "eagle+suffix")),
    (["gemma-3-12b", "profile=wifi"], ("streaming", "suffix")), (["toy", "draft=eagle", "profile=wifi"],
                                                                 ("streaming", "eagle")),
    (["toy", "profile=wifi", "pipeline_type=continuous"], ("continuous", "eagle")),
    (["toy", "profile=wifi", "init_depth=3"], ("continuous", "eagle"))])
def test_the_best_method_and_draft_are_the_default_of_a_run_on_several_devices(words, chosen_keys, monkeypatch):
    monkeypatch.setattr("launch.words.fetch", lambda folder: None)
    monkeypatch.setattr("launch.words.words_of_preset", lambda preset, root, raw: [])
    run = parse(settled(words))
    assert (run.pipeline_type, run.draft) == chosen_keys
    if "hosts=x" not in words:
        served = parse(settled(words, ServeConfig), kind=ServeConfig).run
        assert (served.pipeline_type, served.draft) == chosen_keys


@pytest.mark.parametrize("words, expected", [
    (["smollm2"], "1"), (["base_dir=x", "template=none"], "1"), (["toy"], "0+2+2+2+2"), (["smollm2", "stages=3"], "3"),
    (["smollm2", "profile=wifi"], "0+7+7+8+8"), (["smollm2", "hosts=x"], "0+7+7+8+8")])
def test_on_one_machine_a_single_stage_is_the_default(words, expected, monkeypatch):
    monkeypatch.setattr("launch.words.fetch", lambda folder: None)
    assert parse(settled(words)).stages == expected


@pytest.mark.parametrize("words, kernel, expected", [
    (["smollm2"], "native", "threads"), (["smollm2", "stages=1"], "native", "threads"),
    (["smollm2"], "torch", "sockets"), (["smollm2", "stages=2"], "native", "sockets"),
    (["smollm2", "link=sockets"], "native", "sockets"), (["smollm2", "stages=1", "profile=wifi"], "native", "sockets"),
    (["smollm2", "stages=1", "hosts=x"], "native", "sockets")])
def test_a_single_stage_of_native_kernels_needs_no_process(words, kernel, expected, monkeypatch):
    monkeypatch.setattr("launch.words.fetch", lambda folder: None)
    monkeypatch.setattr("launch.words._kernel", lambda typed_kernel: {"kernel": (kernel, "")})
    assert parse(settled(words)).link == expected
    assert parse(settled(words, EvalConfig), kind=EvalConfig).run.link == "sockets"


def test_a_board_has_the_same_defaults_and_an_evaluation_keeps_its_own(monkeypatch):
    evaluated = parse(settled(["toy", "profile=jetson-7b"], EvalConfig), kind=EvalConfig)
    assert (evaluated.run.pipeline_type, evaluated.run.draft, evaluated.asked_drafts) == (
        "continuous", "eagle", ("eagle",))
    monkeypatch.setenv("FLOWSPEC_BOARD", "1")
    run = parse(settled(["toy"]))
    assert (run.pipeline_type, run.draft) == ("streaming", "eagle+suffix")


def test_a_draft_that_needs_a_head_is_refused_where_there_is_none(tmp_path):
    for kind, draft in ((None, "draft=eagle"), (EvalConfig, "drafts=suffix,eagle"), (PlanConfig, "drafts=eagle"),
                        (ServeConfig, "draft=eagle+suffix")):
        with refused("has no draft head: take draft=suffix, which needs none, draft=model or draft=none, or add eagle"):
            parse([f"base_dir={tmp_path}", draft, *["measure=true"] * (kind is PlanConfig)], kind=kind)
    parse([f"base_dir={tmp_path}", "draft=eagle", "pipeline_type=ar"])
    parse([f"base_dir={tmp_path}", "drafts=suffix,eagle:toy/eagle"], kind=EvalConfig)


# --- what the plan is asked -------------------------------------------------------------------------------------------

def test_the_plan_hears_what_the_choice_depends_on_and_keeps_a_split_that_was_named():
    def words(*argv):
        return dict(word.split("=", 1)
                    for word in plan_words(argv, parse([*argv]), 4) if "=" in word)

    here = words("max_length=512", "prompt=x", "seed=2")
    assert here["measure"] == "true" and here["splits"] == "first" and int(here["check"]) > 0
    assert here["max_length"] == "512" and not here.keys() & {"prompt", "seed", "boards"}
    there = words("profile=lan-1g", "stages=0+4+4", "draft=suffix")
    assert (there["splits"], there["boards"], there["drafts"]) == ("given", "4", "suffix")
    assert "measure" not in there and "specinfer" not in there["methods"].split(",")


@pytest.mark.parametrize(("typed", "chosen", "left"), [
    (["draft_dir=x"], {"pipeline_type": "serial", "draft": "model"}, ["draft_dir=x"]),
    (["draft_dir=x"], {"pipeline_type": "serial", "draft": "eagle"}, []),
    (["ssm=a,b"], {"pipeline_type": "specinfer"}, ["ssm=a,b"]),
    (["ssm=a,b"], {"pipeline_type": "streaming", "draft": "ssm"}, ["ssm=a,b"]),
    (["ssm=a,b"], {"pipeline_type": "ar"}, []),
    (["stages=0+2", "pipeline_type=auto"], {"pipeline_type": "ar", "stages": "0+1+1"}, [])])
def test_folders_of_drafts_that_were_not_chosen_are_left_out(typed, chosen, left):
    assert with_chosen(["toy", *typed], chosen) == ["toy",
                                                    *left, *(f"{key}={value}" for key, value in chosen.items())]


@pytest.mark.parametrize(("words", "message"), [
    ("tp=2", "tp=2 is left to pipeline_type=auto"), ("init_depth=2", "is left to"), ("verify=mss", "name the method"),
    ("hosts=x", "for the ranks of one machine"), ("answers=x", "name method and draft"),
    ("promt=x", "did you mean prompt"),
    ("temperature=-1", "is not possible"), ("base_dir=nowhere", "nowhere")])
def test_what_cannot_be_planned_for_is_reported_before_anything_is_measured(asked, capsys, words, message):
    assert run(generate.GENERATE, ["pipeline_type=auto", words]) == 2
    found = capsys.readouterr().err
    assert message in found and len(found.splitlines()) == 1 and asked == []


# --- the plan itself --------------------------------------------------------------------------------------------------

def test_a_plan_in_a_process_of_its_own_chooses_a_method_or_says_why_it_cannot(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "RECORD_KEYS", {"questions": "1", "max_new_tokens": "8", "sets": "gsm8k"})
    monkeypatch.setattr(auto, "planner", None)
    planner.allow_plans()
    words = ["pipeline_type=auto", "profile=lan-1g", "time=virtual", "draft=suffix", "stages=0+8"]
    found = parse(settled(words))
    assert found.stages == "0+8" and found.draft == "suffix"
    capfd.readouterr()
    (tmp_path / "refusing.py").write_text("import sys\nsys.exit('flowspec: did you mean prompt')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(planner, "PLAN", "refusing")
    with pytest.raises(ValueError, match="pipeline_type=auto: did you mean prompt"):
        planner.make_plan(["promt=1"])
    assert capfd.readouterr().err == "", "the one sentence is that of the command"


def test_progress_is_passed_on_and_the_last_sentence_kept(capfd):
    command = [sys.executable, "-c", "import sys; sys.stderr.write('50%\\r100% flow\\nflowspec: no split fits\\n')"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert planner._pass_on_output(process) == "no split fits"
    assert capfd.readouterr().err == "50%\r100% flow\n"


def test_candidates_answer_on_this_machine_and_the_fastest_is_chosen_if_it_is_faster_than_ar(monkeypatch):
    config_here = config_of("boards=1", "methods=serial", "drafts=eagle")
    found = planning.planned(config_here, replace(SITE, factors=(1.0,)), book())
    serial = next(trial.candidate for trial in found.trials if trial.candidate.method == "serial")

    def measured(speed):
        monkeypatch.setattr(planning, "check", lambda config, book, candidates: [
            Trial(one, [spent(100 / (speed if one.method == "serial" else 10.0))], {})
            for one in candidates])
        return planning.checked(here(config_here), found)

    assert measured(20.0).chosen.candidate.method == "serial"
    assert measured(20.0).speeds == (20.0, 10.0)
    assert measured(10.1).chosen.candidate.method == "ar", "a fiftieth faster, at least"
    assert serial in [one.candidate for one in measured(9.0).checked]


def here(config_of_profile):
    """The same plan for this machine."""
    run = replace(config_of_profile.run, profile="none")
    return replace(config_of_profile, run=run, measure=True, check=2)


def test_a_candidate_that_does_not_run_here_is_left_out():
    whole = (((1,),), (8,))
    plain = Candidate("ar", "none", *whole)
    serial = Candidate("serial", "suffix", *whole, (("init_depth", "3"),))
    other = Candidate("serial", "suffix", ((1,), (2,)),
                      (9, 9), (("init_depth", "3"),))  # more layers than there are
    absent = Candidate("serial", "model", *whole, (("init_depth", "3"),))  # of the same split; there is no such draft
    found = check(here(config_of("link=threads")), book(), [plain, other, absent, serial])
    assert [one.candidate for one in found] == [plain, serial]
    assert all(one.speed > 0 for one in found)
