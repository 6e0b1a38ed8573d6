"""The configuration: accepted words of a command, and the error messages for mistakes."""
from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from config.cli import flat, help_text, parse, with_bare_question
from config.keys import options, parsed
from config.methods import METHODS
from config.old_names import OLD_NAMES, advice_for
from config.presets import PRESETS, ROOT
from config.run_config import Growth, RunConfig, TreeConfig
from config.serve_config import ServeConfig
from eval.dsi.keys import Heatmap, Online, Paper
from eval.keys import EvalConfig
from eval.plan.keys import PlanConfig
from launch.run import prepare
from tests.checkpoints import refused
from tests.sources import project_text

RUN_KEYS = {option.name: option for option in options(RunConfig)}


def test_nothing_said_means_the_toy_preset():
    assert parse([]) == PRESETS["toy"] == parse(["toy"])
    assert parse([]).pipeline_type == "continuous"


def test_keys_are_read_as_the_type_the_dataclass_names():
    cfg = parse(["toy", "temperature=1", "max_new_tokens=7", "ignore_eos=true", "debug=0", "prompt=a=b c"])
    assert (cfg.temperature, cfg.max_new_tokens, cfg.ignore_eos, cfg.debug) == (1.0, 7, True, False)
    assert isinstance(cfg.temperature, float) and cfg.prompt == "a=b c"


def test_every_key_can_be_given_its_own_default():
    for option in options(RunConfig):
        text = str(option.default).lower() if option.type_name == "bool" else str(option.default)
        if text:
            assert getattr(parse([f"{option.name}={text}"]), option.name) == option.default


def test_a_key_takes_back_what_the_preset_says_beside_it():
    cfg = parse(["prompt_ids=1, 2,3"])
    assert cfg.prompt == "" and cfg.ids == (1, 2, 3)
    cfg = parse(["model_dir=somewhere"])
    assert (cfg.base_dir, cfg.eagle_dir, cfg.stages) == ("", "", "")
    assert (cfg.min_probability, cfg.tree) == (0.0, RunConfig().tree) != (parse([]).min_probability, parse([]).tree)
    cfg = parse(["eagle_dir=head", "stages=3", "base_dir=whole"])
    assert (Path(cfg.base_dir).name, Path(cfg.eagle_dir).name, cfg.stages) == ("whole", "head", "3")


def test_paths_count_from_where_the_command_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = parse(["output=answer.json", "question_file=~/q.jsonl"])
    assert cfg.output == str(tmp_path / "answer.json")
    assert cfg.question_file == os.path.expanduser("~/q.jsonl")
    assert cfg.base_dir == str(ROOT / "toy" / "llama")


def test_the_models_of_presets_lie_under_one_root_that_is_named_once(tmp_path):
    assert {"vicuna-7b", "vicuna-13b", "llama2-7b", "llama2-13b", "llama3-8b", "qwen3-8b"} < set(PRESETS)
    for name, preset in PRESETS.items():
        there = parse([name, f"models={tmp_path}", "prompt=Hello"])
        if name in ("toy", "demo"):
            assert there.base_dir == preset.base_dir
        else:
            assert preset.base_dir == str(ROOT / "models" / Path(there.base_dir).relative_to(tmp_path))
            bundled = there.eagle_dir == preset.eagle_dir in ("", str(ROOT / "smollm2" / "eagle"))
            headless = there.eagle_dir == preset.eagle_dir == "" and there.draft == "suffix"
            head = preset.eagle_dir.replace(str(ROOT / "models"), str(tmp_path))
            assert bundled or headless or there.eagle_dir == head
            assert (there.stages, there.template) == (preset.stages, preset.template)
    assert parse(["vicuna-7b"]).stages == "0+8+8+8+8" and parse(["llama2-13b"]).template == "llama-2"
    assert parse(["qwen3-8b", f"models={tmp_path}", "base_dir=mine"]).eagle_dir == ""


def test_a_preset_without_its_model_says_how_to_get_it(tmp_path):
    with refused(f"there is no folder {tmp_path}/Qwen/Qwen3-8B", "as hf download NAME"):
        prepare(parse(["qwen3-8b", f"models={tmp_path}"]))
    shutil.copytree(ROOT / "toy" / "llama", tmp_path / "Qwen" / "Qwen3-8B")
    with refused(f"there is no folder {tmp_path}/AngelSlim/", "as hf download NAME"):
        prepare(parse(["qwen3-8b", f"models={tmp_path}"]))


