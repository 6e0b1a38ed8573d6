"""A pipeline that one thread drives: other threads submit jobs and receive their events, so requests can overlap.

Events are queued at the receiver's end, so a slow reader stalls nobody.
"""
from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Callable, Iterable, Mapping, Sequence, TypeVar

from config.failure import PeerLost
from launch.pipeline import Generation, Pipeline, Prompt

POLL_SECONDS = 0.25  # seconds between two checks of an idle pipeline
Result = TypeVar("Result")


class Job:
    """A prompt with its options, and the receiver of its events: pieces of text, and at last how the answer ended."""

    report: Callable[[Any], None]  # called on the pipeline's thread
    generation: Generation | None = None  # set when the job begins
    has_ended = False

    def __init__(self, prompt: Prompt, options: Mapping[str, Any]) -> None:
        self.prompt, self.options = prompt, options

    def begin(self, pipeline: Pipeline) -> Generation:
        """Begin the answer; raises ValueError for an invalid request."""
        return pipeline.submit(self.prompt, **self.options)

    def events(self, text: str) -> Iterable[Any]:
        """Return the events for the next text of the answer, which may be empty."""
        return filter(None, [text])


class RequestLoop:
    """The jobs of a pipeline. The pipeline belongs to the thread that calls `work`.

    A job ends with its generation, or with an error: ValueError for an invalid request, PeerLost if a rank is lost.
    """

    def __init__(self) -> None:
        self.jobs: set[Any] = set()  # the unfinished ones, running or waiting
        self.end_error: BaseException | None = None  # why no further request is accepted
        self._inbox: SimpleQueue[Callable[[Pipeline], None]] = SimpleQueue()
        self._pending_calls: set[Future[Any]] = set()  # pending results of `call`
        self._running_jobs: list[Any] = []
        self._jobs_lock = threading.Lock()
        self._is_stopping = False

    # --- called by other threads --------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Any]) -> None:
        """Add jobs, all of them or none; raises what `check` raises."""
        with self._jobs_lock:
            self.check(len(jobs))
            self.jobs.update(jobs)
        for job in jobs:
            self._inbox.put(partial(self._begin_job, job))

    def check(self, num_new_jobs: int) -> None:
        """Raise an error if this many further jobs cannot be accepted."""
        if self.end_error is not None:
            raise self.end_error

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Cancel jobs that nobody reads any more; finished jobs stay as they are."""
        for job in jobs:
            if not job.has_ended:
                self._inbox.put(partial(self._cancel_job, job))

    def call(self, function: Callable[[Pipeline], Result]) -> Future[Result]:
        """Call a function with the pipeline between two of its turns, and return the future result; it must be quick.

        Raises what `check` raises. If the loop ends first, the future raises the error that ended it.
        """
        pending_result: Future[Result] = Future()

        def work(pipeline: Pipeline) -> None:
            if not pending_result.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                pending_result.set_result(function(pipeline))
            except Exception as error:
                pending_result.set_exception(error)
                if isinstance(error, PeerLost):  # any other error concerns this call only
                    raise

        with self._jobs_lock:
            self.check(0)
            self._pending_calls.add(pending_result)
        pending_result.add_done_callback(self._pending_calls.discard)
        self._inbox.put(work)
        return pending_result

    def stop(self) -> None:
        """Make `work` return."""
        self._is_stopping = True
        self._inbox.put(lambda pipeline: None)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def work(self, pipeline: Pipeline) -> None:
        """Advance all jobs until `stop`; raises PeerLost. Jobs that still run then are cancelled."""
        try:
            while not self._is_stopping:
                self._receive(pipeline)
                self._admit_jobs(pipeline)

                if self._running_jobs:
                    pipeline.turn()
                else:
                    pipeline.check()

                for job in list(self._running_jobs):
                    self._report_pieces(job, pipeline)
        finally:
            for job in self._running_jobs:
                with suppress(PeerLost):  # its stages may be lost already
                    job.generation.close()

    def drop(self, end: Any) -> None:
        """End all jobs and calls with this error, and reject later ones with it."""
        with self._jobs_lock:
            self.end_error = end
            jobs, pending_calls = list(self.jobs), list(self._pending_calls)

        for pending_result in pending_calls:
            if pending_result.set_running_or_notify_cancel():
                pending_result.set_exception(end)
        for job in jobs:
            self._end(job, end)

    def _receive(self, pipeline: Pipeline) -> None:
        """Execute the requests of other threads; wait briefly for one if no job is running."""
        with suppress(Empty):
            if not self._running_jobs:
                self._inbox.get(timeout=POLL_SECONDS)(pipeline)
            while True:
                self._inbox.get_nowait()(pipeline)

    def _begin_job(self, job: Any, pipeline: Pipeline) -> None:
        """Begin a job; it waits in the pipeline if no place is free."""
        if job.has_ended:
            return
        try:
            job.generation = job.begin(pipeline)
        except PeerLost:
            raise
        except Exception as error:
            self._end(job, error)
        else:
            self._running_jobs.append(job)

    def _admit_jobs(self, pipeline: Pipeline) -> None:
        """Begin jobs that wait to be admitted; in this class none do."""

    def _cancel_job(self, job: Any, pipeline: Pipeline) -> None:
        self._end(job, None)
        if job.generation is not None:
            job.generation.close()

    def _report_pieces(self, job: Any, pipeline: Pipeline) -> None:
        text_pieces = iter(job.generation)
        try:
            while job.generation.ready:
                for event in job.events(next(text_pieces)):
                    job.report(event)

        except StopIteration:
            self._end(job, job.generation)

        except PeerLost:
            raise

        except Exception as error:
            self._end(job, error)
            job.generation.close()

    def _end(self, job: Any, end: Any) -> None:
        """Mark a job as finished and free its place; only the first call for a job has an effect."""
        with self._jobs_lock:
            had_ended, job.has_ended = job.has_ended, True
            self.jobs.discard(job)
            if job in self._running_jobs:
                self._running_jobs.remove(job)

        if not had_ended:
            self._report_end(job, end)

    def _report_end(self, job: Any, end: Any) -> None:
        if end is not None:
            job.report(end)
