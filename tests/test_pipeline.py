"""A person's own program opens a pipeline, asks it and closes it; its torch and signals stay as they were."""
import gc
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster import processes
from config.methods import METHODS
from launch.pipeline import Pipeline
from model.sample import Sampler
from pipeline.answers import Request
from tests.checkpoints import refused
from tests.saved import PROMPT as LONG_PROMPT
from tests.saved import options_of, split_shared, wait_until
from tp.group import ThreadGroup

PROMPT, NEW = LONG_PROMPT[:7], 12


@pytest.fixture(scope="module")
def options(saved):
    return options_of(saved)


@pytest.fixture
def pipeline(request, options):
    with Pipeline.open(**options, link=getattr(request, "param", "threads")) as opened:
        yield opened


@pytest.mark.parametrize("pipeline", ["threads", "sockets"], indirect=True)
def test_an_answer_can_be_taken_whole_or_piece_by_piece_and_given_up(pipeline):
    whole = pipeline.generate("the first question")
    assert len(whole.answer.token_ids) == NEW and whole.answer.finish_reason == "length"
    stream = pipeline.stream("the first question")
    pieces = list(stream)
    assert "".join(pieces) == stream.text == whole.text
    given_up = pipeline.stream("the first question")
    next(iter(given_up))
    given_up.close()
    assert pipeline.generate("the first question").text == whole.text


def test_each_request_has_its_own_options(pipeline):
    assert len(pipeline.generate(PROMPT, max_new_tokens=3).answer.token_ids) == 3
    first, second = (pipeline.generate(PROMPT, temperature=1.0, seed=seed).answer.token_ids
                     for seed in (1, 2))
    assert first != second and first == pipeline.generate(PROMPT, temperature=1.0, seed=1).answer.token_ids
    for key, value, message in (("top_p", 2.0, "top_p=2"), ("temprature", 1, "unknown key temprature: did you mean"),
                                ("pipeline_type", "ar", "give it to Pipeline.open"),
                                ("seed", "x", "seed=x is not a whole number"), ("logprobs", -1, "logprobs=-1 is not"),
                                ("stop", 5, "stop is of type int: give a text")):
        with refused(message):
            pipeline.generate(PROMPT, **{key: value})
    with refused("the prompt is of type NoneType: give a text, messages or token ids"):
        pipeline.generate(None)
    pieces = pipeline.stream(PROMPT, max_new_tokens=3)

    assert next(pieces) + "".join(pieces) == pieces.text


def test_a_pipeline_shows_what_it_is(pipeline, options):
    facts = f"model={options['model_dir']!r}, split='0+2+2', pipeline_type='continuous', draft='eagle'"
    assert repr(pipeline) == f"Pipeline({facts})"
    pipeline.close()
    assert repr(pipeline) == f"Pipeline({facts}, closed)"


def test_a_stop_text_ends_an_answer_and_is_not_shown(pipeline):
    text = pipeline.generate("tell").text
    stop = text[len(text) // 2:][:3]
    stopped = pipeline.generate("tell", stop=stop)
    assert stopped.answer.finish_reason == "stop"
    assert stopped.text == text[:text.index(stop)]


@pytest.mark.parametrize("link", ["threads", "sockets"])
def test_the_program_around_it_keeps_its_settings(options, link):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment, threads, gradients = dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled()
    with Pipeline.open(**options, link=link) as pipeline:
        pipeline.generate(PROMPT)
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == (gradients, threads)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert dict(os.environ) == environment and not torch.distributed.is_initialized()


def test_what_cannot_work_is_reported_before_a_start(options):
    with refused("unknown key temprature: did you mean temperature"):
        Pipeline.open(**options, temprature=1)
    with refused("is split as 0+2+2, not as stages=3"):
        Pipeline.open(**options, stages=3)


def in_time(work):
    """Do this work in a thread; an endless wait becomes an error."""
    failures = []

    def guarded_work():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded_work, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "it waits without end"
    if failures:
        raise failures[0]


CLOSED = [{"pipeline_type": "streaming"}, {"pipeline_type": "dsi"}, {"pipeline_type": "tp", "tp": 2}]


@pytest.mark.parametrize("start", CLOSED, ids=str)
def test_an_answer_that_is_read_or_closed_after_the_pipeline_ends_at_once(pipeline_of, start):
    def leave_in_the_middle():
        answers = []
        with pytest.raises(ZeroDivisionError), pipeline_of({**start, "link": "threads"}) as pipeline:
            answers += [pipeline.stream(PROMPT), pipeline.submit(PROMPT), pipeline.submit(PROMPT)]
            answers += [pipeline.submit(PROMPT), pipeline.stream(PROMPT)]
            next(answers[0])
            next(answers[1])
            raise ZeroDivisionError
        for answer in answers[:-1]:
            with pytest.raises((RuntimeError, StopIteration)):
                while True:
                    next(answer)
        answers[-1].close()

    in_time(leave_in_the_middle)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=repr)
