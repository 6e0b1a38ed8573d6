"""The engine: places, patience, cancelling, and a pipeline that comes back when a rank is lost."""
from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from config.failure import PeerLost
from launch.pipeline import Pipeline
from model.grammar import Guide
from model.text import Text
from pipeline.stage import Stage
from serve.engine import AnswerJob, Ended, Engine, ServerLimits
from serve.protocol import Chat, Choice, Completion, Refused, ToTokenize, read_body
from serve.text_chunks import Piece, checked_prompt_ids, prompt_ids
from tests.checkpoints import refused
from tests.saved import options_of, wait_until
from tests.serving import live, refusal, user_says
from tests.test_pipeline import PROMPT, worker_of

LONG = {"max_new_tokens": 1000}
ONE_AT_ONCE = ServerLimits(1, 4, 60)


@pytest.fixture(scope="module")
def words(saved):
    return options_of(saved, link="threads")


class Heard:
    """A job, and what has reached it so far."""

    def __init__(self, prompt=PROMPT, **options):
        self.events = queue.SimpleQueue()
        self.job = AnswerJob(Choice(prompt, "none", options), self.events.put)

    def next(self):
        return self.events.get(timeout=600)

    def all(self):
        """Everything up to the end."""
        heard = [self.next()]
        while isinstance(heard[-1], Piece):
            heard.append(self.next())
        return heard

    def end(self):
        return self.all()[-1]

    @property
    def text(self):
        return "".join(piece.text for piece in self.all()[:-1])


@contextmanager
def refused_with(status, sentence):
    with pytest.raises(Refused, match=sentence) as error:
        yield error
    assert error.value.status == status


@contextmanager
def running(opened, limits):
    engine = Engine(opened, limits)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        assert wait_until(lambda: engine.health.status != "loading", 120)
        yield engine
    finally:
        engine.stop()
        thread.join()


@pytest.fixture(scope="module")
def engine(words):
    limits = ServerLimits(max_running=2, max_waiting=3, max_wait_seconds=60)
    with running(lambda: Pipeline.open(**words, max_requests=2), limits) as started:
        yield started


def asked(engine, *message):
    engine.submit([one.job for one in message])
    return message


def test_more_than_there_are_places_for_are_answered_one_after_the_other_as_alone(engine):
    prompts = [PROMPT[:length] for length in range(3, 8)]
    alone = [asked(engine, Heard(prompt))[0].text for prompt in prompts]
    assert [one.text for one in asked(engine, *map(Heard, prompts))] == alone


def test_who_comes_beyond_the_queue_is_refused_and_a_place_given_up_is_free_at_once(engine):
    held = asked(engine, *(Heard(**LONG) for _ in range(5)))
    assert isinstance(held[0].next(), Piece)
    with refused_with(429, "5 answers are under way or waiting") as error:
        asked(engine, Heard())
    assert error.value.retry >= 1
    with refused_with(400, "6 answers are requested at once"):
        asked(engine, *(Heard() for _ in range(6)))
    engine.cancel([one.job for one in held])
    assert wait_until(lambda: not engine.jobs, 60)
    assert isinstance(asked(engine, Heard())[0].end(), Ended)
    assert held[0].job.generation.answer.new_tokens < LONG["max_new_tokens"]


def test_a_mistake_is_reported_to_whom_made_it_and_the_others_go_on(engine):
    wrong, long, fine = asked(engine, Heard([10**6]),
                              Heard([1] * 5000), Heard())
    assert "the model knows" in wrong.end().message
    assert long.end().code == "context_length_exceeded"
    assert isinstance(fine.end(), Ended)
    with refused("no"):
        engine.call(lambda pipeline: int("no")).result(60)


def test_an_answer_goes_on_while_a_prompt_is_read(engine, monkeypatch):
    ended, in_time = threading.Event(), []

    def slow(choice, pipeline):
        in_time.append(ended.wait(60))
        return PROMPT

    going = asked(engine, Heard(max_new_tokens=200))[0]
    assert isinstance(going.next(), Piece)
    monkeypatch.setattr("serve.engine.checked_prompt_ids", slow)
    read = asked(engine, Heard())[0]
    assert isinstance(going.end(), Ended)
    ended.set()
    assert isinstance(read.end(), Ended) and in_time == [True]


def test_a_slow_grammar_delays_neither_other_requests_nor_the_end_of_the_server(words, monkeypatch):
    release, in_time = threading.Event(), []

    def compiled(pipeline, guide):
        if guide.source == "slow":
            in_time.append(release.wait(60))

    monkeypatch.setattr(Pipeline, "grammar", compiled)
    slow, quick, plain = Heard(), Heard(), Heard()
    slow.job.choice = slow.job.choice._replace(guide=Guide("regex", "slow"))
    quick.job.choice = quick.job.choice._replace(guide=Guide("regex", "quick"))
    with running(lambda: Pipeline.open(**words, max_requests=2), ServerLimits(2, 3, 60)) as engine:
        asked(engine, slow, quick, plain)
        assert isinstance(quick.end(), Ended) and isinstance(plain.end(), Ended)
        [thread] = [thread for thread in threading.enumerate() if thread.name == "grammar"]
    assert slow.end().code == "stopped" and not in_time and thread.daemon
    release.set()
    thread.join()


