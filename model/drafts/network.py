"""Networks that guess: growth of trees level by level (EAGLE-2, OPT-Tree or a given shape), and their passes.

It knows nothing about pipelines or strategies. The rows that a draft reads are tagged with their nodes in the draft's
own cache. Drafts differ only in their inputs and in their network.

Shapes: T rows, A of them with logits, D output of a draft's network for a row, W children of a row, V vocabulary.
"""
from __future__ import annotations

import math
from copy import copy
from itertools import accumulate, takewhile
from typing import Any, Callable, Collection, List, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from config.trees import Growth
from model.cache import SegmentCache, TreeCache, together
from model.drafts.draft import Draft, Guesses, Passes, Read, Reading, Result, Steps, WorthDrafting, all_of
from model.rules import Proposed, drawing, drawn, laws, spread
from model.sample import Sampler, not_finite
from model.tree import Proposal, TokenTree

CHUNK = 256  # rows of a prompt that a draft reads at once
LMHead = Callable[[Tensor], Tensor]  # computes logits of a network's output
Expansion = Steps[Optional[List[Guesses]]]  # the guesses after each node


class Network(Draft):
    """A source that takes time: it reads nodes anywhere in the tree, and guesses the tokens after them."""

    source = ""  # its name among the drafts of a tree
    number = 0  # its number among the drafts of a tree, which separates their random streams
    by_level = False  # whether it can also grow a tree level by level
    guesses_ahead = False  # whether it may also guess after nodes that it was not requested to read (`unrequested`)
    read_nodes: Collection[int] = ()  # some of the nodes that it does not want

    @property
    def networks(self) -> Sequence[Network]:
        return [self]

    def another(self) -> Network:
        raise NotImplementedError

    def wants(self, tree: TokenTree, node: int) -> bool:
        """Return whether a node is unread and can be read; the text must have room after it."""
        raise NotImplementedError

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        """Return the `width` likeliest tokens after each of these wanted nodes, and their probabilities.

        Above temperature 0, these are the tokens that most likely win with the noise of their position. The last nodes
        are omitted if there is no room for them. The result is None if the tip cannot be read yet.
        """
        raise NotImplementedError

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        """Return guesses after a node that it was not requested to read, or None if there are no new ones."""
        return None

    def restart(self) -> None:
        """Read the text again at the next tip, with the target's features instead of the draft's own."""
        raise NotImplementedError

    def settle(self, tree: TokenTree) -> None:
        """Forget nodes that died when the text grew."""
        raise NotImplementedError


class Leaf(NamedTuple):
    """A guess of the last level."""

    node: int
    shape_index: int  # in this level of a shape
    score: float  # the path's log-probability from the tip


