"""The engine: it runs a pipeline, with places and a queue, and restarts it when a rank is lost.

This module knows nothing about HTTP. `launch/asynchronous.py` explains how jobs take turns.
"""
from __future__ import annotations

import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from config.console import say, show
from config.failure import explain, guarded
from launch.asynchronous import POLL_SECONDS, Job, RequestLoop
from launch.pipeline import Generation, Pipeline
from model.grammar import Grammar
from pipeline.requests import Ring
from serve.metrics import Metrics
from serve.protocol import Choice, Refused
from serve.start_line import PipelineFacts
from serve.text_chunks import Pieces, checked_prompt_ids, snapshot, speed_facts

SNAPSHOT_INTERVAL = 0.05  # seconds between two snapshots of an answer
RING_INTERVAL = 1.0  # seconds between two pings of an idle ring
TRIES = 5  # to restart a pipeline
PAUSE = 1.0  # seconds between two tries
UNAVAILABLE = 503  # HTTP status if the pipeline is not available
RETRY_SECONDS = 5  # until a client that comes too early may try again


class Ended(NamedTuple):
    """The end of a complete answer; the numbers count tokens."""

    finish_reason: str
    stopped: str  # the stop text that ended the answer, if any
    completion: int
    accepted: int  # tokens of the answer that had been sent as guesses
    rejected: int  # guesses that were sent, but rejected
    cached: int  # tokens of the prompt that the stages held already


Event = Any  # Piece, the facts of a snapshot of the answer, Ended or Refused


@dataclass(eq=False)
class AnswerJob(Job):
    """A requested answer, and the callback that receives its events."""

    choice: Choice
    report: Callable[[Event], None] = print
    watched: bool = False  # whether to report snapshots, too
    came: float = field(default_factory=time.monotonic)
    ids: Sequence[int] = ()
    seen: float = 0.0  # time of the last snapshot
    pieces: Pieces | None = None  # of its text, once it has begun
    grammar: Grammar | None = None  # of its text, once it is compiled

    def begin(self, pipeline: Pipeline) -> Generation:
        self.pieces = Pieces(pipeline.text, self.choice, self.ids)
        return pipeline.submit(self.ids, **self.choice.options, guide=self.grammar)

    def events(self, text: str) -> Iterable[Event]:
        assert self.pieces is not None and self.generation is not None, "a job runs that has not begun"
        return self.pieces.of(self.generation, text)


class ServerLimits(NamedTuple):
    """How many answers run at once, how many may wait and how long, and whether to restart after a loss."""

    places: int
    queue: int
    seconds: float
    restart: bool = True


class Health(NamedTuple):
    """The state of the pipeline and its reason.

    It is loading, ready, recovering (a lost rank may come back), silent (the ring does not answer), restarting, lost
    (it was given up) or stopped.
    """

    status: str
    reason: str = ""

    @property
    def retry_seconds(self) -> int:
        """Seconds until a client may try again; 0 if that changes nothing, or is not needed."""
        return 0 if self.status in ("ready", "lost", "stopped") else RETRY_SECONDS


def ignore_readiness() -> None:
    """Do nothing when the pipeline is ready."""


