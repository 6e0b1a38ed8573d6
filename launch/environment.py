"""Which Python a command runs in: the one that was typed if it has the packages, else that of a board or of .venv.

It needs Python's own library only.
"""
from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("board/bin/python", ".venv/bin/python")
NEEDED = ("torch", "numpy", "transformers", "safetensors", "sentencepiece", "fastchat", "jinja2", "tqdm")
SERVED = ("fastapi", "httpx", "uvicorn", "pydantic", "prometheus_client")  # what the server needs beside them
FREE = {b"scripts.doctor", b"scripts.timeline"}  # commands that need no packages
ENTERED = "FLOWSPEC_ENTERED"  # set for a command that was started again, which happens once only


def enter(*needed: str) -> None:
    """Start the command again in an environment if this Python lacks one of these packages.

    Without an environment, or if that lacks it too, a sentence ends the program.
    """
    lacking = next((name for name in needed if find_spec(name) is None), "")
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1] if lacking else []
    if not lacking or not FREE.isdisjoint(words):
        return
    there = [ROOT / name for name in PYTHONS if os.access(ROOT / name, os.X_OK)]
    if there and ENTERED not in os.environ:
        os.environ[ENTERED] = sys.executable
        os.execv(there[0], [os.fsencode(there[0]), *words])
    print(f"flowspec: {lacks(lacking)}", file=sys.stderr)
    sys.exit(2)


def lacks(name: str) -> str:
    """What to do if this Python does not have a package; empty if it has."""
    if not name or find_spec(name) is not None:
        return ""
    start = "bash run_server.sh" if name in SERVED else "bash run_pipe.sh"
    return (f"{sys.executable} has no {name}: type {start} once, which installs it into .venv, then this command again "
            "(on a board: docs/jetson.md)")