class TreeDraft(Network):
    """A network that guesses, with EAGLE-2's growth; subclasses define its inputs and its guesses.

    `grow` drafts level by level. `expand` reads nodes anywhere in the tree, for best-first growth
    (`model/drafts/mixture.py`). A request is drafted in one of these ways. Both yield a `Reading` for each pass.
    """

    by_level = True
    lag = 0  # 1: a node is read as a pair with the feature of the token before it, at that token's position
    network: Any  # shared by twins
    lm_head: LMHead

    def __init__(self, cache: TreeCache) -> None:
        self.cache = cache
        self._num_levels, self._tip, self._is_worth_deepening = 0, -1, True
        self.reset()

    @property
    def consumed(self) -> int:
        return self._num_read - self.lag

    def catch_up(self, tree: TokenTree) -> Steps[None]:
        yield from self._follow(tree)

    def keep(self, length: int) -> None:
        self.cache.truncate(length)
        self._begin_behind(length)

    def copy(self, other: TreeDraft, length: int) -> None:
        self.cache.copy(other.cache, length)
        self._begin_behind(length)

    def _begin_behind(self, length: int) -> None:
        self._num_read = self.lag + length  # trunk nodes that were read; the first token of a text has no pair
        self._sampler = Sampler()
        self.refresh()
        self.restart()

    def another(self) -> TreeDraft:
        """Return a twin for another request, with a cache of its own and the same network."""
        twin = copy(self)
        twin.cache = self.cache.another()
        twin.reset()
        return twin

    def readable(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        """Return the leading nodes of `fresh`, the next nodes of the text, that have known features."""
        return list(takewhile(lambda node: self._feature(tree, node) is not None, fresh))

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        """Return the target's features `[T, D]` with which these nodes of the text are read."""
        return torch.stack([self._feature(tree, node) for node in fresh])

    def _feature(self, tree: TokenTree, node: int) -> Any:
        source_node = tree.nodes[node].parent if self.lag else node
        return tree.nodes[source_node].hidden

    def carried(self, parents: list[int]) -> Tensor:
        """Return the features `[T, D]` of guesses: the network's outputs for their parents."""
        return torch.stack([self._outputs[parent] for parent in parents])

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: SegmentCache) -> Tensor:
        """Return the network's output `[T, D]` for rows admitted to `cache`, its own or that of several twins."""
        out_TD: Tensor = self.network(token_T, feature_TD, pos_T, cache)
        return out_TD

    def logits(self, out_TD: Tensor) -> Tensor:
        """Return the logits `[T, V]` of the token after each row, over the draft's own vocabulary."""
        return self.lm_head(out_TD)

    def tokens(self, draft_ids: Tensor) -> Tensor:
        """Convert tokens of the draft's own vocabulary to the target's."""
        return draft_ids

    def guess(self, logits_TV: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids `[T, W]` of the likeliest tokens after each row, as tokens of the target."""
        width = min(width, logits_TV.shape[-1])
        logprob_TW, draft_id_TW = torch.log_softmax(logits_TV, -1).topk(width, -1)
        return logprob_TW, self.tokens(draft_id_TW)

    def begin(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def reset(self) -> None:
        self.cache.clear()
        self._begin_behind(0)

    # --- best first: nodes anywhere in the tree -----------------------------------------------------------------------

    def restart(self) -> None:
        self._outputs: dict[int, Tensor] = {}  # the network's output [D] for each node that was read

    @property
    def read_nodes(self) -> Collection[int]:  # type: ignore[override]
        return self._outputs

    def wants(self, tree: TokenTree, node: int) -> bool:
        return node not in self._outputs and (node == tree.tip or tree.nodes[node].parent in self._outputs)

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        num_free_slots = self.cache.room
        is_below_read_node = tree.nodes[nodes[0]].parent in self._outputs
        if is_below_read_node:
            nodes = nodes[:num_free_slots]
            if not nodes:
                return []
            read: Read = yield self._of_guesses(tree, nodes)
        else:
            assert nodes == [tree.tip], "no node below an unread tip can be read"
            read_of_tip = yield from self._follow(tree)
            if read_of_tip is None:
                return None
            read = read_of_tip

        self._outputs.update(zip(nodes, read.out_TD))
        positions = [tree.nodes[node].pos + 1 for node in nodes]
        return self.predict(self._shaped(tree, nodes, read.logits_AV), positions, width)

    def _shaped(self, tree: TokenTree, nodes: Sequence[int], logits_AV: Tensor) -> Tensor:
        """Return the logits of these nodes, changed as the request changes the target's logits."""
        if tree.law is None:
            return logits_AV
        shaped_AV: Tensor = tree.law.shaped(tree, nodes, logits_AV, self._target_ids(logits_AV))
        return shaped_AV

    def _target_ids(self, logits_TV: Tensor) -> Tensor:
        """Return the target's token of each column of logits."""
        return self.tokens(torch.arange(logits_TV.shape[-1], device=logits_TV.device))

    def predict(self, logits_TV: Tensor, positions: list[int], width: int) -> list[Guesses]:
        """Return the result of `expand` from logits, without excluded tokens; no guesses where logits are not finite.

        While the pipeline stalls, a head may read so long a chain of its own outputs that these leave their range.
        """
        logprob_TV = torch.log_softmax(self._sampler.warped(logits_TV), -1)
        noisy_TV = logprob_TV + self._sampler.noise(positions, self._target_ids(logprob_TV))
        width = min(width, logprob_TV.shape[-1])
        draft_id_TW = noisy_TV.topk(width, -1).indices

        probabilities = logprob_TV.gather(-1, draft_id_TW).exp().tolist()
        rows = map(zip, self.tokens(draft_id_TW).tolist(), probabilities)
        return [[(token, probability) for token, probability in row if probability > 0] for row in rows]

    def settle(self, tree: TokenTree) -> None:
        needed_nodes = tree.live.union(tree.trunk[self._num_read:])
        self.cache.retain(needed_nodes)
        needed_nodes.add(tree.tip)
        self._outputs = {node: out_D for node, out_D in self._outputs.items() if node in needed_nodes}

    def _check_finite(self, logits_AV: Tensor) -> None:
        """Raise ValueError if logits are not finite, but for those of excluded tokens."""
        if not (logits_AV < math.inf).all():
            raise not_finite("draft", self.cache.like.dtype, "its weights are damaged or were trained for another "
                             "model: take another draft, or add draft=none")

    # --- level by level -----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Begin again at the tip at the next growth, with the target's features instead of the draft's own."""
        self._origin: int | None = None  # the tip at which the tree was begun
        self._frontier: list[Leaf] = []  # the guesses of the last level to be expanded
        if self.drifts:
            self.restart()

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = all_of) -> Steps[bool]:
        """Draft one more level (EAGLE-2, section 4.1); return False if none is worth drafting.

        The best `width` guesses of a level are expanded, each into its `width` likeliest children; the best `nodes` of
        all guesses stay (section 4.2). A tree is `depth` + 1 levels deep. It deepens while a guess of its last level
        lives, and otherwise begins again at the tip. A tree with a shape gets all guesses of the shape. With a `gain`,
        no level is drafted after one that did not bring more than that (OPT-Tree, algorithm 1).
        """
        if growth.nodes < 1:
            return False

        live_leaves = [leaf for leaf in self._frontier if leaf.node in tree.live]
        if live_leaves:  # deepen the tree
            if not self._may_deepen(tree, live_leaves, growth):
                return False
            self._frontier = live_leaves
            if self._tip != tree.tip:  # text settled since then keeps the rows of its guesses until the next refresh
                self._tip = tree.tip
                self.cache.retain(tree.live.union(tree.trunk[self._num_read:]))
            read: Read = yield self._of_guesses(tree, [leaf.node for leaf in live_leaves])
        else:  # begin at the tip
            if self._origin == tree.tip or tree.room < 1:
                return False
            read_of_tip = yield from self._follow(tree)
            if read_of_tip is None:
                return False
            read = read_of_tip

        nodes = [leaf.node for leaf in self._frontier]
        self._outputs.update(zip(nodes, read.out_TD))
        logits_AV = self._shaped(tree, nodes, read.logits_AV)
        self._num_levels += 1
        if growth.shape:
            self._branch(tree, logits_AV, growth)
        else:
            self._offer(tree, logits_AV, growth)
        return True

    def _may_deepen(self, tree: TokenTree, leaves: Sequence[Leaf], growth: Growth) -> bool:
        """Return whether one more level below these leaves is allowed, has positions left, and is worth drafting."""
        next_position = tree.nodes[leaves[0].node].pos + 1
        is_allowed = self._num_levels <= growth.depth and next_position < tree.max_tokens
        return is_allowed and self._is_worth_deepening

    def _follow(self, tree: TokenTree) -> Steps[Read | None]:
        """Read newly settled text; return the output for the tip, or None if it cannot be read yet."""
        self.cache.drop()
        read: Read | None = None
        while self._num_read < len(tree.trunk):
            chunk = self.readable(tree, tree.trunk[self._num_read:self._num_read + CHUNK])
            if not chunk:
                break

            parents = [tree.nodes[node].parent for node in chunk]
            self.cache.admit(chunk, parents, text=len(chunk))
            num_read = self._num_read + len(chunk)
            read = yield self._reading(tree, chunk, self.features(tree, chunk), int(num_read == len(tree.trunk)))
            self._num_read = num_read

        if read is None or self._num_read < len(tree.trunk):
            return None
        self._check_finite(read.logits_AV)
        self._begin_at_tip(tree)
        return read._replace(out_TD=read.out_TD[-1:])

    def _begin_at_tip(self, tree: TokenTree) -> None:
        """Begin a tree at the tip, whose text was read."""
        self._origin = self._tip = tree.tip
        self._num_levels = 0
        self._tip_score = tree.nodes[tree.tip].score
        self._frontier = [Leaf(tree.tip, 0, 0.0)]
        self._is_worth_deepening, self._expected_tokens = True, 0.0
        self._outputs.clear()

    def _of_guesses(self, tree: TokenTree, nodes: list[int]) -> Reading:
        """Return a reading of guesses, with the draft's own features."""
        parents = [tree.nodes[node].parent for node in nodes]
        self.cache.admit(nodes, parents, text=0)
        return self._reading(tree, nodes, self.carried(parents), len(nodes))

    def _reading(self, tree: TokenTree, nodes: list[int], feature_TD: Tensor, num_logit_rows: int) -> Reading:
        tokens = [tree.nodes[node].token for node in nodes]
        positions = [tree.nodes[node].pos - self.lag for node in nodes]
        token_T, pos_T = torch.tensor([tokens, positions], device=self.cache.like.device)
        return Reading(self, token_T, feature_TD, pos_T, num_logit_rows)

    def _offer(self, tree: TokenTree, logits_AV: Tensor, growth: Growth) -> None:
        """Add the children that are good enough; the best `width` of all become the next frontier."""
        logprob_TW, token_TW = self.guess(logits_AV, growth.width)
        leaf_score_T = logprob_TW.new_tensor([leaf.score for leaf in self._frontier])
        path_score_TW = leaf_score_T[:, None] + logprob_TW
        path_score_TW.masked_fill_(path_score_TW.isnan(), -math.inf)

        # all children, the best first
        sorted_scores, order = path_score_TW.flatten().sort(descending=True, stable=True)
        scores = sorted_scores.tolist()
        tokens = token_TW.flatten()[order].tolist()
        leaf_indices = order.div(logprob_TW.shape[1], rounding_mode="floor").tolist()

        # into the tree
        guesses = [(self._frontier[leaf_index].node, token, self._tip_score + score)
                   for leaf_index, token, score in zip(leaf_indices, tokens, scores) if score > -math.inf]
        min_score = tree.nodes[tree.tip].score + growth.least_score
        new_nodes = tree.offer(guesses, growth.nodes, min_score, self.source)

        # the next frontier
        best_children = zip(new_nodes[:growth.width], scores)
        self._frontier = [Leaf(node, index, score) for index, (node, score) in enumerate(best_children)]
        if growth.gain:
            expected_tokens = _expected_tokens(tree)
            self._is_worth_deepening = expected_tokens - self._expected_tokens > growth.gain
            self._expected_tokens = expected_tokens

    def _branch(self, tree: TokenTree, logits_AV: Tensor, growth: Growth) -> None:
        """Add the children of the frontier that the shape gives; those with children become the next frontier."""
        child_counts, *deeper_levels = growth.shape[self._num_levels - 1:]
        next_counts = deeper_levels[0] if deeper_levels else ()
        first_child_index = [0, *accumulate(child_counts)]  # by the index of the parent in its level
        proposals = self._children(tree, logits_AV, [child_counts[leaf.shape_index] for leaf in self._frontier])

        leaves: dict[int, Leaf] = {}
        for leaf, children in zip(self._frontier, proposals):
            for index, (proposal, logprob) in enumerate(children, first_child_index[leaf.shape_index]):
                score = leaf.score + logprob
                node = tree.propose(leaf.node, proposal, self._tip_score + score)
                has_children = index < len(next_counts) and next_counts[index] > 0
                if has_children:
                    rounded_score = float(logits_AV.new_tensor(score))
                    leaves.setdefault(node, Leaf(node, index, rounded_score))  # a draw may come twice
        self._frontier = list(leaves.values())

    def _children(self, tree: TokenTree, logits_TV: Tensor,
                  counts: Sequence[int]) -> list[Proposed]:
        """Return the proposals after each node of the frontier, drawn or likeliest, as the sampler's rule requires."""
        if drawing(self._sampler) is None:
            return self._likeliest_children(logits_TV, counts)

        self._check_finite(logits_TV)
        law_TV = spread(laws(self._sampler, logits_TV), self._target_ids(logits_TV))
        position = tree.nodes[self._frontier[0].node].pos + 1
        return [drawn(self._sampler, Proposal(self.source, 0, law_V), position, self.number, count)
                for law_V, count in zip(law_TV, counts)]

    def _likeliest_children(self, logits_TV: Tensor, counts: Sequence[int]) -> list[Proposed]:
        """Return as many of the likeliest tokens after each row as `counts` has for it."""
        logprob_TW, token_TW = self.guess(logits_TV, max(counts))
        children = []
        for tokens, logprobs, count in zip(token_TW.tolist(), logprob_TW.tolist(), counts):
            pairs = zip(tokens[:count], logprobs)
            children.append([(Proposal(self.source, token), logprob) for token, logprob in pairs
                             if logprob > -math.inf])
        return children


