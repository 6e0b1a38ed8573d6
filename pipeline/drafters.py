"""Small models on ranks of their own, which draft at the same time, and the draft on rank 0 that merges their trees.

They know nothing about how a small model guesses. A drafter keeps the text in a tree of its own, so that a question
brings what is new; since the shape of a tree is known before, one message each way makes it (SpecInfer, section 3).
"""
from __future__ import annotations

from itertools import count, islice, zip_longest
from typing import Any, Sequence

import numpy as np
import torch

from config.trees import Growth
from model.drafts.draft import Draft, Passes, Spares, Steps, always
from model.drafts.network import at_once, read_all
from model.sample import Sampler
from model.tree import Proposal, TokenTree
from pipeline.messages import Ask, Drafted, Message, Reset, Stop
from pipeline.trace import OFF, NoTrace
from pipeline.transport import Link

NO_LAWS = torch.empty(0, 0, dtype=torch.float64)


class NotedTree(TokenTree):
    """A tree that notes what is proposed below its tip."""

    def __init__(self, prompt: Sequence[int], limit: int) -> None:
        super().__init__(prompt, limit)
        self.unsent.clear()  # nobody is sent this tree
        self.noted: list[tuple[int, Proposal, float]] = []  # parent, proposal, log-probability of the path
        self.places: dict[int, int] = {}  # of the tip, 0, and of the first proposal of each guess, from 1

    def go_on(self, tokens: Sequence[int]) -> None:
        """Forget all guesses, and settle what is new of the text."""
        self.forget()
        for token in tokens:
            self.settle(token)
        self.unsent.clear()

    def begin(self) -> None:
        """What is proposed from now on is noted from the beginning."""
        self.noted, self.places = [], {self.tip: 0}

    def propose(self, parent: int, proposal: Proposal, score: float) -> int:
        node = super().propose(parent, proposal, score)
        self.noted.append((parent, proposal, score))
        self.places.setdefault(node, len(self.noted))
        return node


class Drafter:
    """A small model on a rank of its own. What it answers is a function of the messages that it has had.

    Its tree scores paths from the tip on, since all settled text was settled unguessed there.
    """

    def __init__(self, draft: Draft, trace: NoTrace = OFF, passes: Passes = read_all) -> None:
        self.trace = trace
        self._draft, self._passes = draft, passes
        self._tree = NotedTree([0], 1)

    def apply(self, msg: Message) -> Message:
        """Obey one message; what it returns goes back to rank 0."""
        return self._drafted(msg) if isinstance(msg, Ask) else msg

    def _drafted(self, ask: Ask) -> Drafted:
        """The tree of this small model below the text, as it would grow it on rank 0."""
        self._read(ask)
        tree, growth = self._tree, Growth(0, 0, 0).shaped(ask.shape)
        tree.begin()
        levels: list[int] = []
        for level in range(len(ask.shape)):
            with self.trace.span("grow", level=level):
                if not at_once(self._draft.grow(tree, growth), self._passes):
                    break
            levels.append(len(tree.noted) - sum(levels))
        parents = [tree.places[parent] for parent, _, _ in tree.noted]
        tokens = [proposal.token for _, proposal, _ in tree.noted]
        scores = [score for _, _, score in tree.noted]
        return Drafted(ask.number, levels, parents, tokens, scores, _laws(tree))

    def _read(self, ask: Ask) -> None:
        """Take over the text."""
        if ask.sent:
            assert len(self._tree.trunk) == ask.sent, f"{len(self._tree.trunk)} tokens are here, and not {ask.sent}"
            self._tree.go_on(ask.tokens)
        else:
            self._draft.reset()
            self._draft.begin(ask.sampler)
            self._tree = NotedTree(ask.tokens, ask.limit)


def _laws(tree: NotedTree) -> torch.Tensor:
    """The laws `[N, V]` that guesses were drawn from, in the order in which their parents come; empty if none was."""
    by_parent = {parent: proposal.law for parent, proposal, _ in tree.noted}
    laws = [law for law in by_parent.values() if law is not None]
    return torch.from_numpy(np.stack(laws)) if laws else NO_LAWS


