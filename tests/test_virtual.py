"""Virtual time: the same texts as with real stages, in the time that the profile says, to the last digit each time."""
from __future__ import annotations

import threading
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from random import Random
from typing import Callable

import numpy as np
import pytest
import torch

from config.methods import METHODS
from config.profiles import PROFILES
from launch.ask import GENERATE
from launch.pipeline import Pipeline
from launch.run import run
from model.sample import Sampler
from pipeline.answers import Request
from pipeline.link import Link
from pipeline.messages import Message, Prune, Reset, Segment, Start, Visit, newest_request, segments_of
from pipeline.pacing import Pacing
from pipeline.requests import Ring
from pipeline.stage import Stage
from pipeline.stage_times import StageTimes
from pipeline.trace import OFF, read
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.paths import Paths
from sim.stages import VirtualStage, Work
from sim.wires import NODE_BYTES, ModelledWire
from tests.json_files import save_json
from tests.test_emulate import QUICK
from tests.tiny import CONFIG, TINY

PLAIN = replace(QUICK, row=0, free=9, token=0, mbps=1e9)
QUESTION = "What does a baker do?"


def paths() -> Paths:
    slices = [TINY.slice(0, 1), TINY.slice(1, 4)]
    return Paths(slices, (1, 2), TINY.lm_head.weight)


def test_what_is_said_of_a_path_is_what_the_whole_model_computes_and_is_the_same_ever_after():
    known = paths()
    text = [5, 7, 11, 2]
    numbers = []
    for token in text:
        numbers.append(known.after(numbers[-1] if numbers else known.root, token))
    last, inner = known.outputs(numbers)
    sibling = known.after(numbers[1], 30)
    known.outputs([known.after(sibling, 4), sibling])
    again, _ = known.outputs(numbers)

    assert torch.equal(again, last) and inner.shape == (4, 2 * CONFIG.hidden)
    for path, tokens in ((numbers, text), ([sibling], [5, 7, 30])):
        hidden, _ = known.outputs([path[-1]])
        torch.testing.assert_close(TINY.lm_head(hidden)[0], TINY.logits(tokens)[-1])


def test_memory_grows_with_the_paths_and_is_given_back():
    known, path = paths(), Paths.root
    for token in range(40):
        for other in range(30):
            known.after(path, other)
        path = known.after(path, token)
    [row], _ = known.outputs([path])
    torch.testing.assert_close(TINY.lm_head(row),
                               TINY.logits(list(range(40)))[-1])
    known.clear()
    assert known.after(known.root, 3) == 0


def test_a_wire_carries_one_message_after_the_other_and_none_overtakes():
    wire = ModelledWire(PROFILES["wifi"])
    moments = [wire.arrival(segment(0, 16), sent_at=0.001 * i) for i in range(40)]
    leaves = 16 * (24 + 8) * 8 / 200e6
    assert moments == sorted(moments)
    assert all(later >= 0.001 * i + leaves + 0.003 for i, later in enumerate(moments))


def test_the_delays_of_a_wire_are_the_latency_its_jitter_and_each_loss():
    """A message is lost n times with probability 0.2 ** n * 0.8, so it is sent 1.25 times on average."""
    wire = ModelledWire(replace(PLAIN, latency=3, jitter=17, loss=0.2, repeat=1000))
    delays = np.array([wire.arrival(Reset(0), 100.0 * index) - 100.0 * index for index in range(20_000)])
    losses, rest = np.divmod(delays, 1.0)

    assert rest.min() >= 0.003 - 1e-6 and rest.max() < 0.020 + 1e-6
    np.testing.assert_allclose(rest.mean(), 0.0115, rtol=0.01)
    np.testing.assert_allclose(rest.std(), 0.017 / np.sqrt(12), rtol=0.02)
    shares = np.bincount(losses.astype(int), minlength=4)[:4] / len(delays)
    np.testing.assert_allclose(shares, 0.8 * 0.2 ** np.arange(4), atol=0.01)