class Short:
    """A pipeline of four tokens, of which the longest has three characters."""

    spec = SimpleNamespace(context=4, sizes=SimpleNamespace(vocab=8))

    def __init__(self):
        self.text, self.read = Text("toy/llama"), []
        self.text.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "abc": 1})
        self.text.spans = self._tokenized

    def _tokenized(self, texts, template, has_ends):
        self.read += texts
        return iter([([0] * (3 if len(texts[0]) == 12 else 4), [])])

    def prompt_ids(self, *inputs):
        return Pipeline.prompt_ids(self, *inputs)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_read():
    pipeline = Short()
    talk = [*user_says("x" * 6), *user_says("x" * 7)]
    for prompt, size in (("x" * 13, "13 characters"),
                         (talk, "13 characters"), ([7] * 4, "4 tokens")):
        with pytest.raises(Refused, match=f"the prompt has {size}, and this model's maximum context length is 4") as no:
            checked_prompt_ids(Choice(prompt, "none", {}, "field"), pipeline)
        assert (no.value.code, no.value.param, no.value.status) == ("context_length_exceeded", "field", 400)
    assert pipeline.read == []
    assert checked_prompt_ids(Choice("x" * 12, "none", {}), pipeline) == [0] * 3
    with pytest.raises(Refused, match="has 4 tokens"):
        checked_prompt_ids(Choice(talk[:1], "none", {}), pipeline)

    assert prompt_ids(Choice([7] * 4, "none", {}), pipeline) == [7] * 4  # as /tokenize counts what does not fit


@pytest.mark.parametrize("kind, given", [
    (Completion, {"prompt": ["a"] * 999 + [5]}),
    (Chat, {"messages": user_says([5] * 999)}),
    (ToTokenize, {"messages": [5] * 999})])
def test_of_a_list_with_many_mistakes_the_first_is_noted_alone(kind, given):
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate(given)
    assert wrong.value.error_count() <= 4  # one for each type that a field may have


def test_no_garbage_is_looked_for_while_a_body_is_read():
    collects = []
    read_body(b'{"messages": []}', Chat, lambda given: collects.append(gc.isenabled()) or given)
    with pytest.raises(Refused):
        read_body(b"[", Chat)
    assert collects == [False] and gc.isenabled()


def test_nobody_waits_longer_than_the_server_allows(words):
    with running(lambda: Pipeline.open(**words), ONE_AT_ONCE._replace(max_wait_seconds=0.2)) as engine:
        first, second = asked(engine, Heard(**LONG), Heard())
        refused = second.end()
        assert (refused.status, refused.code) == (429, "waited_too_long")
        engine.cancel([first.job])


