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
from eval.bench.places import NAMESPACES, PLACES, PROCESSES, Place, opened
from eval.tables import NOT_MEASURED, in_columns, save
from launch.pipeline import Pipeline
from launch.progress import ProgressBar

DEFAULT_KEYS = {"max_new_tokens": "64", "max_length": "1024", "timeout": "3", "recover": "180", "temperature": "1",
                "threads_per_rank": "1", "dtype": "float64", "stages": "0+4+4",
                "accidents": "100", "places": f"{PROCESSES},{NAMESPACES}", "csv": ""}
METHOD_KEYS: dict[str, dict[str, str]] = {
    "dsi": {"replicas": "2", "lookahead": "4"}, "specinfer": {"ssm": "toy/draft_a"}}
AT_ONCE = 1, 4  # answers under way at once
SOON_SHARE = 0.25  # of the accidents after another one, the share that happen before the ranks have recovered from it
SOON_SECONDS = 2.0  # seconds within which these happen
LATEST_SHARE = 0.8  # share of the tokens by which the last accident happens
COLUMNS = "round", "place", "method", "at_once", "kind", "rank", "pause", "lost", "changed"
HEADING = "place", "accident", "accidents", "answers", "lost", "changed", "pause: median, s", "worst, s"
FirstTexts = Dict[int, List[int]]  # the first text of each question's answer: all methods write the same
AccidentRow = Dict[str, Any]  # an accident, by COLUMNS


class AccidentCase(NamedTuple):
    """A number of simultaneous answers of a method in a place, and a number of accidents during them."""

    round: int
    place_name: str
    method: str
    at_once: int
    num_accidents: int


class Accident(NamedTuple):
    """An accident of some kind to a rank, some seconds after this number of tokens of all answers."""

    kind: str
    rank: int
    num_tokens: int
    delay_seconds: float


# --- commands ---------------------------------------------------------------------------------------------------------

