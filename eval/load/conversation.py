"""Measure the time to the first token of each turn of a conversation, with and without reuse of the ranks' caches.

The prompt of a turn is the whole conversation up to there.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

from tqdm import tqdm

from config.keys import raw_values, with_defaults
from config.presets import TOY_PRESET
from config.questions import bundled, by_turns
from eval.bench import QUESTIONS, request
from eval.tables import in_columns
from launch.pipeline import Pipeline
from pipeline.decode import Answer

TURNS = 10  # per conversation
AROUND = 32  # approximate tokens of a turn's question and template


def conversation(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench conversation`; return its exit code, 1 if reuse changes a text."""
    usual = {"max_new_tokens": "48", "profile": "jetson-7b", "time": "virtual", "pipeline_type": "streaming"}
    preset, *keys = with_defaults(argv, {**usual, "context": "0"}, TOY_PRESET)
    options = raw_values(keys)
    given = options.pop("context")
    if not given.isdecimal():
        raise ValueError(f"context={given} is no number of tokens: give that of the tenth prompt, such as context=8000")
    with Pipeline.open(preset, **{**options, "reuse": "true"}) as pipeline:
        prompts, reused = _reusing(pipeline, int(given))
        again = [0, TURNS - 1] if int(given) else range(TURNS)
        decoder = pipeline.decoder_for(replace(pipeline.config, reuse=False))
        fresh = {turn: decoder.complete(request(pipeline, prompts[turn]))
                 for turn in tqdm(again, unit="turn", desc="reuse=false", leave=False)}
    timed = f"simulated, {options['profile']}" if options["time"] == "virtual" else "in real time"
    print(f"seconds to the first token of each turn ({timed}, {options['pipeline_type']})\n")
    rows = []
    for turn, one in enumerate(reused):
        read = f"{fresh[turn].prefill_seconds:.2f}" if turn in fresh else ""
        rows.append((f"{turn + 1}", f"{one.prompt_tokens}", read, f"{one.prefill_seconds:.2f}", f"{one.reused_tokens}"))
    print(in_columns(("turn", "prompt tokens", "reuse=false", "reuse=true", "reused tokens"), rows, 0))
    same = all(one.token_ids == reused[turn].token_ids for turn, one in fresh.items())
    print(f"\nthe texts are {'the same' if same else 'NOT the same'}")
    return int(not same)


def _reusing(pipeline: Pipeline, context: int) -> tuple[list[list[str]], list[Answer]]:
    """Return the prompts of a conversation, and its answers, each computed after the prefix in the ranks' caches."""
    found: list[Answer] = []
    prompts: list[list[str]] = []
    messages: list[str] = []
    for question in tqdm(_questions(pipeline, context), unit="turn", desc="reuse=true", leave=False):
        prompts.append([*messages, question])
        generation = pipeline.generate(prompts[-1])
        messages += [question, generation.text]
        found.append(generation.answer)
    pipeline.decoder.forget()
    return prompts, found


def _questions(pipeline: Pipeline, context: int) -> list[str]:
    """Return the user's message of each turn. With `context` > 0 the tenth prompt has about this many tokens.

    It imitates an agent: half of it comes in the first turn, as instructions, and the rest as output of tools.
    """
    questions = [*islice(cycle(QUESTIONS), TURNS)]
    if not context:
        return questions
    folder = bundled(pipeline.spec.part.folder)
    assert pipeline.text is not None, "a conversation needs a tokenizer"
    names = sorted(path.stem for path in folder.glob("*.jsonl"))
    ids = pipeline.prompt_ids("\n".join(by_turns(folder, names)), "none")
    ids *= 1 + context // len(ids)
    later = max(1, context // 2 // (TURNS - 1) - pipeline.config.max_new_tokens - AROUND)
    begin, found = 0, []
    for turn, question in enumerate(questions):
        end = context // 2 + later * turn
        found.append(f"{pipeline.text.decode(ids[begin:end])}\n{question}")
        begin = end
    return found
