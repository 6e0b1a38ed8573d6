"""The text of an answer as it is sent: pieces, with the tokens that make them where a request wants them.

It knows nothing about HTTP or engines.
"""
from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple, Sequence

from launch.generation import Generation
from model.logprobs import Logprob
from model.text import Text
from model.token_text import TokenText, TokenTexts
from serve.protocol import Choice

LEAST = -9999.0  # in place of the logarithm of 0, for which JSON has no number


class Token(NamedTuple):
    """How a token is written, where it begins in the text, its log-probability, and the likeliest ones in its place.

    The first token of a prompt has no log-probability.
    """

    spelled: TokenText
    offset: int
    logprob: float | None
    likeliest: Sequence[tuple[TokenText, float]] = ()


class Piece(NamedTuple):
    """Some text of a choice, and its tokens if they are wanted."""

    text: str
    tokens: Sequence[Token] = ()


class Places:
    """The places of tokens in a text, in whose front so many characters stand already."""

    def __init__(self, text: Text, offset: int = 0) -> None:
        self._stream, self._spelling = text.stream(), TokenTexts(text.tokenizer)
        self._offset = offset

    def add(self, token: int, logprob: float | None, likeliest: Sequence[tuple[int, float]] = ()) -> Token:
        """The next token, with what is said of it."""
        offset = self._offset
        self._offset += len(self._stream.add([token]))
        others = [(self._spelling(other), max(value, LEAST)) for other, value in likeliest]
        own = None if logprob is None else max(logprob, LEAST)
        return Token(self._spelling(token), offset, own, others)


class Pieces:
    """The pieces of a choice, the prompt in front if it is echoed; `text` is the pipeline's, and `ids` the prompt's.

    A token is sent with the first piece that goes beyond its begin. So what is not part of the text is not sent: end
    tokens, and those behind a stop text. Raises ValueError for a pipeline without a tokenizer, where one is needed.
    """

    def __init__(self, text: Text | None, choice: Choice, ids: Sequence[int]) -> None:
        self._wants_logprobs = choice.options.get("logprobs") is not None
        if text is None and (choice.echo or self._wants_logprobs):
            raise ValueError("this pipeline was started for token ids, so it can give neither tokens nor the prompt: "
                             "leave out echo and logprobs, or start it without prompt_ids")
        self._text, self._ids = text, ids
        self._echo = ""
        if choice.echo and text is not None:
            self._echo = choice.prompt if isinstance(choice.prompt, str) else text.decode(ids)
        self._length = len(self._echo)  # of what was sent, in characters
        self._places = Places(text, self._length) if text is not None and self._wants_logprobs else None
        self._taken = 0
        self._held: list[Token] = []

    def of(self, generation: Generation, text: str) -> Iterator[Piece]:
        """What there is to send once the answer goes on with this text."""
        if self._echo:
            yield Piece(self._echo, self._prompt(generation.answer.prompt_logprobs))
            self._echo = ""
        self._length += len(text)
        if text:
            yield Piece(text, self._tokens(generation.answer.logprobs))

    def _prompt(self, said: Iterable[Logprob]) -> list[Token]:
        if self._text is None or not self._wants_logprobs:
            return []
        places = Places(self._text)
        return [places.add(self._ids[0], None), *(places.add(*one) for one in said)]

    def _tokens(self, said: Sequence[Logprob]) -> list[Token]:
        """The tokens of the text so far that were not sent yet."""
        if self._places is None:
            return []
        self._held += [self._places.add(*one) for one in said[self._taken:]]
        self._taken = len(said)
        begun = [token for token in self._held if token.offset < self._length]
        self._held = self._held[len(begun):]
        return begun
