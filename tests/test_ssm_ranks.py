"""Small models on ranks of their own: the same trees, ids and texts as on rank 0, drafted at the same time."""
from __future__ import annotations

import json
import os
import shutil
import signal
from collections import deque
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.cli import parse
from config.profiles import PROFILES
from launch.build import build_drafter
from launch.memory import need
from launch.prepare import open_part
from launch.spec import RankSpec
from model.rules import RULES
from model.sample import Sampler
from pipeline.drafters import Drafter, RemoteDraft
from pipeline.messages import KINDS, Ask, Drafted, Header, packets, receive
from pipeline.trace import OFF, read
from sim.wires import size
from tests.forked import ranks
from tests.saved import here, wait_until
from tests.test_hosts import ends, meet_here, said, starting
from tests.test_specinfer import ASK, NEW, PROMPT, SHAPED, TINY
from tests.tiny import pipeline, write

JETSON = PROFILES["jetson-7b"]
HOSTS = ("prompt_ids=5,17,40", "max_new_tokens=12", "seed=4", "ignore_eos=true", "dtype=float64")
ENDLESS = ("prompt_ids=5,17,40", "ignore_eos=true", "max_length=30000", "max_new_tokens=30000", "timeout=2",
           "threads_per_rank=1")
CASES = [("serial", 0.0, "match"), ("naive", 1.0, "match"), ("pruned", 1.0, "match"),
         *(("serial", 1.0, rule) for rule in RULES)]


# --- in memory --------------------------------------------------------------------------------------------------------

class Line:
    """A link to a small model of this thread, over the bytes of the wire."""

    def __init__(self, drafter):
        self._drafter, self._answers = drafter, deque()

    def send(self, msg):
        self._answers.append(over_the_wire(self._drafter.apply(over_the_wire(msg))))

    def recv(self):
        return self._answers.popleft()


def over_the_wire(msg):
    (header, body), = packets(msg)
    return receive(lambda: (Header.read(header), body))


def in_numbers(kind, numbers):
    """The message of a kind that these whole numbers are."""
    words = torch.tensor(numbers, dtype=torch.int64)
    return receive(lambda: (Header(KINDS.index(kind), len(words)),
                            words.view(torch.uint8)))


class Watched:
    """A draft that notes the whole tree after each growth."""

    def __init__(self, draft):
        self._draft, self.trees = draft, []

    def __getattr__(self, name):
        return getattr(self._draft, name)

    def grow(self, tree, growth, *worth_drafting):
        grew = yield from self._draft.grow(tree, growth)
        if not grew:
            drawn = {number: [(source, token, law.tobytes()) for source, token, law in node.drawn]
                     for number, node in tree.nodes.items() if node.drawn}
            guesses = {number: tree.nodes[number] for number in sorted(tree.live)}
            kept = [(number, node.parent, node.token, node.score, list(node.proposals.items()))
                    for number, node in guesses.items()]
            self.trees.append((kept, drawn))
        return grew


def grown(draft, strategy, sampler):
    """The text that a draft helps to write, and the tree after each growth."""
    watched = Watched(draft)
    with pipeline(TINY, 2, strategy, watched, SHAPED) as decoder:
        texts = [write(decoder, prompt, new, sampler)
                 for prompt, new in ((PROMPT, 14), (PROMPT[8:], 6))]
    return texts, watched.trees


@pytest.mark.parametrize(("strategy", "temperature", "rule"), CASES)
def test_the_merged_trees_are_those_of_rank_0_to_the_last_bit_ids_scores_and_laws_included(strategy, temperature, rule):
    sampler = Sampler(temperature, top_k=40, seed=(1 << 64) - 3, rule=rule)
    drafters = TINY.drafters(0.02, 0.03, 0.1)
    texts, trees = grown(drafters, strategy, sampler)
    elsewhere = RemoteDraft([Line(Drafter(network)) for network in drafters.networks])
    assert grown(elsewhere, strategy, sampler) == (texts, trees)
    assert list(map(len, texts)) == [14, 6]
    assert any(len(kept) > 20 for kept, _ in trees)
    assert any(drawn for _, drawn in trees) == (rule in ("mss", "eagle1"))


