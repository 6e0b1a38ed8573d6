"""Messages survive the wire, and the wire carries no code."""
from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import wire
from pipeline.messages import Prune, Reset, Segment, Start, Stop, Visit, joined, segments_of
from pipeline.transport import Inbox, PeerLost
from pipeline.wire import ASK, BATCH, DRAFTED, DTYPES, HEADER, LARGEST, Header, decode, encode, packets, receive

IDS = st.integers(0, 2**62)


def back(msg):
    """What comes out on the other side."""
    header, body = encode(msg)
    return decode(Header.read(header), body)


def same(a, b):
    assert type(a) is type(b)
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value.cpu(), other)
        else:
            assert value == other


@given(st.lists(st.tuples(IDS, IDS, st.integers(0, 10**6)), max_size=70), st.sampled_from(DTYPES), st.integers(0, 9))
def test_segments_of_every_type_and_size_come_out_as_they_went_in(rows, dtype, width):
    shape = (len(rows), width) if width and rows else (len(rows),)
    nodes, parents, pos = ([row[i] for row in rows] for i in range(3))
    segment = Segment(0, nodes, parents, pos, len(rows) // 2, (torch.randn(shape) * 9).to(dtype))
    same(back(segment), segment)


@given(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 9))
def test_inner_features_travel_with_a_segment_that_asks_for_them(rows, dtype, width):
    ids, x = list(range(rows)), (torch.randn(rows, 3) * 9).to(dtype)
    for state in (x, x.reshape(-1)[:rows].clone()):
        segment = Segment(0, ids, ids, ids, 0, state, (torch.randn(rows, width) * 9).to(dtype))
        same(back(segment).take(range(0, rows, 2)), segment.take(range(0, rows, 2)))
    assert len(encode(Segment(0, ids, ids, ids, 0, x))[1]) == len(encode(Segment(0, ids, ids, ids, 0, x, x[:, :0]))[1])


@given(IDS, IDS, IDS, st.lists(IDS, max_size=90))
def test_prunes_come_out_as_they_went_in(tip, parent, horizon, keep):
    same(back(Prune(0, tip, parent, horizon, keep)), Prune(0, tip, parent, horizon, keep))


def test_reset_and_stop_are_headers_alone():
    for msg in (Reset(0), Stop()):
        header, body = encode(msg)
        assert len(header) == HEADER and len(body) == 0 and isinstance(back(msg), type(msg))


def test_a_request_that_starts_behind_another_and_a_text_that_stays_come_out_as_they_went_in():
    for msg in (Start(7, 30, 5, 12, 9), Reset(5, 12)):
        same(back(msg), msg)


def through(msg):
    """What is received of a message, packet by packet."""
    wires = iter(packets(msg))

    def packet():
        header, body = next(wires)
        return Header.read(header), body
    return receive(packet)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_segments_of_several_requests_come_out_together(rows):
    segments = [Segment(i, list(range(n)), list(range(n)), list(range(n)), n // 2, torch.randn(n, 3))
                for i, n in enumerate(rows)]
    batch = through(joined(segments))
    for mine, theirs in zip(segments_of(batch), segments, strict=True):
        same(mine, theirs)


def test_a_batch_of_other_things_than_segments_is_refused():
    wires = iter([(Header(BATCH, rows=1), torch.empty(0, dtype=torch.uint8)), encode(Stop())])

    def packet():
        header, body = next(wires)
        return header if isinstance(header, Header) else Header.read(header), body
    with pytest.raises(ValueError, match="a Stop where a segment belongs"):
        receive(packet)


def test_a_strided_view_is_sent_as_it_looks():
    x = torch.arange(24.0).view(4, 6)[:, ::2]
    segment = Segment(0, [1, 2, 3, 4], [0, 1, 2, 3], [5, 6, 7, 8], 0, x)
    same(back(segment), segment)


@given(st.lists(st.one_of(st.integers(-2, 9), st.integers(-2**63, 2**63 - 1)), min_size=9, max_size=9))
def test_a_header_of_any_numbers_is_read_or_refused_and_asks_for_no_more_memory_than_a_message_may(numbers):
    try:
        header = Header.read(torch.tensor(numbers))
    except ValueError:
        return
    assert header.bytes == header.needs <= LARGEST
    if header.bytes < 1 << 20:
        body = torch.zeros(header.bytes, dtype=torch.uint8)
        if header.kind in (ASK, DRAFTED):  # zeros are no question and no tree
            with pytest.raises(ValueError, match="cut off|contradict"):
                decode(header, body)
        else:
            decode(header, body)


def test_a_body_of_another_length_than_its_header_says_is_refused():
    header, body = encode(Segment(0, [1, 2], [0, 1], [1, 2], 0, torch.zeros(2, 3)))
    with pytest.raises(ValueError, match="a body of 71 bytes where 72 belong"):
        decode(Header.read(header), body[:-1])


def test_a_segment_that_is_too_large_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr(wire, "LARGEST", 100)
    with pytest.raises(ValueError, match="give a smaller prefill_chunk"):
        encode(Segment(0, [1, 2], [0, 1], [1, 2], 0, torch.zeros(2, 30)))


def test_nothing_below_the_scripts_unpickles_what_a_peer_sent():
    for path in (Path(__file__).parents[1] / "pipeline").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not modules & {"pickle", "marshal"} and not names & {"broadcast_object_list", "send_object_list"}, path


def test_a_prune_overtakes_data_and_the_rest_stays_in_order():
    inbox = Inbox()
    first, second = Segment(0, [1], [0], [1], 0, torch.tensor([5])), Reset(0)
    inbox.put(first)
    inbox.put(second)
    inbox.put(Prune(0, 1, 0, 2, []))
    assert isinstance(inbox.get(), Prune) and inbox.get() is first and inbox.get() is second


def test_who_waits_for_a_lost_peer_learns_its_name():
    inbox, found = Inbox(), []

    def wait():
        try:
            inbox.get()
        except PeerLost as loss:
            found.append(str(loss))

    thread = threading.Thread(target=wait)
    thread.start()
    inbox.fail(PeerLost("rank 3 was lost"))
    inbox.fail(PeerLost("rank 2 was lost"))
    thread.join(timeout=5)
    assert found == ["rank 3 was lost"]


def test_what_stages_took_travels_with_a_segment():
    visits = Visit(3, 0.25), Visit(2, 1e-6)
    segment = Segment(0, [1, 2], [0, 1], [1, 2], 0, torch.zeros(2, 3), torch.zeros(2, 4), visits)
    same(back(segment), segment)
    same(back(segment.take([])), segment.take([]))
