"""The replay: which rows in flight became text, how long each of them stayed, and when none of them was under way.

It works on plain records of what rank 0 sent and heard, and knows no clock: their moments may be real or modelled.
"""
from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence, Union

NO_TOKEN = -1  # what the target says of a node that it was not asked about


class Sent(NamedTuple):
    """A segment that left: when, its nodes with their tokens and parents, and how many of the first ones are text."""

    at: float
    nodes: Sequence[int]
    tokens: Sequence[int]
    parents: Sequence[int]
    text: int


class Heard(NamedTuple):
    """A segment that came back: when, its nodes, and the token that the target says follows each node it was asked for.
    """

    at: float
    nodes: Sequence[int]
    said: Mapping[int, int]


class Flight(NamedTuple):
    """What became of the rows of one request that are text behind the prompt: true rows."""

    rows: int  # that came back
    stay: float  # seconds from the sending of a row until it came back, all rows together
    aloft: float  # seconds of decoding that each row was in flight, all rows together
    misses: int  # rows that were sent only after the answer of their parent had come
    lost: float  # seconds of decoding in which no true row was in flight


Record = Union[Sent, Heard]


class _Log:
    """The records by node: where each stands among them, and what is below it."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.sent: dict[int, int] = {}  # the places of records: a modelled clock may stand still between two of them
        self.heard: dict[int, int] = {}
        self.said: dict[int, int] = {}
        self._child: dict[tuple[int, int], int] = {}
        self._text_below: dict[int, int] = {}
        for place, record in enumerate(records):
            if isinstance(record, Sent):
                self._send(place, record)
            else:
                self.heard.update(dict.fromkeys(record.nodes, place))
                self.said.update(record.said)

    def _send(self, place: int, record: Sent) -> None:
        for i, (node, token, parent) in enumerate(zip(*record[1:4])):
            self.sent[node] = place
            if node != parent:  # the root is its own parent
                self._child[parent, token] = node
                if i < record.text:
                    self._text_below[parent] = node

    def text(self, root: int) -> list[int]:
        """The text that was sent, from its first node on."""
        found, node = [], root
        while node >= 0:
            found.append(node)
            guessed = self._child.get((node, self.said.get(node, NO_TOKEN)))
            node = self._text_below.get(node, -1) if guessed is None else guessed
        return found


def replay(records: Sequence[Record], begin: float, end: float) -> Flight:
    """Follow the text of a request through its records, in their order; it decoded from `begin` to `end`.

    From a node the text goes on with the child that the target said, or with the row that was sent as text below it.
    The prompt ends with the first node whose answer is known.
    """
    log = _Log(records)
    roots = [record.nodes[0] for record in records if isinstance(record, Sent) and record.nodes]
    text = log.text(roots[0]) if roots else []
    prompt = next((i for i, node in enumerate(text) if node in log.said), len(text)) + 1
    rows = misses = 0
    stay, aloft, covered, reached = 0.0, 0.0, 0.0, begin
    for parent, node in zip(text[prompt - 1:], text[prompt:]):
        left, back = records[log.sent[node]].at, end
        if node in log.heard:
            back = records[log.heard[node]].at
            rows += 1
            stay += back - left
        misses += parent in log.heard and log.heard[parent] < log.sent[node]
        first, last = max(left, begin), min(back, end)
        aloft += max(0.0, last - first)
        covered += max(0.0, last - max(first, reached))  # rows leave in the order of the text
        reached = max(reached, last)
    return Flight(rows, stay, aloft, misses, max(0.0, end - begin - covered))
