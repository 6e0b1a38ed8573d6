"""Commands as they are typed: with a Python that lacks the packages, without a word, with a wrong name."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import console as environment
from config.presets import ROOT
from eval import command as evaluate
from eval import sweep
from eval.dsi import command as simulate
from eval.specinfer import command as spec_infer
from scripts import bench
from tests.saved import run_program

COMMANDS = {  # of which each has commands
    "bench": bench.main,
    "simulate": simulate.main,
    "sweep": sweep.main,
    "evaluate": evaluate.main,
    "spec_infer": spec_infer.main,
}
MODULES = ["scripts.generate", "scripts.plan", "eval.report", "split_and_save_models.py"]
BASE = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}"
# Says what it was started with, and goes on like the Python that was typed, which has no packages.
OTHER = f"""#!/bin/sh
echo "again: $*"
exec {BASE} "$@"
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_commands_lists_them_and_refuses_another(name, capsys):
    assert [COMMANDS[name](words) for words in ([], ["--help"], ["-h"], ["help"])] == [0] * 4
    shown = capsys.readouterr()
    assert shown.out.count(f"scripts.{name}") + shown.out.count(f"scripts/{name}") >= 4
    assert shown.err == ""
    assert COMMANDS[name](["~"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("flowspec: unknown ") and "~: choose one of " in shown.err


class Clone:
    """The project's Python files, which a Python without packages runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("cluster", "eval", "launch", "model", "pipeline", "scripts", "serve", "train"):
            (root / name).symlink_to(ROOT / name)
        # These look for what lies beside them.
        shutil.copy(ROOT / "split_and_save_models.py", root)
        shutil.copytree(ROOT / "config", root / "config", ignore=shutil.ignore_patterns("__pycache__"))

    def environment(self, name: str, program: str) -> Path:
        """An environment of that name, with this as its Python."""
        python = self.root / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(program)
        python.chmod(0o755)
        return python

    def run(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        typed = [command] if command.endswith(".py") else ["-m", command]
        env = {key: value
               for key, value in os.environ.items() if not key.startswith(("PYTHON", "FLOWSPEC"))}
        return run_program(BASE, "-S", *typed, *words, cwd=self.root, env={**env, "PYTHONDONTWRITEBYTECODE": "1"})


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("command", MODULES)
def test_a_python_without_packages_gives_way_to_that_of_the_environment(clone, command):
    ran = clone.run(command, "a word")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("flowspec: ") and ran.stderr.count("\n") == 1
    assert "has no torch: type bash run_pipe.sh once" in ran.stderr
    clone.environment(".venv", "#!/bin/sh\nprintf '%s,' \"$@\"\n")
    typed = command if command.endswith(".py") else f"-m,{command}"
    assert clone.run(command, "a word").stdout == f"-S,{typed},a word,"


def test_an_environment_that_lacks_packages_too_is_asked_once(clone):
    clone.environment("board", OTHER)
    clone.environment(".venv", OTHER)
    ran = clone.run("scripts.plan")
    assert ran.stdout == "again: -S -m scripts.plan\n" and ran.returncode == 2
    assert "has no torch" in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["scripts.doctor", "scripts.timeline"])
def test_what_needs_no_packages_runs_in_the_python_that_was_typed(clone, command):
    clone.environment(".venv", OTHER)
    ran = clone.run(command, "--help")
    assert ran.returncode == 0 and ran.stdout.startswith(f"usage: python3 -m {command}"), ran.stderr


def test_the_doctor_examines_the_environment_and_without_one_the_python_that_was_typed(clone):
    alone = clone.run("scripts.doctor")
    assert alone.returncode == 1 and "missing: torch cannot be imported" in alone.stdout
    clone.environment(".venv", OTHER)
    assert clone.run("scripts.doctor").stdout.startswith("again: -S -m scripts.doctor\nok: Python")


def test_what_needs_packages_of_a_command_that_needs_none_runs_in_the_environment(clone):
    clone.environment(".venv", OTHER)
    assert clone.run("scripts.doctor", "gpu", "--help").stdout == "again: -S -m scripts.doctor gpu --help\n"


def test_a_python_that_has_the_packages_is_used_whatever_environments_there_are(monkeypatch):
    monkeypatch.setattr(environment.os, "execv", lambda *_: pytest.fail("another Python was started"))
    environment.enter(*environment.NEEDED_PACKAGES, *environment.SERVER_PACKAGES)


def test_a_package_of_the_server_that_is_not_there_is_reported_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert "has no fastapi: type bash run_server.sh once" in environment.missing_package("fastapi")
    assert "has no torch: type bash run_pipe.sh once" in environment.missing_package("torch")
    assert environment.missing_package("") == ""


@pytest.mark.parametrize("script", ["run_pipe_eval.sh", "run_pipe_eval_13B.sh", "run_jetson_eval.sh",
                                    "run_jetson_eval_13B.sh", "eval/run_jetson_eval.sh"])
def test_a_command_of_the_original_is_found_where_its_readme_looks_for_it(script, tmp_path):
    folder, name = (ROOT / script).parent, Path(script).name
    (tmp_path / "bash").write_text('#!/bin/sh\nrealpath "$1"; shift; echo "$@"\n')
    (tmp_path / "bash").chmod(0o755)
    shown = run_program("/bin/bash", name, "a b", "c", cwd=folder,
                        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert shown.stdout == f"{ROOT / 'scripts' / name}\na b c\n", shown.stderr


@pytest.mark.parametrize("name", "check_clients check_legacy check_setup netem netns_cluster push".split())
def test_a_script_shows_all_that_stands_at_its_top(name):
    script = ROOT / "scripts" / f"{name}.sh"
    head = script.read_text(encoding="utf-8").partition("\nset -e")[0].splitlines()[1:]
    shown = run_program("bash", script, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [line[2:] for line in head]


def test_netem_refuses_a_word_that_it_does_not_know():
    refused = run_program("bash", "scripts/netem.sh", "stop", "eth0")
    assert (refused.returncode, refused.stderr) == (2, "flowspec: unknown word stop: give set, show or clear\n")
