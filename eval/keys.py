"""What an evaluation is: which methods answer which questions, how often, and where the answers go.

It knows nothing about how a question is asked; all other keys are those of a single run.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Iterator, Mapping, NamedTuple, Pattern, Sequence

from config.cli import CommandKeys, ComparedDrafts
from config.keys import NUMBER, Range, check_name, listed, number, opened, over, preset_of, raw_values
from config.methods import METHODS
from config.presets import ROOT, SMOLLM2, TOY_PRESET
from config.questions import Question, bundled, categories, load
from config.run_config import RANGES as OF_RUNS

# The trees of the paper, whatever a preset is tuned to.
TREES = {"min_probability": "0", "expand_depth": "6", "ablate": ""}
PAPER = {**TREES, "methods": "naive,tp,galaxy,pipedec,continuous", "max_new_tokens": "256"}
# Each board holds its part of a pipeline, so the methods that need the model split another way are left out.
BOARDS = {**PAPER, "methods": "naive,pipedec,continuous"}
HELD_OUT = {"questions": "30:50"}  # the paper's questions of the real data sets
QUICK = {"profile": "jetson-7b", "time": "virtual", "questions": "5", "max_new_tokens": "64"}
HURRY = "0.5"  # the slowdown of the same in real time, half an hour on a laptop
RESULTS = ROOT / "results"
# Of the models that run where none is named; the copies of the bundled one for dsi are small.
OF_MODEL = {
    SMOLLM2: {**QUICK, "max_new_tokens": "128", "results": str(RESULTS / SMOLLM2)},
    TOY_PRESET: {**QUICK, "methods": "ar,serial,naive,pruned,pipedec,continuous,streaming,dsi",
                 "drafts": "eagle+suffix", "baseline_draft": "eagle:toy/eagle"},
}
BASELINE = "naive"
SHARED = {**TREES, "methods": "naive,tp,galaxy"}
FP4 = {"quant": "fp4"}


class Protocol(NamedTuple):
    """What an evaluation is if nothing else is said: its preset, the values of keys, and others of single presets."""

    preset: str
    keys: Mapping[str, str]
    of_model: Mapping[str, Mapping[str, str]] = MappingProxyType({})


PROTOCOLS = {
    "emulated": Protocol(TOY_PRESET, {**TREES, "results": str(RESULTS)}, OF_MODEL),
    "tensor-parallel": Protocol(TOY_PRESET, {**SHARED, "results": str(RESULTS / "tp")}, {TOY_PRESET: QUICK}),
    "paper-7b": Protocol("llama2-7b", {**PAPER, "results": str(RESULTS / "paper-7b")}),
    "paper-13b": Protocol("llama2-13b", {**PAPER, **FP4, "results": str(RESULTS / "paper-13b")}),
    "boards-7b": Protocol("llama2-7b", {**BOARDS, "results": str(RESULTS / "boards-7b")}),
    "boards-13b": Protocol("llama2-13b", {**BOARDS, **FP4, "results": str(RESULTS / "boards-13b")}),
}
REPEATS = Range(1, 1_000_000)
SETS = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the bundled data sets
EXAMPLES = """\
  bash run_eval.sh
  bash run_eval.sh toy
  bash run_eval.sh methods=ar,continuous sets=gsm8k,qa temperatures=0 questions=2 results=quick
  bash run_eval.sh profile=jetson-13b wires=125 results=slow
  bash run_eval.sh toy methods=naive,continuous drafts=eagle,model:toy/draft_a results=drafts
  bash run_eval.sh vicuna-7b data=DIR questions=30:50"""


@dataclass(frozen=True)
class AsksSets(CommandKeys):
    """The base of the keys of commands that ask the questions of data sets."""

    LISTS: ClassVar[Mapping[str, str]] = {"sets": "chosen_sets"}  # keys of lists that must name something -> properties

    # Which questions are asked
    sets: str = SETS  # the data sets; questions= is of each
    data: str = ""  # folder of SET/question.jsonl, SET.jsonl or SET.json, or a file of categories; empty: the bundled

    @property
    def folder(self) -> str:
        """The folder of the data sets."""
        return self.data or str(bundled(self.run.first_folder))

    @property
    def chosen_sets(self) -> tuple[str, ...]:
        """The sets by name: of a file, its categories, all of them if `sets` says nothing else."""
        every = self.sets == SETS and Path(self.data).is_file()
        return tuple(categories(self.data)) if every else listed(self.sets)

    @property
    def asked(self) -> dict[str, list[Question]]:
        """The questions of each set."""
        return {name: load(self.folder, name, *self.run.span) for name in self.chosen_sets}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for key, chosen in self.LISTS.items():
            yield from wrong_list(key, getattr(self, key), getattr(self, chosen))
        for name in self.chosen_sets:
            if "/" in name:
                yield f"sets={self.sets}: {name} is no name of a data set: name its folder with data="


class ComparesMethods(AsksSets):
    """The same where methods answer, at several temperatures."""

    LISTS = {"methods": "chosen_methods", **AsksSets.LISTS, "temperatures": "chosen_temperatures"}
    methods = temperatures = ""  # keys of each command, with meanings of their own

    def problems(self) -> Iterator[str]:
        yield from wrong_numbers("temperatures", self.temperatures, OF_RUNS["temperature"])
        yield from super().problems()

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        return listed(self.methods)

    @property
    def chosen_temperatures(self) -> tuple[float, ...]:
        return tuple(map(number, listed(self.temperatures)))


class Contender(NamedTuple):
    """What is compared: a method with a draft; `none` is that of a method that needs no draft."""

    method: str
    draft: str


@dataclass(frozen=True)
class EvalConfig(ComparedDrafts, ComparesMethods):
    """One evaluation. The comments are what `bash run_eval.sh --help` prints, as those of `RunConfig` are."""

    REFUSED = ("temperature", "prompt_ids", "question_file", "answers", "reuse")
    RANGES = {"repeats": REPEATS, "concurrency": OF_RUNS["max_requests"]}
    LISTS = {**ComparesMethods.LISTS, "drafts": "asked_drafts"}
    EXAMPLES: ClassVar[str] = EXAMPLES

    # What is compared (commas between)
    methods: str = "ar,serial,naive,pruned,pipedec,continuous,streaming"  # those that answer
    baseline_draft: str = ""  # the draft whose naive is the baseline, and answers beside drafts; empty: drafts' first
    temperatures: str = "0,1"  # each question is asked at each of them
    repeats: int = 1  # how often; the seed grows by 1 each time
    concurrency: int = 1  # questions that each method answers at once; above 1 the tally of ranks is off
    results: str = "results"  # folder for answers, figures and tables; the same command goes on with what is there
    launch: str = ""  # name of one start of the pipeline, in answers and tally; given by the command itself

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, `ar` first, since the others are compared with it."""
        return tuple(sorted(super().chosen_methods, key=lambda name: name != "ar"))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The methods that can share one start of the pipeline: those of one target with one kind of draft."""
        found: dict[tuple[str, str], list[str]] = {}
        for name in self.chosen_methods:
            start = METHODS[name].target, _draft(name, self.chosen_methods)
            found.setdefault(start, []).append(name)
        return [tuple(names) for names in found.values()]

    def contenders(self, methods: Sequence[str]) -> list[Contender]:
        """These methods with the drafts that answer with them; and naive with the baseline's draft."""
        found = drafted(methods, self.asked_drafts)
        baseline = Contender(BASELINE, self.baseline_draft)
        if self.baseline_draft and BASELINE in methods and baseline not in found:
            found.append(baseline)
        return found

    def problems(self) -> Iterator[str]:
        for name in listed(self.methods):
            if name not in METHODS:
                yield f"methods={self.methods}: {name} is unknown: choose among {', '.join(METHODS)}"
        yield from self.draft_problems()
        yield from super().problems()
        if self.baseline_draft and BASELINE not in self.chosen_methods:
            yield (f"baseline_draft={self.baseline_draft} is that of {BASELINE}, which is none of the methods: add it "
                   "there")
        if self.baseline_draft:
            try:
                self.with_draft(self.baseline_draft)
            except ValueError as error:
                yield f"baseline_draft={self.baseline_draft}: {error}"
        at_once, latest = self.run.max_requests, OF_RUNS["seed"].most - self.repeats + 1
        if at_once not in (1, self.concurrency):
            yield f"an evaluation has no max_requests={at_once}: write concurrency={at_once}"
        if self.run.seed > latest:
            yield f"seed={self.run.seed} leaves no seeds for repeats={self.repeats}: give seed={latest} or less"
        if not self.results.strip():
            yield "results is empty: name a folder, as in results=DIR"
        yield from self.method_problems()


