"""The figures of README.md and docs/ that come from recorded tables: where each stands, and how it is computed.

A claim is a pattern that occurs once in a page; each of its groups is a figure. `make_results` writes the figures, and
a test compares them, so that no page says anything else than its table.
"""
from __future__ import annotations

import csv
import re
from functools import lru_cache, partial, reduce
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

from config.files import SPACE_REMEDY, write
from config.methods import METHODS
from config.presets import ROOT

TOY, SMOLLM2, SMOLLM2_SAMPLED = (f"docs/results/{name}.csv" for name in ("toy", "smollm2-head", "smollm2-sampled"))
BEST_DRAFT, PAPER_HEAD = "eagle+suffix", "eagle:toy/eagle"
CLUSTERS = ("jetson-7b", "lan-1g", "server")


class Claim(NamedTuple):
    """Figures of a page: a regular expression with a group for each of them, and the function that returns them."""

    page: str
    pattern: str
    figures: Callable[[], Sequence[str]]


class Summary:
    """The means over the sets in a summary.csv of an evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open(encoding="utf-8", newline="") as file:
            mean_rows = [row for row in csv.DictReader(file) if row["set"] == "mean"]

        self._rows: dict[tuple[str, str, float], dict[str, str]] = {}
        for row in mean_rows:
            temperature = float(row["temperature"])
            self._rows[row["method"], row["draft"], temperature] = row

    def value(self, method: str, column: str, draft: str = BEST_DRAFT, temperature: float = 0.0) -> float:
        """Return a figure of a method; methods that draft otherwise have one draft only."""
        row = self._rows.get((method, draft, temperature))
        if row is None:
            rows = [row for key, row in self._rows.items() if key[::2] == (method, temperature)]
            if len(rows) != 1:
                raise ValueError(f"{self._path} has no mean of {method} with {draft}: make it again with "
                                 f"bash scripts/make_results.sh {self._path.relative_to(ROOT)}")
            [row] = rows
        return float(row[column])


@lru_cache(maxsize=None)
def summary(path: str) -> Summary:
    """Read a summary.csv in the repository."""
    return Summary(ROOT / path)


# --- claims -----------------------------------------------------------------------------------------------------------

def claims() -> Iterator[Claim]:
    """Yield all claims of the pages."""
    yield from _claims_of_readme()
    yield from _claims_of_results()
    yield from _claims_of_methods()
    yield from _claims_of_requests()


def _claims_of_readme() -> Iterator[Claim]:
    yield Claim("README.md", r"method is \*\*(.*?) times as fast as plain pipelined\s+decoding\*\* on texts of a real "
                r"model, and \*\*(.*?) times\*\*",
                lambda: [f"{summary(path).value('streaming', 'sr_ar'):.1f}" for path in (SMOLLM2, TOY)])
    for method in ("ar", "naive", "pipedec", "continuous", "streaming"):
        yield Claim("README.md", rf"\| `{method}` \|[^|\n]*\| \**(.*?)\** \| \**(.*?)\** \|\n",
                    partial(_readme_cells, method))


def _readme_cells(method: str) -> list[str]:
    """Return tokens per second, and the ratio to `naive` with the same draft, of both models."""
    cells = []
    for path in (SMOLLM2, TOY):
        xi, naive_xi = (summary(path).value(name, "xi") for name in (method, "naive"))
        cells.append(f"{xi:.2f} ({xi / naive_xi:.2f})")
    return cells


def _claims_of_results() -> Iterator[Claim]:
    page = "docs/results.md"

    # SmolLM2
    methods = ("ar", "naive", "serial", "pruned", "pipedec", "continuous", "streaming")
    method_patterns = (rf"\**`{name}`\s+(\S+?)\**" for name in methods)
    yield Claim(page, r"T = 0: " + r",\s+".join(method_patterns) + r"\.\n",
                lambda: [f"{summary(SMOLLM2).value(name, 'xi'):.2f}" for name in methods])
    yield Claim(page, r"on every set: (\S+) times as fast as `ar` \(95 % bounds (\S+) to (\S+)\), (\S+) times as "
                r"`naive`\s+\((\S+) to (\S+)\) and (\S+) times as `serial` \((\S+) to (\S+)\)",
                lambda: [figure for column in ("sr_ar", "sr_naive_same", "sr_serial_same")
                         for figure in _ratio_with_bounds("streaming", column, path=SMOLLM2)])

    order = ("ar", "naive", "serial", "pruned", "continuous", "pipedec", "streaming")
    yield Claim(page, r"all texts equal too:\s+`ar` (\S+), `naive`\s+(\S+), `serial` (\S+), `pruned` (\S+), "
                r"`continuous` (\S+), `pipedec` (\S+), \*\*`streaming` (\S+)\*\*\. That\s+is (\S+) times as fast "
                r"as `ar` \((\S+) to (\S+)\), (\S+) times as `naive`, (\S+) times as `serial`",
                partial(_sampled_figures, order))

    # the toy
    for method in (*methods, "dsi"):
        yield Claim(page, rf"\| {method} \| (.*) \| (.*) \| (.*) \|\n", partial(_means_cells, method))
    yield Claim(page, r"\| naive, `toy/eagle` \| (.*) \| 1.00 \|  \|\n",
                lambda: [f"{summary(TOY).value('naive', 'xi', PAPER_HEAD):.2f}"])
    yield Claim(page, r"on rank 0 `ar` waits for (\S+) of (\S+), `naive` for (\S+) of (\S+),\s+"
                r"`continuous` for (\S+) of (\S+) and `streaming` for (\S+) of (\S+), which drafts for (\S+)\. "
                r".*: (\S+) true\s+rows in flight, each for (\S+) ms", _account_figures)
    yield Claim(page, r"`toy/eagle` alone (\S+) tokens/s, `toy/eagle_deep` (\S+), with `suffix` (\S+), `toy/draft_a` "
                r"with `suffix` (\S+),\s+`suffix` alone (\S+)\.\n",
                _draft_figures)
    yield Claim(page, r"also makes `naive` faster: (\S+) is (\S+) from the draft times (\S+) from the schedule",
                lambda: [_ratio_with_bounds(*names)[0] for names in (
                    ("streaming", "sr_naive"), ("naive", "sr_naive"), ("streaming", "sr_naive_same"))])


def _draft_figures() -> list[str]:
    """Return tokens per second of `streaming` with each draft."""
    drafts = summary("docs/results/drafts.csv")
    names = (PAPER_HEAD, "eagle", BEST_DRAFT, "model:toy/draft_a+suffix", "suffix")
    return [f"{drafts.value('streaming', 'xi', name):.2f}" for name in names]


def _ratio_with_bounds(method: str, column: str, path: str = TOY, temperature: float = 0.0) -> list[str]:
    """Return a ratio, and its bounds at 95 % confidence."""
    columns = (f"{column}{bound}" for bound in ("", "_low", "_high"))
    return [f"{summary(path).value(method, name, temperature=temperature):.2f}" for name in columns]


def _sampled_figures(methods: Sequence[str]) -> list[str]:
    """Return tokens per second with SmolLM2 at temperature 1, and the ratios of `streaming`, the first with bounds."""
    sampled = summary(SMOLLM2_SAMPLED)
    speeds = [sampled.value(name, "xi", temperature=1.0) for name in methods]
    over_ar, over_naive, over_serial = (_ratio_with_bounds("streaming", column, SMOLLM2_SAMPLED, 1.0)
                                        for column in ("sr_ar", "sr_naive_same", "sr_serial_same"))
    return [*(f"{speed:.2f}" for speed in speeds), *over_ar, over_naive[0], over_serial[0]]


def _means_cells(method: str) -> list[str]:
    """Return tokens per second, and the ratios to `naive` with the paper's head and with the same draft."""
    xi, naive_xi = (summary(TOY).value(name, "xi") for name in (method, "naive"))
    ratio, low, high = _ratio_with_bounds(method, "sr_naive")

    if method in ("ar", "naive"):  # the former has no draft, the latter is compared with itself
        same_draft = f"{xi / naive_xi:.2f}"
    else:
        same_ratio, same_low, same_high = _ratio_with_bounds(method, "sr_naive_same")
        same_draft = f"{same_ratio}, {same_low}–{same_high}"
    return [f"{xi:.2f}", f"{ratio}, {low}–{high}", same_draft]


