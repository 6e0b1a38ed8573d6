"""A candidate tried: recorded questions answered in virtual time by the methods' own code, and what took the time."""
from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Mapping, NamedTuple, Sequence

from config.methods import METHODS
from config.profiles import Profile
from config.run_config import RunConfig
from config.trees import MOST_GUESSES, TreeConfig
from eval.plan.candidates import Candidate
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, Replayed, ReplayedBlock, Written, kind_of
from eval.recorded import Recorded, sampler_of
from launch.probe import round_trip, segment_rows, sized
from model.drafts.cascade import row
from model.drafts.draft import NoDraft
from model.drafts.mixture import Mixture
from model.drafts.network import read_all
from model.drafts.suffix import Suffix
from pipeline.decode import Decoder, Limits, Request
from pipeline.replicas import Replicas
from pipeline.requests import Ring
from pipeline.strategies import STRATEGIES
from pipeline.trace import Clock, NoTrace
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.ring import VirtualRing
from sim.stages import Held, Work, work_of

SPARE = 8  # trees of the usual size for which a draft has room beside the text


class Spent(NamedTuple):
    """What an answer took, in seconds."""

    tokens: int
    seconds: float
    first: float  # until the first token


class Trial(NamedTuple):
    """A candidate, what it took, and who was busy for which share of the time, from 0 to 1."""

    candidate: Candidate
    spent: tuple[Spent, ...]
    busy: Mapping[str, float]

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together, prefill included."""
        tokens, seconds, _ = map(sum, zip(*self.spent))
        return tokens / seconds

    @property
    def first(self) -> float:
        """Mean seconds to the first token."""
        return sum(one.first for one in self.spent) / len(self.spent)


class Counted(Clock):
    """A clock that counts what is spent through it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.spent = 0.0
        self.now = clock.now  # type: ignore[method-assign]

    def sleep_until(self, due: float) -> None:
        self.spent += max(0.0, due - self._clock.now())
        self._clock.sleep_until(due)


class Sums(NoTrace):
    """A trace that keeps two sums: seconds of computing, and bytes that left."""

    def __init__(self) -> None:
        self.computed, self.sent = 0.0, 0

    def note(self, name: str, since: float, until: float | None = None, **facts: Any) -> None:
        if name == "forward" and until is not None:
            self.computed += until - since
        elif name == "wire":
            self.sent += facts["bytes"]


