"""A conversation of several turns: what each waits for its first token, with and without what the ranks hold already.

Each turn's prompt is the whole conversation so far. The texts of both ways are compared.
"""
from __future__ import annotations

from itertools import cycle, islice
from typing import NamedTuple

from tqdm import tqdm

from config.typed import over, preset_of, typed
from eval.bench.overhead import QUESTIONS
from launch.pipeline import Pipeline

TURNS = 10


class Turn(NamedTuple):
    """One turn: tokens of its prompt, how many of them were not read again, seconds to its first token, its tokens."""

    prompt: int
    reused: int
    first: float
    text: list[int]


def conversation(argv: list[str]) -> int:
    """The command `python -m scripts.bench conversation`; its exit code, 1 if a text depends on what was reused."""
    usual = {"max_new_tokens": "48", "profile": "jetson-7b", "time": "virtual", "pipeline_type": "streaming"}
    words = over(argv, usual)
    options = {key: value for key, value in typed(words).items() if key != "reuse"}
    preset = preset_of(words) or "toy"
    fresh, reused = (_turns(preset, options, reuse) for reuse in ("false", "true"))
    kind = "simulated" if options["time"] == "virtual" else "in real time"
    print(f"seconds to the first token of each turn ({kind}, {options['profile']}, {options['pipeline_type']})\n")
    print(f"{'turn':>4}  {'prompt':>6}  {'read again':>10}  {'reuse=true':>10}  {'of which held':>13}")
    for number, (before, after) in enumerate(zip(fresh, reused), 1):
        print(f"{number:>4}  {before.prompt:>6}  {before.first:>10.2f}  {after.first:>10.2f}  {after.reused:>13}")
    same = [turn.text for turn in fresh] == [turn.text for turn in reused]
    print(f"\nthe texts are {'the same' if same else 'NOT the same'}")
    return int(not same)


def _turns(preset: str, options: dict[str, str], reuse: str) -> list[Turn]:
    """The turns of one conversation."""
    found: list[Turn] = []
    said: list[str] = []
    with Pipeline.open(preset, **{**options, "reuse": reuse}) as pipeline:
        for question in tqdm([*islice(cycle(QUESTIONS), TURNS)], unit="turn", desc=f"reuse={reuse}"):
            said.append(question)
            generation = pipeline.generate(said)
            said.append(generation.text)
            answer = generation.answer
            found.append(Turn(answer.prompt_tokens, answer.reused_tokens, answer.prefill_seconds, answer.token_ids))
    return found
