"""The commands. Ctrl-C ends them with a message, even while their modules are still being imported.

If this Python lacks the packages, the command restarts with that of the environment.

Characters that a terminal cannot show are printed escaped, so that no answer breaks off.
"""
from __future__ import annotations

import io
import os
import resource
import signal
import sys
from typing import Any

from config.console import FREE_COMMANDS, NEEDED_PACKAGES, enter, interrupt, missing_package, process_words
from config.failure import SPACE, limit_remedy, shortage
from config.lean_torch import make_lean

LIBRARIES = 1 << 30  # bytes of address space, with a margin, that torch and transformers take before a model is read
LEAN_COMMANDS = {b"scripts.generate", b"scripts.serve"}  # commands that only compute layers, and compile nothing


def _report(kind: Any, error: Any, trace: Any) -> None:
    lacking = (error.name or "").partition(".")[0] if issubclass(kind, ModuleNotFoundError) else ""
    message = "stopped" if issubclass(kind, KeyboardInterrupt) else missing_package(lacking) or shortage(error)
    if not message:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"\nflowspec: {message}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if message == "stopped" else 2)


def _check_memory() -> None:
    """Exit with a message if the libraries would exceed a memory limit: C++ would end the process without one."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < LIBRARIES:
        print(f"flowspec: there is not enough memory for torch alone: {limit_remedy(SPACE)}", file=sys.stderr)
        sys.exit(2)


def _open_streams() -> None:
    """Discard what is printed if the shell has closed a stream, as with >&-."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


_open_streams()
sys.excepthook = _report
_check_memory()
if sys.argv[:1] in (["-m"], ["-c"]):  # a command, also of flowspec/programs.py, not a debugger
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):  # ignored: a shell's background
        signal.signal(signal.SIGINT, interrupt)
    if not LEAN_COMMANDS.isdisjoint(process_words()):
        make_lean()
    needs_packages = FREE_COMMANDS.isdisjoint(process_words())
    enter(*(NEEDED_PACKAGES if needs_packages else ()))
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")
