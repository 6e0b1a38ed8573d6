"""The keys of measurements of whole models; names and defaults follow the experiments of the paper on DSI."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Iterator

from config.forms import DEVICE
from config.keys import Checked, key
from config.presets import TOY
from config.questions import bundled
from config.run_config import NUMBER_TYPES, SEED, TEMPLATES
from config.trees import wrong_widths
from config.values import COUNT, Choices, Range, listed
from eval.keys import SETS, wrong_list
from eval.prompts import problems as problems_of_sets

TARGET = str(TOY / "llama")  # the bundled models
TOY_DRAFTS = tuple(str(TOY / name) for name in ("draft_a", "draft_b"))
MOST_CHILDREN = 5  # children of a guess in SpecInfer's tables


@dataclass(frozen=True)
class MeasureKeys(Checked):
    """The keys of every measurement of whole models."""

    ASKED: ClassVar[str] = "target"  # the key of the model that gets the prompts

    sets: str = key(SETS,
        "NAME, or FORMAT:FILE of cnn_dailymail, alpaca, mbpp, mbpp_docstring, openai_humaneval (commas)",
        heading="The prompts of the models")
    data: str = key("", "folder of the sets with a NAME; empty: the bundled ones", names_file=True)
    num_examples: int = key(5, "prompts of each set, drawn with the seed; 0: all", Range(1, COUNT, {0: "all"}))
    template: str = key("auto", "for the questions of a set with a NAME, as the key template of a run",
        Choices(TEMPLATES.names))
    max_new_tokens: int = key(64, "largest number of tokens after a prompt", Range(1, 1 << 20))

    do_sample: bool = key(False, "draw it; else the likeliest one is taken", heading="How a token is chosen")
    temperature: float = key(1.0, "of drawing", Range(0, 1000))
    top_p: float = key(1.0, "draw among the likeliest tokens that have this probability together", Range(0, 1))
    seed: int = key(42, "of all random draws", SEED)

    dtype: str = key("auto", "number type: float64, float32, float16, bfloat16; auto: float16 on CUDA, else float32",
        NUMBER_TYPES, heading="Where it runs")
    device: str = key("auto", "cpu, cuda or cuda:N; auto: CUDA if there is one", DEVICE)
    threads: int = key(0, "for arithmetic; 0: as torch chooses", Range(1, 1024, {0: "as torch chooses"}))

    @property
    def chosen_sets(self) -> tuple[str, ...]:
        """The names of the data sets."""
        return listed(self.sets)

    @property
    def folder(self) -> str:
        """The folder of the sets with a NAME."""
        return self.data or str(bundled(getattr(self, self.ASKED)))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from wrong_list("sets", self.sets, self.chosen_sets)
        yield from problems_of_sets(self.chosen_sets)
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if self.do_sample and not value:
                yield f"{name}=0 draws nothing: give a {name} above 0, or do_sample=false for the likeliest token"
            if not self.do_sample and value != 1:
                yield f"{name}={value:g} counts only where tokens are drawn: add do_sample=true, or leave it out"


@dataclass(frozen=True)
class TablesConfig(MeasureKeys):
    """SpecInfer's tables for a target and a drafter, with the paper's own figures below.

    Table 1: how often the target's token is among a drafter's best 1 to 5. Table 2: the tokens that a pass of the
    target verifies if one step of the tree has 1 to 5 guesses. Table 3: naive sampling compared with multi-step
    speculative sampling. All are counted along texts of the target, at temperature 0 and sampled.
    """

    EXAMPLES: ClassVar[str] = """\
  python3 -m scripts.bench specinfer
  python3 -m scripts.bench specinfer draft=toy/draft_b sets=humaneval,qa num_examples=20
  python3 -m scripts.bench specinfer target=DIR draft=DIR temperature=0.8 expansion=k,1,1,1"""

    target: str = key(TARGET, "folder of the target, a model in Hugging Face form",
        heading="The models that are compared", names_file=True)
    draft: str = key(TOY_DRAFTS[0], "folder of the drafter", names_file=True)

    expansion: str = key("1,1,k,1,1,1,1,1", "children of each guess, step by step; k is 1 to 5",
        heading="The trees of Tables 2 and 3")

    do_sample: bool = key(True, "add sampled texts; else only those of the likeliest tokens",
        heading="How a token is chosen")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        widths_problem = wrong_widths(self.expansion.replace("k", str(MOST_CHILDREN)))
        if widths_problem or "k" not in self.expansion:
            widths_problem = widths_problem or "has no step that is varied: write k for it, as 1,1,k,1,1,1,1,1"
            yield f"expansion={self.expansion} {widths_problem}"

        if self.max_new_tokens < 2:
            yield "max_new_tokens=1 leaves nothing to be guessed: give 2 or more"

    def widths(self, k: int) -> list[int]:
        """Return the widths of the tree with `k` children in its varied step."""
        expansion_text = self.expansion.replace("k", str(k))
        return list(map(int, expansion_text.split(",")))
