"""Speeds that follow from a profile and a record of texts, beside those of the same methods in real emulation.

No model is computed for a prediction. In virtual time the strategies, trees, drafts, rings and replicas are those of a
real run; only the target's tokens and the drafter's guesses are read out of the record (`eval/recorded.py`).
"""
from __future__ import annotations

import sys
from dataclasses import fields, replace
from itertools import product
from typing import Any, Dict, List, NamedTuple, Sequence

from tqdm import tqdm

from config.cli import flat, parse
from config.files import write_json
from config.keys import preset_of, raw_values
from config.methods import METHODS
from config.run_config import RunConfig
from eval.dsi import formulas
from eval.dsi.acceptance import rate
from eval.dsi.keys import COMMAND
from eval.dsi.records import Book, Drafter, PredictConfig, book_of, words
from eval.metrics import NAN
from eval.recorded import Recorded, sampler_of
from eval.tables import in_columns, number
from launch.build import build_decoder, build_passes, build_ring
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.drafts.mixture import Mixture
from pipeline.decode import Answer, Request

WARM = 8  # tokens of an answer that is not measured
APART = ("output", "trace", "pipeline_type")  # keys that the start of a pipeline does not get from the command
COLUMNS = ("", "predicted", "measured", "ratio", "closed form", "ratio")
NOTE = """\
tokens/s, prefill included. predicted: simulated in virtual time by the methods' own code, out of the profile and the
record alone. measured: emulated in real time. closed form: out of T, d, a and a hop, in the long run. Ratios are to
measured."""


class Row(NamedTuple):
    """Tokens per second of a method; NaN: not measured."""

    predicted: float
    measured: float
    closed: float


Rows = Dict[str, Row]  # by method
Answers = Dict[str, List[Answer]]  # by method


