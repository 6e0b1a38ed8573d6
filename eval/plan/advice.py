"""The output of a plan: the table of candidates, a sentence of advice, and the commands to split and push."""
from __future__ import annotations

import math
from operator import itemgetter
from typing import Sequence

import numpy as np

from config.methods import METHODS
from config.profiles import Profile
from eval.metrics import speed
from eval.plan.candidates import Candidate, hops, message
from eval.plan.keys import PlanConfig
from eval.plan.plan import Plan
from eval.plan.search import WORTH
from eval.plan.trial import Bench, Trial

UNLIKE = 1.5  # a link that takes more than this many times as long as the others counts as the reason
LIMIT = 0.5  # a device or link that is busy for at least this share of the time limits a candidate
COLUMNS = f"{'tokens/s':>9} {'95 %':>15} {'first s':>8} {'GB':>6}  {'limited by':<26} candidate"


def limit(trial: Trial) -> str:
    """Return the device or link that limits a candidate, or the waiting for answers if none is busy enough."""
    name, share = max(trial.busy.items(), key=itemgetter(1))
    if share >= LIMIT:
        return f"{name}, busy {share:.0%}"
    waiting = max(0.0, 1 - trial.busy["drafting"] - trial.busy["verdicts"])
    return f"waiting for answers {waiting:.0%}"


def table(bench: Bench, trials: Sequence[Trial]) -> str:
    """Return a table with one line for each candidate."""
    lines = [COLUMNS]
    for trial in trials:
        spent = np.array([(answer.new_tokens, answer.seconds) for answer in trial.answers])
        found, one = speed([spent]), trial.candidate
        bounds = "-" if math.isnan(found.low) else f"{found.low:.3g} to {found.high:.3g}"
        memory = max(bench.memory(one).values())
        lines.append(f"{found.value:>9.3g} {bounds:>15} {trial.first:>8.3g} {memory:>6.2f}  {limit(trial):<26} "
                     f"{one.about}")
    return "\n".join(lines)


# --- the sentence of advice -------------------------------------------------------------------------------------------

def advice(found: Plan) -> str:
    """Return one sentence about the choice; if candidates were measured on this machine, it is about these figures."""
    one, boards = found.chosen.candidate, found.boards
    guessing = [trial for trial in found.trials if not trial.candidate.plain]
    fewer = [trial for trial in guessing if len(trial.candidate.others) < boards]
    limited = f"limited by {limit(found.chosen)}"
    if found.checked:
        return _as_measured(one, found.checked)
    if one.plain:
        return _plain(found, guessing)
    if len(one.others) < boards:
        return _fewer(found, limited)
    if boards == 1:
        return f"there is only one board besides rank 0's; {limited}"
    if not fewer:
        return f"{_all(boards)} are needed; {limited}"
    gain = found.chosen.speed / fewer[0].speed
    worth = "are worth having," if gain >= WORTH else "are hardly worth having:"
    return f"{_all(boards)} {worth} {gain - 1:.0%} faster than {_named(fewer[0].candidate)}; {limited}"


def _as_measured(one: Candidate, here: Sequence[Trial]) -> str:
    """Return the sentence about speeds on this machine, where ranks share its cores, regardless of the simulation."""
    ours = next(trial.speed for trial in here if trial.candidate == one)
    others = [trial for trial in here if trial.candidate.plain != one.plain]
    if not one.plain:
        return (f"of {len(here)} candidates that ran here {one.method} over {_named(one)} is the fastest, "
                f"{ours / others[0].speed:.2f} times as fast as plain decoding")
    if not others:
        return "only plain decoding ran here"
    return f"guesses do not pay: {others[0].candidate.method} reaches {others[0].speed / ours:.2f} of plain decoding"