def test_a_wire_that_restarts_repeats_its_delays_and_wires_differ_in_theirs():
    def delays(wire):
        return [wire.arrival(Reset(0), index) - index for index in range(50)]

    first, second = (ModelledWire(PROFILES["wifi"], seed=seed) for seed in (1, 2))
    first_delays = delays(first)
    first.arrival(Reset(0), 1e6)
    first.restart()
    assert delays(first) == first_delays != delays(second)


def test_every_wire_of_a_cluster_is_late_at_its_own_times():
    cluster = Cluster(PROFILES["wifi"], VirtualClock(), [[Work(lambda rows, text: 0.004, layers=4)] * 3], paths(),
                      [OFF] * 4)
    delays = [tuple(wire.arrival(Reset(0), 1000.0 + index) for index in range(9)) for wire in cluster._wires]
    assert len(delays) == 7 and len(set(delays)) == 7


def segment(first: int, rows: int, request: int = 0) -> Segment:
    nodes = list(range(first, first + rows))
    parents = [max(0, node - 1) for node in nodes]
    return Segment(request, nodes, parents, nodes, rows if not first else 0, torch.tensor(nodes) % CONFIG.vocab)


def cluster(stages: int = 2) -> tuple[Link, VirtualClock]:
    clock = VirtualClock()
    work = Work(lambda rows, text: 0.004, layers=4)
    [link] = Cluster(PLAIN, clock, [[work] * stages],
                     paths(), [OFF] * (stages + 1)).links
    return link, clock


def cluster_at_work() -> tuple[Link, VirtualClock]:
    """Two stages on their way with a text of three tokens and a guess."""
    link, clock = cluster()
    link.send(segment(0, 3))
    link.send(segment(3, 1))
    return link, clock


def test_a_segment_takes_its_wires_and_its_stages_and_the_next_one_follows_a_stage_behind():
    link, clock = cluster_at_work()
    assert not link.ready
    first = link.recv()
    assert clock.now() == pytest.approx(3 * 0.001 + 2 * 0.004)
    assert first.nodes == [0, 1, 2]
    assert link.recv().nodes == [3]
    assert clock.now() == pytest.approx(0.011 + 0.004)


def test_a_prune_overtakes_and_a_segment_that_dies_is_given_up_between_two_layers():
    link, clock = cluster_at_work()
    clock.sleep_until(0.0055)  # the second is computed at stage 1 from 5 ms on, in layers of 1 ms
    link.broadcast(Prune(0, 2, 1, 4, []))
    link.recv()
    dead = link.recv()
    assert dead.nodes == [] and clock.now() == pytest.approx(0.011)  # given up at 7 ms, it is at stage 2 at 8


def test_rows_that_are_dead_when_they_come_cost_nothing():
    link, clock = cluster()
    link.send(segment(0, 3))
    link.recv()
    link.broadcast(Prune(0, 2, 1, 4, []))
    start = clock.now()
    clock.sleep_until(start + 0.001)
    link.send(segment(3, 1))
    assert link.recv().nodes == []
    assert clock.now() == pytest.approx(start + 0.001 + 3 * 0.001)


def test_rest_ends_with_a_message_or_at_its_moment():
    link, clock = cluster(1)
    link.send(segment(0, 1))
    link.wait_until(0.002)
    assert clock.now() == 0.002 and not link.ready
    link.wait_until(1.0)
    assert clock.now() == pytest.approx(0.006) and link.ready


def messages() -> list[Message]:
    """What may come to a stage: text, guesses of which some die, prunes ahead of their requests, texts that stay."""
    guesses = Segment(0, [3, 4, 5], [2, 2, 4],
                      [3, 3, 4], 0, torch.tensor([8, 9, 10]))
    ahead = Prune(1, tip=22, parent=21, horizon=23, keep=[])
    after = Segment(2, [31, 32, 33], [30, 31, 31],
                    [2, 3, 3], 1, torch.tensor([11, 12, 13]))
    return [segment(0, 3), guesses, Prune(0, 4, 2, 6, [5]), ahead, segment(20, 3, 1),
            segment(6, 1), Reset(0, 2), Start(2, 30, 0, 1, 2), Reset(1), Prune(1, 23, 22, 24, []),
            after, Prune(2, 32, 31, 34, []), Reset(7), Reset(2)]


