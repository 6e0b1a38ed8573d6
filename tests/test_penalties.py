"""Biases and penalties count along the path, so with them, too, every method writes the same text for a seed."""
from __future__ import annotations

from functools import lru_cache
from itertools import cycle
from types import SimpleNamespace

import numpy as np
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


def changed(logit_V, text, answer, penalties):
    """Return the logits `[V]` after a text that ends with an answer, by the formulas of vLLM and OpenAI."""
    bias, repetition, frequency, presence = penalties
    row_V = np.asarray(logit_V, dtype=float).copy()
    for token, number in bias:
        row_V[token] += number
    for token in set(text):
        row_V[token] = row_V[token] / repetition if row_V[token] > 0 else row_V[token] * repetition
    for token in set(answer):
        row_V[token] -= frequency * answer.count(token) + presence
    return row_V


@lru_cache(maxsize=None)
def reference(deep: bool, prompt: tuple[int, ...], sampler: Sampler) -> list[int]:
    """Decode token by token, with the definitions of OpenAI and Hugging Face."""
    tiny, tokens = DEEP if deep else TINY, list(prompt)
    while len(tokens) < len(prompt) + NEW:
        row_V = changed(tiny.logits(tokens)[-1], tokens, tokens[len(prompt):], sampler.penalties)
        tokens += sampler(torch.from_numpy(row_V)[None], [len(tokens)])
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


@pytest.mark.parametrize("strategy, names, samplers", [
    ("continuous", "eagle3", SAMPLERS[1:3]), ("streaming", "eagle3", SAMPLERS[::3]),
    ("streaming", "eagle3+twin+suffix", SAMPLERS[::3]), ("naive", "suffix", SAMPLERS[:2])])
def test_drafts_with_tokens_of_their_own_and_mixtures_change_nothing(strategy, names, samplers):
    with pipeline(DEEP, 2, strategy, DEEP.mixture(names)) as decoder:
        for sampler in samplers:
            assert write(decoder, PROMPTS[2], NEW, sampler) == text(PROMPTS[2], sampler, deep=True)


@pytest.mark.parametrize("strategy", ["streaming", "continuous", "pipedec"])
def test_requests_by_turns_write_what_each_writes_alone(strategy):
    with pipeline(TINY, 3, strategy, TINY.mixture("twin+suffix")) as decoder:
        wanted = [text(prompt, sampler) for prompt, sampler in zip(PROMPTS, SAMPLERS)]
        assert by_turns(decoder, PROMPTS, SAMPLERS[:3], NEW) == wanted


@pytest.mark.parametrize("strategy, samplers", [
    ("serial", SAMPLERS[1:3]), ("continuous", SAMPLERS[::2]), ("streaming", SAMPLERS[1::2])])
def test_long_accepted_paths_are_judged_by_their_own_counts(strategy, samplers):
    for sampler in samplers:
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


@pytest.mark.parametrize("columns", [None, [7, 2, 11, 0, 5, 3]], ids=str)  # the tokens that a draft knows
@pytest.mark.parametrize("penalties", [*PENALTIES, Penalties(),
                                       Penalties(((19, 1.0), (2, -0.5)), 0.8, -0.3, 0.2)], ids=str)
def test_logits_on_every_path_of_a_growing_text_are_those_of_the_formulas(penalties, columns):
    penalties = penalties._replace(bias=tuple((token % 20, number) for token, number in penalties.bias))
    column_token_V = None if columns is None else torch.tensor(columns)
    prompt, answer = [3, 7, 9, 7], []
    tree, law = TokenTree(prompt, 30), PathLaw(penalties, len(prompt))
    for turn, token in enumerate((7, 5, 5, 2, 13)):
        first, second = (tree.add(tree.tip, guess, -0.1) for guess in (5, 11))
        nodes = [tree.tip, first, tree.add(first, 5, -0.2), second, tree.add(second, 7, -0.3)]
        paths = [], [5], [5, 5], [11], [11, 7]
        logits_TV = random_tensor(turn, 5, 20)
        expected = np.stack([changed(row, prompt + answer + path, answer + path, penalties)
                             for row, path in zip(logits_TV, paths)])
        before = logits_TV.clone()
        if columns is not None:
            logits_TV, before, expected = (x[:, columns] for x in (logits_TV, before, expected))

        np.testing.assert_allclose(law.shaped(tree, nodes, logits_TV, column_token_V), expected, rtol=1e-12)
        assert torch.equal(logits_TV, before), "the model's own logits are reported, too"
        tree.settle(token)
        answer.append(token)


def test_changed_logits_of_half_precision_are_computed_in_float32():
    tree, penalties = TokenTree([3], 9), Penalties(((2, 0.001),), 1.5, 0.3)
    logits = random_tensor(3, 1, 20).bfloat16()
    got = PathLaw(penalties, 1).shaped(tree, [tree.tip], logits)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got[0], changed(logits[0].double(), [3], [], penalties), rtol=1e-6)


@pytest.mark.parametrize("columns", [None, [7, 2, 11, 0, 5, 3]], ids=str)
def test_a_grammar_excludes_what_it_does_not_allow_also_from_a_draft(columns):
    tree, law = TokenTree([3], 9), PathLaw(Penalties(((2, 5.0),)), 1)
    allowed = {0: {2, 7, 15}, 1: {19}}
    law.follower = SimpleNamespace(
        mask=lambda tree, nodes, size: np.array([[token in allowed[node] for token in range(size)] for node in nodes]),
        allows=lambda tree, node, token: token in allowed[node])
    guess = tree.add(tree.tip, 15, -0.1)
    assert [law.allows(tree, guess, token) for token in (2, 19)] == [False, True]
    assert PathLaw(Penalties(frequency=1.0), 1).allows(tree, guess, 2)
    assert tree.cut() == [tree.tip, guess]

    logits = torch.zeros(2, 20)
    expected = torch.full((2, 20), -float("inf"))
    expected[0, [2, 7, 15]] = torch.tensor([5.0, 0, 0])
    expected[1, 19] = 0
    if columns is None:
        assert torch.equal(law.shaped(tree, [0, 1], logits), expected)
    else:
        got = law.shaped(tree, [0, 1], logits[:, columns], torch.tensor(columns))
        assert torch.equal(got[0], expected[0, columns])
        assert got[1].tolist() == [0, 5, 0, 0, 0, 0], "a draft without an allowed token guesses as if without a grammar"


def test_the_keys_of_a_run_make_the_sampler():
    config = RunConfig(logit_bias="5:-100, 7:2.5", repetition_penalty=1.5, presence_penalty=0.5, min_p=0.1)
    assert sampler_of(config) == Sampler(min_p=0.1,
                                         penalties=Penalties(((5, -100.0), (7, 2.5)), 1.5, 0.0, 0.5))
    for bias in ("5", "a:1", "5:1e9", "5:1,,6:2"):
        with refused(f"logit_bias={bias} is not possible: give token ids and the bias of each one's logit"):
            RunConfig(logit_bias=bias)
    with refused("presence_penalty=3 is not possible: give a number from -2 to 2"):
        RunConfig(presence_penalty=3)
