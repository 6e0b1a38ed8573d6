"""Sampling follows the target's law as warped by Hugging Face's processors, and depends only on (seed, position)."""
import numpy as np
import pytest
import torch
from scipy.special import chdtrc  # scipy.stats takes a second to import

from model.sample import Sampler, gumbel, warp
from pipeline.answers import Request
from tests.checkpoints import refused
from tests.tiny import TINY, pipeline, random_tensor, tokens_of

DRAWS = 8_000
ALPHA = 1e-4


def p_value(drawn, law):
    """Return the p-value of the chi-square test of `drawn` and `law`; cells expecting fewer than 5 are merged."""
    seen = np.bincount(drawn, minlength=len(law)).astype(float)
    want = np.asarray(law) * len(drawn)
    rare = want < 5
    if rare.any():
        seen, want = np.append(seen[~rare], seen[rare].sum()), np.append(want[~rare], want[rare].sum())
    if want[-1] == 0:
        assert seen[-1] == 0, "a token that cannot come has come"
        seen, want = seen[:-1], want[:-1]
    want *= seen.sum() / want.sum()
    return chdtrc(len(seen) - 1, ((seen - want) ** 2 / want).sum())


def processed_law(logits_V, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Return the law `[V]` that transformers' processors and numpy's softmax give."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    processed_V = processors(None, logits_V[None].clone())[0].numpy()
    weights_V = np.exp(processed_V - processed_V.max())
    return weights_V / weights_V.sum()


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0),
                                                       (0.5, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8),
                                                       (0.7, 6, 0.9)])
def test_tokens_follow_the_warped_distribution(temperature, top_k, top_p):
    logits = random_tensor(0, 12) * 1.5
    drawn = Sampler(temperature, top_p, top_k, seed=9)(logits.expand(DRAWS, -1),
                                                       range(DRAWS))
    assert p_value(drawn, processed_law(logits, temperature, top_k, top_p)) > ALPHA


def test_each_noise_is_gumbels_law():
    """By the test of Kolmogorov and Smirnov against exp(-exp(-x)), over tokens and over positions."""
    by_position = torch.stack([gumbel(3, position, 50) for position in range(200)])
    for noises in (by_position.flatten(), by_position[:, 0], by_position[0]):
        ascending, count = noises.sort().values.numpy(), len(noises)
        gaps = np.exp(-np.exp(-ascending)) - (np.arange(count) + 0.5) / count
        assert np.abs(gaps).max() < 2.2 / count ** 0.5  # one of 30,000 samples is further off


def test_noise_is_that_of_the_tokens_that_a_draft_knows_and_none_where_nothing_is_sampled():
    columns = torch.tensor([4, 0, 9])
    expected = torch.stack([gumbel(5, position, 10) for position in (3, 8)])[:, [4, 0, 9]]
    assert torch.equal(Sampler(1.0, seed=5).noise([3, 8], columns), expected)
    for sampler in (Sampler(0.0, seed=5), Sampler(1.0, seed=5, rule="mss")):
        assert not sampler.noise([3, 8], columns).any()


def test_the_likeliest_token_stays_however_small_the_share_that_is_kept():
    logits = torch.tensor([[0.3, 0.1, 0.2, 0.3]])
    assert warp(logits, 1.0, 0, 1e-9).isfinite().sum() == 1
    np.testing.assert_array_equal(warp(logits[:, :3], 1.0, 0, 0.0).softmax(-1), [[1, 0, 0]])
    assert warp(logits, 1.0, 0, 1.0, 1.0).isfinite().tolist() == [[True, False, False, True]]


def test_a_share_that_is_reached_exactly_excludes_the_rest_as_in_transformers():
    equal = torch.zeros(1, 4, dtype=torch.float64)
    for top_p in (0.25, 0.5, 0.75):
        assert warp(equal, 1.0, 0, top_p).softmax(-1)[0].sort().values.tolist() == sorted(
            processed_law(equal[0], 1.0, 0, top_p))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_a_share_ends_at_one_token_among_equal_ones_in_every_batch(top_p):
    logits = (random_tensor(3, 4, 400) * 3).bfloat16().double()
    logits[2, ::2] = float("-inf")
    warped = warp(logits, 1.0, 0, top_p)
    for row, row_logits in enumerate(logits):
        law = np.exp(row_logits.numpy()) / np.exp(row_logits.numpy()).sum()
        order = np.lexsort((-np.arange(400), -law))  # the likeliest first, of equal ones the last
        inside = order[np.cumsum(law[order]) - law[order] < top_p]

        assert warped[row].isfinite().nonzero()[:, 0].tolist() == sorted(inside)
        assert torch.equal(warp(logits[row:row + 1], 1.0, 0, top_p)[0], warped[row])
        assert torch.equal(warped[row, inside], row_logits[inside])


def test_laws_are_computed_in_float64_and_a_guess_matches_what_the_sampler_draws():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert Sampler(1.0, 0.9).warped(random_tensor(7, 2, 30).to(dtype)).dtype == torch.float64
    assert Sampler(1.0).matches and not Sampler(1.0, rule="mss").matches


def test_the_likeliest_tokens_are_at_temperature_0_whatever_else_is_asked():
    logits = random_tensor(7, 20, 30)
    expected = logits.numpy().argmax(1).tolist()
    for sampler in (Sampler(), Sampler(0.0, 0.1, 3, seed=4, min_p=0.5), Sampler(0.0, rule="mss")):
        assert sampler(logits, range(20)) == expected
        assert sampler.warped(logits) is logits and sampler.matches


