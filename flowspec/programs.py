"""Where FlowSpec's own programs lie, and how they are started: never in the process that imports this package."""
from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CARRIED = PACKAGE / "engine"  # the project's folders, as a wheel carries them
IS_CLONE = not CARRIED.is_dir()  # also of an editable install
ROOT = PACKAGE.parent if IS_CLONE else CARRIED
HOME_VARIABLE = "FLOWSPEC_HOME"  # in the environment: the folder for models, splits and results
# Python 3.10 does not know PYTHONSAFEPATH: there the folder in which a user works would be searched first.
START = ("import runpy, sys; sys.path[:] = filter(None, sys.path); "
         "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")


def home() -> Path:
    """Return the folder for models, splits and results: the clone, or a folder of the user's data."""
    user_data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(os.environ.get(HOME_VARIABLE) or (ROOT if IS_CLONE else Path(user_data) / "flowspec"))


def command_of(module: str) -> list[str]:
    """Return the words that start one of FlowSpec's modules as a program, in `environment`."""
    return [sys.executable, "-c", START, module]


def environment() -> dict[str, str]:
    """Return the environment of FlowSpec's programs; scripts/env.sh gives the reasons."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000", **os.environ,
                 "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
    if not IS_CLONE:
        home().mkdir(parents=True, exist_ok=True)
        variables.update({HOME_VARIABLE: str(home()), "FLOWSPEC_RUN": "flowspec run"})
    return variables
