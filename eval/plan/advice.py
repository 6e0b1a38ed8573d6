"""What a plan tells: the table of candidates, a sentence of advice, the chosen keys, and what to split and push."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from config.boards import Boards
from config.methods import METHODS
from config.plan_config import PlanConfig
from eval.metrics import Interval, bootstrap
from eval.plan.candidates import Candidate, passing
from eval.plan.search import PLAIN
from eval.plan.trial import Bench, Trial

LIMIT = 0.5  # of the time, from which on something is what limits a candidate
COLUMNS = f"{'tokens/s':>9} {'95 %':>15} {'first s':>8} {'GB':>6}  {'limited by':<26} candidate"
SEGMENT = 16  # rows of a message whose time a link is told by


def speed(trial: Trial) -> Interval:
    """Tokens per second with the bounds of a bootstrap over the recorded questions."""
    rows = np.array([(one.tokens, one.seconds) for one in trial.spent], dtype=float)
    return bootstrap([rows], lambda sums: sums[..., 0, 0] / sums[..., 0, 1])


def limit(trial: Trial) -> str:
    """What limits a candidate: who is busy for most of the time, or the way of a row where nobody is."""
    busy = trial.busy
    shares = {"drafting": busy.drafting, "verdicts": busy.verdict}
    shares.update({f"board {rank}": share for rank, share in busy.boards.items()})
    shares.update({f"link {a}-{b}": share for (a, b), share in busy.wires.items()})
    name = max(shares, key=lambda each: shares[each])
    if shares[name] >= LIMIT:
        return f"{name}, busy {shares[name]:.0%}"
    waiting = max(0.0, 1 - busy.drafting - busy.verdict)
    return f"waiting for answers {waiting:.0%}"


def table(bench: Bench, trials: Sequence[Trial]) -> str:
    """A line for each candidate, as fast as it is."""
    lines = [COLUMNS]
    for trial in trials:
        found, one = speed(trial), trial.candidate
        bounds = f"{found.low:.3g} to {found.high:.3g}"
        memory = max(bench.memory(one).values())
        lines.append(f"{found.value:>9.3g} {bounds:>15} {trial.first:>8.3g} {memory:>6.2f}  {limit(trial):<26} "
                     f"{one.about}")
    return "\n".join(lines)


def advice(bench: Bench, chosen: Trial, trials: Sequence[Trial], boards: int) -> str:
    """One sentence about the choice."""
    one, site = chosen.candidate, bench.site
    used = sorted({rank for rank in one.boards if rank})
    if one.method == PLAIN:
        return f"no guessing pays here: {_why_plain(chosen, trials, site)}"
    if len(used) < boards:
        return _fewer(site, used, boards, trials)
    others = [trial for trial in trials if len(trial.candidate.boards) < len(one.boards)]
    gain = "" if not others else f", {chosen.speed / others[0].speed - 1:.0%} faster than the best on fewer"
    return f"all {boards} boards are worth having{gain}; limited by {limit(chosen)}"


def _why_plain(chosen: Trial, trials: Sequence[Trial], site: Boards) -> str:
    token = 1e3 / chosen.speed
    others = [trial for trial in trials if trial.candidate.method != PLAIN]
    best = f", and the best that guesses reaches {others[0].speed / chosen.speed:.2f} of it" if others else ""
    return f"a token takes {token:.3g} ms without guesses, and a level of guesses {site.level:.3g} ms{best}"


def _fewer(site: Boards, used: Sequence[int], boards: int, trials: Sequence[Trial]) -> str:
    """That fewer boards are faster, and what the others would cost."""
    names = ", ".join(map(str, used))
    wider = [trial for trial in trials if len({*trial.candidate.boards, 0}) == boards + 1]
    reached = f" (all {boards} reach {wider[0].speed:.3g} tokens/s)" if wider else ""
    everyone = list(range(1, boards + 1))
    ring = [0, *everyone, 0]
    left = [pair for pair in zip(ring, ring[1:]) if not {*pair} <= {0, *used}]
    links = {pair: _message(site, *pair) for pair in left}
    a, b = max(links, key=lambda pair: links[pair])
    saved = passing_stage(site, used) - passing_stage(site, everyone)
    slowest = max((rank for rank in everyone if rank not in used), key=lambda rank: site.board(rank).model)
    slower = site.board(slowest).model / min(site.board(rank).model for rank in used)
    start = f"boards {names} are faster than all {boards}{reached}: " if len(used) > 1 else (
        f"board {names} alone is faster than all {boards}{reached}: ")
    if links[a, b] > saved:
        return start + (f"the link between {a} and {b} takes {links[a, b]:.3g} ms for a segment, longer than the "
                        f"{saved:.3g} ms that more boards save a stage")
    if slower > 1:
        return start + f"board {slowest} takes {slower:.3g} times as long for a layer as the fastest of these"
    few, all_of_them = passing(site, used), passing(site, everyone)
    return start + (f"a row goes round in {few:.4g} ms instead of {all_of_them:.4g} ms, and more rows under way do not "
                    "make up for it")


def _message(site: Boards, sender: int, receiver: int) -> float:
    """Milliseconds of a segment on a link."""
    wire = site.link(sender, receiver)
    return wire.latency + 1e3 * wire.transfer(SEGMENT * wire.row_bytes)


def passing_stage(site: Boards, ranks: Sequence[int]) -> float:
    """Milliseconds of a row in one stage, if all of them last equally long."""
    return 1 / sum(1 / site.board(rank).model for rank in ranks)


def keys_line(one: Candidate) -> str:
    """The chosen keys, as they are typed."""
    return " ".join(f"{key}={value}" for key, value in one.keys.items())


def to_do(config: PlanConfig, one: Candidate) -> list[str]:
    """What to split and push."""
    folder, split = "SPLIT", one.split
    form = f"--stages {split['stages']}" if "stages" in split else ""
    if "replica_stages" in split:
        form = f"--stages {split['replica_stages']}"
    if "tp" in split:
        form = f"{form} --tp {split['tp']}".strip()
    head = f" --eagle {config.eagle_dir}" if "eagle" in one.draft and METHODS[one.method].draft == "eagle" else ""
    boards = ", ".join(str(rank) for rank in one.boards if rank)
    hosts = config.write_hosts or (config.hosts if one.in_order else "") or "FILE"
    return [f"split: python split_and_save_models.py {config.base_dir or 'MODEL'} {folder} {form}{head}",
            f"push:  to the boards {boards} and rank 0's, the lines of a hosts file: bash scripts/push.sh "
            f"hosts={hosts} split={folder}", *_left_out(config, one)]


def _left_out(config: PlanConfig, one: Candidate) -> list[str]:
    """What to do where keys alone would mean other boards."""
    if one.in_order or config.write_hosts or config.write_cluster:
        return []
    key = "write_hosts=FILE" if config.hosts else "write_cluster=FILE.json"
    return [f"note: ranks have no gaps, so these keys alone mean the first boards: add {key} for a file of the chosen "
            "ones"]
