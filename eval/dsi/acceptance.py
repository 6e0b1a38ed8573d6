"""How often a drafter is right: matches along a target's texts, rates out of them, and the lengths of their runs.

A record has a 1 for each place of the target's text where the drafter, which has read the text up to there, foresees
the target's token, and a 0 for each other place. A run is the matches between two misses; the text's end may cut off
the last one.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from config.files import write_json
from config.keys import read_keys
from eval.dsi.keys import COMMAND
from eval.keys import problems_of_files
from eval.metrics import NAN, Interval, bootstrap
from eval.pair_keys import TARGET, TOY_DRAFTS, Measured
from eval.pairs import answer, check_pair, check_sets, open_model, prompts_of, record, sampler_of
from eval.tables import in_columns, number

Record = Sequence[int]
Records = Sequence[Record]
ALL = "all"
LONGEST = 16  # runs from this length on share one line


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
    draft: str = TOY_DRAFTS[0]  # folder of the drafter
    traces: str = ""  # JSON file for the matches of each text, lists of 0 and 1, which online reads; empty: none

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from problems_of_files(self, "traces")


class Runs(NamedTuple):
    """The lengths of the runs that a miss ended, 0 too, and the length of the one that the text's end cut off."""

    ended: list[int]
    cut: int


def runs(record: Record) -> Runs:
    """The runs of one text."""
    signs = "".join(map(str, record))
    *ended, cut = map(len, signs.split("0"))
    return Runs(ended, cut)


def counted(record: Record) -> dict[str, tuple[int, int]]:
    """The matches of some runs, and how many runs they are, by each definition of the acceptance rate.

    With n matches in the mean, the rate is 1 - 1 / (1 + n).

    likeliest: all matches by all places; of geometric runs, some of them cut off, the rate of the greatest likelihood.
    prefix: the paper's definition (appendix F.2), the common prefix of what target and drafter write, which is the
    first run. A text without a miss counts with its whole length as if a miss followed.
    runs: all runs that a miss ended; the rate is too small, since long runs are cut off more often.
    original: as a branch of the paper's repository counts. It takes the run that the text's end cuts off for one that
    ended, and forgets one that the last token ends.
    """
    ended, cut = runs(record)
    first = (*ended, cut)[0]
    taken = [*ended, cut] if cut else ended[:-1]
    return {
        "likeliest": (sum(record), len(ended)), "prefix": (first, 1),
        "runs": (sum(ended), len(ended)), "original": (sum(taken), len(taken))}


DEFINITIONS = tuple(counted([]))


def rate(records: Records, definition: str = "likeliest") -> Interval:
    """The acceptance rate by a definition, with the bounds of a bootstrap over texts; NaN if no run counts."""
    sums = [counted(record)[definition] for record in records if len(record)]
    counts = np.array(sums, dtype=float).reshape(-1, 2)

    def of_sums(sums: np.ndarray) -> np.ndarray:
        matches, ended = sums[..., 0, 0], sums[..., 0, 1]
        with np.errstate(invalid="ignore"):  # a draw of texts in which no run counts
            return np.asarray(matches / (matches + ended))

    return bootstrap([counts], of_sums)


def rate_after(records: Records, match: int) -> float:
    """Matches by places, of the places behind a match (1) or behind a miss (0); NaN if there is none."""
    neighbours = [pair for record in records for pair in zip(record, record[1:])]
    behind = [here for before, here in neighbours if before == match]
    return sum(behind) / len(behind) if behind else NAN


class Length(NamedTuple):
    """How many runs of this length a miss ended, how many the text's end cut off, and how many of the former there
    would be on average if each place matched by itself: all with one rate, or those of each text with its own."""

    length: int
    ended: int
    cut: int
    expected: float
    by_text: float


def lengths(records: Records) -> Iterator[Length]:
    """All lengths of runs from 0 to the longest; a text that ends with a miss has no run that is cut off."""
    found = [runs(record) for record in records]
    ended = Counter(length for one in found for length in one.ended)
    cut = Counter(one.cut for one in found if one.cut)
    chance = rate(records).value
    texts = [record for record in records if len(record)]
    own = [(len(text), sum(text) / len(text)) for text in texts]
    for length in range(max([*ended, *cut], default=-1) + 1):
        expected = sum(_expected(size, length, chance) for size, _ in own)
        by_text = sum(_expected(size, length, chance_of_text) for size, chance_of_text in own)
        yield Length(length, ended[length], cut[length], expected, by_text)


def _expected(size: int, length: int, chance: float) -> float:
    """The mean number of runs of a length that end in a text of that size: one at its start, others behind a miss."""
    later = size - length - 1  # places behind a miss at which such a run can start
    if later < 0:
        return 0.0
    miss = 1 - chance
    return chance ** length * miss * (1 + later * miss)


# --- the command ------------------------------------------------------------------------------------------------------

def main(argv: list[str]) -> int:
    config = read_keys(argv, AcceptanceConfig, f"{COMMAND} acceptance")
    check_sets(config.chosen_sets, config)
    target, drafter = (open_model(folder, config) for folder in (config.target, config.draft))
    check_pair(target, drafter)
    asked = {name: prompts_of(name, config, (target, drafter)) for name in config.chosen_sets}
    sampler, found = sampler_of(config), dict[str, list[list[int]]]()
    for name, prompts in asked.items():
        found[name] = []
        for prompt in tqdm(prompts, desc=name, leave=False):
            text = answer(target, prompt, config.max_new_tokens, sampler)
            found[name].append(record(drafter, prompt, text, sampler))
    every = [one for records in found.values() for one in records]
    choice = "the likeliest token each"
    if config.do_sample:
        choice = (f"drawn by both with the noise of seed {config.seed}, temperature {config.temperature:g}, "
                  f"top-p {config.top_p:g}")
    print(f"target {config.target}, drafter {config.draft}, at most {config.max_new_tokens} tokens an answer, "
          f"{choice}\n")
    if len(found) > 1:
        found[ALL] = every
    print(table(found))
    print("\nruns of matches in all texts; expected: those that end, if each place matched by itself, with the rate of "
          f"all texts\nor of its own\n\n{histogram(every)}")
    if config.traces:
        write_json(config.traces, every, indent=None)
    return 0


def table(found: dict[str, list[list[int]]]) -> str:
    """A line for each data set with its rates."""
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
    """A line for each length of a run: how many ended, how many the text's end cut off, and how many are expected."""
    found = list(lengths(records))
    shown = [(str(one.length), [one]) for one in found[:LONGEST]]
    if found[LONGEST:]:
        shown.append((f"{LONGEST} to {found[-1].length}", found[LONGEST:]))
    rows = []
    for name, group in shown:
        _, ended, cut, expected, by_text = (sum(column) for column in zip(*group))
        rows.append([name, str(ended), str(cut), f"{expected:.1f}", f"{by_text:.1f}"])
    return in_columns(["length", "ended", "cut off", "expected", "by text"], rows)
