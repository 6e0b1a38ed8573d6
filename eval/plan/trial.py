"""A candidate tried: recorded questions answered in virtual time by the methods' own code, and what took the time."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Sequence

from config.methods import METHODS
from config.profiles import Profile
from config.run_config import RunConfig
from config.trees import MOST, TreeConfig
from eval.plan.candidates import Candidate
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, Written, kind_of
from eval.plan.replayed import Replayed
from eval.recorded import Recorded
from model.drafts.batch import read_all
from model.drafts.draft import Draft, NoDraft
from model.drafts.mixture import Mixture, Suffix
from model.sample import Sampler
from pipeline.decode import Answer, Decoder, Limits, Request
from pipeline.replicas import Replicas
from pipeline.requests import Ring
from pipeline.strategies import STRATEGIES
from pipeline.trace import NoTrace
from sim.clock import Pace, VirtualClock
from sim.cluster import Cluster
from sim.devices import SlowHead, SlowPasses
from sim.stages import Held, work_of

SPARE = 8  # trees of the usual size for which a draft has room beside the text


class Spent(NamedTuple):
    """What an answer took, in seconds."""

    tokens: int
    seconds: float
    first: float  # until the first token


@dataclass(frozen=True)
class Busy:
    """Who was busy for which share of the time, from 0 to 1."""

    drafting: float
    verdict: float
    boards: dict[int, float]  # by rank
    wires: dict[tuple[int, int], float]  # by the ranks at their ends


class Trial(NamedTuple):
    """A candidate, and what it took."""

    candidate: Candidate
    spent: tuple[Spent, ...]
    busy: Busy

    @property
    def speed(self) -> float:
        """Tokens per second of all answers together, prefill included."""
        return sum(one.tokens for one in self.spent) / sum(one.seconds for one in self.spent)

    @property
    def first(self) -> float:
        """Mean seconds to the first token."""
        return sum(one.first for one in self.spent) / len(self.spent)


class Counted:
    """A clock that counts what is spent through it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.spent = 0.0
        self.now = clock.now

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
        has = dict(enumerate(self.site.memory, 1))
        return all(need <= has.get(rank, need) for rank, need in self.memory(candidate).items())

    def trial(self, candidate: Candidate, answers: Sequence[Written], tokens: int, guesses: int = MOST) -> Trial:
        """Answer these questions, each with so many tokens at most, and at most so many guesses in streaming's tree."""
        clock = VirtualClock()
        drafting, judging = Counted(clock), Counted(clock)
        config = self.config_of(candidate)
        tree = config.tree
        stream = replace(tree.stream, nodes=min(guesses, tree.stream.nodes))
        tree = replace(tree, stream=stream)
        leaders, works = self._works(candidate)
        traces = [Sums() for _ in ([0] if candidate.whole else [0, *leaders])]
        recorded = Recorded(self.book.vocab)
        cluster = Cluster(self.site, clock, works, recorded, traces)
        head = SlowHead(recorded.lm_head, Pace(self.site, judging))
        depth = 1 if candidate.whole else 1 + len(candidate.layers)
        ring = Ring(cluster.links[0], head, depth, clock=clock)
        if config.replicated:
            ring = Replicas(cluster.links, head, depth - 1, clock=clock)
        networks = self._networks(config, tree)
        draft = self._draft(config, networks)
        passes = SlowPasses(read_all, Pace(self.site, drafting))
        strategy = STRATEGIES[METHODS[candidate.method].strategy]
        decoder = Decoder(ring, draft, strategy, tree, Limits(self._context), passes)
        spent = []
        for one in answers:
            recorded.prompt, recorded.text = one.prompt, one.text
            for name, network in networks.items():
                network.open(len(one.prompt), one.guesses[name])
            most = min(tokens, len(one.text))
            answer = decoder.whole(Request(one.prompt, Sampler(), most, frozenset(self.book.ends)))
            assert answer.token_ids == one.text[:most], "the text of a trial is the recorded one"
            spent.append(_spent(answer))
        busy = self._busy(candidate, (drafting, judging), traces, clock.now())
        return Trial(candidate, tuple(spent), busy)

    def _works(self, candidate: Candidate) -> tuple[list[int], list[list[Any]]]:
        """The leaders of all stages, and what the stages do, ring by ring."""
        total, tiles = sum(candidate.layers), candidate.method == "galaxy"
        stages = zip(candidate.groups, candidate.layers * candidate.copies)
        parts = [Held(ranks, held / total, 0, 1 / len(ranks), tiles) for ranks, held in stages]
        works = [work_of(self.site, part) for part in parts]
        depth = len(candidate.layers)
        rings = [works[i:i + depth] for i in range(0, len(works), depth)]
        return [ranks[0] for ranks in candidate.groups], rings

    def _networks(self, config: RunConfig, tree: TreeConfig) -> dict[str, Replayed]:
        """The networks of the draft that a run names."""
        if METHODS[config.pipeline_type].draft == "none":
            return {}
        room = self._context + SPARE * max(config.init_total_token, tree.stream.nodes // SPARE)
        return {name: Replayed(network, room) for name, network in self.book.networks.items()
                if kind_of(name) in config.sources}

    def _draft(self, config: RunConfig, networks: dict[str, Replayed]) -> Draft:
        if METHODS[config.pipeline_type].draft == "none":
            return NoDraft()
        for number, network in enumerate(networks.values()):
            network.number = number
        return Mixture(list(networks.values()), Suffix() if "suffix" in config.sources else None)

    def _busy(self, candidate: Candidate, spent: tuple[Counted, Counted], traces: Sequence[Sums], whole: float) -> Busy:
        """The shares of the whole time."""
        leaders = [0] if candidate.whole else [ranks[0] for ranks in candidate.groups]
        ends = [0, *leaders]
        boards = dict(zip(leaders, (trace.computed / whole for trace in traces[not candidate.whole:])))
        depth = len(candidate.layers)
        wires = {}
        for place, trace in enumerate([] if candidate.whole else traces):
            last = place and place % depth == 0
            pair = ends[place], 0 if last else ends[place + 1]
            wires[pair] = self.site.link(*pair).transfer(trace.sent) / whole
        drafting, verdict = (clock.spent / whole for clock in spent)
        return Busy(drafting, verdict, boards, wires)


def values(keys: dict[str, str]) -> dict[str, Any]:
    """What these keys of a run are, as they are typed."""
    return {key: type(getattr(RunConfig, key))(value) for key, value in keys.items()}


def _spent(answer: Answer) -> Spent:
    return Spent(answer.new_tokens, answer.prefill_seconds + answer.decode_seconds, answer.prefill_seconds)