MISTAKES = {
    "temprature=1": "unknown key temprature: did you mean temperature?",
    "draft=head": "choose one of eagle, model, suffix, eagle+suffix",
    "draft_dir=small": "is ignored with draft=eagle: add draft=model, or leave it out",
    "tyo": "did you mean toy",
    "recover=0.5": "recover=0.5 is not possible: give false to end all, or seconds: a number from 1 to 2592000",
    "zzz=1": "unknown key zzz: --help shows them all",
    "MAX_NEW_TOKENS=1": "unknown key MAX_NEW_TOKENS: did you mean max_new_tokens?",
    "temperature=hot": "temperature=hot is not a number: write for example temperature=0.0",
    "max_new_tokens=1.5": "is not a whole number",
    "ignore_eos=yes": "is not true or false",
    "seed = 3": "write seed=VALUE, without spaces",
    "toy =3": "write key=VALUE",
    "seed=1 seed=1": "seed is given twice",
    "seed=1 toy": "write one preset, before all keys",
    "prompt=Who are you": "put a value with spaces in quotes",
    "prompt=": "prompt is empty",
    "prompt=a prompt_ids=1": "give only one of them",
    "prompt_ids=1,x": "give token ids with commas between",
    "temperature=-1": "give 0 for the likeliest token",
    "top_p=0": "give a number from 0.000001 to 1",
    "top_k=-1": "give 0 for all tokens or a number from 1 to 1000000000",
    "seed=18446744073709551616": "give a number from 0 to 18446744073709551615",
    "max_new_tokens=0": "give a number from 1 to 1000000000",
    "pipeline_type=pipdec": "pipeinfer, windows, pearl, ssd, streaming, dsi, specinfer, tp, galaxy",
    "template=alpaca": "choose one of auto, vicuna, llama-2, own, none",
    "device=gpu": "give auto, cpu, cuda or cuda:N",
    "stages=auto:0": "or auto:4, 4 stages with equal bytes",
    **dict.fromkeys(("stages=auto:8,", "stages=auto:0,8", "stages=auto:8,0.0", "stages=auto:8,-8", "stages=auto:8,x",
                     "stages=auto:,8", "stages=auto:8GB,8GB"), "or auto:8,8,16, stages for boards with this much"),
    "subseq_token=-2": "-1 for no bound",
    "questions=3:3": "leaves no question: give more than 3 after the colon, or nothing for all",
    "questions=0": "questions=0 is not possible: give a number of questions, as 5",
    "timeout=0": "give a number from 1 to 2592000",
    "verify=greedy": "verify=greedy is unknown: choose one of match, naive, mss, eagle1",
    "policy=eagle": "policy=eagle is not possible: give auto, eagle2, static, expansion or opt, or opt:X",
    "verify=mss": "but continuous chooses them by their score: take pipeline_type=specinfer, or serial with policy",
    "policy=static draft=eagle+suffix": "suffix is not one: leave it out of draft=eagle+suffix",
    "policy=opt draft=eagle+model": "policy=opt grows the tree of one network: name only one, as draft=eagle or ssm=",
    "policy=opt:2": "the number of accepted guesses that a level must bring, a number from 0.000001 to 1",
    "expansion=256,256": "gives a tree of more than 65536 guesses: give smaller widths",
    "ssm=small": "is ignored by pipeline_type=continuous with draft=eagle: add pipeline_type=specinfer or draft=ssm",
    "ssm=, draft=ssm": "names no folder: write ssm=DIR or ssm=DIR,DIR",
    "pipeline_type=specinfer draft=eagle": "drafts with the small models of ssm=DIR,DIR: leave draft=eagle out",
    "pipeline_type=specinfer draft_dir=small": "is ignored with draft=ssm: name small models with ssm=DIR,DIR",
    "master=a:70000": "give HOST:PORT, with a port from 1 to 65535",
    "lookahead=0": "give auto or a number from 1 to 65536",
    "replicas=-1": "0 to fill four ranks",
    "replicas=1025": "a number of copies from 1 to 1024",
    "replicas=2x0": "or copies and stages of each, as 2x2",
    "replicas=2": "replicas=2 is ignored by continuous: take pipeline_type=dsi, or leave it out",
    "pipeline_type=auto": "leave pipeline_type out for the default, or simulate methods and splits by python3 -m "
                          "scripts.plan profile=NAME",
    **{f"toy {word}": f"{word} is unknown: write pipeline_type=streaming and draft=eagle+suffix, which are faster"
       for word in ("pipeline_type=spd", "draft=spd", "draft=spd+suffix")},
    "toy draft=spd:toy/eagle": "take one here: write pipeline_type=streaming and draft=eagle+suffix",
    "toy logit_bias=5:1,6:1,5:2": "logit_bias=5:1,6:1,5:2 has token 5 twice: leave one of them out",
    "ablate=prune,tree": "tree is unknown: choose among expand, none_expand, score_order, prune, thrift, forced",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_by_one_sentence_that_names_the_fix(words):
    with refused(MISTAKES[words]):
        parse(words.split())


@pytest.mark.parametrize("words, sentence", [
    (["toi", "prompt=a b"], "unknown preset toi: did you mean toy?"),
    (["prompt=Who", "are", "you"], '"are" is not key=value: put a value with spaces in quotes'),
    (["toy", "max_new_tokens:3", "who are you?"], '"max_new_tokens:3" is not key=value'),
    (["toy", "who are you?", "and me?"], "prompt is given twice")])
def test_a_word_beside_a_question_is_no_second_question(words, sentence):
    with refused(sentence):
        parse(with_bare_question(words))
    assert with_bare_question(["toy", "who", "are", "you", "seed=1"]) == ["toy", "seed=1", "prompt=who are you"]


def test_small_models_are_found_from_where_the_command_is_typed_and_taken_back_with_their_model():
    assert parse(["pipeline_type=specinfer"]).small_models == (str(ROOT / "toy" / "draft_a"),)
    here = os.path.abspath(".")
    assert parse(["draft=ssm", "ssm=a, b"]).small_models == (f"{here}/a", f"{here}/b")
    assert parse(["pipeline_type=specinfer", "model_dir=x"]).small_models == ()
    assert parse(["pipeline_type=specinfer"]).sources == parse(["draft=ssm"]).sources == ("ssm",)


def test_a_policy_shapes_the_trees_of_init_and_expand():
    tree = parse(["pipeline_type=specinfer", "expansion=2,3", "verify=mss"]).tree
    assert tree.init.shape == tree.expand.shape == ((2,), (3, 3))
    assert (tree.init.nodes, tree.init.depth) == (8, 1)
    assert parse(["policy=expansion"]).tree.init.nodes == 20
    assert parse(["policy=opt:0.3"]).tree.init.gain == 0.3
    assert parse(["policy=static", "ablate=expand"]).tree.expand.nodes == 0
    assert parse(["policy=eagle2"]).tree == parse([]).tree


def test_the_help_tells_every_key_method_and_preset(output_of):
    shown = output_of(parse, ["toy", "--help", "all"])
    assert shown == help_text() + "\n"
    names = [field.name for field in dataclasses.fields(RunConfig)]
    assert [option.name for option in options(RunConfig)] == names, "every field of RunConfig is a key"
    assert all(re.search(rf"^  {name}=", shown, re.M) for name in names)
    assert all(f"  {name} " in shown for name in [*METHODS, *PRESETS])
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_a_command_has_its_own_keys_and_those_of_its_runs():
    shown = help_text("serve", ServeConfig)
    assert shown.index("\n  port=8000 ") < shown.index("\n  max_requests=4 ") and "\n  prompt=" not in shown
    config = parse(["port=1", "seed=2"], keys_class=ServeConfig)
    assert (config.port, config.run.seed, config.run.max_requests, config.run.reuse) == (1, 2, 4, True)
    assert flat(config) == {**vars(config.run),
                            **{key: value for key, value in vars(config).items() if key != "run"}}
    with refused("output is a key of single runs: leave it out"):
        parse(["output=x"], keys_class=ServeConfig)


def test_the_examples_of_the_help_are_accepted():
    for line in re.findall(r"^  bash run_pipe.sh ?(.*)$", help_text(), re.M):
        parse([word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)])


