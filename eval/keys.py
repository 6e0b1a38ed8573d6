"""The keys of an evaluation: its methods, its questions, the number of repeats, and the folder of the answers.

This module does not know how questions are answered; all other keys are those of a single run.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Iterator, Mapping, NamedTuple, Pattern, Sequence

from config.cli import CommandKeys, headless, needs_head, no_head, parts
from config.drafts import MODEL_KEY, reads
from config.keys import check_name, in_full, local_key, preset_of, raw_values, shared_key, with_defaults
from config.methods import METHODS
from config.old_names import instead_of
from config.presets import HOME, SMOLLM2, TOY_PRESET
from config.questions import Question, bundled, categories, load
from config.run_config import REQUESTS_AT_ONCE, SEED, TEMPERATURE, RunConfig
from config.values import NUMBER, Range, listed, number

# The trees of the paper, even if a preset is tuned to others.
TREES = {"min_probability": "0", "expand_depth": "6", "ablate": ""}
PAPER = {**TREES, "methods": "naive,tp,galaxy,pipedec,continuous", "max_new_tokens": "256"}
# Each board holds its part of a pipeline, so the methods that need another split of the model are left out.
BOARDS = {**PAPER, "methods": "naive,pipedec,continuous"}
HELD_OUT = {"questions": "30:50"}  # the paper's questions of the real data sets
QUICK = {"profile": "jetson-7b", "time": "virtual", "questions": "5", "max_new_tokens": "64"}
HURRY = "0.5"  # the slowdown of QUICK in real time, which takes half an hour on a laptop
RESULTS = HOME / "results"
# For the models that run if none is named. dsi runs on the bundled one, since its copies are small.
OF_MODEL = {
    SMOLLM2: {**QUICK, "max_new_tokens": "128", "results": str(RESULTS / SMOLLM2)},
    TOY_PRESET: {**QUICK, "methods": "ar,serial,naive,pruned,pipedec,continuous,streaming,dsi",
                 "drafts": "eagle+suffix", "baseline_draft": "eagle:toy/eagle"},
}
BASELINE = "naive"
SHARED = {**TREES, "methods": "naive,tp,galaxy"}
FP4 = {"quant": "fp4"}


class Protocol(NamedTuple):
    """The defaults of an evaluation: its preset, the values of keys, and other values for single presets."""

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
SETS = "mt_bench,humaneval,gsm8k,alpaca,sum,qa"  # the paper's data sets; questions for each are bundled
EDITS = "edits"  # a further bundled set, which is in no mean with others: its answers repeat their prompts
EXAMPLES = """\
  bash run_eval.sh
  bash run_eval.sh toy
  bash run_eval.sh methods=ar,continuous sets=gsm8k,qa temperatures=0 questions=2 results=quick
  bash run_eval.sh profile=jetson-13b wires=125 results=slow
  bash run_eval.sh toy methods=naive,continuous drafts=eagle,model:toy/draft_a results=drafts
  bash run_eval.sh vicuna-7b data=DIR questions=30:50"""


@dataclass(frozen=True)
class DataSetKeys(CommandKeys):
    """The base of the keys of commands that answer the questions of data sets."""

    LISTS: ClassVar[Mapping[str, str]] = {"sets": "chosen_sets"}  # keys of lists that must not be empty -> properties

    sets: str = shared_key(SETS, "the data sets; questions= applies to each", heading="Which questions are answered")
    data: str = local_key("", "folder of SET/question.jsonl, SET.jsonl or SET.json, or a file; empty: the bundled",
        names_file=True)

    @property
    def folder(self) -> str:
        """The folder of the data sets."""
        return self.data or str(bundled(self.run.first_folder))

    @property
    def chosen_sets(self) -> tuple[str, ...]:
        """The names of the sets; if `data` is a file, they are its categories, by default all of them."""
        takes_all = self.sets == SETS and Path(self.data).is_file()
        return tuple(categories(self.data)) if takes_all else listed(self.sets)

    @property
    def questions_by_set(self) -> dict[str, list[Question]]:
        """The questions of each set."""
        return {name: load(self.folder, name, *self.run.question_range) for name in self.chosen_sets}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name, chosen in self.LISTS.items():
            yield from wrong_list(name, getattr(self, name), getattr(self, chosen))
        for name in self.chosen_sets:
            if "/" in name:
                yield f"sets={self.sets}: {name} is no name of a data set: name its folder with data="


class ComparesMethods(DataSetKeys):
    """The base of the keys of commands that compare methods at several temperatures."""

    LISTS = {"methods": "chosen_methods", **DataSetKeys.LISTS, "temperatures": "chosen_temperatures"}
    methods = temperatures = ""  # keys that each command defines itself

    def problems(self) -> Iterator[str]:
        yield from wrong_numbers("temperatures", self.temperatures, TEMPERATURE)
        yield from super().problems()

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        return listed(self.methods)

    @property
    def chosen_temperatures(self) -> tuple[float, ...]:
        return tuple(map(number, listed(self.temperatures)))


@dataclass(frozen=True)
class ComparedDrafts(CommandKeys):
    """The keys of a command that runs several drafts one after the other."""

    drafts: str = shared_key(
        "", "drafts, as eagle,eagle:DIR,model:DIR (head or model in this folder); empty: the key draft",
        heading="What is compared (separated by commas)")

    @property
    def asked_drafts(self) -> tuple[str, ...]:
        """The names of the drafts, in the given order."""
        return listed(self.drafts) or (self.run.draft,)

    @property
    def first_draft(self) -> str:
        """The kind of draft with which the pipeline starts, before it changes to the others: one without a folder."""
        if self.run.draft_dir:
            return self.run.draft
        return next((name for name in self.asked_drafts if ":" not in name), "none")

    def with_draft(self, name: str, **changes: Any) -> RunConfig:
        """Return the configuration of a run with only this draft. Raises ValueError for an impossible draft."""
        kind, _, model = parts(name)
        if MODEL_KEY in reads(kind):
            model = model or self.run.draft_dir
        return replace(self.run, draft=kind, draft_dir=model, **changes)

    def draft_problems(self) -> Iterator[str]:
        """Yield the problems of the drafts, one sentence each, with the fix."""
        used_folders = {""}
        for name in listed(self.drafts):
            try:
                used_folders.add(self.with_draft(name).draft_dir)
            except ValueError as error:
                yield f"drafts={self.drafts}: {error}"

        if any(map(needs_head, listed(self.drafts))) and headless(self.run):
            yield f"drafts={self.drafts}: {no_head(self.run)}"
        if self.drafts and not listed(self.drafts):
            yield "drafts is empty: name at least one, or leave it out"
        if self.drafts and self.run.draft_dir not in used_folders:
            yield f"draft_dir={self.run.draft_dir} is ignored with drafts={self.drafts}: write model:DIR there"


class Contender(NamedTuple):
    """The unit of comparison: a method with a draft, which is `none` for a method that needs no draft."""

    method: str
    draft: str


@dataclass(frozen=True)
class EvalConfig(ComparedDrafts, ComparesMethods):
    """The keys of an evaluation. `bash run_eval.sh --help` prints the comments, as it does those of `RunConfig`."""

    UNSUPPORTED = ("temperature", "prompt_ids", "question_file", "answers", "reuse", "live")
    LISTS = {**ComparesMethods.LISTS, "drafts": "asked_drafts"}
    EXAMPLES: ClassVar[str] = EXAMPLES

    methods: str = shared_key("ar,serial,naive,pruned,pipedec,continuous,streaming", "the methods that answer",
        heading="What is compared (separated by commas)")
    baseline_draft: str = shared_key(
        "", "the draft of the baseline naive, which also answers; empty: the first of drafts")
    temperatures: str = shared_key("0,1", "each question is answered at each of them")
    repeats: int = shared_key(1, "answers to each question; the seed grows by 1 each time", REPEATS)
    concurrency: int = shared_key(1, "questions that each method answers at once; above 1 the tally of ranks is off",
        REQUESTS_AT_ONCE)
    results: str = local_key(
        "results", "folder for answers, figures and tables; the same command continues what is in it",
        names_file=True)
    launch: str = local_key("", "name of one start of the pipeline, in answers and tally; set by the command itself")

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, with `ar` first, since the others are compared with it."""
        return tuple(sorted(super().chosen_methods, key=lambda name: name != "ar"))

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The methods that can share one start of the pipeline: those of one target with one kind of draft."""
        methods_by_start: dict[tuple[str, str], list[str]] = {}
        for method in self.chosen_methods:
            start = METHODS[method].target, _draft(method, self.chosen_methods)
            methods_by_start.setdefault(start, []).append(method)
        return [tuple(methods) for methods in methods_by_start.values()]

    def contenders(self, methods: Sequence[str]) -> list[Contender]:
        """Return these methods with the drafts that they use, and naive with the baseline's draft."""
        contenders = drafted(methods, self.asked_drafts)
        baseline = Contender(BASELINE, self.baseline_draft)
        if self.baseline_draft and BASELINE in methods and baseline not in contenders:
            contenders.append(baseline)
        return contenders

    def problems(self) -> Iterator[str]:
        for method in listed(self.methods):
            if method not in METHODS:
                yield f"methods={self.methods}: {method} is unknown: {instead_of('pipeline_type', method, METHODS)}"

        yield from self.draft_problems()
        yield from super().problems()

        if self.baseline_draft and BASELINE not in self.chosen_methods:
            yield (f"baseline_draft={self.baseline_draft} is for {BASELINE}, which is not among the methods: add it "
                   "to methods=")
        if self.baseline_draft:
            try:
                self.with_draft(self.baseline_draft)
            except ValueError as error:
                yield f"baseline_draft={self.baseline_draft}: {error}"

        max_requests, max_seed = self.run.max_requests, SEED.max_value - self.repeats + 1
        if max_requests not in (1, self.concurrency):
            yield f"an evaluation has no max_requests={max_requests}: write concurrency={max_requests}"
        if self.run.seed > max_seed:
            yield f"seed={self.run.seed} leaves no seeds for repeats={self.repeats}: give seed={max_seed} or less"

        if not self.results.strip():
            yield "results is empty: name a folder, as in results=DIR"
        yield from self.method_problems()


