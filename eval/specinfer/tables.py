"""Compute SpecInfer's Tables 1 to 3 for a target and a drafter, and print them with the figures of the paper.

This module knows nothing about time. The paper's "stochastic decoding" means texts that are sampled from the target.
"""
from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple, Sequence, Tuple, Union

import numpy as np

from config.cli import shown_path
from config.keys import read_keys
from eval.pair_keys import MOST_CHILDREN, TablesConfig
from eval.pairs import Model, answer, open_model, prompts_of
from eval.tokens_per_pass import NumberArray, among_best, among_drawn, by_mss, passes, ranks
from launch.progress import ProgressBar
from model.rules import laws
from model.sample import Sampler

COMMAND = "python3 -m scripts.bench specinfer"
ALL = "all"
GREEDY, BEST, DRAWN, MSS = "greedy", "best", "drawn", "mss"
ABOUT = {
    GREEDY: "temperature 0",
    BEST: "sampled texts; the k best guesses (naive)",
    DRAWN: "sampled texts; k sampled guesses, naive sampling",
    MSS: "sampled texts; k sampled guesses, multi-step sampling"}
PUBLISHED = "paper: LLaMA-7B with LLaMA-68M on its own texts; ours are other models and texts"
# The paper's figures by table, way of decoding and data set, those of Table 1 in percent. The paper does not specify
# which of our three kinds its stochastic decoding is.
PAPER = Path(__file__).with_name("published.csv")
HEADING = ("k", *(f"{k}" for k in range(1, MOST_CHILDREN + 1)))
FiguresBySet = Mapping[str, Union[Sequence[float], NumberArray]]  # data set -> figures, usually for k from 1 on


class Counts(NamedTuple):
    """The counts along some texts of a data set, of one kind, for k from 1 on."""

    num_tokens: int  # number of tokens that could be guessed
    accepted_K: NumberArray
    passes_K: NumberArray

    @property
    def percent(self) -> NumberArray:
        """The percentage of accepted tokens, `[K]`."""
        return 100 * self.accepted_K / self.num_tokens

    @property
    def verified(self) -> NumberArray:
        """Tokens per pass, `[K]`."""
        return self.num_tokens / self.passes_K


ModelPair = Tuple[Model, Model]  # target and drafter
PromptAndText = Tuple[Sequence[int], Sequence[int]]  # a prompt, and the text after it
CountsBySet = Mapping[str, Mapping[str, Counts]]  # data set -> kind -> counts


def published(table: int) -> dict[str, dict[str, Sequence[float]]]:
    """Return the rows of one of the paper's tables: way of decoding -> data set -> figures."""
    figures_by_way: dict[str, dict[str, Sequence[float]]] = {}
    with PAPER.open(encoding="utf-8") as csv_file:
        for table_number, way, set_name, *figures in csv.reader(csv_file):
            if table_number == f"{table}":
                figures_by_way.setdefault(way, {})[set_name] = list(map(float, figures))
    return figures_by_way


def specinfer(argv: list[str]) -> int:
    """Run the command `python3 -m scripts.bench specinfer`; return its exit code."""
    config = read_keys(argv, TablesConfig, COMMAND)
    target = open_model(config.target, config)
    drafter = open_model(config.draft, config, target)

    counts_by_set = {name: of_set(name, (target, drafter), config) for name in config.chosen_sets}
    kinds = list(next(iter(counts_by_set.values())))
    if len(counts_by_set) > 1:
        set_counts = list(counts_by_set.values())
        counts_by_set[ALL] = {kind: total([counts[kind] for counts in set_counts]) for kind in kinds}

    print(f"target {shown_path(config.target)}, drafter {shown_path(config.draft)}, at most {config.max_new_tokens} "
          f"tokens per text, {config.num_examples or 'all'} prompts of each set\n"
          f"sampling: temperature {config.temperature:g}, top-p {config.top_p:g}, seed {config.seed}\n{PUBLISHED}")
    print("\n".join(report(counts_by_set, kinds, config)))
    return 0


