"""The acceptance rate of a drafter: matches along a target's texts, the rates from them, and the lengths of runs.

A record has one number for each position of the target's text: 1 if the drafter, given the text before that position,
predicts the target's token, else 0. A run is the matches between two misses; the end of the text may cut off the last
run.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Iterable, Mapping, Sequence

import numpy as np

from config.files import write_json
from config.keys import key
from eval.dsi.keys import COMMAND
from eval.metrics import Interval, bootstrap
from eval.pair_keys import TARGET, TOY_DRAFTS, MeasureKeys
from eval.pairs import Model, answer, check_sets, open_model, prompts_of, record, sampler_of
from eval.tables import in_columns, number
from launch.progress import ProgressBar

Record = Sequence[int]
Records = Sequence[Record]


@dataclass(frozen=True)
class AcceptanceConfig(MeasureKeys):
    """Measure how often a drafter predicts the next token of a target, along texts that the target generates.

    The drafter reads each text in one pass. At each position the token that it would choose is compared with the
    target's token. The rate has four definitions (docs/dsi.md).
    """

    EXAMPLES = f"""\
  {COMMAND} acceptance
  {COMMAND} acceptance draft=toy/draft_b sets=humaneval,qa num_examples=10
  {COMMAND} acceptance do_sample=true temperature=0.8 traces=matches.json
  {COMMAND} acceptance target=DIR draft=DIR sets=mbpp:mbpp.jsonl max_new_tokens=256"""

    target: str = key(TARGET, "folder of the target, a model in Hugging Face form", heading="What is compared",
        names_file=True)
    draft: str = key(TOY_DRAFTS[0], "folder of the drafter", names_file=True)
    traces: str = key("", "JSON file for the matches of each text, lists of 0 and 1, for `online`; empty: none",
        names_file=True, is_output=True)


def match_counts(record: Record) -> dict[str, tuple[int, int]]:
    """Return, for each definition of the acceptance rate, the number of matches and the number of runs that count.

    With a mean of n matches per run, the rate is 1 - 1 / (1 + n).

    likeliest: all matches divided by all positions, the maximum-likelihood rate of geometric runs with censoring.
    prefix: the paper's definition (appendix F.2): the common prefix of the texts of target and drafter, which is the
    first run. A text without a miss counts with its whole length, as if a miss followed.
    runs: all runs that a miss ended; this rate is too small, since long runs are cut off more often.
    original: the count in a branch of the paper's repository. It treats a run that is cut off as one that ended, and
    omits a run that the last token ends.
    """
    match_signs = "".join(map(str, record))
    *ended, cut_off = map(len, match_signs.split("0"))  # the end of the text cuts off the last run
    first_run = ended[0] if ended else cut_off
    original_runs = [*ended, cut_off] if cut_off else ended[:-1]

    return {
        "likeliest": (sum(record), len(ended)),
        "prefix": (first_run, 1),
        "runs": (sum(ended), len(ended)),
        "original": (sum(original_runs), len(original_runs))}


DEFINITIONS = tuple(match_counts([]))


def rate(records: Records, definition: str = "likeliest") -> Interval:
    """Return the acceptance rate by a definition, with the bounds of a bootstrap over texts; NaN if no run counts."""
    counts_by_text = [match_counts(record)[definition] for record in records if len(record)]
    samples = np.array(counts_by_text, dtype=float).reshape(-1, 2)

    def rate_of_sums(sums: np.ndarray) -> np.ndarray:
        num_matches, num_runs = sums[..., 0, 0], sums[..., 0, 1]
        with np.errstate(invalid="ignore"):  # a resample may hold no run that counts
            return np.asarray(num_matches / (num_matches + num_runs))

    return bootstrap([samples], rate_of_sums)


def measured_records(target: Model, drafter: Model, prompts: Iterable[Sequence[int]], config: MeasureKeys) -> Records:
    """Return the record of a drafter along the target's text for each prompt."""
    sampler = sampler_of(config)
    prompts_and_texts = ((prompt, answer(target, prompt, config.max_new_tokens, sampler)) for prompt in prompts)
    return [record(drafter, prompt, text, sampler) for prompt, text in prompts_and_texts]


# --- the command ------------------------------------------------------------------------------------------------------

def main(config: AcceptanceConfig) -> int:
    check_sets(config.chosen_sets, config)

    target = open_model(config.target, config)
    drafter = open_model(config.draft, config, target)
    prompts_by_set = {name: prompts_of(name, config, (target, drafter)) for name in config.chosen_sets}

    records_by_set = {
        name: measured_records(target, drafter, ProgressBar(prompts, desc=name, leave=False), config)
        for name, prompts in prompts_by_set.items()}

    choice_note = "greedy decoding"
    if config.do_sample:
        choice_note = (f"both sampled with the noise of seed {config.seed}, temperature {config.temperature:g}, "
                       f"top-p {config.top_p:g}")
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens per answer, "
          f"{choice_note}\n")

    all_records = list(chain(*records_by_set.values()))
    if len(records_by_set) > 1:
        records_by_set["all"] = all_records
    print(table(records_by_set))

    if config.traces:
        write_json(config.traces, all_records, indent=None)
    return 0


def table(records_by_set: Mapping[str, Records]) -> str:
    """Return a table with one line of rates for each data set."""
    rate_columns = [f"{name}, 95 %" for name in DEFINITIONS]
    rows = []
    for name, records in records_by_set.items():
        row = [name, str(len(records)), str(sum(map(len, records)))]
        for definition in DEFINITIONS:
            value, low, high = (number(bound, 3) for bound in rate(records, definition))
            row.append(f"{value} [{low}, {high}]")
        rows.append(row)
    return in_columns(["", "prompts", "tokens", *rate_columns], rows)
