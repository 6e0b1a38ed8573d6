"""A draft from several sources, networks and a suffix automaton, which grows a tree best first, anywhere.

It knows nothing about how a source guesses. The sources' guesses after a node are mixed into one list of children; the
best entries of all live lists form the tree. A source gives tokens and their probabilities; it may omit the least
likely ones. The weights of the sources and the sharpness of the mixture are learned online.
"""
from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from operator import itemgetter, mul
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import torch

from config.trees import Growth
from model.drafts.draft import Draft, Guesses, Steps, WorthDrafting, all_of
from model.drafts.network import Network
from model.drafts.suffix import NOTHING, SUFFIX, Match, Suffix
from model.sample import Sampler
from model.tree import Guess, TokenTree

FORESIGHT_TOKENS = 16  # over which foresight is averaged
RECOVERY_TOKENS = 64  # without predictions, over which foresight returns to 1
EULER = 0.5772  # the mean of Gumbel noise
MAX_UNREQUESTED = 64  # guesses to which a level adds children without reading them
DEPTH_FACTOR, RANK_FACTOR = 0.95, 0.8  # of the levels below an outcome, per unit of depth and of rank
LEAST_COPY = 0.01  # probability from the tip of a copy that is added; likelier guesses leave before it
SURE_COPY = 0.2  # of one that is worth a row while guessing rests, and is counted beside a level of networks
SURE_COPY_ALONE = 0.5  # of one that is worth a row while guessing rests, where no network guesses
# The expected tokens that a level of networks must add beside copies: about the time of a level as a share of a round
# of plain decoding (.05 to .1 of the bundled profiles, more on one machine).
LEVEL_PRICE = 0.1
SourceGuesses = Mapping[str, Guesses]  # by source
Bucket = Tuple[Tuple[str, ...], int]  # the sources with guesses, and the class of the match's length
WEIGHTS = (.03, .15, .25, .35, .4, .5, .6, .8)  # initial weights of a suffix next to others, by length of the match
# The initial probabilities that a match goes on, by its length, where no network guesses: measured along answers of the
# toy and of SmolLM2. Beside networks copies begin with their weights, as those guess well where copies fail. By trial.
CONFIDENCE = (.3, .5, .6, .65, .7, .75, .75, .8)
WINDOW = 256  # settled tokens; an observation that is as old counts 1 / e
DECAY = 1 - 1 / WINDOW  # weight of older observations at each new one
PRIOR_TOKENS = 16  # settled tokens for which initial weights, and the confidence in copies, count permanently
PRIOR_SHARPNESS = 1.3  # measured: 1.2 of SmolLM2's head, 1.4 of the bundled model's heads and its small model
PRIOR_PRECISION = 8.0  # of this prior
MAX_STEP = 0.25  # by which one token changes a sharpness, since the curvature is only locally valid
MIN_SHARPNESS = 0.1  # so that the order of guesses is kept
MIN_PROBABILITY = 1e-6  # smaller ones are moved to this


@dataclass
class Prediction:
    """The guesses of the token after one node."""

    match: Match  # of the suffix automaton, up to this node
    by_source: dict[str, Guesses]
    outcomes: Outcomes  # by all sources
    children: Guesses  # the likeliest outcomes, the likeliest first: tokens and log-probabilities
    copies: Guesses  # of the suffix automaton, with probabilities by the length of the match and past misses


class Outcomes(NamedTuple):
    """The tokens that sources guess after a node, and after them any other token as one outcome."""

    tokens: Sequence[int]  # without the last outcome
    logprobs: Sequence[float]  # mixed from the sources
    noise: Sequence[float]  # which the target adds to its log-probabilities; zeros at temperature 0

    def probabilities(self, sharpness: float) -> list[float]:
        """Return their probabilities if the target's log-probabilities are `sharpness` times as large."""
        scores = [sharpness * logprob + noise for logprob, noise in zip(self.logprobs, self.noise)]
        best_score = max(scores)
        weights = [math.exp(score - best_score) for score in scores]
        total = sum(weights)
        return [weight / total for weight in weights]


