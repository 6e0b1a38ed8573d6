"""Tokens and their log-probabilities in the shapes of OpenAI's protocol, for chats and for completions."""
from __future__ import annotations

from typing import Any, Sequence

from model.token_text import TokenText
from serve.text_chunks import Token


def in_chat(tokens: Sequence[Token]) -> dict[str, Any]:
    """As a chat's choice or chunk has them."""
    content = [{**_entry(token.spelled, token.logprob),
                "top_logprobs": [_entry(*one) for one in token.likeliest]} for token in tokens]
    return {"content": content, "refusal": None}


def in_completion(tokens: Sequence[Token]) -> dict[str, Any]:
    """As a completion's choice or chunk has them."""
    return {"tokens": [_name(token.spelled) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": [token.offset for token in tokens]}


def _entry(spelled: TokenText, logprob: float | None) -> dict[str, Any]:
    data = None if spelled.data is None else list(spelled.data)
    return {"token": spelled.name, "logprob": logprob, "bytes": data}


def _likeliest(token: Token) -> dict[str, float] | None:
    """The likeliest tokens by their names, and the token itself even if it is none of them."""
    if token.logprob is None:
        return None
    others = {_name(other): value for other, value in token.likeliest}
    return {**others, _name(token.spelled): token.logprob}


def _name(spelled: TokenText) -> str:
    """The name of a token; one that is no whole character is marked."""
    return spelled.name if spelled.whole else f"bytes:{spelled.name}"
