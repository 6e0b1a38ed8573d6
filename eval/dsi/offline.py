"""A text by every algorithm at one setting: its exact cost beside that of texts that are drawn, or made of traces."""
from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import ROOM, write
from config.keys import read_keys
from eval.dsi import cost_model
from eval.dsi.cost_model import Decoding, Moments, moments
from eval.dsi.counting import (
    Ahead,
    Counted,
    Matches,
    Sample,
    Times,
    count_dsi,
    count_si,
    drawn,
    published_draws,
    read_traces,
    recorded,
    resampled,
    simulate,
)
from eval.dsi.formulas import PIPELINES
from eval.dsi.keys import COMMAND, Offline
from eval.tables import in_columns

PLAIN, SI, DSI = "non-SI", "SI", "DSI"
PUBLISHED = {SI: count_si, DSI: count_dsi}
LOW, HIGH = 2.5, 97.5  # percentiles of an interval of 95 %
BINS = 30
COLUMNS = ("", "exact mean", "sd", "per token", "speed-up", "texts: mean", "sd", "interval", "off", "iterations")
TONES = {"cost": "#bcdff5", "iterations": "#fde8b0"}  # of histograms


class Result(NamedTuple):
    """What was found about one algorithm."""

    name: str
    exact: Moments
    sample: Sample


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Offline, f"{COMMAND} offline")
    recordings = read_traces(config.traces) if config.traces else []
    traces = [np.array(text) for text in recordings]
    acceptance = float(np.mean(np.concatenate(traces))) if traces else config.a
    texts = source(config, traces)
    bar = tqdm(results(config, acceptance, texts), desc="computed", total=len(algorithms(config)), delay=1, leave=False)
    found = list(bar)
    print(heading(config, acceptance, traces))
    print(table(found, config.S))
    if config.picture:
        draw([result for result in found if result.name in (SI, DSI)], config)
        print(f"\ndrawn: {config.picture}")
    return 0


def algorithms(config: Offline) -> dict[str, Decoding]:
    """What is compared, by name."""
    setting = config.failure_cost, config.c, config.k
    found: dict[str, Decoding] = {
        PLAIN: cost_model.pipeline("ar", *setting, 1, 0.0),
        SI: cost_model.si(*setting),
        DSI: cost_model.dsi(*setting, config.accounting),
    }
    for method in PIPELINES:
        found[method] = cost_model.pipeline(method, *setting, config.depth, config.hop)
    return found


def results(config: Offline, acceptance: float, ahead: Ahead | None) -> Iterator[Result]:
    """Every algorithm: exactly with independent drafts, and over the same texts, or over texts of its own.

    In the original accounting SI and DSI are drawn as the published simulator draws them.
    """
    for name, decoding in algorithms(config).items():
        exact = moments(decoding, acceptance, config.S)
        if name in PUBLISHED and config.accounting == "original" and not ahead:
            yield Result(name, exact, published(config, PUBLISHED[name]))
        else:
            texts = ahead or drawn(acceptance, config.random_seed)
            yield Result(name, exact, simulate(decoding, texts, config.S, config.num_repeats))


def published(config: Offline, count: Callable[..., Counted]) -> Sample:
    """The texts that the published simulator draws with this seed."""
    times = Times(config.failure_cost, config.c)
    draws = published_draws(config.a, config.k, config.S, config.random_seed)
    texts = islice(draws, config.num_repeats)
    counted = [count(times, config.k, config.S, text) for text in texts]
    costs, iterations = np.array(counted, dtype=np.float64).T
    return Sample(costs[None], iterations[None])


def source(config: Offline, traces: list[Matches]) -> Ahead | None:
    """Texts made of traces; None if there are no traces."""
    if not traces:
        return None
    texts = resampled(traces, config.block, config.S, config.num_repeats, config.random_seed)
    return recorded(texts)


def heading(config: Offline, acceptance: float, traces: list[Matches]) -> str:
    """What the table is about."""
    servers = config.num_target_servers or "any number of"
    texts = f"{config.num_repeats} texts, drawn with seed {config.random_seed}"
    if traces:
        texts += f" in blocks of {config.block} out of {len(traces)} traces"
    return (f"Simulated: c={config.c:g}, a={acceptance:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
            f"S={config.S}, DSI in the {config.accounting} accounting with {servers} servers,\n"
            f"pipelines of {config.depth} stages with hops of {config.hop:g}. Exact: if drafts are independent.\n"
            f"Beside it {texts}: in brackets the 2.5th and the 97.5th percentile of their costs;\n"
            "off: by how many standard errors their mean differs from the exact one.\n")


def table(found: Sequence[Result], tokens: int) -> str:
    """A line for each algorithm."""
    plain = found[0].exact.mean[0]
    rows = []
    for name, exact, sample in found:
        mean, deviation = float(exact.mean[0]), float(exact.deviation[0])
        costs = sample.costs[0]
        low, high = np.percentile(costs, [LOW, HIGH])
        rows.append([name, f"{mean:.6g}", f"{deviation:.4g}", f"{mean / tokens:.5g}", f"{plain / mean:.3f}",
                     f"{costs.mean():.6g}", f"{costs.std():.4g}", f"[{low:.6g}, {high:.6g}]", off(exact, costs),
                     f"{sample.iterations[0].mean():.6g}"])
    return in_columns(COLUMNS, rows)


def off(exact: Moments, costs: Any) -> str:
    """By how many standard errors the mean of texts differs from the exact one; a dash where nothing varies."""
    mean, deviation = float(exact.mean[0]), float(exact.deviation[0])
    if deviation <= 1e-9 * mean:
        return "-"
    return f"{(costs.mean() - mean) / deviation * np.sqrt(costs.size):.2f}"


def bins(values: Any, what: str) -> Any:
    """The edges of about 30 bins; each has as many whole numbers of iterations as the others."""
    low, high = values.min(), values.max()
    if what == "cost":
        return np.linspace(low, high + (high == low), BINS + 1)
    width = -(-(high - low + 1) // BINS)
    return np.arange(low, high + width + 1, width) - 0.5


def draw(found: Sequence[Result], config: Offline) -> None:
    """Draw histograms of costs and of iterations into a file. Raises ValueError if it cannot be written."""
    from eval.plots import STYLE, plt

    with plt.rc_context(STYLE):
        size = 9, 3 * len(found)
        figure, grid = plt.subplots(len(found), 2, figsize=size, layout="constrained")
        for row, (name, _, sample) in zip(grid, found):
            for axes, (what, tone), [values] in zip(row, TONES.items(), sample):
                edges = bins(values, what)
                axes.hist(values, edges, density=True, color=tone, edgecolor="black", linewidth=0.5)
                axes.axvline(values.mean(), color="black", linestyle="--", label=f"mean {values.mean():.5g}")
                axes.set_xlabel(f"{what} of {config.S} tokens by {name}, simulated")
                axes.set_ylabel("density")
                axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(config.picture).suffix[1:], bbox_inches="tight")
        plt.close(figure)
    write(config.picture, picture.getvalue(), ROOM)
