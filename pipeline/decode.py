"""The decoder: a request in, a stream of settled tokens out.

It knows nothing about text: prompts and answers are token ids. Any number of requests in a row use one pipeline; a
request that is given up half-way is taken back from every stage.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Callable, Generator, Iterable, Iterator, NamedTuple, Sequence, TypeVar, Union

from config.trees import Growth, TreeConfig
from model.drafts.draft import Draft, Passes, Spares, Steps, always
from model.drafts.network import read_all
from model.sample import Logprob, LogprobRequest, Sampler
from model.tree import TokenTree
from pipeline.interfaces import Progress, Terms
from pipeline.requests import RequestTarget, Ring
from pipeline.scheduler import Scheduler, Task
from pipeline.strategies import Strategy
from pipeline.trace import OFF, TracedDraft


@dataclass(frozen=True)
class Request:
    """What to answer, and when to stop: at an `end` token, when `stop(token)` says so, or after `max_new_tokens`."""

    prompt: Sequence[int]
    sampler: Sampler = Sampler()
    max_new_tokens: int = 256
    end: frozenset[int] = frozenset()
    stop: Callable[[int], bool] = lambda token: False
    priority: float = 1.0  # how much its guesses count beside those of other requests, and who begins first
    likeliest: int | None = None  # report the log-probability of each token, and of so many likeliest ones beside it
    echo: bool = False  # report them of the prompt, too, which is then read from its first token on


@dataclass
class Answer:
    """What a request has brought so far. Times are in seconds."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # until the target had read the prompt and said the first token
    decode_seconds: float = 0.0  # from then on
    target_passes: int = 0  # after prefill: how often the target began at a token that no guess under way foresaw
    segments: int = 0  # sent in all
    reused_tokens: int = 0  # of the prompt that every stage held already, from a request that began alike
    logprobs: list[Logprob] = field(default_factory=list)  # of each token, by the target itself, if they are wanted
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of each token of the prompt but the first
    sources: Counter[str] = field(default_factory=Counter)  # how many guesses of each source became text
    finish_reason: str = ""  # stop (an end token or the stop rule), length (as many as wished) or context (it is full)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        """The whole time, prefill included."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens by the whole time."""
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass, its own token included (EAGLE's tau); the token of the prefill does not count."""
        if not self.target_passes:
            return float(self.new_tokens)
        return (self.new_tokens - 1) / self.target_passes


class Settled:
    """The tokens of a request as they settle: iterate over them, or close it to take the request back.

    The request begins with `begin`, or when it is first read. If it `waits`, reading it lets all requests go on; else
    it is empty lists for as long as nothing has settled.
    """

    def __init__(self, task: Task, scheduler: Scheduler, waits: bool) -> None:
        self.tree = task.tree
        self._task, self._scheduler, self._waits = task, scheduler, waits
        self._begun = self._closed = False

    @property
    def ready(self) -> bool:
        """Whether the next tokens are there, or there are no more; else who reads them lets all requests go on."""
        return bool(self._task.settled) or self._task.over

    def begin(self) -> None:
        """Begin now, or as soon as there is a place."""
        if not self._begun:
            self._begun = True
            self._scheduler.add(self._task)

    def __iter__(self) -> Settled:
        return self

    def __next__(self) -> list[int]:
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> list[int]:
        if self._closed:
            raise StopIteration
        self.begin()
        while not self._task.settled:
            if self._task.over:
                raise self._task.error or StopIteration
            if not self._waits:
                return []
            self._scheduler.turn()
        return self._task.settled.popleft()

    def close(self) -> None:
        held = self._begun and not self._closed
        self._closed = True  # once, also if the pipeline is lost
        if held:
            self._scheduler.remove(self._task)

    __del__ = close


class Limits(NamedTuple):
    """What requests may take of a pipeline: `length` bounds prompt and answer together, in tokens."""

    length: int
    places: int = 1  # for requests that are under way at once
    reuses: bool = False  # whether a request begins behind what it shares with others


class Decoder:
    """One pipeline and the way it is used. Reading the stream of a request lets all requests go on."""

    def __init__(self, ring: Ring, draft: Draft, strategy: Strategy, cfg: TreeConfig, limits: Limits,
                 passes: Passes = read_all) -> None:
        self.ring, self.draft = ring, draft
        self.strategy, self.cfg = strategy, cfg
        self.max_length = limits.length
        terms = Terms(prunes=cfg.prunes, thrifty=cfg.thrifty, plain=cfg.plain)
        self.scheduler = Scheduler(ring, draft, passes, terms, limits.places, limits.reuses)

    def decode(self, request: Request, waits: bool = True) -> tuple[Answer, Settled]:
        """The answer, which fills while the stream of settled tokens is read; close the stream to give up.

        The request begins when the stream is first read. Without `waits` the stream is empty lists for as long as
        nothing has settled, and `turn` lets all go on.
        """
        answer, task = self._task(request)
        return answer, Settled(task, self.scheduler, waits)

    def submit(self, request: Request, waits: bool = True) -> tuple[Answer, Settled]:
        """The same for a request that begins at once, or as soon as there is a place for it."""
        answer, settled = self.decode(request, waits)
        settled.begin()
        return answer, settled

    def turn(self, until: float | None = None) -> None:
        """Let all requests go on, or wait until one of them can, or until this moment of the ring's clock."""
        self.scheduler.turn(until)

    def whole(self, request: Request) -> Answer:
        """The answer, once it is there."""
        answer, stream = self.decode(request)
        for _ in stream:
            pass
        return answer

    def _task(self, request: Request) -> tuple[Answer, Task]:
        tokens = len(request.prompt)
        if tokens >= self.max_length:
            raise ValueError(f"the prompt has {tokens} tokens and the context only {self.max_length}: "
                             "shorten the prompt or raise max_length")
        limit = min(self.max_length, tokens + request.max_new_tokens)
        tree = TokenTree(request.prompt, limit, self.ring.ids, self.cfg.best_first)
        answer = Answer(prompt_tokens=tokens)
        begin = partial(self._steps, request, tree, answer)
        logprobs = None
        if request.likeliest is not None:
            logprobs = LogprobRequest(request.likeliest, tokens - 1 if request.echo else 0)
        return answer, Task(tree, request.sampler, begin, request.priority, not request.echo, logprobs)

    def _steps(self, request: Request, tree: TokenTree, answer: Answer, target: RequestTarget,
               draft: Draft) -> Progress:
        """The strategy's steps up to the end of the answer, which fills."""
        clock = self.ring.clock
        start = clock.now()
        trace = self.ring.trace
        guessing = draft if trace is OFF else TracedDraft(draft, trace)
        if target.terms.plain:
            guessing = RestingDraft(guessing, target)
        strategy = self.strategy(tree, target, guessing, self.cfg)
        said: Any = None
        while not answer.finish_reason:
            step = strategy.send(said)
            if not isinstance(step, list):
                said = yield step
                continue
            assert step, "a strategy settled no token"
            said = None
            tree.release(draft.consumed)
            room = tree.limit - answer.prompt_tokens - answer.new_tokens
            new, answer.finish_reason = self._take(request, step, room)
            if not answer.token_ids:
                answer.prefill_seconds = clock.now() - start
            if request.likeliest is not None:
                self._add_logprobs(answer, tree, len(step), len(new))
            answer.token_ids += new
            answer.decode_seconds = clock.now() - start - answer.prefill_seconds
            answer.target_passes = max(tree.passes, 0)
            answer.segments = target.segments
            answer.reused_tokens = target.reused
            self._credit(answer, tree, len(step))
            yield new

    def _add_logprobs(self, answer: Answer, tree: TokenTree, settled: int, new: int) -> None:
        """Take from the tree what the target says of the `new` tokens among those that settled, and of the prompt."""
        if not answer.token_ids:
            first = [tree.nodes[node].logprob for node in tree.trunk[:answer.prompt_tokens - 1]]
            answer.prompt_logprobs += [logprob for logprob in first if logprob]
        before = tree.trunk[-settled - 1:-1]
        answer.logprobs += [tree.nodes[node].logprob for node in before[:new]]

    def _credit(self, answer: Answer, tree: TokenTree, settled: int) -> None:
        """Count for each source of guesses those that have just become text."""
        for node in tree.trunk[-settled:]:
            answer.sources.update(tree.nodes[node].proposals.keys())

    def _take(self, request: Request, settled: list[int], room: int) -> tuple[list[int], str]:
        """The settled tokens up to the end of the answer, and why this is it; else nothing."""
        for i, token in enumerate(settled[:room], 1):
            if token in request.end or request.stop(token):
                return settled[:i], "stop"
        if len(settled) < room:
            return settled, ""
        wished = len(request.prompt) + request.max_new_tokens
        return settled[:room], "length" if wished <= self.max_length else "context"


class RestingDraft(Draft):
    """The draft of a request, which guesses nothing while plain decoding is quicker."""

    def __init__(self, draft: Draft, target: RequestTarget) -> None:
        self._draft, self._target = draft, target

    def refresh(self) -> None:
        self._draft.refresh()

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        if self._target.guesses:
            return (yield from self._draft.grow(tree, growth, spares))
        tree.forget()
        self._draft.refresh()
        return False


T = TypeVar("T")

class Until(NamedTuple):
    """What a job yields that waits for a moment of the ring's clock."""

    moment: float


Job = Generator[Union[T, Until, None], None, None]


def concurrent(jobs: Iterable[Job[T]], decoder: Decoder, places: int) -> Iterator[T]:
    """The results of all jobs as they come; the jobs begin in their order, and at most `places` are under way at once.

    A job is a generator that yields None where it waits for its request, `Until` where it waits for a moment, and
    results as they come. When this is closed, or a job fails, those that are under way are closed.
    """
    left = iter(jobs)
    under_way: list[Job[T]] = []
    try:
        while True:
            new = islice(left, max(0, places - len(under_way)))
            under_way += new
            if not under_way:
                return
            went_on = False
            moments: list[float] = []
            for job in list(under_way):
                try:
                    result = next(job)
                except StopIteration:
                    under_way.remove(job)
                    went_on = True
                    continue
                if isinstance(result, Until):
                    moments.append(result.moment)
                elif result is not None:
                    went_on = True
                    yield result
            if not went_on:
                decoder.turn(min(moments, default=None))
    finally:
        for job in under_way:
            job.close()
