"""The tables of the FlowSpec paper beside those of this project.

Usage: bash run_eval.sh paper [table|bandwidth|depths] [key=value ...]

table      xi and SR of each method on six data sets, at temperature 0 and 1, for 7B and 13B models
bandwidth  xi on MT-bench with wires of 125 to 1000 Mbit/s
depths     xi on MT-bench for each pair of depths of the first and of later trees, 3 to 8 levels

Our side is simulated: the bundled model with a head of the paper's kind (EAGLE-1) and trees as published, on profiles
of the paper's boards in virtual time, at most 256 tokens an answer, five questions of each set (questions=20: as many
as the paper has, in half an hour with workers=2). All keys of run_eval.sh may be given but those that the tables fix.
The same command continues after an interruption; results=DIR holds the answers (default: results/paper). workers=N
evaluates N parts of a table at once.
"""
from __future__ import annotations

from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Dict, Iterable, Iterator, Mapping, NamedTuple, Sequence

from config import files
from config.console import command
from config.dialect import as_keys
from config.keys import HELP_WORDS, check_name, raw_values
from config.presets import HOME
from config.values import listed
from eval.flowspec.published import PROFILES, PublishedCell, bandwidth_table, depth_table, known_reasons, main_table
from eval.keys import SETS, Contender
from eval.points import evaluate_points, words_by_point, workers_of
from eval.results_index import ResultsFolder, provenance, read
from eval.summary import figures
from eval.tables import markdown, number, save

HEAD = "eagle:toy/eagle"  # of the paper's kind
LARGEST_DIFFERENCE = 0.1  # of xi or SR, relative to the paper's, that needs no reason
FIXED = {"drafts": HEAD, "baseline_draft": "", "max_new_tokens": "256", "questions": "5", "time": "virtual"}
TREES = {"init_depth": "5", "expand_depth": "5"}  # with which the main table was published
METHODS = {"7b": "naive,tp,galaxy,pipedec,continuous", "13b": "naive,pipedec,continuous"}
DEPTHS = range(3, 9)
DEPTH_PAIRS = list(product(DEPTHS, DEPTHS))  # of the first tree, and of later ones
CSV_COLUMNS = ("model", "temperature", "method", "set", "xi_paper", "xi_here", "sr_paper", "sr_here")
PINNED = ("methods", "drafts", "draft", "baseline_draft", "profile", "results")  # keys that a user may not give
KeysByPoint = Dict[str, Dict[str, str]]  # name of a results folder -> the keys of its evaluation


class CellFigures(NamedTuple):
    """One cell of our side: tokens/s, and the speed-up over naive; NaN where there are no answers."""

    xi: float
    sr: float


OurFigures = Mapping[PublishedCell, CellFigures]
XiByMethod = Mapping[str, Sequence[Sequence[float]]]  # of the paper, and of this project


# --- the main table ---------------------------------------------------------------------------------------------------

def table_points() -> KeysByPoint:
    return {size: {**TREES, "profile": profile, "methods": METHODS[size], "temperatures": "0,1"}
            for size, profile in PROFILES.items()}


def show_table(results_folder: Path) -> Iterator[str]:
    """Yield the lines of the comparison, and write paper.csv."""
    results = {size: read(results_folder / size) for size in PROFILES}
    cells = main_table()
    our_figures = {cell: _figures_of(results[cell.size], cell.method, cell.data_set, cell.temperature)
                   for cell in cells}
    _save(results_folder / "paper.csv", our_figures)

    for temperature in (0.0, 1.0):
        for model in dict.fromkeys(cell.model for cell in cells):
            of_model = [cell for cell in cells if (cell.model, cell.temperature) == (model, temperature)]
            size, of_methods = of_model[0].size, _xi_by_method(of_model, our_figures)
            origin = provenance(results[size].answers)
            yield f"## {model}, temperature {temperature:g} (paper: measured; here: {origin}, one model for {size})\n"
            yield from markdown(("method", "", *listed(SETS), "mean", "SR"), _model_rows(of_methods))
            yield ""
            yield from _explanations(size, of_methods)
            yield ""


def _figures_of(results: ResultsFolder, method: str, data_set: str, temperature: float) -> CellFigures:
    row = figures(results, Contender(method, HEAD), [data_set], temperature)
    return CellFigures(round(row["xi"].value, 2), round(row["sr_naive"].value, 2))


def _save(path: Path, our_figures: OurFigures) -> None:
    csv_rows = []
    for cell, (xi_here, sr_here) in our_figures.items():
        values = cell.model, cell.temperature, cell.method, cell.data_set, cell.xi, xi_here, cell.sr, sr_here
        csv_rows.append(dict(zip(CSV_COLUMNS, values)))
    save(path, CSV_COLUMNS, csv_rows)


def _xi_by_method(cells: Sequence[PublishedCell], our_figures: OurFigures) -> XiByMethod:
    """Return xi of the paper and of this project by method: a figure for each set, then their mean."""
    of_methods: dict[str, tuple[list[float], list[float]]] = {}
    for cell in cells:
        xi_paper, xi_here = of_methods.setdefault(cell.method, ([], []))
        xi_paper.append(cell.xi)
        xi_here.append(our_figures[cell].xi)

    for xi_of_side in chain.from_iterable(of_methods.values()):
        xi_of_side.append(mean(xi_of_side))
    return of_methods


def _model_rows(of_methods: XiByMethod) -> Iterator[Sequence[str]]:
    for method, both_sides in of_methods.items():
        for label, side, xi, naive_xi in zip((method, ""), ("paper", "here"), both_sides, of_methods["naive"]):
            yield label, side, *map(number, xi), number(xi[-1] / naive_xi[-1])