def test_the_chi_square_test_sees_a_wrong_sampler():
    """Negative control: too weak noise, and a law that is off by 0.03."""
    logits = random_tensor(0, 12) * 1.5
    law = logits.softmax(-1).numpy()
    weak = [int((logits + 0.9 * gumbel(9, position, 12)).argmax())
            for position in range(DRAWS)]
    assert p_value(weak, law) < ALPHA
    moved = law.copy()
    first, second = np.argsort(law)[-1], np.argsort(law)[-2]
    moved[first] -= 0.03
    moved[second] += 0.03
    assert p_value(Sampler(1.0, seed=9)(logits.expand(DRAWS, -1), range(DRAWS)),
                   moved) < ALPHA


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0),
                                          (0, 0.7), (8, 0.9), (3, 0.5), (1, 0.1)])
def test_warping_equals_the_processors_of_transformers(top_k, top_p):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_tensor(1, 6, 40) * 2
    theirs = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    torch.testing.assert_close(warp(logits, 0.8, top_k, top_p), theirs(None, logits.clone()))


def test_the_noise_of_a_position_is_one_who_asks_and_in_whatever_company():
    logits = random_tensor(2, 5, 30)
    sampler = Sampler(1.0, seed=5)
    together = sampler(logits, [3, 4, 5, 6, 7])
    assert together == [sampler(logits[i:i + 1], [3 + i])[0]
                        for i in range(5)]
    assert not torch.equal(gumbel(5, 3, 30), gumbel(6, 3, 30))
    assert not torch.equal(gumbel(5, 3, 30), gumbel(5, 4, 30))


@pytest.mark.recorded
def test_the_noise_is_the_same_on_every_machine():
    """Philox is counter-based and its stream is fixed, so texts can be compared between boards."""
    want = torch.tensor([0.9059206607564417, 0.7290180675134535, 2.3653348568454438], dtype=torch.float64)
    torch.testing.assert_close(gumbel(1, 2, 3), want, atol=1e-12, rtol=0)


FLAT = torch.zeros(8, 97, dtype=torch.float64)
TEXTS = {  # of flat logits: each token is what the noise of its position makes likeliest
    0: "0 17 40 77 40 79 29 51", 3: "65 45 30 34 9 72 50 62", 123456789: "6 67 21 55 74 51 31 12",
    2**53 - 1: "83 80 24 29 66 58 87 2", 2**53 + 1: "28 21 85 27 37 53 51 40", 2**63 - 1: "9 12 48 84 34 8 46 10",
    2**64 - 1: "16 12 9 60 15 72 77 0",
}


@pytest.mark.recorded
@pytest.mark.parametrize("seed", TEXTS)
def test_the_texts_of_a_seed_stay_what_they_are(seed):
    assert " ".join(map(str, Sampler(1.0, seed=seed)(FLAT, range(8)))) == TEXTS[seed]


@pytest.mark.filterwarnings("error")
def test_every_seed_up_to_the_limit_has_a_stream_of_its_own():
    seeds = [0, 1, 2**53, 2**53 + 1,
             *(2**63 + i for i in range(-2, 3)),
             *(2**64 - i for i in range(1, 4))]
    noises = [tuple(gumbel(seed, 5, 3).tolist()) for seed in seeds]
    assert len(set(noises)) == len(seeds)
    want = torch.tensor([2.40999388106603, -0.25719375624094565, 1.620168510025531], dtype=torch.float64)
    torch.testing.assert_close(gumbel(2**64 - 1, 5, 3), want, atol=1e-12, rtol=0)


SAMPLERS = [Sampler(), Sampler(0.7), Sampler(1.0, top_k=3),
            Sampler(1.0, top_p=0.5), Sampler(0.001, 0.9, 5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported_with_the_likely_cause(sampler, bad, dtype):
    logits = random_tensor(1, 3, 20).to(dtype)
    logits[1, 7] = bad
    cause = "float16 ends at 65504" if dtype == torch.float16 else "its weights or its config.json are damaged"
    with refused(f"the model's logits are not finite (NaN or infinity); {cause}"):
        sampler(logits, [4, 5, 6])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_token_that_the_model_rules_out_is_no_fault_and_never_comes(sampler):
    logits = torch.full((200, 20), -float("inf"))
    logits[:, 5] = logits[:, 9] = 1.0
    assert set(sampler(logits, range(200))) <= {5, 9}
    with refused("not finite"):
        sampler(torch.full((1, 20), -float("inf")), [3])


def test_the_whole_pipeline_samples_the_models_distribution():
    """Compare the first and second token of many seeds with the model's law, including speculation and pruning."""
    prompt, runs = [4, 9, 13], 600

    def law_of(text):
        return processed_law(TINY.logits(text)[-1], 0.6)

    with pipeline(TINY, 2, "continuous", TINY.eagle()) as decoder:
        asked = [decoder.submit(Request(prompt, Sampler(0.6, seed=seed), 2)) for seed in range(runs)]
        texts = [tokens_of(stream) for _, stream in asked]
    assert p_value([text[0] for text in texts], law_of(prompt)) > ALPHA
    likeliest = int(law_of(prompt).argmax())
    assert p_value([text[1] for text in texts if text[0] == likeliest], law_of([*prompt, likeliest])) > ALPHA
