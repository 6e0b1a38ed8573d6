"""Plans for `pipeline_type=auto`, in a process of their own, since they measure this machine (`launch/auto.py`)."""
from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.folder import private_folder
from config.console import EXIT_INTERRUPTED, EXIT_LOST, Words, say
from config.failure import PeerLost
from config.files import read_json_file
from launch import auto

PLAN = "eval.plan.command"  # the program that makes plans
OURS = "flowspec: "  # the beginning of a message of that program


def allow_plans() -> None:
    """Let this program plan where `pipeline_type=auto` finds no remembered choice."""
    auto.planner = make_plan


def make_plan(words: Words) -> dict[str, Any]:
    """Run a plan in a process of its own, pass on its progress, and return its choice."""
    with private_folder() as folder:
        preset_file = Path(folder) / "chosen.json"
        command = [sys.executable, "-m", PLAN, *words, f"preset={preset_file}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            last_message = _pass_on_output(process)

        if process.returncode == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if process.returncode:
            reason = last_message or f"the plan ended with exit code {process.returncode}"
            raise PeerLost(reason) if process.returncode == EXIT_LOST else ValueError(f"pipeline_type=auto: {reason}")
        if last_message:
            say(last_message)

        choice: dict[str, Any] = read_json_file(preset_file, "name the method")["chosen"]
    return choice


def _pass_on_output(process: subprocess.Popen[bytes]) -> str:
    """Pass on the output of a plan while it runs; return its last message, or an empty string."""
    assert process.stderr is not None
    last_message = ""

    for line in io.TextIOWrapper(process.stderr, errors="replace", newline=""):  # a carriage return ends a line, too
        if line.startswith(OURS):
            last_message = line[len(OURS):].strip()
        else:
            print(line, end="", file=sys.stderr, flush=True)

    return last_message