def _plain(found: Plan, guessing: Sequence[Trial]) -> str:
    """Return the sentence for plain decoding, with the best speculative candidate and the number of boards needed."""
    one, plain = found.chosen.candidate, found.chosen.speed
    sentence = f"guesses do not pay: a token takes {1e3 / plain:.3g} ms without guesses"
    if any(trial.candidate.draft != "suffix" for trial in guessing):  # suffix takes no time
        sentence += f", and a level of guesses {found.bench.site.level:.3g} ms"
    for other in guessing[:1]:
        sentence += f"; {other.candidate.method}, the best with guesses, reaches {other.speed / plain:.2f} of the speed"
    return f"{sentence}; {_named(one)} {_are(one)} enough" if len(one.others) < found.boards else sentence


def _fewer(found: Plan, limited: str) -> str:
    """Return the sentence for fewer boards than exist, with the reason why more are slower."""
    one, boards = found.chosen.candidate, found.boards
    same = [trial for trial in found.trials if trial.candidate.method == one.method]
    wider = max(same, key=lambda trial: len(trial.candidate.others))
    most = len(wider.candidate.others)
    if most <= len(one.others):
        return f"{one.method} was not tried over more boards than {_named(one)}; {limited}"
    against = _all(boards) if most == boards else f"{most}, the most of {boards} that it can use"
    faster = "faster than" if found.chosen.speed >= WORTH * wider.speed else "as fast as"
    return (f"{_named(one)} {_are(one)} {faster} {against} (which reach {wider.speed:.3g} tokens/s): "
            f"{_what_more_cost(found.bench.site, one.others, wider)}")


def _what_more_cost(site: Profile, ours: Sequence[int], wider: Trial) -> str:
    """Return the reason why the wider candidate gains nothing: a slow link or board that only it has, or its limit."""
    theirs, wires = wider.candidate.others, hops(ours)
    takes = {pair: message(site, *pair) for pair in (*hops(theirs), *wires)}
    lasts = {rank: site.board(rank).model for rank in (*theirs, *ours)}
    a, b = max(set(hops(theirs)).difference(wires), key=takes.__getitem__)
    if takes[a, b] > UNLIKE * max(map(takes.__getitem__, wires)):
        return f"the link between {a} and {b} takes {takes[a, b]:.3g} ms for a message"
    slowest = max(set(theirs).difference(ours), key=lasts.__getitem__)
    slower = lasts[slowest] / max(map(lasts.__getitem__, ours))
    if slower > 1:
        return f"board {slowest} takes {slower:.3g} times as long per layer as the slowest of these"
    return f"the limit is {limit(wider)}"


def _named(one: Candidate) -> str:
    """Return the boards of a candidate in words."""
    ranks = sorted(one.others)
    whole = "rank 0's board and " if one.whole else ""
    if len(ranks) == 1:
        return f"{whole}board {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1 > 1:
        return f"{whole}boards {ranks[0]} to {ranks[-1]}"
    return f"{whole}boards {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _all(boards: int) -> str:
    return "both boards" if boards == 2 else f"all {boards} boards"


def _are(one: Candidate) -> str:
    return "are" if one.whole or len(one.others) > 1 else "is"


# --- next commands ----------------------------------------------------------------------------------------------------

def to_do(config: PlanConfig, one: Candidate) -> list[str]:
    """Return lines with the commands to split and push."""
    split, options = one.split, []
    if not one.whole:
        options.append(f"--stages {split.get('stages', len(one.layers))}")
    if "tp" in split:
        options.append(f"--tp {split['tp']}")
    if "eagle" in one.draft and METHODS[one.method].draft == "eagle":
        options.append(f"--eagle {config.run.eagle_dir}")
    boards = _named(one).replace("rank 0's board and ", "")
    hosts = config.write_hosts or (config.run.hosts if one.in_order else "") or "FILE"
    lines = [f"split: python split_and_save_models.py {config.run.base_dir or 'MODEL'} SPLIT {' '.join(options)}",
             f"push:  to {boards} and rank 0's, listed in a hosts file: bash scripts/push.sh hosts={hosts} "
             "split=SPLIT"]
    if not (one.in_order or config.write_hosts or config.write_cluster):
        key = "write_hosts=FILE" if config.run.hosts else "write_cluster=FILE.json"
        lines.append(f"note: ranks have no gaps, so these keys alone use the first boards: add {key} for a file of "
                     "the chosen ones")
    return lines
