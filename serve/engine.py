"""The engine: one thread owns the pipeline and runs it; all others hand it jobs, and are told what comes of them.

It knows nothing about HTTP. Whoever is told must not wait: what is told is queued at the listener's end, so a slow
reader stalls nobody.
"""
from __future__ import annotations

import gc
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from launch.pipeline import Generation, Pipeline
from pipeline.loss import PeerLost, explain, foreseen
from serve.figures import Figures
from serve.protocol import Choice, Refused
from serve.sight import sight

LOOK = 0.25  # seconds between two looks at a pipeline that has nothing to do, or at how busy its ranks are
GLANCE = 0.05  # seconds between two sights of an answer
TRIES = 5  # to bring a pipeline up again
PAUSE = 1.0  # seconds between two of them
Result = TypeVar("Result")


class Piece(NamedTuple):
    """Some text of the answer."""

    text: str


class Ended(NamedTuple):
    """The answer is whole; the numbers count tokens."""

    finish_reason: str
    prompt: int
    completion: int
    accepted: int  # of the answer, those that were guesses under way
    rejected: int  # guesses that were sent in vain
    cached: int  # of the prompt, those that the stages had already


class Sight(NamedTuple):
    """What is to be seen of the answer under way, for who watches it."""

    told: dict[str, Any]


Event = Any  # Piece, Sight, Ended or Refused


@dataclass(eq=False)
class Job:
    """One answer that is asked for, and whom to tell of it."""

    choice: Choice
    tell: Callable[[Event], None]
    watched: bool = False  # whether there shall be sights, too
    came: float = field(default_factory=time.monotonic)
    ids: Sequence[int] = ()
    seen: float = 0.0  # when there was the last sight
    generation: Generation | None = None
    over: bool = False


class Limits(NamedTuple):
    """How many answers are made at once, how many may wait, for how many seconds; whether a loss is mended."""

    places: int
    queue: int
    seconds: float
    restart: bool = True


class Health(NamedTuple):
    """How the pipeline is: loading, ready, restarting, lost or stopped; and why."""

    status: str
    reason: str = ""