def test_a_stage_in_virtual_time_passes_on_and_holds_what_a_real_stage_does():
    passed: list[Message] = []
    due: list[tuple[float, Callable[[float], None]]] = []
    virtual = VirtualStage(lambda moment, event: due.append((moment, event)), Work(lambda rows, text: 0.004, 4),
                           lambda msg, now: passed.append(msg), OFF)
    real = Stage(TINY.slice(0, 4), TINY.new_cache)
    for now, message in enumerate(messages()):
        result = real.apply(message)
        virtual.hear(message, now)
        while due:
            moment, event = due.pop(0)
            event(moment)
        if result is not None:
            theirs = passed.pop()
            assert type(theirs) is type(result) and newest_request(theirs) == newest_request(result)
            assert getattr(theirs, "nodes", []) == getattr(result, "nodes", [])
        assert not passed

        held = [{number: (cache.settled, cache.nodes) for number, cache in stage.caches.items()}
                for stage in (virtual.stage, real)]
        assert held[0] == held[1]


# --- whole pipelines --------------------------------------------------------------------------------------------------

def answered(pipeline: Pipeline, temperature: float) -> tuple[list[int], float]:
    """The token ids of an answer, and its seconds."""
    prompt = pipeline.text.prompt_ids([QUESTION], "vicuna")
    answer = pipeline.decoder.complete(Request(prompt, Sampler(temperature, seed=3), 12))
    return answer.token_ids, answer.prefill_seconds + answer.decode_seconds


@lru_cache(maxsize=None)
def answered_by(method: str, temperature: float, **options) -> tuple[list[int], float]:
    with Pipeline.open("toy", pipeline_type=method, dtype="float64", **options) as pipeline:
        return answered(pipeline, temperature)


@pytest.mark.parametrize("method, temperature", [*zip(METHODS, cycle([0, 1]))])
def test_every_method_writes_in_virtual_time_what_is_written_in_real_time_and_takes_the_same_time_twice(
        method, temperature):
    before = set(threading.enumerate())
    first, again = (answered_by.__wrapped__(method, temperature, time="virtual", profile="wifi") for _ in range(2))
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in started if name.startswith(("rank", "emulated"))]
    assert first == again
    assert first[0] == answered_by("ar", temperature, link="threads")[0]


def test_plain_decoding_takes_what_the_profile_says_and_no_more():
    """Every token of `ar` goes once over four stages, five wires, the verdict and rank 0's own work."""
    with Pipeline.open("toy", pipeline_type="ar", time="virtual", profile="jetson-7b") as pipeline:
        ids, _ = answered(pipeline, 0)
        answer = pipeline.decoder.complete(Request([1, 5, 9], Sampler(), 3))
    profile = PROFILES["jetson-7b"]
    stages = sum(4 * profile.stage(0.25, 1, context) for context in (3, 4))
    wires = 2 * (5 * profile.latency / 1e3 + profile.transfer(24 + 8) + 4 * profile.transfer(24 + profile.row_bytes))
    message, row, _ = profile.own_times
    assert answer.decode_seconds == pytest.approx(stages + wires + 2 * (profile.verdict + message + row) / 1e3)
    assert len(ids) == 12


def test_the_start_finds_a_wire_that_is_slower_than_the_stages(tmp_path):
    """Of wires with 100 Mbit/s one has 10: sixteen rows of 8 KB take it 105 ms, a stage 60, and a mean wire 35."""
    path = tmp_path / "uneven.json"
    path.write_text('{"like": "jetson-7b", "mbps": 100, "factors": [1, 1, 1, 1], "links": [[2, 3, 1.5, 10]]}')
    with Pipeline.open("toy", time="virtual", profile=str(path)) as pipeline:
        assert pipeline.decoder.cfg.stream.segment == 16
        seconds_of_rows = PROFILES["jetson-7b"].wired(1.5, 10).transfer(16 * (8192 + NODE_BYTES))
        assert pipeline.ring.pacing.times.slowest(16) == pytest.approx(seconds_of_rows, rel=0.02)


