"""A pipeline that one thread drives: other threads submit jobs and receive their events, so requests can overlap.

Events are queued at the receiver's end, so a slow reader stalls nobody.
"""
from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, AsyncGenerator, Callable, Iterable, Mapping, Sequence, TypeVar

from config.failure import PeerLost, guarded
from launch.pipeline import Generation, Pipeline, Prompt, SinglePrompt, is_list_of_prompts
from model.text import MessageDict, check_messages

POLL_SECONDS = 0.25  # seconds between two checks of an idle pipeline
Result = TypeVar("Result")


class Job:
    """A prompt with its options, and the receiver of its events: pieces of text, and at last how the answer ended."""

    report: Callable[[Any], None]  # called on the pipeline's thread
    generation: Generation | None = None  # set when the job begins
    ended = False

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
        self.ended: BaseException | None = None  # why no further request is accepted
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
        if self.ended is not None:
            raise self.ended

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Cancel jobs that nobody reads any more; finished jobs stay as they are."""
        for job in jobs:
            if not job.ended:
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
            self.ended = end
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
        if job.ended:
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
            had_ended, job.ended = job.ended, True
            self.jobs.discard(job)
            if job in self._running_jobs:
                self._running_jobs.remove(job)

        if not had_ended:
            self._report_end(job, end)

    def _report_end(self, job: Any, end: Any) -> None:
        if end is not None:
            job.report(end)


# --- for asyncio ------------------------------------------------------------------------------------------------------

class Reports:
    """The events of jobs, for an event loop of asyncio. The constructor submits the jobs, `close` cancels them."""

    def __init__(self, request_loop: RequestLoop, jobs: Sequence[Any]) -> None:
        self._request_loop, self.jobs = request_loop, jobs
        self._event_loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for job_index, job in enumerate(jobs):
            job.report = partial(self._queue, job_index)
        request_loop.submit(jobs)

    def _queue(self, job_index: int, event: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so nobody reads
            self._event_loop.call_soon_threadsafe(self._events.put_nowait, (job_index, event))

    async def next(self) -> tuple[int, Any]:
        """Return the index of a job and its next event; raises the error that ended a job."""
        job_index, event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return job_index, event

    def close(self) -> None:
        """Cancel the unfinished jobs."""
        self._request_loop.cancel(self.jobs)


class AsyncPipeline:
    """`Pipeline` for asyncio, with the same methods.

        async with AsyncPipeline.open("smollm2", max_requests=4) as pipeline:
            async for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    Up to `max_requests` answers are generated at once; further requests wait. Cancelling a task or closing a stream
    cancels its answer: no stage computes for it any more. An invalid request raises ValueError. Once a rank is lost for
    good, all pending and later requests raise PeerLost.
    """

    def __init__(self, open_pipeline: Callable[[], Pipeline]) -> None:
        self._open_pipeline = open_pipeline
        self._request_loop = RequestLoop()
        self._request_loop.ended = RuntimeError("the pipeline is not open: send requests inside its async with")

    @staticmethod
    def open(preset: str = "", **options: Any) -> AsyncPipeline:
        """Return a pipeline that `async with` opens and closes; options and errors are those of `Pipeline.open`."""
        return AsyncPipeline(partial(Pipeline.open, preset, **options))

    async def __aenter__(self) -> AsyncPipeline:
        self._request_loop.ended = None
        is_ready = self._request_loop.call(lambda pipeline: None)
        self._thread = guarded("pipeline", self._work, lambda thread, error: self._request_loop.drop(error))
        try:
            await asyncio.shield(asyncio.wrap_future(is_ready))
        except BaseException:
            self._request_loop.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        self._request_loop.stop()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._thread.join))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """Yield the pieces of an answer as they settle; options as for `Pipeline.generate`."""
        job_events = self._events(prompt, options)
        try:
            async for event in job_events:
                if isinstance(event, str):
                    yield event
        finally:
            await job_events.aclose()

    async def generate(self, prompt: SinglePrompt, **options: Any) -> Generation:
        """Return the complete answer to a text or to token ids; several at once are for `asyncio.gather`."""
        if is_list_of_prompts(prompt):
            raise ValueError("generate of an AsyncPipeline takes one prompt: await those of a list with asyncio.gather")
        return await self._completed(prompt, options)

    async def _completed(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        all_events = [event async for event in self._events(prompt, options)]
        last_event = all_events[-1]
        assert isinstance(last_event, Generation), "an answer ended without its last event"
        return last_event

    async def chat(self, messages: Sequence[MessageDict], **options: Any) -> Generation:
        """Return the assistant's complete answer to messages, as `Pipeline.chat` does."""
        check_messages(messages)
        return await self._completed(messages, options)

    async def _events(self, prompt: Prompt, options: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the events of a job; the last one is its generation."""
        with closing(Reports(self._request_loop, [Job(prompt, options)])) as reports:
            last_event: Any = None
            while not isinstance(last_event, Generation):
                _, last_event = await reports.next()
                yield last_event

    # --- the pipeline's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._open_pipeline() as pipeline:
            try:
                self._request_loop.work(pipeline)
            except PeerLost as error:
                self._request_loop.drop(error)  # before the pipeline is closed, which may take time
                raise
        self._request_loop.drop(RuntimeError("the pipeline is closed: send requests inside its async with"))
