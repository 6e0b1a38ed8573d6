"""The engine: it runs a pipeline for a limited number of answers, and restarts it when a rank is lost.

This module knows nothing about HTTP. `launch/request_loop.py` explains how jobs take turns.
"""
from __future__ import annotations

import gc
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from config.console import say, show
from config.failure import explain, guarded
from launch.overview import Overview
from launch.pipeline import Generation, Pipeline
from launch.request_loop import POLL_SECONDS, Job, RequestLoop
from model.grammar import Grammar
from model.markup import OPEN_THOUGHTS
from pipeline.requests import Ring
from serve.metrics import Metrics
from serve.protocol import Choice, Refused
from serve.start_line import PipelineFacts
from serve.text_chunks import Pieces, checked_prompt_ids, snapshot

SNAPSHOT_INTERVAL = 0.05  # seconds between two snapshots of an answer
RING_INTERVAL = 1.0  # seconds between two pings of an idle ring
MAX_TRIES = 5  # to restart a pipeline
PAUSE_SECONDS = 1.0  # seconds between two tries
UNAVAILABLE = 503  # HTTP status if the pipeline is not available
PROMPT_END_TOKENS = 16  # in which a template may begin the thoughts
RETRY_SECONDS = 5  # until a client that comes too early may try again


class Ended(NamedTuple):
    """The end of a complete answer; the numbers count tokens."""

    finish_reason: str
    stop_text: str  # the stop text that ended the answer, if any
    num_tokens: int
    num_accepted: int  # tokens of the answer that had been sent as guesses
    num_rejected: int  # guesses that were sent, but rejected
    num_cached: int  # tokens of the prompt that the stages had already


Event = Any  # Piece, Echo, the facts of a snapshot of the answer, Ended or Refused


@dataclass(eq=False)
class AnswerJob(Job):
    """A requested answer, and the callback that receives its events."""

    choice: Choice
    report: Callable[[Event], None] = print
    sends_snapshots: bool = False  # whether to report snapshots, too
    arrived_at: float = field(default_factory=time.monotonic)
    prompt_ids: Sequence[int] = ()
    last_snapshot_at: float = 0.0
    pieces: Pieces | None = None  # of its text, once the prompt is read
    grammar: Grammar | None = None  # of its text, once it is compiled
    in_thoughts: bool = False  # whether the prompt begins the thoughts; an answer in a grammar has none

    def begin(self, pipeline: Pipeline) -> Generation:
        if pipeline.text and not self.grammar:
            prompt_end = pipeline.text.decode(self.prompt_ids[-PROMPT_END_TOKENS:])
            self.in_thoughts = bool(OPEN_THOUGHTS.search(prompt_end))
        return pipeline.submit(self.prompt_ids, **self.choice.options, guide=self.grammar, shows_marks=True)

    def events(self, text: str) -> Iterable[Event]:
        assert self.pieces is not None and self.generation is not None, "a job runs that has not begun"
        return self.pieces.of(self.generation, text)


class ServerLimits(NamedTuple):
    """How many answers run at once, how many may wait and how long, and whether to restart after a loss."""

    max_running: int
    max_waiting: int
    max_wait_seconds: float
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


