"""`pipeline_type=dsi` as a person types it: over threads and processes, with what can go wrong."""
import shutil

import pytest

from config.presets import ROOT
from config.run_config import RunConfig
from launch.prepare import open_part, prepare
from tests.checkpoints import refused
from tests.forked import ranks
from tests.json_files import load_json
from tests.saved import ASK, answer_of, here, reference, split_shared, token_ids
from tp.links import Placement

DSI = ("pipeline_type=dsi", *ASK)
BUNDLED = ("max_new_tokens=24", "seed=3", "temperature=1", "draft=model",
           f"draft_dir={ROOT / 'toy' / 'draft_a'}")


@pytest.mark.parametrize("stages, words, temperature", [
    ("0+4", ["replicas=1", "lookahead=3"], "0"),
    ("0+4", ["lookahead=1"], "1"), ("0+4", ["replicas=3"], "0"),
    ("0+2+2", ["lookahead=2"], "1")])
def test_replicas_as_threads_write_the_reference_text(saved, tmp_path, stages, words, temperature):
    answer = answer_of(tmp_path, f"model_dir={saved / stages}", *DSI, *words, f"temperature={temperature}",
                       "dtype=float64")
    assert answer["token_ids"] == reference(float(temperature))


def test_four_processes_write_what_threads_write_and_leave_a_timeline(saved, tmp_path):
    words = [f"model_dir={saved / '0+4'}", *DSI, "replicas=3", "lookahead=2", "temperature=1",
             f"output={tmp_path / 'out.json'}", f"trace={tmp_path / 'trace'}", "dtype=float64"]
    with ranks(tmp_path / "ranks", words, 4) as run:
        assert run.codes(120) == [0] * 4, run.text(0)
    assert token_ids(tmp_path / "out.json") == reference(1.0)
    events = load_json(tmp_path / "trace" / "trace.json")["traceEvents"]
    named = {(event["pid"], event["name"]) for event in events}
    assert {(rank, "forward") for rank in (1, 2, 3)} <= named


def test_too_few_replicas_are_reported_with_the_number_that_would_do(tmp_path, capsys):
    words = [*BUNDLED, "pipeline_type=dsi", "profile=jetson-7b", "time=virtual", f"output={tmp_path / 'out.json'}"]
    assert here(*words, "lookahead=1", "replicas=2") == 0
    printed = capsys.readouterr().err
    assert "up to 24 verifications" in printed and "give lookahead=12, or replicas for 24" in printed
    assert here(*words, "lookahead=12", "replicas=2") == 0
    assert capsys.readouterr().err == ""
    assert here(*words, "replicas=2") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words, message", [
    (["replicas=0x1"], "is split as 0+2+2, not for copies of 1 stages: leave the stages out of replicas="),
    (["replicas=1x2"], "")])
def test_a_split_for_other_replicas_is_refused(saved, capsys, words, message):
    assert here(f"model_dir={saved / '0+2+2'}", *DSI, *words) == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_a_split_that_rank_0_holds_is_not_copied(saved, tmp_path, sentence_of):
    split_shared(saved, tmp_path / "tp")
    sentence = sentence_of(here, f"model_dir={tmp_path / 'tp'}", *DSI)
    assert "there is nothing to copy: split the model again into another folder, with --stages 1" in sentence


def test_another_number_of_ranks_is_refused(saved, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = RunConfig("dsi", model_dir=str(saved / "0+4"), replicas="3")
    with refused("is split as 0+4, in 3 replicas: start 4 ranks, rank 0 included"):
        prepare(config)


def test_ranks_above_those_of_the_split_hold_copies_even_where_only_their_own_part_is(saved, tmp_path):
    assert [open_part(saved / "0+2+2", rank).folder.name for rank in range(5)] == [
        "stage_0", "stage_1", "stage_2", "stage_1", "stage_2"]
    shutil.copytree(saved / "0+2+2" / "stage_2", tmp_path / "stage_2")
    part = open_part(tmp_path, 4)
    assert (part.rank, part.layers) == (4, (2, 4))


def test_rank_0_has_a_link_into_each_replica_and_the_others_know_only_their_own():
    placement = Placement.of([0, 2, 2], 1, copies=2)
    assert placement.world == 5 and placement.leaders == [0, 1, 2, 3, 4]
    assert placement.peers(0) == [(2, [1], [1, 2], None, False),
                                  (4, [3], [3, 4], None, False)]
    assert placement.peers(3) == [(0, [4], (), 0, False)]
    assert placement.peers(4) == [(3, [0], (), 0, False)]
    shared = Placement.of([0, 4], 2, copies=2)
    assert [list(group) for group in shared.groups] == [[0],
                                                        [1, 2], [3, 4]]
