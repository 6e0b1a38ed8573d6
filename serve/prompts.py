"""A prompt as token ids, or refused because it is too long.

It knows nothing about HTTP or engines.
"""
from __future__ import annotations

from functools import lru_cache

from launch.pipeline import Pipeline
from model.text import Text
from serve.protocol import Choice, Refused


def ids_of(choice: Choice, pipeline: Pipeline) -> list[int]:
    """The token ids of a choice's prompt; raises ValueError for what the pipeline has no place for.

    A text that cannot fit, however it falls into tokens, is Refused before time is spent on it.
    """
    characters, text = _characters(choice), pipeline.text
    if text is not None and characters > pipeline.spec.context * longest(text):
        raise too_long(f"{characters} characters", choice, pipeline)
    return pipeline.prompt_ids(choice.prompt, choice.template, choice.variables)


def fitting_ids(choice: Choice, pipeline: Pipeline) -> list[int]:
    """The same for a prompt that is to be answered: Refused if it leaves no room for a token behind it."""
    given, most = choice.prompt, pipeline.spec.context
    if len(given) >= most and isinstance(given[0], int):
        raise too_long(f"{len(given)} tokens", choice, pipeline)
    ids = ids_of(choice, pipeline)
    if len(ids) >= most:
        raise too_long(f"{len(ids)} tokens", choice, pipeline)
    return ids


def too_long(size: str, choice: Choice, pipeline: Pipeline) -> Refused:
    """What is said of a prompt of this size."""
    # litellm, and so aider, knows this error by the words of its middle.
    said = (f"the prompt has {size}, and this model's maximum context length is {pipeline.spec.context} tokens, "
            "those of the answer among them: shorten it")
    return Refused(said, choice.field, "context_length_exceeded")


@lru_cache(maxsize=1)
def longest(text: Text) -> int:
    """The most characters that one token stands for."""
    return max(map(len, text.tokenizer.get_vocab()))


def _characters(choice: Choice) -> int:
    if isinstance(choice.prompt, str):
        return len(choice.prompt)
    return sum(len(part["content"]) for part in choice.prompt if isinstance(part, dict))
