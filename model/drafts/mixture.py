"""A draft from several sources, networks and a suffix automaton, which grows a tree best first, anywhere.

It knows nothing about how a source guesses. The sources' guesses after a node are mixed into one list of children; the
best entries of all live lists form the tree. A source gives tokens and their probabilities; it may omit the least
likely ones, which count as 0. The weights of the sources and the calibration of the mixture are learned online.
"""
from __future__ import annotations

import heapq
import math
from bisect import bisect
from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence, Tuple

import torch

from config.trees import Growth
from model.drafts.draft import Draft, Guesses, Steps, WorthDrafting, always
from model.drafts.network import Network
from model.drafts.suffix import NOTHING, SUFFIX, Match, Suffix
from model.sample import Sampler
from model.tree import Guess, TokenTree

OFTEN, SELDOM = 16, 64  # tokens over which foresight is averaged; over which it returns to 1 without predictions
EULER = 0.5772  # the mean of Gumbel noise
HEARD = 64  # guesses, at most, to which a level adds children without reading them
BY_DEPTH, BY_RANK = 0.95, 0.8  # factors of the levels below an outcome, per unit of depth and of rank
LONG, RUN = 8, 16  # tokens of a match from which on its continuation is added at once; most tokens added
Given = Mapping[str, Guesses]  # by source
Bucket = Tuple[Tuple[str, ...], int]  # the sources with guesses, and the class of the match's length
WEIGHTS = (.03, .15, .25, .35, .4, .5, .6, .8)  # initial weights of a suffix next to others, by length of the match
DEPTHS = (1, 4, 10)  # first depths of ranges that are calibrated separately
WINDOW = 256  # settled tokens; an observation that is as old counts 1 / e
KEEP = 1 - 1 / WINDOW  # weight of older observations at each new one
PRIOR = 16  # settled tokens for which the initial weights count, permanently
TRUST = 4.0  # the precision of the prior by which probabilities are already calibrated
STRIDE = 0.25  # the most by which one guess changes a slope or a shift, since the curvature is only locally valid
LEAST = 0.1  # the least slope, so that the order of guesses is kept
SURE = 1e-6  # probabilities nearer to 0 or 1 are moved to this distance


@dataclass
class Prediction:
    """The guesses of the token after one node."""

    depth: int  # the number of guesses from the tip to the node
    match: Match  # of the suffix automaton, up to this node
    given: dict[str, Guesses]  # by source
    children: Guesses  # mixed from all sources, the likeliest first


