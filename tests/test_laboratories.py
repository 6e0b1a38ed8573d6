"""The engine needs no laboratory: each is deleted with its commands, and runs and servers still start."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT, Source, python_files, tracked
from tests.test_layers import LABORATORIES, imports, programs

STARTS = ("scripts.generate", "scripts.serve", "launch.run", "launch.receive", "launch.piped",
          "cluster.processes", "split_and_save_models")  # what a user or a board starts, or a program imports
GONE = ("eval", "train")
HELP_WITHOUT_EACH = """
import json, os, runpy, sys

def show_help():
    for module in ("scripts.generate", "scripts.serve"):
        sys.argv = [module, "--help"]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code
    sys.stdout.flush()

packages, names_of_room = json.loads(sys.argv[1])
show_help()
for name in [*sys.modules]:  # a fork imports these again, and finds all other libraries
    if name.partition(".")[0] in packages:
        del sys.modules[name]

for room, names in names_of_room.items():
    for number, name in enumerate(names):
        os.rename(name, f"../gone {number}")
    pid = os.fork()
    if not pid:
        show_help()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, room
    for number, name in enumerate(names):
        os.rename(f"../gone {number}", name)
"""
ANSWER = ("-m", "scripts.generate", "toy", "prompt=What does a baker do?", "max_new_tokens=4", "stages=1", "draft=none",
          "pipeline_type=ar")


def modules() -> dict[str, Source]:
    """Every Python file of the project by the name of its module."""
    return {".".join(source.parts).replace(".__init__", ""): source for source in python_files()}


def needed(start: str) -> set[str]:
    """The project's modules that one imports or starts, also in functions, and what these import in turn."""
    sources = modules()
    waiting, reached = [start], set()
    while waiting:
        name = waiting.pop()
        if name in sources and name not in reached:
            reached.add(name)
            packages = (name.rpartition(".")[0],)
            waiting += [*imports(sources[name]), *programs(sources[name]), *packages]
    return reached


def is_in(path: str, rooms: tuple[str, ...]) -> bool:
    """Whether a file lies in one of these folders."""
    return any(path.startswith(f"{room}/") for room in rooms)


def commands_of(rooms: tuple[str, ...]) -> list[str]:
    """The commands that import these rooms, if only for some of their words: they are deleted, too."""
    return [source.path for source in python_files() if source.parts[0] == "scripts"
            and any(is_in(name.replace(".", "/"), rooms) for name in imports(source))]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the repository without tests and pages; files that are no code are links."""
    folder = tmp_path / "project"
    for name in tracked():
        path = folder / name
        if is_in(name, ("tests", "docs")):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            path.write_bytes((ROOT / name).read_bytes())
        else:
            path.symlink_to(ROOT / name)
    return folder


def started(folder: Path, *words: str) -> str:
    """The output of a Python program in this folder, which must end well."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}  # where this machine's kernels are
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("start", STARTS)
def test_the_engine_imports_nothing_of_eval_and_train(start: str) -> None:
    assert [name for name in needed(start) if name.split(".")[0] in GONE] == []


def test_what_is_needed_is_found_in_functions_and_in_strings() -> None:
    assert "eval.plan.keys" in needed("scripts.plan") and "eval.bench.gpu" in needed("scripts.doctor")
    assert {"model.native.compiler", "serve.engine"} <= needed("scripts.serve")


def test_runs_and_servers_start_without_a_laboratory_and_an_answer_comes_without_any(project: Path) -> None:
    packages = sorted({source.parts[0] for source in python_files()})
    names_of_room = {room: [room, *commands_of((room,))] for room in LABORATORIES}
    help_texts = started(project, "-c", HELP_WITHOUT_EACH, json.dumps([packages, names_of_room]))
    assert help_texts.count("presets:") == 2 * (1 + len(LABORATORIES))

    for number, name in enumerate([*GONE, *commands_of(GONE)]):
        (project / name).rename(project.parent / f"gone for good {number}")
    assert started(project, *ANSWER).strip()
    assert "api_key" in started(project, "-m", "scripts.serve", "--help")
