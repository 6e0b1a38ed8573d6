"""Windows of one chain: the rows of each, how many are in flight, and what follows a miss."""
from collections import deque

import pytest

from config.trees import TreeConfig
from model.tree import TokenTree
from pipeline.strategies import Target, windows
from tests.tiny import Oracle

STAGE, ROUND_TRIP, LEVEL = 10, 120, 2  # milliseconds of a segment in a stage and round the ring, and of a guess
TEXT = [(7 * position) % 53 for position in range(200)]  # the oracle's guess for each seventh position is wrong
PROMPT_LENGTH, NUM_SETTLED = 3, 100  # far enough from the end of the text for full windows


class LongRing(Target):
    """A ring with long wires, which knows the text and counts its time; it notes windows, and tips that were pruned."""

    depth = 4

    def __init__(self, tree):
        self.tree, self.now, self.free_at = tree, 0, 0
        self.flights = deque()  # the nodes of each segment in flight, and when it comes back
        self.events, self.most_in_flight = [], 0

    @property
    def free(self):
        return self.now >= self.free_at

    def ready(self):
        return bool(self.flights) and self.flights[0][1] <= self.now

    def send(self, nodes):
        assert self.free, "a window would wait before the first stage"
        self.free_at = self.now + STAGE
        self.flights.append((nodes, self.now + ROUND_TRIP))
        self.events.append(nodes)
        self.most_in_flight = max(self.most_in_flight, len(self.flights))
        assert [self.tree.nodes[node].parent for node in nodes[1:]] == nodes[:-1]

    def wait(self):
        yield from ()
        nodes, _ = self.flights.popleft()
        for node in nodes:
            if node == self.tree.tip or node in self.tree.live:
                self.tree.nodes[node].target_token = TEXT[self.tree.nodes[node].pos + 1]

    def wait_until_free(self):
        yield from ()
        moments = [flight[1] for flight in self.flights] + [self.free_at] * bool(self.tree.num_unsent)
        self.now = max(self.now, min(moments))

    def prune(self):
        self.events.append(self.tree.tip)


class SlowOracle(Oracle):
    """An oracle whose guesses take time, and which has none from the position `num_known` on."""

    def __init__(self, ring, num_known, num_per_level):
        super().__init__(TEXT)
        self.ring, self.num_known, self.num_per_level = ring, num_known, num_per_level

    def grow(self, tree, growth, *worth_drafting):
        leaf = max(tree.live, default=tree.tip)
        if tree.nodes[leaf].pos + 1 >= self.num_known:
            return False
        self.ring.now += LEVEL
        for _ in range(self.num_per_level):
            yield from super().grow(tree, growth)
        return True


def flown(num_known, num_per_level=1):
    """The ring after NUM_SETTLED tokens of the text, prompt included, or some more."""
    tree = TokenTree(TEXT[:PROMPT_LENGTH], len(TEXT) - 1)
    ring = LongRing(tree)
    decoding = windows(tree, ring, SlowOracle(ring, num_known, num_per_level), TreeConfig())
    while len(tree.trunk) < NUM_SETTLED:
        next(decoding)
    assert tree.tokens == TEXT[:len(tree.trunk)]
    return ring


def test_as_many_windows_are_in_flight_as_the_first_stage_takes_in_a_round_trip_whatever_the_depth():
    ring = flown(len(TEXT))
    assert ring.most_in_flight == ROUND_TRIP // STAGE > ring.depth


@pytest.mark.parametrize("num_per_level", [1, 3])
def test_windows_leave_full_and_after_a_miss_the_next_one_begins_with_the_tip(num_per_level):
    ring = flown(len(TEXT), num_per_level)
    sent_before, tip, num_misses = set(ring.events[0]), None, 0
    for event in ring.events[1:]:
        if isinstance(event, int):
            tip = event
            continue

        assert len(event) == TreeConfig.run
        if tip is not None and tip not in sent_before:
            assert event[0] == tip, "a stale window left after the cancel"
            num_misses += 1
        sent_before.update(event)
    assert num_misses == sum(position % 7 == 0 for position in range(PROMPT_LENGTH, len(ring.tree.trunk)))


def test_a_window_is_not_held_back_for_guesses_that_do_not_come():
    ring = flown(0)
    tips = [event for event in ring.events if isinstance(event, int)]
    assert [event for event in ring.events[1:] if not isinstance(event, int)] == [[tip] for tip in tips[:-1]]
