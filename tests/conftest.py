"""One thread for arithmetic: the models of the tests are tiny, and several of their stages run side by side.

Ranks are forked from a process that has torch already; tests/test_processes.py starts them as a person's program does.
Processes that tests start hear every signal, also where a shell's background or nohup lets pytest ignore some.
"""
from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

SLOW = ("recovery", "hosts", "conversation", "families", "native", "exact", "grammar", "quant", "virtual", "replicas",
        "specinfer", "run", "prunes", "penalties", "extending", "serve", "plan", "cache", "blocks", "body_steps",
        "installed", "recurrent", "verified", "train_eagle", "text", "rules", "tp_run", "many", "bench", "requirements",
        "lean_torch", "mutants", "policies", "threads", "failure", "claims", "serve_engine", "pipeline", "serve_hosts",
        "torch_wires", "thrift", "worker", "order", "load", "simulate", "laboratories", "points", "doctor", "processes",
        "train_ssm")  # the slowest first

os.environ["FLOWSPEC_PRESET"] = "toy"  # where no model is named; also of the processes that tests start
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the launchers do; several ranks share these cores

for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)  # ignored here as before; unlike SIG_IGN, it is not inherited

# a busy machine may take long for an example, and to draw it; the same examples are tried each time
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[
    HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("any machine")
torch.set_num_threads(1)
torch.set_grad_enabled(False)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half as many again as cores: some tests wait, and each process imports the project and starts a fork server."""
    return -(-3 * len(os.sched_getaffinity(0)) // 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules make while they are imported stays, so the garbage collector need never look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files begin first, so that no process is left with one of them at the end."""
    place = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(Path(item.path).stem[5:],
                                          len(SLOW)))


@pytest.fixture(scope="session", autouse=True)
def ranks_are_forked() -> None:
    """In pipelines that this process opens."""
    from cluster import processes
    from tests.forked import serving_ranks

    processes.subprocess = SimpleNamespace(Popen=serving_ranks)


@pytest.fixture(scope="module")
def engines_are_forked() -> Iterator[None]:
    """Those of pipelines that this process opens through the package flowspec."""
    from flowspec import engine_process
    from tests.forked import ForkedEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "subprocess", SimpleNamespace(Popen=ForkedEngine, DEVNULL=None))
        yield


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its head, and its splits."""
    from tests.saved import models

    return models(tmp_path_factory.getbasetemp() / "saved")


@pytest.fixture
def sdk(server: Any) -> Iterator[Any]:
    """OpenAI's own client of the module's server."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def create_chat(sdk: Any) -> Callable[..., Any]:
    """Asks for an answer to a chat as OpenAI's own client does."""
    create: Callable[..., Any] = sdk.chat.completions.create
    return create


def exit_code_of(command: Callable[..., int], *arguments: Any) -> object:
    """That with which a command ends, by its return or by SystemExit."""
    try:
        return command(*arguments)
    except SystemExit as end:
        return end.code


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints to stderr that has to end with the exit code 2."""
    def run_to_error(command: Callable[..., int], *arguments: Any) -> str:
        assert exit_code_of(command, *arguments) == 2
        return capsys.readouterr().err

    return run_to_error


@pytest.fixture
def sentence_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence with which a command has to refuse its words; it prints nothing else."""
    def run_to_sentence(command: Callable[..., int], *arguments: Any) -> str:
        assert command(*arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("flowspec: ") and printed.err.count("\n") == 1
        return printed.err

    return run_to_sentence


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints to stdout that has to succeed."""
    def run_to_end(command: Callable[..., int], *arguments: Any) -> str:
        assert exit_code_of(command, *arguments) == 0
        return capsys.readouterr().out

    return run_to_end


@pytest.fixture
def answer_to(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The first line that a command with these words prints, which is its answer."""
    from tests.saved import here

    def run_here(*words: str) -> str:
        capsys.readouterr()
        exit_code, printed = here(*words), capsys.readouterr()
        assert exit_code == 0, printed.err
        return printed.out.splitlines()[0]

    return run_here


@pytest.fixture(scope="module")
def small_blocks() -> Iterator[None]:
    """Memory of caches comes in small blocks, so that they grow often, and slots before a window are dropped early."""
    from model import slots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "BLOCK_SLOTS", 4)
        yield


@pytest.fixture
def unlearning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are believed what they say, no matter who was right."""
    from model.drafts.mixture import Blend, Sharpness

    for learner, name in ((Blend, "learn"), (Blend, "learn_copies"), (Sharpness, "learn")):
        monkeypatch.setattr(learner, name, lambda *message: None)