def _explanations(size: str, of_methods: XiByMethod) -> Iterator[str]:
    """Yield a line for each method whose mean xi or SR differs by more than `LARGEST_DIFFERENCE`, with the reason."""
    naive_paper, naive_here = of_methods["naive"]
    for method, (xi_paper, xi_here) in of_methods.items():
        xi_change = xi_here[-1] / xi_paper[-1] - 1
        sr_change = (1 + xi_change) / (naive_here[-1] / naive_paper[-1]) - 1
        if max(abs(xi_change), abs(sr_change)) > LARGEST_DIFFERENCE:
            reason = known_reasons().get((size, method), "no reason known")
            yield f"- {method}: xi {xi_change:+.0%}, SR {sr_change:+.0%}: {reason}"


# --- sweeps -----------------------------------------------------------------------------------------------------------

SWEPT = {"profile": PROFILES["7b"], "temperatures": "0", "sets": "mt_bench"}


def bandwidth_points() -> KeysByPoint:
    rates = dict.fromkeys(mbps for _, mbps in bandwidth_table())
    return {f"bandwidth-{mbps}": {**TREES, **SWEPT, "methods": METHODS["7b"], "wires": mbps} for mbps in rates}


def show_bandwidth(results_folder: Path) -> Iterator[str]:
    published = bandwidth_table()
    rates = list(dict.fromkeys(mbps for _, mbps in published))
    results = {mbps: read(results_folder / f"bandwidth-{mbps}") for mbps in rates}

    yield f"## xi on MT-bench by Mbit/s (paper: LLaMA-2-Chat 7B; here: {provenance(results[rates[0]].answers)})\n"
    table_rows = []
    for method in listed(METHODS["7b"]):
        table_rows.append((method, "paper", *(number(published[method, mbps]) for mbps in rates)))
        xi_here = (_figures_of(results[mbps], method, "mt_bench", 0.0).xi for mbps in rates)
        table_rows.append(("", "here", *map(number, xi_here)))
    yield from markdown(("method", "", *rates), table_rows)


def depth_points() -> KeysByPoint:
    swept_keys = {**SWEPT, "methods": "continuous"}
    return {f"depths-{first_depth}-{later_depth}":
            {**swept_keys, "init_depth": f"{first_depth}", "expand_depth": f"{later_depth}"}
            for first_depth, later_depth in DEPTH_PAIRS}


def show_depths(results_folder: Path) -> Iterator[str]:
    xi_here = {}
    for first_depth, later_depth in DEPTH_PAIRS:
        results = read(results_folder / f"depths-{first_depth}-{later_depth}")
        xi_here[first_depth, later_depth] = _figures_of(results, "continuous", "mt_bench", 0.0).xi

    origin = provenance(results.answers)
    yield from _depth_grid(f"continuous here ({origin})", xi_here)
    for model in ("llama2-7b", "vicuna-7b"):
        yield from _depth_grid(f"FlowSpec in the paper, {model}", depth_table(model))


def _depth_grid(title: str, xi: Mapping[tuple[int, int], float]) -> Iterator[str]:
    """Yield a grid: rows are `init_depth`, columns `expand_depth`; the best cell is bold."""
    best_pair = max(xi, key=xi.__getitem__)
    yield f"## xi on MT-bench by depth: {title}; best: init_depth={best_pair[0]}, expand_depth={best_pair[1]}\n"
    shown_cells = {pair: number(value) for pair, value in xi.items()}
    shown_cells[best_pair] = f"**{shown_cells[best_pair]}**"
    table_rows = [(f"{first_depth}", *(shown_cells[first_depth, later_depth] for later_depth in DEPTHS))
                  for first_depth in DEPTHS]
    yield from markdown(("init\\expand", *map(str, DEPTHS)), table_rows)
    yield ""


# --- the command ------------------------------------------------------------------------------------------------------

SUBJECTS = {"table": (table_points, show_table), "bandwidth": (bandwidth_points, show_bandwidth),
            "depths": (depth_points, show_depths)}


def evaluations(points: KeysByPoint, argv: Sequence[str], results_folder: Path) -> dict[str, list[str]]:
    """Return the arguments of each evaluation: typed keys in place of defaults. Raises ValueError for pinned ones."""
    raw_keys = raw_values(argv)
    varied_keys = {name for keys in points.values() for name in keys} - {"sets", "temperatures"}
    for name in (*PINNED[:-1], *varied_keys):
        if name in raw_keys:
            raise ValueError(f"{name} is fixed by the paper's table: leave {name}={raw_keys[name]} out")

    keys_by_point = {point: {**FIXED, **keys} for point, keys in points.items()}
    return words_by_point(keys_by_point, argv, results_folder)


def show_page(lines: Iterable[str], path: Path) -> None:
    """Print the lines, and write them into a page."""
    page = "\n".join(lines)
    files.write(path, page + "\n", files.SPACE_REMEDY)
    print(f"\n{page}\npage: {path}")


@command
def main(argv: Sequence[str]) -> int:
    """Execute `bash run_eval.sh paper`; return the exit code."""
    if any(word in HELP_WORDS[1:] for word in argv):
        print(__doc__)
        return 0

    argv = as_keys(argv)
    subject, *typed_words = argv if argv and "=" not in argv[0] else ["table", *argv]
    check_name(subject, SUBJECTS, "table of the paper")
    points_of, show = SUBJECTS[subject]
    results_folder = Path(raw_values(typed_words).get("results") or HOME / "results" / "paper").expanduser().absolute()

    workers, typed_words = workers_of(typed_words)
    exit_code = evaluate_points("paper", evaluations(points_of(), typed_words, results_folder), workers)
    if exit_code:
        return exit_code
    show_page(show(results_folder), results_folder / f"{subject}.md")
    return 0
