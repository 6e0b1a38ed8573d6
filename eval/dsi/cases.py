"""Reference cases of the paper's offline simulator and analysis, recomputed: which agree, and how far the worst is off.

A function for every kind of case, and one for every analytic quantity, whose arguments are named as the inputs of its
cases. Results are named as expected values are.
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
from config.keys import HELP, Checked, preset_of, read_keys
from config.schema.fields import OBJECT, Kind, check, integer, list_of, number
from config.schema.untrusted import LARGEST, parse_object, plain, read_bytes, shown
from eval.dsi import cost_model, formulas
from eval.dsi.cost_model import counted
from eval.dsi.events import Forward, Plan, decode
from eval.dsi.keys import COMMAND

Case = Mapping[str, Any]
Results = Dict[str, Any]  # by the names of expected values
Value = Tuple[str, float, float]  # the name of an expected value, that value, and what was computed for it
REMEDY = "name a JSON file of reference cases, as tests/golden/dsi/cases.json"
MEND = "mend the case"
DRAWS = ("accept_draws", "pad_with")  # which stand beside the parameters of a case
TOLERANCE = 1e-9  # relative, of a case that names none
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
TICKS = 10 ** 12  # of a forward of the target
LONGEST = 10_000  # tokens that events settle


@dataclass(frozen=True)
class Cases(Checked):
    """Computes reference cases of the paper's offline simulator and of its analysis, and compares.

    Exits with 0 if all agree, with 1 if one does not, and with 2 if the file makes no sense. A counted cost agrees
    within the relative tolerance of its case (rel_tol, or 1e-9), an analytic value also if it rounds to the digits that
    the file shows. The deviation of such a rounded value is not counted.
    """

    EXAMPLES = f"  {COMMAND} cases tests/golden/dsi/cases.json"
    PATHS = ("file",)

    # What is read
    file: str = ""  # the JSON file; also the first word alone

    def problems(self) -> Iterator[str]:
        if not self.file:
            yield f"there is no file of cases: {REMEDY}"


class Found(NamedTuple):
    """What came of a case."""

    problems: list[str]  # a line for each value that does not agree
    worst: float  # deviation of the values that are not rounded in the file, or do not round to what it shows
    rounded: int  # values that round to what the file shows, which is all that can be said of them


def main(argv: Sequence[str]) -> int:
    """Print how many cases of each group agree; the exit code."""
    path = preset_of(argv)
    words = [f"file={path}", *argv[1:]] if path and path not in HELP else argv
    asked = read_keys(words, Cases, f"{COMMAND} cases")
    groups = {}
    for group, cases in read(asked.file).items():
        groups[group] = [compared(case, group) for case in cases]
    every = list(chain(*groups.values()))
    lines = [line(*group) for group in groups.items()]
    lines += [problem for found in every for problem in found.problems]
    print("\n".join(map(plain, [*lines, line("all", every)])))
    return 1 if any(found.problems for found in every) else 0


def line(name: str, cases: Sequence[Found]) -> str:
    """One line about a group, or about all."""
    agreed = sum(not found.problems for found in cases)
    worst = max((found.worst for found in cases), default=0.0)
    rounded = sum(found.rounded for found in cases)
    apart = f", not counting {rounded} rounded in the file" if rounded else ""
    return f"{name:<24}{agreed:>5} of {len(cases)} agree, worst deviation {worst:.1e}{apart}"


def read(path: str) -> dict[str, list[Case]]:
    """The cases of a file by group. Raises ValueError if it is none."""
    groups: Any = parse_object(read_bytes(path, REMEDY, LARGEST), path, REMEDY).get("groups")
    lists = [*groups.values()] if isinstance(groups, dict) else []
    if not fits(lists, [[dict]]) or not any(lists):
        raise ValueError(f'{path} has no object "groups" of lists of cases: {REMEDY}')
    return dict(groups)


# --- comparing --------------------------------------------------------------------------------------------------------

def compared(case: Case, group: str) -> Found:
    """A case beside what is computed for it. Raises ValueError if it has nothing to compare, or makes no sense."""
    found = computed(case, group)
    given = {name: case[name] for name in EXPECTED if name in case}
    values = list(pairs(given, found, "", case))
    if not values:
        raise ValueError(f"{named(case)} expects nothing: give it an expected value")
    tolerance = case.get("rel_tol", TOLERANCE)
    if not fits(tolerance, float) or tolerance < 0:
        raise ValueError(f"{named(case)} says rel_tol={shown(tolerance)}, which should be a number from 0")
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
    return Found(problems, worst, rounded)


def pairs(expected: Any, got: Any, name: str, case: Case) -> Iterator[Value]:
    """The expected numbers of a case beside those that were computed, at any depth."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key not in got:
                raise ValueError(f"{named(case)} expects {shown(key)}, which is unknown: leave it out")
            yield from pairs(value, got[key], f"{name}.{key}".lstrip("."), case)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (value, other) in enumerate(zip(expected, got)):
            yield from pairs(value, other, f"{name}[{index}]", case)
    elif fits(expected, float) and not isinstance(got, (dict, list)):
        yield name, expected, float(got)
    else:
        raise ValueError(f"{named(case)} expects {name}={shown(expected)}, which has not the form of what it asks for")


