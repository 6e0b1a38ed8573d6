"""Answer prompts with a model that is split over a pipeline: print each answer as it settles, then a table of its cost.

Usage: bash run_pipe.sh [PRESET] [key=value ...]; --help shows all keys.
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import closing, redirect_stdout
from dataclasses import asdict, replace
from typing import Any, Dict, Tuple

from config.cli import RUN_PIPE
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
from pipeline.answers import Answer, by_position
from pipeline.concurrent import Coroutine, concurrent

FIGURES = ("token_ids", "prompt_tokens", "new_tokens", "finish_reason", "prefill_seconds", "decode_seconds",
           "tokens_per_second", "segments", "mean_accepted_length", "acceptance_by_position",
           "misses", "tokens_per_miss", "plain_tokens", "trial_tokens",
           "divergence_per_token")  # of an answer, stored in `output`
PLAIN = "ar"  # the method of plain decoding
PLAIN_TOKENS = 24  # of the answer, which plain decoding writes again for a comparison
MIN_COMPARED_TOKENS = 8  # tokens of an answer that is compared
MAX_POSITIONS = 8  # after the first token of a verification: those for which the acceptance rate is printed
RESTED = ("Guessing rested for {rested} of the {tokens} tokens, since plain decoding was faster\n"
          "on {devices}; its trials cost {trials:.1f} tokens. To see guesses at work: {command} demo")
AnswerKey = Tuple[int, int]  # the index of its question, and its turn
FinishedAnswer = Tuple[AnswerKey, Answer, Dict[str, Any]]  # with its entry in `output`


def warn_of_end(pipeline: Pipeline, generation: Generation) -> None:
    """Print a warning, with the remedy, if a full context or a loop ended an answer."""
    answer = generation.answer
    if pipeline.is_stopped_loop(generation):
        say("the answer is stopped, since it repeats itself (stop_loops=true)", "\n")
    if answer.finish_reason == "context":
        max_length, typed_max_length = pipeline.decoder.max_length, pipeline.config.max_length
        is_as_typed = max_length == typed_max_length
        remedy = "raise max_length or" if is_as_typed else "the model has no more positions, so"
        say(f"the answer ends after {answer.new_tokens} of max_new_tokens={pipeline.config.max_new_tokens}, since the "
            f"context of {max_length} tokens is full: {remedy} shorten the prompt", "\n")


def record(config: RunConfig, prompt: str, generation: Generation) -> dict[str, Any]:
    """Return the entry of an answer in `output`: times in seconds; rates in tokens per second, prefill included."""
    figures = {name: getattr(generation.answer, name) for name in FIGURES}
    return {"prompt": prompt, "text": generation.text, **figures, "ttft_seconds": generation.answer.prefill_seconds,
            "config": asdict(config)}


def table(answers: list[Answer], config: RunConfig = RunConfig(), whole: float | None = None) -> str:
    """Return the table over all answers; `whole` is their elapsed seconds, if several requests ran at once."""
    num_tokens = sum(answer.new_tokens for answer in answers)
    prefill_seconds = sum(answer.prefill_seconds for answer in answers)
    total_seconds = prefill_seconds + sum(answer.decode_seconds for answer in answers)
    accepted_lengths = [length for answer in answers for length in answer.accepted_lengths]
    settling_lengths = [length for length in accepted_lengths if length]

    rows = {
        "tokens": f"{num_tokens}",
        "seconds": f"{total_seconds:.2f}",
        "tokens/s": f"{num_tokens / max(total_seconds, 1e-9):.2f}",
        "time to first token": f"{prefill_seconds / len(answers):.3f} s",
        "verifications": f"{len(accepted_lengths)}"}
    if settling_lengths:
        mean_length = sum(settling_lengths) / len(settling_lengths)
        rows["mean accepted length"] = f"{mean_length:.2f} (tokens of a verification that settled any)"
    if whole is not None:
        rows["tokens/s"] += " (of an answer)"
        rows["tokens/s of all"] = f"{num_tokens / max(whole, 1e-9):.2f} (in {whole:.2f} s)"

    # guesses
    acceptance_rates = by_position(accepted_lengths)
    if acceptance_rates:
        rows["accepted by position"] = ", ".join(f"{rate:.3f}" for rate in acceptance_rates[:MAX_POSITIONS])
    source_counts = sum((Counter(answer.sources) for answer in answers), Counter())
    if source_counts:
        count_texts = [f"{count} of {source}" for source, count in sorted(source_counts.items())]
        rows["guesses in the text"] = ", ".join(count_texts)

    # verification
    if config.lossy_rule and not config.temperature:
        rows["verification"] = f"exact: at temperature 0 verify={config.lossy_rule} changes nothing"
    elif config.lossy_rule:
        nats = sum(answer.divergence for answer in answers) / max(num_tokens, 1)
        rows["verification"] = f"lossy (verify={config.lossy_rule}): {nats:.3f} nats per token from the model (KL)"

    if config.cluster:
        rows = {"figures": f"{config.kind}: {config.cluster.about} (profile={config.profile})", **rows}
    lines = [f"  {name:<22}{value}" for name, value in rows.items()]

    rested_tokens = sum(answer.plain_tokens for answer in answers)
    if rested_tokens:
        rested_line = RESTED.format(rested=rested_tokens, tokens=num_tokens, devices=devices_of(config),
                                    trials=sum(answer.trial_tokens for answer in answers), command=RUN_PIPE)
        lines += ["", rested_line]
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
        shown_prompt = f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt
        print(f"{shown_prompt}\n", flush=True)

    generation = pipeline.submit(config.prompt if pipeline.text else config.ids, waits=False)
    if pipeline.text:
        pipeline.text.end_sandbox()  # there is no other prompt
    with closing(generation), screen_for(pipeline, config.live) as screen:
        for piece in pieces_of(pipeline.decoder, generation):
            screen.show(generation, piece)

    warn_of_end(pipeline, generation)
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
    if METHODS[config.pipeline_type].target != METHODS[PLAIN].target or answer.new_tokens < MIN_COMPARED_TOKENS:
        return

    print("\nThe same by plain decoding, one token at a time, to measure that:\n", flush=True)
    decoder = pipeline.decoder_for(replace(config, pipeline_type=PLAIN))
    question = config.prompt if pipeline.text else config.ids
    num_tokens = min(PLAIN_TOKENS, answer.new_tokens)
    plain_generation = pipeline.submit(question, waits=False, decoder=decoder, max_new_tokens=num_tokens)
    with closing(plain_generation), screen_for(pipeline, draws=True, shows_guesses=False) as screen:
        for piece in pieces_of(decoder, plain_generation):
            screen.show(plain_generation, piece)

    mark = "" if config.kind == "real" else f" ({config.kind})"
    fast_rate, slow_rate = answer.decode_rate, plain_generation.answer.decode_rate
    is_same = answer.token_ids[:plain_generation.answer.new_tokens] == plain_generation.answer.token_ids
    print(f"\n{'The same' if is_same else 'Another'} text {fast_rate / slow_rate:.1f} times as fast: "
          f"{fast_rate:.1f} tokens/s, plain decoding {slow_rate:.1f}{mark}.")


def ask_many(pipeline: Pipeline) -> None:
    """Answer a file of questions, turn by turn. Write `output` after each answer, or at the end if it is a stream.

    Up to `max_requests` questions are in progress at once. Answers are stored in the order of the questions.
    """
    config = pipeline.config
    questions = read(config.question_file, *config.question_range)
    num_turns = sum(len(question.turns) for question in questions)
    answers: list[Answer] = []
    entries: dict[AnswerKey, dict[str, Any]] = {}
    saves_each = bool(config.output) and not streams(config.output)
    clock = pipeline.ring.clock
    started_at = clock.now()

    def save_entries() -> None:
        save(config.output, [entries[key] for key in sorted(entries)])

    try:
        jobs = (_talk(pipeline, index, question) for index, question in enumerate(questions))
        with ProgressBar(total=num_turns, unit="answer", file=PatientStream(sys.stderr)) as progress_bar:
            for key, answer, entry in concurrent(jobs, pipeline.decoder, config.max_requests):
                answers.append(answer)
                entries[key] = entry
                if saves_each:
                    save_entries()
                progress_bar.update()
    finally:
        if config.output and not saves_each:
            save_entries()

    elapsed_seconds = clock.now() - started_at if config.max_requests > 1 else None
    print(table(answers, config, elapsed_seconds))


def _talk(pipeline: Pipeline, index: int, question: Question) -> Coroutine[FinishedAnswer]:
    """Answer the turns of a question in order, each after all earlier ones."""
    messages: list[str] = []
    for turn, user_text in enumerate(question.turns):
        request = [*messages, user_text] if pipeline.text else pipeline.config.ids
        generation = pipeline.submit(request, waits=False)
        with closing(generation):
            for _ in generation:
                yield None

        warn_of_end(pipeline, generation)
        messages += [user_text, generation.text]
        entry = {"question_id": question.id, "turn": turn, **record(pipeline.config, user_text, generation)}
        yield (index, turn), generation.answer, entry


def main(pipeline: Pipeline) -> None:
    """Answer the prompt or the questions of the configuration; runs on rank 0."""
    num_positions, max_length = pipeline.decoder.max_length, pipeline.config.max_length
    if num_positions < max_length != RunConfig.max_length:
        say(f"max_length={max_length} is more than the {num_positions} positions of the model, which prompt and answer "
            "share")

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
