"""The report: a results folder becomes summary.csv, stages.csv, report.md and plots.

It knows nothing about how answers were made. It works on what is there, and says what is missing.

Usage: python -m eval.report DIR
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

from config.files import ROOM, write
from eval.metrics import Interval, Shares
from eval.summary import BASES, MEAN, STAGES, SUMMARY, Found, Row, means, missing, read, save, spent, stages, summary

TOO_LATE = 0.03  # of the time of computing
WORDS = """\
- **ξ**: new tokens by seconds, all answers of a set together, prefill included. The mean is that of the sets' ξ.
- **SR**: the ratio of two ξ on the same questions; of the mean, the ratio of the two means, with its bounds at 95 %
  confidence (bootstrap over questions).
- **τ**: mean accepted length: tokens per pass of the target, its own (bonus) token included; the token of the prefill
  does not count. 1 means that no guess helped.
- **time per token**: tokens that settle together share the time since those before; the first ones are left out.
- **computed, waited, was idle**: shares of a rank's time: in layers (rank 0: drafting, LM head, verification); for
  messages, between its first segment of an answer and its last; before and after these. The rest is sending, pruning
  and bookkeeping.
- **too late**: the time by which emulated devices and wires missed their moments, all of it, by the time of computing.
"""


def report(folder: str | Path) -> Path:
    """Write everything into the folder; the path of report.md. Raises ValueError if there are no answers."""
    found = read(folder)
    rows = summary(found)
    save(found.folder / "summary.csv", SUMMARY, rows)
    save(found.folder / "stages.csv", STAGES, stages(found))
    path = found.folder / "report.md"
    write(path, "\n".join(_text(found, rows)) + "\n", ROOM)
    return path


def _text(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    yield f"# Results ({found.world})\n"
    yield from _about(found)
    for temperature in found.temperatures:
        here = [row for row in rows if row["temperature"] == temperature]
        yield f"## Temperature {temperature:g} ({found.world})\n"
        yield from _paper_table(found, here, temperature)
        yield from _other_tables(found, here)
        yield from _stage_tables(found, temperature)
    yield from _plots(found, rows)
    yield f"## What the words mean\n\n{WORDS}"


def _about(found: Found) -> Iterator[str]:
    """What stands above all tables: where the figures come from, and what is not there."""
    config, machine = found.env.get("config", {}), found.env.get("machine", {})
    model = config.get("model_dir") or config.get("base_dir") or ""
    facts = [("model", Path(model).name), ("stages", config.get("stages")),
             ("tokens a turn, at most", config.get("max_new_tokens")), ("machine", machine.get("cpu")),
             ("cores", machine.get("cores")), ("commit", found.env.get("commit"))]
    yield from (f"- {name}: {value}" for name, value in facts if value)
    slow = {answer["scale"] for group in found.groups.values() for answer in group} - {1.0}
    if slow:
        yield f"- all emulated times were {max(slow):g} times as long, and the figures are divided by that"
    told = [share for group in found.groups.values() for share in spent(found, group).values()]
    if told and (late := sum(share.late for share in told) / len(told)) > TOO_LATE:
        yield (f"- **this machine did not keep pace**: what was emulated came {late:.0%} too late on average; let "
               "nothing else run beside it, or give slowdown=2")
    gaps = missing(found)
    if not found.env:
        yield "- env.json is gone, so nobody knows whether anything is missing"
    else:
        yield f"- missing: {f'answers of {len(gaps)} groups' if gaps else 'nothing'}"
    yield from (f"  - {gap}" for gap in gaps[:20])
    if len(gaps) > 20:
        yield f"  - … and {len(gaps) - 20} more"
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _paper_table(found: Found, rows: Sequence[Row], temperature: float) -> Iterator[str]:
    """The layout of the FlowSpec paper's table 1: methods by data sets, speed and ratio, the mean at the end."""
    base = next((base for base in BASES if base in found.methods), BASES[0])
    yield f"Tokens per second, ξ, and in brackets the ratio to {base}, SR ({found.world}):\n"
    cells = {(row["method"], row["set"]): f"{number(row['xi'])} ({number(row[f'sr_{base}'])})" for row in rows}
    lines = []
    for method in found.methods:
        mean = means(found, method, temperature)
        lines.append([method, *(cells.get((method, name), "–") for name in found.sets),
                      f"{number(mean['xi'].value)} ({_interval(mean[f'sr_{base}'])})"])
    yield from _table(["method", *found.sets, MEAN], lines)


def _other_tables(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    def grid(value: Callable[[Row], str]) -> Iterator[str]:
        cells = {(row["method"], row["set"]): value(row) for row in rows}
        return _table(["method", *found.sets],
                      [[method, *(cells.get((method, name), "–") for name in found.sets)] for method in found.methods])

    if "ar" in found.methods:
        yield f"Ratio of ξ to ar, SR ({found.world}):\n"
        yield from grid(lambda row: number(row["sr_ar"]))
    yield f"Mean accepted length, τ ({found.world}):\n"
    yield from grid(lambda row: number(row["tau"]))
    yield f"Milliseconds: to the first token; per token, half of them at most; 99 % at most ({found.world}):\n"
    yield from grid(lambda row: "; ".join(number(1e3 * row[key], 0) for key in ("ttft", "tpt_p50", "tpt_p99")))
    if "ar" in found.methods:
        yield "The same text as ar with the same seed:\n"
        yield from grid(lambda row: row["equal"] or "–")


def _stage_tables(found: Found, temperature: float) -> Iterator[str]:
    """How every rank spent its time and what it sent, all sets together."""
    told = {method: spent(found, [answer for name in found.sets for answer in found.of(method, name, temperature)])
            for method in found.methods}
    ranks = sorted({rank for shares in told.values() for rank in shares})
    if not ranks:
        return

    def grid(value: Callable[[Shares], str]) -> Iterator[str]:
        return _table(["method", *(f"rank {rank}" for rank in ranks)], [
            [method, *(value(shares[rank]) if rank in shares else "–" for rank in ranks)]
            for method, shares in told.items() if shares])

    yield f"Per cent of the time that each rank computed; waited; was idle ({found.world}):\n"
    yield from grid(lambda share: "; ".join(number(100 * part, 0) for part in share[:3]))
    yield f"For each turn of a talk, kB that a rank sent to the next; kB of prunes; rows ({found.world}):\n"
    yield from grid(lambda share: "; ".join(number(size, 1) for size in (share.bytes / 1e3, share.control / 1e3,
                                                                          share.rows)))
    if any(share.late for shares in told.values() for share in shares.values()):
        yield f"Per cent by which what was emulated came too late ({found.world}):\n"
        yield from grid(lambda share: number(100 * share.late, 1))


def _plots(found: Found, rows: Sequence[Row]) -> Iterator[str]:
    try:
        from eval import plots
    except ImportError:
        yield "Plots need matplotlib, which is not installed here.\n"
        return
    yield f"## Plots ({found.world})\n"
    for name in plots.draw(found, rows):
        yield f"![{name}]({name})\n"


def number(value: float, digits: int = 2) -> str:
    return "–" if value != value else f"{value:.{digits}f}"


def _interval(interval: Interval) -> str:
    bounds = "" if interval.low != interval.low else f"; {interval.low:.2f} to {interval.high:.2f}"
    return number(interval.value) + bounds


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 2
    try:
        print(report(argv[0]))
    except (ValueError, OSError) as error:
        print(f"flowspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
