"""The contest of all methods on one ring: clusters by name or drawn at random, and who wins on each by how much.

A point is a cluster with 1, 4 or 8 requests at once. Points with the default draft and one request come first, then
more requests, then the other drafts; so a contest that is interrupted has compared most clusters.
"""
from __future__ import annotations

import itertools
import math
import random
from operator import truediv
from typing import Any, Iterator, Mapping, Sequence

from config.drafts import BEST_DRAFT
from config.profiles import PROFILES, Profile
from eval import metrics
from eval.keys import SETS, Contender
from eval.results_index import ResultsFolder
from eval.tables import number

METHODS = "ar,serial,naive,pruned,pipedec,continuous,pipeinfer,pearl,ssd,streaming"
KEYS = {"methods": METHODS, "sets": SETS, "temperatures": "0,1", "max_new_tokens": "64", "baseline_draft": ""}
OTHER_DRAFTS = "eagle,suffix,model:toy/draft_a+suffix"
NUM_QUESTIONS = 5  # of each set; more requests at once have as many questions
REQUESTS_AT_ONCE = (1, 4, 8)
USUAL_STAGES = 4
STAGES = {"wifi": 3}  # of clusters that do not list their boards, and have fewer
NUM_RANDOM = 20  # clusters
JUDGED = ("streaming", "continuous")
COLUMNS = ("point", "draft", "temperature", "sets", "best_other", *(f"{method}_{figure}" for method in JUDGED
                                                                    for figure in ("mean", "worst")), "equal")
CAPTION = "The ratio of tokens per second; means are over the data sets.\n"
HEADING = ("point", "draft", "T", "best other", *(f"`{method}` over the best other: {figure}" for method in JUDGED
                                                  for figure in ("mean", "worst set")))


def points(num_stages: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Return the keys of each point, given the number of stages of each cluster."""
    keys_by_point: dict[str, dict[str, str]] = {}
    for num_requests, cluster in itertools.product(REQUESTS_AT_ONCE, num_stages):
        keys_by_point[f"{cluster} {num_requests}"] = {
            "profile": cluster, "stages": f"{num_stages[cluster]}", "concurrency": f"{num_requests}",
            "questions": f"{max(NUM_QUESTIONS, num_requests)}", "drafts": BEST_DRAFT}

    for cluster in num_stages:
        keys_of_one = keys_by_point[f"{cluster} {REQUESTS_AT_ONCE[0]}"]
        keys_by_point[f"{cluster} other drafts"] = {**keys_of_one, "drafts": OTHER_DRAFTS}
    return keys_by_point


def named_points() -> dict[str, dict[str, str]]:
    """Return the keys of each point of the clusters that have names."""
    return points({cluster: len(profile.factors) or STAGES.get(cluster, USUAL_STAGES)
                   for cluster, profile in PROFILES.items()})


# --- clusters drawn at random -----------------------------------------------------------------------------------------

def draw(seed: int) -> list[Profile]:
    """Return clusters whose times lie between those of the named ones, with boards and wires that differ.

    There is a stage for each of a cluster's `factors`.
    """
    generator = random.Random(seed)
    return [_draw_one(generator) for _ in range(NUM_RANDOM)]


def _draw_one(generator: random.Random) -> Profile:
    def between(low: float, high: float) -> float:
        return float(f"{math.exp(generator.uniform(math.log(low), math.log(high))):.3g}")

    # boards, from one fast server to 13B on small boards; a level takes 1 to 14 % of the whole model
    num_stages = generator.randint(2, 6)
    model_ms = between(15, 1500)
    level_ms = between(0.01, 0.14) * model_ms

    # wires, from those in one machine to those between cities; each differs from their mean by at most a factor of 2
    latency_ms, mbps = between(0.05, 75), between(50, 10_000)
    ranks = range(num_stages + 1)
    links = []
    for rank in ranks:
        next_rank = (rank + 1) % len(ranks)
        links.append((rank, next_rank, latency_ms * between(0.5, 2), mbps * between(0.5, 2)))

    return Profile(
        f"{num_stages} boards and wires drawn at random", layers=32, row_bytes=8192, model=model_ms,
        row=between(0.0005, 0.03) * model_ms, free=round(between(4, 128)), token=0.0, level=level_ms,
        verdict=level_ms * between(0.5, 1), latency=latency_ms, mbps=mbps, step=latency_ms,
        jitter=latency_ms * between(0.01, 1), factors=tuple(between(0.5, 2) for _ in range(num_stages)),
        links=tuple(links))


# --- who wins ---------------------------------------------------------------------------------------------------------

def judge(results_by_point: Mapping[str, ResultsFolder]) -> list[dict[str, Any]]:
    """Return the row of each point, draft and temperature: the ratio of each judged method to the best other one.

    It is that of the means over the sets, and that of the set in which it is lowest. Sets that not all methods have
    answered do not count. If several requests run at once, speeds are those of all together.
    """
    return [row for point, results in results_by_point.items() for row in _judge_point(point, results)]


def _judge_point(point: str, results: ResultsFolder) -> Iterator[dict[str, Any]]:
    for draft, temperature in itertools.product(results.drafts, results.temperatures):
        rivals = [contender for contender in results.contenders if contender.draft in (draft, "none")]
        sets = [name for name in results.sets if _is_complete(results, rivals, name, temperature)]
        if not sets:
            continue

        # the ratios of each judged method
        speeds = {rival.method: [_speed(results, rival, name, temperature) for name in sets] for rival in rivals}
        judged = [method for method in JUDGED if method in speeds]
        ratios = {}
        for method in judged:
            other_speeds = [speed for name, speed in speeds.items() if name != method]
            best_speeds = [max(speeds_in_set) for speeds_in_set in zip(*other_speeds)]
            ratios[f"{method}_mean"] = sum(speeds[method]) / max(map(sum, other_speeds))
            ratios[f"{method}_worst"] = min(map(truediv, speeds[method], best_speeds))

        # the row
        others = [name for name in speeds if name != judged[0]]
        answers = [answer for rival in rivals for answer in _answers(results, rival, sets, temperature)]
        plain_answers = _answers(results, Contender("ar", "none"), sets, temperature)
        yield {**dict.fromkeys(COLUMNS, math.nan), "point": point, "draft": draft, "temperature": temperature,
               "sets": len(sets), "best_other": max(others, key=lambda name: sum(speeds[name])), **ratios,
               "equal": metrics.equality(answers, plain_answers)}


def _is_complete(results: ResultsFolder, rivals: Sequence[Contender], set_name: str, temperature: float) -> bool:
    answer_counts = {len(results.of(rival, set_name, temperature)) for rival in rivals}
    return len(answer_counts) == 1 and 0 not in answer_counts


def _answers(results: ResultsFolder, contender: Contender, sets: Sequence[str],
             temperature: float) -> list[metrics.AnswerRecord]:
    return [answer for name in sets for answer in results.of(contender, name, temperature)]


def _speed(results: ResultsFolder, contender: Contender, set_name: str, temperature: float) -> float:
    """Return tokens per second on a set: of all requests at once if there are several."""
    answers = results.of(contender, set_name, temperature)
    total_speed = metrics.total_speed(answers)
    return metrics.speed([metrics.sample(answers)]).value if math.isnan(total_speed) else total_speed


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows as cells of a page's table."""
    ratio_columns = COLUMNS[5:-1]
    return [[row["point"], row["draft"], f"{row['temperature']:g}", row["best_other"],
             *(number(row[column], 3) for column in ratio_columns)] for row in rows]
