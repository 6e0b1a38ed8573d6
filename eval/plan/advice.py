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

SLOW_LINK = 1.5  # a link that takes more than this many times as long as the others is a reason to omit its boards
BUSY_LIMIT = 0.5  # a device or link that is busy for at least this share of the time limits a candidate
COLUMNS = f"{'tokens/s':>9} {'95 %':>15} {'first s':>8} {'GB':>6}  {'limited by':<26} candidate"


def limit(trial: Trial) -> str:
    """Return the device or link that limits a candidate, or the waiting for answers if none is busy enough."""
    name, busy_share = max(trial.busy.items(), key=itemgetter(1))
    if busy_share >= BUSY_LIMIT:
        return f"{name}, busy {busy_share:.0%}"
    waiting_share = max(0.0, 1 - trial.busy["drafting"] - trial.busy["verdicts"])
    return f"waiting for answers {waiting_share:.0%}"


def table(bench: Bench, trials: Sequence[Trial]) -> str:
    """Return a table with one line for each candidate."""
    lines = [COLUMNS]
    for trial in trials:
        answer_costs = np.array([(answer.new_tokens, answer.seconds) for answer in trial.answers])
        estimate = speed([answer_costs])
        bounds = "-" if math.isnan(estimate.low) else f"{estimate.low:.3g} to {estimate.high:.3g}"

        max_gb = max(bench.memory(trial.candidate).values())
        lines.append(f"{estimate.value:>9.3g} {bounds:>15} {trial.first:>8.3g} {max_gb:>6.2f}  {limit(trial):<26} "
                     f"{trial.candidate.about}")
    return "\n".join(lines)


# --- the sentence of advice -------------------------------------------------------------------------------------------

def advice(finished_plan: Plan) -> str:
    """Return one sentence about the choice; if candidates were measured on this machine, it is about these figures."""
    chosen, num_boards = finished_plan.chosen.candidate, finished_plan.boards
    if finished_plan.checked:
        return _as_measured(chosen, finished_plan.checked)

    guessing = [trial for trial in finished_plan.trials if not trial.candidate.plain]
    if chosen.plain:
        return _plain(finished_plan, guessing)

    limited_by = f"limited by {limit(finished_plan.chosen)}"
    if len(chosen.others) < num_boards:
        return _fewer(finished_plan, limited_by)
    if num_boards == 1:
        return f"there is only one board besides rank 0's; {limited_by}"

    on_fewer = [trial for trial in guessing if len(trial.candidate.others) < num_boards]
    if not on_fewer:
        return f"{_all(num_boards)} are needed; {limited_by}"
    gain = finished_plan.chosen.speed / on_fewer[0].speed
    verdict = "are worth having," if gain >= WORTH else "are hardly worth having:"
    return (f"{_all(num_boards)} {verdict} {gain - 1:.0%} faster than {_board_names(on_fewer[0].candidate)}; "
            f"{limited_by}")


def _as_measured(chosen: Candidate, trials: Sequence[Trial]) -> str:
    """Return the sentence about speeds on this machine, where ranks share its cores, regardless of the simulation."""
    chosen_speed = next(trial.speed for trial in trials if trial.candidate == chosen)
    rivals = [trial for trial in trials if trial.candidate.plain != chosen.plain]
    if not chosen.plain:
        return (f"of {len(trials)} candidates that ran here {chosen.method} over {_board_names(chosen)} is the "
                f"fastest, {chosen_speed / rivals[0].speed:.2f} times as fast as plain decoding")

    if not rivals:
        return "only plain decoding ran here"
    best_guessing, speed_ratio = rivals[0].candidate, rivals[0].speed / chosen_speed
    return f"guesses do not pay: {best_guessing.method} reaches {speed_ratio:.2f} of plain decoding"


def _plain(finished_plan: Plan, guessing: Sequence[Trial]) -> str:
    """Return the sentence for plain decoding, with the best speculative candidate and the number of boards needed."""
    chosen, plain_speed = finished_plan.chosen.candidate, finished_plan.chosen.speed
    sentence = f"guesses do not pay: a token takes {1e3 / plain_speed:.3g} ms without guesses"

    if any(trial.candidate.draft != "suffix" for trial in guessing):  # suffix takes no time
        sentence += f", and a level of guesses {finished_plan.bench.site.level:.3g} ms"

    if guessing:
        best, speed_ratio = guessing[0].candidate, guessing[0].speed / plain_speed
        sentence += f"; {best.method}, the best with guesses, reaches {speed_ratio:.2f} of the speed"

    if len(chosen.others) < finished_plan.boards:
        sentence += f"; {_board_names(chosen)} {_are(chosen)} enough"
    return sentence


