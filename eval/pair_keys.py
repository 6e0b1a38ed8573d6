"""What is measured of whole models: the acceptance rate of a pair, the pace of one, and both of pairs in a table.

It knows nothing about how anything is measured. Names and defaults follow the paper on DSI and its own experiments,
where they fit small models on a processor, too.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Iterator, Mapping, NamedTuple, Sequence

from config.drafts import listed
from config.files import check_output, fits, whole
from config.presets import TOY
from config.ranges import WHOLE, Checked, Range, outside, unknown
from config.run_config import CHOICES, DEVICE
from config.run_config import RANGES as OF_RUNS
from config.trees import wrong_widths
from eval.prompts import problems as problems_of_sets

COUNT = 1_000_000_000  # the most of anything that is counted
RANGES = {  # of the keys of Measured that are numbers
    "num_examples": Range(1, COUNT, {0: "all"}),
    "max_new_tokens": Range(1, 1 << 20),
    "temperature": Range(0, 1000), "top_p": Range(0, 1), "seed": OF_RUNS["seed"],
    "threads": Range(1, 1024, {0: "as torch chooses"}),
}
TIMED = {"repeats": Range(1, 1_000_000), "context": Range(0, 1 << 20)}
SERVERS = {"num_target_servers": Range(1, COUNT)}
ROWS = Range(1, 65536)
SETS = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the bundled data sets
TARGET = str(TOY / "llama")  # the bundled models
DRAFTS = tuple(str(TOY / name) for name in ("draft_a", "draft_b"))
PICTURES = (".png", ".svg", ".pdf")
WIDEST = 5  # children of a guess in SpecInfer's tables
RECORD = {"target": str, "draft": str, "set": str}


@dataclass(frozen=True)
class Measured(Checked):
    """What every measurement of whole models takes."""

    PATHS: ClassVar[Sequence[str]] = (
        "target", "draft", "model", "data", "traces", "picture", "records", "output")

    # What the models are asked
    sets: str = SETS  # NAME, or FORMAT:FILE of cnn_dailymail, alpaca, mbpp, mbpp_docstring, openai_humaneval (commas)
    data: str = ""  # folder of the sets with a NAME; empty: the bundled ones
    num_examples: int = 5  # prompts of each set, drawn with the seed; 0: all
    template: str = "auto"  # around the questions of a set with a NAME, as the key template of a run
    max_new_tokens: int = 64  # that are written behind a prompt, at most

    # How a token is chosen
    do_sample: bool = False  # draw it; else the likeliest one is taken
    temperature: float = 1.0  # of drawing
    top_p: float = 1.0  # draw among the likeliest tokens that have this probability together
    seed: int = 42  # of everything that is drawn

    # Where it runs
    dtype: str = "auto"  # number type: float64, float32, float16, bfloat16; auto: float16 on CUDA, else float32
    device: str = "auto"  # cpu, cuda or cuda:N; auto: CUDA if there is one
    threads: int = 0  # for arithmetic; 0: as torch chooses

    @property
    def chosen_sets(self) -> tuple[str, ...]:
        """The names of the data sets."""
        return listed(self.sets)

    def problems(self) -> Iterator[str]:
        yield from outside(vars(self), RANGES)
        yield from problems_of_sets(self.chosen_sets)
        yield from unknown(vars(self), {name: CHOICES[name] for name in ("template", "dtype")})
        if not DEVICE.fullmatch(self.device):
            yield f"device={self.device} is unknown: choose cpu, cuda or cuda:N"
        if self.do_sample and not self.temperature:
            yield "temperature=0 draws nothing: give a temperature above 0, or do_sample=false for the likeliest token"
        if self.do_sample and not self.top_p:
            yield "top_p=0 leaves no token to draw: give top_p above 0, or do_sample=false for the likeliest token"
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not self.do_sample and value != 1:
                yield f"{name}={value:g} counts only where tokens are drawn: add do_sample=true, or leave it out"


def _problems_of_files(config: Any, names: Sequence[str]) -> Iterator[str]:
    """What is wrong with the files that a command shall write."""
    for name in names:
        path = getattr(config, name)
        try:
            if path:
                check_output(path, f"choose another {name}=")
        except ValueError as error:
            yield str(error)


@dataclass(frozen=True)
class AcceptanceConfig(Measured):
    """How often a drafter foresees the next token of a target, along texts that the target writes.

    The drafter reads each text in one pass, and at each place of it the token that it would choose is compared with the
    target's. The rate is given by four definitions (docs/dsi.md).
    """

    EXAMPLES: ClassVar[str] = """\
  python -m scripts.simulate acceptance
  python -m scripts.simulate acceptance draft=toy/draft_b sets=humaneval,qa num_examples=10 picture=runs.png
  python -m scripts.simulate acceptance do_sample=true temperature=0.8 traces=matches.json
  python -m scripts.simulate acceptance target=DIR draft=DIR sets=mbpp:mbpp.jsonl max_new_tokens=256"""

    # Whose tokens are compared
    target: str = TARGET  # folder of the target, a model in Hugging Face form
    draft: str = DRAFTS[0]  # folder of the drafter

    # What is written
    traces: str = ""  # JSON file for the matches of each text, lists of 0 and 1, which simulations read; empty: none
    picture: str = ""  # file (.png, .svg or .pdf) for the lengths of the runs of matches; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.picture and Path(self.picture).suffix not in PICTURES:
            yield f"picture={self.picture} is no picture: name a file that ends in {' or '.join(PICTURES)}"
        yield from _problems_of_files(self, ("traces", "picture"))


@dataclass(frozen=True)
class SpecInferConfig(Measured):
    """SpecInfer's tables for a target and a drafter, with the paper's own figures below.

    Table 1: how often the target's token is among a drafter's best 1 to 5. Table 2: the tokens that a pass of the
    target verifies, where one step of the tree gets 1 to 5 guesses. Table 3: naive sampling beside multi-step
    speculative sampling. All of it is counted along texts that the target writes, at temperature 0 and drawn.
    """

    EXAMPLES: ClassVar[str] = """\
  python -m scripts.bench specinfer
  python -m scripts.bench specinfer draft=toy/draft_b sets=humaneval,qa num_examples=20
  python -m scripts.bench specinfer target=DIR draft=DIR temperature=0.8 expansion=k,1,1,1"""

    # Whose tokens are compared
    target: str = TARGET  # folder of the target, a model in Hugging Face form
    draft: str = DRAFTS[0]  # folder of the drafter

    # The trees of Tables 2 and 3
    expansion: str = "1,1,k,1,1,1,1,1"  # children of each guess, step by step; k is 1 to 5

    # How a token is chosen
    do_sample: bool = True  # texts that are drawn, too; else only those of the likeliest tokens

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        wrong = wrong_widths(self.expansion.replace("k", str(WIDEST)))
        if wrong or "k" not in self.expansion:
            wrong = wrong or "has no step that is varied: write k for it, as 1,1,k,1,1,1,1,1"
            yield f"expansion={self.expansion} {wrong}"
        if self.max_new_tokens < 2:
            yield "max_new_tokens=1 leaves nothing to be guessed: give 2 or more"

    def widths(self, k: int) -> list[int]:
        """The widths of the tree whose varied step has `k` children."""
        written = self.expansion.replace("k", str(k))
        return list(map(int, written.split(",")))


@dataclass(frozen=True)
class Timed(Measured):
    """What every measurement of times takes."""

    # How it is timed
    repeats: int = 5  # turns that count, behind one that warms up
    rows: str = "1,2,4,8,16,32,64"  # the m of T(m), the time of a pass over m tokens (commas between)
    context: int = 256  # tokens of text that such a pass follows

    @property
    def chosen_rows(self) -> tuple[int, ...]:
        """The sizes of the passes, in rising order."""
        return tuple(sorted({int(word) for word in listed(self.rows)}))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), TIMED)
        if self.max_new_tokens < 2:
            yield "max_new_tokens=1 leaves no later token whose time could be measured: give 2 or more"
        words = listed(self.rows)
        if not words or not all(map(_is_size, words)):
            yield f"rows={self.rows} are no sizes: give {ROWS.advice}, or several with commas between"


def _is_size(word: str) -> bool:
    """Whether a word says how many rows a pass has."""
    return bool(WHOLE.fullmatch(word)) and ROWS.holds(int(word[:9]))


@dataclass(frozen=True)
class LatencyConfig(Timed):
    """How long a model takes: to the first token (TTFT), for each later one (TPOT), and for m tokens at once, T(m)."""

    EXAMPLES: ClassVar[str] = """\
  python -m scripts.simulate latency
  python -m scripts.simulate latency model=toy/draft_a sets=sum max_new_tokens=20 repeats=3
  python -m scripts.simulate latency model=DIR device=cuda dtype=bfloat16 rows=1,2,4,8,16,32,64 context=1024"""

    # What is timed
    model: str = TARGET  # folder of a model in Hugging Face form

    # What is written
    output: str = ""  # JSON file for the figures; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _problems_of_files(self, ("output",))


class Pair(NamedTuple):
    """A row of the table: the folders of a target and of its drafter, and the data set that both are measured on."""

    target: str
    draft: str
    set: str


@dataclass(frozen=True)
class TableConfig(Timed):
    """Pairs of models measured, and what that makes of DSI: times, acceptance, best lookaheads and speed-ups.

    Each row is a target, a drafter and a data set, on which both are timed and their tokens compared. Out of this
    follows by formulas what a token costs. Rows that stand in output= already, measured with the same keys, are kept.
    """

    EXAMPLES: ClassVar[str] = """\
  python -m scripts.simulate table
  python -m scripts.simulate table sets=humaneval,qa num_examples=3 output=table.json
  python -m scripts.simulate table target=DIR drafts=DIR,DIR sets=alpaca:alpaca.json num_target_servers=3
  python -m scripts.simulate table records=pairs.json output=table.json"""

    # Which rows there are
    target: str = TARGET  # folder of the target
    drafts: str = ",".join(DRAFTS)  # folders of its drafters (commas between)
    records: str = ""  # JSON list of {"target": FOLDER, "draft": FOLDER, "set": SET}, in place of target, drafts, sets
    num_target_servers: int = 7  # servers of the target that DSI has

    # What is written
    output: str = ""  # JSON file for the rows, with a table FILE.csv beside it; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), SERVERS)
        if not self.records and not listed(self.drafts):
            yield "drafts is empty: name at least one folder"
        if self.output and Path(self.output).suffix != ".json":
            yield f"output={self.output} is no JSON file: name one that ends in .json"
        yield from _problems_of_files(self, ("output",))

    @property
    def pairs(self) -> list[Pair]:
        """The rows of the table. Raises ValueError if the file of records is not sound."""
        if not self.records:
            asked = product(listed(self.drafts), self.chosen_sets)
            return [Pair(self.target, folder, name) for folder, name in asked]
        remedy = 'write a list of {"target": FOLDER, "draft": FOLDER, "set": SET}'
        found: Any = whole(self.records, remedy)
        if not fits(found, [RECORD]) or not found:
            raise ValueError(f"{self.records} is no list of records: {remedy}")
        for entry in found:
            for problem in problems_of_sets([entry["set"]]):
                raise ValueError(f"{self.records}: {problem}")
        return [Pair(**{name: entry[name] for name in RECORD}) for entry in found]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that decide what is measured, beside the rows themselves."""
        rest = ("target", "drafts", "records", "sets", "output", "num_target_servers")
        return {name: value for name, value in vars(self).items() if name not in rest}
