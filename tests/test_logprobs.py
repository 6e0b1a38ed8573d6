"""Log-probabilities beside a text: those of the whole model, whichever method decodes."""
import pytest
import torch

from model.sample import Sampler, logprobs
from pipeline.answers import Request
from pipeline.strategies import STRATEGIES
from tests.saved import PROMPT as SHORT_PROMPT
from tests.test_replicas import replicas
from tests.tiny import CONFIG, TINY, pipeline

PROMPT = [*SHORT_PROMPT, *range(20, 27)]
MOST = 3


def whole(text):
    """Log-probabilities `[T, V]` of what follows each token of a text."""
    return TINY.logits(text).log_softmax(-1)


def compare(message, rows_TV, tokens):
    """The tokens are these, and what these rows say of them."""
    assert [one.token for one in message] == tokens
    for one, row_V in zip(message, rows_TV):
        best = row_V.topk(MOST)
        assert [token for token, _ in one.likeliest] == best.indices.tolist()
        said = [one.logprob, *(value for _, value in one.likeliest)]
        expected = [row_V[one.token].item(), *best.values.tolist()]
        torch.testing.assert_close(torch.tensor(said), torch.tensor(expected))


def compare_all(answer, echo):
    """What an answer says of its own tokens, and with `echo` of those of its prompt."""
    rows_TV = whole(PROMPT + answer.token_ids)
    compare(answer.logprobs, rows_TV[len(PROMPT) - 1:], answer.token_ids)
    compare(answer.prompt_logprobs, rows_TV, PROMPT[1:] if echo else [])


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_each_method_tells_what_the_whole_model_says_of_its_text_and_of_the_prompt(strategy):
    with pipeline(TINY, 2, strategy, None if strategy == "autoregressive" else TINY.eagle()) as decoder:
        decoder.reuses_texts = True
        sampler = Sampler(0.9, seed=3)
        for echo in (True, False, True):
            answer = decoder.complete(Request(PROMPT, sampler, 12, likeliest=MOST, echo=echo))
            compare_all(answer, echo)
            assert bool(answer.reused_tokens) != echo
        silent = decoder.complete(Request(PROMPT, sampler, 12))
        assert silent.token_ids == answer.token_ids and silent.logprobs == []


def test_replicas_tell_the_same():
    with replicas(3, draft=TINY.mixture("twin"), lookahead=2) as decoder:
        answer = decoder.complete(Request(PROMPT, Sampler(0.9, seed=3),
                                          20, likeliest=MOST, echo=True))
    compare_all(answer, echo=True)


def test_an_end_in_the_middle_of_a_path_tells_no_more_than_the_answer_has():
    text = TINY.text(PROMPT, 12, Sampler())
    with pipeline(TINY, 2, "serial", TINY.twin()) as decoder:
        answer = decoder.complete(Request(PROMPT, Sampler(), 40,
                                          end=frozenset([text[7]]), likeliest=0))
    assert answer.token_ids == text[:text.index(text[7]) + 1]
    assert [one.token for one in answer.logprobs] == answer.token_ids
    assert answer.logprobs[0].likeliest == []


def test_half_precision_is_reported_in_full():
    logits_TV = torch.randn(2, CONFIG.vocab, dtype=torch.bfloat16)
    exact_TV = logits_TV.float().log_softmax(-1)
    found = logprobs(logits_TV, [4, 5], CONFIG.vocab + 1)
    assert [one.logprob for one in found] == [exact_TV[0, 4].item(),
                                              exact_TV[1, 5].item()]
    assert len(found[0].likeliest) == CONFIG.vocab
