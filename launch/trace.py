"""The trace of a run: where its spans go, and what they do not tell of what ran.

It knows nothing about what is traced.
"""
from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any, Iterable

import torch

from config.files import ROOM, write
from config.run_config import RunConfig
from model.text import Text
from model.weights import Part
from pipeline.trace import OFF, NoTrace, Trace, merge, read


def open_trace(config: RunConfig, rank: int) -> NoTrace:
    """The trace of one rank, if the configuration wants one."""
    return Trace(config.trace, rank) if config.trace else OFF


def join_traces(config: RunConfig, part: Part) -> None:
    """Join the traces of all ranks that wrote to this machine, and leave beside them what was run."""
    if config.trace:
        describe(config, part)
        print(f"trace: {merge(config.trace)} (open it at https://ui.perfetto.dev, or make a page of it: python -m "
              f"scripts.timeline {config.trace})", file=sys.stderr)


def describe(config: RunConfig, part: Part) -> None:
    """Leave in the trace's folder what its spans do not tell, `run.json`: what ran, and the text of every token."""
    asked = config.prompt or Path(config.question_file).name or config.prompt_ids
    about = {"kind": "real" if config.profile == "none" else "emulated", "profile": config.profile,
             "method": config.pipeline_type, "stages": part.form,
             "model": Path(config.base_dir or config.model_dir).name, "draft": config.draft, "prompt": asked,
             "temperature": config.temperature, "seed": config.seed,
             "versions": {"python": platform.python_version(), "torch": torch.__version__},
             "tokens": {} if config.prompt_ids else texts(Text(part.folder).tokenizer, occurring(read(config.trace)))}
    write(Path(config.trace) / "run.json", json.dumps(about, ensure_ascii=False, indent=1), ROOM)


def occurring(spans: Iterable[dict[str, Any]]) -> set[int]:
    """The ids of all tokens that the spans name."""
    found: set[int] = set()
    for span in spans:
        found.update(span.get("tokens", ()), span.get("said", {}).values(), span.get("answer", ()))
        found.update([span["token"]] if "token" in span else [])
    return found


def texts(tokenizer: Any, tokens: Iterable[int]) -> dict[int, str]:
    """Each token as it reads in the middle of a text; a part of a character as a number of its vocabulary."""
    found = {}
    for token in sorted(token for token in tokens if token < len(tokenizer)):
        name, text = tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])
        # Sentencepiece drops the space in front of the first word, which every token is when it stands alone.
        found[token] = name.replace("\u2581", " ") if name.startswith("\u2581") else text
        if "\ufffd" in found[token]:
            found[token] = f"\u27e8{token}\u27e9"
    return found
