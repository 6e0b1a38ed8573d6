"""SpecInfer's Tables 1 to 3 for a target and a drafter, with the figures of the paper below.

It knows nothing about time. What the paper calls stochastic decoding is a text that the target draws.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Iterator, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
from torch import Tensor
from tqdm import tqdm

from config.keys import read_keys
from eval.pair_keys import WIDEST, SpecInferConfig
from eval.pairs import Model, answer, check_pair, open_model, prompts_of
from eval.tokens_per_pass import Array, among_best, among_drawn, by_mss, passes, ranks
from model.rules import Law, laws
from model.sample import Sampler

COMMAND = "python -m scripts.bench specinfer"
ALL = "all"
GREEDY, BEST, DRAWN, MSS = "greedy", "best", "drawn", "mss"
ABOUT = {
    GREEDY: "temperature 0",
    BEST: "drawn texts; the best k are guessed (naive)",
    DRAWN: "drawn texts; k guesses are drawn, naive sampling",
    MSS: "drawn texts; k guesses are drawn, multi-step sampling",
}
PUBLISHED = "paper: LLaMA-7B with LLaMA-68M on its own texts, so other models and texts than ours"
# The paper does not say of which of our three kinds its texts of stochastic decoding are. Table 1 is in percent.
TABLE_1 = """
greedy     Alpaca   68 77 81 84 85
greedy     CP       69 79 83 86 87
greedy     WebQA    62 72 77 80 82
greedy     CIP      70 81 85 88 89
greedy     PIQA     63 75 79 83 85
stochastic Alpaca   54 81 91 95 97
stochastic CP       56 82 92 95 97
stochastic WebQA    52 80 90 94 96
stochastic CIP      57 84 92 95 97
stochastic PIQA     55 82 91 95 97
"""
TABLE_2 = """
greedy     Alpaca   2.95 3.07 3.21 3.33 3.43
greedy     CP       2.58 3.24 3.46 3.59 3.69
greedy     WebQA    2.27 2.69 2.86 2.98 3.07
greedy     CIP      2.73 3.40 3.62 3.79 3.91
greedy     PIQA     2.18 2.80 2.97 3.10 3.21
stochastic Alpaca   1.79 2.11 2.26 2.32 2.38
stochastic CP       1.69 1.99 2.15 2.23 2.28
stochastic WebQA    1.64 1.93 2.08 2.15 2.21
stochastic CIP      1.72 2.05 2.19 2.28 2.29
stochastic PIQA     1.67 1.93 2.08 2.15 2.21
"""
TABLE_3 = """
stochastic Alpaca   1.87 2.38
stochastic CP       1.80 2.28
stochastic WebQA    1.73 2.21
stochastic CIP      1.79 2.29
stochastic PIQA     1.73 2.21
"""
Figures = Mapping[str, Sequence[float]]  # data set -> figures for k from 1 on


def published(table: str) -> dict[str, Figures]:
    """The rows of one of the paper's tables by its ways of decoding."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in table.strip().splitlines():
        way, name, *figures = line.split()
        found.setdefault(way, {})[name] = [float(figure) for figure in figures]
    return dict(found)


class Text(NamedTuple):
    """A prompt, and what the target wrote behind it."""

    prompt: Sequence[int]
    ids: Sequence[int]


@dataclass
class Counts:
    """What is counted along the texts of one data set, in one way, for k from 1 on."""

    tokens: int = 0  # that could be guessed
    accepted_K: Array = field(default_factory=lambda: np.zeros(WIDEST))
    passes_K: Array = field(default_factory=lambda: np.zeros(WIDEST))

    def add(self, accepted_KN: Array, widths: Sequence[Sequence[int]]) -> None:
        """Add a text, whose tokens are accepted with these probabilities from 1 to the greatest number of guesses."""
        self.tokens += accepted_KN.shape[1] - 1
        self.accepted_K = self.accepted_K + accepted_KN[:WIDEST, 1:].sum(1)
        self.passes_K = self.passes_K + [passes(accepted_KN, one) for one in widths]

    @property
    def percent(self) -> list[float]:
        """How often a token is accepted, `[K]`."""
        return (100 * self.accepted_K / self.tokens).tolist()  # type: ignore[no-any-return]

    @property
    def verified(self) -> list[float]:
        """Tokens per pass, `[K]`."""
        return (self.tokens / self.passes_K).tolist()  # type: ignore[no-any-return]


Pair = Tuple[Model, Model]  # target and drafter
Accepted = Tuple[str, Array]  # a kind, and how probably each token of a text is accepted, [K, N]
Found = Mapping[str, Mapping[str, Counts]]  # kind -> data set -> what was counted


