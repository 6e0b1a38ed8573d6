"""One ring serves several requests, each through a target of its own."""
from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from config.presets import ROOT
from model.sample import Sampler
from model.tree import TokenTree
from pipeline.strategies import STRATEGIES
from tests.tiny import TREE, Tiny, pipeline

TINY = Tiny()
NEW = 20
PROMPTS = [[5, 17, 40, 3, 28, 11, 9], [8, 1, 33], [2, 31, 7, 7, 19, 44, 12, 30, 21, 6, 4, 4, 50]]
SAMPLERS = [Sampler(), Sampler(1.0, seed=4), Sampler(0.7, top_k=20, seed=9)]


def by_turns(ring, prompts, strategy, make=TINY.eagle):
    """The texts of several requests whose strategies run by turns; the ring is listened to when all of them wait."""
    trees = [TokenTree(prompt, len(prompt) + NEW, ring.ids) for prompt in prompts]
    drafts = [make() for _ in prompts]
    targets = [ring.open(tree, sampler) for tree, sampler in zip(trees, SAMPLERS)]
    for draft, sampler in zip(drafts, SAMPLERS):
        draft.begin(sampler)
    running = {target: STRATEGIES[strategy](tree, target, draft, TREE)
               for tree, target, draft in zip(trees, targets, drafts)}
    while running:
        waiting = 0
        for target, steps in list(running.items()):
            waiting += not next(steps)
            if target.tree.room <= 0:
                del running[target]
                target.close()
        if running and waiting >= len(running) and not any(target.ready for target in running):
            ring.listen()
    return [tree.tokens[len(prompt):][:NEW] for tree, prompt in zip(trees, prompts)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_that_run_by_turns_write_what_each_writes_alone(strategy):
    wanted = [TINY.text(prompt, NEW, sampler) for prompt, sampler in zip(PROMPTS, SAMPLERS)]
    with pipeline(TINY, 3, "continuous") as decoder:
        assert by_turns(decoder.ring, PROMPTS, strategy) == wanted
        assert not any(stage.caches for stage in decoder.stages)


@pytest.mark.parametrize("strategy", ["streaming", "continuous"])
def test_requests_with_mixtures_that_run_by_turns_write_what_each_writes_alone(strategy):
    wanted = [TINY.text(prompt, NEW, sampler) for prompt, sampler in zip(PROMPTS, SAMPLERS)]
    for names in (["eagle"], ["drifting", "twin", "suffix"], ["suffix"]):
        with pipeline(TINY, 3, "continuous") as decoder:
            assert by_turns(decoder.ring, PROMPTS, strategy, partial(TINY.mixture, *names)) == wanted


def test_strategies_and_what_they_ask_of_others_can_be_read_without_torch():
    code = "import sys, pipeline.strategies; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