def drafted(methods: Sequence[str], drafts: Sequence[str]) -> list[Contender]:
    """Return these methods with each of the drafts; methods without a draft, or with their own, appear once."""
    draft_kinds = {method: METHODS[method].draft if method in METHODS else "eagle" for method in methods}
    drafts_by_method = {method: drafts if kind == "eagle" else (kind,) for method, kind in draft_kinds.items()}
    return [Contender(method, draft) for method in drafts_by_method for draft in drafts_by_method[method]]


def first(group: Sequence[str]) -> str:
    """Return the method with which the pipeline of a group is started: one that needs a draft, if there is one."""
    return next((method for method in group if METHODS[method].draft != "none"), group[0])


def _draft(method_name: str, methods: Sequence[str]) -> str:
    """Return the kind of draft of a method; one without a draft gets that of the other methods of its target."""
    all_methods = [METHODS[other_name] for other_name in (method_name, *methods)]
    draft_kinds = [method.draft for method in all_methods if method.target == METHODS[method_name].target]
    return next((draft_kind for draft_kind in draft_kinds if draft_kind != "none"), "none")


def wrong_numbers(key: str, value: str, allowed: Range, kind: Pattern[str] = NUMBER) -> Iterator[str]:
    """Yield the problems of a list of numbers."""
    for number_text in listed(value):
        if not kind.fullmatch(number_text) or not allowed.holds(number(number_text)):
            yield f"{key}={value}: {number_text} is not possible: give {allowed.advice}, with commas between"


