"""Log-probabilities over HTTP: those of the whole model, in OpenAI's shapes, streamed or not; tokens as bytes."""
import threading

import pytest
import torch

from config.presets import TOY
from model.sample import Sampler
from model.text import Text, TokenTexts
from model.weights.checkpoint import Checkpoint
from model.whole import Whole
from serve.text_chunks import Echo
from tests.serving import QUESTION, refusal, server, user_says
from tests.test_text import MIXED, bytelevel, plain_ids, sentencepiece

__all__ = ["server"]  # a fixture
TALK = user_says()
NEW, SEED, TEMPERATURE = 24, 5, 0.8
SAMPLED = {"model": "toy", "temperature": TEMPERATURE, "seed": SEED, "max_tokens": NEW}


@pytest.fixture(scope="module")
def reference():
    """The bundled model, run plainly."""
    return Whole(Checkpoint(TOY / "llama"), torch.float32, "cpu")


@pytest.fixture(scope="module")
def spell():
    return TokenTexts(Text(TOY / "llama").tokenizer)


def rows(reference, prompt, count):
    """The text of this seed behind a prompt, and what the whole model says of each token of both, `[T, V]`."""
    words = reference.generate(prompt, reference.cache(len(prompt) + count + 1),
                               Sampler(TEMPERATURE, seed=SEED))
    ids = [next(words) for _ in range(count)]
    logits_TV = reference.logits(prompt + ids, reference.cache(len(prompt) + count), len(prompt) + count)
    return ids, logits_TV.log_softmax(-1)


def near(said, expected):
    torch.testing.assert_close(torch.tensor(said), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_a_chat_tells_what_the_whole_model_says_whole_and_streamed(server, create_chat, reference, spell):
    prompt = server.tokenize(messages=TALK)
    ids, said_TV = rows(reference, prompt, NEW)
    fields = {"messages": TALK, "logprobs": True, "top_logprobs": 3, **SAMPLED}
    got = create_chat(**fields).choices[0]
    content = got.logprobs.content
    assert len(content) == NEW and got.finish_reason == "length"
    for entry, token, said_V in zip(content, ids, said_TV[len(prompt) - 1:]):
        best = said_V.topk(3)
        assert (entry.token, bytes(entry.bytes)) == spell(token)
        near(entry.logprob, said_V[token].item())
        assert [other.token for other in entry.top_logprobs] == [spell(other).name
                                                                 for other in best.indices.tolist()]
        near([other.logprob for other in entry.top_logprobs], best.values.tolist())
    assert b"".join(bytes(entry.bytes) for entry in content).decode().lstrip(" ") == got.message.content.lstrip(" ")

    first, *middle, last = [chunk.choices[0] for chunk in create_chat(stream=True, **fields)]
    assert first.logprobs is None and last.logprobs is None and last.finish_reason == "length"
    streamed = [entry for chunk in middle for entry in chunk.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    near([entry.logprob for entry in streamed], [entry.logprob for entry in content])


def test_a_completion_with_echo_tells_its_prompt_too_whole_and_streamed(server, sdk, reference, spell):
    prompt = server.tokenize(prompt=f"Grüße! {QUESTION}")
    ids, said_TV = rows(reference, prompt, NEW)
    asked = {"prompt": prompt, "logprobs": 2, "echo": True, **SAMPLED}
    got = sdk.completions.create(**asked).choices[0]
    found = got.logprobs
    assert (found.tokens[0], found.token_logprobs[0], found.top_logprobs[0]) == ("<s>", None, None)
    assert "bytes:\\xc3" in found.tokens
    expected = [said_V[token].item()
                for token, said_V in zip((prompt + ids)[1:], said_TV)]
    near(found.token_logprobs[1:], expected)
    for name, likeliest, said_V in zip(found.tokens[1:], found.top_logprobs[1:], said_TV):
        best = {spell(other).name for other in said_V.topk(2).indices.tolist()}
        assert best | {name} == set(likeliest) or name.startswith("bytes:")
    begins = set(found.text_offset[1:2] + found.text_offset[len(prompt):len(prompt) + 1])
    for name, offset in zip(found.tokens, found.text_offset):  # the first of a text loses its space
        shown = name.lstrip(" ") if offset in begins else name
        assert name.startswith(("bytes:", "<s>")) or got.text.startswith(shown, offset)

    chunks = [chunk.choices[0] for chunk in sdk.completions.create(stream=True, **asked)]
    assert "".join(chunk.text for chunk in chunks) == got.text

    def joined(field):
        return sum((getattr(chunk.logprobs, field) for chunk in chunks if chunk.logprobs), [])

    assert joined("tokens") == found.tokens and joined("text_offset") == found.text_offset
    near(joined("token_logprobs")[1:], expected)


def test_the_tokens_of_an_echo_are_spelled_on_a_thread_that_neither_computes_nor_sends(server, monkeypatch):
    threads, piece = [], Echo.piece
    monkeypatch.setattr(Echo, "piece", lambda echo: threads.append(threading.current_thread()) or piece(echo))
    got = server.post("/v1/completions", prompt="Bread is", echo=True, logprobs=1, max_tokens=1).json()
    assert got["choices"][0]["logprobs"]["text_offset"][0] == 0
    assert [thread.name.startswith("asyncio_") for thread in threads] == [True]


def test_tokens_that_are_not_in_the_text_are_not_reported_and_zero_asks_for_each_token_alone(server, sdk, create_chat):
    text = create_chat(messages=TALK, **SAMPLED).choices[0].message.content
    stop = text[30:34]
    got = create_chat(messages=TALK, stop=stop, logprobs=True, **SAMPLED).choices[0]
    written = "".join(entry.token for entry in got.logprobs.content).lstrip(" ")
    assert written.startswith(got.message.content)
    assert got.message.content == text[:text.index(stop)]
    assert len(written) < len(got.message.content) + 12
    assert all(entry.top_logprobs == [] for entry in got.logprobs.content)
    answers = sdk.completions.create(prompt=["Name a fish.", "Name a dog."], logprobs=0, n=2, **SAMPLED).choices
    for one in answers:
        assert [list(likeliest) for likeliest in one.logprobs.top_logprobs] == [[name] for name in one.logprobs.tokens]
        assert len(one.logprobs.text_offset) == len(one.logprobs.token_logprobs)
        assert one.logprobs.text_offset[0] == 0

    assert sdk.completions.create(prompt="Name a fish.", **SAMPLED).choices[0].logprobs is None


@pytest.mark.parametrize("path, fields, param", [
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"logprobs": 3}, "logprobs"), ("completions", {"logprobs": 6}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs")])
def test_a_wish_that_the_protocol_has_not_is_refused(server, path, fields, param):
    got = server.post(f"/v1/{path}", messages=TALK, prompt="a", max_tokens=1, **fields)
    assert refusal(got, "param") == (400, param)


@pytest.mark.parametrize("kind", [sentencepiece, bytelevel])
def test_the_bytes_of_tokens_together_are_those_of_a_text(tmp_path, kind):
    text = Text(kind(tmp_path / "tokenizer"))
    spelled = TokenTexts(text.tokenizer)
    ids = plain_ids(text.tokenizer, MIXED)
    data = b"".join(spelled(token).data for token in ids)
    assert data.decode().lstrip(" ") == MIXED
    assert not all(spelled(token).whole for token in ids) and all(spelled(token).name.isprintable() or
                                                                  spelled(token).whole for token in ids)
    end = text.tokenizer.eos_token_id
    assert spelled(end) == (text.tokenizer.special_tokens_map["eos_token"], None)
    assert spelled(len(text.tokenizer) + 3).data is None
