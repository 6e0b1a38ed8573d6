"""The sweeps: hyperparameters that the papers vary one at a time, and the table and plot of the figures at each point.

They know nothing about how a point is evaluated: each is a results folder of its own, and those that are there count.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, Sequence

from config import files
from eval import metrics
from eval.found import GROUP, Found, NoAnswers, provenance, read
from eval.summary import MEAN, SUMMARY, means, number, save, summary

QUICK = ("sets=mt_bench,gsm8k", "temperatures=0", "question_end=5", "max_new_tokens=64")
RIVALS = "methods=naive,pipedec,continuous"
COLUMNS = ("sweep", "point", *SUMMARY)
Points = Mapping[str, Found]  # what there is at each point of a sweep
Speeds = Sequence[metrics.Interval]  # one for each point


@dataclass(frozen=True)
class Sweep:
    """What is varied: `points` are names with the words, as in depth=3, that each of them adds to those of `base`."""

    about: str
    axis: str
    points: Mapping[str, Sequence[str]]
    base: Sequence[str] = field(default=(*QUICK, RIVALS))

    @property
    def numbers(self) -> list[float]:
        """The points if all of them are numbers, else nothing."""
        try:
            return [float(name) for name in self.points]
        except ValueError:
            return []


def _values(values: Iterable[Any], *keys: str) -> dict[str, list[str]]:
    """A point for each value, which all the keys get."""
    return {str(value): [f"{key}={value}" for key in keys] for value in values}


def _methods(names: str) -> tuple[str, ...]:
    return (*QUICK, f"methods={names}")


OWN, TREES = _methods("continuous"), _methods("serial,naive,pruned,continuous")
NO_ORDER, NO_PRUNING = "score_order=false", "prune=false"
NO_GROWTH = ("expand=false", "none_expand=false")
DEPTHS = range(3, 9)
SWEEPS = {
    "ablation": Sweep(
        "FlowSpec without each of its parts, and without all of them", "left out",
        {"nothing": (), "score order": (NO_ORDER,), "pruning": (NO_PRUNING,), "expansion": NO_GROWTH,
         "all": (NO_ORDER, NO_PRUNING, *NO_GROWTH)}, OWN),
    "score_order": Sweep(
        "score-ordered segments, or guesses as they were drafted", "best guesses first",
        {"on": (), "off": (NO_ORDER,)}, _methods("naive,pruned,continuous")),
    "prune": Sweep(
        "pruning of what died on its way", "pruning",
        {"on": (), "off": (NO_PRUNING,)}, _methods("pruned,pipedec,continuous")),
    "expand": Sweep(
        "expansion of the tree: after a hit, in a turn without news, both, neither", "the tree grows",
        {"never": NO_GROWTH, "in turns without news": ("expand=false",), "after a hit": ("none_expand=false",),
         "both": ()}, OWN),
    "init_total_token": Sweep(
        "guesses in the tree after a miss", "guesses in the first tree",
        _values((16, 32, 48, 64, 80, 112), "init_total_token"), TREES),
    "depth": Sweep(
        "depth of the trees: the diagonal of the paper's grid", "levels after the first, of both trees",
        _values(DEPTHS, "init_depth", "expand_depth"), OWN),
    "init_depth": Sweep(
        "depth of the tree after a miss: a column of the paper's grid", "levels of the first tree",
        _values(DEPTHS, "init_depth"), OWN),
    "expand_depth": Sweep(
        "depth of the tree after a hit: a row of the paper's grid", "levels of the later trees",
        _values(DEPTHS, "expand_depth"), OWN),
    "segment": Sweep(
        "rows in a segment", "rows in a segment, at most",
        _values((8, 16, 24, 32, 48, 64), "init_subseq_token", "expand_subseq_token"),
        _methods("pruned,continuous")),
    "stages": Sweep(
        "the same model over more stages", "stages",
        _values((1, 2, 4, 8), "stages"), _methods("serial,naive,pipedec,continuous")),
    "bandwidth": Sweep(
        "bandwidth of the wires", "Mbit/s", _values((125, 250, 500, 1000), "rate_mbps")),
    "latency": Sweep(
        "latency of the wires between fast devices: from where on tensor parallelism wins",
        "milliseconds of a message", _values((1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01), "delay_ms"),
        (*_methods("naive,tp,galaxy,continuous"), "profile=server", "slowdown=20")),
    "temperature": Sweep(
        "sampling", "temperature", _values((0, 0.25, 0.5, 0.75, 1), "temperatures")),
}


def collect(folder: Path, sweep: Sweep) -> dict[str, Found]:
    """The results of those points that have answers. Raises NoAnswers without any, ValueError for a spoiled line."""
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
    """Write sweep.csv, sweep.md and sweep.png of what is there; the path of sweep.md. Raises as `collect` does."""
    found = collect(folder, sweep)
    save(folder / "sweep.csv", COLUMNS, rows(name, found))
    where = provenance([answer for point in found.values() for answer in point.answers])
    title = f"{sweep.about[0].upper()}{sweep.about[1:]} ({where})"
    speeds = _speeds(found, sweep.points)
    path = folder / "sweep.md"
    files.write(path, _table(title, sweep, speeds, found), files.ROOM)
    try:
        from eval import plots
    except ImportError:
        return path
    series = [plots.Series(*line) for line in speeds.items()]
    labels = (sweep.axis, "tokens/s")
    if sweep.numbers:
        plots.lines(folder / "sweep.png", series, sweep.numbers, title, labels)
    else:
        plots.bars(folder / "sweep.png", series, list(sweep.points), title, labels)
    return path


def rows(name: str, found: Points) -> list[dict[str, Any]]:
    """The summary of every point, as rows of sweep.csv.

    `equal` compares with the first answer to the same question in the whole sweep, one of ar if there is any: no switch
    and no method changes a text.
    """
    reference = _reference(found).values()
    result = []
    for point, results in found.items():
        for row in summary(results):
            answers = results.groups[tuple(row[key] for key in GROUP)]
            row["equal"] = metrics.equality(answers, reference)
            result.append({"sweep": name, "point": point, **row})
    return result


def _reference(found: Points) -> dict[metrics.Trial, metrics.Answer]:
    """An answer for each trial of a sweep, that of ar if there is one, else the first."""
    first: dict[metrics.Trial, metrics.Answer] = {}
    answers = [answer for point in found.values() for answer in point.answers]
    for answer in sorted(answers, key=lambda answer: answer["method"] != "ar"):
        first.setdefault(metrics.trial_of(answer), answer)
    return first


def _speeds(found: Points, points: Collection[str]) -> dict[str, Speeds]:
    """The xi at each point, a line for each contender, and for each temperature if there are several at a point."""
    nothing = metrics.Interval(metrics.NAN, metrics.NAN, metrics.NAN)
    lines: dict[str, dict[str, metrics.Interval]] = {}
    for point, results in found.items():
        several = len(results.temperatures) > 1
        for contender in results.contenders:
            for temperature in results.temperatures:
                label = results.label(contender)
                name = f"{label} t={temperature:g}" if several else label
                speed = means(results, contender, temperature)["xi"]
                lines.setdefault(name, {})[point] = speed
    complete: dict[str, Speeds] = {}
    for name, line in lines.items():
        complete[name] = [line.get(point, nothing) for point in points]
    return complete


def _table(title: str, sweep: Sweep, speeds: Mapping[str, Speeds], there: Iterable[str]) -> str:
    """The text of sweep.md."""
    points = list(sweep.points)
    head = [f"# {title}\n", f"Tokens per second, the {MEAN} over the data sets; columns: {sweep.axis}.\n",
            f"| method | {' | '.join(points)} |", f"|{'---|' * (len(points) + 1)}"]
    body = []
    for name, line in speeds.items():
        cells = [number(speed.value) for speed in line]
        body.append(f"| {' | '.join([name, *cells])} |")
    gaps = [point for point in points if point not in there]
    missing = f"\nMissing: {', '.join(gaps)}.\n" if gaps else ""
    return "\n".join([*head, *body, missing, "![sweep.png](sweep.png)\n"])
