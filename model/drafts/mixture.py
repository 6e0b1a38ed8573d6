"""A draft out of several sources, networks and a suffix automaton, that grows a tree best first, anywhere.

It knows nothing about how a source guesses. What each of them says of the token after a node is mixed into one list of
children (`model/drafts/calibration.py`); the best of all lists that are live make the tree.
"""
from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass
from typing import Callable, Iterator, Sequence

import torch

from config.trees import Growth
from model.drafts.batch import Steps
from model.drafts.calibration import SUFFIX, Blend, Guesses
from model.drafts.draft import Draft, Spares, always
from model.drafts.network import TreeDraft
from model.drafts.suffix import NOTHING, Match, SuffixAutomaton
from model.sample import Sampler
from model.tree import Guess, TokenTree

OFTEN, SELDOM = 16, 64  # tokens over which foresight is taken; and over which it is believed in again, untried
LONG, RUN = 8, 16  # tokens of a match behind which its continuation is taken at once, and how far


@dataclass
class Stand:
    """What was guessed of the token after one node."""

    depth: int  # how many guesses the node stood on
    match: Match  # of the suffix automaton, up to this node
    given: dict[str, Guesses]  # by source
    children: Guesses  # out of all sources, the likeliest first


class Suffix:
    """The automaton over the text so far, and the matches of the nodes below it.

    With `keep`, which is given each text when its request is over, it remembers those of earlier requests too, and the
    `earlier` ones that are there at the beginning.
    """

    def __init__(self, earlier: Sequence[Sequence[int]] = (), keep: Callable[[list[int]], None] | None = None) -> None:
        assert keep or not earlier, "earlier texts are forgotten with the first request, unless texts are kept"
        self._keep = keep
        self.automaton = SuffixAutomaton()
        self._text: list[int] = []
        self._earlier = list(earlier)  # which twins share
        self._read = 0  # how many of them the automaton has
        self._catch_up()

    def another(self) -> Suffix:
        """A twin for another request, which remembers the same earlier texts."""
        twin = Suffix(keep=self._keep)
        twin._earlier = self._earlier
        twin._catch_up()
        return twin

    def reset(self) -> None:
        """Forget the request, or keep its text as an earlier one."""
        if self._keep is None:
            self.automaton = SuffixAutomaton()
        else:
            if self._text:
                self.automaton.separate()
                self._keep(self._text)
            self._catch_up()
            if self._text:  # the automaton has it already
                self._earlier.append(self._text)
                self._read += 1
        self._text = []

    def _catch_up(self) -> None:
        """Read the earlier texts that are new."""
        for text in self._earlier[self._read:]:
            for token in text:
                self.automaton.extend(token)
            self.automaton.separate()
        self._read = len(self._earlier)

    def settle(self, tree: TokenTree) -> None:
        """Read the text that is new."""
        for node in tree.trunk[len(self._text):]:
            self._text.append(tree.nodes[node].token)
            self.automaton.extend(tree.nodes[node].token)

    def match(self, tree: TokenTree, node: int, above: Match) -> Match:
        """The match of a node, where that of its parent is `above`."""
        return self.automaton.tip if node == tree.tip else self.automaton.step(above, tree.nodes[node].token)


