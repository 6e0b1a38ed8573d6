"""Small models on their own ranks, which draft at the same time, and the draft on rank 0 that merges their trees.

They know nothing about how a small model guesses. A drafter keeps the text in its own tree, so an `Ask` holds only new
tokens. The shape of a tree is known in advance, so one message each way is enough (SpecInfer, section 3).
"""
from __future__ import annotations

from itertools import count, islice, zip_longest
from typing import Any, Iterator, Sequence

import numpy as np
import torch

from config.trees import Growth
from model.drafts.draft import Draft, Passes, Steps, WorthDrafting, always
from model.drafts.network import at_once, read_all
from model.sample import Sampler
from model.tree import Proposal, TokenTree
from pipeline.messages import NO_LAWS, Ask, Drafted, Message, Reset, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link, send_round


class NotedTree(TokenTree):
    """A tree that records the proposals below its tip; its nodes are not sent."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Forget all guesses, and add new text."""
        self.forget()
        for token in tokens:
            self.settle(token)
        self.unsent.clear()

    def begin(self, number: int) -> None:
        """Begin to record the answer to the `Ask` of this number."""
        self.noted = Drafted(number, [], [], [], [], NO_LAWS)
        self._places = {self.tip: 0}  # guess -> number of its first proposal, from 1
        self._laws: dict[int, Any] = {}  # by parent

    def propose(self, parent: int, proposal: Proposal, score: float) -> int:
        node = super().propose(parent, proposal, score)
        noted = self.noted
        noted.parents.append(self._places[parent])
        noted.tokens.append(proposal.token)
        noted.scores.append(score)
        self._places.setdefault(node, len(noted.tokens))
        self._laws[parent] = proposal.law
        return node

    def end(self) -> Drafted:
        """The finished answer."""
        laws = [law for law in self._laws.values() if law is not None]
        if laws:
            self.noted.law_NV = torch.from_numpy(np.stack(laws))
        return self.noted


class Drafter:
    """A small model on its own rank; its answers depend only on the messages that it has received.

    Scores in its tree are those of paths from the tip, since it settles text that it has not guessed.
    """

    def __init__(self, draft: Draft, trace: NoTrace = OFF, passes: Passes = read_all) -> None:
        self.trace = trace
        self._draft, self._passes = draft, passes
        self._tree = NotedTree([0], 1)

    def apply(self, msg: Message) -> Message:
        """Apply one message, and return the answer for rank 0."""
        return self._drafted(msg) if isinstance(msg, Ask) else msg

    def _drafted(self, ask: Ask) -> Drafted:
        """Return the tree of this small model below the text, as it would be on rank 0."""
        if ask.sent:
            assert len(self._tree.trunk) == ask.sent, f"{len(self._tree.trunk)} tokens were received, not {ask.sent}"
            self._tree.advance(ask.tokens)
        else:
            self._draft.reset()
            self._draft.begin(ask.sampler)
            self._tree = NotedTree(ask.tokens, ask.limit)
            self._tree.unsent.clear()
        tree, growth = self._tree, Growth(0, 0, 0).shaped(ask.shape)
        tree.begin(ask.number)
        noted = tree.noted
        for level in range(len(ask.shape)):
            with self.trace.span("grow", level=level):
                if not at_once(self._draft.grow(tree, growth), self._passes):
                    break
            noted.levels.append(len(noted.tokens) - sum(noted.levels))
        return tree.end()


def run_drafter(drafter: Drafter, link: Link) -> None:
    """Run the main loop of a rank that holds a small model."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with drafter.trace.span("wait"):
            msg = link.recv()
        link.send(drafter.apply(msg))


def replay(drafted: Drafted, source: str, tree: TokenTree) -> Iterator[None]:
    """Repeat the proposals of a small model in the request's tree; yield after each level."""
    base = tree.nodes[tree.tip].score
    nodes = [tree.tip]  # by number of the proposal
    laws = dict(zip(dict.fromkeys(drafted.parents), drafted.law_NV.numpy()))
    rows = zip(drafted.parents, drafted.tokens, drafted.scores)
    for proposals in drafted.levels:
        for parent, token, score in islice(rows, proposals):
            proposal = Proposal(source, token, laws.get(parent))
            nodes.append(tree.propose(nodes[parent], proposal, base + score))
        yield


class RemoteDraft(Draft):
    """The draft of rank 0 that uses small models on their own ranks, with a link to each.

    The models draft at the same time. Rank 0 repeats their proposals level by level, and within a level model by model.
    Small models on rank 0 work in this order, too, so the tree is the same, ids and scores included.
    """

    def __init__(self, links: Sequence[Any]) -> None:
        self.links = links
        self._numbers = count()
        self.reset()

    def start(self) -> None:
        """Wait until every small model is loaded."""
        send_round(self.links, Reset(0))

    def stop(self) -> None:
        """Stop the ranks of the small models."""
        send_round(self.links, Stop())

    @property
    def held(self) -> int:
        return 0

    def begin(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def reset(self) -> None:
        """Forget the request; the small models do so when the next request begins."""
        self._sampler = Sampler()
        self._sent = 0  # number of text tokens that the small models hold
        self._tip = -1  # tip of the text at the last growth

    def another(self) -> RemoteDraft:
        raise AssertionError("small models on their own ranks draft for one request at a time")

    def keep(self, length: int) -> None:
        self.reset()

    def grow(self, tree: TokenTree, growth: Growth, worth_drafting: WorthDrafting = always) -> Steps[bool]:
        """Add the trees of all small models below the tip, with the shape of `growth`.

        An unsent prompt goes to the target first, so that the pipeline reads it meanwhile; until then nothing is added.
        """
        yield from ()  # there is no network on rank 0
        assert growth.shape, "small models on their own ranks need a growth with a fixed shape"
        if tree.tip == self._tip or tree.room < 1 or len(tree.unsent) > 1:
            return False
        tokens = [tree.nodes[node].token for node in tree.trunk[self._sent:]]
        number = next(self._numbers)
        ask = Ask(number, self._sent, tokens, tree.limit, self._sampler, growth.shape)
        for link in self.links:
            link.send(ask)
        answers = [_answer(link, number) for link in self.links]
        replays = [replay(drafted, f"ssm{source}", tree) for source, drafted in enumerate(answers, 1)]
        for _ in zip_longest(*replays):
            pass
        self._sent, self._tip = len(tree.trunk), tree.tip
        return True


def _answer(link: Link, number: int) -> Drafted:
    """Return the answer to the `Ask` of this number; answers to earlier ones, which were abandoned, are dropped."""
    while True:
        msg = link.recv()
        if isinstance(msg, Drafted) and msg.number == number:
            return msg