class Breaking:
    """A pipeline that is lost in its midst, as long as `losses` are left."""

    losses: list[str] = []

    def __init__(self, pipeline):
        self._pipeline = pipeline

    def __getattr__(self, name):
        return getattr(self._pipeline, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pipeline.close()

    def turn(self):
        if self.losses and self._pipeline.decoder.running[0].unread is not None:
            raise PeerLost(self.losses.pop())
        self._pipeline.turn()


def breaking(words):
    return lambda: Breaking(Pipeline.open(**words))


def test_after_a_loss_who_was_under_way_learns_of_it_and_who_waited_is_answered(words, monkeypatch):
    closed = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")  # as a pipe that nobody reads any more
    monkeypatch.setattr("sys.stderr", closed)
    with running(breaking(words), ONE_AT_ONCE) as engine:
        alone = asked(engine, Heard())[0].text
        Breaking.losses = ["rank 2 was lost"]
        under_way, *waiting = asked(engine, Heard(), Heard(), Heard())
        lost = under_way.end()
        assert (lost.status, lost.code) == (503, "rank_lost") and "rank 2 was lost" in lost.message
        assert [one.text for one in waiting] == [alone, alone]
        assert engine.metrics.num_restarts._value.get() == 1 and engine.health.status == "ready"


def test_without_a_restart_the_health_names_the_rank_and_nothing_more_is_taken(words):
    with running(breaking(words), ONE_AT_ONCE._replace(restart=False)) as engine:
        Breaking.losses = ["rank 2 was lost"]
        ends = [one.end() for one in asked(engine, Heard(), Heard())]
        assert [(end.code, end.retry) for end in ends] == [("rank_lost", 0)] * 2
        assert ends[0].message == "the answer is lost: rank 2 was lost"
        assert wait_until(lambda: engine.health == ("lost", "rank 2 was lost"), 60)
        with refused_with(503, "rank 2 was lost"):
            asked(engine, Heard())


def test_a_question_to_a_pipeline_that_is_lost_is_refused_at_once(words):
    later = []

    def lose(pipeline):
        later.append(engine.call(lambda held: "never asked"))
        raise PeerLost("rank 2 was lost")

    with running(breaking(words), ONE_AT_ONCE._replace(restart=False)) as engine:
        with pytest.raises(PeerLost):
            engine.call(lose).result(60)
        with refused_with(503, "rank 2 was lost"):
            later[0].result(60)
        with pytest.raises(Refused, match="rank 2 was lost"):
            engine.call(lambda held: "never asked")


def test_a_pipeline_that_cannot_be_opened_is_an_error_at_first_and_tried_again_later(words, monkeypatch, capsys):
    monkeypatch.setattr("serve.engine.PAUSE_SECONDS", 0.0)
    left = [ValueError("there is not enough memory"), None, ValueError("still not"), None]

    def opened():
        error = left.pop()
        if error:
            raise error
        return Breaking(Pipeline.open(**words))

    with running(opened, ONE_AT_ONCE) as engine:
        Breaking.losses = ["rank 1 was lost"]
        under_way, waiting = asked(engine, Heard(), Heard())
        assert under_way.end().code == "rank_lost"
        assert isinstance(waiting.end(), Ended) and len(left) == 1
        assert engine.error is None

    def wrong():
        raise ValueError("there is no model")

    with running(wrong, ONE_AT_ONCE) as engine:
        assert engine.health == ("lost", "there is no model") and isinstance(engine.error, ValueError)
    assert "there is no model" not in capsys.readouterr().err  # who started the engine says it


def test_a_rank_that_is_killed_is_named_and_the_server_answers_again(words):
    keys = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in words.items()
            if key not in ("threads_per_rank", "link")]
    with live(*keys, "max_requests=1", "recover=false") as server:
        before = server.chat("hello", max_tokens=8).json()["choices"]
        got = {}

        def ask(name, tokens):
            got[name] = server.chat("hello", max_tokens=tokens)

        threads = [threading.Thread(target=ask, args=asked)
                   for asked in (("under way", 1500), ("waiting", 8))]
        for number, thread in enumerate(threads, 1):
            thread.start()
            assert wait_until(lambda number=number: len(server.engine.jobs) == number, 30)
        os.kill(worker_of(2), signal.SIGKILL)
        for thread in threads:
            thread.join()
        lost = got["under way"]
        assert refusal(lost) == (503, "rank_lost") and "rank 2 was lost" in refusal(lost, "message")[1]
        assert got["waiting"].json()["choices"] == before
        assert server.client.get("/health").status_code == 200
        held, opened = held_here(), server.engine.call(weakref.ref).result(60)
        os.kill(worker_of(1), signal.SIGKILL)  # while there is nothing to do
        assert wait_until(lambda: server.engine.metrics.num_restarts._value.get() == 2, 60)
        assert wait_until(lambda: server.client.get("/health").status_code == 200, 60)
        assert server.chat("hello", max_tokens=8).json()["choices"] == before
        # the error that ended it may hold its frames until they are collected
        assert wait_until(lambda: gc.collect() >= 0 and opened() is None, 30), "the lost pipeline is still there"
        no_more = wait_until(lambda: all(now <= then for now, then in zip(held_here(), held)), 30)
        assert no_more, f"{held} became {held_here()}"


def held_here():
    """The threads and the open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_who_waits_for_a_pipeline_that_does_not_come_back_waits_no_longer_than_promised(words):
    again, never = threading.Event(), threading.Event()
    opened = iter([breaking(words),
                   lambda: again.wait() and breaking(words)(), never.wait])
    limits = ServerLimits(1, 4, max_wait_seconds=60)
    with running(lambda: next(opened)(), limits) as engine:
        Breaking.losses = ["rank 2 was lost"]
        under_way, late = asked(engine, Heard(), Heard())
        assert under_way.end().code == "rank_lost"
        assert engine.health == ("restarting", "rank 2 was lost")
        engine.limits = limits._replace(max_wait_seconds=0)  # the promised time is over for those who wait now
        assert late.end().code == "waited_too_long"
        engine.limits = limits
        again.set()
        assert isinstance(asked(engine, Heard())[0].end(), Ended)
        Breaking.losses = ["rank 1 was lost"]
        under_way, waiting = asked(engine, Heard(), Heard())
        assert under_way.end().code == "rank_lost"
        engine.stop()
        assert waiting.end().code == "stopped"
        with pytest.raises(Refused, match="being stopped"):
            asked(engine, Heard())
        never.set()


def test_a_ring_that_stands_still_while_all_ranks_live_makes_the_health_silent(words):
    going = threading.Event()
    going.set()
    apply = Stage.apply

    def slow(self, *given):
        going.wait()
        return apply(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "apply", slow)
        with running(lambda: Pipeline.open(**words, timeout=1),
                     ONE_AT_ONCE) as engine:
            for requests in range(2):  # at rest, and with a request under way
                found = asked(engine, *(Heard(**LONG) for _ in range(requests)))
                assert all(isinstance(one.next(), Piece) for one in found)
                going.clear()
                assert wait_until(lambda: engine.health.status == "silent", 60)
                assert engine.health.reason.startswith("the ring has not answered for ")
                going.set()
                assert wait_until(lambda: engine.health.status == "ready", 60)
                engine.cancel([one.job for one in found])