class Mixture(Draft):
    """The sum of some networks and, if there is one, a suffix automaton."""

    def __init__(self, networks: Sequence[Network], suffix: Suffix | None = None) -> None:
        self.parts: Sequence[Network] = networks
        self._suffix = suffix
        self._tree: TokenTree | None = None  # of the request, once there was a growth
        self._blend = Blend()  # which keeps learning from one request to the next
        self.inner = any(network.inner for network in networks)
        self._mixes = suffix is not None or [network.by_level for network in networks] != [True]
        self._blind = {SUFFIX, *(network.source for network in networks if network.blind)}
        self.reset()

    def another(self) -> Mixture:
        """Return a twin for another request, which shares the learned weights."""
        suffix = self._suffix.another() if self._suffix else None
        twin = Mixture([network.another() for network in self.parts], suffix)
        twin._blend = self._blend
        return twin

    def reset_learning(self) -> None:
        self._blend.reset_learning()

    def begin(self, sampler: Sampler) -> None:
        self._sampler = sampler
        super().begin(sampler)

    def forget(self) -> None:
        self._predictions: dict[int, Prediction] = {}
        self._settled = 0  # nodes of the trunk that were learned from
        self._tip = -1
        self._levels = 0  # since the tip moved
        self._foresight = 1.0  # the share of recent tokens that were among the guesses for their positions
        self._sampler = Sampler()
        if self._suffix:
            if self._tree is not None:
                self._suffix.settle(self._tree)
            self._suffix.reset()
        self._tree = None

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = always) -> Steps[bool]:
        """Grow best first over all sources, or level by level for a shape or a single network."""
        if growth.shape or not (growth.anywhere or self._mixes):
            return (yield from self._grow_by_level(tree, growth))
        return (yield from self._grow_best_first(tree, growth, worth_drafting))

    def _grow_by_level(self, tree: TokenTree, growth: Growth) -> Steps[bool]:
        """Add a level to each network's own tree; the trees are merged into one (SpecInfer, section 3)."""
        grown = False
        for network in self.parts:
            grown |= yield from network.grow(tree, growth)
        return grown

    def _grow_best_first(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting) -> Steps[bool]:
        """Read the likeliest nodes anywhere, if their level is worth its time, and offer the guesses."""
        moved = self._move(tree)
        if growth.nodes < 1 or tree.room < 1 or self._levels > growth.depth:
            return False
        if moved:  # there is room again for guesses that were not among the best before
            self._offer(tree, list(self._predictions), growth)
        nodes = self._choose(tree, growth)
        if nodes and not worth_drafting(self._expected_tokens(tree, nodes)):
            return False
        read = yield from self._expand(tree, nodes, growth.width)
        if not read:
            return False
        self._levels += 1
        self._offer(tree, read, growth)
        self._offer_unrequested(tree, growth)
        for node in read:
            self._follow_match(tree, node, growth)
        return True

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        """Offer the tokens that followed a long match of the text."""
        self._move(tree)
        self._predict(tree, tree.tip, {}, growth.width)
        prediction = self._predictions.get(tree.tip)
        if prediction is None or prediction.match.length < LONG:
            return False
        self._offer(tree, [tree.tip], growth)
        self._follow_match(tree, tree.tip, growth)
        return bool(tree.unsent_guesses)

    # --- the text continues -------------------------------------------------------------------------------------------

    def _move(self, tree: TokenTree) -> bool:
        """Learn from settled tokens, and forget dead nodes; return False if the tip is the same."""
        self._tree = tree
        if tree.tip == self._tip:
            return False
        self._tip, self._levels = tree.tip, 0
        self._learn(tree)
        if self._suffix:
            self._suffix.settle(tree)
        guessed = bool(tree.nodes[tree.tip].proposals)
        for network in self.parts:
            if guessed:
                network.settle(tree)
            else:
                network.restart()
        for node in self._predictions.keys() - tree.live - {tree.tip}:
            del self._predictions[node]
        return True

    def _learn(self, tree: TokenTree) -> None:
        """Compare newly settled tokens with the guesses for their positions."""
        for node in tree.trunk[self._settled:]:
            prediction = self._predictions.get(tree.nodes[node].parent)
            settled = tree.nodes[node].token
            foreseen = prediction is None or any(token == settled for token, _ in prediction.children)
            self._foresight += (foreseen - self._foresight) / (SELDOM if prediction is None else OFTEN)
            if prediction is not None:
                self._blend.learn(prediction.given, prediction.match.length, settled, prediction.depth)
        self._settled = len(tree.trunk)

    # --- a level ------------------------------------------------------------------------------------------------------

    def _choose(self, tree: TokenTree, growth: Growth) -> list[int]:
        """Return the likeliest nodes that a source wants to read: the tip, and guesses below it."""
        left = levels_left(tree, growth.outcome_levels) if growth.outcome_levels else {}
        least = tree.nodes[tree.tip].score + growth.least_score
        useful = (node for node in tree.live if left.get(node, 1) > 0)
        scores = {node: tree.nodes[node].score for node in useful}
        worthy = (node for node in scores if scores[node] >= least and self._wanted(tree, node))
        best = heapq.nsmallest(growth.width, worthy, key=lambda node: (-scores[node], node))
        return [tree.tip, *best] if self._wanted(tree, tree.tip) else best

    def _expected_tokens(self, tree: TokenTree, nodes: Sequence[int]) -> float:
        """Return the expected number of additional correct guesses if these nodes are read."""
        tip = tree.nodes[tree.tip].score
        scores = [tree.nodes[node].score for node in nodes]
        return self._foresight * sum(math.exp(score - tip) for score in scores)

    def _wanted(self, tree: TokenTree, node: int) -> bool:
        if tree.nodes[node].pos + 1 >= tree.max_tokens:
            return False
        copied = self._suffix is not None and (node == tree.tip or not self.parts)
        return copied and node not in self._predictions or any(network.wants(tree, node) for network in self.parts)

    def _expand(self, tree: TokenTree, nodes: list[int], width: int) -> Steps[list[int]]:
        """Let every source read the nodes that it wants; return the nodes with new guesses."""
        said: dict[int, dict[str, Guesses]] = {}
        for network in self.parts:
            wanted = [node for node in nodes if network.wants(tree, node)]
            guesses = (yield from network.expand(tree, wanted, width)) if wanted else None
            for node, guessed in zip(wanted, guesses or ()):
                said.setdefault(node, {})[network.source] = guessed
        fresh = [node for node in nodes if node in said or node not in self._predictions]
        return [node for node in fresh if self._predict(tree, node, said.get(node, {}), width)]

    def _predict(self, tree: TokenTree, node: int, said: dict[str, Guesses], width: int) -> bool:
        """Mix new guesses after a node with earlier ones; return False if there are none at all."""
        prediction = self._predictions.get(node)
        if prediction is None:
            depth = tree.nodes[node].pos - tree.nodes[tree.tip].pos
            prediction = Prediction(depth, self._match(tree, node), {}, [])
            copied = self._suffix.automaton.continuations(prediction.match, width) if self._suffix else []
            copied = [pair for pair in copied if tree.law is None or tree.law.allows(tree, node, pair[0])]
            if copied:
                prediction.given[SUFFIX] = copied
        prediction.given.update(said)
        if not prediction.given:
            return False
        mixed = self._blend.mix(prediction.given, prediction.match.length, prediction.depth)
        alone = prediction.given.keys() <= self._blind  # other networks already include the noise of all tokens
        rest = 1 - sum(chance for _, chance in mixed) if alone else 0.0
        position = tree.nodes[node].pos + 1
        prediction.children = self._with_noise(mixed, rest, position)[:width]
        self._predictions[node] = prediction
        return True

    def _match(self, tree: TokenTree, node: int) -> Match:
        """Return the match of a node, starting from the nearest ancestor with a known match."""
        if self._suffix is None:
            return NOTHING
        way = []
        while node != tree.tip and node not in self._predictions:
            way.append(tree.nodes[node].token)
            node = tree.nodes[node].parent
        automaton = self._suffix.automaton
        match = self._predictions[node].match if node in self._predictions else automaton.tip
        for token in reversed(way):
            match = automaton.step(match, token)
        return match

    def _with_noise(self, mixed: Guesses, rest: float, position: int) -> Guesses:
        """Return probabilities given a position's noise (docs/design.md); `rest` is that of all other tokens."""
        if not self._sampler.temperature or not mixed:
            return mixed
        tokens = torch.tensor([token for token, _ in mixed])
        chance = torch.tensor([probability for _, probability in mixed], dtype=torch.float64)
        noise_TV = self._sampler.noise([position], tokens)
        others = chance.new_tensor([max(rest, 0.0)]).log() + EULER
        whole = torch.cat([chance.log() + noise_TV[0], others])
        worth = torch.softmax(whole, -1)[:-1]
        best = worth.sort(stable=True, dim=-1, descending=True).indices
        return list(zip(tokens[best].tolist(), worth[best].tolist()))

    # --- into the tree ------------------------------------------------------------------------------------------------

    def _offer(self, tree: TokenTree, nodes: Sequence[int], growth: Growth) -> None:
        """Add the children of these nodes that are among the best guesses."""
        least = tree.nodes[tree.tip].score + growth.least_score
        known = [node for node in nodes if node in tree.nodes]
        guesses = [guess for node in known for guess in self._children(tree, node, least)]
        guesses.sort(key=lambda guess: -guess[2])
        taken = tree.offer(guesses, growth.nodes, least)
        for node, (parent, token, score) in zip(taken, guesses):
            given = self._predictions[parent].given
            tree.nodes[node].proposals = {source: score for source, said in given.items()
                                    if any(guess == token for guess, _ in said)}

    def _offer_unrequested(self, tree: TokenTree, growth: Growth) -> None:
        """Offer guesses that networks made unrequested, likeliest first (with blocks: DDTree, arXiv 2604.12989)."""
        far = [network for network in self.parts if network.far]
        heap = [(-tree.nodes[node].score, node) for node in tree.live if far]
        heapq.heapify(heap)
        heard = 0
        while heap and heard < HEARD:
            _, node = heapq.heappop(heap)
            if node not in tree.nodes or tree.nodes[node].pos + 1 >= tree.max_tokens:
                continue
            found = {network.source: network.unrequested(tree, node, growth.width) for network in far}
            said = {source: guesses for source, guesses in found.items() if guesses is not None}
            if said and self._predict(tree, node, said, growth.width):
                heard += 1
                self._offer(tree, [node], growth)
                for child in tree.nodes[node].children.values():
                    heapq.heappush(heap, (-tree.nodes[child].score, child))

    def _follow_match(self, tree: TokenTree, node: int, growth: Growth) -> None:
        """Add the continuation of a long match at once, without waiting for a network."""
        for _ in range(RUN):
            prediction = self._predictions[node]
            if prediction.match.length < LONG or SUFFIX not in prediction.given:
                return
            followed, _ = prediction.given[SUFFIX][0]
            child = tree.child(node, followed)
            if child is None or tree.nodes[child].pos + 1 >= tree.max_tokens:
                return
            if child not in self._predictions and self._predict(tree, child, {}, growth.width):
                self._offer(tree, [child], growth)
            if child not in self._predictions:
                return
            node = child

    def _children(self, tree: TokenTree, node: int, least: float) -> Iterator[Guess]:
        above = tree.nodes[node].score
        for token, probability in self._predictions[node].children:
            if probability > 0 and above + math.log(probability) >= least:
                yield node, token, above + math.log(probability)


