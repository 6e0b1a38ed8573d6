"""AsyncPipeline: tasks of one event loop ask at once, are cancelled, hear of losses; chats are those of Pipeline."""
import asyncio
import threading

import pytest

from config.failure import PeerLost
from launch.asynchronous import AsyncPipeline
from launch.pipeline import Pipeline
from tests.checkpoints import refused
from tests.saved import options_of
from tests.test_pipeline import PROMPT

LONG = {"max_new_tokens": 1000}
TALK = [{"role": "system", "content": "be brief."}, {"role": "user", "content": "who are you?"},
        {"role": "assistant", "content": "a fox."}, {"role": "user", "content": "why?"}]
ASKED = [("the first question", {}),
         (PROMPT, {"temperature": 1.0, "seed": 4}), (TALK, {"template": "vicuna"})]


@pytest.fixture(scope="module")
def options(saved):
    return options_of(saved, link="threads", max_requests=2)


@pytest.fixture(scope="module")
def alone(options):
    """What `Pipeline` writes, and the token ids of the chat."""
    with Pipeline.open(**options) as pipeline:
        texts = ["".join(pipeline.stream(prompt, **own)) for prompt, own in ASKED]
        assert pipeline.chat(TALK, template="vicuna").text == texts[2]
        assert pipeline.chat(TALK[1:2], template="none").text == pipeline.generate("who are you?").text
        for messages, sentence in (([], "are empty"), ([{"role": "fox", "content": "x"}], "has the role 'fox'"),
                                   (TALK[:3], "nothing to answer"), (["hello"], "message 0 has no text"),
                                   ([*TALK, {"role": "user"}], "message 4 has no text")):
            with refused(sentence):
                pipeline.chat(messages)
        return texts


def with_pipeline(options, ask):
    """What a coroutine returns that has an open pipeline."""
    async def run():
        async with AsyncPipeline.open(**options) as pipeline:
            return await ask(pipeline)

    return asyncio.run(run())


async def running_requests(pipeline):
    return await asyncio.wrap_future(pipeline._request_loop.call(lambda held: list(held.decoder.running)))


async def read(pipeline, prompt, own):
    return "".join([piece async for piece in pipeline.stream(prompt, **own)])


def test_tasks_that_ask_at_once_get_the_texts_that_each_gets_alone(options, alone):
    async def ask(pipeline):
        streamed = asyncio.gather(*(read(pipeline, prompt, own) for prompt, own in ASKED))
        whole = await asyncio.gather(*(pipeline.generate(prompt, **own) for prompt, own in ASKED[:2]))
        chat = await pipeline.chat(TALK, template="vicuna")
        return await streamed, [one.text for one in whole], chat.text

    assert with_pipeline(options, ask) == (alone, alone[:2], alone[2])


def test_who_is_cancelled_or_leaves_gives_its_answer_up(options, alone):
    async def ask(pipeline):
        task = asyncio.ensure_future(pipeline.generate(PROMPT, **LONG))
        stream = pipeline.stream(PROMPT, **LONG)
        await stream.__anext__()
        await stream.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pipeline.generate(*ASKED[0][:1])).text == alone[0]
        return await running_requests(pipeline), pipeline._request_loop.jobs

    assert with_pipeline(options, ask) == ([], set())


def test_an_answer_whose_events_fail_is_given_up(options, monkeypatch):
    generations = []

    def fail(job, tokens):
        generations.append(job.generation)  # else it would end as soon as nobody holds it
        raise ZeroDivisionError

    monkeypatch.setattr("launch.asynchronous.Job.events", fail)

    async def ask(pipeline):
        with pytest.raises(ZeroDivisionError):
            await pipeline.generate(PROMPT, **LONG)
        return await running_requests(pipeline)

    assert with_pipeline(options, ask) == []


def test_what_cannot_be_asked_is_reported_to_whom_asked_and_the_others_go_on(options, alone):
    async def ask():
        async with AsyncPipeline.open(**options) as pipeline:
            wrong = [pipeline.generate([10**6]), pipeline.generate(["a", "b"]),
                     pipeline.generate(PROMPT, temperature=-1), pipeline.chat([]),
                     pipeline.generate(PROMPT, temprature=1)]
            found = await asyncio.gather(*wrong, pipeline.generate(ASKED[0][0]), return_exceptions=True)
            assert [type(one) for one in found[:-1]] == [ValueError] * 5
            assert found[-1].text == alone[0]
        with pytest.raises(RuntimeError, match="the pipeline is closed"):
            await pipeline.generate(PROMPT)
        with pytest.raises(RuntimeError, match="the pipeline is not open"):
            await AsyncPipeline.open(**options).generate(PROMPT)

    asyncio.run(ask())
    with refused("did you mean temperature"):
        asyncio.run(AsyncPipeline.open(**options, temprature=1).__aenter__())


def test_a_loss_ends_all_that_was_asked_and_all_that_is_asked_later(options, monkeypatch):
    heard, before, close = threading.Event(), [], Pipeline.close

    def closed(pipeline):
        before.append(heard.wait(60))
        close(pipeline)

    monkeypatch.setattr(Pipeline, "close", closed)

    async def ask(pipeline):
        stream = pipeline.stream(PROMPT, **LONG)
        waiting = [asyncio.ensure_future(pipeline.generate(PROMPT, **LONG)) for _ in range(3)]
        await stream.__anext__()
        pipeline._request_loop.call(lambda held: held.ring.link.fail(PeerLost("rank 2 was lost")))
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(error) for error in errors] == ["rank 2 was lost"] * 3
        heard.set()
        with pytest.raises(PeerLost, match="rank 2 was lost"):
            assert [piece async for piece in stream] == []
        with pytest.raises(PeerLost, match="rank 2 was lost"):
            await pipeline.generate(PROMPT)

    with_pipeline(options, ask)
    assert before == [True], "a loss is found before the pipeline is closed, which may last"