def test_folders_may_stand_in_the_name_of_the_draft():
    assert parse(["draft=model:small"]) == parse(["draft=model", "draft_dir=small"])
    assert parse(["draft=eagle:head+suffix"]) == parse(["draft=eagle+suffix", "eagle_dir=head"])
    assert parse(["draft=ssm:a,b"]) == parse(["draft=ssm", "ssm=a,b"])
    with refused("ssm:a,b and ssm=c both name folders: give one of them"):
        parse(["draft=ssm:a,b", "ssm=c"])


def test_the_strategies_receive_values_for_the_tree():
    assert RunConfig().tree == TreeConfig()
    tree = RunConfig(init_total_token=60, subseq_token=-1, ablate="none_expand", init_topk_pipedec=8,
                     prefill_chunk=9).tree
    assert tree.init == Growth(60, 6, 10, None)
    assert tree.layer.segment == 8 and tree.chunk == 9
    assert tree.expand.deeper(tree.idle) == tree.expand, "ablate=none_expand adds nothing"
    assert Growth(5, 2, 3, 4).deeper(Growth(1, 1, 9)) == Growth(6, 3, 3, 4)


def test_a_configuration_is_checked_when_it_is_made_in_python_too():
    with refused("temperature=-2"):
        RunConfig(temperature=-2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]


