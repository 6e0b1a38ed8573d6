"""The suffix automaton finds the same as a search through the texts."""
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.drafts.suffix import COUNTED, DISCOUNT, NOTHING, SuffixAutomaton
from tests.tiny import digits

TOKEN = st.integers(0, 2)
TEXTS = st.lists(st.lists(TOKEN, max_size=COUNTED // 2), min_size=1, max_size=4)
GUESSES = st.lists(TOKEN, max_size=8)


def automaton(texts):
    found = SuffixAutomaton()
    for text in texts:
        found.separate()
        for token in text:
            found.extend(token)
    return found


def followers(texts, string):
    """Return how often each token follows a string in the texts."""
    ends = [(text, start + len(string)) for text in texts
            for start in range(len(text) - len(string))
            if text[start:start + len(string)] == string]
    return Counter(text[end] for text, end in ends)


def longest(texts, read):
    """Return the longest suffix of the read tokens that is followed by a token in the texts."""
    return next((read[start:] for start in range(len(read))
                 if followers(texts, read[start:])), [])


def expected(texts, string):
    """Return the probabilities of all tokens that follow a string."""
    counts = followers(texts, string) if string else Counter()
    return {token: (count - DISCOUNT) / sum(counts.values()) for token, count in counts.items()}


@given(TEXTS, GUESSES)
def test_every_match_is_the_longest_suffix_that_a_search_finds_with_a_token_after_it(texts, guesses):
    found, read = automaton(texts), list(texts[-1])
    match = found.tip
    assert match.length == len(longest(texts, read))
    for guess in guesses:
        match = found.step(match, guess)
        read.append(guess)
        assert match.length == len(longest(texts, read))
        assert dict(found.continuations(match, 3)) == expected(texts, longest(texts, read))


@given(TEXTS)
def test_the_tip_of_a_growing_text_matches_what_stands_earlier(texts):
    found = SuffixAutomaton()
    for number, text in enumerate(texts):
        found.separate()
        for end, token in enumerate(text, 1):
            found.extend(token)
            seen = [*texts[:number], text[:end]]
            string = longest(seen, text[:end])
            assert found.tip.length == len(string)
            assert dict(found.continuations(found.tip, 3)) == expected(seen, string)


@given(TEXTS, GUESSES, st.lists(TOKEN, max_size=COUNTED // 2))
def test_a_match_that_was_kept_stays_one_while_the_text_grows(texts, guesses, more):
    found, read = automaton(texts), texts[-1] + guesses
    match = found.tip
    for guess in guesses:
        match = found.step(match, guess)
    for token in more:
        found.extend(token)
    grown = [*texts[:-1], texts[-1] + more]
    string = read[len(read) - match.length:]
    assert dict(found.continuations(match, 3)) == expected(grown, string)
    for token in range(3):
        assert found.step(match, token).length == len(longest(grown, [*string, token]))


@pytest.mark.parametrize("texts, continuations", [
    ("12512512612", "56"), ("12512612", "65"), ("125 126 127 12", "765"), ("126 125 126 125 12", "56"),
], ids=["the more frequent first", "then the later", "in other texts too", "as often, and later"])
def test_continuations_are_ordered(texts, continuations):
    found = automaton(map(digits, texts.split()))
    assert [token for token, _ in found.continuations(found.tip, 8)] == digits(continuations)
    assert [token for token, _ in found.continuations(found.tip, 2)] == digits(continuations[:2])


def test_no_match_spans_two_texts():
    found = automaton([[1, 2], [3, 4, 1]])
    assert found.continuations(found.tip, 4) == [(2, 1 - DISCOUNT)]
    assert found.step(found.tip, 2) == NOTHING  # 3 is another text's first token


def test_a_repetition_at_the_end_of_the_text_goes_on():
    found = automaton([digits("9123123")])
    assert found.tip.length == 3
    match, chain = found.tip, []
    while len(chain) < 7:
        chain.append(found.continuations(match, 1)[0][0])
        match = found.step(match, chain[-1])
    assert chain == digits("1231231")


def test_nothing_is_predicted_without_a_match():
    found = automaton([[1, 2, 3]])
    assert found.tip == NOTHING
    assert found.continuations(found.tip, 3) == []


@pytest.mark.parametrize("text",
                         [[1] * 90 + [2] + [1] * 60,
                          [1, 2] * 60 + [3] + [1, 2] * 50],
                         ids=["one", "two"])
def test_a_repetition_longer_than_is_counted_has_the_same_matches_and_tokens_after_them(text):
    found, read = automaton([text]), list(text)
    match = found.tip
    for guess in digits("12112121"):
        string = longest([text], read)
        after = dict(found.continuations(match, 4))
        assert (match.length, after.keys()) == (len(string),
                                                followers([text], string).keys())
        assert 0 < min(after.values()) and sum(after.values()) < 1
        match = found.step(match, guess)
        read.append(guess)


@pytest.mark.parametrize("text", [[1] * 3000, [1, 2] * 1500,
                                  [1] + [2] * 3000, [i * i % 7 for i in range(3000)],
                                  list(range(3000)),
                                  [int(c) for i in range(900) for c in str(i)]],
                         ids=["one token", "two by turns", "one after another", "a period", "all new", "numbers"])
def test_memory_is_linear(text):
    found = automaton([text, text[1:], text[::-1]])
    assert len(found._transitions) <= 2 * found.size
    assert sum(map(len, found._transitions)) <= 3 * found.size


def test_a_text_that_was_there_takes_no_memory():
    text = digits("123124112")
    once, often = automaton([text]), automaton([text] * 9)
    assert len(often._transitions) == len(once._transitions)
