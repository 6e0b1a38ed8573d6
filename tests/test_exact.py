"""Every way of decoding writes the one text of its seed."""
from __future__ import annotations

import pytest

from model.drafts.mixture import Mixture, Suffix
from model.sample import Sampler
from pipeline.decode import Request
from tests.tiny import CONFIG, Oracle, Tiny, pipeline, write

TINY, DEEP = Tiny(), Tiny(layers=8)
PROMPT = [5, 17, 40, 3, 28, 11, 9, 50, 2, 31, 7, 7, 19]
NEW = 40
SAMPLERS = {0.0: Sampler(), 0.7: Sampler(0.7, top_p=0.9, top_k=20, seed=3), 1.0: Sampler(1.0, seed=4)}
TEXT = {t: TINY.text(PROMPT, NEW, sampler) for t, sampler in SAMPLERS.items()}
DEEP_TEXT = {t: DEEP.text(PROMPT, NEW, sampler) for t, sampler in SAMPLERS.items()}
SPECULATIVE = ["serial", "naive", "pruned", "continuous", "pipedec", "pipeinfer", "streaming"]
AGAIN = [7, 21, 3, 48, 7, 21, 3, 48, 7, 21, 3, 48, 7, 21, 3]
MIXTURES = ["eagle", "drifting", "twin", "suffix", "eagle+twin+suffix"]
AGAIN_TEXT = {t: TINY.text(AGAIN, NEW, sampler) for t, sampler in SAMPLERS.items()}
SHAPES = [(strategy, stages) for strategy in ["autoregressive", *SPECULATIVE] for stages in (1, 2, 4)]


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("strategy, stages", SHAPES)
def test_every_strategy_on_every_number_of_stages_writes_the_reference_text(strategy, stages, temperature):
    with pipeline(TINY, stages, strategy, TINY.eagle()) as decoder:
        assert write(decoder, PROMPT, NEW, SAMPLERS[temperature]) == TEXT[temperature]


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_long_accepted_paths_change_nothing(strategy, temperature):
    with pipeline(TINY, 4, strategy, Oracle(PROMPT + TEXT[temperature])) as decoder:
        answer, stream = decoder.decode(Request(PROMPT, SAMPLERS[temperature], NEW))
        assert [token for new in stream for token in new] == TEXT[temperature]
    assert answer.mean_accepted_length > 2, "the oracle's guesses were not used"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_a_head_with_inner_features_changes_nothing(strategy, stages, temperature):
    with pipeline(DEEP, stages, strategy, DEEP.eagle3()) as decoder:
        assert write(decoder, PROMPT, NEW, SAMPLERS[temperature]) == DEEP_TEXT[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("strategy", ["autoregressive", *SPECULATIVE])
def test_a_model_as_draft_changes_nothing(strategy, stages, temperature):
    with pipeline(TINY, stages, strategy, TINY.twin(noise=0.02)) as decoder:
        assert write(decoder, PROMPT, NEW, SAMPLERS[temperature]) == TEXT[temperature]


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_no_draft_changes_nothing(strategy):
    with pipeline(TINY, 3, strategy) as decoder:
        answer, stream = decoder.decode(Request(PROMPT, SAMPLERS[1.0], NEW))
        assert [token for new in stream for token in new] == TEXT[1.0]
    assert answer.mean_accepted_length == 1


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("names", MIXTURES)
def test_streaming_writes_the_reference_text_whatever_its_draft_is_mixed_of(names, stages, temperature):
    with pipeline(TINY, stages, "streaming", TINY.mixture(*names.split("+"))) as decoder:
        for prompt, text in ((PROMPT, TEXT), (AGAIN, AGAIN_TEXT)):  # the second asks what the first has taught
            assert write(decoder, prompt, NEW, SAMPLERS[temperature]) == text[temperature]


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_streaming_with_inner_features_writes_the_reference_text(stages, temperature):
    for names in (["eagle3"], ["eagle3", "twin", "suffix"]):
        with pipeline(DEEP, stages, "streaming", DEEP.mixture(*names)) as decoder:
            assert write(decoder, PROMPT, NEW, SAMPLERS[temperature]) == DEEP_TEXT[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("names", MIXTURES)
@pytest.mark.parametrize("strategy", [strategy for strategy in SPECULATIVE if strategy != "streaming"])
def test_every_other_strategy_writes_the_reference_text_with_a_mixture(strategy, names, temperature):
    with pipeline(TINY, 3, strategy, TINY.mixture(*names.split("+"))) as decoder:
        assert write(decoder, AGAIN, NEW, SAMPLERS[temperature]) == AGAIN_TEXT[temperature]


@pytest.mark.parametrize("temperature", SAMPLERS)
@pytest.mark.parametrize("strategy", ["pruned", "continuous", "streaming"])
def test_a_text_that_was_written_before_changes_nothing(strategy, temperature):
    earlier = [AGAIN + AGAIN_TEXT[temperature], PROMPT + TEXT[temperature]]
    for networks in ([], [TINY.twin(0.02)]):
        with pipeline(TINY, 3, strategy, Mixture(networks, Suffix(earlier, keep=earlier.append))) as decoder:
            answer, stream = decoder.decode(Request(PROMPT, SAMPLERS[temperature], NEW))
            assert [token for new in stream for token in new] == TEXT[temperature]
        assert answer.sources["suffix"] > NEW / 2, "the guesses of the suffix were not used"


@pytest.mark.parametrize("kind", ["eagle", "twin"])
@pytest.mark.parametrize("room", [0, 1, 9])
def test_a_draft_cache_that_gets_full_changes_nothing(room, kind):
    draft = getattr(TINY, kind)()
    draft.cache = CONFIG.cache(draft.cache.keys.shape[0], len(PROMPT) + NEW + room, TINY.lm_head.weight)
    with pipeline(TINY, 2, "streaming", Mixture([draft])) as decoder:
        assert write(decoder, PROMPT, NEW, SAMPLERS[1.0]) == TEXT[1.0]