NO_OUTCOMES = Outcomes((), (), ())


class Mixture(Draft):
    """The sum of some networks and, if there is one, a suffix automaton."""

    def __init__(self, networks: Sequence[Network], suffix: Suffix | None = None) -> None:
        self.parts: Sequence[Network] = networks
        self._suffix = suffix
        self._tree: TokenTree | None = None  # of the request, once there was a growth
        self._blend = Blend(WEIGHTS if networks else CONFIDENCE)  # which keeps learning from one request to the next
        self.inner = any(network.inner for network in networks)
        is_one_network_by_level = len(networks) == 1 and networks[0].by_level
        self._mixes = suffix is not None or not is_one_network_by_level
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
        self._num_learned = 0  # nodes of the trunk that were learned from
        self._tip = -1
        self._num_levels = 0  # since the tip moved
        self._foresight = 1.0  # the share of recent tokens that were among the guesses for their positions
        self._sampler = Sampler()

        if self._suffix:
            if self._tree is not None:
                self._suffix.settle(self._tree)
            self._suffix.reset()
        self._tree = None

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = all_of) -> Steps[bool]:
        """Grow level by level for a shape, or one network that does so unless `growth.anywhere`; else best first."""
        if growth.shape or not (growth.anywhere or self._mixes):
            return (yield from self._grow_by_level(tree, growth))
        return (yield from self._grow_best_first(tree, growth, worth_drafting))

    def _grow_by_level(self, tree: TokenTree, growth: Growth) -> Steps[bool]:
        """Add a level to each network's own tree; the trees are merged into one (SpecInfer, section 3)."""
        has_grown = False
        for network in self.parts:
            has_grown |= yield from network.grow(tree, growth)
        return has_grown

    def _grow_best_first(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting) -> Steps[bool]:
        """Read the likeliest nodes anywhere, if their level is worth its time, and offer the guesses."""
        has_moved = self._move(tree)
        if growth.nodes < 1 or tree.room < 1 or self._num_levels > growth.depth:
            return False
        if has_moved:  # there is room again for guesses that were not among the best before
            self._offer(tree, list(self._predictions), growth, only_better=True)

        # copies, which take no time
        horizon = tree.horizon
        addable_tokens = self._follow_copies(tree, tree.tip, growth, LEAST_COPY)
        has_copied = tree.horizon > horizon

        # a level, of the suffix alone where networks cannot read the tip yet, or would add too little
        predicted_nodes: list[int] = []
        if addable_tokens >= LEVEL_PRICE:
            nodes = self._choose(tree, growth, self.parts)
            if nodes:
                nodes = nodes[:worth_drafting(self._expected_tokens(tree, nodes))]
            if nodes:
                predicted_nodes = yield from self._expand(tree, nodes, growth.width, self.parts)
        if not predicted_nodes and self._suffix:
            nodes = self._choose(tree, growth, ())
            predicted_nodes = yield from self._expand(tree, nodes, growth.width, ())
        if not predicted_nodes:
            return has_copied
        self._num_levels += 1
        self._offer(tree, predicted_nodes, growth)

        # what needs no reading
        self._offer_unrequested(tree, growth)
        for node in predicted_nodes:
            if node in tree.nodes:
                self._follow_copies(tree, node, growth)
        return True

    def offer_sure(self, tree: TokenTree, growth: Growth) -> bool:
        """Offer the copies after the tip that are worth a row."""
        self._move(tree)
        self._follow_copies(tree, tree.tip, growth, SURE_COPY if self.parts else SURE_COPY_ALONE)
        return bool(tree.unsent_guesses)

    # --- the text continues -------------------------------------------------------------------------------------------

    def _move(self, tree: TokenTree) -> bool:
        """Learn from settled tokens, and forget dead nodes; return False if the tip is the same."""
        self._tree = tree
        if tree.tip == self._tip:
            return False
        self._tip, self._num_levels = tree.tip, 0

        self._learn(tree)
        if self._suffix:
            self._suffix.settle(tree, self._blend.learn_copies)

        was_guessed = bool(tree.nodes[tree.tip].proposals)
        for network in self.parts:
            if was_guessed:
                network.settle(tree)
            else:
                network.restart()

        for node in self._predictions.keys() - tree.live - {tree.tip}:
            del self._predictions[node]
        return True

    def _learn(self, tree: TokenTree) -> None:
        """Compare newly settled tokens with the guesses for their positions."""
        for node in tree.trunk[self._num_learned:]:
            settled_token = tree.nodes[node].token
            prediction = self._predictions.get(tree.nodes[node].parent)
            if prediction is None:
                self._foresight += (1 - self._foresight) / RECOVERY_TOKENS
                continue

            was_guessed = any(token == settled_token for token, _ in prediction.children)
            self._foresight += (was_guessed - self._foresight) / FORESIGHT_TOKENS
            self._blend.learn(prediction.by_source, prediction.match.length, settled_token)
            if not _are_copies(prediction.by_source):
                self._blend.sharpness.learn(prediction.outcomes, settled_token)
        self._num_learned = len(tree.trunk)

    # --- a level ------------------------------------------------------------------------------------------------------

    def _choose(self, tree: TokenTree, growth: Growth, networks: Sequence[Network]) -> list[int]:
        """Return the likeliest nodes that these networks or the suffix want to read: the tip, and guesses below it."""
        unread_nodes = set().union(*(tree.live.difference(network.read_nodes) for network in networks))
        if not networks:
            unread_nodes = tree.live.difference(self._predictions)
        if growth.outcome_levels:
            left_below = levels_left(tree, growth.outcome_levels)
            unread_nodes = {node for node in unread_nodes if left_below.get(node, 1) > 0}

        nodes, min_score = tree.nodes, tree.nodes[tree.tip].score + growth.least_score
        best_first = [(-score, node) for node in unread_nodes if (score := nodes[node].score) >= min_score]
        heapq.heapify(best_first)

        chosen_nodes = [tree.tip] if self._is_wanted(tree, tree.tip, networks) else []
        num_chosen = len(chosen_nodes) + growth.width
        while best_first and len(chosen_nodes) < num_chosen:
            _, node = heapq.heappop(best_first)
            if self._is_wanted(tree, node, networks):
                chosen_nodes.append(node)
        return chosen_nodes

    def _expected_tokens(self, tree: TokenTree, nodes: Sequence[int]) -> list[float]:
        """Return the expected number of additional correct guesses for each of these nodes that is read."""
        tip_score = tree.nodes[tree.tip].score
        path_scores = [tree.nodes[node].score for node in nodes]
        return [self._foresight * math.exp(score - tip_score) for score in path_scores]

    def _is_wanted(self, tree: TokenTree, node: int, networks: Sequence[Network]) -> bool:
        """Return whether a source can guess after this node and has not, with a position left for the guess."""
        if tree.nodes[node].pos + 1 >= tree.max_tokens:
            return False
        is_read_by_suffix = self._suffix is not None and (node == tree.tip or not networks)
        if is_read_by_suffix and node not in self._predictions:
            return True
        return any(network.wants(tree, node) for network in networks)

    def _expand(self, tree: TokenTree, nodes: list[int], width: int,
                networks: Sequence[Network]) -> Steps[list[int]]:
        """Let the suffix and these networks read the nodes that they want; return the nodes with new guesses."""
        new_guesses: dict[int, dict[str, Guesses]] = {}  # by node and source
        for network in networks:
            wanted_nodes = [node for node in nodes if network.wants(tree, node)]
            if not wanted_nodes:
                continue
            expansion = yield from network.expand(tree, wanted_nodes, width)
            for node, guesses in zip(wanted_nodes, expansion or ()):
                new_guesses.setdefault(node, {})[network.source] = guesses

        fresh_nodes = [node for node in nodes if node in new_guesses or node not in self._predictions]
        return [node for node in fresh_nodes if self._predict(tree, node, new_guesses.get(node, {}), width)]

    def _predict(self, tree: TokenTree, node: int, new_guesses: SourceGuesses, width: int) -> bool:
        """Mix new guesses after a node with earlier ones; return False if there are none at all."""
        prediction = self._predictions.get(node) or self._prediction_by_suffix(tree, node, width)
        prediction.by_source.update(new_guesses)
        if not prediction.by_source:
            return False
        if _are_copies(prediction.by_source):
            mixed, sharpness = prediction.copies, 1.0
        else:
            mixed = self._blend.mix(prediction.by_source, prediction.match.length)
            sharpness = self._blend.sharpness.value

        prediction.outcomes = self._outcomes(mixed, tree.nodes[node].pos + 1)
        logprobs = map(_log, prediction.outcomes.probabilities(sharpness))
        likeliest_first = sorted(zip(prediction.outcomes.tokens, logprobs), key=itemgetter(1), reverse=True)
        prediction.children = likeliest_first[:width]
        self._predictions[node] = prediction
        return True

    def _prediction_by_suffix(self, tree: TokenTree, node: int, width: int) -> Prediction:
        """Return the prediction of the suffix automaton alone, if there is one, with the tokens that are allowed."""
        prediction = Prediction(self._match(tree, node), {}, NO_OUTCOMES, [], [])
        if self._suffix is None:
            return prediction

        guesses = self._suffix.automaton.continuations(prediction.match, width)
        if tree.law is not None:
            guesses = [guess for guess in guesses if tree.law.allows(tree, node, guess[0])]
        if guesses:
            prediction.by_source[SUFFIX] = guesses
            prediction.copies = self._blend.copies(guesses, prediction.match.length)
        return prediction

    def _match(self, tree: TokenTree, node: int) -> Match:
        """Return the match of a node, starting from the nearest ancestor with a known match."""
        if self._suffix is None:
            return NOTHING

        path_tokens = []  # from the node up
        while node != tree.tip and node not in self._predictions:
            path_tokens.append(tree.nodes[node].token)
            node = tree.nodes[node].parent

        automaton = self._suffix.automaton
        match = self._predictions[node].match if node in self._predictions else automaton.tip
        for token in reversed(path_tokens):
            match = automaton.step(match, token)
        return match

    def _outcomes(self, mixed: Guesses, position: int) -> Outcomes:
        """Return the outcomes at a position, with its noise (docs/design.md); that of other tokens is the mean."""
        tokens = [token for token, _ in mixed]
        probabilities = [probability for _, probability in mixed]
        logprobs = list(map(_log, [*probabilities, 1 - sum(probabilities)]))
        if not (mixed and self._sampler.temperature and self._sampler.matches):
            return Outcomes(tokens, logprobs, [0.0] * len(logprobs))

        [noise_W] = self._sampler.noise([position], torch.tensor(tokens)).tolist()
        return Outcomes(tokens, logprobs, [*noise_W, EULER])

    # --- into the tree ------------------------------------------------------------------------------------------------

    def _offer(self, tree: TokenTree, nodes: Sequence[int], growth: Growth, only_better: bool = False) -> None:
        """Add the children of these nodes that are among the best guesses; `only_better` than those of the tree."""
        min_score = tree.nodes[tree.tip].score + growth.least_score
        parents = [node for node in nodes if node in tree.nodes]
        guesses = [guess for parent in parents for guess in self._children(tree, parent, min_score, only_better)]
        guesses.sort(key=itemgetter(2), reverse=True)

        new_nodes = tree.offer(guesses, growth.nodes, min_score)
        for node, (parent, token, score) in zip(new_nodes, guesses):
            by_source = self._predictions[parent].by_source
            sources: Iterable[str] = by_source
            if len(by_source) > 1:
                sources = [source for source, pairs in by_source.items() if any(guess == token for guess, _ in pairs)]
            tree.nodes[node].proposals = dict.fromkeys(sources, score)

    def _offer_unrequested(self, tree: TokenTree, growth: Growth) -> None:
        """Offer guesses that networks made unrequested, likeliest first (with blocks: DDTree, arXiv 2604.12989)."""
        networks = [network for network in self.parts if network.guesses_ahead]
        if not networks:
            return

        heap = [(-tree.nodes[node].score, node) for node in tree.live]
        heapq.heapify(heap)
        num_expanded = 0
        while heap and num_expanded < MAX_UNREQUESTED:
            _, node = heapq.heappop(heap)
            if node not in tree.nodes or tree.nodes[node].pos + 1 >= tree.max_tokens:
                continue

            new_guesses = {}
            for network in networks:
                guesses = network.unrequested(tree, node, growth.width)
                if guesses is not None:
                    new_guesses[network.source] = guesses

            if new_guesses and self._predict(tree, node, new_guesses, growth.width):
                num_expanded += 1
                self._offer(tree, [node], growth)
                for child in tree.nodes[node].children.values():
                    heapq.heappush(heap, (-tree.nodes[child].score, child))

    def _follow_copies(self, tree: TokenTree, node: int, growth: Growth,
                       min_probability: float = SURE_COPY) -> float:
        """Add the copies after a node of at least this probability; return the most that a level could add beside them.

        That is in tokens, of networks that read all sure copies, and the guess after them, one in each level. Wherever
        these fail or end, the networks have one more guess, but for copies that are right up to the text's limit.
        """
        path_probability, num_sure = 1.0, 0
        has_guess_after = 1.0  # probability
        while tree.nodes[node].pos + 1 < tree.max_tokens:
            prediction = self._predictions.get(node) or self._prediction_by_suffix(tree, node, growth.width)
            if not prediction.copies:
                break
            copied_token, probability = prediction.copies[0]
            path_probability *= probability
            if path_probability < min_probability:
                break

            if tree.child(node, copied_token) is None:
                self._predictions[node] = prediction
                self._predict(tree, node, {}, growth.width)
                self._offer(tree, [node], growth)

            child = tree.child(node, copied_token)
            if child is None:
                break
            node = child
            num_sure += path_probability >= SURE_COPY
        else:
            has_guess_after -= path_probability
        return has_guess_after / (num_sure + 1)

    def _children(self, tree: TokenTree, node: int, min_score: float, only_better: bool) -> Iterator[Guess]:
        """Yield the guesses after a node whose paths have at least this score, and a better one than in the tree."""
        tree_node = tree.nodes[node]
        for token, logprob in self._predictions[node].children:
            score = tree_node.score + logprob
            if score >= min_score:
                child = tree_node.children.get(token) if only_better else None
                if child is None or tree.nodes[child].score < score:
                    yield node, token, score


