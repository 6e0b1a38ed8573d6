"""SpecInfer's two programs, spec_infer and incr_decoding, with their own flags and files.

Usage: bash scripts/spec_infer.sh [-FLAG VALUE ...] [key=value ...], or bash scripts/incr_decoding.sh; --help shows all
flags, docs/moving.md describes the output.
"""
from __future__ import annotations

from functools import partial
from typing import Sequence

from config import console, questions
from config.console import EXIT_WRONG, say
from config.files import append, check_output
from config.keys import HELP, HELP_WORDS, check_name, raw_values
from config.methods import METHODS
from config.schema.untrusted import escaped, one_line
from eval.specinfer.parse import PROGRAMS, Parser, SpecInferConfig, read
from launch.ask import table
from launch.pipeline import Pipeline
from launch.run import Command, run
from pipeline.answers import Answer

ANOTHER_OUTPUT = "choose another output file"
FIRST_GUID = 1_000_000  # ids of requests are numbered as in the original
MICROSECONDS = 1e6  # per second


def profile_lines(guid: int, answer: Answer, token_ids: Sequence[int], text: str, shows_ttft: bool) -> str:
    """Return SpecInfer's output for a request: figures in microseconds, token ids, and text, both with the prompt.

    With `shows_ttft` it has the time to the first token, as in incremental decoding.
    """
    latency = answer.seconds * MICROSECONDS
    figures = f"guid({guid}) llm_decoding_steps({len(answer.accepted_lengths)}) latency({latency:.3f})"
    if shows_ttft:
        figures += f" ttft({answer.prefill_seconds * MICROSECONDS:.3f})"

    ids = ",".join(map(str, token_ids))
    return f"[Profile] {figures}\ntoken IDs: {ids}\n{text}\n"


def answer_all(pipeline: Pipeline, run_config: SpecInferConfig) -> None:
    """On rank 0: answer the prompts in sequence, and append the lines of each answer as soon as it is complete.

    A prompt that cannot be answered is reported and skipped; the exit code is then EXIT_WRONG.
    """
    config = run_config.run
    answers: list[Answer] = []
    shows_ttft = METHODS[config.pipeline_type].draft == "none"

    prompts = [questions.Question(0, "", (config.prompt,))]
    if config.question_file:
        prompts = questions.read(config.question_file, *config.question_range)

    for prompt_number, question in enumerate(prompts):
        prompt, = question.turns
        print(f"Prompt[{prompt_number}]: {escaped(prompt)}\n", flush=True)
        try:
            prompt_ids = pipeline.prompt_ids(prompt, config.template)
            generation = pipeline.stream(prompt_ids)
            for piece in generation:
                print(escaped(piece), end="", flush=True)
        except ValueError as error:
            say(f"Prompt[{prompt_number}] is skipped: {one_line(str(error))}")
            continue

        answer = generation.answer
        if run_config.lines:
            assert pipeline.text is not None, "a text was encoded"
            token_ids = [*prompt_ids, *answer.token_ids]
            text = pipeline.text.decode(token_ids)
            guid = FIRST_GUID + len(answers)
            append(run_config.lines, profile_lines(guid, answer, token_ids, text, shows_ttft), ANOTHER_OUTPUT)
        answers.append(answer)
        print(f"\n\n{table([answer])}\n", flush=True)

    if len(answers) > 1:
        print(f"All {len(answers)} answers\n\n{table(answers, config)}")
    if len(answers) < len(prompts):
        raise SystemExit(EXIT_WRONG)


START = Command("scripts.spec_infer start", answer_all, SpecInferConfig)


def program(name: str, argv: Sequence[str]) -> int:
    """Run one of SpecInfer's programs from start to end, and return its exit code."""
    if name in HELP_WORDS:
        print(__doc__)
        return 0
    check_name(name, PROGRAMS, "program of SpecInfer")
    if any(word in HELP for word in argv):
        print(Parser(name).format_help(), end="")
        return 0

    call = read(name, argv)
    output_path = raw_values(call.words).get("lines")
    if output_path:
        check_output(output_path, ANOTHER_OUTPUT)
    if call.ignored:
        say(one_line(call.ignored))
    say(f"equivalent command of this project: {call.command}")
    return run(START, call.words)


def main(argv: Sequence[str]) -> int:
    """Run the command, or one of its ranks, and return the exit code."""
    name, *words = argv or [""]
    return run(START, words) if name == "start" else console.run(partial(program, name), words)
