"""What a plan prints: the table of candidates, a sentence of advice, the chosen keys, and what to split and push."""
from __future__ import annotations

from typing import Sequence

import numpy as np

from config.boards import Boards
from config.methods import METHODS
from eval.metrics import Interval, bootstrap
from eval.plan.bounds import Bounds
from eval.plan.candidates import Candidate
from eval.plan.check import Checked
from eval.plan.keys import PlanConfig
from eval.plan.search import PLAIN, WORTH
from eval.plan.trial import Bench, Trial

LIMIT = 0.5  # of the time, from which on something is what limits a candidate
COLUMNS = f"{'tokens/s':>9} {'95 %':>15} {'first s':>8} {'GB':>6}  {'limited by':<26} candidate"
UNLIKE = 1.5  # times as long as another link, from which on a link is the reason
RANK_0 = "rank 0's board and "
SEGMENT = 16  # rows of a message whose time describes a link


def speed(trial: Trial) -> Interval:
    """Tokens per second with the bounds of a bootstrap over the recorded questions."""
    rows = np.array([(one.tokens, one.seconds) for one in trial.spent], dtype=float)
    return bootstrap([rows], lambda sums: sums[..., 0, 0] / sums[..., 0, 1])


def limit(trial: Trial) -> str:
    """What limits a candidate: who is busy for most of the time, or the way of a row where nobody is."""
    busy = trial.busy
    shares = {"drafting": busy.drafting, "verdicts": busy.verdict}
    shares.update({f"board {rank}" if rank else "rank 0's board": share for rank, share in busy.boards.items()})
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


def advice(bench: Bench, chosen: Trial, trials: Sequence[Trial], boards: int,
           spent: Sequence[Checked] = ()) -> str:
    """One sentence about the choice; of one that this machine itself has made, by what candidates spent there."""
    one = chosen.candidate
    if spent:
        return _as_measured(one, spent)
    if one.method == PLAIN:
        return _plain(bench.site, chosen, trials, boards)
    if len(_used(one)) < boards:
        return _fewer(bench.site, chosen, trials, boards)
    if boards == 1:
        return f"there is one board beside rank 0's; limited by {limit(chosen)}"
    others = [trial for trial in trials if len(_used(trial.candidate)) < boards and trial.candidate.method != PLAIN]
    if not others:
        return f"{_all(boards)} are wanted; limited by {limit(chosen)}"
    gain, fewer = chosen.speed / others[0].speed - 1, _named(others[0].candidate)
    worth = "are worth having," if chosen.speed >= WORTH * others[0].speed else "are hardly worth having:"
    return f"{_all(boards)} {worth} {gain:.0%} faster than {fewer}; limited by {limit(chosen)}"


def _as_measured(one: Candidate, spent: Sequence[Checked]) -> str:
    """What this machine says, whose ranks share its cores, whatever was simulated."""
    ours = next(each.speed for each in spent if each.candidate == one)
    others = [each for each in spent if (each.candidate.method == PLAIN) != (one.method == PLAIN)]
    if one.method != PLAIN:
        return (f"of {len(spent)} candidates that answered here {one.method} over {_named(one)} is the fastest, "
                f"{ours / others[0].speed:.2f} times as fast as plain decoding")
    if not others:
        return "nothing but plain decoding answered here"
    return f"no guessing pays here: {others[0].candidate.method} reaches {others[0].speed / ours:.2f} of plain decoding"


def _plain(site: Boards, chosen: Trial, trials: Sequence[Trial], boards: int) -> str:
    """What guesses cost, and how many boards are enough without them."""
    one, token = chosen.candidate, 1e3 / chosen.speed
    others = [trial for trial in trials if trial.candidate.method != PLAIN]
    enough = f"; {_named(one)} {_are(one)} enough" if len(_used(one)) < boards else ""
    more = SEGMENT - 1
    rows = site.row * max(0, SEGMENT - site.free)
    wire = 1e3 * site.transfer(more * site.row_bytes)
    costs = [(site.level, f"a level of guesses {site.level:.3g} ms"),
            (rows, f"{more} more rows take {rows:.3g} ms of the stages"),
            (wire, f"{more} more rows take {wire:.3g} ms of each link")]
    _, reason = max(costs)
    best = ""
    if others:
        reached = others[0].speed / chosen.speed
        best = f"; {others[0].candidate.method}, the best that guesses, reaches {reached:.2f} of it"
    return f"no guessing pays here: a token takes {token:.3g} ms without guesses, and {reason}{best}{enough}"


def _fewer(site: Boards, chosen: Trial, trials: Sequence[Trial], boards: int) -> str:
    """That fewer boards are faster, and what the others would cost."""
    one = chosen.candidate
    wider = max(trials, key=lambda trial: (trial.candidate.method == one.method, len(_used(trial.candidate))))
    most, against = len(_used(wider.candidate)), _all(boards)
    if most < boards:
        against = f"{most}, the most of {boards} that it can take" if most > len(_used(one)) else ""
    if not against or wider.candidate.method != one.method:
        return f"{one.method} was tried over no more boards than {_named(one)}; limited by {limit(chosen)}"
    faster = "faster than" if chosen.speed >= WORTH * wider.speed else "as fast as"
    alone = "" if one.whole or len(_used(one)) > 1 else " alone"
    start = f"{_named(one)}{alone} {_are(one)} {faster} {against} (which reach {wider.speed:.3g} tokens/s): "
    return start + _what_more_cost(site, chosen, wider)


