"""The profiles: how long the devices and wires of a cluster take, for pipelines that are emulated on one machine.

It knows nothing about how the time is spent (sim/devices.py). Times are milliseconds of the whole model that a
profile stands for; a stage takes the share of its layers, whatever small model really computes there. A JSON file
describes another cluster: it says what differs from a profile that it names, as
`{"like": "jetson-7b", "factors": [1, 1, 2], "links": [[2, 3, 20, 100]]}`, or has every field that has no default.
"""
from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Iterator, Sequence, Tuple

from config import files
from config.drafts import ALONE
from config.schema.fields import COUNT, Kind, integer, list_of, number, one_of
from config.schema.untrusted import shown

ENDING = ".json"  # of a profile's name that is a file
OTHER = "name another profile="
EXAMPLE = '{"like": "jetson-7b", "factors": [1, 2]}'
LONGEST = 1e7  # ms, nearly three hours; beside far longer times, doubles do not resolve short ones
MOST = 1024  # boards
SLOWEST = 1e4  # times as long as usual, or as short
Level = Tuple[str, float]  # a source of guesses, milliseconds
Link = Tuple[int, int, float, float]  # two ranks, milliseconds of a message, Mbit/s
Throttle = Tuple[int, float, float]  # a rank, seconds of computing, a factor
STRETCHED = ("model", "row", "token", "expert", "level", "verdict", "latency", "step", "jitter")  # times in slow motion


@dataclass(frozen=True)
class Profile:
    """One cluster and the model on it; rank 0's board drafts, and the others hold layers.

    A stage with all layers needs `model + row * max(0, rows - free) + token * n` milliseconds for a segment of `rows`
    rows behind `n` tokens of text, and `expert` for each expert of a layer beyond those that one row goes through. A
    message of b bytes needs `latency`, and the time of b bytes at `mbps`. All is for factor 1 and wires beside `links`.
    """

    about: str
    layers: int  # of the model
    row_bytes: int  # of one row of its hidden states
    model: float  # ms: all layers, for a few rows
    row: float  # ms: for each row above `free`
    free: int  # rows that cost nothing beside reading the weights
    token: float  # ms: for each token of the text before, whose keys and values are read
    level: float  # ms: one level of the draft's tree
    verdict: float  # ms: LM head and verification of a segment that has come back
    latency: float  # ms: of a message
    mbps: float  # Mbit/s of a wire, each way
    step: float  # ms: latency of one step of a collective
    jitter: float = 0.0  # ms: a message's latency is uniformly up to so much longer
    vocab: int = 32_000  # tokens of the model
    expert: float = 0.0  # ms: of an expert more in every layer, whose weights are read
    experts: int = 0  # of a layer
    chosen: int = 0  # those that a row goes through
    weights: float = 0.0  # GB: of all layers; 0: not known
    factors: tuple[float, ...] = ()  # of the boards of rank 1, 2 ...: how many times as long their layers take
    memory: tuple[float, ...] = ()  # GB: of the boards of rank 1, 2 ...; empty: not known
    levels: tuple[Level, ...] = ()  # milliseconds of a level, of drafts for which it is not that of the profile
    links: tuple[Link, ...] = ()  # wires that differ; each is the same both ways
    throttles: tuple[Throttle, ...] = ()  # boards that get slower, once they have computed for so long: by how much
    model_of: str = ""  # the name of the model that was measured; empty: none was

    def slowed(self, factor: float) -> Profile:
        """The same cluster in slow motion: every time is `factor` times as long, and every rate a `factor`-th."""
        times = {name: getattr(self, name) * factor for name in STRETCHED}
        links = tuple((a, b, latency * factor, mbps / factor) for a, b, latency, mbps in self.links)
        levels = tuple((name, level * factor) for name, level in self.levels)
        throttles = tuple((rank, seconds * factor, slower) for rank, seconds, slower in self.throttles)
        return replace(self, mbps=self.mbps / factor, links=links, levels=levels, throttles=throttles, **times)

    def board(self, rank: int) -> Profile:
        """The times of the board of one rank."""
        factor = dict(enumerate(self.factors, 1)).get(rank, 1.0)
        throttles = tuple(throttle for throttle in self.throttles if throttle[:1] == (rank,))
        return replace(self, throttles=throttles, model=self.model * factor, row=self.row * factor,
                       token=self.token * factor, expert=self.expert * factor)

    @property
    def heat(self) -> Sequence[tuple[float, float]]:
        """When a board gets slower, of a cluster that is one board's: after which seconds, and by which factor."""
        return sorted((seconds, factor) for _, seconds, factor in self.throttles)

    def drafting(self, source: str) -> Profile:
        """The times of rank 0's board, with those of a source of guesses."""
        return replace(self, level=dict(self.levels).get(source, self.level))

    def link(self, sender: int, receiver: int) -> Profile:
        """The times of the wire between the boards of two ranks."""
        for a, b, latency, mbps in self.links:
            if {a, b} == {sender, receiver}:
                return self.wired(latency, mbps)
        return self

    def wired(self, latency: float, mbps: float) -> Profile:
        """The same with wires of this latency and rate.

        A step of a collective, which is a message and more, is longer by as much as the latency is.
        """
        step = max(0.0, self.step + (latency - self.latency))
        return replace(self, latency=latency, mbps=mbps, step=step)

    def stage(self, share: float, rows: int, context: int) -> float:
        """Seconds that a stage with this share of the layers needs for `rows` rows behind `context` tokens of text."""
        paid = max(0, rows - self.free)
        whole_model = self.model + self.row * paid + self.token * context
        if self.expert:
            whole_model += self.expert * (touched(self.experts, self.chosen, rows) - self.chosen)
        return share * whole_model / 1e3

    def draft(self, asked: Sequence[int]) -> float:
        """Seconds of a level for several requests; rows beyond one's, or free ones, cost their share of a pass."""
        beyond = sum(asked) - max(self.free, *asked)
        costlier = 1 + self.row / self.model * max(0, beyond)
        return costlier * self.level / 1e3 if any(asked) else 0.0

    def transfer(self, size: int) -> float:
        """Seconds for which `size` bytes occupy a wire."""
        return size * 8 / (self.mbps * 1e6)


