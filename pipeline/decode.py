"""The decoder: requests in, streams of settled tokens out, several requests by turns over one ring.

It knows nothing about text, since prompts and answers are token ids, nor about what is drafted. A request goes on by
the steps of its strategy, and waits where that yields `WAIT`, or what its draft wants read. One that is given up
half-way is taken back from every stage. A request may begin behind a text that the stages hold: texts of requests that
are over lie in places that nobody else needs now, and the one that was used least recently makes room.
"""
from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any, Callable, Generator, Iterable, Iterator, NamedTuple, Sequence, TypeVar, Union

from config.trees import Growth, TreeConfig
from model.drafts.draft import Draft, Passes, Read, Reading, Spares, Steps, always
from model.drafts.forced import ForcedDraft
from model.drafts.network import at_once, read_all
from model.grammar import Grammar
from model.law import PathLaw
from model.sample import Logprob, LogprobRequest, Penalties, Sampler
from model.tree import TokenTree
from pipeline.failure import PeerLost
from pipeline.pacing import Terms
from pipeline.requests import RequestTarget, Ring
from pipeline.strategies import Progress, Strategy
from pipeline.trace import OFF, NoTrace

TRIES = 5  # after so many losses in a row, without a token between them, requests are given up
LEAST = 16  # tokens: of a text that shares fewer, nothing is taken over
FACTS = ("nodes", "tokens", "parents", "scores", "gone")  # what the span of a growth has


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
    grammar: Grammar | None = None  # that the answer has to follow

    @property
    def logprobs(self) -> LogprobRequest | None:
        """Which log-probabilities are wanted."""
        if self.likeliest is None:
            return None
        return LogprobRequest(self.likeliest, len(self.prompt) - 1 if self.echo else 0)

    @property
    def law(self) -> PathLaw | None:
        """The part of the target's law that paths decide, for one answer; None: there is none."""
        penalties = self.sampler.penalties
        if penalties == Penalties() and self.grammar is None:
            return None
        return PathLaw(penalties, len(self.prompt), self.grammar)


@dataclass
class Answer:
    """What a request has brought so far. Times are in seconds."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0  # until the target had read the prompt and said the first token
    decode_seconds: float = 0.0  # from then on
    target_passes: int = 0  # after prefill: how often the target began at a token that no guess under way foresaw
    accepted_lengths: list[int] = field(default_factory=list)  # tokens of each of these passes, its own included
    segments: int = 0  # sent in all
    reused_tokens: int = 0  # of the prompt that every stage held already, from a request that began alike
    logprobs: list[Logprob] = field(default_factory=list)  # of each token, by the target itself, if they are wanted
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of each token of the prompt but the first
    sources: Counter[str] = field(default_factory=Counter)  # how many guesses of each source became text
    plain_tokens: int = 0  # that nobody guessed, since guessing more was slower
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

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each place behind a token that begins a target pass, the share of passes that accepted a guess there."""
        return by_position(self.accepted_lengths)


def by_position(lengths: Sequence[int]) -> list[float]:
    """The acceptance rate of the first guess of a pass, the second, ..., out of lengths with a pass's own token.

    That is what vLLM prints as "Per-position acceptance rate", and their sum plus one its "Mean acceptance length".
    """
    return [sum(length > place for length in lengths) / len(lengths) for place in range(1, max(lengths, default=0))]


