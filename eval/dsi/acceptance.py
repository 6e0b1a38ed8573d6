"""The acceptance rate of a drafter: matches along a target's texts, the rates from them, and the lengths of runs.

A record has one number for each position of the target's text: 1 if the drafter, given the text before that position,
predicts the target's token, else 0. A run is the matches between two misses; the end of the text may cut off the last
run.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import write_json
from config.keys import read_keys
from eval.dsi.formulas import Array, Numbers, doubles
from eval.dsi.keys import COMMAND
from eval.metrics import NAN, Interval, bootstrap
from eval.pair_keys import TARGET, TOY_DRAFTS, MeasureKeys
from eval.pairs import answer, check_sets, open_model, prompts_of, record, sampler_of
from eval.tables import in_columns, number

Record = Sequence[int]
Records = Sequence[Record]
ALL = "all"
LONGEST = 16  # runs of at least this length share one line of the histogram


@dataclass(frozen=True)
class AcceptanceConfig(MeasureKeys):
    """Measure how often a drafter predicts the next token of a target, along texts that the target generates.

    The drafter reads each text in one pass. At each position the token that it would choose is compared with the
    target's token. The rate has four definitions (docs/dsi.md).
    """

    WRITES = ("traces",)
    EXAMPLES = f"""\
  {COMMAND} acceptance
  {COMMAND} acceptance draft=toy/draft_b sets=humaneval,qa num_examples=10
  {COMMAND} acceptance do_sample=true temperature=0.8 traces=matches.json
  {COMMAND} acceptance target=DIR draft=DIR sets=mbpp:mbpp.jsonl max_new_tokens=256"""

    # What is compared
    target: str = TARGET  # folder of the target, a model in Hugging Face form
    draft: str = TOY_DRAFTS[0]  # folder of the drafter
    traces: str = ""  # JSON file for the matches of each text, lists of 0 and 1, for `online`; empty: none


class Runs(NamedTuple):
    """The lengths of the runs of one text."""

    ended: list[int]  # of the runs that a miss ended, including runs of length 0
    cut: int  # of the run that the end of the text cut off


def runs(record: Record) -> Runs:
    """Return the lengths of the runs of one text."""
    signs = "".join(map(str, record))
    *ended, cut = map(len, signs.split("0"))
    return Runs(ended, cut)


def counted(record: Record) -> dict[str, tuple[int, int]]:
    """Return, for each definition of the acceptance rate, the number of matches and the number of runs that count.

    With a mean of n matches per run, the rate is 1 - 1 / (1 + n).

    likeliest: all matches divided by all positions, the maximum-likelihood rate of geometric runs with censoring.
    prefix: the paper's definition (appendix F.2): the common prefix of the texts of target and drafter, which is the
    first run. A text without a miss counts with its whole length, as if a miss followed.
    runs: all runs that a miss ended; this rate is too small, since long runs are cut off more often.
    original: the count in a branch of the paper's repository. It treats a run that is cut off as one that ended, and
    omits a run that the last token ends.
    """
    ended, cut = runs(record)
    first = (*ended, cut)[0]
    taken = [*ended, cut] if cut else ended[:-1]
    return {
        "likeliest": (sum(record), len(ended)),
        "prefix": (first, 1),
        "runs": (sum(ended), len(ended)),
        "original": (sum(taken), len(taken))}


DEFINITIONS = tuple(counted([]))


def rate(records: Records, definition: str = "likeliest") -> Interval:
    """Return the acceptance rate by a definition, with the bounds of a bootstrap over texts; NaN if no run counts."""
    sums = [counted(record)[definition] for record in records if len(record)]
    counts = np.array(sums, dtype=float).reshape(-1, 2)

    def of_sums(sums: np.ndarray) -> np.ndarray:
        matches, ended = sums[..., 0, 0], sums[..., 0, 1]
        with np.errstate(invalid="ignore"):  # a resample may hold no run that counts
            return np.asarray(matches / (matches + ended))

    return bootstrap([counts], of_sums)


def rate_after(records: Records, match: int) -> float:
    """Return the share of matches among the positions after a match (1) or after a miss (0); NaN if none exists."""
    pairs = chain.from_iterable(zip(record, record[1:]) for record in records)
    after = [here for before, here in pairs if before == match]
    return sum(after) / len(after) if after else NAN


def lengths(records: Records) -> Array:
    """Return four counts, `[L, 4]`, for each length of a run from 0 to the longest: the runs that a miss ended, the
    runs that were cut off, and the expected number of runs that a miss ends if positions match independently, first
    with one rate for all texts, then with the rate of each text."""
    found = list(map(runs, records))
    ended = np.array([length for one in found for length in one.ended], dtype=int)
    cut = np.array([one.cut for one in found if one.cut], dtype=int)
    count = max([*ended, *cut], default=-1) + 1
    texts = [record for record in records if len(record)]
    size_R, own_R = (np.array(list(map(of, texts)), dtype=float) for of in (len, np.mean))
    length_L1 = np.arange(count)[:, None]
    return np.stack([
        np.bincount(ended, minlength=count),
        np.bincount(cut, minlength=count),
        _expected(size_R, length_L1, rate(records).value).sum(1),
        _expected(size_R, length_L1, own_R).sum(1)], 1)


def _expected(size: Numbers, length: Numbers, chance: Numbers) -> Array:
    """Return the expected number of ended runs of a length in a text; a run begins at the start or after a miss."""
    later = doubles(size) - length - 1  # positions after a miss where a run of this length can begin
    miss = 1 - doubles(chance)
    start = doubles(chance) ** length * miss
    return np.where(later < 0, 0.0, start * (1 + later * miss))


# --- the command ------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    config = read_keys(argv, AcceptanceConfig, f"{COMMAND} acceptance")
    check_sets(config.chosen_sets, config)
    target = open_model(config.target, config)
    drafter = open_model(config.draft, config, target)
    prompts_by_set = {name: prompts_of(name, config, (target, drafter)) for name in config.chosen_sets}
    sampler, found = sampler_of(config), dict[str, list[list[int]]]()
    for name, prompts in prompts_by_set.items():
        found[name] = []
        for prompt in tqdm(prompts, desc=name, leave=False):
            text = answer(target, prompt, config.max_new_tokens, sampler)
            found[name].append(record(drafter, prompt, text, sampler))
    every = [one for records in found.values() for one in records]
    choice = "greedy decoding"
    if config.do_sample:
        choice = (f"both sampled with the noise of seed {config.seed}, temperature {config.temperature:g}, "
                  f"top-p {config.top_p:g}")
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens per answer, "
          f"{choice}\n")
    if len(found) > 1:
        found[ALL] = every
    print(table(found))
    print("\nruns of matches in all texts; expected: runs that a miss ends if positions match independently, with one "
          f"rate\nfor all texts, or (by text) with the rate of each text\n\n{histogram(every)}")
    if config.traces:
        write_json(config.traces, every, indent=None)
    return 0


def table(found: dict[str, list[list[int]]]) -> str:
    """Return a table with one line of rates for each data set."""
    rates = [f"{name}, 95 %" for name in DEFINITIONS]
    heading = ["", "prompts", "tokens", *rates, "after hit", "after miss"]
    rows = []
    for name, records in found.items():
        sizes = [str(len(records)), str(sum(map(len, records)))]
        bounds = []
        for definition in DEFINITIONS:
            value, low, high = (number(one, 3) for one in rate(records, definition))
            bounds.append(f"{value} [{low}, {high}]")
        after = [number(rate_after(records, match), 3) for match in (1, 0)]
        rows.append([name, *sizes, *bounds, *after])
    return in_columns(heading, rows)


def histogram(records: Records) -> str:
    """Return a table with one line for each length of a run: the runs that ended, were cut off, and are expected."""
    found = lengths(records)
    shown = {str(length): row for length, row in enumerate(found[:LONGEST])}
    if len(found) > LONGEST:
        shown[f"{LONGEST} to {len(found) - 1}"] = found[LONGEST:].sum(0)
    rows = []
    for name, (ended, cut, *expected) in shown.items():
        rows.append([name, f"{ended:.0f}", f"{cut:.0f}", *(f"{mean:.1f}" for mean in expected)])
    return in_columns(["length", "ended", "cut off", "expected", "by text"], rows)