def of_set(name: str, pair: ModelPair, config: TablesConfig) -> dict[str, Counts]:
    """Return the counts of each kind along the target's texts for the prompts of a data set.

    Raises ValueError if no text has a token that could be guessed.
    """
    tree_widths = [config.widths(k) for k in range(1, MOST_CHILDREN + 1)]
    max_width = max(map(max, tree_widths))
    counts_by_kind: dict[str, list[Counts]] = {}
    prompts = prompts_of(name, config, pair)
    progress = ProgressBar(prompts, desc=name, leave=False, file=sys.stderr)
    for prompt_number, prompt in enumerate(progress):
        samplers = [Sampler()]
        if config.do_sample:
            samplers.append(Sampler(config.temperature, config.top_p, seed=config.seed + prompt_number))

        for sampler in samplers:
            text = answer(pair[0], prompt, config.max_new_tokens, sampler)
            for kind, accepted_KN in along((prompt, text), pair, sampler, max_width).items():
                accepted_K = accepted_KN[:MOST_CHILDREN, 1:].sum(1)
                passes_K = np.array([passes(accepted_KN, widths) for widths in tree_widths])
                text_counts = Counts(len(text) - 1, accepted_K, passes_K)
                counts_by_kind.setdefault(kind, []).append(text_counts)

    totals = {kind: total(counts) for kind, counts in counts_by_kind.items()}
    if not all(counts.num_tokens for counts in totals.values()):
        raise ValueError(f"every text of the target for {name} ends with its first token, so nothing can be guessed: "
                         "choose other sets=, or another template=")
    return totals


def total(counts: Sequence[Counts]) -> Counts:
    """Return the sum of the counts."""
    return Counts._make(map(sum, zip(*counts)))


def along(prompt_and_text: PromptAndText, pair: ModelPair, sampler: Sampler,
          max_width: int) -> dict[str, NumberArray]:
    """Return, for each kind that applies to this sampler, the acceptance probabilities of a text's tokens, `[K, N]`."""
    target_NV, draft_NV = (model.logits(*prompt_and_text) for model in pair)
    text = prompt_and_text[1]
    best_KN = among_best(ranks(draft_NV, text), max_width)
    if not sampler.temperature:
        return {GREEDY: best_KN}

    target_law_NV, draft_law_NV = laws(sampler, target_NV), laws(sampler, draft_NV)
    mss_KN = by_mss(target_law_NV, draft_law_NV, text, max_width)
    return {BEST: best_KN, DRAWN: among_drawn(draft_law_NV, text, max_width), MSS: mss_KN}


def report(counts_by_set: CountsBySet, kinds: Sequence[str], config: TablesConfig) -> Iterator[str]:
    """Yield the lines of the three tables."""
    yield "\nTable 1: the target's token is among k guesses of the drafter, % of the target's tokens"
    for kind in kinds:
        percentages = {name: counts[kind].percent for name, counts in counts_by_set.items()}
        yield from rows(f"ours, {ABOUT[kind]}", percentages, 1)
    for way, paper_figures in published(1).items():
        yield from rows(f"paper, {way}", paper_figures, 0)

    yield f"\nTable 2: verified tokens per pass of the target, its own included; trees <{config.expansion}>"
    for kind in kinds:
        verified_tokens = {name: counts[kind].verified for name, counts in counts_by_set.items()}
        yield from rows(f"ours, {ABOUT[kind]}", verified_tokens, 2)
    for way, paper_figures in published(2).items():
        yield from rows(f"paper, <1,1,k,1,1,1,1,1>, {way}", paper_figures, 2)

    if config.do_sample:
        widest_tree = config.expansion.replace("k", HEADING[-1])
        yield f"\nTable 3: tokens per pass by naive and by multi-step sampling; trees <{widest_tree}>"
        our_figures: FiguresBySet = {
            name: (counts[DRAWN].verified[-1], counts[MSS].verified[-1])
            for name, counts in counts_by_set.items()}
        figures_by_title = {"ours, sampled texts and guesses": our_figures,
                            "paper, <1,1,5,1,1,1,1,1>": published(3)["stochastic"]}
        for title, figures_by_set in figures_by_title.items():
            ratios = {name: (naive, multi, multi / naive)
                      for name, (naive, multi) in figures_by_set.items()}
            yield from rows(title, ratios, 2, ["", "naive", "multi", "ratio"])


def rows(title: str, figures_by_set: FiguresBySet, num_digits: int,
         heading: Sequence[str] = HEADING) -> Iterator[str]:
    """Yield the title, the heading, and one line of figures for each data set."""
    yield f"  {title}"
    lines = [heading]
    for name, figures in figures_by_set.items():
        lines.append([name[-13:], *(f"{figure:.{num_digits}f}" for figure in figures)])
    for name, *cells in lines:
        yield f"    {name:<14}" + "".join(f"{cell:>8}" for cell in cells)
