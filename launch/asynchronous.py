"""A pipeline that one thread turns: others hand it jobs, and hear what comes of them, so that many may ask at once.

What is reported to a listener is queued at its own end, so a slow reader stalls nobody.
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

from launch.pipeline import Generation, Pipeline, Prompt
from model.text import MessageDict, check_messages
from pipeline.failure import PeerLost, guarded

POLL_SECONDS = 0.25  # seconds between two looks at a pipeline that has nothing to do
Result = TypeVar("Result")


class Job:
    """A prompt with its options, and who hears of the answer: of pieces of its text, and at last what it ended with."""

    report: Callable[[Any], None]  # called on the pipeline's thread
    generation: Generation | None = None  # since it has begun
    over = False

    def __init__(self, prompt: Prompt, options: Mapping[str, Any]) -> None:
        self.prompt, self.options = prompt, options

    def begin(self, pipeline: Pipeline) -> Generation:
        """Let the answer begin; raises ValueError for what cannot be asked."""
        return pipeline.submit(self.prompt, **self.options)

    def events(self, text: str) -> Iterable[Any]:
        """What is reported when the answer goes on with this text, which may be empty."""
        return filter(None, [text])


class RequestLoop:
    """The jobs of a pipeline, which belongs to the thread that calls `work`.

    A job ends with its generation, or with an error: ValueError for what cannot be asked, PeerLost if a rank is lost.
    """

    def __init__(self) -> None:
        self.jobs: set[Any] = set()  # that are not over, under way or waiting
        self.ended: BaseException | None = None  # why nothing can be asked any more
        self._inbox: SimpleQueue[Callable[[Pipeline], None]] = SimpleQueue()
        self._questions: set[Future[Any]] = set()  # that have no answer yet
        self._running: list[Any] = []
        self._counting = threading.Lock()
        self._stopping = False

    # --- asked by other threads ---------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Any]) -> None:
        """Take in jobs, all of them or none; raises what `check` raises."""
        with self._counting:
            self.check(len(jobs))
            self.jobs.update(jobs)
        for job in jobs:
            self._inbox.put(partial(self._take_in, job))

    def check(self, more: int) -> None:
        """Raise an error if so many more jobs cannot be taken in."""
        if self.ended is not None:
            raise self.ended

    def cancel(self, jobs: Sequence[Any]) -> None:
        """Give answers up that nobody reads any more; those that are over stay as they are."""
        for job in jobs:
            if not job.over:
                self._inbox.put(partial(self._give_up, job))

    def call(self, function: Callable[[Pipeline], Result]) -> Future[Result]:
        """What a function says of the pipeline, between two of its turns; the function must not take long.

        Raises what `check` raises; so does the future, if no turn comes any more.
        """
        said: Future[Result] = Future()

        def work(pipeline: Pipeline) -> None:
            if not said.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                said.set_result(function(pipeline))
            except Exception as error:
                said.set_exception(error)
                if isinstance(error, PeerLost):  # else it is that of this question alone
                    raise

        with self._counting:
            self.check(0)
            self._questions.add(said)
        said.add_done_callback(self._questions.discard)
        self._inbox.put(work)
        return said

    def stop(self) -> None:
        """Let `work` return."""
        self._stopping = True
        self._inbox.put(lambda pipeline: None)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def work(self, pipeline: Pipeline) -> None:
        """Let all jobs go on until `stop`; raises PeerLost. What is under way then is taken back from the stages."""
        try:
            while not self._stopping:
                self._hear(pipeline)
                self._admit(pipeline)
                if self._running:
                    pipeline.turn()
                else:
                    pipeline.check()
                for job in list(self._running):
                    self._hand_out(job, pipeline)
        finally:
            for job in self._running:
                with suppress(PeerLost):  # its stages may be lost already
                    job.generation.close()

    def drop(self, end: Any) -> None:
        """End all jobs and questions with the same words, since nobody will answer them, nor later ones."""
        with self._counting:
            self.ended = end
            jobs, questions = list(self.jobs), list(self._questions)
        for question in questions:
            if question.set_running_or_notify_cancel():
                question.set_exception(end)
        for job in jobs:
            self._end(job, end)

    def _hear(self, pipeline: Pipeline) -> None:
        """Do what other threads asked for; wait for that a little, if there is nothing else to do."""
        with suppress(Empty):
            if not self._running:
                self._inbox.get(timeout=POLL_SECONDS)(pipeline)
            while True:
                self._inbox.get_nowait()(pipeline)

    def _take_in(self, job: Any, pipeline: Pipeline) -> None:
        """Let a job begin, which waits in the pipeline if there is no place for it."""
        if job.over:
            return
        try:
            job.generation = job.begin(pipeline)
        except PeerLost:
            raise
        except Exception as error:
            self._end(job, error)
        else:
            self._running.append(job)

    def _admit(self, pipeline: Pipeline) -> None:
        """Let those begin that were taken in and wait; here none do."""

    def _give_up(self, job: Any, pipeline: Pipeline) -> None:
        self._end(job, None)
        if job.generation is not None:
            job.generation.close()

    def _hand_out(self, job: Any, pipeline: Pipeline) -> None:
        pieces = iter(job.generation)
        try:
            while job.generation.ready:
                for piece in job.events(next(pieces)):
                    job.report(piece)
        except StopIteration:
            self._end(job, job.generation)
        except PeerLost:
            raise
        except Exception as error:
            self._end(job, error)
            job.generation.close()

    def _end(self, job: Any, end: Any) -> None:
        """A job is over, and its place free: once, no matter who ends it first."""
        with self._counting:
            over, job.over = job.over, True
            self.jobs.discard(job)
            if job in self._running:
                self._running.remove(job)
        if not over:
            self._report_end(job, end)

    def _report_end(self, job: Any, end: Any) -> None:
        if end is not None:
            job.report(end)


# --- for asyncio ------------------------------------------------------------------------------------------------------

class Reports:
    """What jobs of an event loop of asyncio report, begun with this; close it to give up what nobody reads any more."""

    def __init__(self, loop: RequestLoop, jobs: Sequence[Any]) -> None:
        self._requests, self.jobs = loop, jobs
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for number, job in enumerate(jobs):
            job.report = partial(self._queue, number)
        loop.submit(jobs)

    def _queue(self, number: int, event: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody reads
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    async def next(self) -> tuple[int, Any]:
        """A job's number, and its next event; raises the error that has ended one."""
        number, event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return number, event

    def close(self) -> None:
        """Give up what has not ended."""
        self._requests.cancel(self.jobs)