def touched(experts: int, chosen: int, rows: int) -> float:
    """How many experts so many rows go through, in the mean, if each row chooses by itself and none is preferred."""
    return experts * (1 - (1 - chosen / experts) ** rows)


# Weights of all layers: 12 hidden^2 numbers each, of two bytes, or of half a byte.
#
# The testbed of the FlowSpec paper: five boards on 1 Gbit/s, LLaMA-2 or Vicuna 7B in fp16, 8 layers a board. Those are
# 3.2 GB, which 68 GB/s read in 48 ms; 60 ms with what kernels and Python add, and 0.5 ms for each row above 16, bring a
# model of the schedule within a few per cent of the published ratios. A token's keys and values are 0.5 MB, read in
# 0.008 ms. A level of the draft takes 12 ms, and the original spends 15 ms in Python on a tree of seven levels when it
# is done; here a tree is never done, and each level has its share of that work: 14 ms. 8 ms for a verdict are those of
# the LM head and of the original's verification. A row is 8 KB, 0.066 ms on the wire. A collective's step costs more
# than a message, since gloo stages device memory through the host: with 2.9 ms, a pass of 64 all-reduces of 80 rows
# over four boards takes 1.7 s, and at the mean accepted length of the paper's heads that is its 2.0 to 2.3 tokens/s for
# Megatron.
_JETSON_7B = Profile("five Jetson boards, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=240, row=2,
                     free=16, token=0.008, level=14, verdict=8, latency=1.5, mbps=1000, step=2.9, weights=12.9)

PROFILES = {
    "jetson-7b": _JETSON_7B,
    # The same boards with 13B in 4 bits: 370 ms for 10 layers, since unpacking the weights takes longer than reading
    # them, and so nothing more for up to 64 rows. The draft head is larger and stays in fp16.
    "jetson-13b": replace(_JETSON_7B, about="five Jetson boards, 1 Gbit/s, a 13B model in 4 bits", layers=40,
                          row_bytes=10240, model=1480, row=6, free=64, token=0.012, level=17, weights=6.3),
    # Desktops with a GPU of 360 GB/s each: 13.5 GB of weights in 37 ms.
    "lan-1g": Profile("five desktops with GPUs, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=40,
                      row=0.05, free=64, token=0.0015, level=2.1, verdict=1.5, latency=0.3, mbps=1000, step=0.5,
                      weights=12.9),
    # The boards on a wireless network: half the rate that 802.11ac promises on one stream, and latencies that vary.
    "wifi": replace(_JETSON_7B, about="five Jetson boards, wireless, a 7B model in fp16", latency=4, mbps=200, step=6,
                    jitter=4),
    # Four fast GPUs in one machine: 4 ms a stage, wires of 100 Gbit/s.
    "server": Profile("one server with five GPUs, a 7B model in fp16", layers=32, row_bytes=8192, model=16, row=0.01,
                      free=128, token=0.0003, level=0.7, verdict=0.6, latency=0.05, mbps=100_000, step=0.05,
                      weights=12.9),
}


