"""A text by every algorithm at one setting: its exact cost beside that of texts that are drawn, or made of traces."""
from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterator, NamedTuple, Sequence

import numpy as np

from config.files import ROOM, check_output, fits, whole, write
from config.keys import read_keys
from config.ranges import Range, outside
from config.simulation import COST, Simulation, servers_needed
from scripts.bench.branches import check_form
from sim import rounds
from sim.counting import (
    Ahead,
    Counted,
    Sample,
    Times,
    count_dsi,
    count_si,
    drawn,
    published_draws,
    recorded,
    resampled,
    simulate,
)
from sim.expectation import Moments, moments
from sim.formulas import ACCOUNTINGS, PIPELINES
from sim.rounds import Decoding

COMMAND = "python -m scripts.simulate offline"
EXAMPLES = f"""\
  {COMMAND}
  {COMMAND} c=0.05 a=0.8 k=3 S=100 accounting=original picture=costs.png
  {COMMAND} c=0.2 k=2 stages=4 hop=0.05 traces=matches.json"""
RANGES = {"block": Range(1, 1_000_000), "stages": Range(1, 65536, {0: "as many as DSI has servers"}),
          "hop": Range(COST.least, COST.most, {0: "no time"})}
PLAIN, SI, DSI = "non-SI", "SI", "DSI"
PUBLISHED = {SI: count_si, DSI: count_dsi}
LOW, HIGH = 2.5, 97.5  # percentiles of an interval of 95 %
MOST = 200_000_000  # positions of all resampled texts together: a gigabyte and a half of numbers
LONGEST = 20_000  # tokens; the exact sums take a time that grows with their square
BINS = 30


@dataclass(frozen=True)
class Offline(Simulation):
    """Mean and standard deviation of what a text costs, exactly, beside texts that are drawn.

    Compared are plain decoding (non-SI), draft-then-verify (SI), DSI, and the methods of this project on a pipeline of
    the same devices: one for the drafter, and as many stages as DSI has servers. Nothing is run: all is computed.
    """

    EXAMPLES: ClassVar[str] = EXAMPLES
    PATHS: ClassVar[Sequence[str]] = ("traces", "picture")

    # How it is counted
    accounting: str = "corrected"  # of DSI: corrected (by events), or original, as the simulator of the paper counts
    num_repeats: int = 1000  # texts that are drawn
    traces: str = ""  # JSON file of recorded matches, a list of 0 and 1 for each text, instead of chance; empty: a
    block: int = 32  # neighbours of a trace that stay together in a text that is made of traces

    # The pipeline beside DSI
    stages: int = 0  # devices that share the target's layers; 0: as many as DSI has servers
    hop: float = 0.0  # time from one stage to the next

    # What is written
    picture: str = ""  # file (.png or .svg) for histograms of costs and iterations; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), RANGES)
        if self.accounting not in ACCOUNTINGS:
            yield f"accounting={self.accounting} is unknown: choose one of {', '.join(ACCOUNTINGS)}"
        if self.S > LONGEST:
            yield f"S={self.S} tokens would be summed over for very long: give S={LONGEST} or less"
        if self.traces and self.num_repeats * self.S > MOST:
            yield (f"num_repeats={self.num_repeats} texts of S={self.S} tokens are too many for the memory: give "
                   f"num_repeats={max(1, MOST // self.S)} or less")

    @property
    def depth(self) -> int:
        """The stages of the pipeline."""
        return self.stages or self.num_target_servers or servers_needed(self.failure_cost, self.c, self.k)


class Result(NamedTuple):
    """What was found about one algorithm."""

    name: str
    exact: Moments
    sample: Sample


def main(argv: Sequence[str]) -> int:
    config = read_keys(argv, Offline, COMMAND)
    if config.picture:
        check_form(config.picture)
        check_output(config.picture, "choose another picture=")
    traces = read_traces(config.traces) if config.traces else []
    acceptance = float(np.mean(np.concatenate(traces))) if traces else config.a
    found = list(results(config, acceptance, source(config, traces)))
    print(heading(config, acceptance, traces))
    print(table(found, config.S))
    if config.picture:
        draw([result for result in found if result.name in (SI, DSI)], config)
        print(f"\ndrawn: {config.picture}")
    return 0


