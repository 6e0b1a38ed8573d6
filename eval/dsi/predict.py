"""Compare speeds in virtual time with those of the same methods in real-time emulation, and with the closed forms.

In virtual time the strategies, trees, drafts, rings, replicas and models are those of a real run; only its time comes
from a profile.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

from tqdm import tqdm

from config.cli import flat, parse
from config.files import write_json
from config.keys import WHOLE, listed, preset_of, raw_values, unwritable, with_defaults
from config.methods import METHODS
from config.presets import TOY
from config.run_config import RunConfig
from eval.bench import speed
from eval.dsi.acceptance import rate
from eval.dsi.formulas import Pipeline as Staged
from eval.dsi.formulas import dsi_rate, si_rate
from eval.dsi.keys import COMMAND
from eval.keys import DataSetKeys
from eval.metrics import NAN
from eval.pair_keys import MeasureKeys
from eval.pairs import open_model, record
from eval.recorded import check_room, sampler_of
from eval.tables import in_columns, number
from launch.pipeline import Pipeline
from launch.prepare import prepare
from launch.virtual import as_virtual
from model.sample import Sampler
from pipeline.decode import Answer, Request

CHAINS = ("ar", "serial", "naive", "pruned", "pipedec", "continuous", "pipeinfer", "dsi")
LOOKAHEAD = "5"  # the smallest that Eq. 1 allows with four replicas of jetson-7b
DEFAULTS = {"profile": "jetson-7b", "max_new_tokens": "48", "questions": "1", "draft": "model"}
NARROW = {  # only the most likely guess of every level, at any probability
    "width": "1", "init_topk_pipedec": "1", "min_probability": "0"}
OPEN = {"lookahead": "auto", "subseq_token": 0}  # keys, each with the value that requests a measurement
WARM = 8  # tokens of the answer that warms up
APART = {"output", "trace", "pipeline_type"}  # keys of the command that are not passed to the start of a pipeline
COLUMNS = ("", "predicted", "measured", "ratio", "closed form", "ratio")
NOTE = """\
tokens/s, prefill included. predicted: simulated, by the methods' own code in virtual time. measured: emulated in real
time. closed form: from T, d, a and a hop, in the long run. Ratios are to measured."""


@dataclass(frozen=True)
class PredictConfig(DataSetKeys):
    """Predict the speed of methods, and measure it."""

    UNSUPPORTED = ("pipeline_type", "model_dir", "tp", "prompt_ids", "question_file", "stop", "ignore_eos", "time",
                   "trace", "hosts")

    LISTS = {"methods": "chosen_methods", **DataSetKeys.LISTS}
    EXAMPLES = f"""\
  {COMMAND} predict
  {COMMAND} predict profile=lan-1g slowdown=8 output=lan.json
  {COMMAND} predict methods=serial,continuous,dsi sets=gsm8k questions=4 temperature=1 seed=3
  {COMMAND} predict toy draft_dir=toy/draft_b lookahead=4"""

    # Comparison
    methods: str = ",".join(CHAINS)  # methods to compare (comma-separated); ar is always included
    measure: bool = True  # also run the methods, in the time that the cluster would need; false: predict only

    def problems(self) -> Iterator[str]:
        for name in listed(self.methods):
            if name not in CHAINS:
                yield (f"methods={self.methods} holds {name}, which drafts no chain, or is no method: choose from "
                       f"{', '.join(CHAINS)}")
        yield from super().problems()
        yield from _problems_of_chains(self.run)
        if self.run.cluster is None:
            yield "profile=none has no times for a prediction: name an emulated cluster, such as profile=jetson-7b"
        yield from unwritable(self.run, ["output"])

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods, beginning with `ar`, the reference of all others."""
        return ("ar", *(name for name in listed(self.methods) if name != "ar"))

    def single(self, method: str, virtual: bool) -> RunConfig:
        """Return the configuration of a single run by one of the methods, in virtual time or for the measurement."""
        timed: dict[str, Any] = {"time": "virtual", "slowdown": 1.0} if virtual else {}
        return replace(self.run, pipeline_type=method, output="", **timed)


