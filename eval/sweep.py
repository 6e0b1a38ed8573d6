"""Sweeps and ablations: the evaluation at each value of a setting that papers vary, then a table and a plot.

Usage: python3 -m scripts.sweep NAME [PRESET] [key=value ...]. Every key of run_eval.sh may be given, except those that
the sweep varies; results=DIR holds a folder for each point (default: results/sweeps/NAME), and the same command
continues an interrupted sweep. workers=N evaluates N points at once; seed=N also draws the clusters of random_profiles.
"""
from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping, NamedTuple, Sequence, TextIO

from config import files, profiles
from config.console import EXIT_WRONG, command, say
from config.dialect import as_keys
from config.keys import HELP, HELP_WORDS, check_name, raw_values
from config.presets import HOME
from config.schema.untrusted import one_line
from eval import contest, metrics
from eval.points import evaluate_point, evaluate_points, point_dir, words_by_point, workers_of
from eval.results_index import NoAnswers, ResultsFolder, provenance, read
from eval.summary import MEAN, SUMMARY, figures, flat, summary
from eval.tables import LABEL_WIDTH, in_columns, markdown, number, save

# A draft head alone, with trees that grow as in the papers.
QUICK = {"sets": "mt_bench,gsm8k", "temperatures": "0", "questions": "5", "max_new_tokens": "64", "draft": "eagle",
         "baseline_draft": ""}
COLUMNS = ("sweep", "point", *SUMMARY)
ResultsByPoint = Mapping[str, ResultsFolder]  # the results at each point of a sweep
Speeds = Sequence[metrics.Interval]  # one for each point


class Sweep(NamedTuple):
    """A sweep: `points` maps names to the keys, as {"depth": "3"}, that each point adds to those of `base`."""

    about: str
    axis: str
    points: Mapping[str, Mapping[str, str]]
    methods: str = "naive,pipedec,continuous"
    profile: str = ""  # if not the default
    clusters: Mapping[str, profiles.Profile] = {}  # drawn at random, by the `profile` of points
    is_contest: bool = False  # whether its table says who wins, at each point

    @property
    def base(self) -> dict[str, str]:
        """The keys of all points."""
        cluster = {"profile": self.profile} if self.profile else {}
        shared_keys = contest.KEYS if self.is_contest else QUICK
        return {**shared_keys, **cluster, "methods": self.methods}

    @property
    def numbers(self) -> list[float]:
        """The points as numbers; empty unless all of them are numbers."""
        try:
            return [float(name) for name in self.points]
        except ValueError:
            return []


def _values(values: Iterable[Any], *key_names: str) -> dict[str, dict[str, str]]:
    """Return a point for each value, which all the keys get."""
    return {str(value): dict.fromkeys(key_names, str(value)) for value in values}