def algorithms(config: Offline) -> dict[str, Decoding]:
    """What is compared, by name."""
    times, k = (config.failure_cost, config.c), config.k
    found: dict[str, Decoding] = {PLAIN: rounds.pipeline("ar", *times, k, 1, 0.0), SI: rounds.si(*times, k),
                                  DSI: rounds.dsi(*times, k, config.accounting)}
    for method in PIPELINES:
        found[method] = rounds.pipeline(method, *times, k, config.depth, config.hop)
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
    draws = islice(published_draws(config.a, config.k, config.S, config.random_seed), config.num_repeats)
    counted = [count(times, config.k, config.S, text) for text in draws]
    return Sample(np.array([[text.cost for text in counted]]), np.array([[float(text.iterations) for text in counted]]))


def source(config: Offline, traces: list[Any]) -> Ahead | None:
    """Texts made of traces; None if there are no traces."""
    if not traces:
        return None
    return recorded(resampled(traces, config.block, config.S, config.num_repeats, config.random_seed))


def read_traces(path: str) -> list[Any]:
    """The recorded matches of a file, an array of truth values for each text. Raises ValueError if it holds none."""
    found = whole(path)
    if not fits(found, [[lambda value: value in (0, 1)]]) or not any(found):
        raise ValueError(f"{path} holds no matches: write a JSON list with a list of 0 and 1 for each text, "
                         "as [[1, 1, 0, 1], [0, 1]]")
    return [np.array(text, dtype=np.bool_) for text in found if text]


def heading(config: Offline, acceptance: float, traces: list[Any]) -> str:
    """What the table is about."""
    servers = config.num_target_servers or "any number of"
    texts = f"{config.num_repeats} texts, drawn with seed {config.random_seed}"
    if traces:
        texts += f" in blocks of {config.block} out of {len(traces)} traces"
    return (f"Simulated: c={config.c:g}, a={acceptance:.4g}, k={config.k}, failure_cost={config.failure_cost:g}, "
            f"S={config.S}, DSI in the {config.accounting} accounting with {servers} servers,\n"
            f"pipelines of {config.depth} stages with hops of {config.hop:g}. Exact: if drafts are independent.\n"
            f"Beside it {texts}: 95 % cost what is in brackets;\n"
            "off: by how many standard errors their mean differs from the exact one.\n")


def table(found: Sequence[Result], tokens: int) -> str:
    """A line for each algorithm."""
    lines = [f"{'':<12}{'exact mean':>13}{'sd':>10}{'per token':>12}{'speed-up':>10}{'texts: mean':>15}{'sd':>10}"
             f"{'interval':>25}{'off':>7}{'iterations':>12}"]
    plain = found[0].exact.mean[0]
    for name, exact, sample in found:
        mean, deviation = float(exact.mean[0]), float(exact.deviation[0])
        costs = sample.costs[0]
        low, high = np.percentile(costs, [LOW, HIGH])
        interval = f"[{low:.6g}, {high:.6g}]"
        lines.append(f"{name:<12}{mean:>13.6g}{deviation:>10.4g}{mean / tokens:>12.5g}{plain / mean:>10.3f}"
                     f"{costs.mean():>15.6g}{costs.std():>10.4g} {interval:>24}{off(exact, costs):>7}"
                     f"{sample.iterations[0].mean():>12.6g}")
    return "\n".join(lines)


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
        figure, grid = plt.subplots(len(found), 2, figsize=(9, 3 * len(found)), layout="constrained")
        for (left, right), (name, _, sample) in zip(grid, found):
            for axes, values, what, tone in ((left, sample.costs[0], "cost", "#bcdff5"),
                                             (right, sample.iterations[0], "iterations", "#fde8b0")):
                axes.hist(values, bins(values, what), density=True, color=tone, edgecolor="black", linewidth=0.5)
                axes.axvline(values.mean(), color="black", linestyle="--", label=f"mean {values.mean():.5g}")
                axes.set_xlabel(f"{what} of {config.S} tokens by {name}, simulated")
                axes.set_ylabel("density")
                axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format=Path(config.picture).suffix[1:], bbox_inches="tight")
        plt.close(figure)
    write(config.picture, picture.getvalue(), ROOM)
