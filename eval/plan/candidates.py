"""The candidates of a plan: the layers of each board, the method, the draft, and the sizes.

This module knows nothing about time, except the speeds, memory and links of boards in a profile.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Iterator, Mapping, Sequence, Tuple

from config.methods import METHODS, SHARINGS
from config.profiles import Profile

PLAIN_METHOD = "ar"
Groups = Tuple[Tuple[int, ...], ...]  # the ranks of boards that share each stage, in the order of the stages
Layers = Tuple[int, ...]  # number of layers of each stage of a copy of the model
Split = Tuple[Groups, Layers]
EACH_NUMBER_TO = 8  # every number of boards up to this is tried …
LARGER_NUMBERS = (12, 16, 24, 32, 48, 64, 96, 128)  # … and above it only these
VALUES = {  # the values of each size, in the order of trials
    "init_depth": ("6", "3", "1"), "depths": ("6", "3", "1"),
    "rows": ("16", "32", "64", "8"), "run": ("4", "2", "8"),
    "stream_rows": ("16", "32", "64", "8", "4"), "init_topk_pipedec": ("16", "8", "4"),
    "lookahead": ("3", "1", "2", "5", "8", "12"),
    "expansion": ("1,1,3,1,1,1,1,1", "1,1,1,1", "3,2,1", "2,2", "1")}
MEANT = {"rows": ("subseq_token",), "stream_rows": ("subseq_token",), "depths": ("init_depth", "expand_depth"),
         "run": ("lookahead",)}
COPIES = (2, 3, 4, 6, 8)  # of the model, for dsi


@dataclass(frozen=True)
class Candidate:
    """One way to decode.

    `groups` are the boards of each stage of the first copy of the model, then of the next copy. `layers` are the layers
    of each stage of a copy. In a pipeline rank 0 holds no layers; without a pipeline rank 0 leads the only group.
    """

    method: str
    draft: str
    groups: Groups
    layers: Layers
    sizes: tuple[tuple[str, str], ...] = ()  # by the names of VALUES

    @property
    def kind(self) -> tuple[str, str]:
        """The method and its draft."""
        return self.method, self.draft

    @property
    def plain(self) -> bool:
        """Whether this is plain decoding, without guesses."""
        return self.method == PLAIN_METHOD

    @property
    def boards(self) -> tuple[int, ...]:
        """The boards that hold layers."""
        return tuple(chain.from_iterable(self.groups))

    @property
    def others(self) -> list[int]:
        """The boards that hold layers, except rank 0's, in the order of their future ranks."""
        return [rank for rank in self.boards if rank]

    @property
    def copies(self) -> int:
        """The number of copies of the model."""
        return len(self.groups) // len(self.layers)

    @property
    def members(self) -> int:
        """The number of boards that share a stage."""
        return len(self.groups[0])

    @property
    def whole(self) -> bool:
        """Whether all boards share all layers, without a pipeline."""
        return METHODS[self.method].target in SHARINGS

    @property
    def in_order(self) -> bool:
        """Whether the boards are the first ones, in their order, so that keys alone describe them."""
        first = 0 if self.whole else 1
        return self.boards == tuple(range(first, first + len(self.boards)))

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a run of this candidate."""
        own = METHODS[self.method].draft in ("ssm", "none")
        draft = {} if own else {"draft": self.draft}
        return {"pipeline_type": self.method, **draft, **self.split, **self.trees}

    @property
    def split(self) -> dict[str, str]:
        """The keys of the split of the model."""
        sharing = {"tp": str(self.members)}
        if self.whole:
            return sharing
        if self.copies > 1 or self.method == "dsi":
            return {"replicas": f"{self.copies}x{len(self.layers)}"}
        stages = {"stages": "+".join(map(str, (0, *self.layers)))}
        return {**stages, **sharing} if self.members > 1 else stages

    @property
    def trees(self) -> dict[str, str]:
        """The keys of trees and segments."""
        found = {}
        for name, value in self.sizes:
            found.update(dict.fromkeys(MEANT.get(name, (name,)), value))
        return found

    @property
    def about(self) -> str:
        """A short description of the candidate."""
        draft = "" if self.draft == "none" else self.draft
        where = "" if self.in_order else f"on boards {','.join(map(str, self.boards))}"
        words = self.method, draft, typed(self.split), where, typed(self.trees)
        return " ".join(filter(None, words))

    def varied(self) -> Iterator[Candidate]:
        """Yield the candidates that differ in one size."""
        sizes = dict(self.sizes)
        for name in METHODS[self.method].sizes:
            for value in VALUES[name]:
                if sizes[name] != value:
                    yield replace(self, sizes=tuple({**sizes, name: value}.items()))


Families = Sequence[Sequence[Candidate]]  # every method with every draft


def typed(keys: Mapping[str, str]) -> str:
    """Return keys as words of a command."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def families(site: Profile, layers: int, methods: Sequence[str], drafts: Sequence[str],
             given: Layers = ()) -> list[list[Candidate]]:
    """Return a family for every method with every draft: candidates over all splits worth trying, with the first sizes.

    If a split is `given`, by the layers of its stages, families hold only its pipeline and copies of that.
    """
    boards = len(site.factors)
    places: dict[str, list[Split]]
    if given:
        ends = (copies * len(given) for copies in (1, *COPIES))
        copies = [(_in_line(end), given) for end in ends if end <= boards]
        places = {"ring": copies[:1], "replicas": copies}
    else:
        sharing = (tuple(range(count)) for count in counts(boards + 1)[1:])
        whole: list[Split] = [((ranks,), (layers,)) for ranks in sharing]
        pipelines = [*splits(site, layers), *shared(boards, layers)]
        copies = list(copied(boards, layers))
        places = {"ring": pipelines, "replicas": copies, **dict.fromkeys(SHARINGS, whole)}
    found = []
    for method in methods:
        about = METHODS[method]
        sizes = tuple((name, VALUES[name][0]) for name in about.sizes)
        for draft in drafts if about.draft == "eagle" else [about.draft]:
            if method != "dsi" or "suffix" not in draft:
                possible = places.get(about.target, [])
                found.append([Candidate(method, draft, *split, sizes) for split in possible])
    return found


