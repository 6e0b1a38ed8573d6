"""Measurements of one run: what the pipeline costs beside the model, how well the draft guesses, what forms cost.

Usage: python -m scripts.bench overhead|acceptance [PRESET] [key=value ...]
       python -m scripts.bench stages|tp [--help]

overhead    with trees of 64 nodes: rank 0's own time per turn outside model forwards (tree, verification, sampling,
            messages), a stage's own time per segment outside its layers, and the time from send to receive per link
            (medians); and the speed of the method over ar. pipeline_type=serial shows them without ranks that compute
            at the same time and, on a machine with few cores, are in each other's way
acceptance  the mean accepted length, the target's own token included, on the held-out questions of the six tasks with
            the tree of EAGLE-2's paper: 60 nodes with the root, six levels, ten children
stages      types and quantized weights side by side: the time per segment of a stage of random layers, their error, and
            how often the bundled model still finds the same token likeliest
tp          a stage whose layers are shared, with one member, beside the same stage as it is: times and their ratio; and
            how often the members of a group meet in each layer
"""
from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from typing import Any, Iterable

from tqdm import tqdm

from config.presets import ROOT
from config.run_config import RunConfig
from config.words import over, typed
from launch.pipeline import Pipeline
from launch.processes import WRONG
from launch.run import Command, run
from model.drafts import NoDraft
from model.sample import Sampler
from pipeline.decode import Answer, Decoder, Request
from pipeline.strategies import autoregressive
from pipeline.trace import NoTrace, read
from scripts.bench.forms import stages
from scripts.bench.tensor_parallel import tensor_parallel
from scripts.generate import questions

QUESTIONS = ("What does a baker do?", "Write a Python function that adds two numbers.", "Name three animals that swim.",
             "Tell me about a town by the sea.", "How much is 12 times 7? Explain the steps.")
WIDE = 48  # rows from which a segment counts as a wide one


def compare(pipeline: Pipeline) -> None:
    """On rank 0: answer a few questions by turns with ar, with trees of 64 nodes, and with trees as the preset has."""
    config, text, usual = pipeline.config, pipeline.text, pipeline.decoder
    _watch(usual.draft.draft, usual.ring, pipeline.trace)  # type: ignore[attr-defined]
    large = replace(RunConfig(), init_total_token=64, expand_total_token=64)
    decoders = {
        "ar": Decoder(usual.ring, NoDraft(), autoregressive, config.tree, usual.max_length),
        "64 nodes": Decoder(usual.ring, usual.draft, usual.strategy, large.tree, usual.max_length),
        "preset": usual}
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for i, question in enumerate([QUESTIONS[0], *QUESTIONS]):  # the first round warms up
        prompt = text.prompt_ids([question], config.template) if text else list(config.ids)
        request = Request(prompt, Sampler(config.temperature, config.top_p, config.top_k, config.seed),
                          config.max_new_tokens, frozenset(text.end_ids) if text else frozenset())
        texts = []
        for name, decoder in decoders.items():
            with pipeline.trace.span(name if i else "warm-up"):
                answer = _decode(decoder, request)
            texts.append(answer.token_ids)
            speeds[name] += [answer.tokens_per_second] if i else []
        assert texts[0] == texts[1] == texts[2], "two methods wrote different texts"
    print("tokens/s, median of five answers in one run")
    for name, speed in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(speed, speeds["ar"]))
        print(f"  {name if name == 'ar' else f'{config.pipeline_type}, {name}':<36}{statistics.median(speed):8.1f}"
              f"   {ratio:.2f}x ar")


def _decode(decoder: Decoder, request: Request) -> Answer:
    answer, stream = decoder.decode(request)
    with closing(stream):  # type: ignore[type-var]
        for _ in stream:
            pass
    return answer


def _watch(draft: Any, ring: Any, trace: NoTrace) -> None:
    """Leave a span around what models compute on rank 0: the draft's reading and guessing, the target's LM head."""
    def watched(forward: Any) -> Any:
        def watching(*args: Any) -> Any:
            with trace.span("model"):
                return forward(*args)
        return watching

    draft.read, draft.guess, ring.lm_head = watched(draft.read), watched(draft.guess), watched(ring.lm_head)