class Bench:
    """What tries candidates: the cluster, the record, and the keys of a run that no candidate changes."""

    def __init__(self, site: Profile, config: PlanConfig, book: Book) -> None:
        self.site, self.config, self.book = site, config, book
        self._usual = config.single()
        self._context = config.run.max_length
        self._ends = frozenset(book.ends)
        self._sampler = sampler_of(config.run)

    def config_of(self, candidate: Candidate) -> RunConfig:
        """The keys of a run of this candidate, but those of its split."""
        keys = {"pipeline_type": candidate.method, **candidate.trees}
        if METHODS[candidate.method].draft == "eagle":
            keys["draft"] = candidate.draft
        return replace(self._usual, **values(keys))

    def memory(self, candidate: Candidate) -> dict[int, float]:
        """GB of each board."""
        return candidate.memory(self.site, self._context)

    def fits(self, candidate: Candidate) -> bool:
        """Whether every board has the memory that it needs."""
        needs = self.memory(candidate)
        return all(needs.get(rank, 0.0) <= size for rank, size in enumerate(self.site.memory, 1))

    def trial(self, candidate: Candidate, answers: Sequence[Written], tokens: int, guesses: int = MOST_GUESSES
              ) -> Trial:
        """Answer these questions, each with so many tokens at most, and at most so many guesses in streaming's tree."""
        clock = VirtualClock()
        drafting, judging = Counted(clock), Counted(clock)
        recorded = Recorded(self.book.vocab)
        others = 0 if candidate.whole else len(candidate.groups)
        traces = [Sums() for _ in range(1 + others)]
        cluster = Cluster(self.site, clock, self._works(candidate), recorded, traces)
        head = SlowHead(recorded.lm_head, Pace(self.site, judging))
        stages = 0 if candidate.whole else len(candidate.layers)
        config = self.config_of(candidate)
        if config.replicated:
            ring: Ring = Replicas(cluster.links, head, stages, clock=clock)
        else:
            ring = VirtualRing(cluster.links[0], head, 1 + stages, clock=clock)
        method = METHODS[candidate.method]
        tree = self._tree(config, ring, guesses)
        networks = self._networks(config, tree)
        draft = NoDraft() if method.draft == "none" else _mixture(networks, config.sources)
        passes = SlowPasses(read_all, Pace(self.site, drafting))
        strategy = STRATEGIES[method.strategy]
        decoder = Decoder(ring, draft, strategy, tree, Limits(self._context), passes)
        spent = []
        for one in answers:
            recorded.prompt, recorded.text = one.prompt, one.text
            for network in networks:
                network.open(len(one.prompt), one.guesses[network.source])
            text = one.text[:tokens]
            request = Request(one.prompt, self._sampler, len(text), self._ends)
            answer = decoder.whole(request)
            assert answer.token_ids == text, "the text of a trial is the recorded one"
            spent.append(Spent(len(text), answer.seconds, answer.prefill_seconds))
        busy = {"drafting": drafting.spent, "verdicts": judging.spent, **self._busy(candidate, traces)}
        whole = clock.now()
        return Trial(candidate, tuple(spent), {name: took / whole for name, took in busy.items()})

    def _tree(self, config: RunConfig, ring: Ring, guesses: int) -> TreeConfig:
        """The trees of a run, with at most so many guesses in streaming's."""
        tree = sized(config, partial(round_trip, ring), partial(segment_rows, ring, self._context))
        stream = replace(tree.stream, nodes=min(guesses, tree.stream.nodes))
        return replace(tree, stream=stream)

    def _works(self, candidate: Candidate) -> list[list[Work]]:
        """What the stages do, ring by ring."""
        total, tiles = sum(candidate.layers), candidate.method == "galaxy"
        works = []
        for ranks, held in zip(candidate.groups, candidate.layers * candidate.copies):
            part = Held(ranks, held / total, 0, 1 / len(ranks), tiles)
            works.append(work_of(self.site, part))
        depth = len(candidate.layers)
        return [works[first:first + depth] for first in range(0, len(works), depth)]

    def _networks(self, config: RunConfig, tree: TreeConfig) -> list[Replayed]:
        """The networks of the draft that a run names."""
        room = self._context + SPARE * max(config.init_total_token, tree.stream.nodes // SPARE)
        kinds = {"ssm" if source == "cascade" else source for source in config.sources}
        networks = self.book.networks.items()
        found = [(ReplayedBlock if network.block else Replayed)(network, room)
                 for name, network in networks if kind_of(name) in kinds]
        for number, network in enumerate(found):
            network.number = number
        return found

    def _busy(self, candidate: Candidate, traces: Sequence[Sums]) -> dict[str, float]:
        """The seconds in which boards and wires were busy."""
        leaders, busy = [ranks[0] for ranks in candidate.groups], {}
        for rank, trace in zip(leaders, traces[-len(leaders):]):
            busy[f"board {rank}" if rank else "rank 0's board"] = trace.computed
        if not candidate.whole:
            depth = len(candidate.layers)
            behind = [rank if place % depth else 0 for place, rank in enumerate(leaders)]
            receivers = [leaders[0], *behind[1:], 0]
            for a, b, trace in zip([0, *leaders], receivers, traces):
                busy[f"link {a}-{b}"] = self.site.link(a, b).transfer(trace.sent)
        return busy


def _mixture(networks: list[Replayed], sources: Sequence[str]) -> Mixture:
    """The draft of these networks, side by side or in a row."""
    suffix = Suffix() if "suffix" in sources else None
    return Mixture([row(networks)] if "cascade" in sources else networks, suffix)


def values(keys: dict[str, str]) -> dict[str, Any]:
    """What these keys of a run are, as they are typed."""
    usual = vars(RunConfig)
    return {key: type(usual[key])(value) for key, value in keys.items()}
