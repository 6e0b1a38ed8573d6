"""Small models in a row: a larger one verifies the chain of a smaller one in one pass, before anything is sent.

After PipeSpec (B. McDanel et al., arXiv 2505.01572, section 3), where every model but the first verifies what the one
before it drafts. There all of them compute at once, each on a device of its own; here they take turns on rank 0, and
compute beside the stages. What the last one says of each guess is its score, so a chain never makes a guess, it only
says which rows the last model reads together.
"""
from __future__ import annotations

from typing import Sequence

from model.drafts.draft import Guesses, Steps
from model.drafts.network import Expansion, Network, TreeDraft
from model.tree import TokenTree

AHEAD, HOPE = 8, 0.3  # guesses in a chain; and the least probability of a whole one, as who drafts it finds
UNVERIFIED = -64.0  # log-probability beside its parent's of a guess that was not verified yet: it leaves last


class Cascade(Network):
    """A small model, `larger`, that reads with the nodes that it is asked about a chain of `smaller` behind the
    likeliest of them.

    Guesses of that chain which are not among its own likeliest are dropped, with all that stands on them. `smaller` may
    be such a row itself.
    """

    far = True

    def __init__(self, larger: TreeDraft, smaller: Network) -> None:
        self.larger, self.smaller = self.parts = larger, smaller
        self.source = larger.source
        self.reset()

    def another(self) -> Cascade:
        return Cascade(self.larger.another(), self.smaller.another())

    def restart(self) -> None:
        self.forget()
        super().restart()

    def forget(self) -> None:
        self._heard: dict[int, Guesses] = {}  # what the larger model says of nodes that it was not asked about
        self._chained: dict[int, Guesses] = {}  # what the smaller one says of each node that it has read

    def settle(self, tree: TokenTree) -> None:
        super().settle(tree)
        kept = tree.live | {tree.tip}
        self._heard = {node: said for node, said in self._heard.items() if node in kept}
        self._chained = {node: said for node, said in self._chained.items() if node in kept}

    def wants(self, tree: TokenTree, node: int) -> bool:
        return self.larger.wants(tree, node)

    def heard(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
        return self._heard.pop(node, None)

    def expand(self, tree: TokenTree, nodes: list[int], width: int) -> Expansion:
        chain = yield from self._chain(tree, nodes)
        said = yield from self.larger.expand(tree, [*nodes, *chain], width)
        if said is None:
            return None
        found = dict(zip([*nodes, *chain], said))
        for node in chain:
            above = dict(found.get(tree.nodes[node].parent, ()))
            if node not in found or tree.nodes[node].token not in above:
                if node in tree.waiting:
                    tree.drop(node)
                break
            self._heard[node] = found[node]
        return said[:len(nodes)]

    def _chain(self, tree: TokenTree, nodes: Sequence[int]) -> Steps[list[int]]:
        """Guesses of the smaller model behind the likeliest of these nodes, one behind the other, still unverified."""
        node = max(nodes, key=lambda node: tree.nodes[node].score)
        chain: list[int] = []
        hope = 1.0
        while len(chain) < AHEAD:
            said = yield from self._said(tree, node)
            if not said or tree.nodes[node].pos + 2 >= tree.limit:
                break
            token, chance = said[0]
            hope *= chance
            if hope < HOPE:
                break
            faint = tree.nodes[node].score + UNVERIFIED
            child = tree.child(node, token)
            if child is not None and tree.nodes[child].score > faint:  # which has been verified, or is another's guess
                break
            node = tree.add(node, token, faint, self.smaller.source) if child is None else child
            chain.append(node)
        return chain

    def _said(self, tree: TokenTree, node: int) -> Steps[Guesses]:
        """What the smaller model guesses after a node; it reads it if need be, with all above that it has not read."""
        heard = self.smaller.heard(tree, node, 1)
        if heard is not None:
            self._chained[node] = heard
        if node in self._chained:
            return self._chained[node]
        way = [node]
        above = tree.nodes[node].parent
        while way[0] != tree.tip and above not in self._chained:
            way.insert(0, above)
            above = tree.nodes[above].parent
        said = yield from self.smaller.expand(tree, way, 1)
        self._chained.update(zip(way, said or ()))
        return self._chained.get(node, ())


def row(models: Sequence[TreeDraft]) -> Network:
    """Small models in a row: the first one drafts, and each further one verifies what the one before it says."""
    found: Network = models[0]
    for larger in models[1:]:
        found = Cascade(larger, found)
    return found
