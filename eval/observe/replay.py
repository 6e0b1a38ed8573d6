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


class _Log:
    """The nodes that rank 0 sent, and what it heard of them.

    Moments are places among the spans, since a modelled clock may stand still between two of them.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.sent: dict[int, int] = {}
        self.heard: dict[int, int] = {}
        self.said: dict[int, int] = {}
        self._child: dict[tuple[int, int | None], int] = {}
        self._text_below: dict[int, int] = {}
        for place, (name, _, _, facts) in enumerate(spans):
            if name == "send" and "parents" in facts:
                self._send(place, facts)
            elif name == "judge":
                self.heard.update(dict.fromkeys(facts["nodes"], place))
                self.said.update(facts["said"])

    def _send(self, place: int, facts: Mapping[str, Any]) -> None:
        self.sent.update(dict.fromkeys(facts["nodes"], place))
        rows = zip(facts["nodes"], facts["tokens"], facts["parents"])
        for i, (node, token, parent) in enumerate(rows):
            if node != parent:  # the root is its own parent
                self._child[parent, token] = node
                if i < facts["text"]:
                    self._text_below[parent] = node

    def text(self) -> Iterator[int]:
        """The text that was sent.

        From a node it goes on with the child that the target said, or with the row that was sent as text below it.
        """
        node = next(iter(self.sent), None)
        while node is not None:
            yield node
            guessed = self._child.get((node, self.said.get(node)))
            node = self._text_below.get(node) if guessed is None else guessed


def replay(spans: Sequence[Span], begin: float, end: float) -> Flight:
    """Follow the text of a request through the spans of rank 0, in their order; it decoded from `begin` to `end`."""
    log = _Log(spans)
    text = list(log.text())
    answered = (i for i, node in enumerate(text) if node in log.said)
    prompt = next(answered, len(text)) + 1
    rows = misses = 0
    stay, aloft, covered, reached = 0.0, 0.0, 0.0, begin
    for parent, node in zip(text[prompt - 1:], text[prompt:]):
        left, back = spans[log.sent[node]].since, end
        if node in log.heard:
            back = spans[log.heard[node]].since
            rows += 1
            stay += back - left
        misses += parent in log.heard and log.heard[parent] < log.sent[node]
        first, last = max(left, begin), min(back, end)
        aloft += max(0.0, last - first)
        covered += max(0.0, last - max(first, reached))  # rows leave in the order of the text
        reached = max(reached, last)
    return Flight(rows, stay, aloft, misses, max(0.0, end - begin - covered))