# --- the levels to prepare for each possible outcome of a segment under way -------------------------------------------

def levels_left(tree: TokenTree, levels: int) -> dict[int, int]:
    """Return the number of levels that may still be drafted below each unsent guess (SSD, arXiv 2603.03251,
    section 4.1).

    An outcome is a node at which the target leaves the sent guesses, and the token with which it does: an unsent guess
    below the tip or a sent guess. The likeliest outcome at the tip gets `levels`. This number falls geometrically with
    the depth of the node, as the number of outcomes does in the paper (theorem 12), and with the rank of the token
    among the unsent ones there.
    """
    left: dict[int, int] = {}
    tip = tree.nodes[tree.tip].pos
    for parent in sorted(tree.live.union([tree.tip])):  # parents are older
        above = tree.nodes[parent]
        unsent = [node for node in above.children.values() if node in tree.unsent_guesses]
        if parent in left:
            left.update((node, left[parent] - 1) for node in unsent)
            continue
        unsent.sort(key=lambda node: (-tree.nodes[node].score, node))
        most = levels * BY_DEPTH ** (above.pos - tip)
        for node in unsent:
            left[node] = round(most)
            most *= BY_RANK
    return left


# --- the weights of sources -------------------------------------------------------------------------------------------

class Blend:
    """The mixed distribution p = sum of w_s p_s of several sources, which is then calibrated.

    The weights w depend on the set of sources with guesses and, if a suffix is among them, on the length of its match.
    Each settled token is a step of online expectation maximisation (Cappe and Moulines, 2009): its responsibilities
    r_s = w_s p_s / sum of w_t p_t are added to decaying sums, and w_s is proportional to the sum of r_s plus PRIOR
    times the initial weight. Converged weights equal the mean of their responsibilities, so they are a fixed point of
    expectation maximisation. The log-likelihood is concave in the weights, so this is its maximum, with a Dirichlet
    prior. As the sums decay, the weights vary around it, less with a longer window. The prior does not decay, so a
    source that was always wrong keeps a small weight, from which it can recover.

    The mixture is calibrated, not each source: a mixture of calibrated sources is correct more often than it claims
    (Ranjan and Gneiting, 2010), and the weights of sources with a changing calibration would not converge. Ranges of
    depth are calibrated separately, since guesses that are based on guesses may drift.
    """

    def __init__(self) -> None:
        self.reset_learning()

    def reset_learning(self) -> None:
        """Return to the initial weights and calibration."""
        self._sums: dict[Bucket, dict[str, float]] = {}  # responsibilities by source
        self._worth: dict[tuple[Bucket, int], PlattScaling] = {}

    def weights(self, sources: Sequence[str], length: int) -> dict[str, float]:
        """Return the weight of each of these sources, with a match of `length` tokens if a suffix is among them."""
        found = starting_weights(sources, length)
        rung = _rung(length) if SUFFIX in sources else 0
        sums = self._sums.get((tuple(sorted(sources)), rung), {})
        total = PRIOR + sum(sums.values())
        learnt = {source: PRIOR * weight + sums.get(source, 0.0) for source, weight in found.items()}
        return {source: weight / total for source, weight in learnt.items()}

    def mix(self, given: Given, length: int, depth: int = 0) -> list[tuple[int, float]]:
        """Return the mixed tokens, likeliest first; `length` is that of a suffix's match, `depth` that of the path."""
        mixed = self._mixed(given, length)
        worth = self._worth.get((_bucket(given, length), bisect(DEPTHS, depth)))
        if worth:
            mixed = {token: worth.of(claimed) for token, claimed in mixed.items()}
        total = max(1.0, sum(mixed.values()))
        shares = ((token, probability / total) for token, probability in mixed.items())
        return sorted(shares, key=lambda guess: (-guess[1], guess[0]))

    def learn(self, given: Given, length: int, token: int, depth: int = 0) -> None:
        """Learn from the settled token after these guesses; a token that no source guessed changes no weight."""
        bucket = _bucket(given, length)
        mixed = self._mixed(given, length)
        worth = self._worth.setdefault((bucket, bisect(DEPTHS, depth)), PlattScaling())
        worth.learn(list(mixed.items()), token)
        shares = {source: weight * dict(given[source]).get(token, 0.0)
                  for source, weight in self.weights(bucket[0], length).items()}
        total = sum(shares.values())
        if total > 0:
            sums = self._sums.setdefault(bucket, dict.fromkeys(shares, 0.0))
            for source, share in shares.items():
                sums[source] = KEEP * sums[source] + share / total

    def _mixed(self, given: Given, length: int) -> dict[int, float]:
        mixed: dict[int, float] = {}
        for source, weight in self.weights(_bucket(given, length)[0], length).items():
            for token, probability in given[source]:
                mixed[token] = mixed.get(token, 0.0) + weight * probability
        return mixed


