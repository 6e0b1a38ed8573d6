"""The emulated cluster takes at least the time that it models, and changes no text."""
import math
import time
from dataclasses import replace
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch

from config.cli import parse
from config.profiles import PROFILES, Profile, touched
from config.schema.families import FAMILIES
from launch.timing import computed_rows, inputs, passes, random_stage
from launch.wiring import _connections
from model.drafts.draft import Reading
from model.drafts.network import read_all
from model.llama import Experts
from model.sample import Sampler
from pipeline.messages import Prune, Reset, Segment
from pipeline.stage import Stage
from pipeline.trace import OFF, Trace, read
from sim.clock import Pace, VirtualClock
from sim.devices import Lane, SlowLink, SlowPasses, SlowSlice
from sim.wires import size
from tests.checkpoints import refused
from tests.test_prunes import PROMPT
from tests.tiny import CONFIG, TINY, admit_text, pipeline, write
from tp.links import Placement

QUICK = Profile("a test", layers=4, row_bytes=1000, model=8,
                row=1, free=2, token=0.5, level=2, verdict=4,
                latency=1, mbps=8, step=1, own_times=(0, 0, 0))
NEW = 12
SAMPLER = Sampler(1.0, seed=11)


def segment(rows, width):
    return Segment(0, list(range(rows)), [0] * rows,
                   list(range(rows)), 0, torch.zeros(rows, width))


def test_a_stage_pays_for_its_share_of_the_layers_for_rows_beyond_the_free_ones_and_for_the_text_before():
    assert QUICK.stage(1.0, rows=2, context=0) == 8e-3
    assert QUICK.stage(0.5, rows=6, context=10) == pytest.approx(0.5 * (8 + 4 + 5) * 1e-3)
    assert QUICK.transfer(1000) == 1e-3


def test_a_row_pays_for_the_experts_that_no_row_before_it_went_through():
    choices = [set(pair) for pair in combinations(range(5), 2)]
    for rows in (1, 2, 3):
        drawn = product(choices, repeat=rows)
        unions = [len(set().union(*chosen)) for chosen in drawn]
        assert touched(5, 2, rows) == pytest.approx(sum(unions) / len(unions))
    sparse = replace(QUICK, experts=5, chosen=2, expert=3.0)
    assert sparse.stage(1.0, 1, 0) == QUICK.stage(1.0, 1, 0)
    more = sparse.stage(0.5, 2, 0) - QUICK.stage(0.5, 2, 0)
    assert more == pytest.approx(0.5 * 1.2 * 3e-3)
    slow = sparse.slowed(2).stage(1.0, 9, 4)
    assert slow == pytest.approx(2 * sparse.stage(1.0, 9, 4))


def test_a_stage_is_timed_with_rows_that_choose_experts_of_their_own(monkeypatch):
    sizes = replace(CONFIG, family=FAMILIES["qwen3_moe"], experts=16, chosen=2)
    like = torch.empty(0, dtype=torch.float32)
    stage, touches = random_stage(sizes, 1, like, "none", 256), []
    route = Experts.route

    def watched(experts, x_TD):
        weights, chosen = route(experts, x_TD)
        touches.append((len(x_TD), len(chosen.unique())))
        return weights, chosen

    monkeypatch.setattr(Experts, "route", watched)
    assert [*passes(stage, inputs(sizes, like), 1.0, 256)]
    most = dict(touches)
    assert most[1] == 2 and most[16] > 8 and most[128] == 16


def test_rows_that_are_timed_leave_nothing_behind():
    stage = Stage(TINY.slice(0, 4), TINY.new_cache)
    tokens = torch.arange(16)
    stage.apply(Segment(0, [0, 1, 2], [0, 0, 1], [0, 1, 2], 3, tokens[:3]))
    first, again = (computed_rows(stage, 0, range(3, 7), tokens) for _ in range(2))
    assert first.shape == (4, CONFIG.hidden) and torch.equal(first, again)
    assert stage.cache(0).nodes == [] and stage.cache(0).settled == 3


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_slowed_down_is_the_same_cluster_in_slow_motion(name):
    slow = PROFILES[name].slowed(4)
    assert slow.stage(0.25, 80, 500) == pytest.approx(4 * PROFILES[name].stage(0.25, 80, 500))
    assert slow.transfer(8192) == pytest.approx(4 * PROFILES[name].transfer(8192))
    assert (slow.free, slow.layers, slow.latency) == (PROFILES[name].free,
                                                      PROFILES[name].layers,
                                                      4 * PROFILES[name].latency)


