"""Clusters whose boards and wires differ, and the JSON files that describe or have measured one.

It knows nothing about how the time is spent. Such a file says what differs from a profile that it names, as
`{"like": "jetson-7b", "factors": [1, 1, 2], "links": [[2, 3, 20, 100]]}`, or has every field of a profile.
"""
from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Iterator, Sequence, Tuple

from config import files
from config.profiles import PROFILES, Profile
from config.schema.fields import COUNT, Kind, list_of, number, one_of, whole
from config.schema.untrusted import shown

Level = Tuple[str, float]  # a source of guesses, milliseconds
ENDING = ".json"  # of a profile's name that is a file
OTHER = "name another profile="
EXAMPLE = '{"like": "jetson-7b", "factors": [1, 2]}'
LONGEST = 1e7  # ms, nearly three hours; beside far longer times, doubles do not resolve short ones
MOST = 1024  # boards
SLOWEST = 1e4  # times as long as usual, or as short
RATES = 0.001, 1e6  # Mbit/s
Throttle = Tuple[int, float, float]  # a rank, seconds of computing, a factor
Link = Tuple[int, int, float, float]  # two ranks, milliseconds of a message, Mbit/s
Column = Tuple[str, Kind]  # what stands at a place of each row, and what it may be


@dataclass(frozen=True)
class Boards(Profile):
    """A cluster whose boards differ; rank 0's board drafts, and the others hold layers.

    The times of the profile are those of a board with factor 1, its latency and rate those of all wires but `links`.
    """

    factors: tuple[float, ...] = ()  # of the boards of rank 1, 2 ...: how many times as long their layers take
    memory: tuple[float, ...] = ()  # GB: of the boards of rank 1, 2 ...; empty: not known
    levels: tuple[Level, ...] = ()  # milliseconds of a level, of drafts for which it is not that of the profile
    links: tuple[Link, ...] = ()  # wires that differ; each is the same both ways
    throttles: tuple[Throttle, ...] = ()  # boards that get slower, once they have computed for so long: by how much
    model_of: str = ""  # the name of the model that was measured; empty: none was

    def slowed(self, factor: float) -> Boards:
        """The same cluster in slow motion."""
        usual = Profile.slowed(self, factor)
        assert isinstance(usual, Boards), usual
        links = tuple((a, b, latency * factor, mbps / factor) for a, b, latency, mbps in self.links)
        levels = tuple((name, level * factor) for name, level in self.levels)
        throttles = tuple((rank, seconds * factor, slower) for rank, seconds, slower in self.throttles)
        return replace(usual, links=links, levels=levels, throttles=throttles)

    def board(self, rank: int) -> Profile:
        """The times of the board of one rank."""
        factor = dict(enumerate(self.factors, 1)).get(rank, 1.0)
        throttles = tuple(throttle for throttle in self.throttles if throttle[:1] == (rank,))
        return replace(self, throttles=throttles, model=self.model * factor, row=self.row * factor,
                       token=self.token * factor)

    @property
    def heat(self) -> Sequence[tuple[float, float]]:
        """When a board gets slower, of a cluster that is one board's."""
        return sorted((seconds, factor) for _, seconds, factor in self.throttles)

    def drafting(self, source: str) -> Profile:
        """The times of rank 0's board, with those of a source of guesses."""
        return replace(self, level=dict(self.levels).get(source, self.level))

    def link(self, sender: int, receiver: int) -> Profile:
        """The times of the wire between the boards of two ranks.

        A step of a collective, which is a message and more, is longer by as much as the latency is.
        """
        for a, b, latency, mbps in self.links:
            if {a, b} == {sender, receiver}:
                longer = latency - self.latency
                return replace(self, latency=latency, mbps=mbps, step=max(0.0, self.step + longer))
        return self


def _rows(*columns: Column) -> Kind:
    """A list of rows, each a list of these."""
    def fits(row: Any) -> bool:
        as_many = isinstance(row, list) and len(row) == len(columns)
        return as_many and all(kind.fits(value) for (_, kind), value in zip(columns, row))

    words = ", ".join(f"{name} ({kind.words})" for name, kind in columns)
    return list_of(Kind(f"a list of {words}", fits), MOST)


