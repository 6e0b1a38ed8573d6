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
MAX_DENSE_COUNT = 8  # every number of boards up to this is tried …
LARGER_COUNTS = (12, 16, 24, 32, 48, 64, 96, 128)  # … and above it only these
SIZE_VALUES = {  # the values of each size, in the order of trials
    "init_depth": ("6", "3", "1"), "depths": ("6", "3", "1"),
    "rows": ("16", "32", "64", "8"), "run": ("4", "2", "8"),
    "stream_rows": ("16", "32", "64", "8", "4"), "init_topk_pipedec": ("16", "8", "4"),
    "lookahead": ("3", "1", "2", "5", "8", "12"),
    "expansion": ("1,1,3,1,1,1,1,1", "1,1,1,1", "3,2,1", "2,2", "1")}
SIZE_KEYS = {  # the keys of a size, if they are not called as it is
    "rows": ("subseq_token",), "stream_rows": ("subseq_token",), "depths": ("init_depth", "expand_depth"),
    "run": ("lookahead",)}
COPY_COUNTS = (2, 3, 4, 6, 8)  # of the model, for dsi


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
    sizes: tuple[tuple[str, str], ...] = ()  # by the names of SIZE_VALUES

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
        first_rank = 0 if self.whole else 1
        return self.boards == tuple(range(first_rank, first_rank + len(self.boards)))

    @property
    def keys(self) -> dict[str, str]:
        """The keys of a run of this candidate."""
        has_fixed_draft = METHODS[self.method].draft in ("ssm", "none")
        draft = {} if has_fixed_draft else {"draft": self.draft}
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
        tree_keys = {}
        for name, value in self.sizes:
            tree_keys.update(dict.fromkeys(SIZE_KEYS.get(name, (name,)), value))
        return tree_keys

    @property
    def about(self) -> str:
        """A short description of the candidate."""
        draft = "" if self.draft == "none" else self.draft
        board_list = "" if self.in_order else f"on boards {','.join(map(str, self.boards))}"
        parts = self.method, draft, typed(self.split), board_list, typed(self.trees)
        return " ".join(filter(None, parts))

    def varied(self) -> Iterator[Candidate]:
        """Yield the candidates that differ in one size."""
        sizes = dict(self.sizes)
        for name in METHODS[self.method].sizes:
            for value in SIZE_VALUES[name]:
                if sizes[name] != value:
                    yield replace(self, sizes=tuple({**sizes, name: value}.items()))


Families = Sequence[Sequence[Candidate]]  # every method with every draft