def wrong_list(key: str, value: str, chosen: Sequence[Any]) -> Iterator[str]:
    """Yield the problems of a list of choices."""
    if not chosen:
        yield f"{key} is empty: name at least one"
    if len(set(chosen)) < len(chosen):
        yield f"{key}={value} names something twice: leave one of them out"


def words(protocol: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments of an evaluation: those that were typed, and a protocol's for keys that were not given.

    `emulated`, `tensor-parallel`: SmolLM2 or the bundled model on a cluster with modelled time, by default virtual,
    and a few questions; a model that is given runs without emulation, and answers all questions; so do boards.
    `paper-7b`, `paper-13b`: the comparison of the paper; its questions are 30 to 49 (from 0) of the real data sets.
    `boards-7b`, `boards-13b`: the same for several hosts, without the methods that need another split of the model.
    """
    check_name(protocol, PROTOCOLS, "protocol")
    preset, protocol_keys, of_model = PROTOCOLS[protocol]

    all_words = in_full(argv)
    typed_keys, preset_name = raw_values(all_words), preset_of(all_words)
    names_model = bool({"model_dir", "base_dir"} & typed_keys.keys())
    model_keys = {} if names_model else of_model.get(preset_name or preset, {})
    defaults = {**protocol_keys, **model_keys}

    # keys that depend on others
    in_real_time = typed_keys.get("time") == "real" or "slowdown" in typed_keys
    if not of_model and "data" in typed_keys and not HELD_OUT.keys() & typed_keys:
        defaults.update(HELD_OUT)
    if "hosts" in typed_keys and of_model:
        defaults["profile"] = "none"  # boards are as fast as they are

    if typed_keys.get("profile", defaults.get("profile")) == "none":
        defaults.pop("time", None)
    elif in_real_time and defaults.pop("time", ""):
        defaults["slowdown"] = HURRY
    if {"drafts", "draft"} & typed_keys.keys():
        defaults.pop("drafts", None)
    if BASELINE not in listed(typed_keys.get("methods", BASELINE)):
        defaults.pop("baseline_draft", None)

    missing_keys = {key: value for key, value in defaults.items() if key not in typed_keys}
    return with_defaults(argv, missing_keys, preset)
