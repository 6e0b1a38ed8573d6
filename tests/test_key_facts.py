"""What is true of a key stands at the key, and everything that asks for it derives from there."""
from __future__ import annotations

from dataclasses import dataclass

import pytest

from config.cli import all_options, help_text
from config.keys import LOCAL, SHARED, BoardKeys, facts_by_name, key, keys_with, local_key, read_keys, shared_key
from config.run_config import QUESTION_KEYS, RunConfig
from eval.dsi.acceptance import AcceptanceConfig
from eval.dsi.keys import Heatmap, Online
from eval.keys import EvalConfig
from eval.load.keys import LoadConfig
from eval.plan.keys import PlanConfig

RUN_LOCAL = """model_dir base_dir eagle_dir draft_dir ssm models answers hosts codes output prompt prompt_ids
    question_file template stop_loops device threads_per_rank debug master wait keys""".split()
RUN_PATHS = """model_dir base_dir eagle_dir draft_dir models answers question_file template hosts keys profile trace
    output""".split()
MODEL_KEYS = {"model_dir", "base_dir", "eagle_dir", "ssm", "stages", "draft"}
TUNED_KEYS = {"min_probability", "expand_depth", "ablate"}


@pytest.mark.parametrize("fact, names", [
    ("per_answer", """temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias
        template seed verify max_new_tokens ignore_eos"""),
    ("divides_model", "model_dir stages tp replicas lookahead"),
    ("sizes_tree", "policy expansion init_total_token init_depth expand_total_token expand_depth"),
    ("emulates", "wires time slowdown"),
])
def test_the_keys_of_a_run_with_a_fact(fact, names):
    assert keys_with(RunConfig, fact) == set(names.split())


def test_the_scope_of_each_key():
    assert keys_with(RunConfig, "scope", LOCAL) == set(RUN_LOCAL)
    assert keys_with(EvalConfig, "scope", LOCAL) == {"data", "results", "launch"}
    assert {key_facts.scope for key_facts in facts_by_name(RunConfig).values()} == {LOCAL, SHARED}


@pytest.mark.parametrize("config_class, names", [
    (RunConfig, RUN_PATHS), (EvalConfig, ["data", "results"]), (LoadConfig, ["arrivals", "data", "results"]),
    (PlanConfig, ["data", "measured", "write_hosts"]),
    (AcceptanceConfig, ["data", "draft", "target", "traces"]),
    (Online, ["traces"]), (Heatmap, ["output"]),
])
def test_the_keys_that_name_files(config_class, names):
    named = [name for name, key_facts in facts_by_name(config_class).items() if key_facts.names_file]
    assert sorted(named) == sorted(names)


def test_the_keys_of_files_that_a_command_writes():
    assert keys_with(PlanConfig, "is_output") == {"measured", "write_hosts"}
    assert keys_with(AcceptanceConfig, "is_output") == {"traces"}


def test_what_discards_a_value_of_a_preset():
    discarding = {name: set(key_facts.discarded_by) for name, key_facts in facts_by_name(RunConfig).items()}
    assert {name for name, keys in discarding.items() if "profile" in keys} == TUNED_KEYS
    for folder in ("model_dir", "base_dir"):
        assert {name for name, keys in discarding.items() if folder in keys} == MODEL_KEYS | TUNED_KEYS
    for question in QUESTION_KEYS:
        assert {name for name, keys in discarding.items() if question in keys} == set(QUESTION_KEYS)
    assert not discarding["temperature"]


def test_rare_groups_are_listed_by_help_all_alone():
    rare_groups = {option.group.split(" that ")[0] for option in all_options(None) if option.is_rare}
    assert rare_groups == {"The tree of methods", "The tree", "All trees and their segments",
                           "Other options of the pipeline"}
    assert "prefill_chunk=" in help_text() and "prefill_chunk=" not in help_text(shows_all=False)


def test_a_key_of_boards_without_a_scope_fails_at_its_declaration():
    with pytest.raises(TypeError, match="Forgetful.speed has no scope: declare it with shared_key or local_key"):
        class Forgetful(BoardKeys):
            speed: int = key(1, "how fast")

    @dataclass(frozen=True)
    class Careful(BoardKeys):
        speed: int = shared_key(1, "how fast")
        folder: str = local_key("", "where", names_file=True)

    assert read_keys(["folder=/a/../b"], Careful, "any") == Careful(folder="/b")


def test_a_fact_that_does_not_exist_fails_at_its_declaration():
    with pytest.raises(TypeError, match="names_fil"):
        key("", "a file", names_fil=True)
