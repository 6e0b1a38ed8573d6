"""Ask a model that is split over a pipeline: the answer is printed as it settles, then what it cost.

Usage: bash run_pipe.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any, Callable, Iterator

from tqdm import tqdm

from config.files import streams, write
from config.foreign import harmless
from config.questions import Question, read
from config.run_config import RunConfig
from launch.pipeline import Generation, Pipeline
from launch.run import Command, run
from pipeline.decode import Answer

Show = Callable[[str], Any]


def answer(pipeline: Pipeline, turns: list[str], show: Show) -> Generation:
    """The answer to the last of `turns`, or to `prompt_ids` without a tokenizer; shown piece by piece as it settles."""
    prompt = turns if pipeline.text else pipeline.config.ids
    generation = pipeline.stream(prompt)
    for piece in generation:
        show(harmless(piece))
    if generation.answer.finish_reason == "context":
        print(f"\nflowspec: {full(pipeline, generation.answer)}", file=sys.stderr)
    return generation


def full(pipeline: Pipeline, got: Answer) -> str:
    """The sentence about an answer that ends because the context is full, with the remedy."""
    size, asked = pipeline.decoder.max_length, pipeline.config.max_length
    more = "raise max_length" if size == asked else "the model has no more positions"
    return (f"the answer ends after {got.new_tokens} of max_new_tokens={pipeline.config.max_new_tokens}, since the "
            f"context of {size} tokens is full: {more}, or shorten the prompt")


def record(config: RunConfig, prompt: str, generation: Generation) -> dict[str, Any]:
    """What `output` keeps of an answer: times in seconds, rates in tokens per second with the prefill included."""
    answer = generation.answer
    return {
        "prompt": prompt,
        "text": generation.text,
        "token_ids": answer.token_ids,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "finish_reason": answer.finish_reason,
        "prefill_seconds": answer.prefill_seconds,
        "decode_seconds": answer.decode_seconds,
        "ttft_seconds": answer.prefill_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "target_passes": answer.target_passes,
        "segments": answer.segments,
        "mean_accepted_length": answer.mean_accepted_length,
        "config": asdict(config)}


def table(answers: list[Answer]) -> str:
    """The short table at the end, over all of these answers."""
    tokens = sum(answer.new_tokens for answer in answers)
    passes = sum(answer.target_passes for answer in answers)
    prefill = sum(answer.prefill_seconds for answer in answers)
    seconds = prefill + sum(answer.decode_seconds for answer in answers)
    accepted = (tokens - len(answers)) / max(passes, 1)  # the prefill settles the first token of an answer
    rows = {
        "tokens": f"{tokens}",
        "seconds": f"{seconds:.2f}",
        "tokens/s": f"{tokens / max(seconds, 1e-9):.2f}",
        "time to first token": f"{prefill / len(answers):.3f} s",
        "target passes": f"{passes}",
        "mean accepted length": f"{accepted:.2f} (with the target's own token)"}
    sources: Counter[str] = Counter()
    for answer in answers:
        sources.update(answer.sources)
    if sources:
        rows["guesses in the text"] = ", ".join(f"{count} of {source}" for source, count in sorted(sources.items()))
    return "\n".join(f"  {name:<22}{value}" for name, value in rows.items())


def questions(config: RunConfig) -> list[Question]:
    """The questions of `question_file` that the configuration chooses."""
    return read(config.question_file, config.question_begin, config.question_end)


def save(path: str, data: Any) -> None:
    """Write JSON whole or not at all. Raises ValueError if it cannot be, and prints it, so that no answer is lost."""
    content = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        write(path, content, "what it should hold stands above; choose another output=")
    except ValueError:
        print(f"\n{content}", flush=True)
        raise


def ask_one(pipeline: Pipeline) -> None:
    """Answer `prompt`, and show the text while it comes."""
    config = pipeline.config
    if pipeline.text:
        prompt = harmless(config.prompt)
        shown = f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt
        print(f"{shown}\n", flush=True)

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    generation = answer(pipeline, [config.prompt], show)
    print("\n")
    print(table([generation.answer]))
    if config.output:
        save(config.output, record(config, config.prompt, generation))


def ask_many(pipeline: Pipeline) -> None:
    """Answer a file of questions, turn by turn; `output` is written after each answer, or once if it is a stream."""
    config, asked = pipeline.config, questions(pipeline.config)
    answers: list[Answer] = []
    records: list[dict[str, Any]] = []
    at_once = bool(config.output) and not streams(config.output)
    turns = sum(len(question.turns) for question in asked)
    try:
        with tqdm(total=turns, unit="answer", file=sys.stderr) as bar:
            for about, generation in _answers(pipeline, asked):
                answers.append(generation.answer)
                records.append({**about, **record(config, about["prompt"], generation)})
                if at_once:
                    save(config.output, records)
                bar.update()
    finally:
        if config.output and not at_once:
            save(config.output, records)
    print(table(answers))


def _answers(pipeline: Pipeline, asked: list[Question]) -> Iterator[tuple[dict[str, Any], Generation]]:
    """Each turn's place in the file, with its prompt, and the answer to it after the turns before."""
    for question in asked:
        talk: list[str] = []
        for number, turn in enumerate(question.turns):
            generation = answer(pipeline, [*talk, turn], lambda piece: None)
            talk += [turn, generation.text]
            yield {"question_id": question.id, "turn": number, "prompt": turn}, generation


def main(pipeline: Pipeline) -> None:
    """On rank 0: answer what the configuration asks."""
    positions, asked = pipeline.decoder.max_length, pipeline.config.max_length
    if positions < asked != RunConfig.max_length:
        print(f"flowspec: max_length={asked} is more than the {positions} positions of the model, which prompt and "
              "answer share", file=sys.stderr)
    if pipeline.config.question_file:
        ask_many(pipeline)
    else:
        ask_one(pipeline)


COMMAND = Command("scripts.generate", main)

if __name__ == "__main__":
    sys.exit(run(COMMAND, sys.argv[1:]))
