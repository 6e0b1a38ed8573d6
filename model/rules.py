"""The rules of verification: they choose the token after a node, from the target's law and the tokens drawn there.

It knows nothing about pipelines. A law is a distribution over tokens. A rule chooses one token for each node,
distributed by the target's law whatever was drawn, so `model.tree.verify`, which follows these tokens, writes an exact
sample.

**Why this is exact.** At one node, each rule below returns a token with law p, if every proposal was drawn from the law
q that it carries, and if the random numbers of judging are independent of those of drawing. Both come from streams
keyed by seed, position and purpose, those of drawing also by the drafter. A text has one node at each position. Which
node this is, its drawn tokens and its laws depend only on earlier positions. So the random numbers of a position are
new for the node that becomes text. Nodes of other branches at this position use the same numbers, but never become
text. By induction over positions, the tokens of a text are thus drawn one after the other from p. This requires a tree
that omits no guess because of its value, and in which the tokens after a node are drawn once.

A **lossy** rule is not exact, and is only used where a person names it. It replaces the law of a node by another one,
from which the token is drawn, and the divergence between the two is recorded.

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

EPSILON, DELTA = 0.09, 0.3  # of typical acceptance: Medusa's published values, delta being the root of epsilon

Law = Any  # probabilities [V], an array of numpy
Drawn = Sequence[Proposal]
Proposed = List[Tuple[Proposal, float]]  # with the log-probability of each


class Chance:
    """Random decisions, from the uniform numbers of one position's stream."""

    def __init__(self, numbers: np.random.Generator) -> None:
        self._random = numbers.random  # from [0, 1)

    def happens(self, probability: Any) -> bool:
        """Return True with this probability."""
        return bool(self._random() < probability)

    def pick(self, weights: Law) -> int:
        """Return the index of one of these weights, with a probability proportional to it."""
        cumulative = np.cumsum(weights)
        drawn_sum = self._random() * cumulative[-1]
        index = np.searchsorted(cumulative, drawn_sum, side="right")
        if index == len(cumulative):  # `drawn_sum` was rounded up to the whole sum
            index = np.flatnonzero(weights)[-1]
        return int(index)


Draw = Callable[[Law, int, Chance], List[int]]


# --- the arithmetic at one node ---------------------------------------------------------------------------------------

def naive(law: Law, proposals: Drawn, chance: Chance) -> int:
    """Return a sample of the target; a guess is accepted if it is this token (SpecInfer's naive sampling)."""
    return chance.pick(law)


def mss(law: Law, proposals: Drawn, chance: Chance) -> int:
    """Apply multi-step speculative sampling (SpecInfer, algorithm 2) to independently drawn proposals, in any order.

    Equal tokens are separate proposals, whether of one drafter or of two. After a rejected proposal, the target's law
    is replaced by the residual, in which the rejected token has no probability.
    """
    proposals_left = list(proposals)
    while proposals_left:
        equal_weights = np.ones(len(proposals_left), dtype=int)
        proposal = proposals_left.pop(chance.pick(equal_weights))

        if chance.happens(acceptance(law, proposal.law, proposal.token)):
            return proposal.token
        law = residual(law, proposal.law)
    return chance.pick(law)


def without_replacement(law: Law, proposals: Drawn, chance: Chance) -> int:
    """Apply EAGLE-1's rule: each drafter drew distinct tokens, each from its law without its earlier tokens."""
    remaining_laws: dict[str, Law] = {}  # by drafter
    for source, token, whole_law in proposals:
        draft_law = remaining_laws.get(source, whole_law)
        if chance.happens(acceptance(law, draft_law, token)):
            return token
        law = residual(law, draft_law)
        remaining_laws[source] = taken_out(draft_law, token)
    return chance.pick(law)


def acceptance(law: Law, draft_law: Law, token: int) -> Any:
    """Return min(1, p / q) for a token that was drawn from q."""
    target_chance, draft_chance = law[token], draft_law[token]
    return 1 if target_chance >= draft_chance else target_chance / draft_chance


def residual(law: Law, draft_law: Law) -> Law:
    """Return the law after a rejected proposal, norm(max(0, p - q)), or p if this is zero but for rounding."""
    excess = np.maximum(law - draft_law, 0)
    total = excess.sum()
    return excess / total if total > 0 else law


def taken_out(law: Law, token: int) -> Law:
    """Return a law without one of its tokens, normalized; zeros if it had no other token."""
    remaining_law = law.copy()
    remaining_law[token] = 0
    total = remaining_law.sum()
    return remaining_law / total if total > 0 else remaining_law


# --- lossy arithmetic at one node -------------------------------------------------------------------------------------

