"""What rank 0 knows of the boards of a pipeline, for people: the server's page and `run_worker.sh status` show it.

Rows and times are those of messages that came back; a rank's heartbeat has its load, memory and round trip, and the
hosts file the rate of its wire, measured when the boards were gathered.
"""
from __future__ import annotations

from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple, Sequence

from cluster.agreement import code_version
from cluster.board import read_hosts
from cluster.heartbeat import RankState
from launch.measure import MAX_RATE
from launch.pipeline import Pipeline
from launch.share import FREE_SHARE, site_of
from launch.splits import Split, best_splits, timed
from pipeline.trace import Rate

HERE, LOST, RETURNING = "here", "lost", "coming back"
WORTH = 1.05  # least speed-up by another split that is worth a restart
NO_STATE = RankState(0.0)


class StageWork(NamedTuple):
    """What a stage did lately."""

    rows_per_second: float
    seconds: float  # of a segment with the usual number of rows


class BoardCard(NamedTuple):
    """What is shown of a rank; None: unknown."""

    name: str  # of its machine, else of the rank
    rank: str  # as messages name it
    state: str  # HERE, LOST or RETURNING
    layers: int
    busy: float  # share, from 0 to 1, of the last two seconds in which it worked
    free_gb: float | None  # memory of its machine
    rows_per_second: float | None
    segment_ms: float | None  # a segment of the usual number of rows
    round_trip_ms: float | None  # between its machine and rank 0's
    mbps: float | None  # Mbit/s of the wire between them
    sent_mbps: float | None  # Mbit/s of hidden states that it sends
    room: int  # further layers that fit into the memory of its machine