def _what_more_cost(site: Boards, chosen: Trial, wider: Trial) -> str:
    """Why a candidate over more boards is no faster."""
    one, many = chosen.candidate, wider.candidate
    ours, theirs = _ring(one), _ring(many)
    links = {pair: _message(site, *pair) for pair in theirs if pair not in ours}
    usual = max((_message(site, *pair) for pair in ours), default=0.0)
    saved = passing_stage(site, one) - passing_stage(site, many)
    pair = max(links, key=lambda each: links[each], default=(0, 0))
    if links and links[pair] > max(saved, UNLIKE * usual):
        return (f"the link between {pair[0]} and {pair[1]} takes {links[pair]:.3g} ms for a segment, longer than the "
                f"{max(saved, 0):.3g} ms that more boards save a stage")
    left_out = set(_used(many)).difference(_used(one))
    slowest = max(left_out, key=lambda rank: site.board(rank).model)
    slower = site.board(slowest).model / max(site.board(rank).model for rank in _used(one))
    if slower > 1:
        return f"board {slowest} takes {slower:.3g} times as long for a layer as the slowest of these"
    if max(one.layers) == max(many.layers):
        return f"the fullest stage has {max(one.layers)} of {sum(one.layers)} layers either way"
    if limit(chosen).startswith(("drafting", "verdicts")):
        return f"the limit is {limit(chosen)}, which more boards do not change"
    row = Bounds(site).row
    few, all_of_them = 1e3 * row(one, 0), 1e3 * row(many, 0)
    if few < all_of_them:
        return (f"a row goes round in {few:.4g} ms instead of {all_of_them:.4g} ms, and more rows under way do not "
                "make up for it")
    return f"the limit is {limit(chosen)}"


def _used(one: Candidate) -> list[int]:
    """The boards beside rank 0's that hold layers, as they are counted."""
    return sorted({rank for rank in one.boards if rank})


def _named(one: Candidate) -> str:
    """The boards of a candidate in words."""
    ranks = _used(one)
    whole = RANK_0 if one.whole else ""
    if len(ranks) == 1:
        return f"{whole}board {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1 > 1:
        return f"{whole}boards {ranks[0]} to {ranks[-1]}"
    return f"{whole}boards {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _all(boards: int) -> str:
    return "both boards" if boards == 2 else f"all {boards} boards"


def _are(one: Candidate) -> str:
    return "are" if one.whole or len(_used(one)) > 1 else "is"


def _ring(one: Candidate) -> list[tuple[int, int]]:
    """The links of a candidate, by the ranks at their ends: those of its stages' leaders, and within groups."""
    depth = len(one.layers)
    leaders = [ranks[0] for ranks in one.groups]
    rings = [[0, *leaders[i:i + depth], 0] for i in range(0, len(leaders), depth)]
    paths = [*rings, *([*ranks, ranks[0]] for ranks in one.groups)]
    return [pair for path in paths for pair in zip(path, path[1:]) if pair[0] != pair[1]]


def _message(site: Boards, sender: int, receiver: int) -> float:
    """Milliseconds of a segment on a link."""
    wire = site.link(sender, receiver)
    return wire.latency + 1e3 * wire.transfer(SEGMENT * wire.row_bytes)


def passing_stage(site: Boards, one: Candidate) -> float:
    """Milliseconds of a row in one stage of a candidate, if all of them last equally long."""
    return one.copies / sum(1 / site.board(rank).model for rank in one.boards)


def keys_line(one: Candidate) -> str:
    """The chosen keys, as they are typed."""
    return " ".join(f"{key}={value}" for key, value in one.keys.items())


def to_do(config: PlanConfig, one: Candidate) -> list[str]:
    """What to split and push."""
    folder, split = "SPLIT", one.split
    form = f"--stages {split['stages']}" if "stages" in split else ""
    if "replicas" in split:
        form = f"--stages {len(one.layers)}"
    if "tp" in split:
        form = f"{form} --tp {split['tp']}".strip()
    head = f" --eagle {config.eagle_dir}" if "eagle" in one.draft and METHODS[one.method].draft == "eagle" else ""
    boards = _named(one).replace(RANK_0, "")
    hosts = config.write_hosts or (config.hosts if one.in_order else "") or "FILE"
    return [f"split: python split_and_save_models.py {config.base_dir or 'MODEL'} {folder} {form}{head}",
            f"push:  to {boards} and rank 0's, the lines of a hosts file: bash scripts/push.sh "
            f"hosts={hosts} split={folder}", *_left_out(config, one)]


def _left_out(config: PlanConfig, one: Candidate) -> list[str]:
    """What to do where keys alone would mean other boards."""
    if one.in_order or config.write_hosts or config.write_cluster:
        return []
    key = "write_hosts=FILE" if config.hosts else "write_cluster=FILE.json"
    return [f"note: ranks have no gaps, so these keys alone mean the first boards: add {key} for a file of the chosen "
            "ones"]
