"""Prompts as token ids, and answers as they are sent: pieces of text with their tokens, and snapshots of guesses.

This module knows nothing about HTTP or engines.
"""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple, Sequence

from config.methods import METHODS
from launch.pipeline import Generation, Pipeline
from model.sample import Logprob
from model.text import Stream, TemplateError, Text, TokenText, TokenTexts
from model.tree import TokenTree
from serve.protocol import Choice, Facts, Refused

SHOWN = 60  # largest number of guesses in a snapshot
SPACES = ("▁", "Ġ")  # a space at the beginning of a token, as tokenizers write it
END = "[end]"  # in place of a token such as </s>
LOG_OF_ZERO = -9999.0  # in place of the logarithm of 0, for which JSON has no number


class Token(NamedTuple):
    """A token's spelling, its offset in the text, its log-probability, and the likeliest tokens in its place.

    The first token of a prompt has no log-probability.
    """

    spelled: TokenText
    offset: int
    logprob: float | None
    likeliest: Sequence[tuple[TokenText, float]] = ()


class Piece(NamedTuple):
    """Some text of a choice, and its tokens if they were requested."""

    text: str
    tokens: Sequence[Token] = ()


class Offsets:
    """The offsets of tokens in a text; the first token has the given `offset`, in characters."""

    def __init__(self, text: Text, offset: int = 0) -> None:
        self._stream, self._spelling = Stream(text.tokenizer), TokenTexts(text.tokenizer)
        self._offset = offset

    def add(self, token: int, logprob: float | None, likeliest: Sequence[tuple[int, float]] = ()) -> Token:
        """Return the next token, with its offset and log-probabilities."""
        offset = self._offset
        self._offset += len(self._stream.add([token]))
        others = [(self._spelling(other), max(value, LOG_OF_ZERO)) for other, value in likeliest]
        own = None if logprob is None else max(logprob, LOG_OF_ZERO)
        return Token(self._spelling(token), offset, own, others)


class Pieces:
    """The pieces of a choice, after the prompt if it is echoed; `text` is the pipeline's, and `ids` the prompt's.

    A token is sent with the first piece that goes beyond its offset. So tokens outside the text are not sent: end
    tokens, and those after a stop text. Raise ValueError if a tokenizer is needed and the pipeline has none.
    """

    def __init__(self, text: Text | None, choice: Choice, ids: Sequence[int]) -> None:
        if text is None and (choice.echo or choice.wants_logprobs):
            raise ValueError("this pipeline was started for token ids, so it can give neither tokens nor the prompt: "
                             "leave out echo and logprobs, or start it without prompt_ids")
        self._ids = ids
        self._echo = ""
        self._prompt_only = choice.prompt_only
        if choice.echo and text is not None:
            self._echo = choice.prompt if isinstance(choice.prompt, str) else text.decode(ids)
        self._length = len(self._echo)  # number of characters sent
        self._text = text if choice.wants_logprobs else None  # None: send no tokens
        self._places = Offsets(self._text, self._length) if self._text else None
        self._taken = 0
        self._held: list[Token] = []

    def of(self, generation: Generation, text: str) -> Iterator[Piece]:
        """Yield the pieces to send once the answer continues with this text."""
        if self._echo:
            yield Piece(self._echo, self._prompt(generation.answer.prompt_logprobs))
            self._echo = ""
        if self._prompt_only:
            return
        self._length += len(text)
        if text:
            yield Piece(text, self._tokens(generation.answer.logprobs))

    def _prompt(self, said: Iterable[Logprob]) -> list[Token]:
        if self._text is None:
            return []
        places = Offsets(self._text)
        first = places.add(self._ids[0], None)
        return [first, *(places.add(*one) for one in said)]

    def _tokens(self, said: Sequence[Logprob]) -> list[Token]:
        if self._places is None:
            return []
        self._held += [self._places.add(*one) for one in said[self._taken:]]
        self._taken = len(said)
        begun = [token for token in self._held if token.offset < self._length]
        self._held = self._held[len(begun):]
        return begun


# --- prompts ----------------------------------------------------------------------------------------------------------