class Task:
    """A request and what has become of it: it drives the strategy, and its answer fills."""

    def __init__(self, request: Request, tree: TokenTree) -> None:
        self.request, self.tree = request, tree
        self.answer = Answer(prompt_tokens=len(request.prompt))
        self.settled: deque[list[int]] = deque()  # what nobody has taken yet
        self.over = False
        self.error: BaseException | None = None  # what it ended with
        self.reading: Reading | None = None  # what it waits for, if that is a network
        self._begun: float | None = None  # when it went on first
        self._segments = 0  # sent before the last loss

    def begin_again(self) -> None:
        """Forget what is under way: the stages hold nothing any more, and the answer so far is to be sent once more."""
        self._steps.close()
        self._segments += self.target.segments
        self.reading = None
        prompt = self.answer.prompt_tokens
        self.tree = self.tree.again(prompt, prompt + self.answer.new_tokens, self.request.law)

    def start(self, target: RequestTarget, draft: Draft, steps: Progress) -> None:
        """It is under way, and has a target, a draft and a strategy's steps from now on."""
        self.target, self.draft, self._steps = target, draft, steps
        draft.begin(self.request.sampler)

    def go_on(self, read: Read | None = None) -> bool:
        """Let it go on until it waits or has settled tokens; whether it has, or is over."""
        self.reading = None
        if self._begun is None:
            self._begun = self.target.ring.clock.now()
        if self.answer.finish_reason:
            self.over = True
            return True
        try:
            step = self._steps.send(read)
            if isinstance(step, list):
                self._settle(step)
                return True
        except PeerLost:
            raise
        except Exception as error:  # that of this request alone, which is raised where its answer is read
            self.over, self.error = True, error
            return True
        self.reading = step if isinstance(step, Reading) else None
        return False

    def _settle(self, tokens: list[int]) -> None:
        """These tokens have become text: the answer takes them, up to its end."""
        assert tokens, "a strategy settled no token"
        answer, tree, target = self.answer, self.tree, self.target
        assert self._begun is not None, "a request settles tokens before it went on"
        tree.release(self.draft.consumed)
        new, answer.finish_reason = self._take(tokens)
        seconds = target.ring.clock.now() - self._begun
        if not answer.token_ids:
            answer.prefill_seconds, answer.reused_tokens = seconds, target.reused
        self._note_logprobs(len(tokens), len(new))
        answer.token_ids += new
        answer.decode_seconds = seconds - answer.prefill_seconds
        answer.target_passes = max(tree.passes, 0)
        answer.accepted_lengths += [0] * (answer.target_passes - len(answer.accepted_lengths))
        if answer.target_passes:
            answer.accepted_lengths[answer.target_passes - 1] += len(new)
        answer.segments = self._segments + target.segments
        for node in tree.trunk[-len(tokens):]:
            proposals = tree.nodes[node].proposals
            answer.sources.update(proposals.keys())
            answer.plain_tokens += not proposals and not target.guesses
        self.settled.append(new)

    def _take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Those of the tokens up to the end of the answer, and why this is it; else nothing."""
        request, limit = self.request, self.tree.limit
        room = limit - self.answer.prompt_tokens - self.answer.new_tokens
        ends = request.grammar.ends if request.grammar else request.end
        for i, token in enumerate(tokens[:room], 1):
            if token in ends or request.stop(token):
                return tokens[:i], "stop"
        if len(tokens) < room:
            return tokens, ""
        wished = len(request.prompt) + request.max_new_tokens
        return tokens[:room], "length" if limit == wished else "context"

    def _note_logprobs(self, settled: int, new: int) -> None:
        """Take from the tree what the target says of the `new` tokens among those that settled, and of the prompt."""
        answer, tree = self.answer, self.tree
        if self.request.likeliest is None:
            return
        if not answer.token_ids:
            first = [tree.nodes[node].logprob for node in tree.trunk[:answer.prompt_tokens - 1]]
            answer.prompt_logprobs += [logprob for logprob in first if logprob]
        before = tree.trunk[-settled - 1:-1]
        answer.logprobs += [tree.nodes[node].logprob for node in before[:new]]


class Settled:
    """The tokens of a request as they settle: iterate over them, or close it to take the request back.

    The request begins with `begin`, or when it is first read. If it `waits`, reading it lets all requests go on; else
    it is empty lists for as long as nothing has settled.
    """

    def __init__(self, task: Task, decoder: Decoder, waits: bool) -> None:
        self._task, self._decoder, self._waits = task, decoder, waits
        self._begun = self._closed = False

    @property
    def tree(self) -> TokenTree:
        return self._task.tree

    @property
    def ready(self) -> bool:
        """Whether the next tokens are there, or there are no more; else who reads them lets all requests go on."""
        return bool(self._task.settled) or self._task.over

    def begin(self) -> None:
        """Begin now, or as soon as there is a place."""
        if not self._begun:
            self._begun = True
            self._decoder.add(self._task)

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
            self._decoder.turn()
        return self._task.settled.popleft()

    def close(self) -> None:
        held = self._begun and not self._closed
        self._closed = True  # once, also if the pipeline is lost
        if held:
            self._decoder.remove(self._task)

    __del__ = close


class TracedDraft(Draft):
    """A request's draft whose growth leaves spans: the guesses it added, and those gone since the growth before."""

    def __init__(self, draft: Draft, trace: NoTrace) -> None:
        self._draft, self._trace = draft, trace
        self._live: set[int] = set()  # after the last growth

    def refresh(self) -> None:
        self._draft.refresh()

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        with self._grown(tree):
            return (yield from self._draft.grow(tree, growth, spares))

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        with self._grown(tree):
            return self._draft.offer_sure(tree, growth)

    @contextmanager
    def _grown(self, tree: TokenTree) -> Iterator[None]:
        live, first = len(tree.live), tree.horizon
        facts: dict[str, list[Any]] = {name: [] for name in FACTS}
        with self._trace.span("grow", live=live, **facts):
            yield
            nodes = [node for node in range(first, tree.horizon) if node in tree.live]
            guesses = [tree.nodes[node] for node in nodes]
            facts["nodes"] += nodes
            facts["tokens"] += [guess.token for guess in guesses]
            facts["parents"] += [guess.parent for guess in guesses]
            facts["scores"] += [guess.score for guess in guesses]
            facts["gone"] += self._live - tree.live
            self._live = set(tree.live)


