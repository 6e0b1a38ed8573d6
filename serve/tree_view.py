"""What a person can see of an answer under way: the guesses that still live, and its figures so far."""
from __future__ import annotations

from typing import Any

from launch.generation import Generation
from model.text import Text
from model.tree import TokenTree

MOST = 60  # guesses that are shown
SPACES = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n"})  # as tokenizers write them


def sight(generation: Generation, text: Text | None) -> dict[str, Any]:
    """The likeliest live guesses, the older ones first, and the figures so far; times are in seconds.

    A guess has its `id`, its `parent` (null: it stands on the text), its `text`, whether it was `sent`, and the `score`
    of its path, a logarithm of a probability.
    """
    tree, answer = generation.tree, generation.answer
    best = sorted(tree.live, key=lambda node: (-tree.nodes[node].score, node))[:MOST]
    shown = [_guess(tree, node, text) for node in sorted(best)]
    return {"guesses": shown, "live": len(tree.live), "sent": tree.guessed, "accepted": generation.accepted,
            "tokens": answer.new_tokens, "passes": answer.target_passes,
            "seconds": round(answer.prefill_seconds + answer.decode_seconds, 3),
            "decode": round(answer.decode_seconds, 3)}


def _guess(tree: TokenTree, node: int, text: Text | None) -> dict[str, Any]:
    token, parent = tree.nodes[node].token, tree.nodes[node].parent
    written = text.tokenizer.convert_ids_to_tokens(token) if text else None
    path = tree.nodes[node].score - tree.nodes[tree.tip].score
    return {"id": node, "parent": parent if parent in tree.live else None, "sent": node not in tree.waiting,
            "text": str(written or token).translate(SPACES), "score": round(path, 2)}