class Engine(RequestLoop):
    """A pipeline that stays open, and is restarted when a rank is lost. `opened` opens it."""

    def __init__(self, opened: Callable[[], Pipeline], limits: ServerLimits) -> None:
        super().__init__()
        self._opened, self.limits = opened, limits
        self.figures = Metrics()
        self.prompts = ThreadPoolExecutor(1, "prompts")  # reading a long one delays no answer
        self.state = Health("loading")
        self.error: BaseException | None = None  # why the first pipeline could not be opened
        self.facts: PipelineFacts | None = None  # of the pipeline, once it was ready
        self.on_ready: Callable[[], None] = ignore_readiness  # called each time that the pipeline is ready
        self._ring: Ring | None = None  # of the present pipeline
        self._waiting: list[AnswerJob] = []  # some may be finished already
        self._compiling: set[AnswerJob] = set()  # each has a place, and a thread that compiles its grammar
        self._seconds = 1.0  # that an answer takes, estimated
        self._failed = 0  # consecutive failed tries to open the pipeline
        self._patience = 0.0  # seconds within which the ring must answer
        self._recover_seconds = 0.0  # more, within which a rank that is silent may come back
        self._pinged = self._answered = 0.0  # when the ring was last pinged, and last known to answer
        self._messages = 0  # number that had come back by then
        self._polled = 0.0  # when the shares of busy time were last read

    # --- called by other threads --------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """The state of the pipeline; `silent` if its ring has not answered for more than `timeout` seconds."""
        ring, silence = self._ring, time.monotonic() - self._answered
        if self.state.status != "ready":
            return self.state
        if ring is not None and ring.loss:
            return Health("recovering", f"{ring.loss}: answers wait until it is back, up to recover="
                                        f"{self._recover_seconds:g} seconds")
        if silence <= self._patience:
            return self.state

        symptom = f"the ring has not answered for {silence:.0f} s: "
        if silence <= self._patience + self._recover_seconds:
            return Health("silent", f"{symptom}a rank hangs, and has recover={self._recover_seconds:g} seconds to come "
                                    "back; or a segment takes that long: raise timeout=")
        return Health("silent", f"{symptom}a rank hangs, although it reports that it is alive: restart the server; or "
                                "a segment takes that long: raise timeout=")

    @property
    def is_alive(self) -> bool:
        """Whether the server works, or recovers by itself; if not, only a restart of the server helps."""
        if self.health.status == "silent":
            return time.monotonic() - self._answered <= self._patience + self._recover_seconds
        return self.state.status != "lost"

    def check_healthy(self) -> None:
        """Raise Refused unless the pipeline can answer now."""
        health = self.health
        if health.status != "ready":
            raise Refused(health.reason or f"the pipeline is {health.status}", code=health.status, status=UNAVAILABLE,
                          retry=health.retry_seconds)

    def check_ready(self) -> None:
        """Raise Refused as `check_healthy` does, but not during a restart, since answers can wait for its end."""
        if self.state.status not in ("ready", "restarting"):
            self.check_healthy()

    def check(self, more: int) -> None:
        """Raise Refused if this many more answers cannot even wait."""
        self.check_ready()
        places, queue = self.limits.places, self.limits.queue
        held = len(self.jobs)
        if more > places + queue:
            raise Refused(f"{more} answers are requested at once, and at most {places} + {queue} are possible: request "
                          "fewer", "n", "too_many")
        if held + more > places + queue:
            retry = max(1, min(60, round(self._seconds * (held - places + 1) / places)))
            raise Refused(f"{held} answers are under way or waiting, and at most {places} + {queue} are possible: try "
                          f"again in {retry} s", code="queue_full", status=429, retry=retry)

    def stop(self) -> None:
        """Make `run` return. During a restart that may take long, so this ends the waiting jobs."""
        super().stop()
        if self.state.status == "restarting":
            self._end_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the pipeline until `stop`, as the engine's thread."""
        while not self._stopping and self.state.status != "lost":
            try:
                self._live()
            except Exception as error:
                self._failed += 1
                self._lose(error, last=self._failed >= TRIES)
                time.sleep(PAUSE * (self.state.status == "restarting"))
            gc.collect()  # else reference cycles keep its weights in memory next to those of the next pipeline
        self.prompts.shutdown(wait=False)
        if self.state.status != "lost":
            self._end_all()

    def _live(self) -> None:
        """Open a pipeline, and answer until `stop` or a loss; report a loss before closing, which may take long."""
        with self._opened() as pipeline:
            self._failed, self._messages, self._answered = 0, 0, time.monotonic()
            virtual = pipeline.config.virtual  # its ring answers only while requests run
            self._patience = math.inf if virtual else pipeline.config.timeout + RING_INTERVAL
            self._recover_seconds = pipeline.config.recovery
            self.figures.plain_seconds.set(pipeline.round_trip)
            with suppress(ValueError):  # a request with a grammar gives the reason
                pipeline.prepare_grammars()
            self._ring, self.facts = pipeline.ring, PipelineFacts.of(pipeline)
            self.state = Health("ready")
            self.on_ready()
            try:
                self.work(pipeline)
                self._end_all()
            except Exception as error:
                self._lose(error)

    def _end_all(self) -> None:
        self.state = Health("stopped", "the server is being stopped")
        self.drop(Refused(self.state.reason, code="stopped", status=UNAVAILABLE))

    def _take_in(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Have the job's prompt read, after earlier ones."""
        self.prompts.submit(self._read, job, pipeline)

    def _read(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Read a prompt, on the thread of the prompts, and have the job wait for a place."""
        if job.ended:
            return
        try:
            job.ids = checked_prompt_ids(job.choice, pipeline)
        except ValueError as error:
            self._end(job, Refused(str(error), job.choice.field))
        except Exception as error:
            self._end(job, error)
        else:
            self._inbox.put(lambda pipeline: self._waiting.append(job))

    def _admit(self, pipeline: Pipeline) -> None:
        """End jobs that have waited too long, and begin waiting ones while there are places, in order of arrival."""
        self._expire()
        self._waiting = [job for job in self._waiting if not job.ended]
        while self._waiting and len(self._running) + len(self._compiling) < self.limits.places:
            self._begin(self._waiting.pop(0), pipeline)
        self._ping(pipeline.ring)
        if time.monotonic() - self._polled >= POLL_SECONDS:
            self._polled = time.monotonic()
            self.figures.occupy(pipeline.rank.busy_shares())
        self.figures.num_running.set(len(self._running))
        self.figures.num_waiting.set(len(self._waiting))

    def _begin(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Begin a job, after a thread of its own has compiled its grammar, if it has one."""
        if job.choice.guide is None:
            super()._take_in(job, pipeline)
            return
        self._compiling.add(job)
        guarded("grammar", partial(self._compile, job, pipeline), lambda thread, error: None)

    def _compile(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Compile a job's grammar, on the thread of this grammar."""
        assert job.choice.guide is not None, "a job without a grammar compiles one"
        try:
            job.grammar = pipeline.grammar(job.choice.guide)
        except ValueError as error:
            self._end(job, Refused(str(error), job.choice.guided_by))
        except Exception as error:
            self._end(job, error)
        self._inbox.put(partial(self._begin_compiled, job))

    def _begin_compiled(self, job: AnswerJob, pipeline: Pipeline) -> None:
        self._compiling.discard(job)
        super()._take_in(job, pipeline)

    def _expire(self) -> None:
        now, patience = time.monotonic(), self.limits.seconds
        with self._counting:
            late = [job for job in self.jobs if job.generation is None and now - job.came > patience]
        for job in late:
            message = f"no place became free within {patience:g} s: try again later"
            self._end(job, Refused(message, code="waited_too_long", status=429, retry=10))

    def _expire_meanwhile(self) -> None:
        """Call `_expire` repeatedly while the engine's thread restarts the pipeline, which may take long."""
        while self.state.status == "restarting":
            self._expire()
            time.sleep(POLL_SECONDS)

    def _ping(self, ring: Ring) -> None:
        """Note whether the ring answers: by the messages of running requests, or by pings if none is running."""
        now = time.monotonic()
        heard = ring.returned_messages > self._messages
        if heard if self._running else not ring.unanswered:
            self._answered, self._messages = now, ring.returned_messages
        if not self._running and not ring.unanswered and now - self._pinged >= RING_INTERVAL:
            self._pinged = now
            ring.ping()

    def _hand_out(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Report a snapshot to a watcher, at most one per `SNAPSHOT_INTERVAL`; then report what has settled."""
        now = time.monotonic()
        if job.watched and job.generation is not None and now - job.seen >= SNAPSHOT_INTERVAL:
            job.seen = now
            ranks = {"busy": self.figures.busy_of_ranks, **speed_facts(pipeline)}
            job.report({**snapshot(job.generation, pipeline.text), **ranks})
        super()._hand_out(job, pipeline)

    def _report_end(self, job: AnswerJob, end: Any) -> None:
        """Count the end of a job, and report it as Ended or Refused; None is a cancelled job."""
        outcome = "cancelled"
        if isinstance(end, Generation):
            end, outcome = self._count_answer(end, time.monotonic() - job.came), "answered"
            if job.choice.prompt_only:
                end = end._replace(finish_reason="length", stopped="", completion=0, accepted=0, rejected=0)
        elif isinstance(end, Refused):
            outcome = "lost" if end.status == UNAVAILABLE else "refused"
        elif isinstance(end, ValueError):
            end, outcome = Refused(str(end)), "refused"
        elif end is not None:
            say(f"a request failed: {explain(end)}")
            end, outcome = Refused(explain(end), code="failed", status=500), "failed"
        self.figures.requests_by_outcome.labels(outcome).inc()
        super()._report_end(job, end)

    def _count_answer(self, generation: Generation, seconds: float) -> Ended:
        """Count a complete answer, this many `seconds` after its request came, and return its end."""
        answer, accepted_runs = generation.answer, generation.accepted_runs
        accepted = sum(accepted_runs)
        rejected = max(0, generation.tree.num_sent_guesses - accepted)
        self._seconds += (seconds - self._seconds) / 8
        self.figures.count(answer, seconds, accepted_runs, rejected)
        reason = "stop" if answer.finish_reason == "stop" else "length"
        stopped = generation.reader.stopped if generation.reader else ""
        return Ended(reason, stopped, answer.new_tokens, accepted, rejected, answer.reused_tokens)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _lose(self, error: Exception, last: bool = False) -> None:
        """Handle a loss of the pipeline: end the running jobs; the others keep waiting, except after the `last` try."""
        if self._stopping:
            return  # the ranks may have been ended while they loaded; `run` ends all jobs
        reason, before = explain(error), self.state.status
        if before != "loading":  # else the engine's starter reports `error`
            with suppress(OSError):  # its output may be closed
                show(error, debug=False)
            say(reason)
        final = last or before == "loading" or not self.limits.restart
        self.state, self._ring = Health("lost" if final else "restarting", reason), None
        self.error = error if before == "loading" else None
        self.figures.occupy([])
        running, self._running = self._running, []
        hint, retry = ("", 0) if final else ("; try again", 5)
        for job in running:
            lost = Refused(f"the answer is lost: {reason}{hint}", code="rank_lost", status=UNAVAILABLE, retry=retry)
            self._end(job, lost)
            job.generation = None  # else it keeps the pipeline in memory until its client has received the end
        if final:
            self.drop(Refused(reason, code="rank_lost", status=UNAVAILABLE))
            return
        self.figures.num_restarts.inc()
        if before == "ready":
            guarded("patience", self._expire_meanwhile, lambda thread, error: None)
