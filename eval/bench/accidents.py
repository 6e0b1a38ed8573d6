"""Accidents: ranks that are killed or stopped at random moments while answers are made, and what becomes of those.

Every method answers one question at a time and four at once. Each answer is compared with the text that it has without
an accident.
"""
from __future__ import annotations

import random
import signal
import time
from statistics import median
from threading import Timer
from typing import Any, NamedTuple, Sequence

from tqdm import tqdm

from config.keys import over, raw_values
from config.methods import METHODS, SHARINGS
from config.presets import TOY_PRESET
from eval.bench import QUESTIONS
from launch import processes
from launch.pipeline import Generation, Pipeline
from pipeline.failure import PeerLost

USUAL = {"max_new_tokens": "48", "max_length": "1024", "timeout": "2", "temperature": "1", "threads_per_rank": "1"}
MORE: dict[str, dict[str, Any]] = {  # keys that a method needs
    "dsi": {"replicas": "2", "lookahead": "4"}, "specinfer": {"ssm": "toy/draft_a"}}
TOGETHER = 1, 4  # answers under way at once
STOPS = 4  # every so many accidents a rank is stopped instead of killed
OFTEN = 5  # accidents of each case, where the key `often` gives no other number


class Outcome(NamedTuple):
    """What became of the answers of one accident: how many were lost, or have another text."""

    lost: int
    changed: int
    pause: float  # seconds: the longest without a token of any of them


def accidents(argv: list[str]) -> int:
    """The command `python -m scripts.bench accidents`; its exit code."""
    preset, *words = over(argv, USUAL, TOY_PRESET)
    options = dict(raw_values(words))
    chosen, often = options.pop("pipeline_type", ""), options.pop("often", str(OFTEN))
    if not often.isdigit() or not int(often):
        raise ValueError(f"often={often} is not possible: give the number of accidents of a case, from 1")
    methods = [chosen] if chosen else [method for method in METHODS if method not in SHARINGS]
    print(f"  {'method':<14}{'at once':>8}{'accidents':>11}{'answers':>9}{'lost':>6}{'changed':>9}"
          f"{'pause, median':>15}{'worst':>8}")
    bad = 0
    for method in methods:
        for together in TOGETHER:
            keys = {**MORE.get(method, {}), **options}
            keys.update(pipeline_type=method, max_requests=str(together))
            with Pipeline.open(preset, **keys) as pipeline:
                numbers = tqdm(range(int(often)), desc=method)
                outcomes = [struck(pipeline, together, number) for number in numbers]
            lost = sum(outcome.lost for outcome in outcomes)
            changed = sum(outcome.changed for outcome in outcomes)
            answers, pauses = int(often) * together, [outcome.pause for outcome in outcomes]
            print(f"  {method:<14}{together:>8}{often:>11}{answers:>9}{lost:>6}{changed:>9}{median(pauses):>13.1f} s"
                  f"{max(pauses):>6.1f} s", flush=True)
            bad += lost + changed
    return 1 if bad else 0


def struck(pipeline: Pipeline, together: int, number: int) -> Outcome:
    """Let a rank be struck at a random moment while answers are made; the number of the accident is its seed."""
    chance = random.Random(number)
    undisturbed = asked(pipeline, together, number)
    begin = time.monotonic()
    longest_wait(undisturbed)
    seconds = time.monotonic() - begin
    ranks, = processes.started
    sent = signal.SIGSTOP if number % STOPS == STOPS - 1 else signal.SIGKILL
    moment = chance.random() * seconds
    timer = Timer(moment, ranks.send_signal, (chance.choice(ranks.numbers), sent))
    timer.start()
    answers = asked(pipeline, together, number)
    try:
        pause = longest_wait(answers)
    except PeerLost:
        return Outcome(together, 0, 0.0)
    finally:
        timer.join()
    pairs = zip(answers, undisturbed)
    changed = sum(answer.answer.token_ids != whole.answer.token_ids for answer, whole in pairs)
    return Outcome(0, changed, pause)


def asked(pipeline: Pipeline, together: int, number: int) -> Sequence[Generation]:
    """Answers to so many questions, which are made at once."""
    questions = [QUESTIONS[(number + i) % len(QUESTIONS)] for i in range(together)]
    return [pipeline.submit(question, seed=number, ignore_eos=True) for question in questions]


def longest_wait(answers: Sequence[Generation]) -> float:
    """Read answers to their ends; returns the longest time without a token, in seconds."""
    longest, last = 0.0, time.monotonic()
    for answer in answers:
        for _ in answer:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    return longest
