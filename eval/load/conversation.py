"""What the turns of a conversation wait for: each one's prompt is all that was said so far.

Its first token is waited for with and without what the ranks hold already.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

from tqdm import tqdm

from config.keys import over, raw_values
from config.presets import TOY_PRESET
from config.questions import bundled, by_turns
from eval.bench import QUESTIONS, request
from eval.tables import in_columns
from launch.pipeline import Pipeline
from pipeline.decode import Answer

TURNS = 10  # of a conversation
AROUND = 32  # tokens of a turn's question and template, about


def conversation(argv: list[str]) -> int:
    """The command `python -m scripts.bench conversation`; its exit code, 1 if a text depends on what was reused."""
    usual = {"max_new_tokens": "48", "profile": "jetson-7b", "time": "virtual", "pipeline_type": "streaming"}
    preset, *keys = over(argv, {**usual, "context": "0"}, TOY_PRESET)
    options = raw_values(keys)
    given = options.pop("context")
    if not given.isdecimal():
        raise ValueError(f"context={given} is no number of tokens: give that of the tenth prompt, as context=8000")
    with Pipeline.open(preset, **{**options, "reuse": "true"}) as pipeline:
        prompts, reused = _held(pipeline, int(given))
        again = [0, TURNS - 1] if int(given) else range(TURNS)
        decoder = pipeline.decoder_for(replace(pipeline.config, reuse=False))  # with which nothing is held
        fresh = {turn: decoder.whole(request(pipeline, prompts[turn]))
                 for turn in tqdm(again, unit="turn", desc="reuse=false", leave=False)}
    timed = f"simulated, {options['profile']}" if options["time"] == "virtual" else "in real time"
    print(f"seconds to the first token of each turn ({timed}, {options['pipeline_type']})\n")
    rows = []
    for turn, one in enumerate(reused):
        read = f"{fresh[turn].prefill_seconds:.2f}" if turn in fresh else ""
        rows.append((f"{turn + 1}", f"{one.prompt_tokens}", read, f"{one.prefill_seconds:.2f}", f"{one.reused_tokens}"))
    print(in_columns(("turn", "prompt", "read again", "reuse=true", "of which held"), rows, 0))
    same = all(one.token_ids == reused[turn].token_ids for turn, one in fresh.items())
    print(f"\nthe texts are {'the same' if same else 'NOT the same'}")
    return int(not same)


def _held(pipeline: Pipeline, context: int) -> tuple[list[list[str]], list[Answer]]:
    """The prompts of one conversation, and its answers, each of which begins behind what the ranks hold."""
    found: list[Answer] = []
    prompts: list[list[str]] = []
    said: list[str] = []
    for question in tqdm(_questions(pipeline, context), unit="turn", desc="reuse=true", leave=False):
        prompts.append([*said, question])
        generation = pipeline.generate(prompts[-1])
        said += [question, generation.text]
        found.append(generation.answer)
    pipeline.decoder.forget()
    return prompts, found


def _questions(pipeline: Pipeline, context: int) -> list[str]:
    """What is said in each turn. With a `context` the tenth prompt has about so many tokens.

    It is an agent's: half of it comes in the first turn, as instructions, and the rest as what its tools find.
    """
    questions = [*islice(cycle(QUESTIONS), TURNS)]
    if not context:
        return questions
    folder = bundled(pipeline.spec.part.folder)
    assert pipeline.text is not None, "a conversation is of texts"
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
