"""Recompute the reference cases of the paper's offline simulator and analysis, and report agreement and deviation.

There is one function for every kind of case and for every analytic quantity. Its arguments have the names of the inputs
of its cases, its results have the names of the expected values.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from inspect import signature
from itertools import chain
from typing import Any, Callable, Dict, Iterator, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from config.files import fits
from config.keys import HELP, Checked, key, preset_of, read_keys
from config.schema.fields import OBJECT, Kind, check, integer, list_of, number
from config.schema.untrusted import LARGEST, one_line, parse_object, read_bytes, short_repr
from eval.dsi import cost_model, formulas
from eval.dsi.cost_model import counted
from eval.dsi.events import EventPlan, Forward, decode
from eval.dsi.keys import COMMAND

Case = Mapping[str, Any]
Results = Dict[str, Any]  # by the names of expected values
Value = Tuple[str, float, float]  # name, expected value, computed value
REMEDY = "name a JSON file of reference cases, such as tests/golden/dsi/cases.json"
MEND = "correct the case"
DRAWS = ("accept_draws", "pad_with")  # keys of a case outside its parameters
TOLERANCE = 1e-9  # relative tolerance of a case without rel_tol
EXPECTED = ("nonsi", "si", "dsi", "ideal_dsi_cost", "expected", "required_at_k", "useful_max_SP", "nonsi_cost")
POSITIVE, SHARE = number(1e-12, 1e12), number(0, 1)
COUNT, TOKENS = integer(1, 1_000_000_000), integer(1, 1_000_000)
DRAW = integer(0, 1_000_000_000)
INPUTS = {
    "target_latency": POSITIVE, "drafter_latency": POSITIVE, "SP": COUNT, "lookahead": COUNT,
    "c": POSITIVE, "failure_cost": POSITIVE, "a": SHARE, "k": COUNT, "S": TOKENS,
    "t1": POSITIVE, "t2": POSITIVE, "p": SHARE, "N": TOKENS, "mean_accepted": number(0, 1e9),
    "accept_draws": list_of(DRAW, 1_000_000), "pad_with": DRAW,
    "times": Kind("an object of numbers",
                  lambda value: fits(value, dict) and fits([*value.values()], [float]))}
TICKS = 10 ** 12  # per forward of the target
LONGEST = 10_000  # most tokens of a simulation by events


@dataclass(frozen=True)
class Cases(Checked):
    """Recompute reference cases of the paper's offline simulator and of its analysis, and compare the results.

    The exit code is 0 if all agree, 1 if one does not, and 2 if the file is invalid. A counted cost agrees within the
    relative tolerance of its case (rel_tol, or 1e-9). An analytic value also agrees if it rounds to the digits that the
    file shows; the deviation of such a rounded value is not counted.
    """

    EXAMPLES = f"  {COMMAND} cases tests/golden/dsi/cases.json"
    PATHS = ("file",)

    file: str = key("", "JSON file of cases; the key may be omitted if it is the first argument", heading="Input")

    def problems(self) -> Iterator[str]:
        if not self.file:
            yield f"file is missing: {REMEDY}"


class CaseOutcome(NamedTuple):
    """The outcome of a case."""

    problems: list[str]  # a line for each value that does not agree
    worst: float  # largest relative deviation, of the values that are not counted as rounded
    rounded: int  # number of values that agree only to the digits that the file shows


def main(argv: Sequence[str]) -> int:
    """Print how many cases of each group agree, and return the exit code."""
    path = preset_of(argv)
    words = [f"file={path}", *argv[1:]] if path and path not in HELP else argv
    asked = read_keys(words, Cases, f"{COMMAND} cases")
    groups = {}
    for group, cases in read(asked.file).items():
        groups[group] = [compared(case, group) for case in cases]
    every = list(chain(*groups.values()))
    lines = [line(*group) for group in groups.items()]
    lines += [problem for found in every for problem in found.problems]
    print("\n".join(map(one_line, [*lines, line("all", every)])))
    return 1 if any(found.problems for found in every) else 0


def line(name: str, cases: Sequence[CaseOutcome]) -> str:
    """Return one line about a group, or about all."""
    agreed = sum(not found.problems for found in cases)
    worst = max((found.worst for found in cases), default=0.0)
    rounded = sum(found.rounded for found in cases)
    apart = f", not counting {rounded} rounded in the file" if rounded else ""
    return f"{name:<24}{agreed:>5} of {len(cases)} agree, worst deviation {worst:.1e}{apart}"


def read(path: str) -> dict[str, list[Case]]:
    """Return the cases of a file by group. Raise ValueError if it is no file of cases."""
    groups: Any = parse_object(read_bytes(path, REMEDY, LARGEST), path, REMEDY).get("groups")
    lists = [*groups.values()] if isinstance(groups, dict) else []
    if not fits(lists, [[dict]]) or not any(lists):
        raise ValueError(f'{path} has no object "groups" of lists of cases: {REMEDY}')
    return dict(groups)


# --- comparing --------------------------------------------------------------------------------------------------------

def compared(case: Case, group: str) -> CaseOutcome:
    """Compute a case and compare it with its expected values. Raise ValueError if it has none, or is invalid."""
    found = computed(case, group)
    given = {name: case[name] for name in EXPECTED if name in case}
    values = list(pairs(given, found, "", case))
    if not values:
        raise ValueError(f"{named(case)} has no expected value: add one")
    tolerance = case.get("rel_tol", TOLERANCE)
    if not fits(tolerance, float) or tolerance < 0:
        raise ValueError(f"{named(case)} has rel_tol={short_repr(tolerance)}: give a number of at least 0")
    problems, worst, rounded = [], 0.0, 0
    for name, expected, got in values:
        off = abs(got - expected)
        deviation = off / (abs(expected) or 1.0)
        if deviation > tolerance and "inputs" in case and off <= half_unit(expected):
            rounded += 1
            continue
        worst = max(worst, deviation)
        if deviation > tolerance:
            problems.append(f"{case.get('id', '?')}: {name} expected {expected}, got {got}")
    return CaseOutcome(problems, worst, rounded)


def pairs(expected: Any, got: Any, name: str, case: Case) -> Iterator[Value]:
    """Yield each expected number of a case, at any depth, with the computed one."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key not in got:
                raise ValueError(f"{named(case)} expects {short_repr(key)}, which is unknown: remove it")
            yield from pairs(value, got[key], f"{name}.{key}".lstrip("."), case)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (value, other) in enumerate(zip(expected, got)):
            yield from pairs(value, other, f"{name}[{index}]", case)
    elif fits(expected, float) and not isinstance(got, (dict, list)):
        yield name, expected, float(got)
    else:
        raise ValueError(f"{named(case)} expects {name}={short_repr(expected)}: give it the form of the result")