# --- the levels to prepare for each possible outcome of a segment under way -------------------------------------------

def levels_left(tree: TokenTree, levels: int) -> dict[int, int]:
    """Return the number of levels that may still be drafted below each unsent guess (SSD, arXiv 2603.03251,
    section 4.1).

    An outcome is a node at which the target leaves the sent guesses, and the token with which it does: an unsent guess
    below the tip or a sent guess. The likeliest outcome at the tip gets `levels`. This number falls geometrically with
    the depth of the node, as the number of outcomes does in the paper (theorem 12), and with the rank of the token
    among the unsent ones there.
    """
    left_below: dict[int, int] = {}  # by node
    tip_position = tree.nodes[tree.tip].pos
    for parent in sorted(tree.live.union([tree.tip])):  # parents are older
        children = tree.nodes[parent].children.values()
        unsent_children = [node for node in children if node in tree.unsent_guesses]

        if parent in left_below:  # below an outcome
            for node in unsent_children:
                left_below[node] = left_below[parent] - 1
            continue

        unsent_children.sort(key=lambda node: (-tree.nodes[node].score, node))
        depth = tree.nodes[parent].pos - tip_position
        num_levels = levels * DEPTH_FACTOR ** depth
        for node in unsent_children:
            left_below[node] = round(num_levels)
            num_levels *= RANK_FACTOR
    return left_below


