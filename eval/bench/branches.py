"""A token tree as a picture: indented branches in the terminal, or a drawing in a file.

A probability is that of the whole path from the tip, as the draft has it.
"""
from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from model.tree import TokenTree

FORMS = (".png", ".svg")
Words = Callable[[int], str]  # the text of a token


class Leaf(NamedTuple):
    """A node as it is drawn: where, below which other one, and what is written at it."""

    node: int
    parent: int
    depth: int
    probability: float
    token: int


def ordered(tree: TokenTree) -> Iterator[Leaf]:
    """The tip and all guesses below it, each behind its parent, the likelier branch first."""
    waiting = [Leaf(tree.tip, tree.tip, 0, 1.0, tree.nodes[tree.tip].token)]
    while waiting:
        leaf = waiting.pop()
        yield leaf
        below = sorted(tree.nodes[leaf.node].children.items(),
                       key=lambda child: tree.nodes[child[1]].score)
        for token, node in below:
            probability = math.exp(tree.nodes[node].score - tree.nodes[tree.tip].score)
            waiting.append(Leaf(node, leaf.node, leaf.depth + 1, probability, token))


def text_art(tree: TokenTree, words: Words) -> str:
    """The tree as lines: indented by depth, with probability, token id and token."""
    lines = []
    for leaf in ordered(tree):
        written = f"{leaf.probability:6.3f}  {leaf.token:>6}  {words(leaf.token)!r}"
        lines.append(f"{'|  ' * max(leaf.depth - 1, 0)}{'+- ' if leaf.depth else ''}{written}")
    return "\n".join(lines)


def check_form(path: str) -> None:
    """Raise ValueError for a file of a form that cannot be drawn."""
    if Path(path).suffix not in FORMS:
        raise ValueError(f"picture={path} is no picture: name a file that ends in {' or '.join(FORMS)}")


def draw(tree: TokenTree, words: Words, title: str, path: str) -> None:
    """Draw the tree into a file. Raises ValueError if it cannot be written."""
    from eval.plots import drawn

    leaves = list(ordered(tree))
    deepest = max(leaf.depth for leaf in leaves)
    places = {leaf.node: (leaf.depth, row) for row, leaf in enumerate(leaves)}
    with drawn(path, (1.9 * deepest + 3, 0.19 * len(leaves) + 0.8)) as axes:
        for leaf in leaves:
            (x, y), (above, start) = places[leaf.node], places[leaf.parent]
            axes.plot([above, above, x], [start, y, y],
                      color="black", linewidth=0.4 + 2 * leaf.probability)
            label = f" {leaf.probability:.2f} {words(leaf.token)!r} {leaf.token}"
            axes.text(x, y, label, fontsize=7, va="center", parse_math=False,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        axes.invert_yaxis()
        axes.set_xlim(-0.1, deepest + 1)
        axes.axis("off")
        axes.set_title(title, loc="left", parse_math=False)
