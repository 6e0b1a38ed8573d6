"""The texts that drafters learn from: prompts, and the target's texts for them.

This module knows nothing about drafters.
"""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from config.questions import TOY_QUESTIONS, load, read
from eval.pair_keys import SETS
from launch.progress import ProgressBar
from toy.corpus.dialogues import dialogues
from train.terms import Terms, check, kept
from train.writer import WRITTEN_AT_ONCE, Prompts, SampledText, TextWriter

SAVED = 2 * WRITTEN_AT_ONCE  # texts per file
OWN = "flowspec boost"  # seed for the bundled models' grammar, different from that of the bundled questions


def prompts_of(path: Path | None, count: int, seed: int) -> list[str]:
    """Return at most `count` different random prompts, from a file, or from the grammar without bundled questions."""
    if path:
        found = dict.fromkeys(question.turns[0] for question in read(path))
    else:
        generated = [turns[0] for turns, _ in dialogues(count, OWN)]
        sets = [load(TOY_QUESTIONS, name) for name in SETS.split(",")]
        bundled = {question.turns[0] for questions in sets for question in questions}
        found = dict.fromkeys(question for question in generated if question not in bundled)
    chosen = list(found)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def texts_of(writer: TextWriter, prompts: Prompts, folder: Path, terms: Terms) -> list[SampledText]:
    """Return the target's texts for these prompts; `folder` keeps them batch by batch.

    Raises ValueError if the folder holds texts of other terms.
    """
    texts: list[SampledText] = []
    for first in ProgressBar(range(0, len(prompts), SAVED), desc="texts", unit="batch"):
        path, some = folder / f"{first}.pt", prompts[first:first + SAVED]

        def written() -> dict[str, Any]:
            texts = writer.write(some, first)  # noqa: B023
            return {"terms": dict(terms), "texts": list(map(tuple, texts))}

        found = kept(path, written)
        check(path, found["terms"], terms, "another --out")
        texts += [SampledText(*text) for text in found["texts"]]
    return texts
