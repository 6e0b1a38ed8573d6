"""Prompts as token ids, and answers as they are sent: pieces of text with their tokens, and snapshots of guesses.

This module knows nothing about HTTP or engines.
"""
from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

from launch.pipeline import Generation, Pipeline
from model.sample import Logprob
from model.text import LongText, Stream, TemplateError, Text, TokenText, TokenTexts
from model.tree import TokenTree
from serve.protocol import Choice, JsonObject, Refused

MAX_GUESSES = 60  # in a snapshot
SPACE_MARKS = ("▁", "Ġ")  # a space at the beginning of a token, as tokenizers write it
END_TOKEN = "[end]"  # in place of a token such as </s>
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


class Echo(NamedTuple):
    """A prompt to send before its answer; its tokens are not spelled yet, since a long prompt has many."""

    text: str
    tokenizer_text: Text | None  # the pipeline's, None: send no tokens
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob]  # of all tokens but the first

    def piece(self) -> Piece:
        """Return it as a piece, on any thread."""
        if self.tokenizer_text is None:
            return Piece(self.text)

        offsets = Offsets(self.tokenizer_text)
        first_token = offsets.add(self.token_ids[0], None)
        return Piece(self.text, [first_token, *(offsets.add(*logprob) for logprob in self.logprobs)])


class Offsets:
    """The offsets of tokens in a text, in characters; the first token is at `offset`."""

    def __init__(self, text: Text, offset: int = 0) -> None:
        self._stream, self._spelling = Stream(text.tokenizer), TokenTexts(text.tokenizer)
        self._offset = offset

    def add(self, token: int, logprob: float | None,
            likeliest: Sequence[tuple[int, float]] = ()) -> Token:
        """Return the next token, with its offset and log-probabilities."""
        offset = self._offset
        self._offset += len(self._stream.add([token]))
        spelled_likeliest = [(self._spelling(other), max(value, LOG_OF_ZERO)) for other, value in likeliest]
        token_logprob = None if logprob is None else max(logprob, LOG_OF_ZERO)
        return Token(self._spelling(token), offset, token_logprob, spelled_likeliest)


class Pieces:
    """The pieces of a choice, after the prompt if it is echoed; `text` is the pipeline's.

    A token is sent with the first piece that goes beyond its offset. So tokens outside the text are not sent: end
    tokens, and those after a stop text. Raise ValueError if a tokenizer is needed and the pipeline has none.
    """

    def __init__(self, text: Text | None, choice: Choice, prompt_token_ids: Sequence[int]) -> None:
        if text is None and (choice.echo or choice.wants_logprobs):
            raise ValueError("this pipeline was started for token ids, so it can give neither tokens nor the prompt: "
                             "leave out echo and logprobs, or start it without prompt_ids")

        # the prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_only = choice.prompt_only
        self._unsent_echo = ""
        if choice.echo and text is not None:
            self._unsent_echo = choice.prompt if isinstance(choice.prompt, str) else text.decode(prompt_token_ids)

        # the answer
        self._num_characters = len(self._unsent_echo)  # of all pieces so far
        self._text = text if choice.wants_logprobs else None  # None: send no tokens
        self._offsets = Offsets(self._text, self._num_characters) if self._text else None
        self._num_read = 0  # tokens of the answer that were taken from its log-probabilities
        self._unsent_tokens: list[Token] = []

    def of(self, generation: Generation, text: str) -> Iterator[Piece | Echo]:
        """Yield the pieces to send once the answer continues with this text."""
        if self._unsent_echo:
            yield Echo(self._unsent_echo, self._text, self._prompt_token_ids, generation.answer.prompt_logprobs)
            self._unsent_echo = ""
        if self._prompt_only:
            return

        self._num_characters += len(text)
        if text:
            yield Piece(text, self._answer_tokens(generation.answer.logprobs))

    def _answer_tokens(self, logprobs: Sequence[Logprob]) -> list[Token]:
        """Return the tokens to send with the next piece, given the log-probabilities of the whole answer so far."""
        if self._offsets is None:
            return []
        self._unsent_tokens += [self._offsets.add(*logprob) for logprob in logprobs[self._num_read:]]
        self._num_read = len(logprobs)

        sendable = [token for token in self._unsent_tokens if token.offset < self._num_characters]
        self._unsent_tokens = self._unsent_tokens[len(sendable):]
        return sendable