class RestingDraft(Draft):
    """The draft of a request, which only guesses what is nearly sure, and only behind a new tip, while more is slower.
    """

    def __init__(self, draft: Draft, target: RequestTarget) -> None:
        self._draft, self._target = draft, target
        self._tip = -1  # behind which it was asked last for what is sure

    def refresh(self) -> None:
        self._draft.refresh()

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        if self._target.guesses:
            return (yield from self._draft.grow(tree, growth, spares))
        if tree.tip == self._tip:
            return False
        self._tip = tree.tip
        tree.forget()
        self._draft.refresh()
        return self._draft.offer_sure(tree, growth)


@dataclass
class Held:
    """The beginning of a text that every stage holds, by the number of its request; `draft` has read it, too."""

    request: int
    nodes: Sequence[int]
    tokens: Sequence[int]
    draft: Draft
    over: bool  # whether its request is over, so that the text can be taken over; else it is copied

    def shared(self, tokens: Sequence[int]) -> int:
        """With how many of its tokens a text could begin.

        One token that both have is read again, as the target has to say what follows it, and the feature that belongs
        to it is gone.
        """
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens))
        common = sum(1 for _ in alike)
        return min(common - 1, len(self.nodes), self.draft.held)


class Limits(NamedTuple):
    """What requests may take of a pipeline: `length` bounds prompt and answer together, in tokens."""

    length: int
    places: int = 1  # for requests that are under way at once
    reuses: bool = False  # whether a request begins behind what it shares with others


