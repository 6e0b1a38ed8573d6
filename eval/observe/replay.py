"""The replay: which rows in flight became text, how long each of them stayed, and when none of them was under way."""
from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence


class Span(NamedTuple):
    """What took time on a rank, by any clock, and its facts."""

    name: str
    since: float
    until: float
    facts: Mapping[str, Any]


class Flight(NamedTuple):
    """What became of the rows of one request that are text behind the prompt: true rows."""

    rows: int  # that came back
    stay: float  # seconds from the sending of a row until it came back, all rows together
    aloft: float  # seconds of decoding that each row was in flight, all rows together
    misses: int  # rows that were sent only after the answer of their parent had come
    lost: float  # seconds of decoding in which no true row was in flight


def _text(spans: Sequence[Span], said: Mapping[int, int]) -> Iterator[int]:
    """The nodes of the text that was sent.

    From a node it goes on with the child that the target `said`, or with the row that was sent as text below it.
    """
    child: dict[tuple[int, int | None], int] = {}
    text_below: dict[int, int] = {}
    for _, _, _, facts in spans:
        rows = zip(facts["nodes"], facts["tokens"], facts["parents"])
        for i, (number, token, parent) in enumerate(rows):
            if number != parent:  # the root is its own parent
                child[parent, token] = number
                if i < facts["text"]:
                    text_below[parent] = number
    node = next((number for span in spans for number in span.facts["nodes"]), None)
    while node is not None:
        yield node
        node = child.get((node, said.get(node)), text_below.get(node))


def replay(spans: Sequence[Span], begin: float, end: float) -> Flight:
    """Follow the text of a request through the spans of rank 0, in their order; it decoded from `begin` to `end`.

    Moments are places among the spans, since a modelled clock may stand still between two of them.
    """
    sent: dict[int, int] = {}
    heard: dict[int, int] = {}
    said: dict[int, int] = {}
    for place, (name, _, _, facts) in enumerate(spans):
        if name == "send" and "parents" in facts:
            sent.update(dict.fromkeys(facts["nodes"], place))
        elif name == "judge":
            heard.update(dict.fromkeys(facts["nodes"], place))
            said.update(facts["said"])
    text = list(_text([span for span in spans if span.name == "send" and "parents" in span.facts], said))
    prompt = next((i for i, node in enumerate(text) if node in said), len(text)) + 1
    rows = misses = 0
    stay, aloft, covered, reached = 0.0, 0.0, 0.0, begin
    for parent, node in zip(text[prompt - 1:], text[prompt:]):
        left, back = spans[sent[node]].since, end
        if node in heard:
            back = spans[heard[node]].since
            rows += 1
            stay += back - left
        misses += parent in heard and heard[parent] < sent[node]
        first, last = max(left, begin), min(back, end)
        aloft += max(0.0, last - first)
        covered += max(0.0, last - max(first, reached))  # rows leave in the order of the text
        reached = max(reached, last)
    return Flight(rows, stay, aloft, misses, max(0.0, end - begin - covered))