def test_an_answer_to_a_question_that_was_given_up_is_dropped():
    line = Line(Drafter(TINY.twin(0.02)))
    elsewhere = RemoteDraft([line])
    elsewhere.start()
    line.send(Ask(-1, 0, [5, 6],
                  20, Sampler(), ((1,),)))
    assert grown(elsewhere, "serial", Sampler()) == grown(TINY.drafters(0.02), "serial", Sampler())
    line.send(Ask(-1, 0, [5, 6],
                  20, Sampler(), ((1,),)))
    elsewhere.stop()


def test_questions_and_trees_come_out_of_the_wire_as_they_went_in():
    ask = Ask(7, 3, [1, 2], 90,
              Sampler(0.7, 0.9, 5, (1 << 64) - 1, "mss"),
              ((2,), (1, 3)))
    assert over_the_wire(ask) == ask
    assert over_the_wire(Ask(0, 0, [], 1, Sampler(), ())).shape == ()
    for laws in (torch.rand(2, 9, dtype=torch.float64),
                 torch.empty(0, 0, dtype=torch.float64)):
        found = Drafted(7, [1, 2], [0, 1, 1],
                        [4, 8, 8], [-0.5, -1.25, -1.5], laws)
        back = over_the_wire(found)
        assert torch.equal(back.law_NV, laws)
        assert vars(back).pop("levels") == [1, 2]
        assert (back.parents, back.tokens, back.scores) == (found.parents, found.tokens, found.scores)


@pytest.mark.parametrize("spoil", [
    lambda words: words[:-1], lambda words: words[:3],
    lambda words: [99, *words[1:]],
    lambda words: [-word for word in words]])
def test_what_contradicts_itself_is_no_message(spoil):
    laws = torch.empty(0, 0, dtype=torch.float64)
    found = Drafted(7, [1, 2], [0, 1, 1],
                    [4, 8, 8], [-0.5, -1.25, -1.5], laws)
    for msg in (found, Ask(7, 3, [1, 2], 90,
                           Sampler(), ((2,), (1, 3)))):
        (_, body), = packets(msg)
        words = body.view(torch.int64).tolist()
        assert type(in_numbers(type(msg), words)) is type(msg)
        with pytest.raises(ValueError, match="cut off|contradictory|later one"):
            in_numbers(type(msg), spoil(words))


@pytest.mark.parametrize("parents, laws, sentence", [
    ([0, 2, 1], torch.rand(3, 9).double(), "below a later one"),
    ([0, 1, 1], torch.rand(3, 9).double(), "contradictory"),
    ([0, 1, 1], torch.rand(2, 9), "contradictory"),
    ([0, 1, 1], torch.rand(2).double(), "contradictory")])
def test_a_tree_whose_parents_or_laws_cannot_be_is_no_message(parents, laws, sentence):
    with pytest.raises(ValueError, match=sentence):
        over_the_wire(Drafted(7, [1, 2], parents,
                              [4, 8, 8], [-0.5, -1.25, -1.5], laws))


@given(st.sampled_from([Ask, Drafted]), st.lists(st.one_of(st.integers(-1, 4),
                                                           st.integers(-2**63, 2**63 - 1))))
def test_numbers_are_a_message_or_refused(kind, numbers):
    with suppress(ValueError):
        assert isinstance(in_numbers(kind, numbers), kind)


# --- whole commands ---------------------------------------------------------------------------------------------------

def outcome(saved, tmp_path, *words, form="0+2+2"):
    """What a command with two small models writes into its output, but its times."""
    first = ["pipeline_type=specinfer", f"model_dir={saved / form}", f"ssm={saved / 'near'},{saved / 'far'}",
             f"output={tmp_path / 'out'}", *ASK]
    typed = dict(word.split("=", 1) for word in [*first, *words])
    assert here(*(f"{key}={value}" for key, value in typed.items() if value)) == 0
    kept = ("token_ids", "target_passes", "segments", "mean_accepted_length", "accepted_by_source")
    got = json.loads((tmp_path / "out").read_text())
    return {key: got[key] for key in kept if key in got}


@pytest.mark.parametrize("words", [
    ("temperature=0",), ("temperature=1", "verify=mss", "expansion=2,2,1"), ("temperature=1", "verify=eagle1"),
    ("temperature=1", "pipeline_type=pruned", "draft=ssm", "policy=static", "subseq_token=8")])
def test_threads_on_ranks_of_their_own_write_what_rank_0_writes_alone(saved, tmp_path, words):
    alone = outcome(saved, tmp_path, *words)
    assert outcome(saved, tmp_path, *words, "ssm_ranks=true") == alone and len(alone["token_ids"]) == NEW