def typical(law: Law, guesses: Sequence[int]) -> Law:
    """Return the law `[V]` of typical acceptance: the likeliest typical guess for certain, `law` if none is typical.

    This is Medusa's rule (arXiv 2401.10774, section 3.3.1): a guess x is typical if p(x) > min(epsilon, delta exp(-H)),
    where p is the target's `law` in float64 and H its entropy in nats. Medusa keeps the longest accepted branch, and
    takes the likeliest token after it. Here each node decides alone, and without a typical guess the token is sampled:
    the text still depends on the seed.
    """
    possible_V = law[law > 0]
    entropy = -(possible_V * np.log(possible_V)).sum()
    threshold = min(EPSILON, DELTA * math.exp(-entropy))

    typical_guesses = [token for token in guesses if law[token] > threshold]
    if not typical_guesses:
        return law
    certain_law = np.zeros_like(law)
    certain_law[max(typical_guesses, key=law.__getitem__)] = 1
    return certain_law


def divergence(law: Law, target_law: Law) -> float:
    """Return the Kullback-Leibler divergence KL(law || target_law) of two laws `[V]`, in nats."""
    is_possible = law > 0
    ratios = law[is_possible] / target_law[is_possible]
    return float((law[is_possible] * np.log(ratios)).sum())


# --- drawing ----------------------------------------------------------------------------------------------------------

def with_replacement(law: Law, count: int, chance: Chance) -> list[int]:
    """Return independently drawn tokens."""
    return [chance.pick(law) for _ in range(count)]


def without_repeats(law: Law, count: int, chance: Chance) -> list[int]:
    """Return distinct tokens, drawn without replacement; fewer than `count` if the law has no more."""
    tokens = []
    for _ in range(count):
        if not law.any():
            break
        tokens.append(chance.pick(law))
        law = taken_out(law, tokens[-1])
    return tokens


class Judging(NamedTuple):
    """A rule's function for a node, and the required way of drawing its guesses; None: any guesses are allowed."""

    judge: Callable[[Law, Drawn, Chance], int]
    draw: Draw | None


RULES = {
    "naive": Judging(naive, None),
    "mss": Judging(mss, with_replacement),
    "eagle1": Judging(without_replacement, without_repeats),
}
LOSSY = {"typical": typical}  # for any guesses: the law that replaces the target's


# --- rules for nodes of a tree ----------------------------------------------------------------------------------------

def judged(sampler: Sampler, tree: TokenTree, nodes: Sequence[int], logits_TV: Tensor) -> list[int]:
    """Return the tokens that follow these nodes, from the target's logits and the laws of drawn guesses.

    A lossy rule reads the guesses below a node, and records its divergence there.
    """
    lossy_rule = LOSSY.get(sampler.rule)
    judge = naive if lossy_rule else RULES[sampler.rule].judge
    law_TV = laws(sampler, logits_TV)
    if np.isnan(law_TV).any():
        raise damaged(logits_TV.dtype)

    tokens = []
    for node_id, law_V in zip(nodes, law_TV):
        node = tree.nodes[node_id]
        if lossy_rule:
            lossy_law_V = lossy_rule(law_V, list(node.children))
            node.divergence = divergence(lossy_law_V, law_V)
            law_V = lossy_law_V

        proposals = [widened(proposal, len(law_V)) for proposal in node.drawn]
        chance = Chance(stream(sampler.seed, node.pos + 1, JUDGING))
        tokens.append(judge(law_V, proposals, chance))
    return tokens


def laws(sampler: Sampler, logits_TV: Tensor) -> Law:
    """Return the sampler's laws `[T, V]` for logits, in float64 on the host; NaN where logits are not finite."""
    return sampler.warped(logits_TV).softmax(-1).cpu().numpy()


# --- guesses for nodes of a tree --------------------------------------------------------------------------------------

def drawing(sampler: Sampler) -> Draw | None:
    """Return the function that draws the guesses below a node, or None if the rule takes the likeliest ones."""
    return None if sampler.matches or sampler.rule in LOSSY else RULES[sampler.rule].draw


def drawn(sampler: Sampler, like: Proposal, position: int, drafter_number: int, count: int) -> Proposed:
    """Draw a drafter's proposals for a position from the law of `like`; each drafter has a stream of its own."""
    draw = drawing(sampler)
    assert draw is not None, f"the rule {sampler.rule} draws nothing"
    chance = Chance(stream(sampler.seed, position, DRAWING, drafter_number))
    tokens = draw(like.law, count, chance)
    return [(like._replace(token=token), math.log(like.law[token])) for token in tokens]


def spread(law_TV: Law, column_token_V: Tensor) -> Law:
    """Convert laws over a proposer's tokens to laws over the target's, up to the proposer's last token."""
    wide_law_TV = np.zeros((len(law_TV), int(column_token_V.max()) + 1))
    wide_law_TV[:, column_token_V.cpu().numpy()] = law_TV
    return wide_law_TV


def widened(proposal: Proposal, vocab_size: int) -> Proposal:
    """Return the proposal with its law padded to `vocab_size` tokens, since its proposer may know fewer."""
    law = np.pad(proposal.law, (0, vocab_size - len(proposal.law)))
    return proposal._replace(law=law)
