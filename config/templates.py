"""How a question is wrapped where nobody says it: in the chat template of the model's tokenizer, if it has one.

It knows nothing about what a template writes: `model/text.py` does.
"""
from __future__ import annotations

from pathlib import Path

from config.run_config import RunConfig
from config.schema.untrusted import Name, read_json

AUTO, OWN, USUAL = "auto", "own", "vicuna"
ALONE = "chat_template.jinja"  # a template in a file of its own


def chosen(template: str, folder: Name) -> str:
    """The template that was named; for `auto` that of the tokenizer in `folder`, or else Vicuna's."""
    if template != AUTO:
        return template
    settings = Path(folder) / "tokenizer_config.json"
    inside = settings.is_file() and read_json(settings).get("chat_template")
    return OWN if inside or (Path(folder) / ALONE).is_file() else USUAL


def tokenizer_folder(config: RunConfig) -> Path:
    """Where the tokenizer of a run lies: with rank 0 of a split, or with the whole model."""
    return Path(config.model_dir) / "stage_0" if config.model_dir else Path(config.base_dir)