def prompt_ids(choice: Choice, pipeline: Pipeline) -> list[int]:
    """Return the token ids of a choice's prompt; raise ValueError for a prompt that the pipeline cannot read.

    Raise Refused before tokenizing a text that is too long in any tokenization.
    """
    prompt, text = choice.prompt, pipeline.text
    texts = [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt if isinstance(part, dict)]
    characters = sum(map(len, texts))
    if text is not None and characters > pipeline.spec.context * _longest(text):
        raise _too_long(f"{characters} characters", choice, pipeline)
    try:
        return pipeline.prompt_ids(choice.prompt, choice.template, choice.variables)
    except TemplateError as error:
        message = f"this model's chat template does not take these messages ({error.why}): change them"
        raise Refused(message, choice.field) from None


def checked_prompt_ids(choice: Choice, pipeline: Pipeline) -> list[int]:
    """Return the ids as `prompt_ids` does; raise Refused for a prompt that leaves no room for a token of the answer."""
    given, most = choice.prompt, pipeline.spec.context
    if len(given) >= most and isinstance(given[0], int):
        raise _too_long(f"{len(given)} tokens", choice, pipeline)
    ids = prompt_ids(choice, pipeline)
    if len(ids) >= most:
        raise _too_long(f"{len(ids)} tokens", choice, pipeline)
    return ids


def _too_long(size: str, choice: Choice, pipeline: Pipeline) -> Refused:
    # litellm, and so aider, recognizes this error by the words in its middle.
    said = (f"the prompt has {size}, and this model's maximum context length is {pipeline.spec.context} tokens, "
            "including those of the answer: shorten it")
    return Refused(said, choice.field, "context_length_exceeded")


@lru_cache(maxsize=1)
def _longest(text: Text) -> int:
    """Return the length of the longest token, in characters."""
    return max(map(len, text.tokenizer.get_vocab()))


# --- guesses ----------------------------------------------------------------------------------------------------------

def snapshot(generation: Generation, text: Text | None) -> Facts:
    """Return a snapshot: the likeliest live guesses, older ones first, and statistics so far; times are in seconds.

    A guess has its `id`, its `parent` (null: it follows the text), its `text`, whether it was `sent`, and the `score`
    of its path from the tip, a log-probability.
    """
    tree, answer = generation.tree, generation.answer
    ranked = sorted(tree.live, key=lambda node: (-tree.nodes[node].score, node))
    shown = [_guess(tree, node, text) for node in sorted(ranked[:SHOWN])]
    return {"guesses": shown, "live": len(tree.live), "sent": tree.num_sent_guesses,
            "accepted": generation.accepted, "tokens": answer.new_tokens, "plain_tokens": answer.plain_tokens,
            "accepted_length": round(answer.mean_accepted_length, 2),
            "tokens_per_miss": round(answer.tokens_per_miss, 2),
            "seconds": round(answer.seconds, 3), "decode": round(answer.decode_seconds, 3)}


def speed_facts(pipeline: Pipeline) -> Facts:
    """Return what a snapshot's speed is compared with, in tokens per second, and whether devices are emulated.

    `plain` is 0 for a method that never guesses.
    """
    config = pipeline.config
    rate, is_measured = pipeline.plain_rate
    guesses = METHODS[config.pipeline_type].draft != "none"
    return {"plain": round(rate, 2) if guesses else 0, "measured": is_measured, "kind": config.kind,
            "profile": Path(config.profile).name}


def _guess(tree: TokenTree, node: int, text: Text | None) -> Facts:
    found = tree.nodes[node]
    return {"id": node, "parent": found.parent if found.parent in tree.live else None,
            "sent": node not in tree.unsent_guesses, "text": _readable(found.token, text) if text else str(found.token),
            "score": round(found.score - tree.nodes[tree.tip].score, 2)}


def _readable(token: int, text: Text) -> str:
    """Return a token as a person reads it, with the space before it; one that ends an answer is `END`."""
    if token in text.end_ids:
        return END
    written = str(text.tokenizer.convert_ids_to_tokens(token))
    shown = text.tokenizer.convert_tokens_to_string([written])
    return f" {shown.lstrip()}" if written.startswith(SPACES) else shown
