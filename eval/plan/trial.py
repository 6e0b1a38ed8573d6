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
from eval.plan.record import Book, Replayed, ReplayedBlock, Written, kind_of
from eval.recorded import Recorded, sampler_of
from launch.probe import round_trip, segment_rows, sized
from model.drafts.draft import Draft, NoDraft
from model.drafts.mixture import Mixture
from model.drafts.network import read_all
from model.drafts.suffix import Suffix
from pipeline.decode import Answer, Decoder, PipelineLimits, Request
from pipeline.replicas import Replicas
from pipeline.requests import Ring
from pipeline.strategies import STRATEGIES
from pipeline.trace import Clock, NoTrace
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.ring import VirtualRing
from sim.stages import Held, Work, work_of

SPARE = 8  # trees of the default size for which a draft has room in addition to the text


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
        return sum(one.prefill_seconds for one in self.answers) / len(self.answers)


class Counted(Clock):
    """A clock that sums the seconds spent through it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.spent = 0.0
        self.now = clock.now  # type: ignore[method-assign]

    def sleep_until(self, due: float) -> None:
        self.spent += max(0.0, due - self._clock.now())
        self._clock.sleep_until(due)


class Sums(NoTrace):
    """A trace that keeps two sums: seconds of computation, and bytes sent."""

    def __init__(self) -> None:
        self.computed, self.sent = 0.0, 0

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        if name == "forward" and until is not None:
            self.computed += until - since
        elif name == "wire":
            self.sent += facts["bytes"]


class Bench:
    """The setting for trials of candidates: the cluster, the record, and the fixed keys of a run."""

    def __init__(self, site: Profile, config: PlanConfig, book: Book) -> None:
        self.site, self.config, self.book = site, config, book
        self._usual, self._sampler = config.single(), sampler_of(config.run)
        self._context, self._ends = config.run.max_length, frozenset(book.ends)

    def config_of(self, candidate: Candidate) -> RunConfig:
        """Return the keys of a run of this candidate, except those of its split."""
        keys = dict(candidate.keys.items() - candidate.split.items())
        return replace(self._usual, **values(keys))

    def memory(self, candidate: Candidate) -> dict[int, float]:
        """Estimate the GB of layers and of their keys and values, by board, from their sizes."""
        site, found = self.site, {}
        cache = 2 * site.row_bytes * self._context / 1e9
        of_layer = (site.weights / site.layers + cache) * site.layers / sum(candidate.layers)
        for ranks, layers in zip(candidate.groups, candidate.layers * candidate.copies):
            found.update(dict.fromkeys(ranks, layers * of_layer / candidate.members))
        return found

    def fits(self, candidate: Candidate) -> bool:
        """Return whether every board has enough memory for a candidate."""
        needs = self.memory(candidate)
        room = enumerate(self.site.memory, 1)
        return all(needs.get(rank, 0.0) <= size for rank, size in room)

    def trial(self, candidate: Candidate, answers: Iterable[Written], tokens: int, guesses: int = MAX_GUESSES
              ) -> Trial:
        """Answer these questions, with at most `tokens` tokens each; `guesses` limits the tree of streaming."""
        clock = VirtualClock()
        drafting, judging = Counted(clock), Counted(clock)
        recorded = Recorded(self.book.vocab)
        works = [] if candidate.whole else candidate.groups
        traces = [Sums() for _ in (0, *works)]
        cluster = Cluster(self.site, clock, self._works(candidate), recorded, traces)
        head = SlowHead(recorded.lm_head, Pace(self.site, judging))
        stages = 0 if candidate.whole else len(candidate.layers)
        config, method = self.config_of(candidate), METHODS[candidate.method]
        if config.replicated:
            ring: Ring = Replicas(cluster.links, head, stages, clock=clock)
        else:
            ring = VirtualRing(cluster.links[0], head, 1 + stages, clock=clock)
        tree = sized(config, partial(round_trip, ring), partial(segment_rows, ring, self._context))
        stream = replace(tree.stream, nodes=min(guesses, tree.stream.nodes))
        tree = replace(tree, stream=stream)
        networks = self._networks(config, tree)
        draft: Draft = NoDraft()
        if method.draft != "none":
            suffix = Suffix() if "suffix" in config.sources else None
            draft = Mixture(networks, suffix)
        passes = SlowPasses(read_all, Pace(self.site, drafting))
        strategy, limits = STRATEGIES[method.strategy], PipelineLimits(self._context)
        decoder = Decoder(ring, draft, strategy, tree, limits, passes)
        made = []
        for one in answers:
            recorded.prompt, recorded.text = one.prompt, one.text
            for network in networks:
                network.open(len(one.prompt), one.guesses[network.source])
            text = one.text[:tokens]
            request = Request(one.prompt, self._sampler, len(text), self._ends)
            answer = decoder.complete(request)
            assert answer.token_ids == text, "the text of a trial is the recorded one"
            made.append(answer)
        busy = {"drafting": drafting.spent, "verdicts": judging.spent, **self._busy(candidate, traces)}
        whole = clock.now()
        return Trial(candidate, made, {name: took / whole for name, took in busy.items()})

    def _works(self, candidate: Candidate) -> list[list[Work]]:
        """Return the work of the stages, ring by ring."""
        total, tiles = sum(candidate.layers), candidate.method == "galaxy"
        depth, works = len(candidate.layers), []
        for ranks, layers in zip(candidate.groups, candidate.layers * candidate.copies):
            held = Held(ranks, layers / total, 0, 1 / len(ranks), tiles)
            works.append(work_of(self.site, held))
        return [works[first:first + depth] for first in range(0, len(works), depth)]

    def _networks(self, config: RunConfig, tree: TreeConfig) -> list[Replayed]:
        """Return the replayed networks of a run's draft."""
        room = self._context + max(SPARE * config.init_total_token, tree.stream.nodes)
        networks = self.book.networks.items()
        known = [network for name, network in networks if kind_of(name) in config.sources]
        found = [(ReplayedBlock if network.block else Replayed)(network, room) for network in known]
        for number, network in enumerate(found):
            network.number = number
        return found

    def _busy(self, candidate: Candidate, traces: Sequence[Sums]) -> dict[str, float]:
        """Return the seconds in which boards and wires were busy."""
        leaders, depth = [ranks[0] for ranks in candidate.groups], len(candidate.layers)
        if candidate.whole:
            return {"rank 0's board": traces[0].computed}
        busy = {f"board {rank}": trace.computed for rank, trace in zip(leaders, traces[1:])}
        for place, (a, b) in enumerate(hops(leaders)):
            end = 0 if place and place % depth == 0 else b
            busy[f"link {a}-{end}"] = self.site.link(a, end).transfer(traces[place].sent)
        return busy


def values(keys: dict[str, str]) -> dict[str, Any]:
    """Convert keys of a run from strings to their types."""
    usual = vars(RunConfig)
    return {key: type(usual[key])(value) for key, value in keys.items()}