class AsyncPipeline:
    """`Pipeline` for asyncio, with the same verbs.

        async with AsyncPipeline.open("smollm2", max_requests=4) as pipeline:
            async for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    As many answers are made at once as `max_requests` says; others wait for their places. A task that is cancelled, or
    a stream that is closed, gives its answer up: no stage computes for it any more. What cannot be asked raises
    ValueError; once a rank is lost, all that is asked and was asked ends with PeerLost.
    """

    def __init__(self, opened: Callable[[], Pipeline]) -> None:
        self._opened = opened
        self._requests = RequestLoop()
        self._requests.ended = RuntimeError("the pipeline is not open: ask inside its async with")

    @staticmethod
    def open(preset: str = "", **options: Any) -> AsyncPipeline:
        """A pipeline that `async with` opens, and closes; the options are those of `Pipeline.open`, which may raise."""
        return AsyncPipeline(partial(Pipeline.open, preset, **options))

    async def __aenter__(self) -> AsyncPipeline:
        self._requests.ended = None
        ready = self._requests.call(lambda pipeline: None)
        self._thread = guarded("pipeline", self._work, lambda thread, error: self._requests.drop(error))
        try:
            await asyncio.shield(asyncio.wrap_future(ready))
        except BaseException:
            self._requests.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        self._requests.stop()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._thread.join))

    # --- requests -----------------------------------------------------------------------------------------------------

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """The pieces of an answer as they settle, with options as for `Pipeline.generate`."""
        events = self._events(prompt, options)
        try:
            async for event in events:
                if isinstance(event, str):
                    yield event
        finally:
            await events.aclose()

    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """A whole answer, as `Pipeline.generate` gives it."""
        events = [event async for event in self._events(prompt, options)]
        whole = events[-1]
        assert isinstance(whole, Generation), "an answer has ended without its end"
        return whole

    async def chat(self, messages: Sequence[MessageDict], **options: Any) -> Generation:
        """The assistant's whole answer to messages, as `Pipeline.chat` gives it."""
        check_messages(messages)
        return await self.generate(messages, **options)

    async def _events(self, prompt: Prompt, options: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a job, up to its end, which is a generation."""
        with closing(Reports(self._requests, [Job(prompt, options)])) as reports:
            event: Any = None
            while not isinstance(event, Generation):
                _, event = await reports.next()
                yield event

    # --- the pipeline's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._opened() as pipeline:
            try:
                self._requests.work(pipeline)
            except PeerLost as error:
                self._requests.drop(error)  # before the pipeline is closed, which may last
                raise
        self._requests.drop(RuntimeError("the pipeline is closed: ask inside its async with"))