class PlattScaling:
    """The calibration of claimed probabilities: true log-odds are linear in the claimed ones.

    This is Platt's scaling (1999), which keeps the order of guesses, fitted by online Newton steps over a decaying
    window. It begins as the identity, which also remains its prior.
    """

    def __init__(self) -> None:
        self._slope, self._shift = 1.0, 0.0
        self._aa, self._ab, self._bb = TRUST, 0.0, TRUST  # the curvature of the log-likelihood, prior included

    def of(self, claimed: float) -> float:
        """Return the calibrated probability for a claimed one; 0 stays 0."""
        return _sigmoid(self._slope * _log_odds(claimed) + self._shift) if claimed > 0 else 0.0

    def learn(self, guesses: Guesses, token: int) -> None:
        """Learn that `token` was the correct one, whether among these guesses or not."""
        fading = (1 - KEEP) * TRUST
        self._aa = KEEP * self._aa + fading
        self._ab = KEEP * self._ab
        self._bb = KEEP * self._bb + fading
        self._step(fading * (1 - self._slope), -fading * self._shift)
        for guess, claimed in guesses:
            if claimed > 0:
                odds = _log_odds(claimed)
                worth = self.of(claimed)
                curvature, wrong = worth * (1 - worth), (guess == token) - worth
                self._aa += curvature * odds * odds
                self._ab += curvature * odds
                self._bb += curvature
                self._step(wrong * odds, wrong)

    def _step(self, along: float, across: float) -> None:
        """Apply a Newton step for a gradient: first a bounded step of the slope, then the best shift for it."""
        determinant = self._aa * self._bb - self._ab * self._ab
        slope = _bounded((self._bb * along - self._ab * across) / determinant)
        slope = max(slope, LEAST - self._slope)
        self._slope += slope
        self._shift += _bounded((across - self._ab * slope) / self._bb)


def _bounded(step: float) -> float:
    return min(max(step, -STRIDE), STRIDE)


def starting_weights(sources: Sequence[str], length: int) -> dict[str, float]:
    """Return the initial weights: a suffix has its share of WEIGHTS, and all others have equal parts of the rest."""
    others = len(sources) - (SUFFIX in sources)
    if not others:
        return dict.fromkeys(sources, 1.0)
    share = WEIGHTS[_rung(length)] if SUFFIX in sources else 0.0
    return {source: share if source == SUFFIX else (1 - share) / others for source in sources}


def _rung(length: int) -> int:
    return min(max(length, 1), len(WEIGHTS)) - 1


def _bucket(given: Given, length: int) -> Bucket:
    """Return the sources with guesses, sorted, and the class of the match's length if a suffix is among them."""
    sources = tuple(source for source in sorted(given) if given[source])
    return sources, _rung(length) if SUFFIX in sources else 0


def _log_odds(probability: float) -> float:
    p = min(max(probability, SURE), 1 - SURE)
    return math.log(p / (1 - p))


FAR = _log_odds(1.0)


def _sigmoid(odds: float) -> float:
    return 1 / (1 + math.exp(-min(max(odds, -FAR), FAR)))
