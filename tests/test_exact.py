"""Every way of decoding writes the one text of its seed.

Settings are combined in pairs: each strategy, number of stages and draft meets several temperatures.
"""
from itertools import cycle

import pytest

from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.sample import Sampler
from pipeline.answers import Request
from tests.saved import PROMPT
from tests.tiny import DEEP, SPECULATIVE, TINY, Oracle, pipeline, write

NEW = 18
SAMPLERS = {0.0: Sampler(), 0.7: Sampler(0.7, top_p=0.9, top_k=20, seed=3),
            1.0: Sampler(1.0, seed=4)}
AGAIN = [7, 21, 3, 48] * 3 + [7, 21, 3]
MIXTURES = "eagle drifting twin suffix eagle+twin+suffix other eagle+other+suffix".split()


def at_each_temperature(*settings):
    """Each setting with one of the temperatures, in turn."""
    return [(*setting, temperature) for setting, temperature in zip(settings, cycle(SAMPLERS))]


def assert_exact(model, stages, strategy, draft, temperature, *prompts):
    """A pipeline writes to each prompt the text that the model has without one."""
    sampler = SAMPLERS[temperature]
    with pipeline(model, stages, strategy, draft) as decoder:
        for prompt in prompts or [PROMPT]:
            assert write(decoder, prompt, NEW, sampler) == model.text(prompt, NEW, sampler)


@pytest.mark.parametrize("strategy, stages, temperature", at_each_temperature(
    *((strategy, stages) for stages in (1, 4) for strategy in ["autoregressive", *SPECULATIVE])))
def test_every_strategy_on_every_number_of_stages_writes_the_reference_text(strategy, stages, temperature):
    assert_exact(TINY, stages, strategy, TINY.eagle(), temperature)


@pytest.mark.parametrize("strategy, stages, temperature", at_each_temperature(*zip(SPECULATIVE, cycle([4]))))
def test_long_accepted_paths_change_nothing(strategy, stages, temperature):
    text = TINY.text(PROMPT, NEW, SAMPLERS[temperature])
    with pipeline(TINY, stages, strategy, Oracle(PROMPT + text)) as decoder:
        answer = decoder.complete(Request(PROMPT, SAMPLERS[temperature], NEW))
    assert answer.token_ids == text
    assert answer.sources, "the oracle's guesses were not used"  # how many are sent in time depends on the machine


@pytest.mark.parametrize("strategy, stages, temperature", at_each_temperature(*zip(SPECULATIVE, cycle([4, 2, 1]))))
def test_a_head_with_inner_features_changes_nothing(strategy, stages, temperature):
    assert_exact(DEEP, stages, strategy, DEEP.eagle3(), temperature)


@pytest.mark.parametrize("strategy, stages, names, temperature", at_each_temperature(
    ("streaming", 2, "block"), *zip(SPECULATIVE,
                                    cycle([2, 4, 1]), cycle(["block+eagle3+suffix", "block"]))))
def test_a_block_that_is_guessed_in_one_pass_changes_nothing(strategy, stages, names, temperature):
    assert_exact(DEEP, stages, strategy, DEEP.mixture(names), temperature)


@pytest.mark.parametrize("strategy, stages, temperature", at_each_temperature(*zip(SPECULATIVE, cycle([1, 4]))))
def test_a_model_as_draft_changes_nothing(strategy, stages, temperature):
    assert_exact(TINY, stages, strategy, TINY.twin(noise=0.02), temperature)


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_no_draft_changes_nothing(strategy):
    with pipeline(TINY, 3, strategy) as decoder:
        answer = decoder.complete(Request(PROMPT, SAMPLERS[1.0], NEW))
    assert answer.token_ids == TINY.text(PROMPT, NEW, SAMPLERS[1.0])
    assert answer.mean_accepted_length == 1


@pytest.mark.parametrize("names, stages, temperature", at_each_temperature(*zip(MIXTURES, cycle([1, 4]))))
def test_streaming_writes_the_reference_text_whatever_its_draft_is_mixed_of(names, stages, temperature):
    # the second asks what the first taught
    assert_exact(TINY, stages, "streaming", TINY.mixture(names), temperature, PROMPT, AGAIN)


@pytest.mark.parametrize("stages, temperature", [*zip([1, 4, 2], SAMPLERS)])
def test_streaming_with_inner_features_writes_the_reference_text(stages, temperature):
    for names in ("eagle3", "eagle3+twin+suffix"):
        assert_exact(DEEP, stages, "streaming", DEEP.mixture(names), temperature)


@pytest.mark.parametrize("strategy, names, temperature", at_each_temperature(
    *((strategy, names) for row, strategy in enumerate(SPECULATIVE) if strategy != "streaming"
      for names in MIXTURES[1 + row % 4::4])))
def test_every_other_strategy_writes_the_reference_text_with_a_mixture(strategy, names, temperature):
    assert_exact(TINY, 3, strategy, TINY.mixture(names), temperature, AGAIN)


@pytest.mark.parametrize("strategy, temperature", [*zip("pruned continuous streaming".split(), SAMPLERS)])
def test_a_text_that_was_written_before_changes_nothing(strategy, temperature):
    sampler = SAMPLERS[temperature]
    text = TINY.text(PROMPT, NEW, sampler)
    earlier = [AGAIN + TINY.text(AGAIN, NEW, sampler), PROMPT + text]
    for networks in ([], [TINY.twin(0.02)]):
        with pipeline(TINY, 3, strategy, Mixture(networks, Suffix(earlier, keep=earlier.append))) as decoder:
            answer = decoder.complete(Request(PROMPT, sampler, NEW))
        assert answer.token_ids == text
        assert answer.sources["suffix"] > NEW / 2, "the guesses of the suffix were not used"


@pytest.mark.parametrize("kind", ["eagle", "twin"])
@pytest.mark.parametrize("room", [0, 1, 9])
def test_a_draft_cache_that_gets_full_changes_nothing(room, kind):
    draft = getattr(TINY, kind)()
    layers, capacity = draft.cache.shape[0], len(PROMPT) + NEW + room
    draft.cache = TINY.new_cache(capacity, layers)
    assert_exact(TINY, 2, "streaming", Mixture([draft]), 1.0)
