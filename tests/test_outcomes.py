"""What is drafted while a verification is under way: below all its outcomes (SSD), or one chain (PEARL)."""
import pytest

from config.run_config import Growth
from model.drafts.mixture import Mixture, levels_left
from model.drafts.network import at_once
from model.tree import TokenTree
from pipeline.answers import Request
from pipeline.messages import Segment
from tests.test_mixture import Table
from tests.test_prunes import PROMPT
from tests.tiny import TINY, Oracle, pipeline

NEW = 40


def test_levels_fall_by_the_depth_of_an_outcome_and_by_its_rank():
    tree = TokenTree([1], max_tokens=100)
    chain = tree.add(tree.tip, 10, -0.1)
    deeper = tree.add(chain, 11, -0.2)
    assert tree.cut(3) == [tree.tip, chain, deeper]
    at_tip = [tree.add(tree.tip, token, -token / 10)
              for token in (20, 21, 22, 23)]
    behind = [tree.add(deeper, token, -token / 10) for token in (30, 31)]
    below = tree.add(at_tip[0], 40, -3.0)
    left = levels_left(tree, 10)

    assert [left[node] for node in at_tip] == [10, 8, 6, 5]  # four fifths from rank to rank
    assert [left[node] for node in behind] == [9, 7]  # and 0.95 of that for each place further down
    assert left[below] == 9  # one level of its outcome's is used
    assert chain not in left and deeper not in left  # they were sent, so what is behind them is always of use


@pytest.mark.parametrize("seed", range(5))
def test_growth_with_a_fan_goes_on_below_every_outcome_as_deep_as_it_may(seed):
    tree = TokenTree([3, 1, 4], max_tokens=64)
    draft = Mixture([Table(seed), Table(seed + 100, "other")])
    growth = Growth(1000, 1000, 3, None, -9.0, anywhere=True, outcome_levels=3)
    while at_once(draft.grow(tree, Growth(1000, 1, 3, None, -9.0, anywhere=True))):
        pass
    sent = tree.cut(4)
    while at_once(draft.grow(tree, growth)):
        pass
    left = levels_left(tree, growth.outcome_levels)
    assert min(left.values()) == 0, "nothing is drafted below what has no level left"
    read = set(draft._predictions) & tree.live
    worthy = {node for node in tree.live
              if tree.nodes[node].score >= tree.nodes[tree.tip].score - 9.0}
    unsent = read.difference(sent)

    assert unsent and all(left[node] > 0 for node in unsent)
    assert {node for node in worthy if left.get(node, 1) > 0} - read == set(), "some outcome was left out"


def traffic(strategy):
    """The rows of each segment after the prompt's, and how many levels were drafted since the last answer before it."""
    events = []

    def wrap(link):
        send = link.send

        def sent(message):
            if isinstance(message, Segment):
                events.append(("send", len(message.nodes)))
            send(message)
        link.send = sent
        return link

    class Noted(Oracle):
        def grow(self, tree, growth, *worth_drafting):
            grew = yield from super().grow(tree, growth, *worth_drafting)
            events.append(("grow", grew))
            return grew

        def another(self):
            return Noted(self.tokens, self.vocab)
    text = TINY.text(PROMPT, NEW, Request(PROMPT).sampler)
    first = True

    def once(link):
        nonlocal first
        wrapped, first = (wrap(link), False) if first else (link, False)
        return wrapped
    with pipeline(TINY, 2, strategy, Noted(PROMPT + text), wrap=once) as decoder:
        target_of = decoder.ring.target_of

        class Heard(target_of):
            def _judge(self):
                super()._judge()
                events.append(("answer", 0))
        decoder.ring.target_of = Heard
        answer = decoder.complete(Request(PROMPT, max_new_tokens=NEW))
    assert answer.token_ids == text
    return events


@pytest.mark.parametrize("strategy", ["pearl", "ssd"])
def test_one_verification_is_under_way_at_a_time(strategy):
    kinds = [kind for kind, _ in traffic(strategy) if kind != "grow"]
    prompt = kinds.index("answer")  # its chunks follow each other
    alternating = kinds[2 * prompt:]
    assert len(alternating) > 8
    assert alternating == ["send", "answer"] * (len(alternating) // 2)


@pytest.mark.parametrize("strategy", ["pearl", "ssd"])
def test_what_was_drafted_meanwhile_leaves_at_once(strategy):
    events = traffic(strategy)
    behind = [events[place + 1]
              for place, (kind, _) in enumerate(events[:-1]) if kind == "answer"]
    assert any(kind == "send" and rows > 1 for kind, rows in behind), "no guess left with the answer before it"
    if strategy == "pearl":
        assert ("send", 1) in behind, "after a miss the tip leaves alone"
    else:
        assert any(kind == "grow" for kind, _ in behind), "after a miss a tree is drafted first"
