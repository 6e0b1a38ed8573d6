"""The commands. Ctrl-C ends them with a sentence, even while their modules are still being imported.

A Python that lacks the packages gives way to that of the environment.

What a terminal has no sign for is shown escaped, so no answer ends in the midst of a word.
"""
from __future__ import annotations

import io
import os
import resource
import signal
import sys
from typing import Any

from launch.console import NEEDED, enter, interrupt, lacks
from pipeline.failure import SPACE, limited, shortage

LIBRARIES = 1 << 30  # bytes of addresses that torch and transformers take before a model is read, with some room


def _report(kind: Any, error: Any, trace: Any) -> None:
    lacking = (error.name or "").partition(".")[0] if issubclass(kind, ModuleNotFoundError) else ""
    message = "stopped" if issubclass(kind, KeyboardInterrupt) else lacks(lacking) or shortage(error)
    if not message:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"\nflowspec: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if message == "stopped" else 2)


def _check_memory() -> None:
    """Under a limit that the libraries exceed while they load, C++ ends the process without a word."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LIBRARIES:
        print(f"flowspec: there is not enough memory for torch alone: {limited(SPACE)}", file=sys.stderr)
        sys.exit(2)


def _open_streams() -> None:
    """What is printed goes nowhere where the shell has closed a stream, as with >&-."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


_open_streams()
sys.excepthook = _report
_check_memory()
if sys.argv[:1] == ["-m"]:  # a command, no debugger
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):  # ignored: a shell's background
        signal.signal(signal.SIGINT, interrupt)
    enter(*NEEDED)
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
