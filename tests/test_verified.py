"""Tokens that a pass verifies: what is counted along texts is what rules do in all cases, and what pipelines do."""
import numpy as np
import pytest
import torch

from config.trees import expanded
from eval.tokens_per_pass import among_best, among_drawn, by_mss, merged_passes, passes, ranks
from model.drafts.mixture import Mixture
from model.rules import laws, mss, naive, with_replacement
from model.sample import Sampler
from pipeline.answers import Request
from scripts.bench import main
from tests.test_rules import CASES, distribution, proposals
from tests.tiny import CAPACITY, TINY, TREE, admit_text, digits, pipeline

PROMPT, NEW = [1, 5, 9, 12, 7], 40
ONE = {name: case for name, case in CASES.items() if len(case[1]) == 1}


def decode(networks, widths, sampler):
    """The text that a pipeline writes with trees of these networks, and the passes that it took."""
    shaped = TREE.init.shaped(expanded(",".join(map(str, widths))))
    cfg = TREE.__class__(init=shaped, chunk=TREE.chunk)
    with pipeline(TINY, 2, "serial", Mixture(networks, None), cfg) as decoder:
        answer = decoder.complete(Request(PROMPT, sampler, NEW))
    return answer.token_ids, len(answer.accepted_lengths)


def foreseen(network, text):
    """The logits of a network at each token of a text, `[N, V]`."""
    read = [*PROMPT, *text[:-1]]
    cache = TINY.new_cache(CAPACITY)
    return network.lm_head(network.network(torch.tensor(read), admit_text(cache, len(read)), cache))[-len(text):]


@pytest.mark.parametrize("rule, count",
                         [(mss, by_mss), (naive, None)], ids=["mss", "naive"])
@pytest.mark.parametrize("case", ONE)
def test_the_probability_of_acceptance_is_that_of_all_that_can_happen(case, rule, count):
    target, [(theirs, most)] = ONE[case]
    size = len(target)

    def experiment(chance):
        drawn = proposals([(theirs, most)], with_replacement, chance)
        token = rule(target, drawn, chance)
        return token + size * any(proposal.token == token for proposal in drawn)

    found = distribution(experiment, 2 * size)
    for token in np.flatnonzero(target):
        wanted = found[token + size] / (found[token] + found[token + size])
        places = np.array([target]), np.array([theirs]), [token]
        accepted = count(*places, most) if count else among_drawn(*places[1:], most)
        assert accepted.shape == (most, 1)
        assert float(accepted[-1, 0]) == pytest.approx(float(wanted))


@pytest.mark.parametrize("widths", [[1],
                                    [2, 1, 3], [1, 1, 3, 1, 1]])
@pytest.mark.parametrize("sampler",
                         [Sampler(), Sampler(0.7, seed=3, rule="naive")], ids=["greedy", "naive"])
@pytest.mark.parametrize("noises",
                         [(0.03,), (0.02, 0.05)], ids=["one", "merged"])
def test_the_passes_along_a_text_are_those_of_a_pipeline(noises, sampler, widths):
    networks = TINY.drafters(*noises).networks
    text, taken = decode(networks, widths, sampler)
    rank_DN = [ranks(foreseen(network, text), text) for network in networks]
    assert len(text) == NEW and merged_passes(rank_DN, widths) == taken < NEW - 1
    if len(noises) == 1:
        assert passes(among_best(rank_DN[0], max(widths)), widths) == taken


def test_with_several_drafters_a_path_counts_that_one_of_them_has_whole():
    both = [np.array(digits("00011111")), np.array(digits("01110011"))]
    assert [merged_passes([row], [1, 1, 1]) for row in both] == [5, 5]
    assert merged_passes(both, [1, 1, 1]) == 3  # the first one's two guesses, the second one's two, and one place more
    by_turns = [np.array(digits("00101")), np.array(digits("01010"))]
    assert merged_passes(by_turns, [1, 1, 1, 1]) == 2  # each place is foreseen by one of them, but no path of two


def test_expected_passes_are_the_mean_over_all_that_can_be_accepted():
    chance = np.array([[0, 0.5, 0.3, 0.9], [0, 0.8, 0.6, 0.95]])
    widths, mean = [2, 1], 0.0
    for outcome in range(4 ** 3):  # what one guess and what two guesses would be, place by place
        probability, rank = 1.0, [0]
        for place in range(1, 4):
            kind = outcome // 4 ** (place - 1) % 4
            one, two = chance[:, place]
            probability *= [one, two - one, 1 - two, 0][kind]
            rank.append(min(kind, 2))
        mean += probability * merged_passes([np.array(rank)], widths)
    assert passes(chance, widths) == pytest.approx(mean)


def test_the_expected_passes_of_multi_step_sampling_are_those_of_pipelines():
    widths, differences = [1, 3, 1], []
    networks = TINY.drafters(0.04).networks
    for seed in range(8):
        sampler = Sampler(1.0, seed=seed, rule="mss")
        text, taken = decode(networks, widths, sampler)
        read = [*PROMPT, *text[:-1]]
        law_NV = laws(sampler, TINY.logits(read)[-len(text):])
        theirs_NV = laws(sampler, foreseen(networks[0], text))
        differences.append(taken - passes(by_mss(law_NV, theirs_NV, text, 3), widths))
    spread = np.std(differences) / len(differences) ** 0.5
    assert spread > 0 and abs(np.mean(differences)) < 4 * spread


def test_the_command_prints_three_tables_with_the_paper_s(saved, output_of):
    words = [f"target={saved / 'base'}", f"draft={saved / 'far'}", "dtype=float64", "template=none", "max_new_tokens=8",
             "sets=qa,sum", "num_examples=2"]
    printed = output_of(main, ["specinfer", *words])
    assert [printed.count(f"Table {number}") for number in (1, 2, 3)] == [1, 1, 1]
    assert "LLaMA-7B with LLaMA-68M" in printed and printed.count("Alpaca") == 5 and printed.count("    all ") == 9
    assert "Table 3" not in output_of(main, ["specinfer", *words, "do_sample=false"])


@pytest.mark.parametrize("words, message", [
    ("expansion=1,1", "expansion=1,1 has no step that is varied: write k for it"),
    ("expansion=1,k,0", "is not a list of widths"), ("expansion=k,x", "is not a list of widths"),
    ("max_new_tokens=1", "leaves nothing to be guessed"), ("draft=nowhere", "there is no folder"),
    ("sets=nope", "no data set nope"), ("widths=3", "unknown key widths")])
def test_what_cannot_be_counted_is_one_sentence(words, message, error_of):
    said = error_of(main, ["specinfer", *words.split()]).strip().splitlines()[-1]
    assert said.startswith("flowspec: ") and message in said
