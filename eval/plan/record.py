"""The record that a plan is made of: what the target writes to some questions, and what each draft foresees of it.

The target writes greedily. Each network reads the texts from every token on with features of its own, as deep as it is
worth noting; its likeliest guesses at each place are kept, with what they claim.
"""
from __future__ import annotations

import sys
from typing import Any, NamedTuple, Sequence

from tqdm import tqdm

from config.questions import by_turns
from eval.plan.keys import PlanConfig
from eval.plan.replayed import Network, Table
from eval.recorded import check_room, keep, kept, settings_of
from eval.self_feeding import read_text, unrolled
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.drafts.network import TreeDraft
from model.sample import Sampler
from pipeline.decode import Decoder, Request

DEEPEST = 10  # guesses of its own on which a network's guesses are noted; beyond, they count as those
WIDE = 16  # guesses at each place
SETTINGS = ("base_dir", "model_dir", "eagle_dir", "draft_dir", "ssm", "sets", "data", "question_begin", "question_end",
            "template", "max_new_tokens", "dtype")  # the keys that decide a record
OTHER = "name another traces="
APART = {"time": "virtual", "profile": "server"}  # no matter which: nobody asks for the time


class Written(NamedTuple):
    """One answer: token ids, and what each network guesses along them, by its name."""

    prompt: list[int]
    text: list[int]
    guesses: dict[str, Table]


class Book(NamedTuple):
    """The answers to all questions, the networks by their names, tokens that there are, end tokens, and layers."""

    answers: list[Written]
    networks: dict[str, Network]
    vocab: int
    ends: list[int]
    layers: int


# --- kept in a file ---------------------------------------------------------------------------------------------------

def book_of(config: PlanConfig) -> Book:
    """The record that the file of traces holds, or a new one, which is kept there.

    Raises ValueError if the file holds anything else, a record of other keys or of fewer drafts, or if something is not
    there.
    """
    settings = settings_of(config, SETTINGS)
    found = kept(config.traces, settings, "holds no record of drafts", OTHER)
    if found:
        lacking = set(config.kinds).difference(map(kind_of, found["networks"]))
        if lacking:
            raise ValueError(f"{config.traces} has no guesses of {', '.join(sorted(lacking))}: {OTHER}")
        answers = [Written(**one) for one in found["answers"]]
        networks = {name: Network(*values) for name, values in found["networks"].items()}
        return Book(answers, networks, found["vocab"], found["ends"], found["layers"])
    book = made(config)
    if config.traces:
        written = [one._asdict() for one in book.answers]
        keep(config.traces, settings, {**book._asdict(), "answers": written})
    return book


def kind_of(network: str) -> str:
    """The kind of a network by its name, which has a number behind it where there are several."""
    return network.rstrip("0123456789")


# --- made with the models ---------------------------------------------------------------------------------------------

def made(config: PlanConfig) -> Book:
    """A record by the models themselves, all in this process."""
    usual = config.single(pipeline_type="ar", **APART)
    with as_virtual(prepare(usual)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        assert pipeline.text is not None, "questions are text"
        writer = pipeline.decoder
        readers = _readers(pipeline, config)
        prompts = _prompts(pipeline, config)
        answers = []
        for prompt in tqdm(prompts, desc="record", unit="answer", leave=False, file=sys.stderr):
            ends = frozenset(pipeline.text.end_ids)
            text = writer.whole(Request(prompt, Sampler(), config.run.max_new_tokens, ends)).token_ids
            guesses = {name: _table(decoder, network, prompt, text) for name, (decoder, network) in readers.items()}
            answers.append(Written(prompt, text, guesses))
        networks = {name: Network(network.source, network.lag, network.drifts)
                    for name, (_, network) in readers.items()}
        sizes = pipeline.spec.sizes
        return Book(answers, networks, sizes.vocab, sorted(ends), sizes.layers)


def _readers(pipeline: Pipeline, config: PlanConfig) -> dict[str, tuple[Decoder, TreeDraft]]:
    """A decoder for each network that is there, by the name of the network."""
    found = {}
    for kind in config.kinds:
        decoder = pipeline.decoder_for(config.single(pipeline_type="serial", draft=kind, **APART))
        for network in decoder.draft.networks:
            assert isinstance(network, TreeDraft), network
            found[network.source] = decoder, network
    return found


def _prompts(pipeline: Pipeline, config: PlanConfig) -> list[list[int]]:
    """The questions as token ids, one of each set and then the next of each, so that the first few are of all kinds."""
    text = pipeline.text
    assert text is not None, "questions are text"
    asked = by_turns(config.data, config.chosen_sets, config.run.question_begin, config.run.question_end)
    prompts = [text.prompt_ids([question], config.run.template) for question in asked]
    check_room(prompts, config.run.max_new_tokens, pipeline.spec.context)
    return prompts


def _table(decoder: Decoder, network: TreeDraft, prompt: Sequence[int], text: Sequence[int]) -> Table:
    """What a network guesses at each place of a text, by how many of its own guesses it stands on."""
    tree = read_text(decoder, [*prompt, *text])
    found: list[list[Any]] = [[] for _ in text]
    deepest = DEEPEST if network.lag else 0
    for depth, places, out_TD in unrolled(network, tree, len(prompt), deepest):
        gain_TW, token_TW = network.guess(network.logits(out_TD), WIDE)
        for place, gains, tokens in zip(places, gain_TW.tolist(), token_TW.tolist()):
            listed_there = found[place + 1 - len(prompt)] if place + 1 < len(prompt) + len(text) else []
            assert len(listed_there) in (depth, 0), (place, depth)
            listed_there.append([tokens, gains])
    return found