def drafted(methods: Sequence[str], drafts: Sequence[str]) -> list[Contender]:
    """These methods with each of the drafts; those that need none, or have their own, once."""
    own = {name: METHODS[name].draft if name in METHODS else "eagle" for name in methods}
    each = {name: drafts if kind == "eagle" else (kind,) for name, kind in own.items()}
    return [Contender(name, draft) for name in each for draft in each[name]]


def first(group: Sequence[str]) -> str:
    """The method that a start of the pipeline is made for: one that needs a draft, if there is one."""
    return next((name for name in group if METHODS[name].draft != "none"), group[0])


def _draft(name: str, beside: Sequence[str]) -> str:
    """The kind of draft of a method; one without a draft goes with the others of its target."""
    methods = [METHODS[other] for other in (name, *beside)]
    drafts = [method.draft for method in methods if method.target == METHODS[name].target]
    return next((draft for draft in drafts if draft != "none"), "none")


def wrong_numbers(key: str, value: str, allowed: Range, kind: Pattern[str] = NUMBER) -> Iterator[str]:
    """What is wrong with a list of numbers."""
    for word in listed(value):
        if not kind.fullmatch(word) or not allowed.holds(number(word)):
            yield f"{key}={value}: {word} is not possible: give {allowed.advice}, with commas between"


