"""The package `flowspec`: a pipeline in a process of its own, beside a program's own packages, and its command."""
import asyncio
import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

import flowspec
from config.failure import PeerLost
from config.presets import ROOT
from flowspec import __main__ as command
from flowspec import engine_process, programs
from launch.piped import event_of, state_of
from launch.pipeline import Generation as NearGeneration
from launch.pipeline import Pipeline as NearPipeline
from launch.screen import scene_of
from model.grammar import Guide as NearGuide
from model.text import LongText, TokenTexts
from tests.checkpoints import refused
from tests.saved import options_of, wait_until
from tests.sources import project_text, tracked
from tests.test_pipeline import PROMPT
from tests.test_request_loop import ASKED, LONG, TALK

pytestmark = pytest.mark.usefixtures("engines_are_forked")
DIFFERING = {(NearPipeline, "open"), (NearPipeline, "generate"), (NearPipeline, "stream"), (NearPipeline, "submit"),
             (NearGeneration, "answer")}
OWN_PACKAGES = ("config", "model", "eval", "launch", "cluster", "scripts")
PROGRAM = """
import config, json, sys
from flowspec import Pipeline, engine_process
environment = engine_process.environment()
del environment["PYTHONSAFEPATH"]  # as Python 3.10 ignores it
engine_process.environment = lambda: environment
path_before = list(sys.path)
with Pipeline.open(**json.loads(sys.argv[1])) as pipeline:  # several ranks, without `if __name__`
    text = pipeline.generate("the first question").text
import model, eval
own_names = [module.__name__ for module in (config, model, eval) if module.__file__.startswith(sys.argv[2])]
ours = {name.partition(".")[0] for name in sys.modules} & {"torch", "launch", "pipeline", "flowspec"}
print(json.dumps([text, own_names, sorted(ours), sys.path == path_before]))
"""


@pytest.fixture(scope="module")
def options(saved):
    return options_of(saved, link="threads", max_requests=2)


@pytest.fixture(scope="module")
def near_pipeline(options):
    with NearPipeline.open(**options) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def far_pipeline(options, engines_are_forked):
    with flowspec.Pipeline.open(**options) as pipeline:
        yield pipeline


def as_sent(value):
    return json.loads(json.dumps(value))


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    started_pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*started_pids, *(grandchild for child in started_pids for grandchild in children(child))]


def pid_of(pipeline) -> int:
    return pipeline.engine._process.pid


# --- a program of a user's own ----------------------------------------------------------------------------------------

def test_a_program_has_its_own_packages_before_and_after_and_starts_ranks_from_any_folder(
        saved, near_pipeline, tmp_path):
    folder, site = tmp_path / "own", tmp_path / "site"
    for name in OWN_PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    site.mkdir()
    (site / "flowspec").symlink_to(ROOT / "flowspec")
    (folder / "program.py").write_text(PROGRAM)

    options = json.dumps(options_of(saved, model_dir=os.path.relpath(saved / "0+2+2", folder)))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("PYTHONSAFEPATH", None)
    words = [sys.executable, "program.py", options, str(folder)]
    completed_run = subprocess.run(words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)
    near_text = near_pipeline.generate("the first question").text
    assert json.loads(completed_run.stdout) == [near_text, ["config", "model", "eval"], ["flowspec"], True]


def test_answers_are_those_of_a_pipeline_in_the_same_process(near_pipeline, far_pipeline):
    for prompt, answer_options in ASKED[:2]:
        stream = far_pipeline.stream(prompt, **answer_options)
        pieces = list(stream)
        there, here = near_pipeline.generate(prompt, **answer_options), far_pipeline.generate(prompt, **answer_options)
        assert "".join(pieces) == stream.text == here.text == there.text
        assert here.answer.token_ids == there.answer.token_ids
    assert far_pipeline.chat(TALK, template="vicuna").text == near_pipeline.chat(TALK, template="vicuna").text
    assert [answer.text for answer in far_pipeline.generate([ASKED[0][0], "b"])] == [
        near_pipeline.generate(prompt).text for prompt in (ASKED[0][0], "b")]
    assert far_pipeline.generate(PROMPT).text == far_pipeline.generate([PROMPT, PROMPT])[1].text
    scored, wanted = (pipeline.generate(PROMPT, logprobs=2).answer for pipeline in (far_pipeline, near_pipeline))
    assert scored.logprobs == as_sent(wanted.logprobs) and len(scored.logprobs[0][2]) == 2
    assert repr(far_pipeline) == repr(near_pipeline)


