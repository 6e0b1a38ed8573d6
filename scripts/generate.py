"""Ask a model that is split over a pipeline: the answer is printed as it settles, then what it cost.

Usage: bash run_pipe.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Callable

from tqdm import tqdm

from config.files import streams, write
from config.questions import Question, read
from config.run_config import RunConfig
from launch.pipeline import Generation, Pipeline
from launch.run import Command, run
from pipeline.decode import Answer


def answer(pipeline: Pipeline, turns: list[str], show: Callable[[str], Any]) -> Generation:
    """The answer to the last of `turns`, or to `prompt_ids`; its text, or its ids, are shown as they settle."""
    generation = pipeline.stream(turns if pipeline.text else pipeline.config.ids)
    for piece in generation:
        show(piece)
    if generation.answer.finish_reason == "context":
        print(f"\nflowspec: {full(pipeline, generation.answer)}", file=sys.stderr)
    return generation


def full(pipeline: Pipeline, got: Answer) -> str:
    """What to do about an answer that ends because the context is full."""
    size, asked = pipeline.decoder.max_length, pipeline.config.max_length
    more = "raise max_length" if size == asked else "the model has no more positions"
    return (f"the answer ends after {got.new_tokens} of max_new_tokens={pipeline.config.max_new_tokens}, since the "
            f"context of {size} tokens is full: {more}, or shorten the prompt")


def record(config: RunConfig, prompt: str, generation: Generation) -> dict[str, Any]:
    """What `output` keeps of an answer; times in seconds, rates in tokens per second, prefill included."""
    answer = generation.answer
    return {
        "prompt": prompt, "text": generation.text, "token_ids": answer.token_ids,
        "prompt_tokens": answer.prompt_tokens, "new_tokens": answer.new_tokens, "finish_reason": answer.finish_reason,
        "prefill_seconds": answer.prefill_seconds, "decode_seconds": answer.decode_seconds,
        "ttft_seconds": answer.prefill_seconds, "tokens_per_second": answer.tokens_per_second,
        "target_passes": answer.target_passes, "segments": answer.segments,
        "mean_accepted_length": answer.mean_accepted_length, "config": asdict(config)}


def table(answers: list[Answer]) -> str:
    """The short table at the end."""
    tokens, passes = sum(a.new_tokens for a in answers), sum(a.target_passes for a in answers)
    seconds = sum(a.prefill_seconds + a.decode_seconds for a in answers)
    rows = [("tokens", f"{tokens}"), ("seconds", f"{seconds:.2f}"), ("tokens/s", f"{tokens / max(seconds, 1e-9):.2f}"),
            ("time to first token", f"{sum(a.prefill_seconds for a in answers) / len(answers):.3f} s"),
            ("target passes", f"{passes}"),
            ("mean accepted length", f"{(tokens - len(answers)) / max(passes, 1):.2f} (with the target's own token)")]
    return "\n".join(f"  {name:<22}{value}" for name, value in rows)


def questions(config: RunConfig) -> list[Question]:
    """The chosen ones of a file."""
    return read(config.question_file, config.question_begin, config.question_end)


def save(path: str, data: Any) -> None:
    """Write JSON whole or not at all. What cannot be written is printed, so that no answer is lost."""
    content = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        write(path, content, "what it should hold stands above; choose another output=")
    except ValueError:
        print(f"\n{content}", flush=True)
        raise


def ask_one(pipeline: Pipeline) -> None:
    """One prompt, streamed."""
    config = pipeline.config
    if pipeline.text:
        print(f"\033[1m{config.prompt}\033[0m\n" if sys.stdout.isatty() else f"{config.prompt}\n", flush=True)

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    generation = answer(pipeline, [config.prompt], show)
    print("\n")
    print(table([generation.answer]))
    if config.output:
        save(config.output, record(config, config.prompt, generation))


def ask_many(pipeline: Pipeline) -> None:
    """A file of questions, turn by turn; what is answered is saved as it comes, or at the end into what streams."""
    config, asked = pipeline.config, questions(pipeline.config)
    answers: list[Answer] = []
    records: list[dict[str, Any]] = []
    at_once = bool(config.output) and not streams(config.output)
    try:
        with tqdm(total=sum(len(question.turns) for question in asked), unit="answer", file=sys.stderr) as bar:
            for question in asked:
                talk: list[str] = []
                for number, turn in enumerate(question.turns):
                    generation = answer(pipeline, [*talk, turn], lambda piece: None)
                    talk += [turn, generation.text]
                    answers.append(generation.answer)
                    place = {"question_id": question.id, "turn": number}
                    records.append({**place, **record(config, turn, generation)})
                    if at_once:
                        save(config.output, records)
                    bar.update()
    finally:
        if config.output and not at_once:
            save(config.output, records)
    print(table(answers))


def main(pipeline: Pipeline) -> None:
    positions, asked = pipeline.decoder.max_length, pipeline.config.max_length
    if positions < asked != RunConfig.max_length:
        print(f"flowspec: max_length={asked} is more than the {positions} positions of the model, which prompt and "
              "answer share", file=sys.stderr)
    (ask_many if pipeline.config.question_file else ask_one)(pipeline)


COMMAND = Command("scripts.generate", main)

if __name__ == "__main__":
    sys.exit(run(COMMAND, sys.argv[1:]))