def _expected_tokens(tree: TokenTree) -> float:
    """Return the expected number of guesses that the target accepts."""
    tip_score = tree.nodes[tree.tip].score
    path_scores = [tree.nodes[node].score for node in tree.live]
    return math.fsum(math.exp(score - tip_score) for score in path_scores)  # exact, since a set has no order


class ModelDraft(TreeDraft):
    """A draft that guesses with a whole small model of the same vocabulary; it reads only tokens."""

    source = "model"

    def __init__(self, model: Callable[[Tensor, Tensor, SegmentCache], Tensor], lm_head: LMHead,
                 cache: TreeCache) -> None:
        self.network, self.lm_head = model, lm_head
        super().__init__(cache)

    def readable(self, tree: TokenTree, fresh: list[int]) -> list[int]:
        """Return all nodes, but none before the prompt is sent, so that the pipeline does not wait for this reading."""
        return [] if len(tree.unsent_text) > 1 else fresh

    def features(self, tree: TokenTree, fresh: list[int]) -> Tensor:
        return self.carried(fresh)

    def carried(self, parents: list[int]) -> Tensor:
        return self.cache.like.new_empty(len(parents), 0)

    def read(self, token_T: Tensor, feature_TD: Tensor, pos_T: Tensor, cache: SegmentCache) -> Tensor:
        out_TD: Tensor = self.network(token_T, pos_T, cache)
        return out_TD