def _fewer(finished_plan: Plan, limited_by: str) -> str:
    """Return the sentence for fewer boards than exist, with the reason why more are slower."""
    chosen, num_boards = finished_plan.chosen.candidate, finished_plan.boards
    same_method = [trial for trial in finished_plan.trials if trial.candidate.method == chosen.method]
    widest = max(same_method, key=lambda trial: len(trial.candidate.others))
    max_boards = len(widest.candidate.others)
    if max_boards <= len(chosen.others):
        return f"{chosen.method} was not tried over more boards than {_board_names(chosen)}; {limited_by}"

    rival = _all(num_boards) if max_boards == num_boards else f"{max_boards}, the most of {num_boards} that it can use"
    comparison = "faster than" if finished_plan.chosen.speed >= WORTH * widest.speed else "as fast as"
    reason = _what_more_cost(finished_plan.bench.site, chosen.others, widest)
    return (f"{_board_names(chosen)} {_are(chosen)} {comparison} {rival} (which reach {widest.speed:.3g} tokens/s): "
            f"{reason}")


def _what_more_cost(site: Profile, chosen_boards: Sequence[int], wider: Trial) -> str:
    """Return the reason why the wider candidate gains nothing: a slow link or board that only it has, or its limit."""
    wider_boards = wider.candidate.others

    # links
    chosen_hops, wider_hops = hops(chosen_boards), hops(wider_boards)
    hop_ms = {hop: message(site, *hop) for hop in (*wider_hops, *chosen_hops)}
    a, b = max(set(wider_hops).difference(chosen_hops), key=hop_ms.__getitem__)
    if hop_ms[a, b] > SLOW_LINK * max(map(hop_ms.__getitem__, chosen_hops)):
        return f"the link between {a} and {b} takes {hop_ms[a, b]:.3g} ms for a message"

    # boards
    board_ms = {rank: site.board(rank).model for rank in (*wider_boards, *chosen_boards)}
    slowest = max(set(wider_boards).difference(chosen_boards), key=board_ms.__getitem__)
    times_slower = board_ms[slowest] / max(map(board_ms.__getitem__, chosen_boards))
    if times_slower > 1:
        return f"board {slowest} takes {times_slower:.3g} times as long per layer as the slowest of these"
    return f"the limit is {limit(wider)}"


def _board_names(candidate: Candidate) -> str:
    """Return the boards of a candidate in words."""
    ranks = sorted(candidate.others)
    prefix = "rank 0's board and " if candidate.whole else ""
    if len(ranks) == 1:
        return f"{prefix}board {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1 > 1:
        return f"{prefix}boards {ranks[0]} to {ranks[-1]}"
    return f"{prefix}boards {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _all(num_boards: int) -> str:
    return "both boards" if num_boards == 2 else f"all {num_boards} boards"


def _are(candidate: Candidate) -> str:
    return "are" if candidate.whole or len(candidate.others) > 1 else "is"


# --- next commands ----------------------------------------------------------------------------------------------------

def to_do(config: PlanConfig, candidate: Candidate) -> list[str]:
    """Return lines with the commands to split and push."""
    # split
    split_keys, options = candidate.split, []
    if not candidate.whole:
        options.append(f"--stages {split_keys.get('stages', len(candidate.layers))}")
    if "tp" in split_keys:
        options.append(f"--tp {split_keys['tp']}")
    if "eagle" in candidate.draft and METHODS[candidate.method].draft == "eagle":
        options.append(f"--eagle {config.run.eagle_dir}")
    model = config.run.base_dir or "MODEL"
    lines = [f"split: python split_and_save_models.py {model} SPLIT {' '.join(options)}"]

    # push
    boards = _board_names(candidate).replace("rank 0's board and ", "")
    usable_hosts = config.run.hosts if candidate.in_order else ""
    hosts = config.write_hosts or usable_hosts or "FILE"
    lines.append(f"push:  to {boards} and rank 0's, listed in a hosts file: bash scripts/push.sh hosts={hosts} "
                 "split=SPLIT")

    if not (candidate.in_order or config.write_hosts or config.write_cluster):
        key = "write_hosts=FILE" if config.run.hosts else "write_cluster=FILE.json"
        lines.append(f"note: ranks have no gaps, so these keys alone use the first boards: add {key} for a file of "
                     "the chosen ones")
    return lines