def typed(keys: Mapping[str, str]) -> str:
    """Return keys as words of a command."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def families(site: Profile, num_layers: int, methods: Sequence[str], drafts: Sequence[str],
             given_layers: Layers = ()) -> list[list[Candidate]]:
    """Return a family for every method with every draft: candidates over all splits worth trying, with the first sizes.

    If a split is given, by the layers of its stages, families hold only its pipeline and copies of that.
    """
    splits_by_target = _given_splits(site, given_layers) if given_layers else _all_splits(site, num_layers)

    all_families = []
    for method in methods:
        traits = METHODS[method]
        sizes = tuple((name, SIZE_VALUES[name][0]) for name in traits.sizes)
        for draft in drafts if traits.draft == "eagle" else [traits.draft]:
            if method != "dsi" or "suffix" not in draft:
                method_splits = splits_by_target.get(traits.target, [])
                all_families.append([Candidate(method, draft, *split, sizes) for split in method_splits])
    return all_families


def _given_splits(site: Profile, layers: Layers) -> dict[str, list[Split]]:
    """Return the splits with stages of these layers, by the target of a method."""
    board_counts = (copies * len(layers) for copies in (1, *COPY_COUNTS))
    fitting_splits = [(_in_line(count), layers) for count in board_counts if count <= len(site.factors)]
    return {"ring": fitting_splits[:1], "replicas": fitting_splits}


def _all_splits(site: Profile, num_layers: int) -> dict[str, list[Split]]:
    """Return all splits worth trying, by the target of a method."""
    num_boards = len(site.factors)
    group_sizes = counts(num_boards + 1)[1:]  # rank 0's board included
    whole_model: list[Split] = [((tuple(range(size)),), (num_layers,)) for size in group_sizes]
    pipelines = [*splits(site, num_layers), *shared(num_boards, num_layers)]
    copies = list(copied(num_boards, num_layers))
    return {"ring": pipelines, "replicas": copies, **dict.fromkeys(SHARINGS, whole_model)}


def counts(num_boards: int) -> list[int]:
    """Return the numbers of boards to try, out of `num_boards`."""
    usual_counts = (*range(1, 1 + MAX_DENSE_COUNT), *LARGER_COUNTS, num_boards)
    return sorted({count for count in usual_counts if 0 < count <= num_boards})


def splits(site: Profile, num_layers: int) -> Iterator[Split]:
    """Yield pipelines over some of the boards, with even splits, and with splits for equally long stages.

    Boards are omitted by their rank, by their speed, or so that a row passes the remaining ones soonest.
    """
    boards = range(1, 1 + len(site.factors))
    times = {rank: site.board(rank).model for rank in boards}
    fastest, soonest = sorted(boards, key=times.__getitem__), _soonest(site)

    distinct_splits: dict[Split, None] = {}
    for count in counts(min(len(boards), num_layers)):
        for chosen in (boards[:count], sorted(fastest[:count]), soonest[count]):
            groups = tuple(zip(chosen))
            speeds = [1 / times[rank] for rank in chosen]
            for layers in (evenly(count, num_layers), shares(speeds, num_layers), *_filled(site, chosen, num_layers)):
                distinct_splits[groups, layers] = None
    yield from distinct_splits


def _filled(site: Profile, chosen: Sequence[int], num_layers: int) -> Iterator[Layers]:
    """Yield the split that fills the fastest boards first, if the memory of boards is known."""
    if not site.memory or not site.weights:
        return

    layers = dict.fromkeys(chosen, 1)
    num_left = num_layers - len(chosen)
    for rank in sorted(chosen, key=lambda board: site.board(board).model):
        max_layers = int(site.memory[rank - 1] * num_layers / site.weights)
        num_added = max(0, min(num_left, max_layers - 1))
        layers[rank] += num_added
        num_left -= num_added

    if not num_left:
        yield tuple(layers[rank] for rank in chosen)


def shares(speeds: Sequence[float], num_layers: int) -> Layers:
    """Return layers in proportion to speeds, at least one each: the next layer goes where the stage stays shortest."""
    layers = [1] * len(speeds)
    for _ in range(num_layers - len(speeds)):
        longer_times = [(count + 1) / speed for count, speed in zip(layers, speeds)]
        layers[_index_of_least(longer_times)] += 1
    return tuple(layers)


def _index_of_least(values: Sequence[float]) -> int:
    """Return the index of the least value, in a tie the last one."""
    return len(values) - 1 - values[::-1].index(min(values))


def evenly(num_stages: int, num_layers: int) -> Layers:
    """Return layers in equal shares."""
    return shares([1.0] * num_stages, num_layers)


def hops(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the wires of the ring from rank 0's board over these boards and back."""
    return list(zip((0, *ranks), (*ranks, 0)))


def message(site: Profile, sender: int, receiver: int) -> float:
    """Return the milliseconds of a message of one row."""
    wire = site.link(sender, receiver)
    return wire.latency + 1e3 * wire.transfer(wire.row_bytes)


def _soonest(site: Profile) -> dict[int, tuple[int, ...]]:
    """Return, for each number of boards, a good choice: boards are removed one by one, each time the least useful one.

    Without that one, a row takes the fewest milliseconds round a pipeline with equally long stages.
    """
    message_ms = partial(message, site)
    chosen = list(range(1, 1 + len(site.factors)))
    speeds = {rank: 1 / site.board(rank).model for rank in chosen}

    chosen_by_count = {len(chosen): tuple(chosen)}
    while len(chosen) > 1:
        total_speed = sum(map(speeds.__getitem__, chosen))
        ms_without = []  # milliseconds of a row without each board
        ring = [0, *chosen, 0]
        for before, rank, after in zip(ring, chosen, ring[2:]):
            saved_ms = message_ms(before, rank) + message_ms(rank, after) - message_ms(before, after)
            stages_ms = (len(chosen) - 1) / (total_speed - speeds[rank])
            ms_without.append(stages_ms - saved_ms)

        del chosen[_index_of_least(ms_without)]
        chosen_by_count[len(chosen)] = tuple(chosen)
    return chosen_by_count


def shared(num_boards: int, num_layers: int) -> Iterator[Split]:
    """Yield pipelines where each stage is a group of boards that share layers."""
    for members in (2, 4):
        for num_stages in counts(min(num_boards // members, num_layers)):
            yield _in_line(num_stages * members, members), evenly(num_stages, num_layers)


def copied(num_boards: int, num_layers: int) -> Iterator[Split]:
    """Yield splits into copies of the model, each a pipeline."""
    for copies in COPY_COUNTS:
        for num_stages in counts(min(num_boards // copies, num_layers, MAX_DENSE_COUNT)):
            yield _in_line(copies * num_stages), evenly(num_stages, num_layers)


def _in_line(num_boards: int, members: int = 1) -> Groups:
    """Return the first boards, in groups of `members`."""
    ranks = iter(range(1, 1 + num_boards))
    return tuple(zip(*[ranks] * members))