class Overview:
    """The boards of a pipeline. `sample` belongs to the pipeline's thread; any thread may read the rest."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        config, placement = pipeline.config, pipeline.spec.placement
        self._lines = read_hosts(config.hosts) if config.hosts else []
        self._cluster, self._version = config.cluster, code_version()
        self._row_bytes = pipeline.spec.sizes.hidden * pipeline.spec.like.element_size()

        # the stage of each rank; replicas share the numbers of their stages, so theirs are unknown
        ring, *other_rings = placement.rings
        position_of_leader = {leader: position for each in placement.rings for position, leader in enumerate(each)}
        positions = [position_of_leader[placement.group(rank)[0]] for rank in range(placement.world)]
        stages = pipeline.spec.part.stages
        self._layer_counts = [stages[position] for position in positions]

        first_stage = min(1, len(ring) - 1)
        self._stages = [-1 if other_rings else position - first_stage for position in positions]
        has_whole_stages = placement.world == len(stages) > 2 and not other_rings  # a rank each
        self._can_advise = has_whole_stages and all(stages[1:])

        self._rates: list[Rate] = []
        self._usual_rows = 1  # of a segment, where it enters the first stage
        self._work: list[StageWork] = []  # of each stage that was visited

    def sample(self) -> None:
        """Sample the work of all stages."""
        curves = self._pipeline.ring.pacing.times.curves
        self._usual_rows = curves[0].usual_rows if curves else 1
        self._rates += [Rate() for _ in curves[len(self._rates):]]
        segment_times = [curve.of([self._usual_rows])[0] for curve in curves]
        row_rates = [rate.of(curve.num_rows) for curve, rate in zip(curves, self._rates)]
        self._work = [StageWork(*figures) for figures in zip(row_rates, segment_times)]

    @property
    def states(self) -> dict[str, RankState | None]:
        """The state of each rank, by its name; None for a lost one."""
        return self._pipeline.rank.states()

    def cards(self) -> list[BoardCard]:
        """Return a card for each rank."""
        loss = self._pipeline.ring.loss
        numbered_states = enumerate(self.states.items())
        return [self._card(rank, name, state, loss) for rank, (name, state) in numbered_states]

    def _card(self, rank: int, name: str, state: RankState | None, loss: str) -> BoardCard:
        rank_state, wire = state or NO_STATE, self._wire(rank, name, state)
        work = None if loss else self._work_of(rank)  # while all wait for a lost rank, none works
        status = LOST if state is None else RETURNING if loss.startswith(name) else HERE
        round_trip, mbps = wire
        return BoardCard(
            short_name(name), name, status, self._layer_counts[rank], rank_state.busy, rank_state.free or None,
            work and work.rows_per_second, work and 1e3 * work.seconds, round_trip, mbps,
            work and 8e-6 * self._row_bytes * work.rows_per_second,
            int(FREE_SHARE * rank_state.free / rank_state.layer) if rank_state.layer else 0)

    def _work_of(self, rank: int) -> StageWork | None:
        stage, work = self._stages[rank], self._work
        return work[stage] if 0 <= stage < len(work) else None

    def _wire(self, rank: int, name: str, state: RankState | None) -> tuple[float | None, float | None]:
        """Return the ms of a round trip between a rank and rank 0, and the Mbit/s of their wire."""
        if not rank:  # itself
            return None, None
        if self._cluster:
            wire = self._cluster.link(0, rank)
            return 2 * wire.latency, wire.mbps
        if not self._lines:
            return None, None

        line = self._lines[rank]
        is_on_line = line.wire and line.address in name  # not where a spare stands in
        mbps = float(line.wire.partition(",")[0]) if is_on_line else None
        return state.away if state else None, mbps

    def advice(self, cards: Sequence[BoardCard]) -> tuple[int, str]:
        """Return the rank with the slowest stage, and which split the planner takes for faster, as a sentence.

        The rank is 0, and the sentence empty, while the times of some stage are unknown.
        """
        boards, work = cards[1:], self._work
        are_all_timed = len(work) >= len(boards) and all(board.segment_ms is not None for board in boards)
        if not (self._can_advise and are_all_timed):
            return 0, ""

        slowest = max(range(len(boards)), key=lambda index: work[index].seconds)

        layer_counts = [board.layers for board in boards]
        present, best = self._splits(layer_counts, boards)
        speedup = present.guessing_time / best.guessing_time
        if speedup < WORTH:
            return slowest + 1, "no other split of these boards is faster, by the planner"

        layers_of = dict(zip(best.boards, best.layers))
        new_counts = [layers_of.get(number, 0) for number, _ in enumerate(boards, 1)]

        change = "layers " + "+".join(map(str, new_counts))
        num_fewer = layer_counts[slowest] - new_counts[slowest]
        if num_fewer > 0:
            change = f"{num_fewer} layer{'s' * (num_fewer > 1)} fewer on {boards[slowest].name} ({change})"
        return slowest + 1, f"{change}: {100 * (speedup - 1):.0f} % faster, by the planner"

    def _splits(self, layer_counts: Sequence[int], boards: Sequence[BoardCard]) -> tuple[Split, Split]:
        """Return the present split, and the planner's, by the times of usual visits."""
        layer_times = [1e3 * work.seconds / num_layers for work, num_layers in zip(self._work, layer_counts)]
        usual_rate = median([board.mbps for board in boards if board.mbps] or [MAX_RATE])
        wires = [((board.round_trip_ms or 0.0) / 2, board.mbps or usual_rate) for board in boards]
        spec, num_rows = self._pipeline.spec, self._usual_rows
        site = site_of(spec.sizes, spec.like, layer_times, wires)

        max_layers = [num_layers + board.room for num_layers, board in zip(layer_counts, boards)]
        splits = best_splits(site, max_layers, sum(layer_counts), num_rows)
        return timed(site, layer_counts, num_rows), min(splits, key=attrgetter("guessing_time"))

    def as_json(self) -> dict[str, Any]:
        """Return all that is shown."""
        cards = self.cards()
        slowest_rank, advice = self.advice(cards)
        return {"version": self._version, "kind": self._pipeline.config.kind, "usual_rows": self._usual_rows,
                "slowest": slowest_rank, "advice": advice, "boards": [card._asdict() for card in cards]}


def short_name(name: str) -> str:
    """Return the host in a rank's name, as in `rank 1 (pi-1, 10.0.0.2)`, else the whole name."""
    return name.partition("(")[2].partition(",")[0].rstrip(")") or name