def _without(parts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return a point for each name, without these parts."""
    return {name: {"ablate": left_out} for name, left_out in parts.items()}


def _random_contest(seed: int) -> Sweep:
    """Return the contest on clusters that are drawn at random with this seed."""
    clusters = {f"cluster{number}.json": cluster for number, cluster in enumerate(contest.draw(seed), 1)}
    points = contest.points({name: len(cluster.factors) for name, cluster in clusters.items()})
    return Sweep("all methods on clusters drawn at random", "", points, contest.METHODS, "", clusters, is_contest=True)


FLOWSPEC, TREE_METHODS = "continuous", "serial,naive,pruned,continuous"
NO_GROWTH = "expand,none_expand"
RANDOM = "random_profiles"
DEPTHS = range(3, 9)
SWEEPS = {
    "ablation": Sweep(
        "FlowSpec without each of its parts, and without all of them", "left out",
        _without({"nothing": "", "score order": "score_order", "pruning": "prune", "expansion": NO_GROWTH,
                  "all": f"score_order,prune,{NO_GROWTH}"}), FLOWSPEC),
    "score_order": Sweep(
        "score-ordered segments, or guesses as they were drafted", "best guesses first",
        _without({"on": "", "off": "score_order"}), "naive,pruned,continuous"),
    "prune": Sweep(
        "pruning of rows that died on their way", "pruning",
        _without({"on": "", "off": "prune"}), "pruned,pipedec,continuous"),
    "expand": Sweep(
        "expansion of the tree: after a hit, in a turn without news, both, neither", "the tree grows",
        _without({"never": NO_GROWTH, "in turns without news": "expand", "after a hit": "none_expand", "both": ""}),
        FLOWSPEC),
    "init_total_token": Sweep(
        "guesses in the tree after a miss", "guesses in the first tree",
        _values((16, 32, 48, 64, 80, 112), "init_total_token"), TREE_METHODS),
    "depth": Sweep(
        "depth of the trees: the diagonal of the paper's grid", "levels after the first, of both trees",
        _values(DEPTHS, "init_depth", "expand_depth"), FLOWSPEC),
    "init_depth": Sweep(
        "depth of the tree after a miss: a column of the paper's grid", "levels of the first tree",
        _values(DEPTHS, "init_depth"), FLOWSPEC),
    "expand_depth": Sweep(
        "depth of the tree after a hit: a row of the paper's grid", "levels of the later trees",
        _values(DEPTHS, "expand_depth"), FLOWSPEC),
    "segment": Sweep(
        "rows in a segment", "rows in a segment, at most",
        _values((8, 16, 24, 32, 48, 64), "subseq_token"), "pruned,continuous"),
    "stages": Sweep(
        "the same model over more stages", "stages",
        _values((1, 2, 4, 8), "stages"), "serial,naive,pipedec,continuous"),
    "bandwidth": Sweep(
        "bandwidth of the wires", "Mbit/s", _values((125, 250, 500, 1000), "wires")),
    "latency": Sweep(
        "latency of the wires between fast devices: from where on tensor parallelism wins",
        "milliseconds of a message", {f"{ms}": {"wires": f",{ms}"} for ms in (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)},
        "naive,tp,galaxy,continuous", profile="server"),
    "temperature": Sweep(
        "sampling", "temperature", _values((0, 0.25, 0.5, 0.75, 1), "temperatures")),
    "profiles": Sweep(
        "all methods on every cluster, with 1, 4 and 8 requests at once", "", contest.named_points(), contest.METHODS,
        is_contest=True),
    RANDOM: _random_contest(0),
}


def write(folder: Path, sweep_name: str, sweep: Sweep, screen: TextIO | None = None) -> Path:
    """Write sweep.csv, sweep.md and sweep.png of the points that have answers; return the path of sweep.md.

    The table goes to `screen`, too.

    Raise NoAnswers without any answers, ValueError for an invalid line.
    """
    results_by_point = {}
    for point in sweep.points:
        with suppress(NoAnswers):
            results_by_point[point] = read(point_dir(folder, point))
    if not results_by_point:
        raise NoAnswers(f"{folder} has no answers at any point of this sweep: start it again")

    # figures
    save(folder / "sweep.csv", COLUMNS, rows(sweep_name, results_by_point))
    answers = [answer for results in results_by_point.values() for answer in results.answers]
    title = f"{sweep.about[0].upper()}{sweep.about[1:]} ({provenance(answers)})"
    if sweep.is_contest:
        rows_of_contest = contest.judge(results_by_point)
        save(folder / "contest.csv", contest.COLUMNS, rows_of_contest)
        caption, heading, cells, plot = contest.CAPTION, [*contest.HEADING], contest.cells(rows_of_contest), ""
    else:
        speeds = _speeds(results_by_point, sweep.points)
        caption = f"Tokens per second, the {MEAN} over the data sets; columns: {sweep.axis}.\n"
        heading = ["method", *sweep.points]
        cells = [[label, *(number(speed.value) for speed in line)]
                 for label, line in speeds.items()]
        plot = "![sweep.png](sweep.png)\n"

    # page
    missing_points = [point for point in sweep.points if point not in results_by_point]
    missing_text = f"\nMissing: {', '.join(missing_points)}.\n" if missing_points else ""
    page = [f"# {title}\n", caption, *markdown(heading, cells), missing_text, plot]

    report_path = folder / "sweep.md"
    files.write(report_path, "\n".join(page), files.SPACE_REMEDY)

    if screen:
        screen_table = in_columns(heading, cells, name_width=LABEL_WIDTH)
        print("\n".join(["", title, caption, screen_table, missing_text]), file=screen)

    if not plot:
        return report_path
    with suppress(ImportError):  # without matplotlib there is only the table
        _plot(folder / "sweep.png", sweep, speeds, title)
    return report_path


def _plot(plot_path: Path, sweep: Sweep,
          speeds: Mapping[str, Speeds], title: str) -> None:
    from eval import plots

    series = [plots.Series(*line) for line in speeds.items()]
    axis_labels = sweep.axis, "tokens/s"
    if sweep.numbers:
        plots.lines(plot_path, series, sweep.numbers, title, axis_labels)
    else:
        plots.bars(plot_path, series, list(sweep.points), title, axis_labels)


def rows(sweep_name: str, results_by_point: ResultsByPoint) -> list[dict[str, Any]]:
    """Return the summary of every point, as rows of sweep.csv.

    `equal` compares with the first answer to the same question in the whole sweep, preferably one of ar, since no
    switch and no method changes a text.
    """
    reference_answers = [answer for results in results_by_point.values() for answer in results.answers]
    reference_answers.reverse()  # the last of a trial counts
    reference_answers.sort(key=lambda answer: answer["method"] == "ar")

    csv_rows = []
    for point, results in results_by_point.items():
        for row in summary(results).values():
            if row["set"] != MEAN:
                equal_text = metrics.equality(row["answers"], reference_answers)
                csv_rows.append({"sweep": sweep_name, "point": point, **flat(row), "equal": equal_text})

    return csv_rows


def _speeds(results_by_point: ResultsByPoint, all_points: Collection[str]) -> dict[str, Speeds]:
    """Return the xi at each point: a line for each contender, and for each temperature if a point has several."""
    speeds_by_label: dict[str, dict[str, metrics.Interval]] = {}
    for point, results in results_by_point.items():
        has_temperatures = len(results.temperatures) > 1
        for contender, temperature in itertools.product(results.contenders, results.temperatures):
            label = results.label(contender)
            row_label = f"{label} t={temperature:g}" if has_temperatures else label
            speed_by_point = speeds_by_label.setdefault(row_label, dict.fromkeys(all_points, metrics.NO_INTERVAL))
            speed_by_point[point] = figures(results, contender, results.averaged_sets, temperature)["xi"]

    return {label: list(speed_by_point.values()) for label, speed_by_point in speeds_by_label.items()}


# --- the command ------------------------------------------------------------------------------------------------------

def commands(name: str, sweep: Sweep,
             argv: Sequence[str]) -> tuple[Path, dict[str, list[str]]]:
    """Return the sweep's folder, and the arguments of each point's evaluation. Raise ValueError for invalid ones."""
    typed_keys = raw_values(argv)
    varied_keys = {key for keys in sweep.points.values() for key in keys} - {"questions"}
    for key in varied_keys & typed_keys.keys():
        raise ValueError(f"{key} is what {name} varies: leave {key}={typed_keys[key]} out")

    results_dir = typed_keys.get("results", f"{HOME / 'results' / 'sweeps' / name}")
    if not results_dir.strip():
        raise ValueError("results is empty: name a folder after results=")

    folder = Path(results_dir).expanduser().absolute()
    keys_by_point = {point: {**sweep.base, **keys} for point, keys in sweep.points.items()}
    typed_questions = typed_keys.get("questions", "")
    if sweep.is_contest and typed_questions.isdecimal():
        argv = [word for word in argv if not word.startswith("questions=")]
        for keys in keys_by_point.values():  # as many as run at once, even if fewer are typed
            keys["questions"] = f"{max(int(typed_questions), int(keys['concurrency']))}"

    for name, cluster in sweep.clusters.items():
        profiles.write(f"{folder / name}", cluster)
    for keys in keys_by_point.values():
        if keys.get("profile") in sweep.clusters:
            keys["profile"] = f"{folder / keys['profile']}"
    return folder, words_by_point(keys_by_point, argv, folder)


@command
def main(words: Sequence[str]) -> int:
    """Evaluate point by point up to the first that fails, and show the results; return the exit code."""
    sweep_name, argv = "".join(words[:1]), as_keys(words[1:])
    if sweep_name in HELP_WORDS:
        print(__doc__)
        print("\n".join(f"  {key:<18}{sweep.about}: {', '.join(sweep.points)}" for key, sweep in SWEEPS.items()))
        return 0

    check_name(sweep_name, SWEEPS, "sweep")
    sweep = SWEEPS[sweep_name]
    seed = raw_values(argv).get("seed", "")
    if sweep_name == RANDOM and seed.isdecimal():
        sweep = _random_contest(int(seed))
    if not set(HELP).isdisjoint(argv):
        print(f"{sweep_name}: {sweep.about}: {', '.join(sweep.points)}\n", flush=True)
        return evaluate_point(argv)

    workers, argv = workers_of(argv)
    folder, point_words = commands(sweep_name, sweep, argv)
    exit_code = evaluate_points(sweep_name, point_words, workers)

    try:
        report_path = write(folder, sweep_name, sweep, sys.stdout)
        print(f"table and plot: {report_path}")
    except (ValueError, OSError) as error:
        is_reported = exit_code and isinstance(error, NoAnswers)  # by the evaluation that failed
        if not is_reported:
            say(one_line(str(error)))
        exit_code = exit_code or EXIT_WRONG

    return exit_code
