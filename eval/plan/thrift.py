"""What streaming gains by sending and drafting only what pays, in virtual time.

The devices are some on which guesses are costly, and the texts also some on which the draft's guesses are those for
another text.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from tqdm import tqdm

from config.keys import read_keys
from config.profiles import PROFILES, Profile
from eval.plan.bench import plan_of
from eval.plan.candidates import Candidate
from eval.plan.record import Written, made
from eval.plan.replayed import Table
from eval.plan.trial import Bench
from eval.tables import in_columns

SITE = replace(PROFILES["jetson-7b"], factors=(1.0,) * 4)
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
HEAD = ("simulated", "guesses", "ar", "streaming / ar", "with thrift / ar")
DRAFT, TOKENS = "eagle+suffix", 48
PLAIN = Candidate("ar", DRAFT, ((1,), (2,), (3,), (4,)), (2, 2, 2, 2))
SIZE = ("stream_rows", "16")  # of a segment, at most
STREAMING = [replace(PLAIN, method="streaming", sizes=(SIZE, ("ablate", value))) for value in ("thrift", "")]


@dataclass(frozen=True)
class ThriftConfig:
    """Streaming on the bundled models with and without ablate=thrift, over plain decoding; all of it is simulated."""


def thrift(argv: list[str]) -> int:
    """The command `python -m scripts.bench thrift`; its exit code."""
    read_keys(argv, ThriftConfig, "python -m scripts.bench thrift")
    plan = plan_of(2, TOKENS, DRAFT)
    book = made(plan)
    rows: list[Sequence[str]] = []
    for name, site in tqdm(SITES.items(), unit="cluster"):
        bench = Bench(site, plan, book)
        for kind, answers in (("its own", book.answers), ("another text's", _mistaken(book.answers))):
            plain, usual, thrifty = (bench.trial(one, answers, TOKENS).speed for one in (PLAIN, *STREAMING))
            rows.append((name, kind, f"{plain:.2f}", f"{usual / plain:.2f}", f"{thrifty / plain:.2f}"))
    print(in_columns(HEAD, rows, names=2))
    return 0


def _mistaken(answers: Sequence[Written]) -> list[Written]:
    """The same texts, each with the guesses that were made for another one."""
    found = []
    for place, one in enumerate(answers):
        other = answers[(place + len(answers) // 2) % len(answers)].guesses
        guesses: dict[str, Table] = {
            name: [other[name][at % len(other[name])] for at in range(len(table))]
            for name, table in one.guesses.items()}
        found.append(one._replace(guesses=guesses))
    return found