class Decoder:
    """The requests that share a ring, each decoded by a strategy with a twin of `draft`; `passes` runs the networks.

    As many as `limits` says are under way at once. The others wait, those of the highest priority in front. Reading the
    stream of one request lets all of them go on.
    """

    def __init__(self, ring: Ring, draft: Draft, strategy: Strategy, cfg: TreeConfig, limits: Limits,
                 passes: Passes = read_all) -> None:
        self.ring, self.draft, self.passes = ring, draft, passes
        self.strategy, self.cfg = strategy, cfg
        self.max_length, self.places, self.reuses = limits
        self.tasks: list[Task] = []  # under way, the oldest first
        self.waiting: list[Task] = []
        self._prefixes: list[Held] = []  # texts of requests that are over, that which was used least recently first
        self._spare = [draft]  # drafts that no request uses
        self._epoch = ring.epoch  # in which the requests under way have begun
        self._losses = 0  # since a token has settled

    def decode(self, request: Request, waits: bool = True) -> tuple[Answer, Settled]:
        """The answer, which fills while the stream of settled tokens is read; close the stream to give up.

        The request begins when the stream is first read. Without `waits` the stream is empty lists for as long as
        nothing has settled, and `turn` lets all go on.
        """
        tokens = len(request.prompt)
        if tokens >= self.max_length:
            raise ValueError(f"the prompt has {tokens} tokens and the context only {self.max_length}: "
                             "shorten the prompt or raise max_length")
        limit = min(self.max_length, tokens + request.max_new_tokens)
        tree = TokenTree(request.prompt, limit, self.ring.ids, self.cfg.best_first, request.law)
        task = Task(request, tree)
        return task.answer, Settled(task, self, waits)

    def submit(self, request: Request, waits: bool = True) -> tuple[Answer, Settled]:
        """The same for a request that begins at once, or as soon as there is a place for it."""
        answer, settled = self.decode(request, waits)
        settled.begin()
        return answer, settled

    def whole(self, request: Request) -> Answer:
        """The answer, once it is there."""
        answer, stream = self.decode(request)
        for _ in stream:
            pass
        return answer

    # --- by turns -----------------------------------------------------------------------------------------------------

    def add(self, task: Task) -> None:
        """Let a request begin, as soon as there is a place."""
        self.waiting.append(task)
        self._admit()

    def remove(self, task: Task) -> None:
        """Take a request back, wherever it is; the last one waits until every stage has forgotten it."""
        task.over = True
        if task in self.waiting:
            self.waiting.remove(task)
        if task in self.tasks:
            self._end(task)
        while not self.tasks and not self.waiting and self.ring.closing:
            self._whole(self.ring.listen)

    def turn(self, until: float | None = None) -> None:
        """Let the requests go on, or wait until one of them can, or until this moment of the ring's clock.

        First those whose segments are back are judged. Once all are, everybody may send, and what they send leaves
        together; then the networks read for all of them at once.
        """
        with self.ring.meter:
            self._whole(partial(self._turn, until))

    def _whole(self, step: Callable[[], None]) -> None:
        """Take a step. If a rank is lost meanwhile, all requests under way begin again behind their texts, once it is
        back; raises PeerLost if that cannot be.
        """
        try:
            step()
        except PeerLost as loss:
            self._losses += 1
            if self._losses > TRIES:
                raise
            self.ring.recover(loss)
            self._begin_again()

    def _begin_again(self) -> None:
        """Let the requests under way begin again: the stages hold nothing any more, not even other texts."""
        self._epoch = self.ring.epoch
        for held in self._prefixes:
            self._give_back(held.draft)
        self._prefixes = []
        lost, self.tasks = self.tasks, []
        for task in lost:
            self._give_back(task.draft)
            task.begin_again()
            self._start(task)
            self.tasks.append(task)

    def _turn(self, until: float | None) -> None:
        self._admit()
        if self._go_on([task for task in self._at_work() if task.target.ready()]):
            return
        settled = self._go_on(self._at_work())
        self.ring.depart()
        asking = [task for task in self.tasks if task.reading is not None]
        if asking:
            self._read(asking)
        elif not settled and (self.tasks or until is not None):
            self.ring.listen(until)

    def _at_work(self) -> list[Task]:
        """The requests that wait for no network."""
        return [task for task in self.tasks if task.reading is None]

    def _admit(self) -> None:
        if self._epoch != self.ring.epoch:
            self._begin_again()
        while self.waiting and len(self.tasks) < self.places:
            task = max(self.waiting, key=lambda task: task.request.priority)  # the first of those
            self.waiting.remove(task)
            self._start(task)
            self.tasks.append(task)

    def _start(self, task: Task) -> None:
        """Let a request begin, behind the tokens that it shares with a text that the stages hold."""
        request, cfg = task.request, self.cfg
        terms = Terms(self.draft.inner, cfg.prunes, cfg.thrifty, cfg.plain, request.priority, request.logprobs)
        target = self.ring.open(task.tree, request.sampler, terms)
        held, length = None, 0
        if self.reuses and not request.echo:
            held, length = self._longest(task.tree.tokens)
        if held is not None and held.over:
            self._prefixes.remove(held)
            draft = held.draft
            draft.keep(length)
        else:
            self._make_room()
            draft = self._spare.pop() if self._spare else self.draft.another()
            if held is not None:
                draft.copy(held.draft, length)
        if held is not None:
            target.begin_behind(held.request, held.nodes, length)
        guessing = ForcedDraft(draft) if request.grammar and cfg.forced else draft
        guessing = guessing if self.ring.trace is OFF else TracedDraft(guessing, self.ring.trace)
        if cfg.plain:
            guessing = RestingDraft(guessing, target)
        task.start(target, draft, self.strategy(task.tree, target, guessing, cfg))

    def _go_on(self, tasks: Sequence[Task]) -> bool:
        """Whether one of these has settled tokens, or is over."""
        news = [task.go_on() for task in tasks]
        if any(news):
            self._losses = 0
        self._end_those_over()
        return any(news)

    def _read(self, asking: Sequence[Task]) -> None:
        """Let the networks read what is asked for, and those who asked go on."""
        begin = self.ring.clock.now()
        read = self.passes([task.reading for task in asking if task.reading is not None])
        seconds = self.ring.clock.now() - begin
        for task, said in zip(asking, read):
            task.target.drafted(seconds)
            task.go_on(said)
        self._end_those_over()

    def _end_those_over(self) -> None:
        for task in [task for task in self.tasks if task.over]:
            self._end(task)

    def _end(self, task: Task) -> None:
        """Its place is free from now on, since what follows on the ring comes behind its Reset."""
        self.tasks.remove(task)
        nodes = task.target.end(keep=self.reuses)
        if not nodes:
            self._give_back(task.draft)
            return
        tokens = task.tree.tokens[:len(nodes)]
        if task.reading is None:  # if it has rested, there is much that it has not read
            at_once(task.draft.catch_up(task.tree), self.passes)
        task.draft.keep(min(len(nodes), task.draft.held))
        held = Held(task.target.request, nodes, tokens, task.draft, over=True)
        self._prefixes.append(held)

    # --- texts that the stages hold -----------------------------------------------------------------------------------

    def _longest(self, tokens: Sequence[int]) -> tuple[Held | None, int]:
        """The text that shares most tokens with this one, and how many, if it is worth while."""
        texts = [*self._running(), *self._prefixes]
        best = max(texts, key=lambda held: held.shared(tokens), default=None)
        length = best.shared(tokens) if best else 0
        return (best, length) if length >= LEAST else (None, 0)

    def _running(self) -> Iterator[Held]:
        """The prompts that the stages hold of requests under way; not while a draft's cache waits for its network."""
        for task in self.tasks:
            prompt = task.target.held_prompt
            if prompt and task.reading is None:
                tokens = task.tree.tokens[:len(prompt)]
                yield Held(task.target.request, prompt, tokens, task.draft, over=False)

    def forget(self) -> None:
        """Let the stages forget the texts of requests that are over."""
        while self._prefixes:
            self._evict()

    def _make_room(self) -> None:
        """Let the stages forget a text, if another one needs its place."""
        if self._prefixes and len(self.tasks) + len(self._prefixes) >= self.places:
            self._evict()

    def _evict(self) -> None:
        oldest = self._prefixes.pop(0)
        self.ring.evict(oldest.request)
        self._give_back(oldest.draft)

    def _give_back(self, draft: Draft) -> None:
        draft.reset()
        self._spare.append(draft)


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
