"""Trials of candidates: answer recorded questions in virtual time by the methods' own code, and measure busy times."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from config.methods import METHODS
from config.profiles import Profile
from config.run_config import RunConfig
from config.trees import MAX_GUESSES, TreeConfig
from eval.bench import speed
from eval.plan.candidates import Candidate, hops
from eval.plan.keys import PlanConfig
from eval.plan.record import PlanRecord, RecordedAnswer, Replayed, ReplayedBlock, kind_of
from eval.recorded import Recorded, sampler_of
from launch.probe import round_trip, segment_rows, sized
from model.drafts.draft import Draft, NoDraft
from model.drafts.mixture import Mixture
from model.drafts.network import read_all
from model.drafts.suffix import Suffix
from pipeline.answers import Answer, Request
from pipeline.decode import Decoder, PipelineLimits
from pipeline.replicas import Replicas
from pipeline.requests import Ring
from pipeline.strategies import STRATEGIES
from pipeline.trace import Clock, NoTrace
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.ring import VirtualRing
from sim.stages import StageShare, Work, work_of

SPARE_TREES = 8  # trees of the default size for which a draft has room in addition to the text


class Trial(NamedTuple):
    """A candidate, its answers, and the busy times of devices and links."""

    candidate: Candidate
    answers: Sequence[Answer]
    busy: Mapping[str, float]  # shares of the whole time, from 0 to 1, by name; empty if unknown

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together, prefill included."""
        return speed(self.answers)

    @property
    def first(self) -> float:
        """Mean seconds to the first token."""
        return sum(answer.prefill_seconds for answer in self.answers) / len(self.answers)


