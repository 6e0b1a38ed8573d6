"""The scheduler: requests by turns over one ring. It alone knows who waits for what.

It knows nothing about strategies, text or what is drafted. A request is a generator that yields the tokens that
settled, `WAIT` while it waits for its target, and what its draft wants read. A request may begin behind a text that the
stages hold: texts of requests that are over lie in places that nobody else needs now, and the one that was used least
recently makes room.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Callable, Iterator, Sequence

from model.drafts.draft import Draft, Passes, Read, Reading
from model.sample import LogprobRequest, Sampler
from model.tree import TokenTree
from pipeline.interfaces import USUAL, Progress, Terms, Waiting
from pipeline.requests import RequestTarget, Ring

Begin = Callable[[RequestTarget, Draft], Progress]
LEAST = 16  # tokens: of a text that shares fewer, nothing is taken over


class Task:
    """A request: its tree, how its tokens are chosen, and the steps that `begin` makes of its target and its draft.

    `shares` says whether it may begin behind what it has in common with others, `logprobs` which log-probabilities are
    wanted of it.
    """

    def __init__(self, tree: TokenTree, sampler: Sampler, begin: Begin, priority: float = 1.0, shares: bool = True,
                 logprobs: LogprobRequest | None = None) -> None:
        self.tree, self.sampler, self.begin = tree, sampler, begin
        self.priority, self.shares, self.logprobs = priority, shares, logprobs
        self.settled: deque[list[int]] = deque()  # what nobody has taken yet
        self.over = False
        self.error: BaseException | None = None  # what it ended with
        self.reading: Reading | None = None  # what it waits for, if that is a network

    def start(self, target: RequestTarget, draft: Draft) -> None:
        """It is under way, and has a target and a draft from now on."""
        self.target, self.draft = target, draft
        draft.begin(self.sampler)
        self._steps = self.begin(target, draft)

    def go_on(self, read: Read | None = None) -> bool:
        """Let it go on until it waits or has settled tokens; whether it has, or is over."""
        self.reading = None
        try:
            step = self._steps.send(read)
        except StopIteration:
            self.over = True
            return True
        except Exception as error:  # that of this request alone, which is raised where its answer is read
            self.over, self.error = True, error
            return True
        if isinstance(step, Waiting):
            return False
        if isinstance(step, Reading):
            self.reading = step
            return False
        self.settled.append(step)
        return bool(step)


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


class Scheduler:
    """The requests that share a ring; `passes` runs the networks of their drafts, each a twin of `draft`.

    `places` are under way at once. The others wait, those of the highest priority in front. If it `reuses` texts, a
    request begins behind what it shares with others.
    """

    def __init__(self, ring: Ring, draft: Draft, passes: Passes, terms: Terms = USUAL, places: int = 1,
                 reuses: bool = False) -> None:
        self.ring, self.passes = ring, passes
        self.places, self.reuses = places, reuses
        self.tasks: list[Task] = []  # under way, the oldest first
        self.waiting: list[Task] = []
        self._prefixes: list[Held] = []  # texts of requests that are over, that which was used least recently first
        self._draft, self._spare = draft, [draft]  # drafts that no request uses
        self._terms = terms._replace(inner=draft.inner)

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
        if not self.tasks and not self.waiting:
            self._rest()

    def turn(self, until: float | None = None) -> None:
        """Let the requests go on, or wait until one of them can, or until this moment.

        First those whose segments are back are judged. Once all are, everybody may send, and what they send leaves
        together; then the networks read for all of them at once.
        """
        with self.ring.meter:
            self._turn(until)

    def _turn(self, until: float | None) -> None:
        self._admit()
        if self._go_on([task for task in self._at_work() if task.target.ready]):
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
        while self.waiting and len(self.tasks) < self.places:
            task = max(self.waiting, key=lambda task: task.priority)  # the first of those
            self.waiting.remove(task)
            self._start(task)
            self.tasks.append(task)

    def _start(self, task: Task) -> None:
        """Let a request begin, behind the tokens that it shares with a text that the stages hold."""
        terms = self._terms._replace(priority=task.priority, logprobs=task.logprobs)
        target = self.ring.open(task.tree, task.sampler, terms)
        held, length = None, 0
        if self.reuses and task.shares:
            held, length = self._longest(task.tree.tokens)
        if held is not None and held.over:
            self._prefixes.remove(held)
            draft = held.draft
            draft.keep(length)
        else:
            self._make_room()
            draft = self._spare.pop() if self._spare else self._draft.another()
            if held is not None:
                draft.copy(held.draft, length)
        if held is not None:
            target.begin_behind(held.request, held.nodes, length)
        task.start(target, draft)

    def _longest(self, tokens: Sequence[int]) -> tuple[Held | None, int]:
        """The text that shares most tokens with this one, and how many, if it is worth while."""
        texts = [*self._running(), *self._prefixes]
        best = max(texts, key=lambda held: held.shared(tokens), default=None)
        length = best.shared(tokens) if best else 0
        return (best, length) if length >= LEAST else (None, 0)

    def _running(self) -> Iterator[Held]:
        """The prompts that the stages hold of requests under way; not while a draft's cache waits for its network."""
        for task in self.tasks:
            prompt = task.target.read
            if prompt and task.reading is None:
                tokens = task.tree.tokens[:len(prompt)]
                yield Held(task.target.request, prompt, tokens, task.draft, over=False)

    def _make_room(self) -> None:
        """Let the stages forget a text, if another one needs its place."""
        if self._prefixes and len(self.tasks) + len(self._prefixes) >= self.places:
            oldest = self._prefixes.pop(0)
            self.ring.evict(oldest.request)
            self._give_back(oldest.draft)

    def _give_back(self, draft: Draft) -> None:
        draft.reset()
        self._spare.append(draft)

    def _go_on(self, tasks: Sequence[Task]) -> bool:
        """Whether one of these has settled tokens, or is over."""
        news = [task.go_on() for task in tasks]
        self._end_those_over()
        return any(news)

    def _read(self, asking: Sequence[Task]) -> None:
        """Let the networks read what is asked for, and those who asked go on."""
        begin = self.ring.clock.now()
        read = self.passes([task.reading for task in asking if task.reading is not None])
        seconds = self.ring.clock.now() - begin
        for task, said in zip(asking, read):
            task.target.drafting += seconds
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
        task.draft.keep(min(len(nodes), task.draft.held))
        held = Held(task.target.request, nodes, tokens, task.draft, over=True)
        self._prefixes.append(held)

    def _rest(self) -> None:
        """Wait until every stage has forgotten all requests."""
        while self.ring.closing:
            self.ring.listen()
