"""Sweeps and ablations: the evaluation at each point of what is varied, then a table and a plot.

Usage: python -m scripts.sweep NAME [PRESET] [key=value ...], which eval/sweeps/NAME.sh calls. Every key of run_eval.sh
may be given, but those that the sweep varies; results=DIR holds a folder for each point (results/sweeps/NAME if it is
not given), and the same command goes on with what is there.
"""
from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from config.keys import ASKS, check_name
from config.presets import ROOT
from config.schema.untrusted import plain
from eval.results_index import NoAnswers
from eval.sweep import SWEEPS, Sweep, place, write
from launch.console import STOPPED, WRONG, run, say

Commands = Tuple[Path, Dict[str, List[str]]]


def listing() -> str:
    """The sweeps to choose from, a line for each."""
    return "\n".join(f"  {name:<18}{sweep.about}: {', '.join(sweep.points)}" for name, sweep in SWEEPS.items())


def commands(name: str, sweep: Sweep, argv: Sequence[str]) -> Commands:
    """The folder of the sweep, and the words of each point's evaluation.

    Raises ValueError for a key that is varied, and for results= without a folder.
    """
    given = {_key(word): word for word in argv}
    varied = {_key(word) for keys in sweep.points.values() for word in keys}
    for key in varied & given.keys():
        raise ValueError(f"{key} is what {name} varies: leave {given[key]} out")
    usual = f"results={ROOT / 'results' / 'sweeps' / name}"
    results = given.get("results", usual).partition("=")[2]
    if not results.strip():
        raise ValueError("results is empty: name a folder behind the results=")
    folder = Path(results).expanduser().absolute()
    asked = [word for word in argv if not word.startswith("results=")]
    base = [word for word in sweep.base if _key(word) not in given.keys() | varied]
    points = {}
    for point, keys in sweep.points.items():
        points[point] = [*asked, *base, *keys, f"results={place(folder, point)}"]
    return folder, points


def _key(word: str) -> str:
    """The key of `key=value`."""
    return word.partition("=")[0]


def _sweep(words: Sequence[str]) -> int:
    """Evaluate point by point up to the first that fails, and show what was answered; the exit code."""
    name, argv = "".join(words[:1]), words[1:]
    if name in ASKS:
        print(f"{__doc__}\n{listing()}")
        return 0
    check_name(name, SWEEPS, "sweep")
    folder, points = commands(name, SWEEPS[name], argv)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends the evaluation, whose exit code says so
    code = 0
    for number, (point, words) in enumerate(points.items(), 1):
        print(f"\n{name}: point {number} of {len(points)}, {point}", flush=True)
        evaluation = subprocess.run([sys.executable, "-m", "scripts.evaluate", "emulated", *words])
        code = evaluation.returncode
        if code:
            code = code if code > 0 else STOPPED - code
            break
    try:
        path = write(folder, name, SWEEPS[name])
        print(f"\n{path.read_text(encoding='utf-8')}\ntable: {path}")
    except (ValueError, OSError) as error:
        reported = code and isinstance(error, NoAnswers)  # by the evaluation that failed
        if not reported:
            say(plain(str(error)))
        code = code or WRONG
    return code


def main(argv: list[str]) -> int:
    return run(_sweep, argv)
