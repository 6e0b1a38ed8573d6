"""How many rows a segment holds follows from what rows cost."""
from dataclasses import replace

import pytest

from config.profiles import PROFILES
from launch.probe import SIZES, segment_rows, segment_seconds
from model.sample import Sampler
from pipeline.stage import Stage
from sim.clock import Pace, VirtualClock
from sim.devices import SlowSlice
from tests.tiny import TINY, pipeline, write

BASE = replace(PROFILES["server"], model=40, free=16, token=0)


@pytest.mark.parametrize("free, row, rows", [(64, 1.0, 64),
                                             (32, 1.0, 32), (16, 1.0, 16)])
def test_a_segment_holds_as_many_rows_as_cost_nothing(free, row, rows):
    clock = VirtualClock()
    pace = Pace(replace(BASE, free=free, row=row), clock)
    with pipeline(TINY, 2, "continuous") as decoder:
        for stage in decoder.stages:
            assert isinstance(stage, Stage)
            stage.part = SlowSlice(stage.part, pace, 0.5)
        decoder.ring.clock = clock
        seconds_by_rows = segment_seconds(decoder.ring, 200)
        assert segment_rows(seconds_by_rows) == rows and [*seconds_by_rows] == [*SIZES[:SIZES.index(rows) + 2]]
        assert write(decoder, [5, 6, 7], 8, Sampler()) == TINY.text([5, 6, 7], 8, Sampler())


def test_a_context_that_is_shorter_than_a_segment_bounds_it():
    with pipeline(TINY, 1, "continuous") as decoder:
        assert segment_rows(segment_seconds(decoder.ring, SIZES[0] - 3)) == SIZES[0] - 3