STAGE_SECONDS = PROFILES["jetson-7b"].stage(0.25, 1, 40)
SINGLE_ROW_VISITS = (Visit(1, STAGE_SECONDS),) * 4


def note_single_row(ring: Ring, node: int, estimate_is_late: bool) -> None:
    """Note that a row came back in the time that the profile says.

    A message before it was given up at once. If `estimate_is_late`, rank 0 took it to be in the first stage until then.
    """
    round_trip = 4 * STAGE_SECONDS + 5 * PROFILES["jetson-7b"].latency / 1e3

    ring.clock.set(ring.clock.now() + 1.0)
    if estimate_is_late:
        ring.pacing.first_stage.send([node + 1, node + 2], ring.clock.now())
    ring.pacing.first_stage.send([node], ring.clock.now())
    if estimate_is_late:
        ring._measure([Segment(0, [], [], [], 0, torch.zeros(0))])

    ring.clock.set(ring.clock.now() + round_trip)
    ring._measure([Segment(0, [node], [node], [node], 0, torch.zeros(1), None, SINGLE_ROW_VISITS)])


def test_a_question_takes_the_same_time_after_a_long_series_of_others():
    """A series of several requests at once leaves single rows that seemed to come back before their stages had ended.

    A thousand rows later the wires of a single row seemed to take almost minus 9 seconds, and a second row 9 more.
    """
    with Pipeline.open("toy", time="virtual", profile="jetson-7b", draft="eagle+suffix", max_new_tokens=64) as pipeline:
        ring, decoder = pipeline.ring, pipeline.decoder
        assert decoder.ring is ring
        seconds = []
        for num_late_rows in (0, 1000):
            pipeline.reset_measurements()
            assert ring.pacing.times.slowest(1) > 0, "stages were measured at the start"
            note_single_row(ring, 0, estimate_is_late=False)
            for _ in range(num_late_rows):
                ring.pacing.times.learn(SINGLE_ROW_VISITS, 3 * STAGE_SECONDS)
            answer = pipeline.generate(QUESTION, temperature=1.0, seed=3).answer
            seconds.append((answer.prefill_seconds, answer.decode_seconds))

        ring.pacing = Pacing(StageTimes())
        for node in range(1000):
            note_single_row(ring, node, estimate_is_late=True)
    assert seconds[1] == seconds[0]
    assert ring.pacing.times.slowest(1) == pytest.approx(STAGE_SECONDS)
    assert ring.pacing.times.seconds_per_row(1) == 0.0


def test_only_one_segment_of_guesses_leaves_behind_a_prompt_before_anything_was_measured(monkeypatch):
    with Pipeline.open("toy", time="virtual", profile="jetson-7b", pipeline_type="streaming",
                       draft="suffix") as pipeline:
        decoder, ring = pipeline.decoder, pipeline.ring
        ring.pacing = Pacing(StageTimes())
        num_returned, put, num_guesses_first = ring.returned_messages, ring.put, []

        def put_and_note(segment: Segment) -> None:
            if ring.returned_messages == num_returned and not segment.text:
                num_guesses_first.append(len(segment.nodes))
            put(segment)

        monkeypatch.setattr(ring, "put", put_and_note)
        prompt_ids = Random(0).choices(range(10, 16), k=150)  # each token has followed each other one
        decoder.complete(Request(prompt_ids, Sampler(), 8))
    assert len(num_guesses_first) == 1


def test_a_trace_of_a_virtual_run_has_every_rank_and_says_that_it_is_simulated(tmp_path):
    with Pipeline.open("toy", time="virtual", profile="lan-1g", trace=str(tmp_path), max_new_tokens=8) as pipeline:
        pipeline.generate(QUESTION)
    spans = read(tmp_path)
    forwards = {span["rank"] for span in spans if span["name"] == "forward"}
    assert forwards == {1, 2, 3, 4}
    assert '"kind": "simulated"' in (tmp_path / "run.json").read_text()


def test_what_virtual_time_cannot_do_is_refused_with_the_fix(error_of):
    for words, message in (("time=virtual", "profile=jetson-7b"),
                           ("time=virtual profile=wifi slowdown=2", "leave it out"),
                           ("time=virtual profile=wifi hosts=h", "leave hosts out")):
        assert message in error_of(run, GENERATE, ["toy", *words.split()])


