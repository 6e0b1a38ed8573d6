"""Messages survive the wire, and the wire carries no code."""
import ast
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.transport import Inbox
from config.failure import PeerLost
from pipeline import messages
from pipeline.messages import (
    DTYPES,
    MAX_BODY_BYTES,
    Batch,
    Header,
    Prune,
    Reset,
    Segment,
    Start,
    Stop,
    packets,
    receive,
)
from tests.checkpoints import refused
from tests.tiny import in_threads

IDS = st.integers(0, 2**62)
two_rows = partial(Segment, 0, [1, 2], [0, 1], [1, 2], 0)


def back(msg):
    """What comes out on the other side, packet by packet."""
    sent = [(Header.read(header), body) for header, body in packets(msg)]
    received = receive(lambda: sent.pop(0))
    assert sent == []
    return received


def body_of(msg):
    """The body in which it is sent."""
    (_, body), = packets(msg)
    return body


def same(a, b):
    assert type(a) is type(b)
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value.cpu(), other)
        else:
            assert value == other


@given(st.lists(st.tuples(IDS, IDS, st.integers(0, 10**6)),
                max_size=70),
       st.sampled_from(DTYPES), st.integers(0, 9))
def test_segments_of_every_type_and_size_come_out_as_they_went_in(rows, dtype, width):
    shape = (len(rows), width) if width and rows else (len(rows),)
    nodes, parents, pos = ([row[i] for row in rows] for i in range(3))
    segment = Segment(0, nodes, parents, pos, len(rows) // 2,
                      (torch.randn(shape) * 9).to(dtype))
    same(back(segment), segment)


@given(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 9))
def test_inner_features_travel_with_a_segment_that_asks_for_them(rows, dtype, width):
    ids = list(range(rows))
    of_rows = partial(Segment, 0, ids, ids, ids, 0)
    x = (torch.randn(rows, 3) * 9).to(dtype)
    for state in (x, x.reshape(-1)[:rows].clone()):
        segment = of_rows(state, (torch.randn(rows, width) * 9).to(dtype))
        same(back(segment).take(range(0, rows, 2)),
             segment.take(range(0, rows, 2)))
    assert len(body_of(of_rows(x))) == len(body_of(of_rows(x, x[:, :0])))


@given(IDS, IDS, IDS, st.lists(IDS, max_size=90))
def test_prunes_come_out_as_they_went_in(tip, parent, horizon, keep):
    same(back(Prune(0, tip, parent, horizon, keep)),
         Prune(0, tip, parent, horizon, keep))


def test_a_request_that_starts_behind_another_and_a_text_that_stays_come_out_as_they_went_in():
    for msg in (Start(7, 30, 5, 12, 9),
                Reset(5, 12), Reset(0), Stop()):
        same(back(msg), msg)




@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_segments_of_several_requests_come_out_together(rows):
    segments = [Segment(i, list(range(n)), list(range(n)),
                        list(range(n)), n // 2, torch.randn(n, 3))
                for i, n in enumerate(rows)]
    batch = back(messages.joined(segments))
    for mine, theirs in zip(messages.segments_of(batch), segments, strict=True):
        same(mine, theirs)


def test_a_batch_of_other_things_than_segments_is_refused():
    with refused("a Stop in place of a segment"):
        back(Batch([Stop()]))


def test_a_strided_view_is_sent_as_it_looks():
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    segment = Segment(0, [1, 2, 3, 4], [0, 1, 2, 3], [5, 6, 7, 8], 0, x)
    same(back(segment), segment)


@given(st.lists(st.one_of(st.integers(-2, 9),
                          st.integers(-2**63, 2**63 - 1)),
                min_size=6, max_size=6))
def test_a_header_of_any_numbers_is_read_or_refused_and_asks_for_no_more_memory_than_a_message_may(numbers):
    try:
        header = Header.read(torch.tensor(numbers))
    except ValueError:
        return
    assert header.num_bytes <= MAX_BODY_BYTES
    if header.num_bytes < 1 << 16:
        with suppress(ValueError):
            receive(lambda: (header, torch.zeros(header.num_bytes, dtype=torch.uint8)))


def test_a_body_of_another_length_than_its_header_says_is_refused():
    (header, body), = packets(two_rows(torch.zeros(2, 3)))
    with refused("a body of 87 bytes instead of 88"):
        receive(lambda: (Header.read(header), body[:-1]))


@pytest.mark.parametrize("kind, numbers, rows, sentence", [
    (Segment, [0, 3, 0, 0, 0, 0, 0, 0], 2, "a segment of 2 rows with 8 contradictory numbers"),
    (Segment, [0, 0, 5, 0, 0, 0, 0, 0, 0], 2, "a segment of 2 rows with 9"),
    (Segment, [0], 0, "a segment of 0 rows with 1"),
    (Segment, [0, 0, 0, 9], 0, "impossible visit"),
    (Prune, [0, 1, 2], 0, "a Prune of 3 numbers"), (Reset, [0], 0, "a Reset of 1 numbers"),
    (Start, [0] * 6, 0, "a Start of 6 numbers"), (Stop, [0], 0, "a Stop of 1 numbers"),
    (Batch, [], 0, "expected 1"), (Batch, [1, 1], 0, "expected 1")])
def test_numbers_of_another_count_or_that_contradict_each_other_are_refused(kind, numbers, rows, sentence):
    header = Header(messages.KINDS.index(kind), len(numbers), rows, 4, dtype=1)
    body = torch.zeros(header.num_bytes, dtype=torch.uint8)
    if numbers:
        body[:8 * len(numbers)].view(torch.int64)[:] = torch.tensor(numbers)
    with refused(sentence):
        receive(lambda: (header, body))


def test_a_segment_that_is_too_large_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr(messages, "MAX_BODY_BYTES", 100)
    with refused("give a smaller prefill_chunk"):
        packets(two_rows(torch.zeros(2, 30)))


def test_nothing_below_the_scripts_unpickles_what_a_peer_sent():
    for path in (Path(__file__).parents[1] / "pipeline").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
                   for alias in node.names}
        assert not modules & {"pickle", "marshal"} and not names & {"broadcast_object_list", "send_object_list"}, path


def test_a_prune_overtakes_data_and_the_rest_stays_in_order():
    inbox = Inbox()
    first = Segment(0, [1], [0], [1], 0, torch.tensor([5]))
    second = Reset(0)
    inbox.put(first)
    inbox.put(second)
    inbox.put(Prune(0, 1, 0, 2, []))
    assert isinstance(inbox.get(), Prune)
    assert inbox.get() is first and inbox.get() is second


def test_who_waits_for_a_lost_peer_learns_its_name():
    inbox, found = Inbox(), []

    def wait():
        try:
            inbox.get()
        except PeerLost as loss:
            found.append(str(loss))

    with in_threads(wait, [()]):
        inbox.fail(PeerLost("rank 3 was lost"))
        inbox.fail(PeerLost("rank 2 was lost"))
    assert found == ["rank 3 was lost"]


def test_what_stages_took_travels_with_a_segment():
    visits = messages.Visit(3, 0.25), messages.Visit(2, 1e-6)
    segment = two_rows(torch.zeros(2, 3), torch.zeros(2, 4), visits)
    same(back(segment), segment)
    same(back(segment.take([])), segment.take([]))
