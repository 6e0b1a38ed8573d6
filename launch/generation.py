"""One answer of a pipeline while it is made: its pieces of text, its token ids and figures, and the end of it."""
from __future__ import annotations

from contextlib import closing
from typing import Generator, Iterator

from model.text import Reader
from model.tree import TokenTree
from pipeline.decode import Answer, Settled
from pipeline.trace import NoTrace


class Generation:
    """One answer while it is made: iterate over its pieces of text, or close it to give it up.

    Where there is no tokenizer, the pieces are token ids with spaces between. `answer` has the token ids and the
    figures so far.
    """

    def __init__(self, answer: Answer, settled: Settled, reader: Reader | None, trace: NoTrace) -> None:
        self.answer = answer
        self._settled, self._reader = settled, reader
        self._pieces = pieces(answer, settled, reader, trace)

    @property
    def ready(self) -> bool:
        """Whether the next piece, or the end, can be read without letting any request go on."""
        return self._settled.ready

    @property
    def tree(self) -> TokenTree:
        """The text and its live guesses, as they are at this moment."""
        return self._settled.tree

    @property
    def accepted(self) -> int:
        """How many tokens of the answer so far were guesses under way."""
        first = self.answer.prompt_tokens
        end = first + self.answer.new_tokens
        return sum(first <= position < end for position in self.tree.foreseen)

    @property
    def text(self) -> str:
        """The text so far; empty where there is no tokenizer."""
        return self._reader.text if self._reader else ""

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """Give the answer up, even one that has not begun: no stage computes for it any more."""
        self._pieces.close()
        self._settled.close()


def pieces(answer: Answer, settled: Iterator[list[int]], reader: Reader | None, trace: NoTrace
           ) -> Generator[str, None, None]:
    """The pieces of an answer, as its tokens settle. When it is closed, so is the stream of settled tokens."""
    with trace.span("request", answer=answer.token_ids), closing(settled):  # type: ignore[type-var]
        for tokens in settled:
            yield reader.read(tokens) if reader else "".join(f"{token} " for token in tokens)
    if reader:
        yield reader.finish()
