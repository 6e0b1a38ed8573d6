"""Tensor parallelism in whole commands: the text, the order of messages, splits, and ranks that are lost."""
import os
import signal

import pytest
import torch

from model.weights.parts import Part
from pipeline.messages import Prune, Reset, Segment, Stop
from pipeline.stage import run_stage
from pipeline.trace import OFF
from tests.checkpoints import refused, tensors_of
from tests.forked import ranks
from tests.saved import ASK, ENDLESS, FAST, answer_of, here, ranks_of, reference, split_shared, token_ids, wait_until
from tests.tiny import TINY
from tp.links import ForwardingLink, Placement

WORDS = (*ASK, *FAST, "threads_per_rank=1")
FORMS = {"tp1": ("", (1,)), "tp2": ("", (1, 1)),
         "tp3": ("", (2, 1, 1)), "2x2": ("0+2+2", (1, 1))}


@pytest.fixture(scope="module")
def saved(saved):
    for name, (stages, shares) in FORMS.items():
        split_shared(saved, saved.parent / name, stages, shares)
    return saved.parent


# --- the text ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form, temperature, words", [
    ("tp1", "0", "pipeline_type=tp"), ("tp2", "1", "pipeline_type=tp"), ("tp2", "0", "pipeline_type=galaxy"),
    ("tp3", "0", "pipeline_type=tp"), ("tp3", "1", "pipeline_type=galaxy tp=2,1,1"),
    ("tp2", "0", "pipeline_type=continuous"), ("tp2", "1", "pipeline_type=pruned"),
    ("2x2", "1", "pipeline_type=continuous"), ("2x2", "0", "pipeline_type=pruned tp=2"),
    ("2x2", "1", "pipeline_type=pipedec"), ("2x2", "0", "pipeline_type=ar stages=0+2+2"),
])
def test_ranks_that_share_layers_write_the_reference_text(saved, tmp_path, form, words, temperature):
    usual_words = f"model_dir={saved / form}", f"temperature={temperature}", "dtype=float64", *WORDS
    assert answer_of(tmp_path, *usual_words, *words.split())["token_ids"] == reference(float(temperature))


def test_processes_that_share_layers_write_the_reference_text(saved, tmp_path):
    words = [f"model_dir={saved / 'tp3'}", f"output={tmp_path / 'out.json'}", "dtype=float64", *WORDS]
    with ranks(tmp_path / "ranks", [*words, "pipeline_type=galaxy"], 3) as run:
        assert run.codes(120) == [0] * 3, run.text(0)
        assert [run.text(rank) for rank in range(3)] == [""] * 3
        assert token_ids(tmp_path / "out.json") == reference(0.0)


# --- who sits where, and the order of messages ------------------------------------------------------------------------

def test_a_group_follows_its_leader_and_leaders_make_the_ring():
    placement = Placement.of([0, 4, 4], 3)
    assert (list(placement.leaders), placement.world) == ([0, 1, 4], 7)
    assert [list(group) for group in placement.groups] == [[0],
                                                           [1, 2, 3], [4, 5, 6]]
    assert placement.peers(0) == [(4, [1], [1, 4], None, False)]
    assert placement.peers(4) == [(1, [0], (), 0, False)]
    assert placement.peers(5) == [(4, (), (), None, True)]
    assert placement.fan(4) == (None, [5, 6], (), None, False)
    assert placement.fan(0) is placement.fan(5) is None
    alone = Placement.of([8], 4)
    pipeline = Placement.of([0, 1, 1], 1)

    assert [list(group) for group in alone.groups] == [[0, 1, 2, 3]] and pipeline.groups == [range(1), range(1, 2),
                                                                                              range(2, 3)]


class Script:
    """A link on which messages come in a given order, prunes between computing and sending among them."""

    def __init__(self, steps):
        self.steps, self.sent = list(steps), []

    def recv(self):
        return self.steps.pop(0)

    def urgent(self):
        return self.steps.pop(0) if self.steps and isinstance(self.steps[0], Prune) else None

    send = broadcast = lambda self, msg: self.sent.append(msg)


class Diary:
    """A stage that notes what it obeys."""

    trace = OFF

    def __init__(self):
        self.obeyed = []

    def apply(self, msg, news=None):
        self.obeyed.append(msg)
        return None if isinstance(msg, Prune) else msg

    def without_dead_rows(self, msg):
        return msg


