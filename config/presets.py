"""The presets: a name for a model and the options that go with it.

Paths are made from the repository's own folder, so a preset works wherever the command is typed.
"""
from __future__ import annotations

from pathlib import Path

from config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent  # the repository

PRESETS = {
    "toy": RunConfig(
        base_dir=str(ROOT / "toy" / "llama"),
        eagle_dir=str(ROOT / "toy" / "eagle"),
        stages="0+2+2+2+2",
        template="vicuna",
        prompt="Tell me a short story about a curious fox called Maya.",
    ),
}
