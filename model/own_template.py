"""The chat template that came with a tokenizer: a stranger's program, in the sandbox of `transformers` and in ours.

It knows nothing about token ids.
"""
from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

from model.sandbox import Sandbox

PATIENCE = 10.0  # seconds for one text, which takes a thousandth of one
Talk = List[Dict[str, str]]
OTHERS = "use template=vicuna, template=llama-2 or template=none"


def shown(error: Exception) -> str:
    """What an error says, in one line that does nothing to a terminal: a stranger may have written it."""
    first = (str(error).splitlines() or [""])[0]
    escaped = repr(first[:200])[1:-1]
    return f"{type(error).__name__}: {escaped}"


class OwnTemplate:
    """The template of the tokenizer in a folder, in one process for as long as this object lives."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._sandbox = Sandbox(partial(_wrapped, tokenizer))

    def wrap(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
        """The text of a conversation, up to where the assistant answers. Raises ValueError if the template fails."""
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {self._folder} has no chat template of its own; {OTHERS}")
        talk = [dict(message) for message in messages]
        try:
            return self._sandbox.call(PATIENCE, talk, dict(variables))
        except Exception as error:  # it may do whatever it likes
            raise ValueError(f"the chat template of the tokenizer in {self._folder} fails ({shown(error)}); "
                             f"{OTHERS}, or mend it") from error


def _wrapped(tokenizer: Any, talk: Talk, variables: Mapping[str, Any]) -> str:
    text: str = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **variables)
    return text
