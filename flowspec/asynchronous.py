"""`AsyncPipeline` for a user's program: `Pipeline` with methods for tasks of asyncio.

asyncio is imported when it is needed: it would double the time of the command's `--help`.
"""
from __future__ import annotations

import weakref
from contextlib import aclosing, closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, AsyncGenerator, Callable, Mapping, Sequence

from flowspec.engine_process import EngineProcess
from flowspec.pipeline import Generation, MessageDict, Prompt, is_one_prompt


class AsyncPipeline:
    """`Pipeline` for asyncio, with the same methods.

        async with AsyncPipeline.open("smollm2", max_requests=4) as pipeline:
            async for piece in pipeline.stream("What does a baker do?"):
                print(piece, end="", flush=True)

    Up to `max_requests` answers are generated at once; further requests wait. Cancelling a task or closing a stream
    cancels its answer: no stage computes for it any more. An invalid request raises ValueError. Once a rank is lost for
    good, all pending and later requests raise PeerLost.
    """

    def __init__(self, preset: str, pipeline_options: Mapping[str, Any]) -> None:
        self._preset, self._pipeline_options = preset, pipeline_options
        self.engine: EngineProcess | None = None  # from its start on

    @staticmethod
    def open(preset: str = "", **options: Any) -> AsyncPipeline:
        """Return a pipeline that `async with` opens and closes; options and errors are those of `Pipeline.open`."""
        return AsyncPipeline(preset, options)

    async def __aenter__(self) -> AsyncPipeline:
        self.engine = engine = EngineProcess()
        weakref.finalize(self, engine.hang_up)
        open_engine = partial(engine.call, "open", self._preset, self._pipeline_options)
        try:
            await _in_thread(open_engine)
        except BaseException:
            engine.hang_up()
            raise
        return self

    async def __aexit__(self, error_class: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        assert self.engine is not None, "it was not opened"
        await _in_thread(self.engine.close)

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """Yield the pieces of an answer as they settle; options as for `Pipeline.generate`."""
        async with aclosing(self._running_answer(prompt, options, False)) as running_answer:
            async for generation in running_answer:
                for piece in generation.ready_pieces():
                    yield piece

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Return the complete answer to a text or to token ids; several at once are for `asyncio.gather`."""
        if not is_one_prompt(prompt):
            raise ValueError("generate of an AsyncPipeline takes one prompt: await those of a list with asyncio.gather")
        return await self._completed(prompt, options, False)

    async def chat(self, messages: Sequence[MessageDict], **options: Any) -> Generation:
        """Return the assistant's complete answer to messages, as `Pipeline.chat` does."""
        return await self._completed(messages, options, True)

    async def _completed(self, *request: Any) -> Generation:
        async with aclosing(self._running_answer(*request)) as running_answer:
            async for generation in running_answer:
                for _ in generation.ready_pieces():
                    pass
        return generation

    async def _running_answer(self, *request: Any) -> AsyncGenerator[Generation, None]:
        """Yield a generation whenever it has further pieces, and at its end; closing this cancels it."""
        if self.engine is None:
            raise RuntimeError("the pipeline is not open: send requests inside its async with")
        import asyncio

        event_loop, has_news = asyncio.get_running_loop(), asyncio.Event()

        def notify_task() -> None:
            with suppress(RuntimeError):  # the event loop is closed, so nobody reads
                event_loop.call_soon_threadsafe(has_news.set)

        with closing(Generation(self, request, notify_task)) as generation:
            while not generation.is_over:
                await has_news.wait()
                has_news.clear()
                yield generation


async def _in_thread(slow_function: Callable[[], object]) -> None:
    """Call a function in another thread, and return once it has returned; it goes on if the task is cancelled."""
    import asyncio

    await asyncio.get_running_loop().run_in_executor(None, slow_function)