def test_by_a_modelled_clock_everything_takes_exactly_its_time(tmp_path):
    clock = VirtualClock(5.0)
    trace = Trace(str(tmp_path), 0, clock)
    pace = Pace(QUICK, clock, trace)
    cache = TINY.new_cache()
    positions = admit_text(cache, 3)
    with trace.span("forward"):
        SlowSlice(TINY.whole, pace, 1.0)(torch.tensor([1, 2, 3]), positions, cache, {})
    after = 5.0 + QUICK.stage(1.0, 3, 2)
    assert clock.now() == pytest.approx(after)
    passes = SlowPasses(lambda readings: ["read"] * len(readings), pace)
    network, other = SimpleNamespace(network="one", source=""), SimpleNamespace(network="two", source="")
    assert passes([reading(network, 0)]) == ["read"] and clock.now() == pytest.approx(after), "only text was read"
    assert len(passes([reading(network, 1), reading(network, 1)])) == 2
    assert clock.now() == pytest.approx(after + 2e-3), "one pass for two requests"
    passes([reading(network, 1), reading(other, 1)])
    assert clock.now() == pytest.approx(after + 6e-3), "two networks"
    passes([reading(network, 2), reading(network, 5)])
    assert clock.now() == pytest.approx(after + 8e-3 + 2e-3 * 2 * QUICK.row / QUICK.model), "rows beyond"
    trace.close()
    spans = {span["name"]: span for span in read(tmp_path)}

    assert (spans["forward"]["t0"], spans["forward"]["t1"]) == (5.0, pytest.approx(after))
    assert all(span["t1"] == pytest.approx(span["t0"])
               for span in read(tmp_path) if span["name"] == "late")


def reading(draft, asked):
    return Reading(draft, None, None, None, asked)


def test_messages_share_a_wire_in_order_and_control_does_not_wait_for_data():
    came, start = [], time.monotonic()
    data, control = (Lane(lambda msg: came.append((type(msg), time.monotonic() - start)),
                          Pace(QUICK), 0.0, print)
                     for _ in range(2))
    for rows in (20, 10):
        data.put(segment(rows, 4))  # 20.5 and 10.2 ms on the wire
    control.put(Prune(0, 0, 0, 0, []))
    control.close()
    data.close()
    assert [kind for kind, _ in came] == [Prune, Segment, Segment]
    assert came[1][1] >= 21.48e-3 and came[2][1] >= 31.72e-3


def test_a_latency_that_varies_changes_no_order():
    came = []
    lane = Lane(lambda msg: came.append(msg.keep[0]),
                Pace(replace(QUICK, jitter=5, loss=0.3, repeat=5)), 0.0, print)
    for number in range(6):
        lane.put(Prune(0, 0, 0, 0, [number]))
    lane.close()
    assert came == list(range(6))


def test_the_wires_of_each_rank_are_late_at_their_own_times():
    placement = Placement.of([0, 2, 2], 1)
    seeds = set()
    for rank in range(3):
        connections = _connections(rank, placement, lambda peers: SimpleNamespace(
            send=print, broadcast=print, takes=0.0, failed=print), (QUICK, OFF), None, None)
        [link] = connections.links
        seeds |= {lane._seed for lane in link._lanes}
        for lane in link._lanes:
            lane.close()
    assert len(seeds) == 6


def test_the_size_of_a_message_is_that_of_the_model_that_it_stands_for():
    inner = Segment(0, [1, 2], [0, 1], [1, 2],
                    0, torch.zeros(2, 4), torch.zeros(2, 12))
    assert size(segment(3, 4), QUICK) == 3 * 1024
    assert size(inner, QUICK) == 2 * (24 + 4 * 1000)
    assert size(Segment(0, [1], [0], [1],
                        0, torch.tensor([7])), QUICK) == 32
    assert (size(Prune(0, 1, 0, 2, [5, 6]), QUICK), size(Reset(0), QUICK), size(segment(0, 4), QUICK)) == (16, 0, 0)


@pytest.mark.parametrize("strategy", "autoregressive serial naive pruned continuous pipedec".split())
def test_every_strategy_writes_its_text_in_an_emulated_cluster(strategy):
    fast = Pace(QUICK.slowed(0.1))
    with pipeline(TINY, 2, strategy, TINY.eagle(),
                  wrap=lambda link: SlowLink(link, fast)) as decoder:
        decoder.passes = SlowPasses(read_all, fast)
        assert write(decoder, PROMPT, NEW, SAMPLER) == TINY.text(PROMPT, NEW, SAMPLER)


def test_the_wires_of_a_profile_can_be_chosen_and_this_machines_tuning_does_not_count():
    cluster = parse(["profile=jetson-7b", "wires=125,2", "slowdown=2"]).cluster
    assert (cluster.mbps, cluster.latency, cluster.step) == (62.5,
                                                             4.0, pytest.approx(2 * (2.9 + 0.5)))
    assert parse([]).cluster is None
    assert parse(["profile=jetson-7b"]).tree.init.least_score == -math.inf
    assert parse(["profile=jetson-7b", "min_probability=0.5"]).tree.init.least_score == math.log(0.5)


@pytest.mark.parametrize("words, sentence", [
    ("wires=100", "wires only works with an emulated cluster: name one, as in profile=jetson-7b"),
    ("profile=jetson", "choose one of none, jetson-7b"),
    ("profile=wifi slowdown=0", "slowdown=0.0 is not possible"),
    ("profile=wifi wires=-1", "wires=-1 is not possible"),
    ("profile=wifi wires=,2,3", "wires=,2,3 is not possible")])
def test_what_is_no_cluster_is_refused(words, sentence):
    with refused(sentence):
        parse(words.split())