def test_small_models_have_ranks_beside_a_group_and_beside_one_target_rank(saved, tmp_path):
    words = ("temperature=1", "verify=mss")
    alone = outcome(saved, tmp_path, *words)
    assert outcome(saved, tmp_path, *words, "ssm_ranks=true", form="0+4") == alone
    shared = [f"base_dir={saved / 'base'}", "model_dir=", "tp=2", "stages=0+2+2"]
    assert outcome(saved, tmp_path, *words, *shared, "ssm_ranks=true")["token_ids"] == alone["token_ids"]


def test_processes_write_the_same(saved, tmp_path):
    words = ("temperature=1", "verify=mss")
    alone = outcome(saved, tmp_path, *words)
    typed = ["pipeline_type=specinfer", f"model_dir={saved / '0+2+2'}", f"ssm={saved / 'near'},{saved / 'far'}",
             f"output={tmp_path / 'other'}", *ASK, *words, "ssm_ranks=true", "dtype=float64", "threads_per_rank=1"]
    with ranks(tmp_path, typed, 5) as run:
        assert run.codes() == [0] * 5, run.text(4)
    assert json.loads((tmp_path / "other").read_text())["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize("sick", [signal.SIGKILL, signal.SIGSTOP])
def test_a_small_model_that_is_lost_ends_all_ranks_with_its_name(saved, tmp_path, sick):
    typed = ["pipeline_type=specinfer", f"model_dir={saved / '0+4'}", f"ssm={saved / 'near'},{saved / 'far'}",
             *ENDLESS, "ssm_ranks=true"]
    with ranks(tmp_path, typed, 4) as run:
        assert wait_until(lambda: run.text(0, 1), 60), run.text(0)
        os.kill(run.processes[3].pid, sick)
        assert wait_until(lambda: all(run.processes[rank].exitcode == 75
                                      for rank in (0, 1, 2)), 60)
        assert run.noted.startswith("rank 3 was lost"), run.noted


@pytest.fixture
def start(saved, tmp_path):
    """Starts boards of which the third has the part of rank 0 and a small model."""
    for board, stage in enumerate(("stage_0", "stage_1", "stage_0")):
        shutil.copytree(saved / "0+4" / stage, tmp_path / f"own/board{board}" / stage)
    yield from starting(tmp_path, tmp_path / "own")


def test_a_board_may_hold_a_small_model(saved, tmp_path, start):
    words = [*HOSTS, "temperature=0.7", "pipeline_type=specinfer", "ssm_ranks=true", *meet_here(tmp_path / "meet")]
    boards = [start(rank, *words, f"ssm={saved / 'near' if rank == 2 else 'elsewhere'}") for rank in range(3)]
    assert ends(boards) == [0, 0, 0], [said(tmp_path, rank) for rank in range(3)]
    text = " ".join(map(str,
                        TINY.text([5, 17, 40], 12, Sampler(0.7, seed=4))))
    assert text in (tmp_path / "out0").read_text()


@pytest.mark.parametrize(("small", "sentence"), [
    (("near,far", "near,far", "near,far"), "and ssm_ranks=true gives 2 small models a rank each: start 4 ranks"),
    (("near", "near", "near,far"), "start 4 ranks"),
])
def test_more_small_models_than_boards_are_reported(saved, tmp_path, start, small, sentence):
    words = [*HOSTS, "pipeline_type=specinfer", "ssm_ranks=true", *meet_here(tmp_path / "meet")]
    boards = [start(rank, *words, f"ssm={names}") for rank, names in enumerate(small)]
    assert ends(boards) == [2, 2, 2]
    assert all(sentence in said(tmp_path, rank) for rank in range(3))


# --- time -------------------------------------------------------------------------------------------------------------

def spans(folder, name, **facts):
    """Begin and end of the spans of this name, by rank."""
    found = {}
    for span in read(folder):
        if span["name"] == name and facts.items() <= span.items():
            found.setdefault(span["rank"], []).append((span["t0"], span["t1"]))
    return found


@pytest.mark.parametrize("rule", ["match", "mss"])
def test_in_virtual_time_small_models_draft_at_the_same_moments_and_a_round_takes_the_longest_not_the_sum(
        saved, tmp_path, rule):
    words = ("profile=jetson-7b", "time=virtual", "temperature=1", f"verify={rule}", "expansion=2,1,2")
    runs = {}
    for name, more in (("alone", ()), ("own", ("ssm_ranks=true",))):
        runs[name] = outcome(saved, tmp_path, *words, *more, f"trace={tmp_path / name}")
    assert runs["alone"] == runs["own"]
    alone, own = spans(tmp_path / "alone", "grow"), spans(tmp_path / "own", "grow")
    assert set(alone) == {0} and set(own) == {0, 3, 4}
    assert own[3] == own[4]
    drafted = spans(tmp_path / "own", "wire", kind="Drafted")
    asked = [taken for taken in own[0] if taken[1] > taken[0]]
    assert len(asked) == len(drafted[3]) == len(drafted[4]) > 5
    for (begin, end), near, far in zip(asked, drafted[3], drafted[4]):
        levels = [after - before for before, after in own[3] if begin < before < near[0]]
        assert levels == [pytest.approx(JETSON.level / 1e3)] * len(levels)
        assert len(levels) in (1, 2, 3)
        slowest = max(near[1] - near[0], far[1] - far[0])
        assert end - begin == pytest.approx(sum(levels) + JETSON.latency / 1e3 + slowest, abs=1e-5)
    together = sum(end - begin for begin, end in own[3])
    assert sum(end - begin for begin, end in alone[0]) == pytest.approx(2 * together)


def test_a_message_weighs_what_it_would_with_the_profiles_model():
    assert size(Ask(7, 3, [1, 2], 90, Sampler(),
                    ((2,), (1, 3))), JETSON) == 16
    laws = torch.rand(2, 9, dtype=torch.float64)
    assert size(Drafted(7, [1, 2], [0, 1, 1], [4, 8, 8], [0, 0, 0], laws), JETSON) == 3 * 24 + 2 * 8 * JETSON.vocab


# --- memory, and what cannot be ---------------------------------------------------------------------------------------

def test_a_rank_needs_the_memory_of_what_it_holds(saved):
    folder = saved / "0+2+2"
    small = f"ssm={saved / 'near'},{saved / 'far'}"
    words = ["toy", f"model_dir={folder}", "pipeline_type=specinfer", small, "max_length=200", "dtype=float32"]
    alone, own = parse(words), parse([*words, "ssm_ranks=true"])
    specs = [RankSpec(own, open_part(folder, rank, own)) for rank in range(5)]
    assert [spec.drafter for spec in specs] == [None, None, None, 0, 1]
    assert [spec.part.folder.name for spec in specs] == ["stage_0", "stage_1", "stage_2", "stage_0", "stage_0"]
    together = need(RankSpec(alone, open_part(folder, 0, alone)))
    assert need(specs[0]).weights + sum(need(spec).weights for spec in specs[3:]) == together.weights
    for spec in specs[3:]:
        draft = build_drafter(spec, OFF)._draft
        held = [*draft.network.parameters(), *draft.lm_head.parameters()]
        assert need(spec).weights == sum(p.numel() * p.element_size() for p in held)
        assert need(spec).begins == draft.cache.bytes


@pytest.mark.parametrize(("words", "sentence"), [
    (["ssm="], "gives a rank to each small model, but none is named: add ssm=DIR,DIR"),
    (["pipeline_type=ar"], "has no meaning for ar with draft=eagle, where no small models draft"),
    (["pipeline_type=continuous", "draft=ssm"], "continuous with policy=eagle2 has none: take pipeline_type=specinfer"),
    (["policy=opt"], "specinfer with policy=opt has none"),
])
def test_what_cannot_draft_on_ranks_of_its_own_is_refused_with_the_fix(words, sentence):
    typed = {"pipeline_type": "specinfer", "ssm_ranks": "true", **dict(word.split("=", 1) for word in words)}
    with pytest.raises(ValueError, match=sentence):
        parse(["toy", *(f"{key}={value}" for key, value in typed.items())])


def test_a_small_model_that_is_not_there_is_named(saved, tmp_path, capsys):
    code = here("pipeline_type=specinfer", f"model_dir={saved / '0+2+2'}", "ssm_ranks=true",
                f"ssm={saved / 'near'},{tmp_path / 'other'}", *ASK)
    [sentence] = capsys.readouterr().err.splitlines()
    assert code == 75 and f"rank 4: there is no folder {tmp_path / 'other'}: give ssm=FOLDER" in sentence