# --- files ------------------------------------------------------------------------------------------------------------

def _rows(*columns: tuple[str, Kind]) -> Kind:
    """A list of rows, each a list of these."""
    form = tuple(kind.fits for _, kind in columns)
    words = ", ".join(f"{name} ({kind.words})" for name, kind in columns)
    return list_of(Kind(f"a list of {words}", lambda row: files.fits(row, form)), MOST)


TIME, RATE = number(0, LONGEST), number(0.001, 1e6)
FACTOR = number(1 / SLOWEST, SLOWEST)
TEXT = Kind("a text", lambda value: files.fits(value, str))
SOURCE = Kind(f"{', '.join(ALONE)}, ssm1, ssm2 or so on",
              lambda value: value in ALONE or TEXT.fits(value) and bool(re.fullmatch("ssm[1-9][0-9]{0,2}", value)))
END = "rank", integer(0, MOST)
FORMS: dict[str, Kind] = {
    "like": one_of(*PROFILES), "about": TEXT, "model_of": TEXT, "layers": COUNT, "free": integer(0, MOST),
    "model": number(1 / LONGEST, LONGEST), "mbps": RATE, **dict.fromkeys((*STRETCHED[1:], "weights"), TIME),
    **dict.fromkeys(("row_bytes", "vocab"), integer(1, (1 << 30) - 1)),
    **dict.fromkeys(("experts", "chosen"), integer(0, MOST)),
    "factors": list_of(FACTOR, MOST), "memory": list_of(TIME, MOST),
    "levels": _rows(("draft", SOURCE), ("ms", TIME)),
    "links": _rows(END, END, ("ms", TIME), ("Mbit/s", RATE)),
    "throttles": _rows(("rank", integer(1, MOST)), ("seconds", TIME), ("factor", FACTOR))}


def is_file(name: str) -> bool:
    """Whether the name of a profile is that of a file."""
    return name.endswith(ENDING)


@lru_cache(maxsize=8)
def read(path: str) -> Profile:
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
    values = vars(PROFILES[found.pop("like")]) if "like" in found else {}
    values = {**values, **{key: _as_tuples(value) for key, value in found.items()}}
    missing = [field.name for field in fields(Profile) if field.name not in values and field.default is MISSING]
    if missing:
        raise ValueError(f'{path} lacks {", ".join(missing)}: add them, or "like" with one of {", ".join(PROFILES)}')
    cluster = Profile(**values)
    problem = next(_problems(cluster), "")
    if problem:
        raise ValueError(f"{path} {problem}, or {OTHER}")
    return cluster


def _as_tuples(value: Any) -> Any:
    """The same with tuples in place of lists, which cannot be changed."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _problems(cluster: Profile) -> Iterator[str]:
    """What does not fit together in a file, each in words that name the fix."""
    there, memory = len(cluster.factors), len(cluster.memory)
    known = max(there, memory)
    if there and memory and there != memory:
        yield f"has factors of {there} boards and memory of {memory}: give both for every board"
    if cluster.chosen > cluster.experts or cluster.expert and not cluster.chosen:
        yield f"has {cluster.chosen} of {cluster.experts} experts chosen: give experts, and chosen between 1 and those"
    seen = set()
    for a, b, *_ in cluster.links:
        pair = frozenset((a, b))
        if a == b or pair in seen:
            yield f"has a link between {a} and {b} that {'is none' if a == b else 'it had before'}: leave one out"
        seen.add(pair)
    ranks = [rank for link in cluster.links for rank in link[:2]]
    ranks += [throttle[0] for throttle in cluster.throttles]
    last = max(ranks, default=0)
    if last > known:
        yield f"names board {last}, and has {known}: give factors or memory for each board up to {last}"
    sources = [source for source, _ in cluster.levels]
    if len(set(sources)) < len(sources):
        yield f"gives levels of {', '.join(sources)}: give each draft one"


def write(path: str, cluster: Profile) -> None:
    """Write a file that `read` reads."""
    files.write_json(path, asdict(cluster))