# --- the weights of sources -------------------------------------------------------------------------------------------

class Blend:
    """The mixed distribution p = sum of w_s p_s of several sources, and its sharpness.

    The weights w depend on the set of sources with guesses and, if a suffix is among them, on the length of its match.
    Each settled token is a step of online expectation maximisation (Cappe and Moulines, 2009): its responsibilities r_s
    = w_s p_s / sum of w_t p_t are added to decaying sums, and w_s is proportional to the sum of r_s plus the initial
    weight times PRIOR_TOKENS. Converged weights equal the mean of their responsibilities, so they are a fixed point of
    expectation maximisation. The log-likelihood is concave in the weights, so this is its maximum, with a Dirichlet
    prior. As the sums decay, the weights vary around it, less with a longer window. The prior does not decay, so a
    source that was always wrong keeps a small weight, from which it can recover.

    The mixture is sharpened, not each source: a mixture of calibrated sources is correct more often than it claims
    (Ranjan and Gneiting, 2010), and the weights of sources with a changing sharpness would not converge.
    """

    def __init__(self, confidences: Sequence[float] = WEIGHTS) -> None:
        self._confidences = confidences  # in copies, by the length of their match
        self.reset_learning()

    def reset_learning(self) -> None:
        """Return to the initial weights, sharpness and confidence."""
        self._responsibilities: dict[Bucket, dict[str, float]] = {}  # sums by source
        self.sharpness = Sharpness()
        self._misses: dict[int, tuple[float, float]] = {}  # of copies, by class of length: expected ones, and others
        self._weights: dict[Bucket, dict[str, float]] = {}  # since the last change of the bucket's responsibilities

    def weights(self, sources: Sequence[str], length: int) -> dict[str, float]:
        """Return the weight of each of these sources, with a match of `length` tokens if a suffix is among them."""
        initial_weights = starting_weights(sources, length)
        length_class = _length_class(length) if SUFFIX in sources else 0
        sums = self._responsibilities.get((tuple(sorted(sources)), length_class), {})

        total = PRIOR_TOKENS + sum(sums.values())
        weights = {}
        for source, weight in initial_weights.items():
            weights[source] = (PRIOR_TOKENS * weight + sums.get(source, 0.0)) / total
        return weights

    def mix(self, guesses: SourceGuesses, length: int) -> list[tuple[int, float]]:
        """Return the mixed tokens, likeliest first; `length` is that of a suffix's match."""
        mixed = self._mixed(guesses, _bucket(guesses, length))
        return sorted(mixed.items(), key=lambda guess: (-guess[1], guess[0]))

    def learn(self, guesses: SourceGuesses, length: int, token: int) -> None:
        """Learn from the settled token after these guesses; a token that no source guessed changes no weight."""
        bucket = _bucket(guesses, length)
        sources, _ = bucket
        shares = {source: weight * dict(guesses[source]).get(token, 0.0)
                  for source, weight in self.weights(sources, length).items()}
        total = sum(shares.values())
        if total > 0:
            sums = self._responsibilities.setdefault(bucket, dict.fromkeys(shares, 0.0))
            for source, share in shares.items():
                sums[source] = DECAY * sums[source] + share / total
            self._weights.pop(bucket, None)

    def copies(self, guesses: Guesses, length: int) -> Guesses:
        """Return a suffix's guesses with the probabilities of text that is copied, or only seems to be.

        A match of `length` tokens fails with 1 - `confidence`, times the misses of all matches as long in the
        texts so far over those expected, whatever other sources were read.
        """
        miss_probability = self._initial_miss(length)
        prior_misses = PRIOR_TOKENS * miss_probability
        expected_misses, misses = self._misses.get(_length_class(length), (0.0, 0.0))
        miss_probability *= (misses + prior_misses) / (expected_misses + prior_misses)

        total = sum(probability for _, probability in guesses)
        return [(token, max(0.0, 1 - miss_probability) * probability / total) for token, probability in guesses]

    def learn_copies(self, guesses: Guesses, length: int, token: int) -> None:
        """Learn from the token of the text after a suffix's guesses."""
        expected_misses, misses = self._misses.get(_length_class(length), (0.0, 0.0))
        was_missed = all(guess != token for guess, _ in guesses)
        self._misses[_length_class(length)] = (
            DECAY * expected_misses + self._initial_miss(length), DECAY * misses + was_missed)

    def _initial_miss(self, length: int) -> float:
        """Return the initial probability that a match of `length` tokens fails."""
        return 1 - confidence(length, self._confidences)

    def _mixed(self, guesses: SourceGuesses, bucket: Bucket) -> dict[int, float]:
        """Return the weighted sum of the sources' probabilities, by token."""
        if bucket not in self._weights:
            sources, length_class = bucket
            self._weights[bucket] = self.weights(sources, length_class + 1)

        mixed: dict[int, float] = {}
        for source, weight in self._weights[bucket].items():
            for token, probability in guesses[source]:
                mixed[token] = mixed.get(token, 0.0) + weight * probability
        return mixed