def report(folder: str) -> None:
    """The table, from the spans of all ranks."""
    spans = read(folder)
    windows = [(span["t0"], span["t1"]) for span in spans if span["name"] == "64 nodes"]
    spans = [span for span in spans if any(a <= span["t0"] and span["t1"] <= b for a, b in windows)]
    ranks = sorted({span["rank"] for span in spans})
    print("\nmedian, and 90th percentile, in milliseconds")
    _row("rank 0, own time per turn", _own(spans, 0, "model"))
    for rank in ranks[1:]:
        _row(f"rank {rank}, own time per segment", _own(spans, rank, "forward"))
    for rank in ranks:
        following = ranks[(rank + 1) % len(ranks)]
        _row(f"link {rank} -> {following}", _flights(spans, rank, following, 1))
        _row(f"link {rank} -> {following}, {WIDE} rows or more", _flights(spans, rank, following, WIDE))


def _own(spans: list[dict[str, Any]], which: int, model: str) -> list[float]:
    """Seconds between two waits, without the model's forwards; turns without any forward do not count."""
    mine = [span for span in spans if span["rank"] == which]
    waits = [span for span in mine if span["name"] == "wait"]
    forwards = [span for span in mine if span["name"] == model]
    own = []
    for before, after in zip(waits, waits[1:]):
        inside = [f["t1"] - f["t0"] for f in forwards if before["t1"] <= f["t0"] <= after["t0"]]
        if inside:
            own.append(after["t0"] - before["t1"] - sum(inside))
    return own


def _flights(spans: list[dict[str, Any]], sender: int, receiver: int, rows: int) -> list[float]:
    """Seconds from the call that sends a segment of at least so many rows until it lies in the next rank's inbox."""
    sent = {tuple(span["nodes"]): span["t0"] for span in spans
            if span["name"] == "send" and span["rank"] == sender and len(span["nodes"]) >= rows}
    return [span["t1"] - sent[tuple(span["nodes"])] for span in spans
            if span["name"] == "recv" and span["rank"] == receiver and tuple(span["nodes"]) in sent]


def _row(name: str, seconds: Iterable[float]) -> None:
    values = sorted(1e3 * value for value in seconds)
    if values:
        print(f"  {name:<36}{statistics.median(values):8.3f}{values[int(0.9 * len(values))]:9.3f}   of {len(values)}")


def overhead(argv: list[str]) -> int:
    defaults = {"max_new_tokens": "64"}
    if "RANK" not in os.environ:  # every rank shall trace into one folder
        defaults["trace"] = tempfile.mkdtemp(prefix="flowspec-")
    argv = over(argv, defaults)
    code = run(Command("scripts.bench overhead", compare), argv)
    if code == 0 and "RANK" not in os.environ:
        report(typed(argv)["trace"])
    return code


def acceptance(argv: list[str]) -> int:
    tree = {"init_total_token": "59", "init_depth": "5", "init_topk": "10", "min_probability": "0"}
    asked = over(argv, {"pipeline_type": "serial", "max_new_tokens": "128", **tree})
    return run(Command("scripts.bench acceptance", judge), asked)


def judge(pipeline: Pipeline) -> None:
    """On rank 0: answer every held-out question of every task."""
    if pipeline.config.max_new_tokens < 2:
        raise ValueError("max_new_tokens=1 leaves nothing to be guessed: give 2 or more")
    means = []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        config = replace(pipeline.config, prompt="", question_file=str(path))
        answers = []
        for question in tqdm(questions(config), desc=path.stem, leave=False):
            answers.append(pipeline.generate(question.turns[:1]).answer)
        passes = sum(a.target_passes for a in answers)
        means.append(sum(a.new_tokens - 1 for a in answers) / passes)
        print(f"  {path.stem:<12}{means[-1]:6.2f}   {len(answers)} answers, "
              f"{sum(a.new_tokens for a in answers)} tokens", flush=True)
    print(f"  {'mean':<12}{statistics.mean(means):6.2f}")


COMMANDS = {"overhead": overhead, "acceptance": acceptance, "stages": stages, "tp": tensor_parallel}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(__doc__)
        return 0 if argv[:1] in (["-h"], ["--help"]) else WRONG
    try:
        return COMMANDS[argv[0]](argv[1:])
    except ValueError as error:
        print(f"flowspec: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