def run_drafter(drafter: Drafter, link: Link) -> None:
    """The life of a rank that holds a small model."""
    msg: Message | None = None
    while not isinstance(msg, Stop):
        with drafter.trace.span("wait"):
            msg = link.recv()
        link.send(drafter.apply(msg))


class Replay:
    """The proposals of one small model, made once more in the tree of the request."""

    def __init__(self, drafted: Drafted, source: str, tree: TokenTree) -> None:
        self._tree, self._source = tree, source
        self._base = tree.nodes[tree.tip].score
        self._nodes = [tree.tip]  # by place
        self._rows = zip(drafted.parents, drafted.tokens, drafted.scores)
        parents = dict.fromkeys(drafted.parents)
        self._laws = dict(zip(parents, drafted.law_NV.numpy()))

    def propose(self, count: int) -> None:
        """Make the next so many proposals."""
        for parent, token, score in islice(self._rows, count):
            proposal = Proposal(self._source, token, self._laws.get(parent))
            node = self._tree.propose(self._nodes[parent], proposal, self._base + score)
            self._nodes.append(node)


class RemoteDraft(Draft):
    """The small models on ranks of their own as the draft of rank 0; `links` lead to one of them each.

    All grow their trees at the same time. What they proposed is proposed again level by level, and in each level by one
    after the other, as by small models side by side on rank 0. So the tree is the same, ids and scores included.
    """

    def __init__(self, links: Sequence[Any]) -> None:
        self.links = links
        self._numbers = count()
        self.reset()

    def start(self) -> None:
        """Wait until every small model is loaded."""
        self._round(Reset(0))

    def stop(self) -> None:
        """End the ranks of the small models."""
        self._round(Stop())

    @property
    def held(self) -> int:
        return 0

    def begin(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def reset(self) -> None:
        """Forget the request; the small models do so when the next one begins."""
        self._sampler = Sampler()
        self._sent = 0  # how many tokens of the text the small models know
        self._tip = -1  # below which the last tree was grown

    def another(self) -> RemoteDraft:
        raise AssertionError("small models on ranks of their own draft for one request at a time")

    def keep(self, length: int) -> None:
        self.reset()

    def grow(self, tree: TokenTree, growth: Growth, spares: Spares = always) -> Steps[bool]:
        """Add the trees of all small models below the tip, of the shape that `growth` has.

        A prompt that the target has not been sent goes first: the pipeline shall not wait while it is read here.
        """
        yield from ()  # no network is here
        assert growth.shape, "the trees of small models on ranks of their own have a shape"
        if tree.tip == self._tip or tree.room < 1 or len(tree.unsent) > 1:
            return False
        tokens = [tree.nodes[node].token for node in tree.trunk[self._sent:]]
        ask = Ask(next(self._numbers), self._sent, tokens, tree.limit, self._sampler, growth.shape)
        for link in self.links:
            link.send(ask)
        answers = [_answer(link, ask.number) for link in self.links]
        replays = [Replay(drafted, f"ssm{number}", tree) for number, drafted in enumerate(answers, 1)]
        for counts in zip_longest(*(drafted.levels for drafted in answers), fillvalue=0):
            for replay, proposals in zip(replays, counts):
                replay.propose(proposals)
        self._sent, self._tip = len(tree.trunk), tree.tip
        return True

    def _round(self, msg: Message) -> None:
        """Send a message to all, and drop what comes back before it."""
        for link in self.links:
            link.send(msg)
        for link in self.links:
            while not isinstance(link.recv(), type(msg)):
                pass


def _answer(link: Link, number: int) -> Drafted:
    """The answer to the question of this number; one to an earlier question, which was given up, is dropped."""
    while True:
        msg = link.recv()
        if isinstance(msg, Drafted) and msg.number == number:
            return msg
