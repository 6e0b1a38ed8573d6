"""A cascade of small models: a larger one verifies the chain of a smaller one in one pass, before anything is sent.

After PipeSpec (B. McDanel et al., arXiv 2505.01572, section 3), where every model but the first verifies the draft of
the model before it. There all models compute at once, each on a device of its own; here they take turns on rank 0,
while the stages compute. The largest model gives each guess its score. So a chain never adds a guess of its own: it
only decides which rows the largest model reads together.
"""
from __future__ import annotations

from typing import Sequence

from model.drafts.draft import Guesses, Steps
from model.drafts.network import Expansion, Network, TreeDraft
from model.tree import TokenTree

AHEAD, HOPE = 8, 0.3  # the most guesses of a chain, and the least probability of a whole chain by its drafter
UNVERIFIED = -64.0  # log-probability, relative to its parent's, of an unverified guess, so that it is sent last


class Cascade(Network):
    """A small model, `larger`, which reads the requested nodes together with a chain of `smaller` after the likeliest
    node.

    Guesses of the chain that are not among the likeliest of `larger` are dropped, with everything below them. `smaller`
    may be a cascade, too.
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
        self._heard: dict[int, Guesses] = {}  # guesses of the larger model after nodes of the chain
        self._chained: dict[int, Guesses] = {}  # guesses of the smaller model after each node that it has read

    def settle(self, tree: TokenTree) -> None:
        super().settle(tree)
        kept = tree.live | {tree.tip}
        self._heard = {node: said for node, said in self._heard.items() if node in kept}
        self._chained = {node: said for node, said in self._chained.items() if node in kept}

    def wants(self, tree: TokenTree, node: int) -> bool:
        return self.larger.wants(tree, node)

    def unrequested(self, tree: TokenTree, node: int, width: int) -> Guesses | None:
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
        """Draft a chain of unverified guesses of the smaller model after the likeliest of these nodes."""
        node = max(nodes, key=lambda node: tree.nodes[node].score)
        chain: list[int] = []
        hope = 1.0
        while len(chain) < AHEAD:
            said = yield from self._smaller_guesses(tree, node)
            if not said or tree.nodes[node].pos + 2 >= tree.limit:
                break
            token, chance = said[0]
            hope *= chance
            if hope < HOPE:
                break
            faint = tree.nodes[node].score + UNVERIFIED
            child = tree.child(node, token)
            if child is not None and tree.nodes[child].score > faint:  # verified, or a guess of another source
                break
            node = tree.add(node, token, faint, self.smaller.source) if child is None else child
            chain.append(node)
        return chain

    def _smaller_guesses(self, tree: TokenTree, node: int) -> Steps[Guesses]:
        """Return the smaller model's guesses after a node, which it first reads if necessary, with unread ancestors."""
        heard = self.smaller.unrequested(tree, node, 1)
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
    """Return a cascade of small models: the first one drafts, and each other one verifies the one before it."""
    found: Network = models[0]
    for larger in models[1:]:
        found = Cascade(larger, found)
    return found