class Engine:
    """A pipeline that stays, and comes back when a rank is lost. `opened` opens it."""

    def __init__(self, opened: Callable[[], Pipeline], limits: Limits) -> None:
        self._opened, self.limits = opened, limits
        self.figures = Figures()
        self.health = Health("loading")
        self.error: BaseException | None = None  # why there was no pipeline at all
        self._inbox: SimpleQueue[Callable[[Pipeline], None]] = SimpleQueue()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self.jobs: set[Job] = set()  # that are not over, under way or waiting
        self._counting = threading.Lock()
        self._seconds = 1.0  # that an answer takes, about
        self._looked = 0.0  # when the ranks were asked last
        self._stopping = False

    # --- asked by other threads ---------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let jobs wait for their places, all of them or none; raises Refused if they cannot."""
        with self._counting:
            self._check(len(jobs))
            self.jobs.update(jobs)
        for job in jobs:
            self._inbox.put(partial(self._take_in, job))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give answers up that nobody reads any more; those that are over stay as they are."""
        for job in jobs:
            if not job.over:
                self._inbox.put(partial(self._give_up, job))

    def call(self, function: Callable[[Pipeline], Result]) -> Future[Result]:
        """What a function says of the pipeline, between two of its turns; the function must not take long."""
        said: Future[Result] = Future()

        def work(pipeline: Pipeline) -> None:
            try:
                result = function(pipeline)
            except ValueError as error:
                said.set_exception(error)
            else:
                said.set_result(result)

        self._inbox.put(work)
        return said

    def stop(self) -> None:
        """Let the thread end the pipeline in good order."""
        self._stopping = True
        self._inbox.put(lambda pipeline: None)

    def check_ready(self) -> None:
        """Raise Refused if nothing can be asked of the pipeline."""
        status, reason = self.health
        if status not in ("ready", "restarting"):
            retry = 5 if status == "loading" else 0
            raise Refused(reason or f"the pipeline is {status}", code=status, status=503, retry=retry)

    def _check(self, more: int) -> None:
        self.check_ready()
        places, queue = self.limits.places, self.limits.queue
        held = len(self.jobs)
        if more > places + queue:
            raise Refused(f"{more} answers are asked for at once, and no more than {places} + {queue} may be: ask for "
                          "fewer", "n", "too_many")
        if held + more > places + queue:
            retry = max(1, min(60, round(self._seconds * (held - places + 1) / places)))
            raise Refused(f"{held} answers are under way or waiting, and no more than {places} + {queue} may be: come "
                          f"again in {retry} s", code="queue_full", status=429, retry=retry)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the pipeline until `stop`; this is what the engine's thread does."""
        failed = 0
        while not self._stopping:
            try:
                self._live()
            except Exception as error:
                failed = 0 if self.health.status == "ready" else failed + 1
                self._lose(error, last=not self.limits.restart or failed >= TRIES)
            if self.health.status == "lost":
                return
            gc.collect()  # a pipeline is full of cycles, and its networks would lie beside those of the next one
            time.sleep(PAUSE * bool(failed))
        self.health = Health("stopped", "the server is being stopped")

    def _live(self) -> None:
        """Open a pipeline, and work with it until `stop`; raises what it is lost of."""
        with self._opened() as pipeline:
            self.figures.plain.set(pipeline.round_trip)
            self.health = Health("ready")
            try:
                self._work(pipeline)
            finally:
                self._abandon()
            self._drop(Refused("the server is being stopped", code="stopped", status=503))

    def _work(self, pipeline: Pipeline) -> None:
        while not self._stopping:
            self._look(pipeline)
            self._hear(pipeline)
            self._admit(pipeline)
            if self._running:
                pipeline.turn()
            else:
                pipeline.check()
            for job in list(self._running):
                self._show(job, pipeline)
                self._hand_out(job)
            self.figures.running.set(len(self._running))
            self.figures.waiting.set(len(self._waiting))

    def _look(self, pipeline: Pipeline) -> None:
        """Ask now and then how busy the ranks are."""
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            self.figures.occupy(pipeline.busy())

    def _abandon(self) -> None:
        """Take back what is under way, as long as the pipeline is there; its stages may be lost already."""
        for job in self._running:
            if job.generation is not None:
                with suppress(PeerLost):
                    job.generation.close()

    def _hear(self, pipeline: Pipeline) -> None:
        """Do what other threads asked for; wait for that a little, if there is nothing else to do."""
        with suppress(Empty):
            if not self._running and not self._waiting:
                self._inbox.get(timeout=LOOK)(pipeline)
            while True:
                self._inbox.get_nowait()(pipeline)

    def _take_in(self, job: Job, pipeline: Pipeline) -> None:
        """Look a job over, and let it wait."""
        try:
            ids = pipeline.prompt_ids(job.choice.prompt, job.choice.template)
        except ValueError as error:
            self._end(job, Refused(str(error), job.choice.field), "refused")
            return
        most = pipeline.decoder.max_length
        if len(ids) >= most:
            told = f"the prompt has {len(ids)} tokens, and prompt and answer together have {most} at most: shorten it"
            self._end(job, Refused(told, job.choice.field, "context_length_exceeded"), "refused")
            return
        job.ids = ids
        self._waiting.append(job)

    def _give_up(self, job: Job, pipeline: Pipeline) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
        self._end(job, None, "cancelled")
        if job.generation is not None:
            job.generation.close()

    def _admit(self, pipeline: Pipeline) -> None:
        """Let those begin for whom there is a place, the first who came first; nobody waits too long."""
        now = time.monotonic()
        for job in [job for job in self._waiting if now - job.came > self.limits.seconds]:
            self._waiting.remove(job)
            told = f"there was no place within {self.limits.seconds:g} s: come again"
            self._end(job, Refused(told, code="waited_too_long", status=429, retry=10), "refused")
        while self._waiting and len(self._running) < self.limits.places:
            job = self._waiting.pop(0)
            try:
                job.generation = pipeline.submit(job.ids, **job.choice.options)
            except ValueError as error:
                self._end(job, Refused(str(error)), "refused")
                continue
            self._running.append(job)

    def _show(self, job: Job, pipeline: Pipeline) -> None:
        """Tell who watches what is to be seen, not more often than an eye sees."""
        now = time.monotonic()
        if job.watched and job.generation is not None and now - job.seen >= GLANCE:
            job.seen = now
            ranks = {"busy": self.figures.busy_of_ranks, "plain": round(1 / pipeline.round_trip, 2)}
            job.tell(Sight({**sight(job.generation, pipeline.text), **ranks}))

    def _hand_out(self, job: Job) -> None:
        """Tell what has settled of an answer, and its end."""
        generation = job.generation
        assert generation is not None, "a job runs that has not begun"
        pieces = iter(generation)
        try:
            while generation.ready:
                text = next(pieces)
                if text:
                    job.tell(Piece(text))
        except StopIteration:
            self._running.remove(job)
            self._end(job, ended(generation), "answered")
        except PeerLost:
            raise
        except Exception as error:
            self._running.remove(job)
            print(f"flowspec: a request failed: {explain(error)}", flush=True)
            self._end(job, Refused(explain(error), code="failed", status=500), "failed")

    def _end(self, job: Job, told: Event, outcome: str) -> None:
        """Tell the end of a job, whose place is free then."""
        if job.over:
            return
        job.over = True
        with self._counting:
            self.jobs.discard(job)
        if isinstance(told, Ended):
            self._count(job, told)
        self.figures.requests.labels(outcome).inc()
        if told is not None:
            job.tell(told)

    def _count(self, job: Job, told: Ended) -> None:
        assert job.generation is not None, "a job has ended that has not begun"
        seconds = time.monotonic() - job.came
        self._seconds += (seconds - self._seconds) / 8
        self.figures.count(job.generation.answer, seconds)
        self.figures.guesses.labels("accepted").inc(told.accepted)
        self.figures.guesses.labels("rejected").inc(told.rejected)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _lose(self, error: Exception, last: bool) -> None:
        """The pipeline is gone: who was under way is told, who waits goes on waiting unless this was the `last` try."""
        if not foreseen(error):
            traceback.print_exception(type(error), error, error.__traceback__)
        reason = explain(error)
        print(f"flowspec: {reason}", flush=True)
        first = self.health.status == "loading"
        self.health = Health("lost" if last or first else "restarting", reason)
        self.error = error if first else None
        self.figures.occupy([])
        running, self._running = self._running, []
        for job in running:
            told = f"the answer is lost: {reason}; ask again"
            self._end(job, Refused(told, code="rank_lost", status=503, retry=5), "lost")
            job.generation = None  # which holds the pipeline, for as long as its client takes to hear of the end
        if self.health.status == "lost":
            self._drop(Refused(reason, code="rank_lost", status=503))
        else:
            self.figures.restarts.inc()

    def _drop(self, told: Refused) -> None:
        """End all jobs, since nobody will answer them."""
        with self._counting:
            left = list(self.jobs)
        for job in left:
            self._end(job, told, "lost")
        self._running, self._waiting = [], []


def ended(generation: Generation) -> Ended:
    """What there is to tell of an answer that is whole."""
    answer, accepted = generation.answer, generation.accepted
    reason = "stop" if answer.finish_reason == "stop" else "length"
    rejected = max(0, generation.tree.guessed - accepted)
    return Ended(reason, answer.prompt_tokens, answer.new_tokens, accepted, rejected, answer.reused_tokens)
