"""Accidents at random moments of answers, and their effect on the answers, over processes and over boards.

Every method generates one answer, and four at once. Each is compared with its text without an accident.
"""
from __future__ import annotations

import math
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle, islice, product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence

from config.failure import PeerLost
from config.keys import raw_values, with_defaults
from config.methods import METHODS, SHARINGS
from config.presets import TOY_PRESET
from eval.bench import QUESTIONS
from eval.bench.places import PLACES, PROCESSES, Place, opened
from eval.tables import NOT_MEASURED, in_columns, save
from launch.pipeline import Pipeline
from launch.progress import ProgressBar

USUAL = {"max_new_tokens": "64", "max_length": "1024", "timeout": "3", "recover": "180", "temperature": "1",
         "threads_per_rank": "1", "dtype": "float64", "stages": "0+4+4"}
MORE: dict[str, dict[str, str]] = {  # keys that a method needs
    "dsi": {"replicas": "2", "lookahead": "4"}, "specinfer": {"ssm": "toy/draft_a"}}
TOGETHER = 1, 4  # answers under way at once
OWN = {"accidents": "100", "places": f"{PROCESSES},{PLACES[1]}", "csv": ""}  # keys of the command
SOON = 0.25  # of the accidents after another one, the share that happen before the ranks have recovered from it
NEAR = 2.0  # seconds within which these happen
LATEST = 0.8  # share of the tokens by which the last accident happens
COLUMNS = "round", "place", "method", "at_once", "kind", "rank", "pause", "lost", "changed"
HEADING = "place", "accident", "accidents", "answers", "lost", "changed", "pause: median, s", "worst, s"
Texts = Dict[int, List[int]]  # the first text of each question's answer: all methods write the same
Row = Dict[str, Any]  # an accident, by COLUMNS
Words = Sequence[str]
Options = Mapping[str, str]


class Case(NamedTuple):
    """A number of simultaneous answers of a method in a place, and a number of accidents during them."""

    round: int
    place: str
    method: str
    at_once: int
    accidents: int


class Accident(NamedTuple):
    """An accident of some kind to a rank, `later` seconds after this number of tokens of all answers."""

    kind: str
    rank: int
    tokens: int
    later: float


# --- commands ---------------------------------------------------------------------------------------------------------

