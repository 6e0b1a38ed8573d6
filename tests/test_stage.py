"""A stage gives up what died while it was computed, and its state stays a function of the messages it has had."""
import pytest
import torch

from pipeline.messages import Prune, Reset, Segment
from pipeline.stage import Stage
from tests.tiny import TINY

TEXT = Segment(0, [0, 1, 2], [0, 0, 1],
               [0, 1, 2], 3, torch.tensor([5, 17, 40]))
GUESSES = Segment(0, [3, 4], [2, 2],
                  [3, 3], 0, torch.tensor([8, 9]))
MISS = Prune(0, tip=5, parent=2, horizon=6, keep=[])  # both guesses were wrong: node 5 is what follows node 2
HIT = Prune(0, tip=4, parent=2, horizon=6, keep=[])
AFTER_MISS = Segment(0, [5, 6], [2, 5],
                     [3, 4], 1, torch.tensor([30, 31]))
AFTER_HIT = Segment(0, [6], [4], [4], 0, torch.tensor([31]))


def stage():
    made = Stage(TINY.slice(0, 4),
                 TINY.new_cache, num_requests=2)
    made.apply(TEXT)
    return made


def after(questions, prune):
    """News that comes before a layer: the prune, when it has been asked for so often."""
    asked = iter([None] * questions + [prune])
    return lambda: next(asked, None)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_segment_that_dies_is_given_up_between_two_layers_and_leaves_nothing_behind(layers):
    calm, hurried = stage(), stage()
    calm.apply(GUESSES)
    calm.apply(MISS)
    given_up = hurried.apply(GUESSES, after(layers, MISS))
    assert isinstance(given_up, Segment) and given_up.nodes == []
    assert torch.equal(hurried.apply(AFTER_MISS).x, calm.apply(AFTER_MISS).x)
    assert hurried.cache(0).nodes == calm.cache(0).nodes


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_segment_of_which_a_row_lives_is_finished_before_the_prune_is_obeyed(layers):
    calm, hurried = stage(), stage()
    said = calm.apply(GUESSES)
    calm.apply(HIT)
    assert torch.equal(hurried.apply(GUESSES, after(layers, HIT)).x, said.x)
    assert hurried.cache(0).nodes == calm.cache(0).nodes
    assert torch.equal(hurried.apply(AFTER_HIT).x, calm.apply(AFTER_HIT).x)


def other(request, nodes):
    """The same text, as that of another request."""
    return Segment(request, nodes, [nodes[0], nodes[0], nodes[1]],
                   TEXT.pos, TEXT.text, TEXT.x)


OTHER = other(1, [10, 11, 12])


def test_requests_do_not_see_each_other():
    alone, shared = stage(), stage()
    assert torch.equal(shared.apply(OTHER).x, stage().apply(OTHER).x)
    shared.apply(Prune(1, tip=13, parent=12, horizon=14, keep=[]))  # above the ids of the guesses of the first request
    assert torch.equal(shared.apply(GUESSES).x, alone.apply(GUESSES).x)
    shared.apply(Reset(1))
    shared.apply(HIT)
    alone.apply(HIT)
    assert torch.equal(shared.apply(AFTER_HIT).x, alone.apply(AFTER_HIT).x)


def test_a_prune_of_a_request_that_is_over_opens_nothing():
    served = stage()
    served.apply(Reset(0))
    served.apply(HIT)
    assert not served.caches


def test_a_prune_ahead_of_the_rows_that_it_gives_up_saves_their_time():
    served = stage()
    served.apply(Prune(1, tip=12, parent=11, horizon=13, keep=[]))
    given_up = served.apply(OTHER)
    assert isinstance(given_up, Segment) and given_up.nodes == [12]
    served.apply(Reset(1))
    assert list(served.caches) == [0]


def test_a_prune_ahead_of_its_request_takes_no_cache_from_those_in_front_of_it():
    served = stage()
    for request in (2, 3, 4):
        served.apply(Prune(request, tip=10 * request,
                           parent=10 * request, horizon=10 * request + 1, keep=[]))
    assert torch.equal(served.apply(OTHER).x, stage().apply(OTHER).x)
    assert set(served.caches) == {0, 1}


def test_the_caches_of_all_requests_are_taken_at_the_start_and_used_again():
    taken = []

    def new_cache():
        taken.append(TINY.new_cache())
        return taken[-1]

    served = Stage(TINY.slice(0, 4), new_cache, num_requests=3)
    assert len(taken) == 3
    for request in range(5):
        served.apply(other(request, [10 * request, 10 * request + 1, 10 * request + 2]))
        served.apply(Reset(request))
    assert len(taken) == 3