def _account_figures() -> list[str]:
    """Return milliseconds of a token on rank 0, and the rows of `streaming` in flight with the time of each."""
    account = summary("docs/results/toy-account.csv")
    figures: list[str] = []
    for method, digits in (("ar", 0), ("naive", 0), ("continuous", 0), ("streaming", 1)):
        waiting, whole = (1e3 * account.value(method, column) for column in ("waiting", "whole"))
        figures += f"{waiting:.{digits}f}", f"{whole:.0f}"

    drafting, stay = (1e3 * account.value("streaming", column) for column in ("drafting", "stay"))
    return [*figures, f"{drafting:.0f}", f"{account.value('streaming', 'aloft'):.1f}", f"{stay:.0f}"]


def _claims_of_methods() -> Iterator[Claim]:
    for method in METHODS:
        yield Claim("docs/methods.md", rf"\| `{method}` \|[^|\n]*\|[^|\n]*\|[^|\n]*\| (\d[\d., ]*) \|\n",
                    partial(_cluster_cells, method))


def _cluster_cells(method: str) -> list[str]:
    """Return the ratio to plain decoding on each cluster, in one cell."""
    ratios = (summary(f"docs/results/methods-{cluster}.csv").value(method, "sr_ar") for cluster in CLUSTERS)
    return [", ".join(f"{ratio:.2f}" for ratio in ratios) if method != "ar" else "1.00"]


