"""The sources of a draft's guesses: their sums, and the key that names the folder of each that lies in one.

It knows nothing about how they guess (launch/build.py makes them).
"""
from __future__ import annotations

HEAD_KEY, MODEL_KEY, MODELS_KEY = "eagle_dir", "draft_dir", "ssm"  # a head of the model; one small model; several
HEADS = ("eagle", "dflash", "spd")  # the kinds of a head
FOLDERS = {**dict.fromkeys(HEADS, HEAD_KEY), "model": MODEL_KEY, "ssm": MODELS_KEY, "cascade": MODELS_KEY}
ALONE = tuple(name for name, key in FOLDERS.items() if key != MODELS_KEY)  # that lie in one folder
DRAFTS = (  # that the key `draft` takes: sources alone, and the sums that make sense
    "eagle", "model", "suffix", "eagle+suffix", "model+suffix", "eagle+model", "eagle+model+suffix", "ssm", "cascade",
    "cascade+suffix", "dflash", "dflash+suffix", "spd", "spd+suffix", "none")


def reads(draft: str) -> set[str]:
    """The keys of the folders that a draft of this name reads, as `model+suffix`."""
    return {FOLDERS[source] for source in draft.split("+") if source in FOLDERS}