def test_every_old_name_in_the_page_on_moving_is_a_key_or_known_with_the_key_of_today():
    page = project_text("docs/moving.md")
    table = page.partition("## Options")[2].partition("## Figures")[0]
    left = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in left for name in re.findall(r"`(\w+)`", cell)}
    assert {"init_topk", "num_stage", "draft_gen_sort_score", "question_end"} <= names
    assert sorted(name for name in names if name not in RUN_KEYS and not advice_for(name, RUN_KEYS)) == []


@pytest.mark.parametrize("word, advice", [
    ("init_topk=10", "unknown key init_topk: write width=NUMBER"),
    ("expand_subseq_token=16", "unknown key expand_subseq_token: write subseq_token=NUMBER"),
    ("num_stage=5", "unknown key num_stage: write stages=NUMBER, without rank 0"),
    ("EAGLE_model_path=x", "write eagle_dir=FOLDER"), ("your_message=x", "write prompt=TEXT"),
    ("dataset_names=x", "write sets=NAME,NAME in an evaluation"), ("extra_name=x", "write results=FOLDER in an"),
    ("tp_type=tp", "write pipeline_type=tp or pipeline_type=galaxy"),
    ("pipeline_types=ar", "write methods=NAME,NAME in an evaluation"), ("model_name=x", "write a preset first"),
    ("password=x", "no password is stored"), ("interface=eth0", "write interface=NAME on the board's line"),
    ("none_expand=true", "unknown key none_expand: it is on, and ablate=none_expand turns it off")])
def test_an_old_name_is_answered_with_the_key_of_today(word, advice):
    with refused(advice):
        parsed([word], RUN_KEYS)


@pytest.mark.parametrize("word, advice", [
    ("quant=True", "write quant=fp4 for the original's 4 bits"), ("quant=false", "write quant=none")])
def test_an_old_value_is_answered_with_the_value_of_today(word, advice):
    with refused(f"{word} is unknown: {advice}"):
        parse([word])


def test_the_keys_of_today_that_old_names_lead_to_exist():
    keys = {option.name for config_class in (RunConfig, EvalConfig, PlanConfig) for option in options(config_class)}
    simulated_keys = {option.name for config_class in (Heatmap, Online, Paper) for option in options(config_class)}
    assert {key for key, _ in OLD_NAMES.values()} <= keys | simulated_keys | {""}
    assert keys.isdisjoint(OLD_NAMES.keys() - {"temperatures"})
    assert advice_for("init_topk", {"stages"}) == "", "the command has no width"


def test_a_file_in_place_of_a_preset_is_refused():
    with refused("unknown preset ours.json: files of presets are not read: write their keys as key=value"):
        parse(["ours.json"])


def test_each_token_may_have_a_bias():
    assert parse(["toy", "logit_bias=5:1,6:1"]).biases == ((5, 1.0), (6, 1.0))


def test_a_host_that_has_no_address_is_reported_as_such(monkeypatch):
    def unknown(name: str, port: object) -> list[object]:
        if name == "no.such.host":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [name]

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with refused("host=no.such.host is no address, and no name that this machine can look up"):
        parse(["toy", "host=no.such.host", "api_key=secret"], keys_class=ServeConfig)
    assert parse(["toy", "host=0.0.0.0", "api_key=secret"], keys_class=ServeConfig).host == "0.0.0.0"
    with refused("host=known.host can be reached by other machines: add api_key=SECRET"):
        parse(["toy", "host=known.host"], keys_class=ServeConfig)
