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

TEXTS_PER_FILE = 2 * WRITTEN_AT_ONCE  # texts per file
GRAMMAR_SEED = "flowspec boost"  # seed for the bundled models' grammar, different from that of the bundled questions


def prompts_of(path: Path | None, max_prompts: int, seed: int) -> list[str]:
    """Return at most `max_prompts` different random prompts, of a file, or of the grammar without bundled questions."""
    if path:
        prompts = dict.fromkeys(question.turns[0] for question in read(path))
    else:
        generated = [turns[0] for turns, _ in dialogues(max_prompts, GRAMMAR_SEED)]
        question_sets = [load(TOY_QUESTIONS, name) for name in SETS.split(",")]
        bundled_questions = {question.turns[0] for questions in question_sets for question in questions}
        prompts = dict.fromkeys(question for question in generated if question not in bundled_questions)
    shuffled_prompts = list(prompts)
    random.Random(seed).shuffle(shuffled_prompts)
    return shuffled_prompts[:max_prompts]


def texts_of(writer: TextWriter, prompts: Prompts, folder: Path, terms: Terms) -> list[SampledText]:
    """Return the target's texts for these prompts; `folder` keeps them batch by batch.

    Raises ValueError if the folder holds texts of other terms.
    """
    texts: list[SampledText] = []
    for first_number in ProgressBar(range(0, len(prompts), TEXTS_PER_FILE), desc="texts", unit="batch"):
        texts_path, some_prompts = folder / f"{first_number}.pt", prompts[first_number:first_number + TEXTS_PER_FILE]

        def written() -> dict[str, Any]:
            texts = writer.write(some_prompts, first_number)  # noqa: B023
            return {"terms": dict(terms), "texts": list(map(tuple, texts))}

        saved_texts = kept(texts_path, written)
        check(texts_path, saved_texts["terms"], terms, "another --out")
        texts += [SampledText(*text) for text in saved_texts["texts"]]
    return texts
