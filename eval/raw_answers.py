"""Raw answers in one compressed file, from which others can compute every speed, and a hash of their texts."""
from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any, Iterable

from eval.metrics import AnswerRecord, trial_of

RAW_ANSWERS = "answers.jsonl.gz"
FIELDS = ("set", "temperature", "repeat", "seed", "question_id", "method", "draft", "token_ids")
SECOND_DIGITS = 4  # of the times at which tokens settled
HASH_DIGITS = 12


def compressed(answers: Iterable[AnswerRecord]) -> bytes:
    """Return a line of JSON for each answer: its request, and per turn the token ids, and pairs of modelled seconds
    since the request and tokens settled then. The same answers become the same bytes."""
    lines = []
    for answer in answers:
        request_and_text = {field: answer[field] for field in FIELDS}
        line = {**request_and_text, "settled": _rounded(answer["settled"])}
        lines.append(json.dumps(line) + "\n")
    return gzip.compress("".join(sorted(lines)).encode(), mtime=0)


def text_hash(answers: Iterable[AnswerRecord]) -> str:
    """Return the first hex digits of SHA-256 over the sorted list, in JSON, of all trials with their token ids.

    It is the same for methods that write the same texts.
    """
    texts = [[*map(str, trial_of(answer)), answer["token_ids"]] for answer in answers]
    digest = hashlib.sha256(json.dumps(sorted(texts)).encode())
    return digest.hexdigest()[:HASH_DIGITS]


def _rounded(settled: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """Return the pairs of each turn with rounded seconds."""
    return [[[round(seconds, SECOND_DIGITS), num_tokens] for seconds, num_tokens in turn] for turn in settled]
