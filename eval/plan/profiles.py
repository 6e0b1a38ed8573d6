"""Compare methods on given clusters, in virtual time, from one record: every method with every draft on every emulated
cluster, and the gain of streaming from sending and drafting only what pays.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, zip_longest
from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.cli import parse
from config.keys import raw_values, read_keys, with_defaults
from config.methods import METHODS
from config.profiles import PROFILES, Profile
from eval.bench import speed
from eval.plan.bench import plan_of
from eval.plan.candidates import Candidate, evenly, families
from eval.plan.keys import PlanConfig, words
from eval.plan.record import Written, book_of, make_record
from eval.plan.trial import Bench
from eval.tables import in_columns, number
from launch.words import with_model

COMMAND = "python3 -m scripts.bench profiles"
ASKED = {"methods": "ar,naive,serial,pruned,pipedec,continuous,streaming", "max_new_tokens": "128"}
BOARDS = (1.0,) * 4
OURS = "streaming"


class Row(NamedTuple):
    """The tokens per second of one method on one cluster, for each set."""

    profile: str
    draft: str
    method: str
    speeds: Sequence[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.speeds))


def profiles(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench profiles`; return its exit code."""
    argv = with_model(argv)
    typed = raw_values(argv).get("profile")
    asked = with_defaults(argv, {**ASKED, "profile": typed or "server"})
    config = parse(words(asked), COMMAND, kind=PlanConfig)
    chosen = config.run.cluster
    rows = list(tried(config, {typed: chosen} if typed and chosen else PROFILES))
    cells = [[*row[:3], *map(number, (row.mean, *row.speeds))] for row in rows]
    heading = ("simulated", "draft", "method", "mean", *config.chosen_sets)
    print(in_columns(heading, cells, names=3))
    for line in compared(rows):
        print(line)
    return 0


def tried(config: PlanConfig, sites: Mapping[str, Profile]) -> Iterator[Row]:
    """Yield the speed of each method with each draft on these clusters, over one pipeline of all boards. Sizes that are
    not given are measured at the start."""
    book, run = book_of(config), config.run
    names = [[name] * len(questions) for name, questions in config.asked.items()]
    turns = chain.from_iterable(zip_longest(*names))
    sets = list(filter(None, turns))  # the set of each question, in the order of the record
    methods = [method for method in config.chosen_methods if METHODS[method].target == "ring"]
    for name, site in tqdm(sites.items(), unit="cluster", leave=False):
        site = replace(site, factors=site.factors or BOARDS)
        split = evenly(len(site.factors), site.layers)
        bench = Bench(site, config, book)
        for [one] in families(site, site.layers, methods, config.chosen_drafts, split):
            trial = bench.trial(replace(one, sizes=()), book.answers, run.max_new_tokens)
            speeds = []
            for chosen_set in config.chosen_sets:
                speeds.append(speed([answer for answer, of in zip(trial.answers, sets) if of == chosen_set]))
            yield Row(name, one.draft, one.method, speeds)


def compared(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that compare `streaming` with the best other method, by cluster and draft."""
    for ours in rows:
        others = [row for row in rows if row.profile == ours.profile
                  and row.draft in (ours.draft, "none") and row.method != OURS]
        if ours.method == OURS and others:
            best = np.max([row.speeds for row in others], axis=0)
            shares = np.array(ours.speeds) / best
            mean = ours.mean / max(row.mean for row in others)
            yield (f"{ours.profile}, {ours.draft}: {OURS} is {mean:.3f} times the best other on average, "
                   f"{shares.min():.3f} on its worst set (simulated)")


# --- the gain of thrift -----------------------------------------------------------------------------------------------
# Streaming with and without the restriction to what pays, on devices with costly guesses, and over texts where the
# draft's guesses are those for another text.

SITE = replace(PROFILES["jetson-7b"], factors=BOARDS)
SITES: dict[str, Profile] = {
    "jetson-7b": SITE,
    "rows of 2 ms": replace(SITE, row=8.0, free=0),
    "rows of 12 ms": replace(SITE, model=100.0, row=50.0, free=0),
    "levels of 60 ms": replace(SITE, level=60.0),
    "levels of 120 ms": replace(SITE, level=120.0),
    "levels of 240 ms": replace(SITE, level=240.0),
    "board 3 is slow": replace(SITE, factors=(1.0, 1.0, 3.0, 1.0)),
    "board 3 gets slow": replace(SITE, row=10.0, free=0, throttles=((3, 2.5, 3.0),)),
    "messages of 20 ms": replace(SITE, model=20.0, row=0.2, latency=20.0, level=3.0, verdict=2.0),
    "10 Mbit/s": replace(SITE, mbps=10.0),
}
THRIFT = ("simulated", "guesses", "ar", "streaming / ar", "with thrift / ar")
DRAFT, LONG = "eagle+suffix", 48
ALL_BOARDS = tuple(zip(range(1, 5))), (2, 2, 2, 2)
SIZE = ("stream_rows", "16")  # most rows of a segment
COMPARED = [Candidate("ar", DRAFT, *ALL_BOARDS),
            Candidate(OURS, DRAFT, *ALL_BOARDS, (SIZE, ("ablate", "thrift"))),
            Candidate(OURS, DRAFT, *ALL_BOARDS, (SIZE, ("ablate", "")))]


@dataclass(frozen=True)
class ThriftConfig:
    """Compare streaming on the bundled models with and without ablate=thrift, over plain decoding, simulated."""


def thrift(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench thrift`; return its exit code."""
    read_keys(argv, ThriftConfig, "python3 -m scripts.bench thrift")
    plan = plan_of(2, LONG, DRAFT)
    book = make_record(plan)
    rows: list[Sequence[str]] = []
    for name, site in tqdm(SITES.items(), unit="cluster"):
        bench = Bench(site, plan, book)
        kinds = {"its own": book.answers, "another text's": _mistaken(book.answers)}
        for kind, answers in kinds.items():
            plain, usual, thrifty = (bench.trial(one, answers, LONG).speed for one in COMPARED)
            rows.append((name, kind, f"{plain:.2f}", f"{usual / plain:.2f}", f"{thrifty / plain:.2f}"))
    print(in_columns(THRIFT, rows, names=2))
    return 0


def _mistaken(answers: Sequence[Written]) -> list[Written]:
    """Return the same texts, each with the guesses for another one."""
    found, half = [], len(answers) // 2
    for one, other in zip(answers, (*answers[half:], *answers[:half])):
        guesses = {name: list(islice(cycle(table), len(one.text)))
                   for name, table in other.guesses.items()}
        found.append(one._replace(guesses=guesses))
    return found
