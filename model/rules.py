"""The rules of verification: which token follows a node, given the target's law and what was drawn after the node.

A rule says one token for each node, and that token follows the target's law whatever was drawn: so the walk along what
is said (`model.tree.verify`) writes an exact sample. It knows nothing about pipelines.

**Why that is exact.** At one node each rule below gives a token with law p, if every proposal was drawn from the very q
that stands beside it, and if the chance that judges is independent of the chance that drew. Both come from streams that
are keyed by seed, position and purpose, the draws also by who draws. A text has one node at each position, and which
one that is, what is drawn there and what the laws are follows from earlier positions alone. So the chance of a position
is fresh for the node that becomes text, although nodes beside it, on other branches, use the same numbers: of those
none becomes text. The tokens of a text are then drawn one after the other from p, by induction over positions. It needs
a tree of which nothing is left out by its value, and in which what is below a node is drawn once.

Laws are arrays `[V]` of numbers: floats, or fractions, with which the tests compute whole distributions. `chance` is
the source of all randomness.
"""
from __future__ import annotations

import math
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import numpy as np
from torch import Tensor

from model.sample import DRAWING, JUDGING, Sampler, damaged, stream
from model.tree import Proposal, TokenTree

Law = Any  # probabilities [V], an array of numpy
Drawn = Sequence[Proposal]
Proposed = List[Tuple[Proposal, float]]  # with the log-probability of each


class Chance:
    """What happens by chance: by uniform numbers of the stream of one position."""

    def __init__(self, numbers: np.random.Generator) -> None:
        self._random = numbers.random  # from [0, 1)

    def happens(self, probability: Any) -> bool:
        """Whether an event of this probability happens."""
        return bool(self._random() < probability)

    def pick(self, weights: Law) -> int:
        """The place of one of these weights, with a probability in proportion to it."""
        sums = np.cumsum(weights)
        reached = self._random() * sums[-1]
        place = np.searchsorted(sums, reached, side="right")
        if place == len(sums):  # what was reached was rounded up to the whole sum
            place = np.flatnonzero(weights)[-1]
        return int(place)


Draw = Callable[[Law, int, Chance], List[int]]


# --- the arithmetic at one node ---------------------------------------------------------------------------------------

def naive(law: Law, proposals: Drawn, chance: Chance) -> int:
    """A sample of the target; a guess is right if it is that token (SpecInfer's naive sampling)."""
    return chance.pick(law)


def mss(law: Law, proposals: Drawn, chance: Chance) -> int:
    """Multi-step speculative sampling (SpecInfer, algorithm 2): proposals that were drawn independently, in any order.

    Equal tokens are proposals of their own, be they of one drafter or of two. After one that is rejected, the target's
    law is what that proposal left of it, in which the rejected token has no probability.
    """
    left = list(proposals)
    while left:
        proposal = left.pop(chance.pick(np.ones(len(left), dtype=int)))
        if chance.happens(acceptance(law, proposal.law, proposal.token)):
            return proposal.token
        law = residual(law, proposal.law)
    return chance.pick(law)


def without_replacement(law: Law, proposals: Drawn, chance: Chance) -> int:
    """EAGLE-1's rule: each drafter drew tokens that differ, from what earlier ones have left of its law."""
    unseen: dict[str, Law] = {}  # by drafter
    for source, token, whole in proposals:
        drawn_from = unseen.get(source, whole)
        if chance.happens(acceptance(law, drawn_from, token)):
            return token
        law = residual(law, drawn_from)
        unseen[source] = taken_out(drawn_from, token)
    return chance.pick(law)


def acceptance(law: Law, drawn_from: Law, token: int) -> Any:
    """min(1, p / q) for a token that was drawn from q."""
    wanted, offered = law[token], drawn_from[token]
    return 1 if wanted >= offered else wanted / offered


def residual(law: Law, drawn_from: Law) -> Law:
    """What a rejected proposal leaves: norm(max(0, p - q)); if that is nothing, only rounding differs, and p stays."""
    left = np.maximum(law - drawn_from, 0)
    total = left.sum()
    return left / total if total > 0 else law


def taken_out(law: Law, token: int) -> Law:
    """A law without one of its tokens; nothing is left of one that had no other."""
    left = law.copy()
    left[token] = 0
    total = left.sum()
    return left / total if total > 0 else left


# --- drawing ----------------------------------------------------------------------------------------------------------

def each(law: Law, count: int, chance: Chance) -> list[int]:
    """Tokens that are drawn independently of each other."""
    return [chance.pick(law) for _ in range(count)]


def apart(law: Law, count: int, chance: Chance) -> list[int]:
    """Tokens that differ, each drawn from what is left of the law; fewer, if the law has no more."""
    tokens = []
    for _ in range(count):
        if not law.any():
            break
        tokens.append(chance.pick(law))
        law = taken_out(law, tokens[-1])
    return tokens


class Judging(NamedTuple):
    """How a node is judged, and how what is below it has to be drawn; None: guesses may be chosen in any way."""

    judge: Callable[[Law, Drawn, Chance], int]
    draw: Draw | None


RULES = {
    "naive": Judging(naive, None),
    "mss": Judging(mss, each),
    "eagle1": Judging(without_replacement, apart),
}


# --- rules for nodes of a tree ----------------------------------------------------------------------------------------

def judged(sampler: Sampler, tree: TokenTree, nodes: Sequence[int], logits_TV: Tensor) -> list[int]:
    """The tokens that follow these nodes, by the target's logits and the laws that guesses were drawn from."""
    judge = RULES[sampler.rule].judge
    law_TV = laws(sampler, logits_TV)
    if np.isnan(law_TV).any():
        raise damaged(logits_TV.dtype)
    tokens = []
    for node, law_V in zip(nodes, law_TV):
        known = tree.nodes[node]
        proposals = [widened(proposal, len(law_V)) for proposal in known.drawn]
        chance = Chance(stream(sampler.seed, known.pos + 1, JUDGING))
        tokens.append(judge(law_V, proposals, chance))
    return tokens


def laws(sampler: Sampler, logits_TV: Tensor) -> Law:
    """The laws `[T, V]` that a sampler makes of logits, in float64 on the host; NaN where they are not finite."""
    warped_TV = sampler.warped(logits_TV).double()
    return warped_TV.softmax(-1).cpu().numpy()


# --- guesses for nodes of a tree --------------------------------------------------------------------------------------

def drawing(sampler: Sampler) -> Draw | None:
    """How the guesses below a node are drawn; None if the rule takes those that are likeliest."""
    return None if sampler.matches else RULES[sampler.rule].draw


def drawn(sampler: Sampler, like: Proposal, position: int, number: int, count: int) -> Proposed:
    """What a drafter draws for a position, from the law of `like`; its `number` keeps its draws apart from others'."""
    draw = drawing(sampler)
    assert draw is not None, f"the rule {sampler.rule} draws nothing"
    chance = Chance(stream(sampler.seed, position, DRAWING, number))
    tokens = draw(like.law, count, chance)
    return [(like._replace(token=token), math.log(like.law[token])) for token in tokens]


def spread(law_TV: Law, known_V: Tensor) -> Law:
    """Laws over a proposer's tokens as laws over the target's, up to the last of those that it knows."""
    all_TV = np.zeros((len(law_TV), int(known_V.max()) + 1))
    all_TV[:, known_V.cpu().numpy()] = law_TV
    return all_TV


def widened(proposal: Proposal, size: int) -> Proposal:
    """A proposal with a law over so many tokens, of which its proposer may know fewer."""
    law = np.pad(proposal.law, (0, size - len(proposal.law)))
    return proposal._replace(law=law)
