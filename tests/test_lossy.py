"""Lossy verification: which guesses are typical, how far the text's distribution moves, and where it is marked."""
import math

import numpy as np
import pytest
import torch
from scipy.special import rel_entr

from config.run_config import LOSSY as NAMES
from config.run_config import RunConfig
from eval import report
from launch.ask import table
from model import rules
from model.rules import LOSSY, divergence, judged, typical
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.answers import Answer, Request
from serve.start_line import PipelineFacts, start_lines
from tests.test_report import put
from tests.tiny import SPECULATIVE, TINY, pipeline, write

PROMPT, NUM_TOKENS = [1, 5, 9, 12, 7], 24
LOSSY_SAMPLER = Sampler(1.0, seed=4, rule="typical")
PEAKED, UNEVEN = [0.97, 0.01, 0.01, 0.01], [0.2, 0.5, 0.3, 0.0]
TYPICAL_CASES = [  # the target's law, the guesses, the accepted one
    (PEAKED, [1, 2], None), (PEAKED, [1, 0], 0),
    (UNEVEN, [0, 2], 2), (UNEVEN, [3], None), (UNEVEN, [], None),
    ([0.25] * 4, [3], 3),  # above delta exp(-H), as all tokens are equally likely
    ([0.91, 0.09], [1], None), ([0.9, 0.1], [1], 1),  # around epsilon
    ([0.26, *[0.1] * 7, 0.04, 0], [8], 8), ([0.27, *[0.1] * 7, 0.03], [8], None)]  # around delta exp(-H)


@pytest.mark.parametrize("law, guesses, accepted", TYPICAL_CASES)
def test_the_likeliest_typical_guess_is_accepted_for_certain(law, guesses, accepted):
    law_V = np.array(law)
    entropy = -sum(share * math.log(share) for share in law if share)
    passing = [token for token in guesses if law[token] > min(0.09, 0.3 * math.exp(-entropy))]  # Medusa's numbers
    assert (accepted in passing) if passing else accepted is None

    changed_V = typical(law_V, guesses)
    expected = law if accepted is None else np.eye(len(law))[accepted]
    assert changed_V.tolist() == list(expected)
    nats = 0 if accepted is None else -math.log(law[accepted])
    assert divergence(changed_V, law_V) == pytest.approx(nats)


def test_a_divergence_is_that_of_scipy_also_where_tokens_cannot_come():
    laws = np.random.default_rng(1).dirichlet(np.ones(9), 4)
    laws[1, 3:5] = laws[2, 7] = 0
    laws /= laws.sum(1, keepdims=True)
    for law_V in laws:
        for target_V in laws[[0, 3]]:
            assert divergence(law_V, target_V) == pytest.approx(rel_entr(law_V, target_V).sum(), abs=1e-12)
    assert divergence(laws[1], laws[1]) == 0


def test_a_guess_below_a_node_is_accepted_there_and_nowhere_else():
    tree = TokenTree([1, 2], 9)
    leaf = tree.add(tree.tip, 3, -0.1)
    logits_V = torch.tensor([0.0, 1.0, 2.0, 2.5])
    certain = [judged(Sampler(1.0, seed=seed, rule="typical"), tree, [tree.tip], logits_V[None]) for seed in range(30)]
    assert certain == [[3]] * 30
    assert tree.nodes[tree.tip].divergence == pytest.approx(-float(logits_V.log_softmax(-1)[3]))

    sampled = {judged(Sampler(1.0, seed=seed, rule="typical"), tree, [leaf], logits_V[None])[0] for seed in range(30)}
    assert len(sampled) > 1 and tree.nodes[leaf].divergence == 0


@pytest.mark.parametrize("strategy", SPECULATIVE)
def test_every_method_diverges_above_temperature_0_and_by_this_rule_only(strategy):
    answers = {}
    for sampler in (Sampler(rule="typical"), LOSSY_SAMPLER, Sampler(1.0, seed=4)):
        with pipeline(TINY, 2, strategy, TINY.drafters(0.02)) as decoder:
            answer, stream = decoder.stream(Request(PROMPT, sampler, NUM_TOKENS))
            assert sum(stream, []) == answer.token_ids and len(answer.token_ids) == NUM_TOKENS
        answers[sampler] = answer

    greedy, lossy, matched = answers.values()
    assert greedy.token_ids == TINY.text(PROMPT, NUM_TOKENS, Sampler())
    assert matched.token_ids == TINY.text(PROMPT, NUM_TOKENS, Sampler(1.0, seed=4))
    assert greedy.divergence == matched.divergence == 0 < lossy.divergence_per_token


def test_a_tree_that_is_verified_whole_gives_the_same_text_on_any_number_of_stages():
    texts = set()
    for stages in (1, 3):
        with pipeline(TINY, stages, "serial", TINY.drafters(0.02)) as decoder:
            texts.add(tuple(write(decoder, PROMPT, NUM_TOKENS, LOSSY_SAMPLER)))
    assert len(texts) == 1


def test_the_divergence_of_an_answer_is_the_sum_over_its_tokens(monkeypatch):
    def blurred(law_V, guesses):
        return (law_V + 1 / len(law_V)) / 2

    monkeypatch.setitem(rules.LOSSY, "typical", blurred)
    with pipeline(TINY, 2, "streaming", TINY.drafters(0.02)) as decoder:
        answer, stream = decoder.stream(Request(PROMPT, LOSSY_SAMPLER, NUM_TOKENS))
        assert sum(stream, []) == answer.token_ids

    logits_TV = TINY.logits([*PROMPT, *answer.token_ids])[len(PROMPT) - 1:-1]
    law_TV = logits_TV.softmax(-1).numpy()
    assert answer.divergence == pytest.approx(sum(rel_entr(blurred(law_V, []), law_V).sum() for law_V in law_TV))


# --- marks ------------------------------------------------------------------------------------------------------------

def test_figures_and_the_start_of_a_server_name_a_lossy_rule():
    assert tuple(LOSSY) == NAMES
    answer = Answer(3, token_ids=[1, 2, 3, 4], divergence=1.0)
    lossy_table = table([answer], RunConfig(verify="typical", temperature=1.0))
    assert "lossy (verify=typical): 0.250 nats per token" in lossy_table
    assert "exact: at temperature 0 verify=typical changes nothing" in table([answer], RunConfig(verify="typical"))
    for exact in (RunConfig(verify="typical"), RunConfig(verify="mss", pipeline_type="specinfer", temperature=1.0)):
        assert "lossy" not in table([answer], exact)

    facts = PipelineFacts("streaming", "eagle", 4, "0+7+7+8+8", "real", "", "typical")
    assert "method  streaming, guesses from eagle, lossy verification (typical)" in start_lines("url", "toy", facts)


def test_a_report_marks_the_tables_with_lossy_answers_and_shows_their_divergence(tmp_path):
    put(tmp_path, method="ar", temperature=0.0, lossy_rule="", divergence=[0.0])
    put(tmp_path, method="ar", temperature=1.0, lossy_rule="typical", divergence=[0.0])
    put(tmp_path, temperature=1.0, tokens=(10, 20), seconds=(2.0, 3.0), lossy_rule="typical", divergence=[3.0, 4.5])
    text = report.report(tmp_path).read_text(encoding="utf-8")
    greedy, sampled = text.split("## Temperature ")[1:3]
    assert "lossy" not in greedy and "lossy: verify=typical)" in sampled.splitlines()[0]
    _, _, divergences = sampled.partition("Divergence of lossy verification")
    assert "| ar | 0.000 |" in divergences and "| continuous | 0.250 |" in divergences