# --- passes -----------------------------------------------------------------------------------------------------------

def read_all(readings: Sequence[Reading]) -> list[Read]:
    """Return the results in the order of the readings; each network makes one pass."""
    results: dict[int, Read] = {}  # by the index of the reading
    for indices in by_network(readings):
        group = [readings[index] for index in indices]
        results.update(zip(indices, _pass(group)))
    return [results[index] for index in range(len(readings))]


def by_network(readings: Sequence[Reading]) -> list[list[int]]:
    """Return the indices of the readings, grouped by network."""
    groups: dict[int, list[int]] = {}
    for index, reading in enumerate(readings):
        groups.setdefault(id(reading.draft.network), []).append(index)
    return list(groups.values())


def _pass(group: Sequence[Reading]) -> list[Read]:
    """Run one pass for the rows of several requests."""
    draft = group[0].draft
    row_counts = [len(reading.token_T) for reading in group]
    logit_row_counts = [reading.num_logit_rows for reading in group]

    # all rows
    caches = together([reading.draft.cache for reading in group], row_counts)
    inputs = zip(*((reading.token_T, reading.feature_TD, reading.pos_T) for reading in group))
    out_TD = draft.read(*map(torch.cat, inputs), caches)
    outs = out_TD.split(row_counts)

    # logits of the last rows
    last_outs = [out[len(out) - count:] for out, count in zip(outs, logit_row_counts)]
    out_AD = torch.cat(last_outs)
    logits_AV = draft.logits(out_AD) if sum(logit_row_counts) else out_AD
    return [Read(*result) for result in zip(outs, logits_AV.split(logit_row_counts))]


def at_once(steps: Steps[Result], passes: Passes = read_all) -> Result:
    """Return the result of a draft's steps, each in a pass of its own."""
    read: Read | None = None
    while True:
        try:
            reading = steps.send(read)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        read, = passes([reading])
