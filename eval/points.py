"""The evaluations of a sweep's points, which are independent: in turn, several at once, or on a Ray cluster.

A point is the arguments of one evaluation, with its own results folder. In virtual time its results are the same on any
worker to the last digit. A point whose worker is lost is evaluated again; it continues after the answers that exist.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from config.console import EXIT_STOPPED, say
from config.failure import PeerLost
from config.files import replace
from config.keys import raw_values, with_defaults
from config.presets import ROOT, TOY_PRESET
from config.schema.untrusted import one_line
from config.values import Range
from eval.command import START, SWEEP_POINT

ON_RAY = "ray"
NUM_WORKERS = Range(1, 256)
MAX_TRIES = 3  # evaluations of a point whose worker is killed
# of the project's folder: what an evaluation of the bundled models does not read
NOT_SENT = ["/.git", "/.venv", "/.mypy_cache", "/.ruff_cache", "/.pytest_cache", "/models", "/splits", "/results*",
            "/docs", "/tests", "/keys", "__pycache__"]
LOG_NAME = "evaluation.log"


def point_dir(folder: Path, point: str) -> Path:
    """Return the results folder of a point."""
    return folder / point.replace(" ", "_")


def words_by_point(points: Mapping[str, Mapping[str, str]], argv: Sequence[str], folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each point's evaluation: typed keys in place of the point's, and its results folder."""
    shared_words = [word for word in argv if not word.startswith("results=")]
    return {point: with_defaults(shared_words, {**keys, "results": f"{point_dir(folder, point)}"}, TOY_PRESET)
            for point, keys in points.items()}


class PointOutcome(NamedTuple):
    """The end of one evaluation; `files` are those of its results, by their paths, if it ran on another machine."""

    exit_code: int
    files: Mapping[str, bytes] = {}


def workers_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the value of the key `workers`, and the other words. Raises ValueError for an impossible value."""
    worker_words = [word for word in argv if word.startswith("workers=")]
    other_words = [word for word in argv if word not in worker_words]
    if len(worker_words) > 1:
        raise ValueError("workers is given twice: leave one of them out")

    workers = raw_values(worker_words).get("workers", "1")
    is_number = workers.isdecimal() and NUM_WORKERS.holds(int(workers))
    if workers != ON_RAY and not is_number:
        raise ValueError(f"workers={workers} is not possible: give {NUM_WORKERS.advice}, or ray for a Ray cluster")
    return workers, other_words


def evaluate_points(title: str, points: Mapping[str, Sequence[str]], workers: str = "1") -> int:
    """Evaluate every point, and print which; return 0, or the exit code of the first that fails."""
    if workers != ON_RAY:
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C ends the evaluations, as their exit codes show
    if workers == "1":
        for turn, (point, words) in enumerate(points.items(), 1):
            print(f"\n{title}: point {turn} of {len(points)}, {point}", flush=True)
            exit_code = evaluate_point(words)
            if exit_code:
                return exit_code
        return 0

    outcomes = _on_ray(points) if workers == ON_RAY else _at_once(points, int(workers))
    for number_done, (point, exit_code) in enumerate(outcomes, 1):
        if exit_code:
            say(f"{title}: point {point} has failed: {raw_values(points[point])['results']}/{LOG_NAME} says why")
            return exit_code
        print(f"{title}: {number_done} of {len(points)} points are done, the last {point}", flush=True)
    return 0


def evaluate_point(words: Sequence[str], log_file: Any = None) -> int:
    """Evaluate one point in a process of its own; return its exit code. Its output goes to the `log_file`, if any."""
    module, _ = START.module.split()
    environment = {**os.environ, SWEEP_POINT: "true"}
    streams = {"stdout": log_file, "stderr": subprocess.STDOUT} if log_file else {}
    process = subprocess.run([sys.executable, "-m", module, "emulated", *words], env=environment, **streams)
    return process.returncode if process.returncode >= 0 else EXIT_STOPPED - process.returncode


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


# --- several at once on this machine ----------------------------------------------------------------------------------

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
        for future in as_completed(point_of_future):
            exit_code = future.result()
            if exit_code is not None:
                yield point_of_future[future], exit_code


# --- on a Ray cluster -------------------------------------------------------------------------------------------------

def _on_ray(points: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, int]]:
    """Yield the points and their exit codes, as they end; a point begins with its results so far, which it continues.

    Raises PeerLost for a point whose worker is lost in each of its tries.
    """
    try:
        import ray
    except ImportError:
        fix = "install it, as with .venv/bin/pip install ray"
        raise ValueError(f"workers=ray needs ray on all machines: {fix}") from None

    ray.init(runtime_env={"working_dir": str(ROOT), "excludes": NOT_SENT}, log_to_driver=False)
    try:
        evaluate = ray.remote(max_retries=MAX_TRIES)(_evaluated_elsewhere)
        pending = {}
        for point, words in points.items():
            results_folder = Path(raw_values(words)["results"])
            pending[evaluate.remote(list(words), read_files(results_folder))] = point, results_folder

        while pending:
            [task], _ = ray.wait(list(pending))
            point, results_folder = pending.pop(task)
            try:
                outcome = ray.get(task)
            except ray.exceptions.RayError as error:
                raise PeerLost(f"the worker of point {point} was lost: {one_line(str(error))}") from error
            write_files(results_folder, outcome.files)
            yield point, outcome.exit_code
    finally:
        ray.shutdown()


def _evaluated_elsewhere(words: Sequence[str], earlier_files: Mapping[str, bytes]) -> PointOutcome:
    """Evaluate one point in a temporary folder of a worker, after its earlier results; return all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results"
        write_files(folder, earlier_files)
        worker_words = [*(word for word in words if not word.startswith("results=")), f"results={folder}"]
        exit_code = _with_log(worker_words)
        return PointOutcome(exit_code, read_files(folder))


def read_files(results_folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a results folder, by their relative paths."""
    paths = [path for path in sorted(results_folder.rglob("*")) if path.is_file()]
    return {path.relative_to(results_folder).as_posix(): path.read_bytes() for path in paths}


def write_files(results_folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a results folder, each atomically; raises ValueError for a path that leaves it."""
    root = results_folder.resolve()
    for name, content in files.items():
        path = (root / name).resolve()
        if root not in path.parents:
            raise ValueError(f"a worker sent the file {name!r}, which does not belong into {results_folder}")
        replace(path, content)