class MeteredClock(Clock):
    """A clock that sums the seconds that were waited for through it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.waited_seconds = 0.0
        self.now = clock.now  # type: ignore[method-assign]

    def sleep_until(self, due: float) -> None:
        self.waited_seconds += max(0.0, due - self._clock.now())
        self._clock.sleep_until(due)


class BusyTrace(NoTrace):
    """A trace that only keeps two sums: seconds of computation, and bytes sent."""

    def __init__(self) -> None:
        self.computed_seconds = 0.0
        self.sent_bytes = 0

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        if name == "forward" and until is not None:
            self.computed_seconds += until - since
        elif name == "wire":
            self.sent_bytes += facts["bytes"]


class Bench:
    """The setting for trials of candidates: the cluster, the record, and the fixed keys of a run."""

    def __init__(self, site: Profile, config: PlanConfig, record: PlanRecord) -> None:
        self.site, self.config, self.record = site, config, record
        self._default_run, self._sampler = config.single(), sampler_of(config.run)
        self._max_length, self._end_ids = config.run.max_length, frozenset(record.ends)

    def config_of(self, candidate: Candidate) -> RunConfig:
        """Return the keys of a run of this candidate, except those of its split."""
        unsplit_keys = dict(candidate.keys.items() - candidate.split.items())
        return replace(self._default_run, **values(unsplit_keys))

    def memory(self, candidate: Candidate) -> dict[int, float]:
        """Estimate the GB of layers and of their keys and values, by board, from their sizes."""
        site = self.site
        cache_gb = 2 * site.row_bytes * self._max_length / 1e9  # of one layer
        layer_gb = (site.weights / site.layers + cache_gb) * site.layers / sum(candidate.layers)

        gb_by_board: dict[int, float] = {}
        for ranks, num_layers in zip(candidate.groups, candidate.layers * candidate.copies):
            gb_by_board.update(dict.fromkeys(ranks, num_layers * layer_gb / candidate.members))
        return gb_by_board

    def fits(self, candidate: Candidate) -> bool:
        """Return whether every board has enough memory for a candidate."""
        needed_gb = self.memory(candidate)
        return all(needed_gb.get(rank, 0.0) <= board_gb for rank, board_gb in enumerate(self.site.memory, 1))

    def trial(self, candidate: Candidate, answers: Iterable[RecordedAnswer], max_tokens: int,
              max_guesses: int = MAX_GUESSES) -> Trial:
        """Answer these questions, with at most `max_tokens` tokens each; `max_guesses` limits the tree of streaming."""
        # cluster
        clock = VirtualClock()
        draft_clock, head_clock = MeteredClock(clock), MeteredClock(clock)
        recorded = Recorded(self.record.vocab)
        groups = () if candidate.whole else candidate.groups
        traces = [BusyTrace() for _ in (0, *groups)]
        cluster = Cluster(self.site, clock, self._works(candidate), recorded, traces)

        # ring
        head = SlowHead(recorded.lm_head, Pace(self.site, head_clock))
        num_stages = 0 if candidate.whole else len(candidate.layers)
        run = self.config_of(candidate)
        if run.replicated:
            ring: Ring = Replicas(cluster.links, head, num_stages, clock=clock)
        else:
            ring = VirtualRing(cluster.links[0], head, 1 + num_stages, clock=clock)

        # draft
        tree = sized(run, partial(round_trip, ring), partial(segment_rows, ring, self._max_length))
        stream = replace(tree.stream, nodes=min(max_guesses, tree.stream.nodes))
        tree = replace(tree, stream=stream)
        networks = self._networks(run, tree)
        method = METHODS[candidate.method]
        draft: Draft = NoDraft()
        if method.draft != "none":
            suffix = Suffix() if "suffix" in run.sources else None
            draft = Mixture(networks, suffix)

        # answers
        passes = SlowPasses(read_all, Pace(self.site, draft_clock))
        decoder = Decoder(ring, draft, STRATEGIES[method.strategy], tree, PipelineLimits(self._max_length), passes)
        new_answers = []
        for recorded_answer in answers:
            recorded.prompt, recorded.text = recorded_answer.prompt, recorded_answer.text
            for network in networks:
                network.open(len(recorded_answer.prompt), recorded_answer.guesses[network.source])

            text = recorded_answer.text[:max_tokens]
            answer = decoder.complete(Request(recorded_answer.prompt, self._sampler, len(text), self._end_ids))
            assert answer.token_ids == text, "the text of a trial is the recorded one"
            new_answers.append(answer)

        busy_seconds = {
            "drafting": draft_clock.waited_seconds, "verdicts": head_clock.waited_seconds,
            **self._busy_seconds(candidate, traces)}
        elapsed = clock.now()
        return Trial(candidate, new_answers, {name: seconds / elapsed for name, seconds in busy_seconds.items()})

    def _works(self, candidate: Candidate) -> list[list[Work]]:
        """Return the work of the stages, ring by ring."""
        total_layers, num_stages = sum(candidate.layers), len(candidate.layers)
        is_tiled = candidate.method == "galaxy"

        works = []
        for ranks, num_layers in zip(candidate.groups, candidate.layers * candidate.copies):
            stage_share = StageShare(ranks, num_layers / total_layers, 0, 1 / len(ranks), is_tiled)
            works.append(work_of(self.site, stage_share))
        return [works[first:first + num_stages] for first in range(0, len(works), num_stages)]

    def _networks(self, run: RunConfig, tree: TreeConfig) -> list[Replayed]:
        """Return the replayed networks of a run's draft."""
        num_slots = self._max_length + max(SPARE_TREES * run.init_total_token, tree.stream.nodes)

        networks: list[Replayed] = []
        for name, traits in self.record.networks.items():
            if kind_of(name) in run.sources:
                network = (ReplayedBlock if traits.block else Replayed)(traits, num_slots)
                network.number = len(networks)
                networks.append(network)
        return networks

    def _busy_seconds(self, candidate: Candidate, traces: Sequence[BusyTrace]) -> dict[str, float]:
        """Return the seconds in which boards and wires were busy."""
        if candidate.whole:
            return {"rank 0's board": traces[0].computed_seconds}

        leaders, num_stages = [ranks[0] for ranks in candidate.groups], len(candidate.layers)
        seconds = {f"board {rank}": trace.computed_seconds for rank, trace in zip(leaders, traces[1:])}

        for hop, (sender, receiver) in enumerate(hops(leaders)):
            is_end_of_copy = hop > 0 and hop % num_stages == 0
            if is_end_of_copy:
                receiver = 0
            seconds[f"link {sender}-{receiver}"] = self.site.link(sender, receiver).transfer(traces[hop].sent_bytes)
        return seconds


def values(keys: dict[str, str]) -> dict[str, Any]:
    """Convert keys of a run from strings to their types."""
    defaults = vars(RunConfig)
    return {key: type(defaults[key])(value) for key, value in keys.items()}
