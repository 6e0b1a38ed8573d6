"""The sweeps: what the papers vary one thing at a time, and the table and plot of the figures that come of it.

They know nothing about how a point is evaluated: each is a results folder of its own, and those that are there count.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from config import files
from eval import metrics
from eval.summary import MEAN, SUMMARY, Found, NoAnswers, means, provenance, read, save, summary

QUICK = ("sets=mt_bench,gsm8k", "temperatures=0", "question_end=5", "max_new_tokens=64")
RIVALS = "methods=naive,pipedec,continuous"
COLUMNS = ("sweep", "point", *SUMMARY)


@dataclass(frozen=True)
class Sweep:
    """What is varied: `points` are names with the keys that each of them sets beside those of `base`."""

    about: str
    axis: str
    points: Mapping[str, Sequence[str]]
    base: Sequence[str] = field(default=(*QUICK, RIVALS))

    @property
    def numbers(self) -> list[float]:
        """The points, if they are numbers."""
        try:
            return [float(name) for name in self.points]
        except ValueError:
            return []


def _of(keys: Sequence[str], values: Iterable[Any]) -> dict[str, list[str]]:
    """A point for each value, which all the keys get."""
    return {str(value): [f"{key}={value}" for key in keys] for value in values}


def _methods(names: str) -> tuple[str, ...]:
    return (*QUICK, f"methods={names}")


OWN, TREES = _methods("continuous"), _methods("serial,naive,pruned,continuous")
NO_GROWTH = ("expand=false", "none_expand=false")
SWEEPS = {
    "ablation": Sweep("FlowSpec without each of its parts, and without all of them", "left out", {
        "nothing": (), "score order": ("score_order=false",), "pruning": ("prune=false",), "expansion": NO_GROWTH,
        "all": ("score_order=false", "prune=false", *NO_GROWTH)}, OWN),
    "score_order": Sweep("score-ordered segments, or guesses as they were drafted", "best guesses first",
                         {"on": (), "off": ("score_order=false",)}, _methods("naive,pruned,continuous")),
    "prune": Sweep("pruning of what died on its way", "pruning", {"on": (), "off": ("prune=false",)},
                   _methods("pruned,pipedec,continuous")),
    "expand": Sweep("expansion of the tree: after a hit, in a turn without news, both, neither", "the tree grows", {
        "never": NO_GROWTH, "in turns without news": ("expand=false",), "after a hit": ("none_expand=false",),
        "both": ()}, OWN),
    "init_total_token": Sweep("guesses in the tree after a miss", "guesses in the first tree",
                              _of(["init_total_token"], (16, 32, 48, 64, 80, 112)), TREES),
    "depth": Sweep("depth of the trees: the diagonal of the paper's grid", "levels after the first, of both trees",
                   _of(["init_depth", "expand_depth"], range(3, 9)), OWN),
    "init_depth": Sweep("depth of the tree after a miss: a column of the paper's grid", "levels of the first tree",
                        _of(["init_depth"], range(3, 9)), OWN),
    "expand_depth": Sweep("depth of the tree after a hit: a row of the paper's grid", "levels of the later trees",
                          _of(["expand_depth"], range(3, 9)), OWN),
    "segment": Sweep("rows in a segment", "rows in a segment, at most", _of(
        ["init_subseq_token", "expand_subseq_token"], (8, 16, 24, 32, 48, 64)), _methods("pruned,continuous")),
    "stages": Sweep("the same model over more stages", "stages", _of(["stages"], (1, 2, 4, 8)),
                    _methods("serial,naive,pipedec,continuous")),
    "bandwidth": Sweep("bandwidth of the wires", "Mbit/s", _of(["rate_mbps"], (125, 250, 500, 1000))),
    "latency": Sweep("latency of the wires between fast devices: from where on tensor parallelism wins",
                     "milliseconds of a message", _of(["delay_ms"], (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)),
                     (*_methods("naive,tp,galaxy,continuous"), "profile=server", "slowdown=20")),
    "temperature": Sweep("sampling", "temperature", _of(["temperatures"], (0, 0.25, 0.5, 0.75, 1))),
}


def collect(folder: Path, sweep: Sweep) -> dict[str, Found]:
    """The points that have answers. Raises ValueError if there is none."""
    found = {}
    for name in sweep.points:
        try:
            found[name] = read(place(folder, name))
        except NoAnswers:
            continue
    if not found:
        raise NoAnswers(f"{folder} has no answers at any point of this sweep: start it once more")
    return found


def place(folder: Path, point: str) -> Path:
    """The results folder of a point."""
    return folder / point.replace(" ", "_")


def write(folder: Path, name: str, sweep: Sweep) -> Path:
    """sweep.csv, sweep.md and sweep.png of what is there; the path of the table. Raises ValueError if nothing is."""
    found = collect(folder, sweep)
    save(folder / "sweep.csv", COLUMNS, rows(name, found))
    where = provenance([answer for one in found.values() for group in one.groups.values() for answer in group])
    title = f"{sweep.about[0].upper()}{sweep.about[1:]} ({where})"
    lines = _lines(found, list(sweep.points))
    path = folder / "sweep.md"
    files.write(path, _table(title, sweep, lines, found), files.ROOM)
    try:
        from eval import plots
    except ImportError:
        return path
    series, plot = [plots.Series(*line) for line in lines.items()], folder / "sweep.png"
    if sweep.numbers:
        plots.lines(plot, series, sweep.numbers, title, (sweep.axis, "tokens/s"))
    else:
        plots.bars(plot, series, list(sweep.points), title, (sweep.axis, "tokens/s"))
    return path


def rows(name: str, found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """The summary of every point. `equal` compares with the first answer to the same question in the whole sweep, one
    of ar if there is any: no switch and no method changes a text."""
    every = [(method != "ar", answer) for one in found.values() for (method, _, _), group in one.groups.items()
             for answer in group]
    first: dict[Any, metrics.Answer] = {}
    for _, answer in sorted(every, key=lambda pair: pair[0]):
        first.setdefault(metrics.trial_of(answer), answer)
    return [{"sweep": name, "point": point, **row,
             "equal": metrics.equality(one.of(row["method"], row["set"], row["temperature"]), first.values())}
            for point, one in found.items() for row in summary(one)]


def _lines(found: Mapping[str, Found], points: Sequence[str]) -> dict[str, list[metrics.Interval]]:
    """xi at each point, a line for each method, and temperature if there are several at a point."""
    nothing = metrics.Interval(metrics.NAN, metrics.NAN, metrics.NAN)
    lines: dict[str, list[metrics.Interval]] = {}
    for i, point in enumerate(points):
        for method in found[point].methods if point in found else ():
            for temperature in found[point].temperatures:
                several = len(found[point].temperatures) > 1
                line = lines.setdefault(f"{method} t={temperature:g}" if several else method, [nothing] * len(points))
                line[i] = means(found[point], method, temperature)["xi"]
    return lines


def _table(title: str, sweep: Sweep, lines: Mapping[str, Sequence[metrics.Interval]], there: Iterable[str]) -> str:
    points = list(sweep.points)
    head = [f"# {title}\n", f"Tokens per second, the {MEAN} over the data sets; columns: {sweep.axis}.\n",
            f"| method | {' | '.join(points)} |", f"|{'---|' * (len(points) + 1)}"]
    body = [f"| {method} | {' | '.join('–' if v.value != v.value else f'{v.value:.2f}' for v in line)} |"
            for method, line in lines.items()]
    gaps = [point for point in points if point not in there]
    missing = f"\nMissing: {', '.join(gaps)}.\n" if gaps else ""
    return "\n".join([*head, *body, missing, "![sweep.png](sweep.png)\n"])