class Mixture(Draft):
    """The sum of some networks and, if there is one, a suffix automaton."""

    def __init__(self, networks: Sequence[TreeDraft], suffix: Suffix | None = None) -> None:
        self._networks, self._suffix = networks, suffix
        self._tree: TokenTree | None = None  # of the request, once there was a growth
        self._blend = Blend()  # learns from one request to the next
        self.inner = any(network.inner for network in networks)
        self.reset()

    @property
    def networks(self) -> Sequence[TreeDraft]:
        return self._networks

    @property
    def consumed(self) -> int:
        return min((network.consumed for network in self._networks), default=sys.maxsize)

    def another(self) -> Mixture:
        """A twin for another request, which learns together with this one who was right."""
        suffix = self._suffix.another() if self._suffix else None
        twin = Mixture([network.another() for network in self._networks], suffix)
        twin._blend = self._blend
        return twin

    def unlearn(self) -> None:
        self._blend.unlearn()

    def begin(self, sampler: Sampler) -> None:
        self._sampler = sampler
        for network in self._networks:
            network.begin(sampler)

    def keep(self, length: int) -> None:
        self._forget()
        for network in self._networks:
            network.keep(length)

    def copy(self, other: Mixture, length: int) -> None:
        for mine, theirs in zip(self._networks, other.networks):
            mine.copy(theirs, length)

    def reset(self) -> None:
        self._forget()
        for network in self._networks:
            network.reset()

    def _forget(self) -> None:
        """Forget all but what the networks hold."""
        self._stands: dict[int, Stand] = {}
        self._settled = 0  # nodes of the trunk whose guesses were learnt from
        self._tip = -1
        self._levels = 0  # since the tip moved
        self._foresight = 1.0  # the share of tokens that were recently among what was guessed in their places
        self._sampler = Sampler()
        if self._suffix:
            if self._tree is not None:
                self._suffix.settle(self._tree)
            self._suffix.reset()
        self._tree = None

    def refresh(self) -> None:
        """Let the networks that drift begin again at the tip."""
        for network in self._networks:
            network.refresh()
            if network.drifts:
                network.restart()

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        """Read the likeliest nodes that were not read yet, wherever they stand, and offer what all sources say.

        `spares` is asked first whether there is time for what that promises, in tokens.
        A single network can also grow level by level, as the reproductions of other methods do. In a tree of a given
        shape every network grows its own tree of this shape, and the trees are merged (SpecInfer, section 3).
        """
        if growth.shape:
            grown = False
            for network in self._networks:
                grown |= yield from network.grow(tree, growth)
            return grown
        if not growth.anywhere and self._suffix is None and len(self._networks) == 1:
            return (yield from self._networks[0].grow(tree, growth))
        self._tree = tree
        moved = tree.tip != self._tip
        if moved:
            self._move(tree)
        if growth.nodes < 1 or tree.room < 1 or self._levels > growth.depth:
            return False
        least = tree.nodes[tree.tip].score + growth.worth
        if moved:  # there is room again for guesses that were not among the best
            self._offer(tree, list(self._stands), growth, least)
        nodes = self._choose(tree, growth.width, least)
        if nodes and not spares(self._promise(tree, nodes)):
            return False
        read = yield from self._expand(tree, nodes, growth.width)
        if not read:
            return False
        self._levels += 1
        self._offer(tree, read, growth, least)
        for node in read:
            self._run(tree, node, growth, least)
        return True

    # --- the text goes on ---------------------------------------------------------------------------------------------

    def _move(self, tree: TokenTree) -> None:
        """Learn from what settled, forget what died, and begin at the tip if nobody had guessed it."""
        self._tip, self._levels = tree.tip, 0
        self._learn(tree)
        if self._suffix:
            self._suffix.settle(tree)
        guessed = bool(tree.nodes[tree.tip].proposals)
        for network in self._networks:
            if guessed:
                network.settle(tree)
            else:
                network.restart()
        self._stands = {node: stand for node, stand in self._stands.items() if node in tree.live or node == tree.tip}

    def _learn(self, tree: TokenTree) -> None:
        """Compare what was guessed of the tokens that settled with what they are."""
        for node in tree.trunk[self._settled:]:
            stand = self._stands.get(tree.nodes[node].parent)
            said = tree.nodes[node].token
            foreseen = stand is None or any(token == said for token, _ in stand.children)
            self._foresight += (foreseen - self._foresight) / (SELDOM if stand is None else OFTEN)
            if stand is not None:
                self._blend.learn(stand.given, stand.match.length, said, stand.depth)
        self._settled = len(tree.trunk)

    # --- a level ------------------------------------------------------------------------------------------------------

    def _choose(self, tree: TokenTree, width: int, least: float) -> list[int]:
        """The likeliest nodes that a source wants to read: the tip, and guesses below it."""
        scores = {node: tree.nodes[node].score for node in tree.live}
        worthy = (node for node in scores if scores[node] >= least and self._wanted(tree, node))
        best = heapq.nsmallest(width, worthy, key=lambda node: (-scores[node], node))
        return [tree.tip, *best] if self._wanted(tree, tree.tip) else best

    def _promise(self, tree: TokenTree, nodes: Sequence[int]) -> float:
        """How many tokens more may be foreseen once these nodes are read."""
        tip = tree.nodes[tree.tip].score
        scores = [tree.nodes[node].score for node in nodes]
        return self._foresight * sum(math.exp(score - tip) for score in scores)

    def _wanted(self, tree: TokenTree, node: int) -> bool:
        if any(network.wants(tree, node) for network in self._networks):
            return True
        unread = node not in self._stands and tree.nodes[node].pos + 1 < tree.limit
        return unread and self._suffix is not None and (node == tree.tip or not self._networks)

    def _expand(self, tree: TokenTree, nodes: list[int], width: int) -> Steps[list[int]]:
        """Let every source read those of the nodes that it wants; returns the nodes of which there is news."""
        said: dict[int, dict[str, Guesses]] = {}
        for network in self._networks:
            wanted = [node for node in nodes if network.wants(tree, node)]
            guesses = None
            if wanted:
                guesses = yield from network.expand(tree, wanted, width)
            for node, guessed in zip(wanted, guesses or ()):
                said.setdefault(node, {})[network.source] = guessed
        fresh = [node for node in nodes if node in said or node not in self._stands]
        return [node for node in fresh if self._stand(tree, node, said.get(node, {}), width)]

    def _stand(self, tree: TokenTree, node: int, said: dict[str, Guesses], width: int) -> bool:
        """Mix what is said of the token after a node with what was said before; False if that is nothing."""
        stand = self._stands.get(node)
        if stand is None:
            depth = tree.nodes[node].pos - tree.nodes[tree.tip].pos
            stand = Stand(depth, self._match(tree, node), {}, [])
            if self._suffix and (guessed := self._suffix.automaton.continuations(stand.match, width)):
                stand.given[SUFFIX] = guessed
        stand.given.update(said)
        if not stand.given:
            return False
        mixed = self._blend.mix(stand.given, stand.match.length, stand.depth)
        stand.children = self._foreseen(mixed, tree.nodes[node].pos + 1)[:width]
        self._stands[node] = stand
        return True

    def _match(self, tree: TokenTree, node: int) -> Match:
        """The match of a node, from that of the nearest node above whose match is known."""
        if self._suffix is None:
            return NOTHING
        way = [node]
        while way[-1] != tree.tip and tree.nodes[way[-1]].parent not in self._stands:
            way.append(tree.nodes[way[-1]].parent)
        above = self._stands.get(tree.nodes[way[-1]].parent)
        match = above.match if above else NOTHING
        for step in reversed(way):
            match = self._suffix.match(tree, step, match)
        return match

    def _foreseen(self, mixed: Guesses, position: int) -> Guesses:
        """Probabilities once the noise of a position is known, which chooses among the tokens: see docs/design.md."""
        if not self._sampler.temperature or not mixed:
            return mixed
        tokens = torch.tensor([token for token, _ in mixed])
        chance = torch.tensor([probability for _, probability in mixed], dtype=torch.float64)
        order = tokens.argsort()
        noise = torch.empty_like(chance)
        noise[order] = self._sampler.noise([position], tokens[order])[0]
        worth = torch.softmax(chance.log() + noise, -1)
        best = worth.argsort(descending=True, stable=True)
        return list(zip(tokens[best].tolist(), worth[best].tolist()))

    # --- into the tree ------------------------------------------------------------------------------------------------

    def _offer(self, tree: TokenTree, nodes: Sequence[int], growth: Growth, least: float) -> None:
        """Add the children of these nodes that are among the best."""
        known = [node for node in nodes if node in tree.nodes]
        guesses = [guess for node in known for guess in self._children(tree, node, least)]
        guesses.sort(key=lambda guess: -guess[2])
        taken = tree.offer(guesses, growth.nodes, least)
        for node, (parent, token, score) in zip(taken, guesses):
            given = self._stands[parent].given
            tree.nodes[node].proposals = {source: score for source, said in given.items()
                                    if any(guess == token for guess, _ in said)}

    def _run(self, tree: TokenTree, node: int, growth: Growth, least: float) -> None:
        """Go on behind a long match at once, along what followed it, without waiting for a network."""
        for _ in range(RUN):
            stand = self._stands[node]
            if stand.match.length < LONG or SUFFIX not in stand.given:
                return
            followed, _ = stand.given[SUFFIX][0]
            child = tree.child(node, followed)
            if child is None or tree.nodes[child].pos + 1 >= tree.limit:
                return
            if child not in self._stands and self._stand(tree, child, {}, growth.width):
                self._offer(tree, [child], growth, least)
            if child not in self._stands:
                return
            node = child

    def _children(self, tree: TokenTree, node: int, least: float) -> Iterator[Guess]:
        above = tree.nodes[node].score
        for token, probability in self._stands[node].children:
            if probability > 0 and above + math.log(probability) >= least:
                yield node, token, above + math.log(probability)
