"""Wires so long that 64 segments of a request are in flight: one text, as ever."""
from dataclasses import replace
from itertools import product

import pytest

from config.trees import Growth
from model.sample import Sampler
from pipeline.messages import Segment
from pipeline.stage_times import FirstStage
from tests.test_prunes import delaying, losing
from tests.tiny import TINY, TREE, Oracle, pipeline, write

PROMPT = [8, 1, 33, 25, 46, 12, 9]
NEW = 90
NUM_IN_FLIGHT = 64
DEEP = Growth(320, 90, 4, 4, anywhere=True)
LONG = replace(TREE, init=DEEP, expand=DEEP, stream=DEEP, layer=replace(DEEP, nodes=1000, depth=1000))
SPOILS = {"no": lambda: lambda link: link, "lost": lambda: losing(0.5, seed=1), "late": lambda: delaying(4, seed=2)}


class LongWires:
    """Rank 0's link, on which an answer is seen once 64 segments are in flight, or when rank 0 can only wait."""

    def __init__(self, link):
        self._link, self.num_in_flight, self.most = link, 0, 0

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, msg):
        self.num_in_flight += isinstance(msg, Segment)
        self.most = max(self.most, self.num_in_flight)
        self._link.send(msg)

    def recv(self):
        msg = self._link.recv()
        self.num_in_flight -= isinstance(msg, Segment)
        return msg

    @property
    def ready(self):
        return self.num_in_flight >= NUM_IN_FLIGHT and self._link.ready


@pytest.mark.parametrize("strategy, spoil, temperature", [
    *product(("streaming", "continuous", "pipedec"), ["no"], [0.0, 1.0]),
    *product(("streaming", "continuous"), ["lost", "late"], [1.0])])
def test_with_64_segments_in_flight_and_prunes_lost_or_late_the_text_stays(strategy, spoil, temperature, monkeypatch):
    monkeypatch.setattr(FirstStage, "ready_at", 0.0)
    sampler, links = Sampler(temperature, seed=5), []
    text = TINY.text(PROMPT, NEW, sampler)

    def wrap(link):
        links.append(LongWires(spoiled(link)) if not links else link)
        return links[-1]

    spoiled = SPOILS[spoil]()
    with pipeline(TINY, 3, strategy, Oracle(PROMPT + text), LONG, wrap) as decoder:
        decoder.ring.depth = NUM_IN_FLIGHT
        assert write(decoder, PROMPT, NEW, sampler) == text
    assert links[0].most >= NUM_IN_FLIGHT