TIME, RATE = number(0, LONGEST), number(*RATES)
FACTOR, RANK = number(1 / SLOWEST, SLOWEST), whole(1, MOST)
TEXT = Kind("a text", lambda value: isinstance(value, str))
SOURCE = Kind("eagle, model, ssm1, ssm2 or so on",
              lambda value: isinstance(value, str) and bool(re.fullmatch("eagle|model|ssm[1-9][0-9]{0,2}", value)))
END = "rank", whole(0, MOST)
TIMES = ("row", "token", "level", "verdict", "latency", "step", "jitter", "weights")
FORMS: dict[str, Kind] = {
    "like": one_of(*PROFILES), "about": TEXT, "model_of": TEXT, "layers": COUNT, "free": whole(0, MOST),
    "model": number(1 / LONGEST, LONGEST), "mbps": RATE, **dict.fromkeys(TIMES, TIME),
    **dict.fromkeys(("row_bytes", "vocab"), whole(1, (1 << 30) - 1)),
    "factors": list_of(FACTOR, MOST), "memory": list_of(TIME, MOST),
    "levels": _rows(("draft", SOURCE), ("ms", TIME)), "links": _rows(END, END, ("ms", TIME), ("Mbit/s", RATE)),
    "throttles": _rows(("rank", RANK), ("seconds", TIME), ("factor", FACTOR))}


def is_file(name: str) -> bool:
    """Whether the name of a profile is that of a file."""
    return name.endswith(ENDING)


def cluster_of(name: str) -> Profile:
    """The profile of this name, or the cluster that a file describes; raises ValueError for a file that does not."""
    return read(name) if is_file(name) else PROFILES[name]


@lru_cache(maxsize=8)
def read(path: str) -> Boards:
    """The cluster that a file describes. Raises ValueError, with the remedy, if it describes none."""
    found = files.whole(path, OTHER)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object: write one as {EXAMPLE}, or {OTHER}")
    for key, value in found.items():
        if key not in FORMS:
            raise ValueError(f"{path} says {shown(key)}, which no cluster has: write some of {', '.join(FORMS)}, or "
                             f"{OTHER}")
        if not FORMS[key].fits(value):
            raise ValueError(f"{path} says {key}={shown(value)}: write {FORMS[key].words}, or {OTHER}")
    base = asdict(PROFILES[found.pop("like")]) if "like" in found else {}
    values = {**base, **found}
    missing = [field.name for field in fields(Profile) if field.name not in values and field.name not in OPEN]
    if missing:
        raise ValueError(f'{path} lacks {", ".join(missing)}: add them, or "like" with one of {", ".join(PROFILES)}')
    for key in ("factors", "memory"):
        values[key] = tuple(values.get(key, ()))
    for key in ("levels", "links", "throttles"):
        values[key] = tuple(map(tuple, values.get(key, ())))
    boards = Boards(**values)
    problem = next(_problems(boards), "")
    if problem:
        raise ValueError(f"{path} {problem}, or {OTHER}")
    return boards


def _problems(boards: Boards) -> Iterator[str]:
    """What does not fit together in a file, each in words that name the fix."""
    there, memory = len(boards.factors), len(boards.memory)
    known = max(there, memory)
    if there and memory and there != memory:
        yield f"has factors of {there} boards and memory of {memory}: give both for every board"
    seen = set()
    for a, b, *_ in boards.links:
        pair = frozenset((a, b))
        if a == b or pair in seen:
            yield f"has a link between {a} and {b} that {'is none' if a == b else 'it had before'}: leave one out"
        seen.add(pair)
    ranks = [*(rank for link in boards.links for rank in link[:2]), *(throttle[0] for throttle in boards.throttles)]
    last = max(ranks, default=0)
    if last > known:
        yield f"names board {last}, and has {known}: give factors or memory for each board up to {last}"
    sources = [source for source, _ in boards.levels]
    if len(set(sources)) < len(sources):
        yield f"gives levels of {', '.join(sources)}: give each draft one"


OPEN = ("jitter", "vocab", "weights")  # fields that a file may leave out


def write(path: str, boards: Boards) -> None:
    """Write a file that `read` reads."""
    files.write_json(path, asdict(boards))


def uneven(profile: Profile) -> Boards:
    """A profile as a cluster whose boards may differ."""
    return profile if isinstance(profile, Boards) else Boards(**asdict(profile))
