"""The keys of the commands that run models: acceptance, latency, table and predict."""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from config.keys import over, preset_of, typed
from config.presets import TOY
from config.ranges import WHOLE, Range, listed, outside
from config.run_config import RunConfig
from eval.dsi.keys import COMMAND
from eval.keys import AsksSets, problems_of_files
from eval.pair_keys import COUNT, DRAFTS, TARGET, Measured
from eval.prompts import problems as problems_of_sets

TIMED = {"repeats": Range(1, 1_000_000), "context": Range(0, 1 << 20)}
ROWS = Range(1, 65536)


@dataclass(frozen=True)
class AcceptanceConfig(Measured):
    """How often a drafter foresees the next token of a target, along texts that the target writes.

    The drafter reads each text in one pass, and at each place of it the token that it would choose is compared with the
    target's. The rate has four definitions (docs/dsi.md).
    """

    EXAMPLES = f"""\
  {COMMAND} acceptance
  {COMMAND} acceptance draft=toy/draft_b sets=humaneval,qa num_examples=10
  {COMMAND} acceptance do_sample=true temperature=0.8 traces=matches.json
  {COMMAND} acceptance target=DIR draft=DIR sets=mbpp:mbpp.jsonl max_new_tokens=256"""

    # What is compared
    target: str = TARGET  # folder of the target, a model in Hugging Face form
    draft: str = DRAFTS[0]  # folder of the drafter
    traces: str = ""  # JSON file for the matches of each text, lists of 0 and 1, which online reads; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from problems_of_files(self, "traces")


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
            yield "max_new_tokens=1 leaves no later token to time: give 2 or more"
        words = listed(self.rows)
        are_sizes = (WHOLE.fullmatch(word) and ROWS.holds(int(word[:9])) for word in words)
        if not words or not all(are_sizes):
            yield f"rows={self.rows} are no sizes: give {ROWS.advice}, or several with commas between"


@dataclass(frozen=True)
class LatencyConfig(Timed):
    """How long a model takes: to the first token (TTFT), for each later one (TPOT), and for m tokens at once, T(m)."""

    EXAMPLES = f"""\
  {COMMAND} latency
  {COMMAND} latency model=toy/draft_a sets=sum max_new_tokens=20 repeats=3
  {COMMAND} latency model=DIR device=cuda dtype=bfloat16 rows=1,2,4,8,16,32,64 context=1024"""

    # What is timed
    model: str = TARGET  # folder of a model in Hugging Face form


class Pair(NamedTuple):
    """A row of the table: the folders of a target and of its drafter, and the data set that both are measured on."""

    target: str
    draft: str
    set: str


