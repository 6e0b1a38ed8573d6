"""RequestLoop: jobs of other threads run at once, are cancelled, and hear of losses; chats are those of Pipeline."""
import threading
from queue import SimpleQueue

import pytest

from config.failure import PeerLost
from launch.pipeline import Generation, Pipeline
from launch.request_loop import Job, RequestLoop
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


@pytest.fixture
def request_loop(options):
    """One whose pipeline is driven by a thread."""
    loop = RequestLoop()

    def work():
        with Pipeline.open(**options) as pipeline:
            try:
                loop.work(pipeline)
            except PeerLost as error:
                loop.drop(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield loop
    loop.stop()
    thread.join()


def submitted(loop, prompt, options):
    """A job of the loop; `events` are those that it has reported."""
    job = Job(prompt, options)
    job.received = SimpleQueue()
    job.report = job.received.put
    loop.submit([job])
    return job


def ending(job):
    """The last event of a job; raises its error."""
    event = ""
    while isinstance(event, str):
        event = job.received.get()
    if isinstance(event, Exception):
        raise event
    return event


def running_requests(loop):
    return loop.call(lambda pipeline: list(pipeline.decoder.running)).result()


def test_jobs_at_once_get_the_texts_that_each_gets_alone(request_loop, alone):
    jobs = [submitted(request_loop, prompt, own) for prompt, own in ASKED * 2]
    assert [ending(job).text for job in jobs] == alone * 2


def test_who_is_cancelled_gives_its_answer_up(request_loop, alone):
    jobs = [submitted(request_loop, PROMPT, LONG) for _ in range(3)]  # the last one waits
    assert isinstance(jobs[0].received.get(), str)
    request_loop.cancel(jobs)
    assert ending(submitted(request_loop, *ASKED[0])).text == alone[0]
    assert (running_requests(request_loop), request_loop.jobs) == ([], set())


def test_an_answer_whose_events_fail_is_given_up(request_loop, monkeypatch):
    generations = []

    def fail(job, tokens):
        generations.append(job.generation)  # else it would end as soon as nobody holds it
        raise ZeroDivisionError

    monkeypatch.setattr("launch.request_loop.Job.events", fail)
    with pytest.raises(ZeroDivisionError):
        ending(submitted(request_loop, PROMPT, LONG))
    assert running_requests(request_loop) == []


def test_an_invalid_request_ends_with_its_error_and_the_others_go_on(request_loop, alone):
    wrong = [([10**6], {}), (PROMPT, {"temperature": -1}), (PROMPT, {"temprature": 1})]
    jobs = [submitted(request_loop, prompt, own) for prompt, own in wrong]
    good_job = submitted(request_loop, *ASKED[0])
    for job in jobs:
        with pytest.raises(ValueError):
            ending(job)
    assert isinstance(ending(good_job), Generation) and good_job.generation.text == alone[0]


def test_a_loss_ends_all_that_was_asked_and_all_that_is_asked_later(request_loop):
    jobs = [submitted(request_loop, PROMPT, LONG) for _ in range(3)]
    assert isinstance(jobs[0].received.get(), str)
    request_loop.call(lambda pipeline: pipeline.ring.link.fail(PeerLost("rank 2 was lost")))
    for job in jobs:
        with pytest.raises(PeerLost, match="rank 2 was lost"):
            ending(job)
    with pytest.raises(PeerLost, match="rank 2 was lost"):
        submitted(request_loop, PROMPT, LONG)
