"""The evaluations of a sweep's points, which are independent: in turn, or several at once.

A point is the arguments of one evaluation, with its own results folder. In virtual time its results are the same with
any number of workers, to the last digit. A point whose process is killed is evaluated again; it continues after the
answers that exist.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any, Iterator, Mapping, Sequence

from config.console import EXIT_STOPPED, say, shell_code
from config.keys import raw_values, with_defaults
from config.presets import TOY_PRESET
from config.values import Range
from eval.command import START, SWEEP_POINT

NUM_WORKERS = Range(1, 256)
MAX_TRIES = 3  # evaluations of a point whose worker is killed
LOG_NAME = "evaluation.log"
SIGNAL_SECONDS = 1.0  # after which a signal is handled that another thread has received
under_way: set[subprocess.Popen[bytes]] = set()  # evaluations of this process
is_stopping = Event()  # set by SIGTERM


def point_dir(folder: Path, point: str) -> Path:
    """Return the results folder of a point."""
    return folder / point.replace(" ", "_")


def words_by_point(points: Mapping[str, Mapping[str, str]], argv: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each point's evaluation: typed keys in place of the point's, and its results folder."""
    shared_words = [word for word in argv if not word.startswith("results=")]
    point_words = {}
    for point, keys in points.items():
        point_keys = {**keys, "results": str(point_dir(folder, point))}
        point_words[point] = with_defaults(shared_words, point_keys, TOY_PRESET)
    return point_words


def workers_of(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Return the value of the key `workers`, and the other words. Raises ValueError for an impossible value."""
    worker_words = [word for word in argv if word.startswith("workers=")]
    other_words = [word for word in argv if word not in worker_words]
    if len(worker_words) > 1:
        raise ValueError("workers is given twice: leave one of them out")

    workers = raw_values(worker_words).get("workers", "1")
    if not workers.isdecimal() or not NUM_WORKERS.holds(int(workers)):
        raise ValueError(f"workers={workers} is not possible: give {NUM_WORKERS.advice}")
    return int(workers), other_words


def evaluate_points(title: str, points: Mapping[str, Sequence[str]], num_workers: int = 1) -> int:
    """Evaluate every point, and print which; return 0, or the exit code of the first that fails."""
    # the evaluations end, as their exit codes show: by Ctrl-C, which they get as well, or by SIGTERM, which they do not
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, end_evaluations)
    if num_workers == 1:
        for turn, (point, words) in enumerate(points.items(), 1):
            print(f"\n{title}: point {turn} of {len(points)}, {point}", flush=True)
            exit_code = evaluate_point(words)
            if exit_code:
                return exit_code
        return 0

    for number_done, (point, exit_code) in enumerate(_at_once(points, num_workers), 1):
        if exit_code:
            say(f"{title}: point {point} has failed: {raw_values(points[point])['results']}/{LOG_NAME} says why")
            return exit_code
        print(f"{title}: {number_done} of {len(points)} points are done, the last {point}", flush=True)
    return 0


def end_evaluations(*_: object) -> None:
    """Handle SIGTERM: end the evaluations that are under way, and each later one at once."""
    is_stopping.set()
    for process in list(under_way):
        process.terminate()


def evaluate_point(words: Sequence[str], log_file: Any = None) -> int:
    """Evaluate one point in a process of its own; return its exit code. Its output goes to the `log_file`, if any."""
    module, _ = START.module.split()
    environment = {**os.environ, SWEEP_POINT: "true"}
    streams = {"stdout": log_file, "stderr": subprocess.STDOUT} if log_file else {}
    command = [sys.executable, "-m", module, "emulated", *words]
    with subprocess.Popen(command, env=environment, **streams) as process:
        under_way.add(process)
        if is_stopping.is_set():
            process.terminate()

    under_way.remove(process)
    return shell_code(process.returncode)


def _with_log(words: Sequence[str]) -> int:
    """Evaluate one point, with its output in its results folder; again if its process is killed."""
    results_folder = Path(raw_values(words)["results"])
    results_folder.mkdir(parents=True, exist_ok=True)
    with (results_folder / LOG_NAME).open("a", encoding="utf-8") as log_file:
        for _ in range(MAX_TRIES):
            exit_code = evaluate_point(words, log_file)
            if exit_code != EXIT_STOPPED + signal.SIGKILL:
                break
    return exit_code


def _at_once(points: Mapping[str, Sequence[str]], num_workers: int) -> Iterator[tuple[str, int]]:
    """Yield the points and their exit codes, as they end; none is begun after a failure."""
    has_failed = Event()

    def evaluate(words: Sequence[str]) -> int | None:
        if has_failed.is_set():
            return None

        exit_code = None
        try:
            exit_code = _with_log(words)
        finally:
            if exit_code != 0:  # or an error, as of a full disk
                has_failed.set()
        return exit_code

    with ThreadPoolExecutor(num_workers) as pool:
        point_of_future: dict[Future[int | None], str] = {
            pool.submit(evaluate, words): point for point, words in points.items()}
        running = {*point_of_future}
        while running:
            ended, running = wait(running, SIGNAL_SECONDS, FIRST_COMPLETED)
            for future in ended:
                exit_code = future.result()
                if exit_code is not None:
                    yield point_of_future[future], exit_code