def half_unit(value: float) -> float:
    """Return half a unit of the last digit that a number shows, plus a margin for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** exponent * (1 + 1e-6) if isinstance(exponent, int) else 0.0


def named(case: Case) -> str:
    """Return the name of a case for a message."""
    return f"the case {short_repr(case.get('id', '?'))}"


# --- counting ---------------------------------------------------------------------------------------------------------

def deterministic(c: float, a: float, k: int, S: int, failure_cost: float) -> Results:
    """Return the costs if no draft is accepted (a = 0), or every one (a = 1)."""
    if a not in (0, 1):
        raise ValueError(f"has a={a}, with which its cost is random: give 0 or 1")
    return trace(c, k, S, failure_cost, [], k if a == 1 else 0)


def trace(c: float, k: int, S: int, failure_cost: float, accept_draws: list[int],
          pad_with: int = 0) -> Results:
    """Return the costs for a given number of accepted drafts in each window."""
    windows = np.full(S, pad_with)
    windows[:len(accept_draws)] = accept_draws[:S]
    setting = failure_cost, c, k
    found: Results = {"nonsi_cost": S * failure_cost,
                      "ideal_dsi_cost": counted(cost_model.dsi(*setting), windows, S).cost}
    decodings = {"si": cost_model.si(*setting), "dsi": cost_model.dsi(*setting, "original")}
    for name, decoding in decodings.items():
        found[name] = dict(zip(("cost", "iters"), counted(decoding, windows, S)))
    return found


# --- analytic quantities ----------------------------------------------------------------------------------------------

def lookahead(target_latency: float, drafter_latency: float, SP: int) -> Results:
    """Return the smallest lookahead of Eq. 1, the servers that it needs, and the most that any lookahead can use."""
    least = formulas.least_lookahead(target_latency, drafter_latency, SP)
    return {"expected": least,
            "required_at_k": formulas.servers_needed(target_latency, drafter_latency, least),
            "useful_max_SP": formulas.servers_needed(target_latency, drafter_latency, 1)}


def long_run(c: float, a: float, k: int, failure_cost: float) -> Results:
    """Return the cost per token in the long run."""
    setting = failure_cost, c, a, k
    return {"expected": {
        "nonsi": failure_cost, "si": formulas.si_rate(*setting),
        "dsi_sim": formulas.dsi_rate(*setting, "original"),
        "dsi_sim_without_min": formulas.dsi_rate(*setting, "original", has_bare=False),
        "dsi_ideal": formulas.dsi_rate(*setting), "dsi_ideal_without_min": formulas.dsi_rate(*setting, has_bare=False)}}


def proposition(t1: float, t2: float, p: float, N: int) -> Results:
    """Return the bound of Proposition 1 on the mean time of N tokens by DSI with lookahead 1."""
    later = N - 1
    bound = t1 * p * later + t2 * ((1 - p) * later + 1)
    return {"expected": bound, "nonsi": t2 * N}


def output_tokens(target_latency: float, drafter_latency: float, lookahead: int, times: Mapping[str, float],
                  SP: float = math.inf) -> Results:
    """Return the tokens of Figure 1 and Table 1 at given times, if no draft is accepted (worst) or all are (best)."""
    tick = target_latency / TICKS
    draft = max(1, round(drafter_latency / tick))
    servers = min(SP, 1 + int(formulas.servers_needed(TICKS, draft, lookahead)))
    moments = [moment / tick * (1 + formulas.SLACK) for moment in times.values()]
    tokens = 2 + lookahead + int(max(moments, default=0) / min(TICKS, draft))
    if max(tokens, servers) > LONGEST:
        raise ValueError(f"needs more than {LONGEST} tokens or servers: give earlier times, or fewer servers")
    target, drafter = Forward(TICKS, TICKS), Forward(draft, draft)
    plan = EventPlan(tokens, lookahead, int(servers), target, drafter)
    methods = {"nonsi": "non-SI", "si": "SI", "dsi": "DSI"}
    found: Results = {}
    for name, right in (("worst", False), ("best", True)):
        found[name] = {}
        for shown_name, method in methods.items():
            outcome = decode(method, plan, [right] * tokens)
            found[name][shown_name] = list(map(outcome.settled_by, moments))
    return {"expected": found}


def forwards(target_latency: float, drafter_latency: float, lookahead: int, mean_accepted: float,
             N: int) -> Results:
    """Return the cost of SI by counting forwards (appendix F.3): a round settles one token more than it accepts."""
    rounds = N / (mean_accepted + 1)
    plain, si = target_latency * N, rounds * (target_latency + lookahead * drafter_latency)
    return {"expected": {"target_forwards": rounds, "drafter_forwards": rounds * lookahead, "si": si, "nonsi": plain,
                         "speedup": plain / si}}


def visible(a: float, lookahead: int) -> Results:
    """Return the share of target forwards that add latency, and the speed-up by model parallelism that equals it."""
    share = formulas.visible_fraction(a, lookahead)
    with np.errstate(divide="ignore"):
        return {"expected": {"visible_fraction": share, "mp_breakeven": 1 / share}}


def perfect(c: float, k: int, failure_cost: float = 1.0) -> Results:
    """Return the speed-up of DSI over SI if every draft is accepted: (T + k d) / ((k + 1) d)."""
    setting = failure_cost, c, 1.0, k
    return {"expected": formulas.si_rate(*setting) / formulas.dsi_rate(*setting)}


KINDS: dict[str, Callable[..., Results]] = {"offline_deterministic": deterministic, "offline_trace": trace}
QUANTITIES: dict[str, Callable[..., Results]] = {  # by words that occur in the `quantity` of an analytic case
    "minimal lookahead": lookahead, "long-run cost per token": long_run, "proposition 1": proposition,
    "number of output tokens": output_tokens, "counting forwards": forwards,
    "fraction of target forwards": visible, "dsi/si speedup with a=1": perfect}


def computed(case: Case, group: str) -> Results:
    """Return all results for a case. Its kind is its own `kind`, or else the name of its group.

    Raises ValueError for an unknown kind or quantity.
    """
    singular = group[:-1]  # offline_trace from offline_traces
    kind = case.get("kind", singular if singular in KINDS else group)
    if isinstance(kind, str) and kind in KINDS:
        return _call(KINDS[kind], case, "params")
    if kind != "analytic":
        raise ValueError(f"{named(case)} has kind {short_repr(kind)}, which is unknown: give one of "
                         f"{', '.join([*KINDS, 'analytic'])}")
    quantity = str(case.get("quantity", "")).lower()
    found = [function for words, function in QUANTITIES.items() if words in quantity]
    if not found:
        raise ValueError(f"{named(case)} has quantity {short_repr(case.get('quantity'))}, which is unknown: give a "
                         f"text that contains one of {', '.join(QUANTITIES)}")
    inputs = case.get("inputs")
    if not isinstance(inputs, list):
        return _call(found[0], case, "inputs")
    several = (_call(found[0], {**case, "inputs": each}, "inputs") for each in inputs)
    return {"expected": [one["expected"] for one in several]}


def _call(function: Callable[..., Results], case: Case, part: str) -> Results:
    """Call a function with the arguments from a part of a case and from its draws; other values are ignored."""
    check(case, {part: OBJECT}, named(case), MEND, needed=[part])
    draws = {name: case[name] for name in DRAWS if name in case}
    given = {**case[part], **draws}
    arguments = signature(function).parameters
    needed = [name for name, argument in arguments.items() if argument.default is argument.empty]
    check(given, INPUTS, f"{named(case)}, in its {part},", MEND, needed)
    try:
        return function(**{name: given[name] for name in arguments if name in given})
    except ValueError as error:
        raise ValueError(f"{named(case)} {error}") from error
