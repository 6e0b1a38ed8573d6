"""The measurement beside a prediction: the same methods and questions by processes, in the time of a cluster."""
from __future__ import annotations

import io
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, fields, replace
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from tqdm import tqdm

from config.methods import METHODS
from config.run_config import RunConfig
from config.typed import preset_of, typed
from eval.bench.clocks import Span, own_times
from eval.dsi.predict_keys import PredictConfig
from eval.dsi.predict_virtual import Spent, request_of, spent_on
from eval.dsi.records import Book
from eval.metrics import COMPUTING
from launch.pipeline import Pipeline
from pipeline.trace import read
from sim.cluster import Own

WARM = 8  # tokens of an answer that is not measured
APART = ("output", "trace", "pipeline_type")  # keys that the start of a pipeline gets from here, or not at all


class Measured(NamedTuple):
    """What came of real emulation, in modelled seconds."""

    spent: dict[str, list[Spent]]  # by method, for each answer
    own: Own  # what Python took by itself
    late: float  # seconds by which emulated devices and wires came too late, per second of computing
    other: Counter[str]  # by method, the answers that are not the recorded text


def measured(config: PredictConfig, given: Sequence[str], book: Book) -> Measured:
    """All methods over real processes; `given` are the words of the command. Methods of a ring share a start."""
    ring = [name for name in config.chosen_methods if METHODS[name].target == "ring"]
    copies = [name for name in config.chosen_methods if name not in ring]
    spent: dict[str, list[Spent]] = defaultdict(list)
    other: Counter[str] = Counter()
    spans: list[list[Span]] = []
    total = len(config.chosen_methods) * len(book.answers)
    with tqdm(total=total, unit="answer", desc=f"emulated, {config.profile}", file=sys.stderr) as bar:
        for methods in filter(None, (ring, copies)):
            with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
                for method, took, same in _answers(config, given, book, (folder, *methods)):
                    spent[method].append(took)
                    other[method] += not same
                    bar.update()
                spans.append(read(folder))
    cluster = config.cluster
    assert cluster is not None, "a prediction has an emulated cluster"
    own = asdict(own_times(spans[0], cluster))
    modelled = Own(**{name: seconds / config.slowdown for name, seconds in own.items()})
    return Measured(spent, modelled, lateness([span for some in spans for span in some]), other)


def _answers(config: PredictConfig, given: Sequence[str], book: Book, start: Sequence[str]
             ) -> Iterator[tuple[str, Spent, bool]]:
    """Every question by these methods by turns: what each took, and whether the text is the recorded one.

    `start` is the folder for the trace, and the methods.
    """
    folder, *methods = start
    keys = {key.name for key in fields(RunConfig)}.difference(APART)
    options = {key: value for key, value in typed(given).items() if key in keys}
    options.update(pipeline_type=methods[-1], trace=folder)
    with _opened(preset_of(given), options) as pipeline:
        decoders = {name: pipeline.decoder_for(config.run(name, virtual=False)) for name in methods}
        for decoder in decoders.values():
            asked = request_of(config, book, book.answers[0].prompt)
            decoder.whole(replace(asked, max_new_tokens=min(WARM, asked.max_new_tokens)))
        for one in book.answers:
            for name, decoder in decoders.items():
                answer = decoder.whole(request_of(config, book, one.prompt))
                yield name, spent_on(answer, config.slowdown), answer.token_ids == one.text


@contextmanager
def _opened(preset: str, options: Mapping[str, Any]) -> Iterator[Pipeline]:
    """A pipeline that does not tell at its end where its trace is, since that is read and deleted then."""
    pipeline = Pipeline.open(preset, **options)
    try:
        yield pipeline
    finally:
        with redirect_stderr(io.StringIO()):
            pipeline.close()


def lateness(spans: Sequence[Span]) -> float:
    """By how much emulated devices and wires came too late, in seconds per second of computing on all ranks."""
    late = sum(span["t1"] - span["t0"] for span in spans if span["name"] == "late")
    computed = sum(span["t1"] - span["t0"] for span in spans if span["name"] in COMPUTING)
    return late / computed if computed else 0.0