def test_an_answer_shows_what_it_is(far_pipeline):
    whole = far_pipeline.generate("tell", max_new_tokens=3)
    assert repr(whole) == f"Generation(text={whole.text!r}, new_tokens=3, finish_reason='length')"


def test_an_answer_that_is_running_shows_its_tree_and_figures_and_keeps_them_to_its_end(near_pipeline, far_pipeline):
    running = near_pipeline.submit("the first question", max_new_tokens=30)
    for _ in range(3):
        next(running)
    guess = running.tree.add(running.tree.tip, 5, -0.5)
    running.tree.add(guess, 7, -1.0)
    names = TokenTexts(near_pipeline.text.tokenizer)
    state = as_sent(state_of(running, lambda token: names(token).name))
    shown = flowspec.Generation.__new__(flowspec.Generation)
    shown._mailbox = engine_process.Mailbox()
    shown._mailbox.put(engine_process.RESULT, state)
    shown._shown_pieces, shown._has_text = [running.text], True
    tree, wanted = shown.tree, running.tree

    def name_of(token):
        return names(token).name

    assert scene_of(shown, name_of, 2) == scene_of(running, name_of, 2)
    assert {node: guess.text for node, guess in tree.nodes.items()} == {
        node: name_of(wanted.nodes[node].token) for node in (wanted.tip, *wanted.live)}
    assert guess in tree.live
    assert (shown.accepted_runs, shown.accepted) == (running.accepted_runs, running.accepted)
    for name in public_names(type(running.answer)) | vars(running.answer).keys():
        assert getattr(shown.answer, name) == as_sent(getattr(running.answer, name))
    running.close()

    stream = far_pipeline.stream("the first question", **LONG)
    next(stream)
    shown_tree = stream.tree
    assert shown_tree.tip == shown_tree.trunk[-1] and stream.answer.finish_reason == ""
    stream.close()
    assert list(stream) == [] and stream.ready
    count = stream.answer.new_tokens
    assert 0 < count == stream.answer.new_tokens < 1000 and stream.tree.nodes


@pytest.mark.parametrize("ask", [
    lambda pipeline: pipeline.generate("x", temprature=1), lambda pipeline: pipeline.stream("x", top_p=2.0),
    lambda pipeline: pipeline.generate("x", pipeline_type="ar"), lambda pipeline: pipeline.generate("x", stop=5),
    lambda pipeline: pipeline.generate([10**6]), lambda pipeline: pipeline.generate(None),
    lambda pipeline: pipeline.chat([]), lambda pipeline: pipeline.chat([{"role": "fox", "content": "x"}]),
    lambda pipeline: pipeline.generate("x", guide=sys.modules[type(pipeline).__module__].Guide("regex", "[")),
    lambda pipeline: pipeline.generate("x", priority=0)])
def test_what_cannot_be_asked_is_refused_as_in_the_same_process(near_pipeline, far_pipeline, ask):
    with pytest.raises(ValueError) as wanted:
        ask(near_pipeline)
    with refused(str(wanted.value)):
        ask(far_pipeline)


def test_only_plain_data_is_sent(far_pipeline):
    with refused("is of type set: give texts, numbers and lists of these"):
        far_pipeline.generate("x", stop={"y"})
    assert engine_process.encoded(Path("x")) == b'["x"]\n'


@pytest.mark.parametrize("error, error_class", [
    (PeerLost("rank 2 was lost"), flowspec.PeerLost), (LongText(7), ValueError), (RuntimeError("x"), RuntimeError),
    (FileNotFoundError("x"), OSError), (MemoryError("x"), MemoryError), (ZeroDivisionError("x"), RuntimeError)])
def test_an_error_keeps_its_type_and_its_sentence(error, error_class):
    got = engine_process.error_of(*as_sent(event_of(error)[1]))
    assert type(got) is error_class and str(error) in str(got)


def test_help_is_that_of_the_same_process():
    for there, here in ((NearPipeline, flowspec.Pipeline), (NearGeneration, flowspec.Generation),
                        (NearGuide, flowspec.Guide)):
        for name in sorted(public_names(there) & public_names(here)):
            if (there, name) not in DIFFERING:
                assert inspect.getdoc(getattr(there, name)) == inspect.getdoc(getattr(here, name)), name
    assert public_names(NearGeneration) <= public_names(flowspec.Generation)
    assert public_names(flowspec.AsyncPipeline) <= public_names(flowspec.Pipeline)


def public_names(class_type: type) -> set[str]:
    return {name for name in vars(class_type) if not name.startswith("_")}


