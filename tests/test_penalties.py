"""Biases and penalties count along the path, so with them, too, every method writes the same text for a seed."""
from __future__ import annotations

from functools import lru_cache
from itertools import cycle

import pytest
import torch

from config.run_config import RunConfig
from launch.build import sampler_of
from model.law import PathLaw
from model.rules import RULES
from model.sample import Penalties, Sampler, warp
from model.tree import TokenTree
from pipeline.answers import Request
from pipeline.strategies import STRATEGIES
from tests.checkpoints import refused
from tests.test_requests import PROMPTS, by_turns
from tests.test_specinfer import SHAPED
from tests.tiny import CONFIG, DEEP, TINY, Oracle, pipeline, random_tensor, write

NEW = 20
PENALTIES = [Penalties(((7, 2.5), (31, -100.0)), 1.3, 0.4, 0.7),
             Penalties(repetition=1.5),
             Penalties(frequency=0.9), Penalties(((5, 3.0),), presence=-0.8)]
SAMPLERS = [Sampler(penalties=PENALTIES[0]),
            Sampler(1.0, seed=4, min_p=0.05, penalties=PENALTIES[1]),
            Sampler(0.7, top_k=20, seed=9, penalties=PENALTIES[2]),
            Sampler(penalties=PENALTIES[3])]


@lru_cache(maxsize=None)
def reference(deep: bool, prompt: tuple[int, ...], sampler: Sampler) -> list[int]:
    """Decode token by token, with the definitions of OpenAI and Hugging Face."""
    tiny, tokens = DEEP if deep else TINY, list(prompt)
    bias, repetition, frequency, presence = sampler.penalties
    while len(tokens) < len(prompt) + NEW:
        row = tiny.logits(tokens)[-1].clone()
        for token, value in bias:
            row[token] += value
        for token in set(tokens):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
            count = tokens[len(prompt):].count(token)
            row[token] -= count * frequency + (count > 0) * presence
        tokens += sampler(row[None], [len(tokens)])
    return tokens[len(prompt):]


def text(prompt: list[int], sampler: Sampler, deep: bool = False) -> list[int]:
    return reference(deep, tuple(prompt), sampler)


@pytest.mark.parametrize("strategy, stages, samplers", [
    *zip(STRATEGIES, cycle([1, 3]),
         cycle([SAMPLERS[:2], SAMPLERS[2:]]))])
def test_every_strategy_writes_the_reference_text(strategy, stages, samplers):
    with pipeline(TINY, stages, strategy, TINY.twin(0.02)) as decoder:
        for sampler in samplers:
            assert write(decoder, PROMPTS[0], NEW, sampler) == text(PROMPTS[0], sampler)
    assert text(PROMPTS[0], SAMPLERS[0]) != TINY.text(PROMPTS[0], NEW, Sampler())


@pytest.mark.parametrize("strategy", ["continuous", "streaming", "naive"])
@pytest.mark.parametrize("names, samplers", [
    ("eagle3", SAMPLERS[1:3]),
    ("eagle3+twin+suffix", SAMPLERS[::3]),
    ("suffix", SAMPLERS[:2])])
def test_drafts_with_tokens_of_their_own_and_mixtures_change_nothing(strategy, names, samplers):
    with pipeline(DEEP, 2, strategy, DEEP.mixture(names)) as decoder:
        for sampler in samplers:
            assert write(decoder, PROMPTS[2], NEW, sampler) == text(PROMPTS[2], sampler, deep=True)


@pytest.mark.parametrize("strategy", ["streaming", "continuous", "pipedec"])
def test_requests_by_turns_write_what_each_writes_alone(strategy):
    with pipeline(TINY, 3, strategy, TINY.mixture("twin+suffix")) as decoder:
        wanted = [text(prompt, sampler)[:20] for prompt, sampler in zip(PROMPTS, SAMPLERS)]
        assert by_turns(decoder, PROMPTS, SAMPLERS[:3]) == wanted


@pytest.mark.parametrize("strategy", ["serial", "continuous", "streaming"])
def test_long_accepted_paths_are_judged_by_their_own_counts(strategy):
    for sampler in SAMPLERS:
        wanted = text(PROMPTS[0], sampler)
        with pipeline(TINY, 3, strategy, Oracle(PROMPTS[0] + wanted)) as decoder:
            answer = decoder.complete(Request(PROMPTS[0], sampler, NEW))
        assert answer.token_ids == wanted
        assert answer.sources, "the oracle's guesses were not used"  # how many are sent in time depends on the machine


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_judges_drawn_guesses_follows_the_changed_law(rule):
    """Check that a banned token never occurs, and that the only token not banned does."""
    others = tuple((token, -1e9) for token in range(CONFIG.vocab) if token != 8)
    with pipeline(TINY, 2, "serial", TINY.drafters(0.02, 0.1), SHAPED) as decoder:
        for seed in range(5):
            banned = Sampler(1.0, seed=seed, rule=rule, penalties=Penalties(((8, -1e9),)))
            assert 8 not in write(decoder, PROMPTS[1], 10, banned)
        forced = Sampler(1.0, rule=rule, penalties=Penalties(others))
        assert write(decoder, PROMPTS[1], 10, forced) == [8] * 10


def test_a_draft_that_knows_the_penalties_guesses_better():
    accepted = {}
    for knows in (True, False):
        draft = TINY.twin()
        if not knows:
            draft._shaped = lambda tree, nodes, logits_AV: logits_AV
        with pipeline(TINY, 2, "serial", draft) as decoder:
            accepted[knows] = decoder.complete(Request(PROMPTS[0], SAMPLERS[0], NEW)).mean_accepted_length
    assert accepted[True] > accepted[False]


def test_min_p_equals_the_processor_of_transformers():
    from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

    logits = random_tensor(1, 6, 40) * 2
    theirs = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)])
    torch.testing.assert_close(warp(logits, 0.8, 0, 0.9, 0.1),
                               theirs(None, logits.clone()))


def test_the_repetition_penalty_equals_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    tree = TokenTree([3, 7, 9], 10)
    tree.settle(7)
    guess = tree.add(tree.tip, 5, -0.1)
    logits = random_tensor(1, 2, 20)
    ours = PathLaw(Penalties(repetition=1.7), 3).shaped(tree, [tree.tip, guess], logits)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)
    for row, path in enumerate(([3, 7, 9, 7],
                                [3, 7, 9, 7, 5])):
        torch.testing.assert_close(ours[row:row + 1],
                                   theirs(torch.tensor([path]), logits[row:row + 1].clone()))


def test_the_keys_of_a_run_make_the_sampler():
    config = RunConfig(logit_bias="5:-100, 7:2.5", repetition_penalty=1.5, presence_penalty=0.5, min_p=0.1)
    assert sampler_of(config) == Sampler(min_p=0.1,
                                         penalties=Penalties(((5, -100.0), (7, 2.5)), 1.5, 0.0, 0.5))
    for bias in ("5", "a:1", "5:1e9", "5:1,,6:2"):
        with refused(f"logit_bias={bias} is not possible: give token ids and the bias of each one's logit"):
            RunConfig(logit_bias=bias)
    with refused("presence_penalty=3 is not possible: give a number from -2 to 2"):
        RunConfig(presence_penalty=3)