def test_members_hear_everything_in_the_order_in_which_their_leader_obeys():
    prunes = [Prune(0, i, 0, 9, []) for i in range(5)]
    segments = [Segment(0, [i], [0], [i], 0, torch.zeros(1))
                for i in range(3)]
    steps = [prunes[0], segments[0], *prunes[1:3],
             segments[1], segments[2], *prunes[3:], Reset(0), Stop()]
    leader, link, fan = Diary(), Script(steps), Script([])
    run_stage(leader, ForwardingLink(link, fan))  # type: ignore[arg-type]
    assert fan.sent == leader.obeyed and len(fan.sent) == len(steps)
    member, heard = Diary(), Script([])
    heard.steps, heard.urgent = fan.sent[:], lambda: None  # type: ignore[method-assign]
    run_stage(member, heard)  # type: ignore[arg-type]
    assert member.obeyed == leader.obeyed


# --- splits -----------------------------------------------------------------------------------------------------------

def test_shards_hold_every_number_of_the_model_once_but_what_all_need(saved):
    whole = TINY.tensors
    parts = ranks_of(saved / "tp3")
    assert [(part.world, part.member, part.layers, part.shares) for part in parts] == [
        (3, member, (0, 4), [2, 1, 1]) for member in range(3)]
    tensors = [tensors_of(part.weights) for part in parts]
    for name in ("q_proj", "o_proj"):
        key = f"model.layers.2.self_attn.{name}.weight"
        joined = torch.cat([held[key] for held in tensors], int(name == "o_proj"))
        assert torch.equal(joined, whole[key[len("model."):]])
    for name in ("gate_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        pieces = [held[key] for held in tensors]
        assert torch.equal(torch.cat(pieces, int(name == "down_proj")),
                           whole[key[len("model."):]])
        assert [piece.shape[name == "down_proj"] for piece in pieces] == [24, 12, 12]

    assert ["lm_head.weight" in held for held in tensors] == [True, False, False]
    assert all(torch.equal(held["model.norm.weight"], whole["norm.weight"]) for held in tensors)


@pytest.mark.parametrize("form, words, message", [
    ("2x2", "pipeline_type=tp", "is split as 0+2+2 tp=2, but pipeline_type=tp has no pipeline: split"),
    ("2x2", "tp=3", "is split as 0+2+2 tp=2, not with tp=3: leave tp out"),
    ("tp3", "pipeline_type=tp tp=1,1,1", "is split as tp=3, not with tp=1,1,1"),
    ("tp2", "stages=0+2+2", "is split as tp=2, not as stages=0+2+2: leave stages out"),
    ("tp2", "tp=1,x", "tp=1,x is not possible: give 0 for the number of the split, a number of ranks"),
    ("tp2", "tp=1,0", "tp=1,0 is not possible: give a number from 0.001 to 1000 for each rank"),
])
def test_what_does_not_fit_a_split_is_refused_in_a_sentence(saved, error_of, form, words, message):
    assert message in error_of(here, f"model_dir={saved / form}", "prompt_ids=5", *words.split())


def test_the_split_command_shares_layers_with_and_without_stages(saved, tmp_path, capsys, error_of):
    from split_and_save_models import main

    base = str(saved / "saved" / "base")
    assert main([base, str(tmp_path / "a"), "--tp", "2,1"]) == 0
    assert "stage_1: share 2 of 2 of layers 0 to 3" in capsys.readouterr().out
    assert main([base, str(tmp_path / "b"), "--stages", "0+1+3", "--tp", "2"]) == 0
    assert "stage_4: share 2 of 2 of layers 1 to 3" in capsys.readouterr().out
    printed = error_of(main, [base, str(tmp_path / "c"), "--tp", "2,x"])
    assert "--tp 2,x is not possible: give 0 for the number of the split, a number of ranks" in printed
    with refused("is incomplete; split again"):
        (tmp_path / "b" / "stage_3" / "manifest.json").unlink()
        Part(tmp_path / "b" / "stage_3")


# --- what breaks ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, lost",
                         [(signal.SIGSTOP, 1), (signal.SIGKILL, 0)])
def test_when_a_member_dies_or_falls_silent_all_others_end_and_note_its_name(saved, tmp_path, number, lost):
    words = [f"model_dir={saved / 'tp3'}", "pipeline_type=galaxy", "timeout=2", "threads_per_rank=1", *ENDLESS]
    with ranks(tmp_path / "ranks", words, 3) as run:
        assert wait_until(lambda: len(run.text(0, 1)) > 50, 60), run.text(0)
        os.kill(run.processes[lost].pid, number)
        others = [process for rank, process in enumerate(run.processes) if rank != lost]
        assert wait_until(lambda: all(process.exitcode is not None for process in others), 15)
        assert [process.exitcode for process in others] == [75, 75]
        assert run.noted.startswith(f"rank {lost} was lost: "), run.noted
        assert "Traceback" not in "".join(run.text(rank) for rank in range(3))
