"""Defaults that depend on the model's files and on the devices, and the method that plans once chose."""
from __future__ import annotations

import shutil
import sys

import pytest

from config.cli import parse
from config.presets import PRESETS, TOY
from config.run_config import RunConfig
from config.serve_config import ServeConfig
from eval.command import evaluate
from eval.keys import EvalConfig
from eval.keys import words as evaluation
from launch.pipeline import Pipeline
from launch.run import run
from launch.words import HEADLESS_REASON, RECOMMENDED_REASON, resolve
from scripts import generate, serve
from tests.checkpoints import refused
from tests.json_files import change_json, save_json
from tests.saved import run_program


def settled(words, keys_class=None):
    """The words that start the ranks, without the kernel, which depends on the machine."""
    return [word for word in resolve(words, keys_class).words if not word.startswith("kernel=")]


def test_a_method_chosen_by_a_plan_is_refused_with_what_to_type_instead(error_of, capsys):
    words = ["toy", "pipeline_type=auto", "prompt=Hello"]
    assert run(generate.GENERATE, words) == 2
    assert serve.main([*words[:2], "port=0"]) == 2
    with refused("pipeline_type=auto is unknown: leave pipeline_type out"):
        Pipeline.open("toy", pipeline_type="auto")
    first_error, second_error = capsys.readouterr().err.splitlines()
    assert first_error == second_error and first_error.endswith("by python3 -m scripts.plan profile=NAME")

    assert "write methods=NAME,NAME" in error_of(evaluate, "emulated", ["pipeline_type=auto"])