@dataclass(frozen=True)
class TableConfig(Timed):
    """Pairs of models measured, and what that makes of DSI: times, acceptance, best lookaheads and speed-ups.

    Each row is a target, a drafter and a data set, on which both are timed and their tokens compared. Out of this
    follows by formulas what a token costs. Rows that output= already has, measured with the same keys, are kept.
    """

    EXAMPLES = f"""\
  {COMMAND} table
  {COMMAND} table sets=humaneval,qa num_examples=3 output=table.json
  {COMMAND} table target=DIR drafts=DIR,DIR sets=alpaca:alpaca.json num_target_servers=3"""

    # Which rows there are
    target: str = TARGET  # folder of the target
    drafts: str = ",".join(DRAFTS)  # folders of its drafters (commas between)
    num_target_servers: int = 7  # servers of the target that DSI has
    output: str = ""  # JSON file for the rows; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from outside(vars(self), {"num_target_servers": Range(1, COUNT)})
        if not listed(self.drafts):
            yield "drafts is empty: name at least one folder"
        if self.output and Path(self.output).suffix != ".json":
            yield f"output={self.output} is no JSON file: name one that ends in .json"
        yield from problems_of_files(self, "output")

    @property
    def pairs(self) -> list[Pair]:
        """The rows of the table."""
        asked = product(listed(self.drafts), self.chosen_sets)
        return [Pair(self.target, folder, name) for folder, name in asked]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The keys that decide what is measured, beside the rows themselves."""
        rest = ("target", "drafts", "sets", "output", "num_target_servers")
        return {name: value for name, value in vars(self).items() if name not in rest}


# --- predict ----------------------------------------------------------------------------------------------------------

METHODS = ("ar", "serial", "naive", "pruned", "pipedec", "continuous", "pipeinfer", "dsi")
LOOKAHEAD = "5"  # with four replicas of jetson-7b the least of Eq. 1
USUAL = {"profile": "jetson-7b", "max_new_tokens": "48", "question_end": "1", "draft": "model"}
NARROW = {  # of every level the likeliest guess alone, however unlikely it is
    "width": "1", "init_topk_pipedec": "1", "min_probability": "0"}
SEGMENTS = ("run_pipeinfer", "subseq_token")
LEVELS = ("init_depth", "expand_depth")  # after the first
OPEN = {"lookahead": "auto", "subseq_token": 0}  # keys, and what asks for a measurement


@dataclass(frozen=True)
class PredictConfig(AsksSets):
    """One prediction and its measurement."""

    REFUSED = ("pipeline_type", "model_dir", "tp", "prompt_ids", "question_file", "stop", "ignore_eos", "time", "trace",
               "hosts")

    EXAMPLES = f"""\
  {COMMAND} predict
  {COMMAND} predict profile=lan-1g slowdown=8 output=lan.json
  {COMMAND} predict methods=serial,continuous,dsi sets=gsm8k question_end=4 temperature=1 seed=3
  {COMMAND} predict toy draft_dir=toy/draft_b lookahead=4 traces=draft_b.json"""

    # What is compared
    methods: str = ",".join(METHODS)  # those that are predicted and measured (commas between); ar always is
    measure: bool = True  # run the methods, too, in the time that the cluster would need; false: predict only
    traces: str = ""  # JSON file for the texts and matches, which are read if it is there; empty: none

    def problems(self) -> Iterator[str]:
        chosen = listed(self.methods)
        for name in chosen:
            if name not in METHODS:
                yield (f"methods={self.methods}: {name} drafts no chain, or is no method: choose among "
                       f"{', '.join(METHODS)}")
        if len(set(chosen)) < len(chosen):
            yield f"methods={self.methods} names something twice: leave one of them out"
        yield from problems_of_sets(self.chosen_sets)
        yield from _problems_of_chains(self.run)
        if self.run.cluster is None:
            yield "profile=none has no times to predict with: name an emulated cluster, as in profile=jetson-7b"
        yield from problems_of_files(self.run, "output")
        yield from problems_of_files(self, "traces")

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, `ar` first, with which all others are compared."""
        return ("ar", *(name for name in listed(self.methods) if name != "ar"))

    def single(self, method: str, virtual: bool) -> RunConfig:
        """The configuration of a single run by one of the methods, in virtual time or as it is measured."""
        timed: dict[str, Any] = {"time": "virtual", "slowdown": 1.0} if virtual else {}
        return replace(self.run, pipeline_type=method, output="", **timed)


def words(argv: Sequence[str]) -> list[str]:
    """The words of a prediction: those that were typed, and those that make every method draft one chain.

    A chain has `lookahead` guesses, where it is drafted for a verification or a tree, and so has a segment or a run.
    """
    given = typed(argv)
    lookahead = given.get("lookahead", LOOKAHEAD)
    if not WHOLE.fullmatch(lookahead) or int(lookahead[:9]) < 1:
        lookahead = LOOKAHEAD  # what was typed is refused by its own name
    defaults = {**USUAL, **NARROW, "lookahead": lookahead, **dict.fromkeys(SEGMENTS, lookahead),
                **dict.fromkeys(LEVELS, str(int(lookahead) - 1))}
    if preset_of(argv) in ("", "toy") and given.get("draft", "model") == "model":
        defaults["draft_dir"] = str(TOY / "draft_a")
    return over(argv, defaults, "toy")


def _problems_of_chains(c: RunConfig) -> Iterator[str]:
    if c.draft != "model":
        yield (f"draft={c.draft} guesses by more than a record of the text holds: add draft=model draft_dir=FOLDER, a "
               "small model")
    elif not c.draft_dir:
        yield "there is no drafter: give draft_dir=FOLDER, a small model in Hugging Face form"
    for key, value in NARROW.items():
        if getattr(c, key) != float(value):
            yield f"{key}={getattr(c, key):g} drafts no chain of all guesses: leave it out, or give {key}={value}"
    for key, open_value in OPEN.items():
        if getattr(c, key) == open_value:
            yield (f"{key}={open_value} asks for a measurement, of which a prediction knows nothing: give {key} a "
                   "number from 1")
