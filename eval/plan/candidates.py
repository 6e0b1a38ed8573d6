"""The candidates of a plan: which boards hold which layers, how they decode, and with which sizes.

It knows nothing about how long anything takes, but for the weights of layers and what boards are like.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Iterator, Sequence, Tuple

from config.methods import METHODS, SHARINGS
from config.profiles import Profile

PLAIN = "ar"
Groups = Tuple[Tuple[int, ...], ...]  # the ranks of boards that share each stage, in the order of the stages
Keys = Tuple[Tuple[str, str], ...]
FEW = 8  # up to so many boards every number of them is tried …
COUNTS = (*range(1, FEW + 1), 12, 16, 24, 32, 48, 64, 96, 128)  # … and of more only these
VALUES = {  # the first one is tried first
    "init_depth": ("6", "3", "1"), "depths": ("6", "3", "1"), "rows": ("16", "32", "64", "8"),
    "stream_rows": ("16", "32", "64", "8", "4"), "lookahead": ("3", "1", "2", "5", "8", "12"),
    "run_pipeinfer": ("4", "2", "8"), "init_topk_pipedec": ("16", "8", "4"),
    "expansion": ("1,1,3,1,1,1,1,1", "1,1,1,1", "3,2,1", "2,2", "1")}
MEANT = {"rows": ("subseq_token",), "stream_rows": ("subseq_token",), "depths": ("init_depth", "expand_depth")}
COPIES = (2, 3, 4, 6, 8)  # of the model, for dsi


@dataclass(frozen=True)
class Candidate:
    """One way to decode.

    `groups` are the boards of each stage of the first copy of the model, then of the next one; `layers` those of each
    stage of a copy. In a pipeline rank 0 holds no layers; where there is only one group, rank 0 leads it.
    """

    method: str
    draft: str
    groups: Groups
    layers: tuple[int, ...]
    sizes: tuple[tuple[str, str], ...] = ()  # by the names of VALUES

    @property
    def boards(self) -> tuple[int, ...]:
        """The boards that hold layers."""
        return tuple(chain.from_iterable(self.groups))

    @property
    def others(self) -> list[int]:
        """The boards beside rank 0's that hold layers, in the order of the ranks that they become."""
        return [rank for rank in self.boards if rank]

    @property
    def copies(self) -> int:
        """How many copies of the model there are."""
        return len(self.groups) // len(self.layers)

    @property
    def members(self) -> int:
        """How many boards share a stage."""
        return len(self.groups[0])

    @property
    def whole(self) -> bool:
        """Whether there is no pipeline."""
        return METHODS[self.method].target in SHARINGS

    @property
    def in_order(self) -> bool:
        """Whether the boards are the first ones, in their order, as keys alone can say."""
        first = 0 if self.whole else 1
        return self.boards == tuple(range(first, first + len(self.boards)))

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a run that decodes so."""
        draft = {} if METHODS[self.method].draft in ("ssm", "none") else {"draft": self.draft}
        return {"pipeline_type": self.method, **draft, **self.split, **self.trees}

    @property
    def split(self) -> dict[str, str]:
        """The keys that say how the model is split."""
        sharing = {"tp": str(self.members)} if self.members > 1 else {}
        if self.whole:
            return sharing or {"tp": "1"}
        if self.copies > 1 or self.method == "dsi":
            return {"replicas": f"{self.copies}x{len(self.layers)}"}
        return {"stages": "+".join(map(str, (0, *self.layers))), **sharing}

    @property
    def trees(self) -> dict[str, str]:
        """The keys of trees and segments."""
        return {key: value for name, value in self.sizes for key in MEANT.get(name, (name,))}

    @property
    def about(self) -> str:
        """The candidate in a few words."""
        drafts = METHODS[self.method].draft
        draft = "" if drafts == "none" else f" {drafts if drafts == 'ssm' else self.draft}"
        split = " ".join(f"{key}={value}" for key, value in self.split.items())
        sizes = " ".join(f"{key}={value}" for key, value in self.trees.items())
        where = "" if self.in_order else f"on boards {','.join(map(str, self.boards))}"
        return " ".join(filter(None, (f"{self.method}{draft}", split, where, sizes)))

    def memory(self, site: Profile, context: int) -> dict[int, float]:
        """GB of layers and of their keys and values for `context` tokens, by board; an estimate from their sizes."""
        layer_gb = site.weights / site.layers
        cache_gb = 2 * site.row_bytes * context / 1e9
        of_layer = (layer_gb + cache_gb) * site.layers / sum(self.layers)
        stages = zip(self.groups, self.layers * self.copies)
        return {rank: layers * of_layer / self.members for ranks, layers in stages for rank in ranks}

    def varied(self) -> Iterator[Candidate]:
        """The same with one size changed."""
        sizes = dict(self.sizes)
        for name in METHODS[self.method].sizes:
            for value in VALUES[name]:
                if sizes[name] != value:
                    yield replace(self, sizes=tuple({**sizes, name: value}.items()))


def families(site: Profile, boards: int, layers: int, methods: Sequence[str], drafts: Sequence[str],
             given: tuple[int, ...] = ()) -> list[list[Candidate]]:
    """Every method with every draft, each over every split that is worth a try, with the sizes that are tried first.

    Of a split that is `given`, by the layers of its stages, there are only the pipeline and its copies.
    """
    pipelines = [*_copies(boards, given, 1)] if given else [*splits(site, boards, layers), *shared(boards, layers)]
    found = []
    for method in methods:
        target = METHODS[method].target
        sizes = tuple((name, VALUES[name][0]) for name in METHODS[method].sizes)
        own = METHODS[method].draft
        for draft in drafts if own == "eagle" else [own]:
            places: list[tuple[Groups, tuple[int, ...]]]
            if method == "dsi" and "suffix" in draft:
                continue
            if target in SHARINGS:
                numbers = counts(boards + 1) if not given else ()
                places = [((tuple(range(count)),), (layers,)) for count in numbers if count > 1]
            elif target == "replicas":
                places = [*(_copies(boards, given) if given else copied(boards, layers))]
            else:
                places = pipelines
            found.append([Candidate(method, draft, where, held, sizes) for where, held in places])
    return found


def counts(boards: int) -> list[int]:
    """How many boards may take part."""
    return [*(count for count in COUNTS if count < boards), boards]


def splits(site: Profile, boards: int, layers: int) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """Pipelines over some of the boards, with even splits and with those that make all stages last as long.

    Boards are left out by their place, by their speed, or so that what is left passes a row on soonest.
    """
    seen = set()
    soonest = _soonest(site, boards)
    fastest = sorted(range(1, boards + 1), key=lambda rank: (site.board(rank).model, rank))
    for count in counts(min(boards, layers)):
        for chosen in (tuple(range(1, count + 1)), tuple(sorted(fastest[:count])), soonest[count]):
            speeds = [1 / site.board(rank).model for rank in chosen]
            for held in (shares([1.0] * count, layers), shares(speeds, layers), *_filled(site, chosen, layers)):
                if (chosen, held) not in seen:
                    seen.add((chosen, held))
                    yield tuple((rank,) for rank in chosen), held


def _filled(site: Profile, chosen: Sequence[int], layers: int) -> Iterator[tuple[int, ...]]:
    """The split that fills the fastest boards first, if it is known what fits into them."""
    if not site.memory or not site.weights:
        return
    room = {rank: int(site.memory[rank - 1] * layers / site.weights) for rank in chosen}
    held = dict.fromkeys(chosen, 1)
    left = layers - len(chosen)
    for rank in sorted(chosen, key=lambda one: site.board(one).model):
        more = max(0, min(left, room[rank] - 1))
        held[rank] += more
        left -= more
    if not left:
        yield tuple(held[rank] for rank in chosen)


def shares(speeds: Sequence[float], layers: int) -> tuple[int, ...]:
    """Layers in proportion to speeds, at least one each: the next layer goes to whom it takes the least far."""
    held = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        ends = [(count + 1) / speed for count, speed in zip(held, speeds)]
        place = min(range(len(speeds)), key=lambda i: (ends[i], -i))
        held[place] += 1
    return tuple(held)


def message(site: Profile, sender: int, receiver: int) -> float:
    """Milliseconds of a message of one row."""
    wire = site.link(sender, receiver)
    return wire.latency + 1e3 * wire.transfer(wire.row_bytes)


def _soonest(site: Profile, boards: int) -> dict[int, tuple[int, ...]]:
    """For each number of boards those that are left if again and again the one is left out without which it is soonest.

    That is by the milliseconds of one row once round a pipeline whose stages last equally long.
    """
    chosen = list(range(1, boards + 1))
    found = {boards: tuple(chosen)}
    speeds = {rank: 1 / site.board(rank).model for rank in chosen}
    while len(chosen) > 1:
        ring = [0, *chosen, 0]
        wires = [message(site, a, b) for a, b in zip(ring, ring[1:])]
        past = [message(site, a, b) for a, b in zip(ring, ring[2:])]
        fast, stages = sum(speeds[rank] for rank in chosen), len(chosen) - 1
        saved = [before + behind - beyond for before, behind, beyond in zip(wires, wires[1:], past)]
        without = [stages / (fast - speeds[rank]) - wire for rank, wire in zip(chosen, saved)]
        chosen.pop(min(range(len(chosen))[::-1], key=without.__getitem__))
        found[len(chosen)] = tuple(chosen)
    return found


def shared(boards: int, layers: int) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """Pipelines whose stages are groups of boards that share layers."""
    for members in (2, 4):
        for stages in counts(min(boards // members, layers)) if boards >= members else ():
            ranks = iter(range(1, 1 + stages * members))
            groups = tuple(tuple(next(ranks) for _ in range(members)) for _ in range(stages))
            yield groups, shares([1.0] * stages, layers)


def copied(boards: int, layers: int) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """Copies of the model, each a pipeline."""
    for copies in COPIES:
        for stages in counts(min(boards // copies, layers, FEW)) if boards >= copies else ():
            yield _in_line(copies * stages), shares([1.0] * stages, layers)


def _copies(boards: int, given: tuple[int, ...], most: int = max(COPIES)
            ) -> Iterator[tuple[Groups, tuple[int, ...]]]:
    """So many copies of a given split, and fewer."""
    for copies in (1, *COPIES):
        if copies <= most and copies * len(given) <= boards:
            yield _in_line(copies * len(given)), given


def _in_line(boards: int) -> Groups:
    """The first boards, each alone."""
    return tuple((rank,) for rank in range(1, 1 + boards))