def accidents(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench accidents`; return its exit code, 1 if an answer was lost or changed."""
    preset, *words = with_defaults(argv, DEFAULT_KEYS, TOY_PRESET)
    options = raw_values(words)
    place_names = options.pop("places").split(",")
    typed_count, csv_path = options.pop("accidents"), options.pop("csv")
    if not set(place_names) <= set(PLACES):
        raise ValueError(f"places={','.join(place_names)} is not possible: choose among {', '.join(PLACES)}")
    if not typed_count.isdigit() or not int(typed_count):
        raise ValueError(f"accidents={typed_count} is not possible: give a whole number from 1")

    typed_method = options.pop("pipeline_type", "")
    methods = [typed_method] if typed_method else [method for method in METHODS if method not in SHARINGS]
    settings, total = list(product(place_names, methods, AT_ONCE)), int(typed_count)

    rows: list[AccidentRow] = []
    texts: FirstTexts = {}
    with ProgressBar(total=total, unit="accident", file=sys.stderr) as bar:
        for i, (place_name, method, at_once) in enumerate(settings):
            count = total * (i + 1) // len(settings) - total * i // len(settings)
            bar.set_description(f"{place_name}, {method}, {at_once} at once")
            if count:
                case = AccidentCase(i, place_name, method, at_once, count)
                keys = {**METHOD_KEYS.get(method, {}), **options, "pipeline_type": method,
                        "max_requests": str(max(AT_ONCE))}
                rows += rows_of(case, preset, keys, texts)

            bar.update(count)
            if csv_path:
                save(Path(csv_path), COLUMNS, rows)

    print(table(rows))
    return int(any(row["lost"] or row["changed"] for row in rows))


def table(rows: Sequence[AccidentRow]) -> str:
    """Return a table by place and kind of accident, by place and number of answers at once, and for all."""
    groups: dict[tuple[str, str], list[AccidentRow]] = defaultdict(list)
    for row in rows:
        groups[row["place"], row["kind"]].append(row)
    for row in rows:
        groups[row["place"], f"{row['at_once']} at once"].append(row)

    lines = [[*names, *cells(group_rows)] for names, group_rows in groups.items()]
    return in_columns(HEADING, [*lines, ["all", "", *cells(rows)]], 2)


def cells(rows: Sequence[AccidentRow]) -> list[str]:
    """Return the numbers of accidents, affected answers, lost and changed ones among these, and the pauses."""
    columns = "at_once", "lost", "changed"
    counts_by_round = {row["round"]: [row[column] for column in columns] for row in rows}
    num_answers, num_lost, num_changed = map(sum, zip(*counts_by_round.values()))

    seconds = [row["pause"] for row in rows if row["pause"] is not None]
    pause_cells = [f"{median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else [NOT_MEASURED] * 2
    return [*map(str, (len(rows), num_answers, num_lost, num_changed)), *pause_cells]


# --- answers, and accidents that happen to them -----------------------------------------------------------------------

def rows_of(case: AccidentCase, preset: str, keys: Mapping[str, str], texts: FirstTexts) -> Iterator[AccidentRow]:
    """Yield a row for each accident of a case, which has its own pipeline; the case's round is the random seed."""
    random = Random(case.round)
    with tempfile.TemporaryDirectory() as folder, \
            opened(case.place_name, preset, keys, Path(folder), random) as (pipeline, place_of_ranks):
        questions = [(case.round + i) % len(QUESTIONS) for i in range(case.at_once)]
        if not texts.keys() >= {*questions}:
            undisturbed = answer_under_accidents(pipeline, place_of_ranks, [], questions)
            assert not undisturbed.is_lost, "an answer was lost without an accident"
            texts.update(zip(questions, undisturbed.texts))

        # accidents
        kinds = random.sample(place_of_ranks.kinds, len(place_of_ranks.kinds))
        repeated_kinds = list(islice(cycle(kinds), case.num_accidents))
        num_tokens = sum(len(texts[question]) for question in questions)
        case_accidents = planned(place_of_ranks, repeated_kinds, num_tokens)
        outcome = answer_under_accidents(pipeline, place_of_ranks, case_accidents, questions)

        num_changed = sum(texts[question] != text for question, text in zip(questions, outcome.texts))
        lost_and_changed = (case.at_once, 0) if outcome.is_lost else (0, num_changed)
        for accident, pause in zip(case_accidents, outcome.pauses):
            row_cells = *case[:4], accident.kind, accident.rank, pause, *lost_and_changed
            yield dict(zip(COLUMNS, row_cells))


def planned(place_of_ranks: Place, kinds: Sequence[str], num_tokens: int) -> list[Accident]:
    """Return accidents of these kinds, in order, at random moments of answers with `num_tokens` tokens in total."""
    random = place_of_ranks.random_source
    moments = sorted(int(random.uniform(0.0, LATEST_SHARE * num_tokens)) for _ in kinds)

    case_accidents: list[Accident] = []
    for kind, num_tokens_before in zip(kinds, moments):
        delay_seconds = 0.0
        if case_accidents and random.random() < SOON_SHARE:
            num_tokens_before, delay_seconds = case_accidents[-1].num_tokens, random.uniform(0.0, SOON_SECONDS)
        case_accidents.append(Accident(kind, place_of_ranks.victim(kind), num_tokens_before, delay_seconds))
    return case_accidents


class AccidentOutcome(NamedTuple):
    """The outcome of answers: their texts, whether they were lost, and the pause of each accident in seconds: the
    longest time without a token of any answer from then on, None if there were no more tokens."""

    texts: list[list[int]]
    is_lost: bool
    pauses: list[float | None]


def answer_under_accidents(pipeline: Pipeline, place_of_ranks: Place, case_accidents: Sequence[Accident],
                           questions: Sequence[int]) -> AccidentOutcome:
    """Answer the questions with these numbers, at once, while these accidents happen."""
    token_times = [time.monotonic()]
    max_tokens, is_lost = -1, False  # the most tokens of all answers so far

    def cause(accident: Accident) -> float:
        time.sleep(accident.delay_seconds)
        moment = time.monotonic()
        place_of_ranks.strike(accident.kind, accident.rank)
        return moment

    answers = [pipeline.submit(QUESTIONS[question], seed=0, ignore_eos=True) for question in questions]
    with ThreadPoolExecutor(len(case_accidents) or 1) as threads:
        caused = []
        try:
            for _ in chain([""], *answers):
                num_tokens = sum(answer.answer.new_tokens for answer in answers)
                due = [accident for accident in case_accidents if max_tokens < accident.num_tokens <= num_tokens]
                caused += [threads.submit(cause, accident) for accident in due]

                if num_tokens > max_tokens:
                    token_times.append(time.monotonic())
                max_tokens = max(max_tokens, num_tokens)
        except PeerLost as loss:
            is_lost = True
            ProgressBar.write(f"lost: {loss}", file=sys.stderr)

    moments = [accident.result() for accident in caused]
    texts = [answer.answer.token_ids for answer in answers]
    return AccidentOutcome(texts, is_lost, pauses(moments, token_times))


def pauses(moments: Sequence[float], token_times: Sequence[float]) -> list[float | None]:
    """Return, for each moment of an accident, the longest gap between two tokens that ends after it and begins before
    the next accident."""
    gaps = list(zip(token_times, token_times[1:]))
    longest_gaps = []
    for moment in moments:
        next_moment = min((other for other in moments if other > moment), default=math.inf)
        gap_seconds = [end - begin for begin, end in gaps if begin < next_moment and end > moment]
        longest_gaps.append(max(gap_seconds, default=None))
    return longest_gaps
