"""The texts that drafters learn from: prompts, and what the target writes behind them.

It knows nothing about drafters.
"""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tqdm import trange

from config.questions import OF_TOY, load, read
from eval.pair_keys import SETS
from toy.corpus.dialogues import dialogues
from train.terms import Terms, check, kept
from train.writer import WRITTEN_AT_ONCE, Prompts, Text, Writer

SAVED = 2 * WRITTEN_AT_ONCE  # texts of a batch
OWN = "flowspec boost"  # seed of the bundled models' grammar, which the bundled questions were not made with


def prompts_of(path: Path | None, count: int, seed: int) -> list[str]:
    """So many different prompts at most, by chance: of a file, or of the grammar, bundled questions left out."""
    if path:
        found = dict.fromkeys(question.turns[0] for question in read(path))
    else:
        asked = [asked[0] for asked, _ in dialogues(count, OWN)]
        sets = [load(OF_TOY, name) for name in SETS.split(",")]
        bundled = {question.turns[0] for questions in sets for question in questions}
        found = dict.fromkeys(question for question in asked if question not in bundled)
    chosen = list(found)
    random.Random(seed).shuffle(chosen)
    return chosen[:count]


def texts_of(writer: Writer, prompts: Prompts, folder: Path, terms: Terms) -> list[Text]:
    """What the target writes to these prompts; `folder` keeps it batch by batch.

    Raises ValueError if there are texts of other terms.
    """
    texts: list[Text] = []
    for first in trange(0, len(prompts), SAVED, desc="texts", unit="batch"):
        path, some = folder / f"{first}.pt", prompts[first:first + SAVED]

        def written() -> dict[str, Any]:
            texts = writer.write(some, first)  # noqa: B023
            return {"terms": dict(terms), "texts": list(map(tuple, texts))}

        found = kept(path, written)
        check(path, found["terms"], terms, "another --out")
        texts += [Text(*text) for text in found["texts"]]
    return texts