# --- prompts ----------------------------------------------------------------------------------------------------------

def prompt_ids(choice: Choice, pipeline: Pipeline) -> list[int]:
    """Return the token ids of a choice's prompt; raise ValueError for a prompt that the pipeline cannot read.

    Raise Refused before tokenizing a text that is too long in any tokenization.
    """
    try:
        return pipeline.prompt_ids(choice.prompt, choice.template, choice.variables, pipeline.spec.context)
    except LongText as error:
        raise _too_long(f"{error.num_characters} characters", choice, pipeline) from None
    except TemplateError as error:
        message = f"this model's chat template does not take these messages ({error.why}): change them"
        raise Refused(message, choice.field) from None


def checked_prompt_ids(choice: Choice, pipeline: Pipeline) -> list[int]:
    """Return the ids as `prompt_ids` does; raise Refused for a prompt that leaves no room for a token of the answer."""
    prompt, max_tokens = choice.prompt, pipeline.spec.context
    if len(prompt) >= max_tokens and isinstance(prompt[0], int):
        raise _too_long(f"{len(prompt)} tokens", choice, pipeline)

    token_ids = prompt_ids(choice, pipeline)
    if len(token_ids) >= max_tokens:
        raise _too_long(f"{len(token_ids)} tokens", choice, pipeline)
    return token_ids


def _too_long(size: str, choice: Choice, pipeline: Pipeline) -> Refused:
    # litellm, and so aider, recognizes this error by the words in its middle.
    message = (f"the prompt has {size}, and this model's maximum context length is {pipeline.spec.context} tokens, "
               "including those of the answer: shorten it")
    return Refused(message, choice.field, "context_length_exceeded")


# --- guesses ----------------------------------------------------------------------------------------------------------

def snapshot(generation: Generation, text: Text | None) -> JsonObject:
    """Return a snapshot: the likeliest live guesses, older ones first, and statistics so far; times are in seconds.

    A guess has its `id`, its `parent` (null: it follows the text), its `text`, whether it was `sent`, and the `score`
    of its path from the tip, a log-probability.
    """
    tree, answer = generation.tree, generation.answer
    by_score = sorted(tree.live, key=lambda node: (-tree.nodes[node].score, node))
    guesses = [_guess_facts(tree, node, text) for node in sorted(by_score[:MAX_GUESSES])]

    return {"guesses": guesses, "live": len(tree.live), "sent": tree.num_sent_guesses,
            "accepted": generation.accepted, "tokens": answer.new_tokens, "plain_tokens": answer.plain_tokens,
            "accepted_length": round(answer.mean_accepted_length, 2), "plain": round(answer.plain_rate, 2),
            "tokens_per_miss": round(answer.tokens_per_miss, 2),
            "seconds": round(answer.seconds, 3), "decode": round(answer.decode_seconds, 3)}


def _guess_facts(tree: TokenTree, node: int, text: Text | None) -> JsonObject:
    guess = tree.nodes[node]
    path_score = guess.score - tree.nodes[tree.tip].score
    return {"id": node, "parent": guess.parent if guess.parent in tree.live else None,
            "sent": node not in tree.unsent_guesses,
            "text": readable_token(guess.token, text) if text else str(guess.token),
            "score": round(path_score, 2)}


def readable_token(token: int, text: Text) -> str:
    """Return a token as a person reads it, with the space before it; one that ends an answer is `END_TOKEN`."""
    if token in text.end_ids:
        return END_TOKEN
    raw_token = str(text.tokenizer.convert_ids_to_tokens(token))
    readable = text.tokenizer.convert_tokens_to_string([raw_token])
    return f" {readable.lstrip()}" if raw_token.startswith(SPACE_MARKS) else readable