def words(argv: Sequence[str]) -> list[str]:
    """Return the given words of the command, plus defaults with which every method drafts one chain.

    A chain has `lookahead` guesses, whether for a verification or for a tree; so has a segment or a run.
    """
    raw = raw_values(argv)
    lookahead = raw.get("lookahead", LOOKAHEAD)
    if not WHOLE.fullmatch(lookahead) or int(lookahead[:9]) < 1:
        lookahead = LOOKAHEAD  # the check of the key lookahead rejects the given value
    defaults = {**DEFAULTS, **NARROW, "lookahead": lookahead, "subseq_token": lookahead,
                **dict.fromkeys(("init_depth", "expand_depth"), str(int(lookahead) - 1))}
    if preset_of(argv) in ("", "toy") and raw.get("draft", "model") == "model":
        defaults["draft_dir"] = str(TOY / "draft_a")
    return with_defaults(argv, defaults, "toy")


def _problems_of_chains(run: RunConfig) -> Iterator[str]:
    """Yield the problems that keep a run from drafting one chain with a small model."""
    if run.draft != "model":
        yield f"draft={run.draft} drafts more than chains: add draft=model draft_dir=FOLDER, a small model"
    elif not run.draft_dir:
        yield "the drafter is missing: give draft_dir=FOLDER, a small model in Hugging Face format"
    for key, value in NARROW.items():
        if getattr(run, key) != float(value):
            yield f"{key}={getattr(run, key):g} does not draft one full chain: omit it, or give {key}={value}"
    for key, open_value in OPEN.items():
        if getattr(run, key) == open_value:
            yield (f"{key}={open_value} requires a measurement, which a prediction does not have: set {key} to a "
                   "number of at least 1")


# --- in virtual time --------------------------------------------------------------------------------------------------

Answers = List[Answer]


class Pair:
    """The target and its drafter as whole models. Raises ValueError if they do not match, or an answer is too long."""

    def __init__(self, config: PredictConfig) -> None:
        run = config.run
        opened = MeasureKeys(dtype=run.dtype, device=run.device, threads=run.threads_per_rank)
        target = open_model(run.base_dir, opened)
        self.drafter = open_model(run.draft_dir, opened, target)
        prompts = [target.text.prompt_ids(question.turns[:1], run.template)
                   for question in chain.from_iterable(config.asked.values())]
        contexts = (model.whole.config.context for model in (target, self.drafter))
        check_room(prompts, run.max_new_tokens, min(run.max_length, *contexts))
        sampler, ends = sampler_of(run), target.text.end_ids
        self.requests = [Request(prompt, sampler, run.max_new_tokens, ends) for prompt in prompts]

    def acceptance(self, answers: Answers) -> float:
        """Return the share of the target's tokens that are the drafter's most likely ones."""
        pairs = zip(self.requests, answers)
        return rate([record(self.drafter, request.prompt, answer.token_ids, Sampler())
                     for request, answer in pairs]).value


def predicted(config: PredictConfig, method: str, requests: Sequence[Request]) -> Answers:
    """Return the answers by a method in virtual time."""
    run = config.single(method, virtual=True)
    with as_virtual(prepare(run)) as rank_0, Pipeline.of_rank_0(rank_0) as pipeline:
        return list(map(pipeline.decoder.complete, requests))


# --- by closed forms --------------------------------------------------------------------------------------------------

def staged(config: PredictConfig, acceptance: float) -> Staged:
    """Return the parameters of the closed forms: times of the cluster in milliseconds, acceptance and chain length."""
    run = config.single("ar", virtual=True)
    profile = run.cluster
    assert profile is not None, "a prediction has an emulated cluster"
    stages = len(prepare(run).spec(0).part.stages) - 1  # rank 0 holds no layers
    return Staged(profile.model, profile.level, acceptance, run.init_depth + 1, stages, profile.latency)


def closed_form(config: PredictConfig, method: str, known: Staged) -> float:
    """Return tokens per second in the long run by the closed form of a method.

    `serial` is SI over a pipeline, where an answer takes the pipeline's latency. `pipeinfer` has no form of its own:
    that of `continuous` describes it, with the tip alone at first and then window after window.
    """
    if method == "dsi":
        cost = dsi_rate(*known[:3], config.run.tree.lookahead)
    elif method == "serial":
        cost = si_rate(known.latency, *known[1:4])
    elif method == "pipeinfer":
        cost = known._replace(lookahead=config.run.tree.run).continuous()
    else:
        cost = known.rate(method)
    return 1e3 / float(cost)


# --- in real time -----------------------------------------------------------------------------------------------------