@pytest.mark.parametrize("name", ["tp", "galaxy"])
def test_an_error_in_the_middle_of_a_shared_layer_ends_the_members(pipeline_of, monkeypatch, name, error):
    operation = "all_reduce" if name == "tp" else "recv"
    whole, calls = getattr(ThreadGroup, operation), []

    def fails_once(group, x):
        calls.append(group.member)
        if len(calls) > 20 and group.member == 0 and error not in calls:
            calls.append(error)
            raise error
        return whole(group, x)

    def close_after_the_error():
        before = threading.active_count()
        start = {"pipeline_type": name, "tp": 2, "link": "threads"}
        with pytest.raises(type(error)), pipeline_of(start) as pipeline:
            monkeypatch.setattr(ThreadGroup, operation, fails_once)
            pipeline.generate(PROMPT)
        assert error in calls and wait_until(lambda: threading.active_count() <= before, 60)

    in_time(close_after_the_error)


def worker_of(rank):
    """The process that is this rank of the pipeline of this program."""
    server, = processes.started
    return server.pids[rank]


SEVERAL = [("the first question", {"temperature": 0.0}), ("another", {"temperature": 1.0, "seed": 4}),
           (PROMPT, {"max_new_tokens": 3}), ("tell", {"stop": "e"}),
           ("the first", {"seed": 7, "temperature": 0.7})]
STARTS = [{"link": "sockets"}, {"link": "threads", "pipeline_type": "streaming"}, {"link": "threads", "tp": 2},
          {"link": "threads", "pipeline_type": "dsi"}]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_several_requests_at_once_have_their_own_options_and_texts(pipeline_of, start):
    with pipeline_of(start) as pipeline:
        alone = [pipeline.generate(prompt, **own) for prompt, own in SEVERAL]
        begun = [pipeline.submit(prompt, **own) for prompt, own in SEVERAL]
        given_up = pipeline.submit("the first question", max_new_tokens=200, priority=3.0)
        with refused("priority=0 is not above 0"):
            pipeline.submit("the first question", priority=0)
        texts = ["".join(generation) for generation in begun]
        given_up.close()
        assert texts == [whole.text for whole in alone]
        assert [one.answer.finish_reason for one in begun] == [whole.answer.finish_reason for whole in alone]
        assert pipeline.generate(PROMPT).answer.new_tokens == NEW
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipeline.generate(PROMPT)
    pipeline.close()  # once more


@pytest.fixture
def pipeline_of(options, tmp_path):
    """Opens a pipeline for three requests at once; the split is made again where ranks share layers."""
    def opened(start):
        given = {**options, **start, "max_requests": 3}
        if "tp" in start:
            saved = Path(options["model_dir"]).parent
            stages = "" if "pipeline_type" in start else "0+2+2"
            given["model_dir"] = str(split_shared(saved, tmp_path / "shared", stages))
        return Pipeline.open(**given)
    return opened


def test_an_answer_leaves_nothing_to_the_garbage_collector(options):
    """Else what it held stays until many more have been answered, and a server seems to grow."""
    methods = [name for name, method in METHODS.items() if method.target == "ring" and method.draft != "ssm"]
    with Pipeline.open(**options, link="threads") as opened:
        decoders = [opened.decoder_for(replace(opened.config, pipeline_type=method)) for method in methods]
        try:
            for flags in (0, gc.DEBUG_SAVEALL):  # what only the first answer needs is no matter
                gc.collect()
                gc.set_debug(flags)
                answers = [decoder.complete(Request(PROMPT, Sampler(), NEW)) for decoder in decoders]
                assert len({tuple(answer.token_ids) for answer in answers}) == 1
            del answers
            gc.collect()
            left = {type(thing).__qualname__ for thing in gc.garbage if type(thing).__module__.startswith("pipeline")}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    assert left == set()
