"""A pipeline for asyncio: many tasks ask it at once, and none of them keeps the event loop waiting.

It knows nothing about how requests take turns: a thread of its own turns the pipeline, see `request_loop.py`.
"""
from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, AsyncGenerator, Callable, Mapping, Sequence

from launch.generation import Generation
from launch.pipeline import Pipeline, Prompt
from launch.request_loop import Job, Reports, Turning
from model.text import Message, check_messages
from pipeline.failure import PeerLost, guarded


class Asked(Job):
    """A prompt with its options."""

    def __init__(self, prompt: Prompt, options: Mapping[str, Any]) -> None:
        self.prompt, self.options = prompt, options

    def begin(self, pipeline: Pipeline) -> Generation:
        return pipeline.submit(self.prompt, **self.options)


class AsyncPipeline:
    """`Pipeline` for asyncio, with the same verbs.

        async with AsyncPipeline.open("toy", max_requests=4) as pipeline:
            async for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    As many answers are made at once as `max_requests` says; others wait for their places. A task that is cancelled, or
    a stream that is closed, gives its answer up: no stage computes for it any more. What cannot be asked raises
    ValueError; once a rank is lost, all that is asked and was asked ends with PeerLost.
    """

    def __init__(self, opened: Callable[[], Pipeline]) -> None:
        self._opened = opened
        self._turning = Turning()
        self._turning.ended = RuntimeError("the pipeline is not open: ask inside its async with")
        self._ready: Future[None] = Future()
        self._over: Future[None] = Future()

    @staticmethod
    def open(preset: str = "toy", **options: Any) -> AsyncPipeline:
        """A pipeline that `async with` opens, and closes; the options are those of `Pipeline.open`, which may raise."""
        return AsyncPipeline(partial(Pipeline.open, preset, **options))

    async def __aenter__(self) -> AsyncPipeline:
        guarded("pipeline", self._work, self._failed)
        try:
            await asyncio.shield(asyncio.wrap_future(self._ready))
        except BaseException:
            self._turning.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        self._turning.stop()
        await asyncio.shield(asyncio.wrap_future(self._over))

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

    async def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """The assistant's whole answer to messages, as `Pipeline.chat` gives it."""
        check_messages(messages)
        return await self.generate(messages, **options)

    async def _events(self, prompt: Prompt, options: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of a job, up to its end, which is a generation."""
        reports = Reports(self._turning, [Asked(prompt, options)])
        try:
            event: Any = None
            while not isinstance(event, Generation):
                _, event = await reports.next()
                yield event
        finally:
            reports.close()

    # --- the pipeline's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._opened() as pipeline:
            self._turning.ended = None
            self._ready.set_result(None)
            try:
                self._turning.work(pipeline)
            except PeerLost as error:
                self._refuse(error)  # before the pipeline is closed, which may last
                raise
        self._end(RuntimeError("the pipeline is closed: ask inside its async with"))

    def _failed(self, thread: str, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        self._end(error)

    def _refuse(self, why: BaseException) -> None:
        self._turning.ended = why
        self._turning.drop(why)

    def _end(self, why: BaseException) -> None:
        self._refuse(why)
        self._over.set_result(None)