class Sharpness:
    """The factor of claimed log-probabilities with which the settled tokens are likeliest (temperature scaling).

    A draft claims the mean of what its target may say, which is less sharp than what the target says each time. The
    factor is fitted by online Newton steps over a decaying window, from a prior that does not fade.
    """

    def __init__(self) -> None:
        self.value = PRIOR_SHARPNESS
        self._curvature = PRIOR_PRECISION  # second derivative of the negative log-likelihood, prior included

    def learn(self, outcomes: Outcomes, token: int) -> None:
        """Learn that `token` was the correct one, whether among these outcomes or not."""
        index = outcomes.tokens.index(token) if token in outcomes.tokens else -1
        probabilities = outcomes.probabilities(self.value)
        mean = sum(map(mul, probabilities, outcomes.logprobs))
        variance = sum(map(mul, probabilities, ((logprob - mean) ** 2 for logprob in outcomes.logprobs)))

        prior_share = (1 - DECAY) * PRIOR_PRECISION
        self._curvature = DECAY * self._curvature + prior_share + variance
        gradient = outcomes.logprobs[index] - mean + prior_share * (PRIOR_SHARPNESS - self.value)
        change = min(max(gradient / self._curvature, -MAX_STEP), MAX_STEP)
        self.value = max(self.value + change, MIN_SHARPNESS)


