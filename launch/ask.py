"""Answer prompts with a model that is split over a pipeline: print each answer as it settles, then a table of its cost.

Usage: bash run_pipe.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Dict, Tuple

from config.console import PatientStream, say
from config.files import streams, write
from config.methods import METHODS
from config.questions import Question, read
from config.run_config import RunConfig
from config.schema.untrusted import escaped
from launch.conversation import STANDARD_INPUT, converse, with_question
from launch.pipeline import Generation, Pipeline
from launch.progress import ProgressBar
from launch.run import Command
from launch.screen import devices_of, introduction, pieces_of, screen_for, summary
from pipeline.decode import Answer, Coroutine, by_position, concurrent

FIGURES = ("token_ids", "prompt_tokens", "new_tokens", "finish_reason", "prefill_seconds", "decode_seconds",
           "tokens_per_second", "segments", "mean_accepted_length", "acceptance_by_position",
           "misses", "tokens_per_miss", "plain_tokens", "divergence_per_token")  # of an answer, stored in `output`
PLAIN = "ar"  # the method of plain decoding
PLAIN_TOKENS = 24  # of the answer, which plain decoding writes again for a comparison
LEAST_COMPARED = 8  # tokens of an answer that is compared
POSITIONS = 8  # after the first token of a verification: those for which the acceptance rate is printed
RESTED = ("Guessing rested for {rested} of the {tokens} tokens, since plain decoding was faster\n"
          "on {devices}. To see guesses at work: bash run_pipe.sh demo")
Place = Tuple[int, int]  # of an answer: the index of its question, and its turn
Done = Tuple[Place, Answer, Dict[str, Any]]  # an answer with its place, and its entry in `output`


def warn_if_full(pipeline: Pipeline, got: Answer) -> None:
    """Print a warning, with the remedy, if a full context ended an answer."""
    if got.finish_reason == "context":
        size, asked = pipeline.decoder.max_length, pipeline.config.max_length
        more = "raise max_length or" if size == asked else "the model has no more positions, so"
        say(f"the answer ends after {got.new_tokens} of max_new_tokens={pipeline.config.max_new_tokens}, since the "
            f"context of {size} tokens is full: {more} shorten the prompt", "\n")


def record(config: RunConfig, prompt: str, generation: Generation) -> dict[str, Any]:
    """Return the entry of an answer in `output`: times in seconds; rates in tokens per second, prefill included."""
    figures = {name: getattr(generation.answer, name) for name in FIGURES}
    return {"prompt": prompt, "text": generation.text, **figures, "ttft_seconds": generation.answer.prefill_seconds,
            "config": asdict(config)}


def table(answers: list[Answer], config: RunConfig = RunConfig(), whole: float | None = None) -> str:
    """Return the table over all answers; `whole` is their elapsed seconds, if several requests ran at once."""
    tokens = sum(answer.new_tokens for answer in answers)
    prefill = sum(answer.prefill_seconds for answer in answers)
    seconds = prefill + sum(answer.decode_seconds for answer in answers)
    lengths = [length for answer in answers for length in answer.accepted_lengths]
    rows = {
        "tokens": f"{tokens}",
        "seconds": f"{seconds:.2f}",
        "tokens/s": f"{tokens / max(seconds, 1e-9):.2f}",
        "time to first token": f"{prefill / len(answers):.3f} s",
        "verifications": f"{len(lengths)}",
        "mean accepted length": f"{sum(lengths) / max(len(lengths), 1):.2f} (tokens of a verification)"}
    if whole is not None:
        rows["tokens/s"] += " (of an answer)"
        rows["tokens/s of all"] = f"{tokens / max(whole, 1e-9):.2f} (in {whole:.2f} s)"
    rates = by_position(lengths)
    if rates:
        rows["accepted by position"] = ", ".join(f"{rate:.3f}" for rate in rates[:POSITIONS])
    sources = sum((Counter(answer.sources) for answer in answers), Counter())
    if sources:
        rows["guesses in the text"] = ", ".join(f"{count} of {source}" for source, count in sorted(sources.items()))
    if config.lossy_rule and not config.temperature:
        rows["verification"] = f"exact: at temperature 0 verify={config.lossy_rule} changes nothing"
    elif config.lossy_rule:
        nats = sum(answer.divergence for answer in answers) / max(tokens, 1)
        rows["verification"] = f"lossy (verify={config.lossy_rule}): {nats:.3f} nats per token from the model (KL)"
    if config.cluster:
        rows = {"figures": f"{config.kind}: {config.cluster.about} (profile={config.profile})", **rows}
    lines = [f"  {name:<22}{value}" for name, value in rows.items()]
    if rested := sum(answer.plain_tokens for answer in answers):
        lines += ["", RESTED.format(rested=rested, tokens=tokens, devices=devices_of(config))]
    return "\n".join(lines)


def save(path: str, data: Any) -> None:
    """Write JSON atomically. If that fails, print the JSON, so that no answer is lost, and raise ValueError."""
    content = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        write(path, content, "its content is printed above; choose another output=")
    except ValueError:
        print(f"\n{content}", flush=True)
        raise


def ask_one(pipeline: Pipeline) -> None:
    """Answer `prompt`, and print the text as it settles."""
    config = pipeline.config
    if config.live:
        print(f"{introduction(config)}\n")
    if pipeline.text:
        prompt = escaped(config.prompt)
        shown = f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt
        print(f"{shown}\n", flush=True)

    generation = pipeline.submit(config.prompt if pipeline.text else config.ids, waits=False)
    with closing(generation), screen_for(pipeline, config.live) as screen:
        for piece in pieces_of(pipeline.decoder, generation):
            screen.show(generation, piece)
    warn_if_full(pipeline, generation.answer)
    print()
    if config.live:
        compare(pipeline, generation)
    else:
        print(table([generation.answer], config))
    if config.output:
        save(config.output, record(config, config.prompt, generation))


def compare(pipeline: Pipeline, generation: Generation) -> None:
    """Answer the beginning of the question again, by plain decoding, and print how the speeds compare."""
    config, answer = pipeline.config, generation.answer
    print(f"{summary(pipeline, generation)}.")
    if METHODS[config.pipeline_type].target != METHODS[PLAIN].target or answer.new_tokens < LEAST_COMPARED:
        return

    print("\nThe same by plain decoding, one token at a time, to measure that:\n", flush=True)
    decoder = pipeline.decoder_for(replace(config, pipeline_type=PLAIN))
    question = config.prompt if pipeline.text else config.ids
    num_tokens = min(PLAIN_TOKENS, answer.new_tokens)
    plain = pipeline.submit(question, waits=False, decoder=decoder, max_new_tokens=num_tokens)
    with closing(plain), screen_for(pipeline, draws=True, shows_guesses=False) as screen:
        for piece in pieces_of(decoder, plain):
            screen.show(plain, piece)

    mark = "" if config.kind == "real" else f" ({config.kind})"
    fast, slow = answer.decode_rate, plain.answer.decode_rate
    is_same = answer.token_ids[:plain.answer.new_tokens] == plain.answer.token_ids
    print(f"\n{'The same' if is_same else 'Another'} text {fast / slow:.1f} times as fast: "
          f"{fast:.1f} tokens/s, plain decoding {slow:.1f}{mark}.")


def ask_many(pipeline: Pipeline) -> None:
    """Answer a file of questions, turn by turn. Write `output` after each answer, or at the end if it is a stream.

    Up to `max_requests` questions are in progress at once. Answers are stored in the order of the questions.
    """
    config = pipeline.config
    asked = read(config.question_file, *config.question_range)
    answers: list[Answer] = []
    done: dict[Place, dict[str, Any]] = {}
    at_once = bool(config.output) and not streams(config.output)
    turns = sum(len(question.turns) for question in asked)
    clock = pipeline.ring.clock
    begin = clock.now()

    def records() -> list[dict[str, Any]]:
        return [done[place] for place in sorted(done)]

    try:
        with ExitStack() as shown:
            errors = PatientStream(sys.stderr)
            whole_bar = ProgressBar(total=turns, unit="answer", file=errors)
            bar = shown.enter_context(whole_bar)
            below = partial(ProgressBar, unit="token", file=errors, leave=False, disable=config.max_requests == 1)
            bars = [shown.enter_context(below(position=1 + place)) for place in range(config.max_requests)]
            jobs = (_talk(pipeline, number, question, bars) for number, question in enumerate(asked))
            for place, answer, entry in concurrent(jobs, pipeline.decoder, config.max_requests):
                answers.append(answer)
                done[place] = entry
                if at_once:
                    save(config.output, records())
                bar.update()
    finally:
        if config.output and not at_once:
            save(config.output, records())
    whole = clock.now() - begin if config.max_requests > 1 else None
    print(table(answers, config, whole))


def _talk(pipeline: Pipeline, number: int, question: Question, bars: list[ProgressBar]) -> Coroutine[Done]:
    """Answer the turns of a question in order, each after all earlier ones; borrow a progress bar from `bars`."""
    talk: list[str] = []
    bar = bars.pop()
    try:
        for turn, words in enumerate(question.turns):
            asked = [*talk, words] if pipeline.text else pipeline.config.ids
            generation = pipeline.submit(asked, waits=False)
            bar.set_description(f"question {question.id}, turn {turn + 1}", refresh=False)
            bar.reset(pipeline.config.max_new_tokens)
            with closing(generation):
                for _ in generation:
                    bar.update(generation.answer.new_tokens - bar.n)
                    yield None
            warn_if_full(pipeline, generation.answer)
            talk += [words, generation.text]
            entry = {"question_id": question.id, "turn": turn, **record(pipeline.config, words, generation)}
            yield (number, turn), generation.answer, entry
    finally:
        bars.append(bar)


def main(pipeline: Pipeline) -> None:
    """Answer the prompt or the questions of the configuration; runs on rank 0."""
    positions, asked = pipeline.decoder.max_length, pipeline.config.max_length
    if positions < asked != RunConfig.max_length:
        say(f"max_length={asked} is more than the {positions} positions of the model, which prompt and answer share")
    if not pipeline.config.output:
        _answer(pipeline)
        return

    screen = PatientStream(sys.stdout)
    with redirect_stdout(screen):
        _answer(pipeline)
    if isinstance(screen.failure, BrokenPipeError):
        raise screen.failure
    if screen.failure:
        raise ValueError(f"standard output cannot be written ({screen.failure.strerror}): the answer is in "
                         f"{pipeline.config.output}")


def _answer(pipeline: Pipeline) -> None:
    if pipeline.config.question_file:
        ask_many(pipeline)
    elif pipeline.config.prompt == STANDARD_INPUT:
        converse(pipeline)
    else:
        ask_one(pipeline)


GENERATE = Command("scripts.generate", main, fill=with_question)