def test_template_and_draft_are_judged_by_the_files_of_the_model_wherever_they_are_left_open(tmp_path, capsys):
    model = tmp_path / "mine"
    shutil.copytree(parse([]).base_dir, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    words, found = [f"base_dir={model}", "stages=2"], ["template=own", "draft=suffix"]
    for keys_class in (None, ServeConfig, EvalConfig):
        assert settled(words, keys_class) == [*words, *found]
    assert settled([*words, "prompt_ids=1"])[3:] == found[1:]
    assert settled([*words, "pipeline_type=ar"])[3:] == found[:1] == settled([*words, "drafts=none"], EvalConfig)[3:]
    assert settled(["toy", "template=own", "draft=eagle"]) == ["toy", "template=own", "draft=eagle"]
    toy_words = ["toy", f"base_dir={model}", "pipeline_type=ar"]
    assert settled(toy_words) == [*toy_words, *found[:1]]  # the toy shows a pipeline
    evaluated = parse(settled(evaluation(protocol="emulated", argv=toy_words), EvalConfig), keys_class=EvalConfig)
    run = evaluated.run
    assert (evaluated.drafts, run.draft, run.template, run.profile) == ("", "suffix", "own", "none")
    resolve(["toy"]).report()
    resolve([*words, "template=none"]).report()
    printed, = capsys.readouterr().err.splitlines()
    assert printed == f"flowspec: draft=suffix, since {HEADLESS_REASON}"


def test_a_head_of_the_repository_drafts_for_a_model_of_its_name_and_sizes(tmp_path, capsys):
    model = shutil.copytree(parse([]).base_dir, tmp_path / "LLAMA-mine")
    words, head = [f"base_dir={model}", "stages=2", "template=none"], PRESETS["toy"].eagle_dir
    resolved = resolve(words)
    resolved.report()
    assert (resolved.keys.eagle_dir, resolved.keys.draft) == (head, "eagle")
    assert capsys.readouterr().err == f"flowspec: eagle_dir={head}, since this draft head fits the model\n"
    assert resolve([*words, "eagle_dir="]).keys.draft == "suffix"
    change_json(model / "config.json", vocab_size=1000)
    assert resolve(words).keys.draft == "suffix"


@pytest.mark.parametrize("typed, model, stages", [
    ([], "edited", "2"), (["vicuna-7b"], "edited", "2"), (["vicuna-7b", "stages=4"], "edited", "4"),
    (["base_dir={typed}"], "typed", "1"), (["model={typed}"], "typed", "1")], ids=str)
def test_a_default_that_is_edited_in_the_file_wins_over_a_preset_and_says_so(
        typed, model, stages, tmp_path, monkeypatch, capsys):
    folders = {name: shutil.copytree(TOY / "llama", tmp_path / name) for name in ("edited", "typed")}
    monkeypatch.setattr(RunConfig, "base_dir", str(folders["edited"]))
    monkeypatch.setattr(RunConfig, "stages", "2")
    resolved = resolve([word.format(typed=folders["typed"]) for word in [*typed, "template=none"]])
    resolved.report()
    assert (resolved.keys.base_dir, resolved.keys.stages) == (str(folders[model]), stages)
    edited_stages = "" if "stages=4" in typed else " stages=2"
    sentence = f"base_dir={folders['edited']}{edited_stages}, since config/run_config.py says so"
    assert (sentence in capsys.readouterr().err) == (model == "edited")


@pytest.mark.parametrize("words, recover, is_said", [
    (["link=torch"], "false", True), (["--link", "torch"], "false", True), ([], "60", False),
    (["link=torch", "recover=false"], "false", False)])
def test_link_torch_alone_is_without_recovery_and_says_so(words, recover, is_said, capsys):
    resolved = resolve(["toy", *words])
    resolved.report()
    assert resolved.keys.recover == recover
    sentence = "flowspec: recover=false, since link=torch cannot regain a lost rank\n"
    assert capsys.readouterr().err == sentence * is_said


def test_link_torch_with_recovery_is_refused():
    with refused("link=torch cannot regain a lost rank: add recover=false"):
        resolve(["toy", "link=torch", "recover=30"])


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("launch.words.fetch", lambda folder: None)


@pytest.mark.parametrize("words, chosen_keys", [
    (["toy"], ("continuous", "eagle")), (["smollm2", "stages=4"], ("continuous", "eagle+suffix")),
    (["toy", "profile=wifi"], ("streaming", "eagle+suffix")), (["toy", "hosts=x"], ("streaming", "eagle+suffix")),
    (["gemma-3-12b", "profile=wifi"], ("streaming", "suffix")), (["toy", "draft=eagle", "profile=wifi"],
                                                                 ("streaming", "eagle")),
    (["toy", "profile=wifi", "pipeline_type=continuous"], ("continuous", "eagle")),
    (["toy", "profile=wifi", "init_depth=3"], ("continuous", "eagle"))])
def test_the_best_method_and_draft_are_the_default_of_a_run_on_several_devices(
        words, chosen_keys, monkeypatch, no_network):
    monkeypatch.setattr("launch.words.words_of_preset", lambda preset, raw: [])
    run = parse(settled(words))
    assert (run.pipeline_type, run.draft) == chosen_keys
    if "hosts=x" not in words:
        served = parse(settled(words, ServeConfig), keys_class=ServeConfig).run
        assert (served.pipeline_type, served.draft) == chosen_keys


@pytest.mark.parametrize("words, expected", [
    (["smollm2"], "1"), (["base_dir=x", "template=none"], "1"), (["toy"], "0+2+2+2+2"), (["smollm2", "stages=3"], "3"),
    (["smollm2", "profile=wifi"], "0+7+7+8+8"), (["smollm2", "hosts=x"], "0+7+7+8+8")])
def test_on_one_machine_a_single_stage_is_the_default(words, expected, no_network):
    assert parse(settled(words)).stages == expected


@pytest.mark.parametrize("words, kernel, expected", [
    (["smollm2"], "native", "threads"), (["smollm2", "stages=1"], "native", "threads"),
    (["smollm2"], "torch", "sockets"), (["smollm2", "stages=2"], "native", "sockets"),
    (["smollm2", "link=sockets"], "native", "sockets"), (["smollm2", "stages=1", "profile=wifi"], "native", "sockets"),
    (["smollm2", "stages=1", "hosts=x"], "native", "sockets")])
def test_a_single_stage_of_native_kernels_needs_no_process(words, kernel, expected, monkeypatch, no_network):
    monkeypatch.setattr("launch.words._kernel", lambda typed_kernel: {"kernel": (kernel, "")})
    assert parse(settled(words)).link == expected
    assert parse(settled(words, EvalConfig), keys_class=EvalConfig).run.link == "sockets"


def test_a_board_has_the_same_defaults_and_an_evaluation_keeps_its_own(monkeypatch):
    evaluated = parse(settled(["toy", "profile=jetson-7b"], EvalConfig), keys_class=EvalConfig)
    assert (evaluated.run.pipeline_type, evaluated.run.draft, evaluated.asked_drafts) == (
        "continuous", "eagle", ("eagle",))
    monkeypatch.setenv("FLOWSPEC_BOARD", "1")
    run = parse(settled(["toy"]))
    assert (run.pipeline_type, run.draft) == ("streaming", "eagle+suffix")


def test_a_draft_that_needs_a_head_is_refused_where_there_is_none(tmp_path):
    for keys_class, draft in ((None, "draft=eagle"), (EvalConfig, "drafts=suffix,eagle"),
                        (ServeConfig, "draft=eagle+suffix")):
        with refused("has no draft head: take draft=suffix, which needs none, draft=model or draft=none, or add eagle"):
            parse([f"base_dir={tmp_path}", draft], keys_class=keys_class)
    parse([f"base_dir={tmp_path}", "draft=eagle", "pipeline_type=ar"])
    parse([f"base_dir={tmp_path}", "drafts=suffix,eagle:toy/eagle"], keys_class=EvalConfig)


SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0}  # of Qwen 3