def counts(boards: int) -> list[int]:
    """Return the numbers of boards to try, out of `boards`."""
    usual = (*range(1, 1 + EACH_NUMBER_TO), *LARGER_NUMBERS, boards)
    return sorted({count for count in usual if 0 < count <= boards})


def splits(site: Profile, layers: int) -> Iterator[Split]:
    """Yield pipelines over some of the boards, with even splits, and with splits for equally long stages.

    Boards are omitted by their place, by their speed, or so that a row passes the remaining ones soonest.
    """
    boards = range(1, 1 + len(site.factors))
    times = {rank: site.board(rank).model for rank in boards}
    fastest, soonest = sorted(boards, key=times.__getitem__), _soonest(site)
    found: dict[Split, None] = {}
    for count in counts(min(len(boards), layers)):
        for chosen in (boards[:count], sorted(fastest[:count]), soonest[count]):
            speeds = [1 / times[rank] for rank in chosen]
            held = evenly(count, layers), shares(speeds, layers), *_filled(site, chosen, layers)
            found.update(dict.fromkeys((tuple(zip(chosen)), each) for each in held))
    yield from found


def _filled(site: Profile, chosen: Sequence[int], layers: int) -> Iterator[Layers]:
    """Yield the split that fills the fastest boards first, if the memory of boards is known."""
    if not site.memory or not site.weights:
        return
    held = dict.fromkeys(chosen, 1)
    left = layers - len(chosen)
    for rank in sorted(chosen, key=lambda one: site.board(one).model):
        room = int(site.memory[rank - 1] * layers / site.weights)
        more = max(0, min(left, room - 1))
        held[rank] += more
        left -= more
    if not left:
        yield tuple(held[rank] for rank in chosen)


def shares(speeds: Sequence[float], layers: int) -> Layers:
    """Return layers in proportion to speeds, at least one each: the next layer goes where the stage stays shortest."""
    held = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        ends = [(count + 1) / speed for count, speed in zip(held, speeds)]
        held[_least(ends)] += 1
    return tuple(held)


def _least(values: Sequence[float]) -> int:
    """Return the index of the least value, in a tie the last one."""
    return len(values) - 1 - values[::-1].index(min(values))


def evenly(stages: int, layers: int) -> Layers:
    """Return layers in equal shares."""
    return shares([1.0] * stages, layers)


def hops(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the wires of the ring from rank 0's board over these and back."""
    return list(zip((0, *ranks), (*ranks, 0)))


def message(site: Profile, sender: int, receiver: int) -> float:
    """Return the milliseconds of a message of one row."""
    wire = site.link(sender, receiver)
    return wire.latency + 1e3 * wire.transfer(wire.row_bytes)


def _soonest(site: Profile) -> dict[int, tuple[int, ...]]:
    """Return, for each number of boards, a good choice: boards are removed one by one, each time the least useful one.

    Without that one, a row takes the fewest milliseconds round a pipeline with equally long stages.
    """
    takes = partial(message, site)
    chosen = list(range(1, 1 + len(site.factors)))
    speeds = {rank: 1 / site.board(rank).model for rank in chosen}
    found = {len(chosen): tuple(chosen)}
    while len(chosen) > 1:
        fast, without = sum(map(speeds.__getitem__, chosen)), []
        ring = [0, *chosen, 0]
        for before, rank, after in zip(ring, chosen, ring[2:]):
            saved = takes(before, rank) + takes(rank, after) - takes(before, after)
            without.append((len(chosen) - 1) / (fast - speeds[rank]) - saved)
        del chosen[_least(without)]
        found[len(chosen)] = tuple(chosen)
    return found


def shared(boards: int, layers: int) -> Iterator[Split]:
    """Yield pipelines where each stage is a group of boards that share layers."""
    for members in (2, 4):
        for stages in counts(min(boards // members, layers)):
            yield _in_line(stages * members, members), evenly(stages, layers)


def copied(boards: int, layers: int) -> Iterator[Split]:
    """Yield splits into copies of the model, each a pipeline."""
    for copies in COPIES:
        for stages in counts(min(boards // copies, layers, EACH_NUMBER_TO)):
            yield _in_line(copies * stages), evenly(stages, layers)


def _in_line(boards: int, members: int = 1) -> Groups:
    """Return the first boards, in groups of `members`."""
    ranks = iter(range(1, 1 + boards))
    return tuple(zip(*[ranks] * members))