class Engine(RequestLoop):
    """A pipeline that stays open, and is restarted when a rank is lost; `open_pipeline` opens it each time."""

    def __init__(self, open_pipeline: Callable[[], Pipeline], limits: ServerLimits) -> None:
        super().__init__()
        self._open_pipeline, self.limits = open_pipeline, limits
        self.metrics = Metrics()
        self.prompt_thread = ThreadPoolExecutor(1, "prompts")  # reading a long one delays no answer

        # the pipeline
        self.state = Health("loading")
        self.error: BaseException | None = None  # why the first pipeline could not be opened
        self.facts: PipelineFacts | None = None  # of the pipeline, once it was ready
        self.on_ready: Callable[[], None] = lambda: None  # called each time that the pipeline is ready
        self._ring: Ring | None = None  # of the present pipeline
        self.overview: Overview | None = None  # of its boards

        # jobs
        self._waiting: list[AnswerJob] = []  # some may be finished already
        self._compiling: set[AnswerJob] = set()  # each counts as running, and has a thread that compiles its grammar
        self._mean_answer_seconds = 1.0  # estimated

        # losses
        self._num_failed_tries = 0  # consecutive failed tries to open the pipeline
        self._ring_timeout = 0.0  # seconds within which the ring must answer
        self._recover_seconds = 0.0  # seconds after those, within which a silent rank may come back

        # pings and measurements
        self._pinged_at = self._answered_at = 0.0  # when the ring was last pinged, and last known to answer
        self._num_returned = 0  # messages that had come back by then
        self._busy_read_at = 0.0  # when the states of the ranks were last read

    # --- called by other threads --------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """The state of the pipeline; `silent` if its ring has not answered for more than `timeout` seconds."""
        ring, silent_seconds = self._ring, time.monotonic() - self._answered_at
        if self.state.status != "ready":
            return self.state

        if ring is not None and ring.loss:
            return Health("recovering", f"{ring.loss}: answers wait until it is back, up to recover="
                                        f"{self._recover_seconds:g} seconds")
        if silent_seconds <= self._ring_timeout:
            return self.state

        symptom = f"the ring has not answered for {silent_seconds:.0f} s: "
        if silent_seconds <= self._ring_timeout + self._recover_seconds:
            return Health("silent", f"{symptom}a rank hangs, and has recover={self._recover_seconds:g} seconds to come "
                                    "back; or a segment takes that long: raise timeout=")
        return Health("silent", f"{symptom}a rank hangs, although it reports that it is alive: restart the server; or "
                                "a segment takes that long: raise timeout=")

    @property
    def is_alive(self) -> bool:
        """Whether the server works, or recovers by itself; if not, only a restart of the server helps."""
        if self.health.status == "silent":
            return time.monotonic() - self._answered_at <= self._ring_timeout + self._recover_seconds
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
        max_running, max_waiting = self.limits.max_running, self.limits.max_waiting
        max_jobs, num_jobs = max_running + max_waiting, len(self.jobs)
        if more > max_jobs:
            raise Refused(f"{more} answers are requested at once, and at most {max_running} + {max_waiting} are "
                          "possible: request fewer", "n", "too_many")

        if num_jobs + more > max_jobs:
            num_ahead = num_jobs - max_running + 1
            wait_seconds = self._mean_answer_seconds * num_ahead / max_running
            retry = max(1, min(60, round(wait_seconds)))
            raise Refused(f"{num_jobs} answers are under way or waiting, and at most {max_running} + {max_waiting} are "
                          f"possible: try again in {retry} s", code="queue_full", status=429, retry=retry)

    def stop(self) -> None:
        """Make `run` return. During a restart that may take long, so this ends the waiting jobs."""
        super().stop()
        if self.state.status == "restarting":
            self._end_all()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the pipeline until `stop`, as the engine's thread."""
        while not self._is_stopping and self.state.status != "lost":
            try:
                self._serve_pipeline()
            except Exception as error:
                self._num_failed_tries += 1
                self._handle_loss(error, gives_up=self._num_failed_tries >= MAX_TRIES)
                time.sleep(PAUSE_SECONDS if self.state.status == "restarting" else 0)
            gc.collect()  # else reference cycles keep its weights in memory next to those of the next pipeline

        self.prompt_thread.shutdown(wait=False)
        if self.state.status != "lost":
            self._end_all()

    def _serve_pipeline(self) -> None:
        """Open a pipeline, and answer until `stop` or a loss; report a loss before closing, which may take long."""
        with self._open_pipeline() as pipeline:
            self._num_failed_tries, self._num_returned, self._answered_at = 0, 0, time.monotonic()
            is_virtual = pipeline.config.virtual  # its ring answers only while requests run
            self._ring_timeout = math.inf if is_virtual else pipeline.config.timeout + RING_INTERVAL
            self._recover_seconds = pipeline.config.recovery
            self.metrics.plain_seconds.set(pipeline.round_trip)

            with suppress(ValueError):  # a request with a grammar gives the reason
                pipeline.prepare_grammars()
            self._ring, self.overview = pipeline.ring, Overview(pipeline)
            self.facts = PipelineFacts.of(pipeline)
            self.state = Health("ready")
            self.on_ready()

            try:
                self.work(pipeline)
                self._end_all()
            except Exception as error:
                self._handle_loss(error)

    def _end_all(self) -> None:
        self.state = Health("stopped", "the server is being stopped")
        self.drop(Refused(self.state.reason, code="stopped", status=UNAVAILABLE))

    def _begin_job(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Have the job's prompt read, after earlier ones."""
        self.prompt_thread.submit(self._read, job, pipeline)

    def _read(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Read a prompt, on the thread of the prompts, then have the job wait until it may run."""
        if job.has_ended:
            return
        try:
            job.prompt_ids = checked_prompt_ids(job.choice, pipeline)
            job.pieces = Pieces(pipeline.text, job.choice, job.prompt_ids)
        except ValueError as error:
            self._end(job, Refused(str(error), job.choice.field))
        except Exception as error:
            self._end(job, error)
        else:
            self._inbox.put(lambda pipeline: self._waiting.append(job))

    def _admit_jobs(self, pipeline: Pipeline) -> None:
        """End jobs that have waited too long, and begin waiting ones up to the limit, in order of arrival."""
        self._expire()
        self._waiting = [job for job in self._waiting if not job.has_ended]
        while self._waiting and len(self._running_jobs) + len(self._compiling) < self.limits.max_running:
            self._begin_or_compile(self._waiting.pop(0), pipeline)

        self._check_ring(pipeline.ring)
        if self.overview and time.monotonic() - self._busy_read_at >= POLL_SECONDS:
            self._busy_read_at = time.monotonic()
            self.overview.sample()
            states = self.overview.states.values()
            self.metrics.occupy([state.busy if state else 0.0 for state in states])

        self.metrics.num_running.set(len(self._running_jobs))
        self.metrics.num_waiting.set(len(self._waiting))

    def _begin_or_compile(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Begin a job, after a thread of its own has compiled its grammar, if it has one."""
        if job.choice.guide is None:
            super()._begin_job(job, pipeline)
            return
        self._compiling.add(job)
        guarded("grammar", partial(self._compile_grammar, job, pipeline), lambda thread, error: None)

    def _compile_grammar(self, job: AnswerJob, pipeline: Pipeline) -> None:
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
        super()._begin_job(job, pipeline)

    def _expire(self) -> None:
        """End jobs that have waited too long."""
        now, max_wait_seconds = time.monotonic(), self.limits.max_wait_seconds
        with self._jobs_lock:
            waiting = [job for job in self.jobs if job.generation is None]
        for job in waiting:
            if now - job.arrived_at > max_wait_seconds:
                message = f"no place became free within {max_wait_seconds:g} s: try again later"
                self._end(job, Refused(message, code="waited_too_long", status=429, retry=10))

    def _expire_during_restart(self) -> None:
        """Call `_expire` repeatedly while the engine's thread restarts the pipeline, which may take long."""
        while self.state.status == "restarting":
            self._expire()
            time.sleep(POLL_SECONDS)

    def _check_ring(self, ring: Ring) -> None:
        """Note whether the ring answers: by the messages of running requests, or by pings if none is running."""
        now = time.monotonic()
        if self._running_jobs:
            has_answered = ring.returned_messages > self._num_returned
        else:
            has_answered = not ring.pings_in_flight
        if has_answered:
            self._answered_at, self._num_returned = now, ring.returned_messages

        if not self._running_jobs and not ring.pings_in_flight and now - self._pinged_at >= RING_INTERVAL:
            self._pinged_at = now
            ring.ping()

    def _report_pieces(self, job: AnswerJob, pipeline: Pipeline) -> None:
        """Report a snapshot to a watcher, at most one per `SNAPSHOT_INTERVAL`; then report what has settled."""
        now = time.monotonic()
        if job.sends_snapshots and job.generation is not None and now - job.last_snapshot_at >= SNAPSHOT_INTERVAL:
            job.last_snapshot_at = now
            rank_facts = {"busy": self.metrics.busy_of_ranks, "kind": pipeline.config.kind,
                          "profile": Path(pipeline.config.profile).name}
            job.report({**snapshot(job.generation, pipeline.text), **rank_facts})
        super()._report_pieces(job, pipeline)

    def _report_end(self, job: AnswerJob, end: Any) -> None:
        """Count the end of a job, and report it as Ended or Refused; None is a cancelled job."""
        outcome = "cancelled"

        if isinstance(end, Generation):
            request_seconds = time.monotonic() - job.arrived_at
            end, outcome = self._count_answer(end, request_seconds), "answered"
            if job.choice.prompt_only:
                end = end._replace(finish_reason="length", stop_text="", num_tokens=0, num_accepted=0, num_rejected=0)
        elif isinstance(end, Refused):
            outcome = "lost" if end.status == UNAVAILABLE else "refused"
        elif isinstance(end, ValueError):
            end, outcome = Refused(str(end)), "refused"
        elif end is not None:
            say(f"a request failed: {explain(end)}")
            end, outcome = Refused(explain(end), code="failed", status=500), "failed"

        self.metrics.requests_by_outcome.labels(outcome).inc()
        super()._report_end(job, end)

    def _count_answer(self, generation: Generation, seconds: float) -> Ended:
        """Count a complete answer, this many `seconds` after its request came, and return its end."""
        answer, accepted_runs = generation.answer, generation.accepted_runs
        num_accepted = sum(accepted_runs)
        num_rejected = max(0, generation.tree.num_sent_guesses - num_accepted)
        self._mean_answer_seconds += (seconds - self._mean_answer_seconds) / 8
        self.metrics.count(answer, seconds, accepted_runs, num_rejected)

        finish_reason = "stop" if answer.finish_reason == "stop" else "length"
        stop_text = generation.reader.stopped if generation.reader else ""
        return Ended(finish_reason, stop_text, answer.new_tokens, num_accepted, num_rejected, answer.reused_tokens)

    # --- losses -------------------------------------------------------------------------------------------------------

    def _handle_loss(self, error: Exception, gives_up: bool = False) -> None:
        """Handle a loss of the pipeline: end the running jobs; the others keep waiting, unless `gives_up`."""
        if self._is_stopping:
            return  # the ranks may have been ended while they loaded; `run` ends all jobs

        # state
        reason, previous_status = explain(error), self.state.status
        was_loading = previous_status == "loading"
        if not was_loading:  # else the engine's starter reports `error`
            with suppress(OSError):  # its output may be closed
                show(error, debug=False)
            say(reason)
        is_final = gives_up or was_loading or not self.limits.restart
        self.state, self._ring = Health("lost" if is_final else "restarting", reason), None
        self.overview = None
        self.error = error if was_loading else None
        self.metrics.occupy([])

        # running jobs
        running_jobs, self._running_jobs = self._running_jobs, []
        hint, retry = ("", 0) if is_final else ("; try again", 5)
        for job in running_jobs:
            message = f"the answer is lost: {reason}{hint}"
            self._end(job, Refused(message, code="rank_lost", status=UNAVAILABLE, retry=retry))
            job.generation = None  # else it keeps the pipeline in memory until its client has received the end

        # waiting jobs
        if is_final:
            self.drop(Refused(reason, code="rank_lost", status=UNAVAILABLE))
            return
        self.metrics.num_restarts.inc()
        if previous_status == "ready":
            guarded("patience", self._expire_during_restart, lambda thread, error: None)
