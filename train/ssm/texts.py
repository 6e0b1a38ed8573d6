"""The texts that drafters learn from: prompts, and what the target writes behind them.

It knows nothing about drafters.
"""
from __future__ import annotations

import random
from pathlib import Path

from tqdm import tqdm

from config.files import fits, whole, write_json
from config.questions import OF_TOY, load, read
from eval.pair_keys import SETS
from toy.corpus.dialogues import dialogues
from train.terms import Terms, check
from train.writer import WRITTEN_AT_ONCE, Prompts, Text, Writer

SAVED = 2 * WRITTEN_AT_ONCE  # texts, after which those so far are saved
OWN = "flowspec boost"  # seed of the bundled models' grammar, which the bundled questions were not made with
FORM = {"terms": dict, "texts": [{"prompt": [int], "ids": [int]}]}


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


def texts_of(writer: Writer, prompts: Prompts, path: Path, terms: Terms) -> list[Text]:
    """What the target writes to these prompts, from where `path` ends, which keeps it.

    Raises ValueError if that file is of other terms.
    """
    texts = _kept(path, terms)
    size, done = len(prompts), len(texts)
    with tqdm(total=size, initial=done, desc="texts", unit="text") as bar:
        while len(texts) < size:
            some = prompts[len(texts):len(texts) + SAVED]
            texts += writer.write(some, len(texts))
            content = {"terms": terms, "texts": [text._asdict() for text in texts]}
            write_json(path, content, indent=None)
            bar.update(len(some))
    return texts


def _kept(path: Path, terms: Terms) -> list[Text]:
    """The texts in a file that was begun with these terms; none if there is no file."""
    if not path.exists():
        return []
    found = whole(path, "delete it to begin again")
    if not fits(found, FORM):
        raise ValueError(f"{path} holds no texts; delete it to begin again")
    check(path, found["terms"], terms, "another --out")
    return [Text(entry["prompt"], entry["ids"]) for entry in found["texts"]]