def _claims_of_requests() -> Iterator[Claim]:
    page = "docs/requests.md"

    for path, cell_pattern in (("docs/requests/jetson-7b.csv", r"([\d.]+, [\d.]+ s; [\d.]+)"),
                       ("docs/requests/smollm2.csv", r"([\d.]+, [\d.]+; [\d.]+)")):
        unit = " s" if " s" in cell_pattern else ""
        for rate in ("0.1", "0.4", "1.6"):
            row_pattern = rf"\| {rate} " + rf"\| {cell_pattern} " * 4 + r"\|\n"
            yield Claim(page, row_pattern, partial(_load_cells, path, rate, unit))

    for num_requests in ("1", "4", "16"):
        yield Claim(page, rf"\| {num_requests} " + r"\| (\S+ \(\S+\)) " * 4 + r"\|\n",
                    partial(_at_once_cells, num_requests))


def _load_cells(path: str, rate: str, unit: str) -> list[str]:
    """Return the median latency, the 95th percentile, and tokens per second of each method at a rate of arrivals."""
    rows = [row for row in _rows_at_0(path) if row["rate"] == rate]
    cells = []
    for row in rows:
        median, percentile, speed = (float(row[column]) for column in ("latency", "latency_p95", "tokens_per_second"))
        cells.append(f"{median:.1f}, {percentile:.1f}{unit}; {speed:.1f}")
    return cells


def _at_once_cells(num_requests: str) -> list[str]:
    """Return tokens per second of each method with this many requests at once, and the ratio to one."""
    rows = [row for row in _rows_at_0("docs/requests/at_once.csv") if row["at_once"] == num_requests]
    cells = []
    for row in rows:
        speed, ratio = float(row["tokens_per_second"]), float(row["over_one"])
        cells.append(f"{speed:.1f} ({ratio:.2f})")
    return cells


def _rows_at_0(path: str) -> list[dict[str, str]]:
    """Return the rows of temperature 0 in a table of loads, methods in the order of the page."""
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if float(row["temperature"]) == 0]


# --- pages ------------------------------------------------------------------------------------------------------------

def rewritten(page_text: str, claim: Claim) -> str:
    """Return a page with the figures of a claim; raises ValueError if the claim does not occur exactly once."""
    matches = list(re.finditer(claim.pattern, page_text))
    if len(matches) != 1:
        raise ValueError(f"{claim.page} has {len(matches)} places that read as {claim.pattern}: there has to be one")

    [match] = matches
    pieces: list[str] = []
    position = 0
    for group_number, figure in enumerate(claim.figures(), 1):
        pieces += page_text[position:match.start(group_number)], figure
        position = match.end(group_number)
    return "".join([*pieces, page_text[position:]])


def write_figures(root: Path = ROOT) -> list[str]:
    """Write all figures into the pages, and return the pages that have changed."""
    changed_pages = []
    for page, page_claims in groupby(claims(), key=attrgetter("page")):
        old_text = (root / page).read_text(encoding="utf-8")
        new_text = reduce(rewritten, page_claims, old_text)
        if new_text != old_text:
            write(root / page, new_text, SPACE_REMEDY)
            changed_pages.append(page)
    return changed_pages
