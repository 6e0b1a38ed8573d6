"""The keys of a prediction, whose methods draft one chain each; all others are those of a single run."""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Iterator, Sequence

from config.drafts import listed
from config.presets import TOY
from config.ranges import WHOLE
from config.run_config import RunConfig
from config.typed import over, preset_of, typed
from eval.dsi.keys import COMMAND, problems_of_files
from eval.prompts import problems as problems_of_sets

METHODS = ("ar", "serial", "naive", "pruned", "pipedec", "continuous", "pipeinfer", "dsi")
LOOKAHEAD = "5"  # with four replicas of jetson-7b the least of Eq. 1
USUAL = {"profile": "jetson-7b", "max_new_tokens": "48", "question_end": "1", "draft": "model"}
NARROW = {  # of every level the likeliest guess alone, however unlikely it is
    "init_topk": "1", "expand_topk": "1", "init_topk_pipedec": "1", "min_probability": "0"}
SEGMENTS = ("run_pipeinfer", "init_subseq_token", "expand_subseq_token")
LEVELS = ("init_depth", "expand_depth")  # after the first
MEASURED = {"lookahead": "auto", **dict.fromkeys(SEGMENTS[1:], 0)}  # keys, and what asks for a measurement


@dataclass(frozen=True)
class PredictConfig(RunConfig):
    """One prediction and its measurement."""

    EXAMPLES: ClassVar[str] = f"""\
  {COMMAND} predict
  {COMMAND} predict profile=lan-1g slowdown=8 output=lan.json
  {COMMAND} predict methods=serial,continuous,dsi sets=gsm8k question_end=4 temperature=1 seed=3
  {COMMAND} predict toy draft_dir=toy/draft_b lookahead=4 traces=draft_b.json"""

    # What is compared
    methods: str = ",".join(METHODS)  # those that are predicted and measured (commas between); ar always is
    sets: str = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the data sets; question_begin and question_end are of each
    data: str = ""  # folder with SET/question.jsonl, SET.jsonl, or SET.json (a list of texts); empty: the bundled sets
    measure: bool = True  # run the methods, too, in the time that the cluster would need; false: predict only
    traces: str = ""  # JSON file for the texts and matches, which are read if it is there; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from _problems_of_methods(self)
        yield from _problems_of_chains(self)
        yield from _problems_of_runs(self)

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, `ar` first, with which all others are compared."""
        return ("ar", *(name for name in listed(self.methods) if name != "ar"))

    def run(self, method: str, virtual: bool) -> RunConfig:
        """The configuration of a single run by one of the methods, in virtual time or as it is measured."""
        own = {key.name: getattr(self, key.name) for key in fields(RunConfig)}
        own.update(pipeline_type=method, output="")
        if virtual:
            own.update(time="virtual", slowdown=1.0)
        return RunConfig(**own)

    @property
    def chosen_sets(self) -> tuple[str, ...]:
        """The names of the data sets."""
        return listed(self.sets)


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


def _problems_of_methods(c: PredictConfig) -> Iterator[str]:
    chosen = listed(c.methods)
    for name in chosen:
        if name not in METHODS:
            yield f"methods={c.methods}: {name} drafts no chain, or is no method: choose among {', '.join(METHODS)}"
    if len(set(chosen)) < len(chosen):
        yield f"methods={c.methods} names something twice: leave one of them out"
    yield from problems_of_sets(c.chosen_sets)


def _problems_of_chains(c: PredictConfig) -> Iterator[str]:
    if c.draft != "model":
        yield (f"draft={c.draft} guesses by more than a record of the text holds: add draft=model draft_dir=FOLDER, a "
               "small model")
    elif not c.draft_dir:
        yield "there is no drafter: give draft_dir=FOLDER, a small model in Hugging Face form"
    for key, value in NARROW.items():
        if getattr(c, key) != float(value):
            yield f"{key}={getattr(c, key):g} drafts no chain of all guesses: leave it out, or give {key}={value}"
    for key, open_value in MEASURED.items():
        if getattr(c, key) == open_value:
            yield (f"{key}={open_value} asks for a measurement, of which a prediction knows nothing: give {key} a "
                   "number from 1")


def _problems_of_runs(c: PredictConfig) -> Iterator[str]:
    """What a single run may have, but not a prediction."""
    if c.cluster is None:
        yield "profile=none has no times to predict with: name an emulated cluster, as in profile=jetson-7b"
    if c.virtual:
        yield "time=virtual is that of the prediction, and time=real that of the measurement: leave time out"
    if c.pipeline_type != RunConfig.pipeline_type:
        yield f"pipeline_type={c.pipeline_type} is of a single run: write methods=NAME,NAME"
    for key in ("model_dir", "tp", "prompt_ids", "question_file", "stop", "ignore_eos", "trace", "hosts"):
        if getattr(c, key):
            yield f"a prediction has no {key}: leave it out (base_dir and sets name the model and the questions)"
    yield from problems_of_files(c, "output", "traces")