def accidents(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench accidents`; return its exit code, 1 if an answer was lost or changed."""
    preset, *words = with_defaults(argv, {**USUAL, **OWN}, TOY_PRESET)
    options = raw_values(words)
    places = options.pop("places").split(",")
    given, csv = options.pop("accidents"), options.pop("csv")
    if not set(places) <= set(PLACES):
        raise ValueError(f"places={','.join(places)} is not possible: choose among {', '.join(PLACES)}")
    if not given.isdigit() or not int(given):
        raise ValueError(f"accidents={given} is not possible: give a whole number from 1")
    method = options.pop("pipeline_type", "")
    methods = [method] if method else [method for method in METHODS if method not in SHARINGS]
    kinds, total = list(product(places, methods, TOGETHER)), int(given)
    rows: list[Row] = []
    texts: Texts = {}
    with ProgressBar(total=total, unit="accident", file=sys.stderr) as bar:
        for i, (place, method, together) in enumerate(kinds):
            count = total * (i + 1) // len(kinds) - total * i // len(kinds)
            bar.set_description(f"{place}, {method}, {together} at once")
            if count:
                case = Case(i, place, method, together, count)
                rows += rows_of(case, words_of(preset, method, options), texts)
            bar.update(count)
            if csv:
                save(Path(csv), COLUMNS, rows)
    print(table(rows))
    return int(any(row["lost"] or row["changed"] for row in rows))


def words_of(preset: str, method: str, options: Options) -> list[str]:
    """Return the arguments of a pipeline for this method."""
    keys = {**MORE.get(method, {}), **options, "pipeline_type": method}
    keys["max_requests"] = str(max(TOGETHER))
    return [preset, *(f"{key}={value}" for key, value in keys.items())]


def table(rows: Sequence[Row]) -> str:
    """Return a table by place and kind of accident, by place and number of answers at once, and for all."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for key in ("kind", "at_once"):
        for row in rows:
            groups[row["place"], f"{row[key]}{' at once' * (key == 'at_once')}"].append(row)
    lines = [[*names, *cells(found)] for names, found in groups.items()]
    return in_columns(HEADING, [*lines, ["all", "", *cells(rows)]], 2)


def cells(rows: Sequence[Row]) -> list[str]:
    """Return the numbers of accidents, affected answers, lost and changed ones among these, and the pauses."""
    what = "at_once", "lost", "changed"
    met = {row["round"]: [row[key] for key in what] for row in rows}
    answers, lost, changed = map(sum, zip(*met.values()))
    pauses = [row["pause"] for row in rows if row["pause"] is not None]
    times = [f"{median(pauses):.1f}", f"{max(pauses):.1f}"] if pauses else [NOT_MEASURED] * 2
    return [*map(str, (len(rows), answers, lost, changed)), *times]


# --- answers, and accidents that happen to them -----------------------------------------------------------------------

def rows_of(case: Case, words: Words, texts: Texts) -> Iterator[Row]:
    """Yield a row for each accident of a case, which has its own pipeline; the case's round is the random seed."""
    chance = Random(case.round)
    with tempfile.TemporaryDirectory() as folder, \
            opened(case.place, words, Path(folder)) as (pipeline, there):
        asked = [(case.round + i) % len(QUESTIONS) for i in range(case.at_once)]
        if not texts.keys() >= {*asked}:
            calm = answer_under_accidents(pipeline, there, [], asked, chance)
            assert not calm.lost, "an answer was lost without an accident"
            texts.update(zip(asked, calm.texts))
        kinds = chance.sample(there.kinds, len(there.kinds))
        tokens = sum(len(texts[each]) for each in asked)
        plan = planned(there, list(islice(cycle(kinds), case.accidents)), chance, tokens)
        found = answer_under_accidents(pipeline, there, plan, asked, chance)
        changed = sum(texts[each] != text for each, text in zip(asked, found.texts))
        for accident, pause in zip(plan, found.pauses):
            yield {**case._asdict(), "kind": accident.kind, "rank": accident.rank, "pause": pause,
                   "lost": case.at_once if found.lost else 0,
                   "changed": 0 if found.lost else changed}


def planned(place: Place, kinds: Words, chance: Random, tokens: int) -> list[Accident]:
    """Return accidents of these kinds, in order, at random moments of answers that have `tokens` tokens in total."""
    found: list[Accident] = []
    most = int(LATEST * tokens) or 1
    moments = sorted(chance.randrange(most) for _ in kinds)
    for kind, moment in zip(kinds, moments):
        soon = bool(found) and chance.random() < SOON
        rank = place.victim(kind, chance)
        tokens = found[-1].tokens if soon else moment
        found.append(Accident(kind, rank, tokens, chance.uniform(0.0, NEAR) if soon else 0.0))
    return found


class AccidentOutcome(NamedTuple):
    """The outcome of answers: their texts, whether they were lost, and the pause of each accident in seconds: the
    longest time without a token of any answer from then on, None if there were no more tokens."""

    texts: list[list[int]]
    lost: bool
    pauses: list[float | None]


def answer_under_accidents(pipeline: Pipeline, place: Place, plan: Sequence[Accident], asked: Sequence[int],
                           chance: Random) -> AccidentOutcome:
    """Answer the questions with these numbers, at once, while these accidents happen."""
    settled = [time.monotonic()]  # times at which tokens came
    tokens, lost = -1, False

    def happen(accident: Accident, own: Random) -> float:
        time.sleep(accident.later)
        moment = time.monotonic()
        place.strike(accident.kind, accident.rank, own)
        return moment

    answers = [pipeline.submit(QUESTIONS[question], seed=0, ignore_eos=True) for question in asked]
    with ThreadPoolExecutor(len(plan) or 1) as threads:
        happening = []
        try:
            for _ in chain([""], *answers):
                now = sum(answer.answer.new_tokens for answer in answers)
                due = [accident for accident in plan if tokens < accident.tokens <= now]
                happening += [threads.submit(happen, accident, Random(chance.random())) for accident in due]
                if now > tokens:
                    settled.append(time.monotonic())
                tokens = max(tokens, now)
        except PeerLost as loss:
            lost = True
            ProgressBar.write(f"lost: {loss}", file=sys.stderr)
    moments = [one.result() for one in happening]
    return AccidentOutcome([answer.answer.token_ids for answer in answers], lost, pauses(moments, settled))


def pauses(moments: Sequence[float], settled: Sequence[float]) -> list[float | None]:
    """Return, for each moment of an accident, the longest gap between two tokens that ends after it and begins before
    the next accident."""
    gaps = list(zip(settled, settled[1:]))
    found = []
    for moment in moments:
        following = min((other for other in moments if other > moment), default=math.inf)
        within = [end - begin for begin, end in gaps if begin < following and end > moment]
        found.append(max(within, default=None))
    return found
