"""Clusters whose boards and wires differ, and the JSON files that describe or have measured one.

It knows nothing about how the time is spent. Such a file says what differs from a profile that it names, as
`{"like": "jetson-7b", "factors": [1, 1, 2], "links": [[2, 3, 20, 100]]}`, or has every field of a profile.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Iterator, Sequence, Tuple

from config.files import fits, whole, write_json
from config.profiles import PROFILES, Profile

Level = Tuple[str, float]  # a source of guesses, milliseconds
ENDING = ".json"  # of a profile's name that is a file
OTHER = "name another profile="
LONGEST = 1e7  # ms, nearly three hours; beside far longer times, doubles do not tell the short ones
MOST = 1024  # boards
SLOWEST = 1e4  # times as long as usual, or as short
RATES = 0.001, 1e6  # Mbit/s
Throttle = Tuple[int, float, float]  # a rank, seconds of computing, a factor
Link = Tuple[int, int, float, float]  # two ranks, milliseconds of a message, Mbit/s


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


def _is_time(value: Any) -> bool:
    return fits(value, float) and 0 <= value <= LONGEST


def _is_above(value: Any) -> bool:
    return fits(value, float) and 1 / LONGEST <= value <= LONGEST


def _is_factor(value: Any) -> bool:
    return fits(value, float) and 1 / SLOWEST <= value <= SLOWEST


def _is_rate(value: Any) -> bool:
    return fits(value, float) and RATES[0] <= value <= RATES[1]


def _is_rank(value: Any) -> bool:
    return fits(value, int) and 0 <= value <= MOST


def _is_count(value: Any) -> bool:
    return fits(value, int) and 0 < value < 1 << 30


TIMES = ("row", "token", "level", "verdict", "latency", "step", "jitter", "weights")
COUNTS = ("layers", "row_bytes", "vocab")
FORMS: dict[str, Any] = {
    "about": str, "model_of": str, "like": PROFILES.__contains__, "free": _is_rank, "model": _is_above,
    "mbps": _is_rate, **dict.fromkeys(TIMES, _is_time), **dict.fromkeys(COUNTS, _is_count),
    "factors": [_is_factor], "levels": [(str, _is_time)],
    "memory": [_is_time], "links": [(_is_rank, _is_rank, _is_time, _is_rate)],
    "throttles": [(_is_rank, _is_time, _is_factor)]}


def is_file(name: str) -> bool:
    """Whether the name of a profile is that of a file."""
    return name.endswith(ENDING)


def cluster_of(name: str) -> Profile:
    """The profile of this name, or the cluster that a file describes; raises ValueError for a file that does not."""
    return read(name) if is_file(name) else PROFILES[name]


@lru_cache(maxsize=8)
def read(path: str) -> Boards:
    """The cluster that a file describes. Raises ValueError, with the remedy, if it describes none."""
    found = whole(path, OTHER)
    if not isinstance(found, dict):
        raise ValueError(f"{path} describes no cluster: {OTHER}")
    for key, value in found.items():
        if key not in FORMS or not fits(value, FORMS[key]):
            raise ValueError(f"{path} says of {key} what no cluster has: write the fields of config/boards.py, or "
                             f"{OTHER}")
    base = asdict(PROFILES[found.pop("like")]) if "like" in found else {}
    values = {**base, **found}
    missing = [field.name for field in fields(Profile) if field.name not in values and field.name not in OPEN]
    if missing:
        raise ValueError(f'{path} lacks {", ".join(missing)}: add them, or "like" with the name of a profile')
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
    if known > MOST:
        yield f"has {known} boards: give {MOST} at most"
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
    if known and last > known:
        yield f"names board {last}, and has {known}: add its number to factors and memory"


OPEN = ("jitter", "vocab", "weights")  # fields that a file may leave out


def write(path: str, boards: Boards) -> None:
    """Write a file that `read` reads."""
    write_json(path, asdict(boards))


def uneven(profile: Profile) -> Boards:
    """A profile as a cluster whose boards may be told apart."""
    return profile if isinstance(profile, Boards) else Boards(**asdict(profile))
