"""One ring serves several requests, each through a target of its own."""
import sys

import pytest

from model.sample import Sampler
from pipeline.answers import Request
from pipeline.strategies import STRATEGIES
from tests.saved import run_program
from tests.tiny import DEEP, TINY, holds_caches, pipeline

NEW = 12
PROMPTS = [[5, 17, 40, 3, 28, 11, 9], [8, 1, 33], [2, 31, 7, 7, 19, 44, 12, 30, 21, 6, 4, 4, 50]]
SAMPLERS = [Sampler(), Sampler(1.0, seed=4), Sampler(0.7, top_k=20, seed=9)]


def by_turns(decoder, prompts=PROMPTS, samplers=SAMPLERS, new=NEW):
    """The texts of several requests that are under way at once; of each stream in turn one piece is read."""
    begun = [decoder.submit(Request(prompt, sampler, new)) for prompt, sampler in zip(prompts, samplers)]
    streams = [stream for _, stream in begun]
    while streams:
        streams = [stream for stream in streams if next(stream, None) is not None]
    return [answer.token_ids for answer, _ in begun]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_that_run_by_turns_write_what_each_writes_alone(strategy):
    with pipeline(TINY, 3, strategy, TINY.eagle()) as decoder:
        assert by_turns(decoder) == [TINY.text(prompt, NEW, sampler) for prompt, sampler in zip(PROMPTS, SAMPLERS)]
        assert not holds_caches(decoder)


@pytest.mark.parametrize("strategy", ["streaming", "continuous", "serial"])
@pytest.mark.parametrize("names",
                         ["eagle", "drifting+twin+suffix", "suffix", "eagle3+twin"])
def test_requests_with_mixtures_that_run_by_turns_write_what_each_writes_alone(strategy, names):
    tiny = DEEP if "eagle3" in names else TINY
    wanted = [tiny.text(prompt, NEW, sampler) for prompt, sampler in zip(PROMPTS, SAMPLERS)]
    with pipeline(tiny, 3, strategy, tiny.mixture(names)) as decoder:
        assert by_turns(decoder) == wanted


def test_strategies_and_what_they_ask_of_others_can_be_read_without_torch():
    code = "import sys, pipeline.strategies; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert run_program(sys.executable, "-c", code).returncode == 0