def half_unit(value: float) -> float:
    """Half a unit of the last digit that a number shows, and a bit for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** exponent * (1 + 1e-6) if isinstance(exponent, int) else 0.0


def named(case: Case) -> str:
    """How a sentence calls a case."""
    return f"the case {shown(case.get('id', '?'))}"


# --- counting ---------------------------------------------------------------------------------------------------------

def deterministic(c: float, a: float, k: int, S: int, failure_cost: float) -> Results:
    """No draft is right (a = 0), or every draft is (a = 1)."""
    if a not in (0, 1):
        raise ValueError(f"has a={a}, which leaves its cost to chance: give 0 or 1")
    return trace(c, k, S, failure_cost, [], k if a == 1 else 0)


def trace(c: float, k: int, S: int, failure_cost: float, accept_draws: list[int],
          pad_with: int = 0) -> Results:
    """The accepted drafts are given window by window."""
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
    """The least lookahead of Eq. 1, the servers that it needs, and the most that are of use at any."""
    least = formulas.least_lookahead(target_latency, drafter_latency, SP)
    return {"expected": least,
            "required_at_k": formulas.servers_needed(target_latency, drafter_latency, least),
            "useful_max_SP": formulas.servers_needed(target_latency, drafter_latency, 1)}


def long_run(c: float, a: float, k: int, failure_cost: float) -> Results:
    """The cost per token of a text without end."""
    setting = failure_cost, c, a, k
    return {"expected": {
        "nonsi": failure_cost, "si": formulas.si_rate(*setting),
        "dsi_sim": formulas.dsi_rate(*setting, "original"),
        "dsi_sim_without_min": formulas.dsi_rate(*setting, "original", bare=False),
        "dsi_ideal": formulas.dsi_rate(*setting), "dsi_ideal_without_min": formulas.dsi_rate(*setting, bare=False)}}


def proposition(t1: float, t2: float, p: float, N: int) -> Results:
    """Proposition 1: the most that DSI with lookahead 1 takes for so many tokens, in the mean."""
    later = N - 1
    bound = t1 * p * later + t2 * ((1 - p) * later + 1)
    return {"expected": bound, "nonsi": t2 * N}


def output_tokens(target_latency: float, drafter_latency: float, lookahead: int, times: Mapping[str, float],
                  SP: float = math.inf) -> Results:
    """The tokens of Figure 1 and Table 1 at given moments, if no draft is right (worst) or every draft is (best)."""
    tick = target_latency / TICKS
    draft = max(1, round(drafter_latency / tick))
    servers = min(SP, 1 + int(formulas.servers_needed(TICKS, draft, lookahead)))
    moments = [moment / tick * (1 + formulas.SLACK) for moment in times.values()]
    tokens = 2 + lookahead + int(max(moments, default=0) / min(TICKS, draft))
    if max(tokens, servers) > LONGEST:
        raise ValueError(f"has moments with more than {LONGEST} tokens or servers; {MEND}")
    target, drafter = Forward(TICKS, TICKS), Forward(draft, draft)
    plan = Plan(tokens, lookahead, int(servers), target, drafter)
    methods = {"nonsi": "non-SI", "si": "SI", "dsi": "DSI"}
    found: Results = {}
    for name, right in (("worst", False), ("best", True)):
        found[name] = {}
        for key, method in methods.items():
            outcome = decode(method, plan, [right] * tokens)
            found[name][key] = list(map(outcome.settled, moments))
    return {"expected": found}


def forwards(target_latency: float, drafter_latency: float, lookahead: int, mean_accepted: float,
             N: int) -> Results:
    """SI by counting forwards, as in appendix F.3: a round settles one token more than is accepted."""
    rounds = N / (mean_accepted + 1)
    plain, si = target_latency * N, rounds * (target_latency + lookahead * drafter_latency)
    return {"expected": {"target_forwards": rounds, "drafter_forwards": rounds * lookahead, "si": si, "nonsi": plain,
                         "speedup": plain / si}}


def visible(a: float, lookahead: int) -> Results:
    """The forwards of the target that cost latency, and the speed-up by model parallelism that is as good."""
    share = formulas.visible_fraction(a, lookahead)
    with np.errstate(divide="ignore"):
        return {"expected": {"visible_fraction": share, "mp_breakeven": 1 / share}}


def perfect(c: float, k: int, failure_cost: float = 1.0) -> Results:
    """DSI over SI if every draft is right: (T + k d) / ((k + 1) d)."""
    setting = failure_cost, c, 1.0, k
    return {"expected": formulas.si_rate(*setting) / formulas.dsi_rate(*setting)}


KINDS: dict[str, Callable[..., Results]] = {"offline_deterministic": deterministic, "offline_trace": trace}
QUANTITIES: dict[str, Callable[..., Results]] = {  # by words out of an analytic case's `quantity`
    "minimal lookahead": lookahead, "long-run cost per token": long_run, "proposition 1": proposition,
    "number of output tokens": output_tokens, "counting forwards": forwards,
    "fraction of target forwards": visible, "dsi/si speedup with a=1": perfect}


def computed(case: Case, group: str) -> Results:
    """All that can be said about a case, whose kind is what it says, or else what its group is called.

    Raises ValueError for a kind or a quantity that there is not.
    """
    one_of_them = group[:-1]  # as offline_trace of offline_traces
    kind = case.get("kind", one_of_them if one_of_them in KINDS else group)
    if isinstance(kind, str) and kind in KINDS:
        return _of(KINDS[kind], case, "params")
    if kind != "analytic":
        raise ValueError(f"{named(case)} is of the kind {shown(kind)}, which is unknown: give one of "
                         f"{', '.join([*KINDS, 'analytic'])}")
    quantity = str(case.get("quantity", "")).lower()
    found = [function for words, function in QUANTITIES.items() if words in quantity]
    if not found:
        raise ValueError(f"{named(case)} asks for the quantity {shown(case.get('quantity'))}, which is unknown: give "
                         f"one with the words {', '.join(QUANTITIES)}")
    asked = case.get("inputs")
    if not isinstance(asked, list):
        return _of(found[0], case, "inputs")
    several = (_of(found[0], {**case, "inputs": each}, "inputs") for each in asked)
    return {"expected": [one["expected"] for one in several]}


def _of(function: Callable[..., Results], case: Case, part: str) -> Results:
    """What a function says of a part of a case and its draws; values that it does not ask for are ignored."""
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