def measured(config: PredictConfig, given: Sequence[str],
             requests: Sequence[Request]) -> dict[str, Answers]:
    """Return the answers of each method with real processes; `given` are the words of the command.

    Methods on the same kind of target share a start. All of them answer each question in turn.
    """
    known = vars(RunConfig()).keys() - APART
    options: dict[str, Any] = {key: value for key, value in raw_values(given).items() if key in known}
    starts: dict[str, list[str]] = {}
    for name in config.chosen_methods:
        starts.setdefault(METHODS[name].target, []).append(name)
    warm = replace(requests[0], max_new_tokens=min(WARM, config.run.max_new_tokens))
    found: dict[str, Answers] = {name: [] for name in config.chosen_methods}
    total = len(found) * len(requests)
    with tqdm(total=total, unit="answer", desc=f"emulated, {config.run.profile}", file=sys.stderr) as bar:
        for target, methods in starts.items():
            own = {"replicas": RunConfig.replicas} if target != "replicas" else {}
            with Pipeline.open(preset_of(given), **{**options, **own}, pipeline_type=methods[-1]) as pipeline:
                decoders = {name: pipeline.decoder_for(config.single(name, virtual=False)) for name in methods}
                for decoder in decoders.values():
                    decoder.complete(warm)
                for request, (name, decoder) in product(requests, decoders.items()):
                    found[name].append(decoder.complete(request))
                    bar.update()
    return found


# --- the command ------------------------------------------------------------------------------------------------------

class Row(NamedTuple):
    """The tokens per second of a method; NaN: not measured."""

    predicted: float
    measured: float
    closed: float


Rows = Dict[str, Row]  # by method


def main(argv: Sequence[str]) -> int:
    given = words(argv)
    config = parse(given, f"{COMMAND} predict", kind=PredictConfig)
    pair, methods = Pair(config), config.chosen_methods
    bar = tqdm(methods, unit="method", desc="predicted", leave=False, file=sys.stderr)
    simulated = {name: predicted(config, name, pair.requests) for name in bar}
    plain = simulated["ar"]
    known = staged(config, pair.acceptance(plain))
    found = measured(config, given, pair.requests) if config.measure else {}
    rows = {}
    for name in methods:
        taken = speed(found[name]) * config.run.slowdown if found else NAN
        rows[name] = Row(speed(simulated[name]), taken, closed_form(config, name, known))
    other = {name: sum(one.token_ids != text.token_ids for one, text in zip(answers, plain))
             for name, answers in found.items()}
    tokens = sum(answer.new_tokens for answer in plain)
    print(f"{config.run.profile}, {known.stages} boards and rank 0; {len(plain)} texts of {tokens} tokens, "
          f"temperature {config.run.temperature:g}; lookahead {config.run.lookahead}\n"
          f"T {known.target:g} ms, d {known.drafter:g} ms, hop {known.hop:g} ms, a {known.acceptance:.3f}\n\n"
          f"{table(rows)}\n\n{NOTE}")
    if found:
        print("\n".join(notes(rows, other)))
    if config.run.output:
        lacking: dict[str, Any] = {} if found else {"measured": None}
        speeds = {name: {**row._asdict(), **lacking} for name, row in rows.items()}
        write_json(config.run.output, {"predicted": "simulated", "measured": "emulated" if found else None,
                                       "keys": flat(config), "tokens_per_second": speeds, "other_texts": other})
    return 0


def table(rows: Rows) -> str:
    """Return a table with one line for each method."""
    lines = []
    for name, row in rows.items():
        simulated, taken, closed = map(number, row)
        simulated_ratio, _, closed_ratio = (number(value / row.measured, 3) for value in row)
        lines.append([name, simulated, taken, simulated_ratio, closed, closed_ratio])
    return in_columns(COLUMNS, lines)


def notes(rows: Rows, other: dict[str, int]) -> list[str]:
    """Return lines about the worst prediction, and about answers that differ from those of `ar` in virtual time."""
    off = {method: row.predicted / row.measured - 1 for method, row in rows.items()}
    method = max(off, key=lambda each: abs(off[each]))
    lines = [f"worst deviation: predicted {off[method]:+.1%} ({method})"]
    different = [f"{count} of {name}" for name, count in other.items() if count]
    if different:
        lines.append(f"answers that differ from the predicted text: {', '.join(different)}")
    return lines