@pytest.mark.parametrize("settings, more_words, expected", [
    (SAMPLED, [], ["temperature=0.6", "top_p=0.95", "top_k=20"]),
    (SAMPLED, ["top_p=0.5"], ["temperature=0.6", "top_k=20"]),
    (SAMPLED, ["temperature=0"], []), (SAMPLED, ["temperature=1"], []),
    (SAMPLED, ["profile=wifi"], []), ({"do_sample": False, **SAMPLED}, [], []),
    ({"do_sample": True, "top_k": 64, "top_p": 0.949999988079071}, [], ["temperature=1", "top_p=0.95", "top_k=64"]),
    ({"temperature": 0.7, "top_k": -1}, [], ["temperature=0.7"]), ({"eos_token_id": 1}, [], [])])
def test_a_typed_question_is_answered_with_the_sampling_of_the_models_files(settings, more_words, expected, tmp_path):
    save_json(tmp_path / "generation_config.json", settings)
    words = ["toy", f"base_dir={tmp_path}", "template=none", "draft=suffix", *more_words]
    names = ("temperature", "top_p", "top_k", "min_p")

    def added(keys_class, *other_words):
        all_words = settled([*words, *other_words], keys_class)
        return [word for word in all_words if word.startswith(names) and word not in more_words]

    assert added(None, "prompt=Hello") == expected
    assert added(None) == []
    if not more_words:
        assert added(EvalConfig) == []
        assert added(ServeConfig) == expected


def test_the_sampling_of_a_preset_is_that_of_its_own_model_and_the_start_names_it(no_network, tmp_path, capsys):
    for words in (["smollm2"], ["smollm2", f"base_dir={tmp_path}"], ["toy"]):
        resolve([*words, "template=none", "draft=suffix", "kernel=torch", "prompt=Hello"]).report()
    printed, = capsys.readouterr().err.splitlines()
    assert printed == f"flowspec: temperature=0.2 top_p=0.9, since {RECOMMENDED_REASON.format('smollm2-135m')}"


@pytest.mark.parametrize("name, value", [
    ("temperature", "0.6"), ("temperature", -1), ("temperature", float("nan")), ("top_k", 2.5), ("top_k", -2),
    ("top_p", 0), ("top_p", 1.5), ("min_p", [0]), ("do_sample", "yes")])
def test_sampling_that_no_model_has_is_ignored_with_one_line(name, value, tmp_path, capsys):
    save_json(tmp_path / "generation_config.json", {"temperature": 0.6, name: value})
    words = ["toy", f"base_dir={tmp_path}", "template=none", "draft=suffix"]
    for more_words in ([], ["prompt=Hello", "temperature=0"]):
        resolve([*words, *more_words])
    assert not capsys.readouterr().err

    keys = resolve([*words, "prompt=Hello"]).keys
    line, = capsys.readouterr().err.splitlines()
    assert f"generation_config.json says {name}=" in line and line.endswith("; it is ignored")
    usual = RunConfig()
    assert keys.temperature == (usual.temperature if name == "temperature" else 0.6)
    assert (keys.top_k, keys.top_p, keys.min_p) == (usual.top_k, usual.top_p, usual.min_p)


@pytest.mark.parametrize("typed, code, sentence", [
    ("--help", 0, ""), ("tempertaure=1", 2, "unknown key tempertaure"), ("vicuna7b", 2, "unknown preset vicuna7b"),
    ("hello tempertaure=1", 2, "unknown key tempertaure")])
def test_help_and_mistakes_import_no_torch_and_fetch_no_model(typed, code, sentence):
    done = run_program(sys.executable, "-X", "importtime", "-m", "scripts.generate", *typed.split())
    assert done.returncode == code and "config.run_config" in done.stderr and sentence in done.stderr
    assert not {"torch", "transformers", "launch.words"}.intersection(done.stderr.replace("|", " ").split())