def specinfer(argv: list[str]) -> int:
    """The command `python -m scripts.bench specinfer`; its exit code."""
    config = read_keys(argv, SpecInferConfig, COMMAND)
    target, drafter = (open_model(folder, config) for folder in (config.target, config.draft))
    check_pair(target, drafter)
    kinds = (GREEDY, BEST, DRAWN, MSS) if config.do_sample else (GREEDY,)
    found: dict[str, dict[str, Counts]] = {kind: {} for kind in kinds}
    for name in config.chosen_sets:
        for kind, counts in of_set(name, (target, drafter), config).items():
            found[kind][name] = counts
    if len(config.chosen_sets) > 1:
        for by_set in found.values():
            every = list(by_set.values())
            accepted_K = np.sum([one.accepted_K for one in every], 0)
            passes_K = np.sum([one.passes_K for one in every], 0)
            by_set[ALL] = Counts(sum(one.tokens for one in every), accepted_K, passes_K)
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens a text, "
          f"{config.num_examples or 'all'} prompts of each set")
    print(f"drawn: temperature {config.temperature:g}, top-p {config.top_p:g}, seed {config.seed}")
    print(PUBLISHED)
    print("\n".join(report(found, config)))
    return 0


def of_set(name: str, pair: Pair, config: SpecInferConfig) -> dict[str, Counts]:
    """What is counted along the target's texts to the prompts of a data set, kind by kind.

    Raises ValueError if none of the texts has a token that could be guessed.
    """
    widths = [config.widths(k) for k in range(1, WIDEST + 1)]
    most = max(map(max, widths))
    found: dict[str, Counts] = {}
    prompts = prompts_of(name, config, pair)
    bar = tqdm(prompts, desc=name, leave=False, file=sys.stderr)
    for number, prompt in enumerate(bar):
        drawn = Sampler(config.temperature, config.top_p, seed=config.seed + number)
        for sampler in (Sampler(), drawn) if config.do_sample else (Sampler(),):
            text = Text(prompt, answer(pair[0], prompt, config.max_new_tokens, sampler))
            for kind, accepted_KN in along(text, pair, sampler, most):
                found.setdefault(kind, Counts()).add(accepted_KN, widths)
    if not all(counts.tokens for counts in found.values()):
        raise ValueError(f"the target ends every text of {name} with its first token, so nothing can be guessed: "
                         "choose other sets=, or another template=")
    return found


def along(text: Text, pair: Pair, sampler: Sampler, most: int) -> Iterator[Accepted]:
    """The kinds that a text of this sampler shows, and how probably its tokens are accepted in each, `[K, N]`."""
    target, drafter = pair
    theirs_NV = logits(drafter, text)
    best_KN = among_best(ranks(theirs_NV, text.ids), most)
    if not sampler.temperature:
        yield GREEDY, best_KN
        return
    drawn_NV: Law = laws(sampler, theirs_NV)
    yield BEST, best_KN
    yield DRAWN, among_drawn(drawn_NV, text.ids, most)
    yield MSS, by_mss(laws(sampler, logits(target, text)), drawn_NV, text.ids, most)


def logits(model: Model, text: Text) -> Tensor:
    """What a model says at each token of a text, `[N, V]`; it reads all of it in one pass."""
    read = [*text.prompt, *text.ids[:-1]]
    cache = model.whole.cache(len(read))
    return model.whole.logits(read, cache, len(text.ids))


def report(found: Found, config: SpecInferConfig) -> Iterator[str]:
    """The lines of the three tables."""
    yield "\nTable 1: the target's token is among k guesses of the drafter, % of the tokens that it wrote"
    for kind, by_set in found.items():
        percent = {name: counts.percent for name, counts in by_set.items()}
        yield from rows(f"ours, {ABOUT[kind]}", percent, 1)
    for way, paper in published(TABLE_1).items():
        yield from rows(f"paper, {way}", paper, 0)
    yield f"\nTable 2: tokens that a pass of the target verifies, its own included; trees <{config.expansion}>"
    for kind, by_set in found.items():
        verified = {name: counts.verified for name, counts in by_set.items()}
        yield from rows(f"ours, {ABOUT[kind]}", verified, 2)
    for way, paper in published(TABLE_2).items():
        yield from rows(f"paper, <1,1,k,1,1,1,1,1>, {way}", paper, 2)
    if config.do_sample:
        tree = config.expansion.replace("k", str(WIDEST))
        yield f"\nTable 3: tokens per pass by naive and by multi-step sampling; trees <{tree}>"
        ours = {}
        for name, naive in found[DRAWN].items():
            multi = found[MSS][name]
            ours[name] = naive.verified[-1], multi.verified[-1]
        yield from ratios("ours, drawn texts and guesses", ours)
        yield from ratios("paper, <1,1,5,1,1,1,1,1>", published(TABLE_3)["stochastic"])


def rows(title: str, by_set: Figures, digits: int) -> Iterator[str]:
    """A line for each data set, with the figures for k from 1 on."""
    yield f"  {title}"
    yield f"    {'k':<14}" + "".join(f"{k:>8}" for k in range(1, WIDEST + 1))
    for name, figures in by_set.items():
        yield f"    {name[-13:]:<14}" + "".join(f"{figure:>8.{digits}f}" for figure in figures)


def ratios(title: str, by_set: Figures) -> Iterator[str]:
    """A line for each data set, with both figures and how much the second one is of the first."""
    yield f"  {title}"
    yield f"    {'':<14}{'naive':>8}{'multi':>8}{'ratio':>8}"
    for name, (naive, multi) in by_set.items():
        yield f"    {name[-13:]:<14}{naive:>8.2f}{multi:>8.2f}{multi / naive:>8.2f}"
