"""What every command needs: a Python that has the packages, Ctrl-C, sentences on stderr, and exit codes.

It imports nothing that takes long, and no package, so that a command obeys Ctrl-C from its first moment on.
"""
from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, NoReturn, Sequence

from pipeline.failure import PeerLost, explain, foreseen

EXIT_WRONG, EXIT_LOST = 2, 75  # exit codes: bad input, a peer is gone
EXIT_STOPPED = 128  # ended by a signal, whose number is added
EXIT_INTERRUPTED = EXIT_STOPPED + signal.SIGINT
AT_ONCE = 1  # second in which to press Ctrl-C several times means no more than once
ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("board/bin/python", ".venv/bin/python")
NEEDED = ("torch", "numpy", "transformers", "safetensors", "sentencepiece", "fastchat", "jinja2", "tqdm")
SERVED = ("fastapi", "httpx", "uvicorn", "pydantic", "prometheus_client")  # what the server needs beside them
FREE = {b"scripts.doctor", b"scripts.timeline"}  # commands that need no packages
ENTERED = "FLOWSPEC_ENTERED"  # set for a command that was started again, which happens once only

Words = Sequence[str]
_pressed = -AT_ONCE * 1.0


# --- the end of a command ---------------------------------------------------------------------------------------------

def say(sentence: str, before: str = "") -> None:
    """Print a sentence on stderr, as long as somebody reads there; `before` it an empty line, if that is "\\n"."""
    with suppress(OSError, ValueError):  # the terminal may be gone, or the stream closed
        print(f"{before}flowspec: {sentence}", file=sys.stderr)


def run(main: Callable[[Words], int], argv: Words) -> int:
    """The exit code of a command. What a person got wrong, or a loss, is one sentence."""
    try:
        code = main(argv)
        sys.stdout.flush()
        return code
    except Exception as error:
        if not foreseen(error):
            raise
        return ended_by(error, "debug=true" in argv)
    except KeyboardInterrupt as interrupted:
        say("stopped", "\n")
        return ended_by(interrupted)


def command(main: Callable[[Words], int]) -> Callable[[Words], int]:
    """A function of words as a command, which `run` runs."""
    return partial(run, main)


def ended_by(error: BaseException, debug: bool = False, report: Callable[[str], None] = say) -> int:
    """The exit code of what ends with this error; what a person got wrong, or a loss, is reported."""
    if isinstance(error, SystemExit):  # the command's own
        return int(error.code or 0)
    if isinstance(error, BrokenPipeError):  # the reader of the answer has had enough; nothing is to be flushed there
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return EXIT_STOPPED + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED
    show(error, debug)
    report(explain(error))
    return EXIT_LOST if isinstance(error, PeerLost) else EXIT_WRONG


def show(error: BaseException, debug: bool) -> None:
    """Print the traceback, unless a sentence says it all."""
    if debug or not foreseen(error):
        traceback.print_exception(type(error), error, error.__traceback__)


def die(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that wait for peers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- its beginning ----------------------------------------------------------------------------------------------------

def interrupt(number: int, frame: Any) -> None:
    """Ctrl-C, of which the first one counts: another one would break the good order in which the command ends."""
    global _pressed
    before, _pressed = _pressed, time.monotonic()
    if _pressed - before >= AT_ONCE:
        raise KeyboardInterrupt


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
    say(lacks(lacking))
    sys.exit(EXIT_WRONG)


def lacks(name: str) -> str:
    """What to do if this Python does not have a package; empty if it has."""
    if not name or find_spec(name) is not None:
        return ""
    start = "bash run_server.sh" if name in SERVED else "bash run_pipe.sh"
    return (f"{sys.executable} has no {name}: type {start} once, which installs it into .venv, then this command again "
            "(on a board: docs/jetson.md)")
