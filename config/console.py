"""The common part of all commands: a Python that has the packages, Ctrl-C, messages on stderr, and exit codes.

It imports no packages and nothing slow, so that a command handles Ctrl-C from its first moment on.
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
from typing import Any, Callable, Iterator, NoReturn, Sequence, TypeVar

from config.failure import PeerLost, explain, is_expected

EXIT_WRONG, EXIT_LOST = 2, 75  # exit codes: invalid input, a lost peer
EXIT_STOPPED = 128  # ended by a signal: the signal's number is added
EXIT_INTERRUPTED = EXIT_STOPPED + signal.SIGINT
REPEAT_SECONDS = 1  # within which a repeated Ctrl-C counts once
ROOT = Path(__file__).resolve().parent.parent
PROJECT_PYTHONS = ("board/bin/python", ".venv/bin/python")
NEEDED_PACKAGES = ("torch", "numpy", "transformers", "safetensors", "sentencepiece", "fastchat", "jinja2", "tqdm")
SERVER_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")  # needed by the server in addition
TEST_PACKAGES = ("pytest", "tree_sitter", "tree_sitter_c")  # needed by the tests in addition
FREE_COMMANDS = {b"scripts.doctor", b"scripts.timeline"}  # commands that need no packages
ENTERED_VARIABLE = "FLOWSPEC_ENTERED"  # in the environment of a restarted command, which is restarted only once

Words = Sequence[str]
Result = TypeVar("Result")
_last_interrupt = -REPEAT_SECONDS * 1.0  # time


class PatientStream:
    """A stream of text that stores the first error of writing in `failure`, so that the work goes on without it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        return self._try(partial(self._stream.write, text), len(text))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def _try(self, action: Callable[[], Result], result_of_failure: Result) -> Result:
        if self.failure:
            return result_of_failure
        try:
            return action()
        except OSError as error:
            self.failure = error
            return result_of_failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# --- the end of a command ---------------------------------------------------------------------------------------------

def say(sentence: str, before: str = "") -> None:
    """Print a message on stderr, if that is open; `before` is printed first, as "\\n" for an empty line."""
    with suppress(OSError, ValueError):  # the terminal may be gone, or the stream closed
        print(f"{before}flowspec: {sentence}", file=sys.stderr)


def aligned(rows: Sequence[Sequence[str]], num_left: int | None = None) -> Iterator[str]:
    """Yield a line for each row, with its cells in columns; those after the first `num_left` are right-aligned."""
    columns = []
    for column_index, cells in enumerate(zip(*rows)):
        is_left = num_left is None or column_index < num_left
        align_cell = str.ljust if is_left else str.rjust
        width = max(map(len, cells))
        columns.append([align_cell(cell, width) for cell in cells])

    for row in zip(*columns):
        yield "  ".join(row).rstrip()


def run(main: Callable[[Words], int], argv: Words) -> int:
    """Run a command and return its exit code. A user's error, or the loss of a peer, is printed as one sentence."""
    try:
        exit_code = main(argv)
        sys.stdout.flush()
        return exit_code
    except Exception as error:
        if not is_expected(error):
            raise
        return ended_by(error, "debug=true" in argv)
    except KeyboardInterrupt as interrupted:
        say("stopped", "\n")
        return ended_by(interrupted)


def command(main: Callable[[Words], int]) -> Callable[[Words], int]:
    """Wrap a function of the command line's words so that `run` executes it."""
    return partial(run, main)


def ended_by(error: BaseException, debug: bool = False, report: Callable[[str], None] = say) -> int:
    """Return the exit code for this error; a user's error, or the loss of a peer, is reported."""
    if isinstance(error, SystemExit):  # the command's own
        return int(error.code or 0)
    if isinstance(error, BrokenPipeError):  # the reader has closed stdout, so a later flush must not reach it
        null_file = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_file, sys.stdout.fileno())
        return EXIT_STOPPED + signal.SIGPIPE

    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED

    show(error, debug)
    report(explain(error))
    return EXIT_LOST if isinstance(error, PeerLost) else EXIT_WRONG


def shell_code(return_code: int) -> int:
    """Return the exit code, as a shell has it, of a process with this `returncode`, which is negative for a signal."""
    return return_code if return_code >= 0 else EXIT_STOPPED - return_code


def show(error: BaseException, debug: bool) -> None:
    """Print the traceback, unless the error is a foreseen one and `debug` is off."""
    if debug or not is_expected(error):
        traceback.print_exception(type(error), error, error.__traceback__)


def die(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that wait for peers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- the start of a command -------------------------------------------------------------------------------------------

def interrupt(number: int, frame: Any) -> None:
    """Handle Ctrl-C. A second one within a second is ignored: it would disturb the orderly end of the command."""
    global _last_interrupt
    previous_interrupt, _last_interrupt = _last_interrupt, time.monotonic()
    if _last_interrupt - previous_interrupt >= REPEAT_SECONDS:
        raise KeyboardInterrupt


def process_words() -> list[bytes]:
    """Return the words with which this process was started, options of Python included."""
    return Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]


def enter(*package_names: str) -> None:
    """Restart the command in the project's environment if this Python lacks one of these packages.

    Without an environment, or if that lacks the package too, print a message and end the program.
    """
    missing_name = enter_if_possible(*package_names)
    if missing_name:
        say(missing_package(missing_name))
        sys.exit(EXIT_WRONG)


def enter_if_possible(*package_names: str) -> str:
    """Continue in the environment of the project if this Python lacks a package; return the first that it lacks.

    The program continues where it is, if there is no such environment or that lacks the package too. An empty text is
    returned if none is missing.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which a fork would lose
    missing_name = next((name for name in package_names if find_spec(name) is None), "")

    pythons = [ROOT / name for name in PROJECT_PYTHONS if os.access(ROOT / name, os.X_OK)]
    if missing_name and pythons and ENTERED_VARIABLE not in os.environ:
        os.environ[ENTERED_VARIABLE] = sys.executable
        os.execv(pythons[0], [os.fsencode(pythons[0]), *process_words()])
    return missing_name


def missing_package(name: str) -> str:
    """Return the remedy if this Python lacks a package, else an empty string."""
    if not name or find_spec(name) is not None:
        return ""
    launcher = "scripts/test.sh" if name in TEST_PACKAGES else "run_pipe.sh"
    start_command = "bash run_server.sh" if name in SERVER_PACKAGES else f"bash {launcher}"
    return (f"{sys.executable} has no {name}: type {start_command} once, which installs it into .venv, then this "
            "command again (on a board: docs/jetson.md)")
