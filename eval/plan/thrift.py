"""What streaming gains by sending and drafting only what pays, in virtual time.

First with devices on which guesses are costly, and with texts on which the draft's guesses are those for another text;
then with a board that becomes three times slower in the midst of an answer.
"""
from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Iterator, Mapping, Sequence

from tqdm import tqdm

from config.boards import Boards, uneven, write
from config.keys import read_keys
from config.profiles import PROFILES
from config.ranges import Checked, Range, outside
from eval.plan.candidates import Candidate
from eval.plan.judge import plan_of
from eval.plan.keys import PlanConfig
from eval.plan.record import Book, Written, made
from eval.plan.replayed import Table
from eval.plan.trial import Bench
from eval.tables import in_columns
from launch.pipeline import Pipeline
from pipeline.trace import read

RANGES = {"questions": Range(1, 20), "tokens": Range(8, 512), "rows": Range(1, 256)}
SITE = replace(uneven(PROFILES["jetson-7b"]), factors=(1.0,) * 4)
SITES: dict[str, Boards] = {
    "jetson-7b": SITE,
    "rows of 2 ms": replace(SITE, row=8.0, free=0),
    "rows of 12 ms": replace(SITE, model=100.0, row=50.0, free=0),
    "levels of 60 ms": replace(SITE, level=60.0),
    "levels of 120 ms": replace(SITE, level=120.0),
    "levels of 240 ms": replace(SITE, level=240.0),
    "board 3 is slow": replace(SITE, factors=(1.0, 1.0, 3.0, 1.0)),
    "messages of 20 ms": replace(SITE, model=20.0, row=0.2, latency=20.0, level=3.0, verdict=2.0),
    "10 Mbit/s": replace(SITE, mbps=10.0),
}
SLOWS, SECONDS, FACTOR = 3, 2.5, 3.0  # the board of this rank gets slower, after so much computing, by this factor
HOT = replace(SITE, row=10.0, free=0, throttles=((SLOWS, SECONDS, FACTOR),))
PROMPT = "Tell me a short story about a curious fox called Maya."
STAGES, DRAFT = (2, 2, 2, 2), "eagle+suffix"


@dataclass(frozen=True)
class ThriftConfig(Checked):
    """Streaming on the bundled models with and without ablate=thrift, over plain decoding; all of it is simulated."""

    PATHS: ClassVar[tuple[str, ...]] = ()

    # What is asked
    questions: int = 2  # of each of the six bundled sets
    tokens: int = 48  # of each answer, at most
    rows: int = 16  # of a segment, at most

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)


def thrift(argv: list[str]) -> int:
    """The command `python -m scripts.bench thrift`; its exit code."""
    config = read_keys(argv, ThriftConfig, "python -m scripts.bench thrift")
    plan = plan_of(config.questions, config.tokens, DRAFT)
    book = made(plan)
    head = ("simulated", "guesses", "ar", "streaming / ar", "with thrift / ar")
    rows: list[Sequence[str]] = []
    for name in tqdm(SITES, unit="cluster"):
        rows += _compared(name, plan, book, config)
    print(in_columns(head, rows, names=2))
    for thrifty in (False, True):
        print(f"\nsimulated, with{'' if thrifty else 'out'} thrift: board {SLOWS} gets {FACTOR:g} times slower")
        columns = ("second", "segments sent", "rows of each", f"ms of each on board {SLOWS}")
        print(in_columns(columns, _slower(thrifty, config)))
    return 0


def _compared(name: str, plan: PlanConfig, book: Book, config: ThriftConfig) -> Iterator[Sequence[str]]:
    """The rows of one cluster: with the guesses for each text, and with those for another one."""
    bench = Bench(SITES[name], plan, book)
    for kind, answers in (("its own", book.answers), ("another text's", _mistaken(book.answers))):
        trials = (bench.trial(one, answers, config.tokens) for one in _candidates(config.rows))
        plain, usual, thrifty = (trial.speed for trial in trials)
        yield name, kind, f"{plain:.2f}", f"{usual / plain:.2f}", f"{thrifty / plain:.2f}"


def _candidates(rows: int) -> list[Candidate]:
    groups = tuple((rank,) for rank in range(1, len(STAGES) + 1))
    size = ("stream_rows", str(rows))
    plain = Candidate("ar", DRAFT, groups, STAGES)
    streamed = replace(plain, method="streaming")
    return [plain, *(replace(streamed, sizes=(size, ("ablate", value))) for value in ("thrift", ""))]


def _mistaken(answers: Sequence[Written]) -> list[Written]:
    """The same texts, each with the guesses that were made for another one."""
    found = []
    for place, one in enumerate(answers):
        other = answers[(place + len(answers) // 2) % len(answers)]
        guesses: dict[str, Table] = {}
        for name, table in one.guesses.items():
            theirs = other.guesses[name]
            guesses[name] = [theirs[at % len(theirs)] for at in range(len(table))]
        found.append(one._replace(guesses=guesses))
    return found


def _slower(thrifty: bool, config: ThriftConfig) -> list[Sequence[str]]:
    """What happened in each second of an answer in which a board gets slower; its trace is kept."""
    folder = tempfile.mkdtemp(prefix="flowspec-")
    profile = str(Path(folder, "hot.json"))
    write(profile, HOT)
    keys: dict[str, Any] = {"pipeline_type": "streaming", "draft": DRAFT, "subseq_token": config.rows,
                            "ablate": "" if thrifty else "thrift", "max_new_tokens": 2 * config.tokens}
    keys.update(profile=profile, time="virtual", trace=folder)
    with Pipeline.open("toy", **keys) as pipeline:
        pipeline.generate(PROMPT)
    spans = read(folder)
    begin = next(span["t0"] for span in spans if span["name"] == "send")
    seconds: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        _count(seconds[int(span["t0"] - begin)], span)
    return [_row(second, seconds[second]) for second in sorted(seconds) if second >= 0]


def _count(found: Mapping[str, list[float]], span: Mapping[str, Any]) -> None:
    """Note what a span says about its second."""
    if span["name"] == "send" and "tokens" in span:
        found["rows"].append(len(span["nodes"]))
    elif span["name"] == "forward" and span["rank"] == SLOWS:
        found["takes"].append(1e3 * (span["t1"] - span["t0"]))


def _row(second: int, found: Mapping[str, list[float]]) -> Sequence[str]:
    rows, takes = found["rows"], found["takes"]
    mean = f"{sum(rows) / len(rows):.1f}" if rows else ""
    whole = f"{sum(takes) / len(takes):.0f}" if takes else ""
    return str(second), str(len(rows)), mean, whole