def request_of(config: PredictConfig, book: Book, prompt: Sequence[int]) -> Request:
    """The request whose answer is in the record."""
    return Request(prompt, sampler_of(config.run), config.run.max_new_tokens, frozenset(book.ends))


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers together, prefill included."""
    seconds = sum(answer.seconds for answer in answers)
    return sum(answer.new_tokens for answer in answers) / seconds


def predicted(config: PredictConfig, book: Book, method: str) -> list[Answer]:
    """The answers by a method in virtual time, each on a cluster of its own over the record."""
    run = config.single(method, virtual=True)
    answers = []
    for one in book.answers:
        recorded = Recorded(book.vocab, one.prompt, one.text)
        matches = one.coupled if method == "dsi" else one.likeliest  # replicas draft with the target's noise
        with as_virtual(prepare(run), answers=lambda _: recorded) as rank_0:  # noqa: B023 (used in this turn)
            spec, clock = rank_0.spec, rank_0.clock
            ring = build_ring(spec, recorded.lm_head, rank_0.wires.links, rank_0.trace, clock)
            draft = Mixture([Drafter(recorded, matches, spec.slots)])
            passes = build_passes(spec, rank_0.trace, clock)
            decoder = build_decoder(spec, ring, draft, spec.config.tree, passes)
            ring.start()
            answer = decoder.whole(request_of(config, book, one.prompt))
            ring.stop()
        assert answer.token_ids == one.text, "the text of a prediction is the recorded one"
        answers.append(answer)
    return answers


# --- out of four numbers ----------------------------------------------------------------------------------------------

class Numbers(NamedTuple):
    """Milliseconds of a forward of the target, of a guess, and of a message; the acceptance rate; stages of a pipeline.
    """

    target: float
    drafter: float
    hop: float
    acceptance: float
    stages: int


def numbers_of(config: PredictConfig, book: Book) -> Numbers:
    """What the closed forms know of the cluster and the record."""
    run = config.single("ar", virtual=True)
    profile = run.cluster
    assert profile is not None, "a prediction has an emulated cluster"
    acceptance = rate([one.likeliest for one in book.answers]).value
    stages = len(prepare(run).spec(0).part.stages) - 1  # rank 0 holds no layers
    return Numbers(profile.model, profile.level, profile.latency, acceptance, stages)


def closed_form(config: PredictConfig, method: str, numbers: Numbers) -> float:
    """Tokens per second in the long run by the closed form of a method.

    `serial` is SI over a pipeline, whose answers take the pipeline's latency. `pipeinfer` has no form of its own: that
    of `continuous` describes it, with the tip alone at first and then window after window.
    """
    target, drafter, hop, acceptance, stages = numbers
    if method == "dsi":
        cost = formulas.dsi_rate(target, drafter, acceptance, config.run.tree.lookahead)
    elif method == "serial":
        latency = formulas.latency(target, stages, hop)
        cost = formulas.si_rate(latency, drafter, acceptance, config.run.init_depth + 1)
    else:
        guesses = config.run.run_pipeinfer if method == "pipeinfer" else config.run.init_depth + 1
        form = formulas.PIPELINES["continuous" if method == "pipeinfer" else method]
        cost = form(target, drafter, acceptance, guesses, stages, hop)
    return 1e3 / float(cost)


# --- in real time -----------------------------------------------------------------------------------------------------

def measured(config: PredictConfig, given: Sequence[str], book: Book) -> Answers:
    """What each method answers over real processes; `given` are the words of the command.

    Methods of a ring share a start; each question is answered by all by turns.
    """
    keys = {key.name for key in fields(RunConfig)}.difference(APART)
    options: dict[str, Any] = {key: value for key, value in raw_values(given).items() if key in keys}
    starts: dict[str, list[str]] = {}
    for name in config.chosen_methods:
        starts.setdefault(METHODS[name].target, []).append(name)
    asked = [request_of(config, book, one.prompt) for one in book.answers]
    warm = replace(asked[0], max_new_tokens=min(WARM, asked[0].max_new_tokens))
    found: Answers = {name: [] for name in config.chosen_methods}
    total = len(found) * len(asked)
    with tqdm(total=total, unit="answer", desc=f"emulated, {config.run.profile}", file=sys.stderr) as bar:
        for methods in starts.values():
            with Pipeline.open(preset_of(given), **options, pipeline_type=methods[-1]) as pipeline:
                decoders = {name: pipeline.decoder_for(config.single(name, virtual=False)) for name in methods}
                for decoder in decoders.values():
                    decoder.whole(warm)
                for request, (name, decoder) in product(asked, decoders.items()):
                    found[name].append(decoder.whole(request))
                    bar.update()
    return found


# --- the command ------------------------------------------------------------------------------------------------------

def main(argv: Sequence[str]) -> int:
    given = words(argv)
    config = parse(given, f"{COMMAND} predict", kind=PredictConfig)
    book = book_of(config)
    numbers = numbers_of(config, book)
    found = measured(config, given, book) if config.measure else {}
    rows, other = {}, {}
    bar = tqdm(config.chosen_methods, unit="method", desc="predicted", leave=False, file=sys.stderr)
    for name in bar:
        simulated, taken = speed(predicted(config, book, name)), NAN
        if found:
            taken = speed(found[name]) * config.run.slowdown
            other[name] = sum(answer.token_ids != one.text for answer, one in zip(found[name], book.answers))
        rows[name] = Row(simulated, taken, closed_form(config, name, numbers))
    tokens = sum(len(one.text) for one in book.answers)
    print(f"{config.run.profile}, {numbers.stages} boards and rank 0; {len(book.answers)} texts of {tokens} tokens, "
          f"temperature {config.run.temperature:g}; lookahead {config.run.lookahead}\n"
          f"T {numbers.target:g} ms, d {numbers.drafter:g} ms, hop {numbers.hop:g} ms, a {numbers.acceptance:.3f}\n\n"
          f"{table(rows)}\n\n{NOTE}")
    if found:
        print("\n".join(notes(rows, other)))
    if config.run.output:
        speeds = {name: row._asdict() for name, row in rows.items()}
        if not found:
            speeds = {name: {**figures, "measured": None} for name, figures in speeds.items()}
        write_json(config.run.output, {"predicted": "simulated", "measured": "emulated" if found else None,
                                       "keys": flat(config), "tokens_per_second": speeds, "other_texts": other})
    return 0


def table(rows: Rows) -> str:
    """A line for each method."""
    lines = []
    for name, row in rows.items():
        simulated, taken, closed = map(number, row)
        simulated_ratio, _, closed_ratio = (number(value / row.measured, 3) for value in row)
        lines.append([name, simulated, taken, simulated_ratio, closed, closed_ratio])
    return in_columns(COLUMNS, lines)


def notes(rows: Rows, other: dict[str, int]) -> list[str]:
    """The method whose prediction is the furthest off, and what was not answered as recorded."""
    off = {method: row.predicted / row.measured - 1 for method, row in rows.items()}
    method = max(off, key=lambda each: abs(off[each]))
    lines = [f"worst deviation: predicted {off[method]:+.1%} ({method})"]
    different = [f"{count} of {name}" for name, count in other.items() if count]
    if different:
        lines.append(f"answers that are not the recorded text: {', '.join(different)}")
    return lines
