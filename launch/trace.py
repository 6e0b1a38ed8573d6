"""The trace of a run: the files of its spans, a description of the run, and one clock for several machines.

It knows nothing about what is traced. Ranks of one machine share its monotonic clock; on another machine a rank queries
rank 0 for the time, over the rendezvous's store, and uses the reply with the shortest round trip (Cristian, 1989).
"""
from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

from config.files import SPACE_REMEDY, write
from config.run_config import RunConfig
from config.schema.untrusted import one_line
from launch.spec import RankSpec
from model.text import Text, TokenTexts
from pipeline.trace import CLOCK, OFF, REAL, Clock, NoTrace, Trace, merge, read

NUM_PINGS = 8
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all that share a monotonic clock, even containers


def open_trace(config: RunConfig, rank: int, clock: Clock = REAL) -> NoTrace:
    """Return the trace of one rank, or `OFF` if the configuration names no folder for traces."""
    return Trace(config.trace, rank, clock) if config.trace else OFF


def join_traces(spec: RankSpec) -> None:
    """Join the traces of all ranks that wrote to this machine, and write a description of the run next to them."""
    trace_dir = spec.config.trace
    if trace_dir:
        describe(spec)
        joined_file = merge(trace_dir)
        message = (f"trace: {joined_file} (open it at https://ui.perfetto.dev, or make a page of it: "
                   f"python3 -m scripts.timeline {trace_dir})")
        print(one_line(message), file=sys.stderr)


def describe(spec: RankSpec) -> None:
    """Write `run.json` into the trace's folder, with what its spans lack: what ran, and the text of every token."""
    config, part = spec.config, spec.part
    token_texts: dict[int, str] = {}
    if not config.prompt_ids:
        token_texts = texts(Text(part.folder).tokenizer, occurring(read(config.trace)))

    description = {
        "kind": config.kind,
        "profile": config.profile,
        "method": config.pipeline_type,
        "stages": part.form,
        "model": Path(config.base_dir or config.model_dir).name,
        "draft": config.draft,
        "prompt": config.prompt or Path(config.question_file).name or config.prompt_ids,
        "temperature": config.temperature,
        "seed": config.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "tokens": token_texts,
    }
    content = json.dumps(description, ensure_ascii=False, indent=1)
    write(Path(config.trace) / "run.json", content, SPACE_REMEDY)


def occurring(spans: Iterable[dict[str, Any]]) -> set[int]:
    """Return the ids of all tokens that the spans name."""
    token_ids: set[int] = set()
    for span in spans:
        token_ids.update(span.get("tokens", ()))
        token_ids.update(span.get("answer", ()))
        token_ids.update(span.get("answers", {}).values())
        if "token" in span:
            token_ids.add(span["token"])
    return token_ids


def texts(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str]:
    """Return each token as it reads in the middle of a text; a part of a character as its number in the vocabulary."""
    known_ids = sorted(token_id for token_id in token_ids if token_id < len(tokenizer))
    texts_of_ids = zip(known_ids, map(TokenTexts(tokenizer), known_ids))
    return {token_id: text.name if text.whole else f"\u27e8{token_id}\u27e9" for token_id, text in texts_of_ids}


# --- one clock for several machines -----------------------------------------------------------------------------------

def machine() -> str:
    """Return an identifier of this machine since its last boot."""
    return BOOT.read_text().strip()


def send_time(store: Any, peers: Sequence[int], machine_id: str,
              clock: Callable[[], float] = time.monotonic) -> None:
    """Send the time to all peers on other machines than this one, `NUM_PINGS` times each; runs on rank 0."""
    store.set("clock/0", machine_id)
    for peer in peers:
        if store.get(f"clock/{peer}").decode() != machine_id:
            for ping in range(NUM_PINGS):
                store.get(f"clock/{peer}/ask/{ping}")
                store.set(f"clock/{peer}/time/{ping}", repr(clock()))


def learn_time(store: Any, rank: int, machine_id: str, trace: NoTrace) -> None:
    """Note by how many seconds rank 0's clock is ahead, if it is another machine's; runs on the other ranks."""
    store.set(f"clock/{rank}", machine_id)
    if store.get("clock/0").decode() == machine_id:
        return

    measurements = []  # seconds that a ping took, and by how many rank 0's clock is ahead
    for ping in range(NUM_PINGS):
        sent_at = time.monotonic()
        store.set(f"clock/{rank}/ask/{ping}", "")
        root_time = float(store.get(f"clock/{rank}/time/{ping}"))
        received_at = time.monotonic()
        measurements.append((received_at - sent_at, root_time - (sent_at + received_at) / 2))

    _, seconds_ahead = min(measurements)
    trace.note(CLOCK, time.monotonic(), ahead=seconds_ahead)