def starting_weights(sources: Sequence[str], length: int) -> dict[str, float]:
    """Return the initial weights: a suffix has its share of WEIGHTS, and all others have equal parts of the rest."""
    num_others = len(sources) - (SUFFIX in sources)
    if not num_others:
        return dict.fromkeys(sources, 1.0)

    suffix_weight = WEIGHTS[_length_class(length)] if SUFFIX in sources else 0.0
    other_weight = (1 - suffix_weight) / num_others
    return {source: suffix_weight if source == SUFFIX else other_weight for source in sources}


def confidence(length: int, by_length: Sequence[float] = WEIGHTS) -> float:
    """Return the initial probability that a match of `length` tokens goes on; a longer one has at least n / (n + 2)."""
    listed_probability = by_length[_length_class(length)]
    if length < len(by_length):
        return listed_probability
    return max(listed_probability, length / (length + 2))


def _are_copies(guesses: SourceGuesses) -> bool:
    """Return whether no network has guessed."""
    return guesses.keys() == {SUFFIX}


def _length_class(length: int) -> int:
    """Return the index in WEIGHTS of a match's length."""
    return min(max(length, 1), len(WEIGHTS)) - 1


def _bucket(guesses: SourceGuesses, length: int) -> Bucket:
    """Return the sources with guesses, sorted, and the class of the match's length if a suffix is among them."""
    sources = tuple(source for source in sorted(guesses) if guesses[source])
    return sources, _length_class(length) if SUFFIX in sources else 0


def _log(probability: float) -> float:
    return math.log(max(probability, MIN_PROBABILITY))
