"""Rank 0's own time in a turn of the decoder, by requests at once; and what the turns of a conversation wait for.

In a turn of the decoder all requests that can go on do so once. Counted is the time of the processor in this thread,
without models (LM head, networks of drafts) and without the simulated cluster.

In a conversation each turn's prompt is all that was said so far. Its first token is waited for with and without what
the ranks hold already.
"""
from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any, Callable, Iterable, Iterator, Sequence
from unittest.mock import patch

from tqdm import tqdm

from config.keys import over, raw_values
from config.presets import TOY_PRESET
from config.questions import bundled, by_turns
from eval.bench import QUESTIONS, decoders_of
from eval.load.arrivals import serve
from eval.load.keys import LoadConfig
from eval.load.pipeline import requests_of, words
from eval.tables import in_columns
from launch.pipeline import Pipeline
from launch.run import Command, run
from pipeline.decode import Answer, Decoder, Request

WARM = 2  # requests before anything is counted
LINK = ("send", "recv", "rest", "broadcast")
NETWORK = ("guess", "predict")  # what a network does beside the passes
TURNS = 10  # of a conversation
AROUND = 32  # tokens of a turn's question and template, about
HEAD = ("temperature", "method", "at once", "turns", "own ms a turn", "more per request")


def turns(argv: list[str]) -> int:
    """The command `python -m scripts.bench turns`; its exit code."""
    usual = {"rates": "", "at_once": "1,4,8,16", "methods": "streaming", "requests": "32"}
    return run(Command("scripts.bench turns", measure, LoadConfig), words(over(argv, usual)))


def measure(pipeline: Pipeline, own: LoadConfig) -> None:
    """On rank 0: let each method serve so many requests at once, and print its own time."""
    if not own.run.virtual:
        raise ValueError("rank 0's own time is counted in one thread: leave time=real out")
    rows = []
    decoders = decoders_of(pipeline, own.chosen_methods)
    for temperature in own.chosen_temperatures:
        asked = requests_of(pipeline, own, own.requests, temperature)
        for method, decoder in decoders.items():
            serve(decoder, asked[:WARM], 1)
            took: dict[int, float] = {}
            for count in own.counts:
                taken, took[count] = _own(decoder, asked, count)
                least = min(took)
                more = (took[count] - took[least]) / max(1, count - least)
                milliseconds = (f"{1e3 * seconds:.3f}" for seconds in (took[count], more))
                rows.append([f"{temperature:g}", method, f"{count}", f"{taken}", *milliseconds])
    print(in_columns(HEAD, rows, 2))


def _own(decoder: Decoder, asked: Sequence[Request], count: int) -> tuple[int, float]:
    """How many turns it takes to serve these, `count` at once, and the seconds of each that are rank 0's own."""
    ring, models, all_of_it = decoder.ring, Stopwatch(), Stopwatch()
    networks = {type(network) for network in decoder.draft.networks}
    places = [(ring, "lm_head"), (decoder, "passes"), *product(ring.links, LINK), *product(networks, NETWORK)]
    with models.on(places), all_of_it.on([(decoder, "turn")]):
        serve(decoder, asked, count)
    return all_of_it.calls, (all_of_it.seconds - models.seconds) / all_of_it.calls


class Stopwatch:
    """The time of the processor that calls take; one inside of another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which is timed."""
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside, begin = True, time.thread_time()
            self.calls += 1
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - begin
                self._inside = False
        return timed

    @contextmanager
    def on(self, places: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Time these calls, each an attribute of an object or of a class, until the end."""
        with ExitStack() as watched:
            for place, name in places:
                watched.enter_context(patch.object(place, name, self.around(getattr(place, name))))
            yield


# --- the turns of a conversation --------------------------------------------------------------------------------------

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
        again = [0, TURNS - 1] if int(given) else [*range(TURNS)]
        fresh = dict(zip(again, _read_again(pipeline, [prompts[turn] for turn in again])))
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


def _read_again(pipeline: Pipeline, prompts: Sequence[Sequence[str]]) -> Iterator[Answer]:
    """The answers to these prompts where nothing is held."""
    config = replace(pipeline.config, reuse=False)
    decoder = pipeline.decoder_for(config)
    for prompt in tqdm(prompts, unit="turn", desc="reuse=false", leave=False):
        ids = pipeline.prompt_ids(prompt, config.template)
        yield decoder.whole(pipeline.request(ids, config, ""))


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
