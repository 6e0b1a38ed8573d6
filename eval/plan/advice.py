"""What a plan prints: the table of candidates, a sentence of advice, and what to split and push."""
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

UNLIKE = 1.5  # times as long as other links, from which on a link is the reason
LIMIT = 0.5  # of the time, from which on something is what limits a candidate
COLUMNS = f"{'tokens/s':>9} {'95 %':>15} {'first s':>8} {'GB':>6}  {'limited by':<26} candidate"


def limit(trial: Trial) -> str:
    """What limits a candidate: who is busy for most of the time, or the way of a row where nobody is."""
    name, share = max(trial.busy.items(), key=itemgetter(1))
    if share >= LIMIT:
        return f"{name}, busy {share:.0%}"
    waiting = max(0.0, 1 - trial.busy["drafting"] - trial.busy["verdicts"])
    return f"waiting for answers {waiting:.0%}"


def table(bench: Bench, trials: Sequence[Trial]) -> str:
    """A line for each candidate, as fast as it is."""
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
    """One sentence about the choice; of one that this machine itself has made, by what candidates spent there."""
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
        return f"there is one board beside rank 0's; {limited}"
    if not fewer:
        return f"{_all(boards)} are wanted; {limited}"
    gain = found.chosen.speed / fewer[0].speed
    worth = "are worth having," if gain >= WORTH else "are hardly worth having:"
    return f"{_all(boards)} {worth} {gain - 1:.0%} faster than {_named(fewer[0].candidate)}; {limited}"


def _as_measured(one: Candidate, here: Sequence[Trial]) -> str:
    """What this machine says, whose ranks share its cores, whatever was simulated."""
    ours = next(trial.speed for trial in here if trial.candidate == one)
    others = [trial for trial in here if trial.candidate.plain != one.plain]
    if not one.plain:
        return (f"of {len(here)} candidates that answered here {one.method} over {_named(one)} is the fastest, "
                f"{ours / others[0].speed:.2f} times as fast as plain decoding")
    if not others:
        return "nothing but plain decoding answered here"
    return f"no guessing pays here: {others[0].candidate.method} reaches {others[0].speed / ours:.2f} of plain decoding"


def _plain(found: Plan, guessing: Sequence[Trial]) -> str:
    """What the best that guesses reaches, and how many boards are enough without guesses."""
    one, plain = found.chosen.candidate, found.chosen.speed
    said = f"no guessing pays here: a token takes {1e3 / plain:.3g} ms without guesses"
    if any(trial.candidate.draft != "suffix" for trial in guessing):  # which needs no time
        said += f", and a level of guesses {found.bench.site.level:.3g} ms"
    for other in guessing[:1]:
        said += f"; {other.candidate.method}, the best that guesses, reaches {other.speed / plain:.2f} of it"
    return f"{said}; {_named(one)} {_are(one)} enough" if len(one.others) < found.boards else said


def _fewer(found: Plan, limited: str) -> str:
    """That fewer boards are faster, and what limits more of them."""
    one, boards = found.chosen.candidate, found.boards
    same = [trial for trial in found.trials if trial.candidate.method == one.method]
    wider = max(same, key=lambda trial: len(trial.candidate.others))
    most = len(wider.candidate.others)
    if most <= len(one.others):
        return f"{one.method} was tried over no more boards than {_named(one)}; {limited}"
    against = _all(boards) if most == boards else f"{most}, the most of {boards} that it can take"
    faster = "faster than" if found.chosen.speed >= WORTH * wider.speed else "as fast as"
    return (f"{_named(one)} {_are(one)} {faster} {against} (which reach {wider.speed:.3g} tokens/s): "
            f"{_what_more_cost(found.bench.site, one.others, wider)}")


def _what_more_cost(site: Profile, ours: Sequence[int], wider: Trial) -> str:
    """A link or a board that only the wider one has, if it is slow, or what limits the wider one."""
    theirs, wires = wider.candidate.others, hops(ours)
    takes = {pair: message(site, *pair) for pair in (*hops(theirs), *wires)}
    lasts = {rank: site.board(rank).model for rank in (*theirs, *ours)}
    a, b = max(set(hops(theirs)).difference(wires), key=takes.__getitem__)
    if takes[a, b] > UNLIKE * max(map(takes.__getitem__, wires)):
        return f"the link between {a} and {b} takes {takes[a, b]:.3g} ms for a message"
    slowest = max(set(theirs).difference(ours), key=lasts.__getitem__)
    slower = lasts[slowest] / max(map(lasts.__getitem__, ours))
    if slower > 1:
        return f"board {slowest} takes {slower:.3g} times as long for a layer as the slowest of these"
    return f"the limit is {limit(wider)}"


def _named(one: Candidate) -> str:
    """The boards of a candidate in words."""
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


# --- what to type -----------------------------------------------------------------------------------------------------

def to_do(config: PlanConfig, one: Candidate) -> list[str]:
    """What to split and push."""
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
             f"push:  to {boards} and rank 0's, the lines of a hosts file: bash scripts/push.sh hosts={hosts} "
             "split=SPLIT"]
    if not (one.in_order or config.write_hosts or config.write_cluster):
        key = "write_hosts=FILE" if config.run.hosts else "write_cluster=FILE.json"
        lines.append(f"note: ranks have no gaps, so these keys alone mean the first boards: add {key} for a file of "
                     "the chosen ones")
    return lines