def wrong_list(key: str, value: str, chosen: Sequence[Any]) -> Iterator[str]:
    """What is wrong with a list of things that are chosen."""
    if not chosen:
        yield f"{key} is empty: name at least one"
    if len(set(chosen)) < len(chosen):
        yield f"{key}={value} names something twice: leave one of them out"


def words(protocol: str, argv: Sequence[str]) -> list[str]:
    """The words of an evaluation: those that were typed, and those of a protocol that they leave open.

    `emulated`, `tensor-parallel`: SmolLM2 or the bundled model on a cluster whose time is modelled, in virtual time
    unless said otherwise, a few questions; another model that is named runs as it is, and answers all.
    `paper-7b`, `paper-13b`: the comparison of the paper; its questions are the 30th to 49th of the real data sets.
    `boards-7b`, `boards-13b`: the same for several hosts, without the methods that need the model split another way.
    """
    check_name(protocol, PROTOCOLS, "protocol")
    preset, keys, of_model = PROTOCOLS[protocol]
    all_words = opened(argv)
    raw, named = raw_values(all_words), preset_of(all_words)
    own_model = not {"model_dir", "base_dir"} & raw.keys()
    defaults = {**keys, **(of_model.get(named or preset, {}) if own_model else {})}
    in_real_time = raw.get("time") == "real" or "slowdown" in raw
    if not of_model and "data" in raw and not HELD_OUT.keys() & raw:
        defaults.update(HELD_OUT)
    if raw.get("profile") == "none":
        defaults.pop("time", None)
    elif in_real_time and defaults.pop("time", ""):
        defaults["slowdown"] = HURRY
    if {"drafts", "draft"} & raw.keys():
        defaults.pop("drafts", None)
    if BASELINE not in listed(raw.get("methods", BASELINE)):
        defaults.pop("baseline_draft", None)
    left = {key: value for key, value in defaults.items() if key not in raw}
    return over(argv, left, preset)
