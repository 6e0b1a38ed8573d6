"""The sources of a draft's guesses: their sums, and the keys that name the folders of sources.

It knows nothing about how they guess; launch/drafts.py creates them.
"""
from __future__ import annotations

HEAD_KEY, MODEL_KEY, MODELS_KEY = "eagle_dir", "draft_dir", "ssm"  # a head of the model; one small model; several
HEADS = ("eagle", "dflash", "dspark")  # the kinds of a head
FOLDERS = {**dict.fromkeys(HEADS, HEAD_KEY), "model": MODEL_KEY, "ssm": MODELS_KEY}
ALONE = tuple(name for name, key in FOLDERS.items() if key != MODELS_KEY)  # sources with a single folder
DRAFTS = (  # values of the key `draft`: single sources, and the useful sums
    "eagle", "model", "suffix", "eagle+suffix", "model+suffix", "eagle+model", "eagle+model+suffix", "ssm",
    "dflash", "dflash+suffix", "dspark", "dspark+suffix", "none")

BEST_DRAFT = "eagle+suffix"  # the default on boards and emulated clusters


def reads(draft: str) -> set[str]:
    """Return the keys of the folders that a draft reads, by its name, such as `model+suffix`."""
    return {FOLDERS[source] for source in draft.split("+") if source in FOLDERS}
