"""What drafters are worth: tokens that a pass of the target verifies along its own texts to prompts that were held out.

It knows nothing about training.
"""
from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Mapping, Sequence

from tqdm import tqdm

from eval.pair_keys import Measured
from eval.pairs import Model, answer, open_model
from eval.tokens_per_pass import Array, merged_passes, ranks
from model.sample import Sampler
from train.ssm.texts import Prompts, Text

Figures = Dict[str, Dict[str, float]]  # name -> shape of a tree -> tokens per pass
Ranks = List[Array]  # of the tokens of each text, [N]
Drafters = Sequence[Ranks]


class Judge:
    """The target's texts, of `limit` tokens at most, and what drafters foresee of them."""

    def __init__(self, target: Model, prompts: Prompts, limit: int, sampler: Sampler,
                 measured: Measured) -> None:
        self.measured = measured
        shown = tqdm(prompts, desc="held out", unit="text", leave=False)
        self.texts = [Text(prompt, answer(target, prompt, limit, sampler)) for prompt in shown]

    def ranks(self, folder: Path) -> Ranks:
        """How many tokens the drafter in a folder finds likelier than those of the texts."""
        whole = open_model(str(folder), self.measured).whole
        found = []
        for prompt, ids in self.texts:
            read = [*prompt, *ids[:-1]]
            logits_NV = whole.logits(read, whole.cache(len(read)), len(ids))
            found.append(ranks(logits_NV, ids))
        return found

    def verified(self, drafters: Drafters, expansion: str) -> float:
        """Tokens that a pass verifies with merged trees of these drafters, whose ranks are given."""
        widths = list(map(int, expansion.split(",")))
        tokens = sum(len(text.ids) - 1 for text in self.texts)
        passes = sum(merged_passes(rank_DN, widths) for rank_DN in zip(*drafters))
        return tokens / passes if passes else 1.0

    def figures(self, compared: Mapping[str, Drafters], shapes: Sequence[str]) -> Figures:
        """`verified` of each of those compared, by the shape of a tree."""
        found: Figures = {name: {} for name in compared}
        for name, drafters in compared.items():
            for shape in shapes:
                found[name][shape] = round(self.verified(drafters, shape), 3)
        return found