def test_only_what_the_text_reaches_is_computed_and_all_methods_share_it():
    with Pipeline.open("toy", time="virtual", profile="jetson-7b", draft="eagle+suffix", max_new_tokens=12) as pipeline:
        computed = []
        ring = pipeline.ring
        said, ring.look_up = ring.look_up, lambda paths: computed.append(len(paths)) or said(paths)
        for method in ("ar", "naive", "continuous", "streaming"):
            decoder = pipeline.decoder_for(replace(pipeline.config, pipeline_type=method))
            prompt = pipeline.prompt_ids(QUESTION, pipeline.config.template)
            computed.clear()  # of what the decoder has measured
            answer = decoder.complete(pipeline.request(prompt, pipeline.config, ""))
            assert sum(computed) <= len(prompt) + 2 * answer.new_tokens, method  # features of a tip, and its logits


def test_logprobs_are_the_same_in_virtual_time():
    found = []
    for options in ({}, {"time": "virtual", "profile": "jetson-7b"}):
        with Pipeline.open("toy", dtype="float64", max_new_tokens=6, link="threads", **options) as pipeline:
            answer = pipeline.generate(QUESTION, logprobs=2, prompt_logprobs=True).answer
            lists = answer.logprobs, answer.prompt_logprobs
            found.append([[one and (one.token, round(one.logprob, 9)) for one in each]
                          for each in lists])
    assert found[0] == found[1] and len(found[0][0]) == 6


# --- rank 0's own time ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", ["ar", "serial"])
def test_rank_0s_own_work_takes_what_the_profile_says_of_it_and_changes_no_text(method, tmp_path, monkeypatch):
    """These methods wait for each answer, and the prompt is one segment: all of rank 0's work delays the answer."""
    done = np.zeros(3)  # messages that came back, rows sent, guesses after which networks guessed
    send, head, passes = Cluster.send, SlowHead.__call__, SlowPasses.__call__

    def watched_send(cluster, message, send_at):
        done[1] += sum(len(segment.nodes) for segment in segments_of(message))
        return send(cluster, message, send_at)

    def watched_head(slow_head, rows):
        done[0] += 1
        return head(slow_head, rows)

    def watched_passes(slow_passes, readings):
        done[2] += sum(reading.num_logit_rows for reading in readings)
        return passes(slow_passes, readings)

    for owner, name, watched in ((Cluster, "send", watched_send), (SlowHead, "__call__", watched_head),
                                 (SlowPasses, "__call__", watched_passes)):
        monkeypatch.setattr(owner, name, watched)

    ids, seconds, works = [], [], []
    for own_times in ([0, 0, 0], [2, 0.25, 0.5]):
        save_json(tmp_path / f"{own_times[0]}.json", {"like": "lan-1g", "own_times": own_times})
        with Pipeline.open("toy", pipeline_type=method, time="virtual",
                           profile=str(tmp_path / f"{own_times[0]}.json")) as pipeline:
            done[:] = 0
            answer = pipeline.decoder.complete(Request([1, 5, 9], Sampler(seed=3), 12))
        ids.append(answer.token_ids)
        seconds.append(answer.seconds)
        works.append(done.copy())

    assert ids[0] == ids[1] and (works[0] == works[1]).all() and works[0][:2].all()
    assert bool(works[0][2]) == (method == "serial")
    assert seconds[1] - seconds[0] == pytest.approx(works[0] @ [2, 0.25, 0.5] / 1e3)


def test_in_real_time_rank_0s_own_work_takes_the_time_that_it_takes():
    """Python itself spends it; a profile in slow motion would count it with the rest."""
    profile = replace(QUICK, own_times=(4.0, 2.0, 1.0))
    virtual, real = Pace(profile, VirtualClock()), Pace(profile)
    assert virtual.own_seconds(1, 2, 3) == 0.011 and real.own_seconds(1, 2, 3) == 0
    assert profile.slowed(3).own_times == (12, 6, 3)