# --- threads, losses and the end --------------------------------------------------------------------------------------

def test_threads_ask_at_once_and_what_nobody_reads_is_given_up(near_pipeline, far_pipeline):
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(far_pipeline.generate("b").text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    dropped = [far_pipeline.stream(PROMPT, **LONG) for _ in range(3)]  # more than run at once, without an end
    del dropped
    for thread in threads:
        thread.join()
    assert texts == [near_pipeline.generate("b").text] * 4


def test_ctrl_c_ends_an_answer_and_the_pipeline_goes_on(near_pipeline, far_pipeline):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in far_pipeline.stream(PROMPT, **LONG):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert far_pipeline.generate("b").text == near_pipeline.generate("b").text


def test_a_fork_can_neither_ask_nor_end_the_pipeline(near_pipeline, far_pipeline):
    pid = os.fork()
    if not pid:
        try:
            far_pipeline.generate("b")
        except RuntimeError as error:
            far_pipeline.engine.hang_up()
            os._exit("belongs to the process that opened it" in str(error))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert far_pipeline.generate("b").text == near_pipeline.generate("b").text


def test_a_killed_engine_ends_all_that_was_asked_and_all_that_is_asked_later(options):
    pipeline = flowspec.Pipeline.open(**options)
    stream = pipeline.stream(PROMPT, **LONG)
    next(stream)
    os.kill(pid_of(pipeline), signal.SIGKILL)
    for ask in (lambda: list(stream), lambda: pipeline.generate("b"), pipeline.check):
        with pytest.raises(flowspec.PeerLost, match="^rank 0 was lost: its process ended with SIGKILL$"):
            ask()
    with pytest.raises(flowspec.PeerLost):
        stream.answer  # noqa: B018
    pipeline.close()


def test_a_lost_rank_is_named_by_the_error_of_each_request(saved):
    with flowspec.Pipeline.open(**options_of(saved, recover=False)) as pipeline:
        stream = pipeline.stream(PROMPT, **LONG)
        next(stream)
        os.kill(max(children(pid_of(pipeline))), signal.SIGKILL)
        for ask in (lambda: list(stream), lambda: pipeline.generate("b"), pipeline.check):
            with pytest.raises(flowspec.PeerLost, match="^rank [12] was lost"):
                ask()


def test_a_closed_pipeline_has_ended_its_process_and_says_so(options):
    pipeline = flowspec.Pipeline.open(**options)
    stream = pipeline.stream(PROMPT, **LONG)
    pipeline.close()
    pipeline.close()
    assert pipeline.engine._process.poll() == 0 and repr(pipeline).endswith(", closed)")
    for ask in (lambda: list(stream), lambda: pipeline.generate("b")):
        with pytest.raises(RuntimeError, match="^the pipeline is closed: send requests inside its with$"):
            ask()


def test_a_pipeline_that_nobody_holds_ends_its_process(options):
    pipeline = flowspec.Pipeline.open(**options)
    process, stream = pipeline.engine._process, pipeline.stream(PROMPT)
    del pipeline
    gc.collect()
    assert len(list(stream)) > 2 and process.poll() is None
    del stream
    assert wait_until(lambda: process.poll() == 0, 20)


def test_a_mistake_ends_the_start_and_its_process(options):
    with refused("did you mean temperature"):
        flowspec.Pipeline.open(**options, temprature=1)


def test_tasks_of_one_event_loop_ask_are_cancelled_and_hear_of_losses(options, near_pipeline):
    async def read(pipeline, prompt, answer_options):
        return "".join([piece async for piece in pipeline.stream(prompt, **answer_options)])

    async def ask():
        async with flowspec.AsyncPipeline.open(**options) as pipeline:
            cancelled = asyncio.ensure_future(pipeline.generate(PROMPT, **LONG))
            stream = pipeline.stream(PROMPT, **LONG)
            await stream.__anext__()
            await stream.aclose()
            cancelled.cancel()
            streamed = await asyncio.gather(*(read(pipeline, *question) for question in ASKED))
            whole = await asyncio.gather(*(pipeline.generate(prompt, **answer_options)
                                           for prompt, answer_options in ASKED[:2]))
            chat = await pipeline.chat(TALK, template="vicuna")
            assert streamed == [*(answer.text for answer in whole), chat.text]
            near_texts = [near_pipeline.generate(prompt, **answer_options).text for prompt, answer_options in ASKED[:2]]
            assert streamed == [*near_texts, near_pipeline.chat(TALK, template="vicuna").text]

            wrong = [pipeline.generate([10**6]), pipeline.generate(["a", "b"]), pipeline.chat([]),
                     pipeline.generate(PROMPT, temprature=1)]
            assert [type(error) for error in await asyncio.gather(*wrong, return_exceptions=True)] == [ValueError] * 4
            stream = pipeline.stream(PROMPT, **LONG)
            await stream.__anext__()
            os.kill(pid_of(pipeline), signal.SIGKILL)
            with pytest.raises(flowspec.PeerLost, match="SIGKILL"):
                assert [piece async for piece in stream] == []
        with pytest.raises(RuntimeError, match="the pipeline is not open"):
            await flowspec.AsyncPipeline.open(**options).generate(PROMPT)
        with refused("did you mean temperature"):
            await flowspec.AsyncPipeline.open(**options, temprature=1).__aenter__()

    asyncio.run(ask())


# --- the command, and what is installed -------------------------------------------------------------------------------

@pytest.fixture
def started(monkeypatch):
    """What the command becomes: the words and the environment of its program."""
    def start(*words):
        program_start = []
        monkeypatch.setattr(sys, "argv", ["flowspec", *words])
        monkeypatch.setattr(os, "execvpe", lambda file, words, environment: program_start.extend([words, environment]))
        with suppress(SystemExit):
            command.main()
        return program_start

    return start


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_a_command_starts_its_program_with_the_words_that_follow(started, name):
    words, environment = started(name, "toy", "seed=1")
    assert words[-2:] == ["toy", "seed=1"] and environment["FLOWSPEC_COMMAND"] == f"flowspec {name}"
    module = command.PROGRAMS[name].words[0]
    if module.endswith(".sh"):
        assert words[:2] == ["bash", str(ROOT / module)] and environment["PYTHON"] == sys.executable
    else:
        assert words[1:4] == ["-c", programs.START, module] and find_spec(module)


def test_help_of_a_program_names_the_command_that_was_typed(started):
    words, environment = started("run", "--help")
    completed_run = subprocess.run(words, env=environment, text=True, stdout=subprocess.PIPE)
    assert completed_run.returncode == 0 and completed_run.stdout.startswith("usage: flowspec run [PRESET]")
    assert "\n  flowspec run toy pipeline_type=naive " in completed_run.stdout
    assert "run_pipe.sh" not in completed_run.stdout


@pytest.mark.parametrize("words, advice", [
    (["sreve"], "did you mean serve?"), (["What is bread?"], "a question is answered by flowspec run")])
def test_an_unknown_command_is_refused_with_the_nearest_one(started, error_of, words, advice, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flowspec", *words])
    assert advice in error_of(command.main)


def test_help_lists_every_command_and_where_models_are(started, output_of, monkeypatch):
    monkeypatch.setenv("FLOWSPEC_HOME", "elsewhere")
    monkeypatch.setattr(sys, "argv", ["flowspec", "--help"])
    text = output_of(command.main)
    assert all(f"\n  {name} " in text for name in command.PROGRAMS) and "are in elsewhere;" in text


def test_models_and_splits_are_in_the_clone_or_in_the_users_data_folder(monkeypatch, tmp_path):
    assert programs.home() == programs.ROOT == ROOT and "FLOWSPEC_HOME" not in programs.environment()
    monkeypatch.setattr(programs, "IS_CLONE", False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    environment = programs.environment()
    assert environment["FLOWSPEC_HOME"] == str(tmp_path / "flowspec")
    words = "from config.presets import HOME, PRESETS; print(HOME, PRESETS['smollm2'].base_dir)"
    completed_run = subprocess.run([sys.executable, "-c", words], env=environment, text=True, stdout=subprocess.PIPE)
    assert completed_run.stdout.split() == [f"{tmp_path}/flowspec", f"{tmp_path}/flowspec/models/smollm2-135m"]


def test_a_wheel_carries_every_folder_that_a_program_imports():
    carried = re.findall('^"(.+)" = "flowspec/engine/(.+)"$', project_text("pyproject.toml"), re.M)
    assert all(name == target for name, target in carried)
    needed_folders = {name.partition("/")[0] for name in tracked() if name.endswith(".py") and "/" in name}
    assert needed_folders - {"tests", "flowspec"} == {name for name, _ in carried if "." not in name} - {"smollm2"}
    assert {name for name, _ in carried if "." in name} == {"split_and_save_models.py", "run_worker.sh",
                                                            "run_jetson.sh"}
