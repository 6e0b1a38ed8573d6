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
MAX_TOKENS = 10_000  # of a simulation by events


@dataclass(frozen=True)
class Cases(Checked):
    """Recompute reference cases of the paper's offline simulator and of its analysis, and compare the results.

    The exit code is 0 if all agree, 1 if one does not, and 2 if the file is invalid. A counted cost agrees within the
    relative tolerance of its case (rel_tol, or 1e-9). An analytic value also agrees if it rounds to the digits that the
    file shows; the deviation of such a rounded value is not counted.
    """

    EXAMPLES = f"  {COMMAND} cases tests/golden/dsi/cases.json"

    file: str = key("", "JSON file of cases; the key may be omitted if it is the first argument", heading="Input",
        names_file=True)

    def problems(self) -> Iterator[str]:
        if not self.file:
            yield f"file is missing: {REMEDY}"


class CaseOutcome(NamedTuple):
    """The outcome of a case."""

    problems: list[str]  # a line for each value that does not agree
    max_deviation: float  # largest relative deviation, of the values that are not counted as rounded
    num_rounded: int  # number of values that agree only to the digits that the file shows


def main(argv: Sequence[str]) -> int:
    """Print how many cases of each group agree, and return the exit code."""
    path = preset_of(argv)
    words = [f"file={path}", *argv[1:]] if path and path not in HELP else argv
    config = read_keys(words, Cases, f"{COMMAND} cases")

    outcomes_by_group = {}
    for group, cases in read(config.file).items():
        outcomes_by_group[group] = [compared(case, group) for case in cases]
    all_outcomes = list(chain(*outcomes_by_group.values()))
    all_problems = [problem for outcome in all_outcomes for problem in outcome.problems]

    lines = [line(group, outcomes) for group, outcomes in outcomes_by_group.items()]
    lines += [*all_problems, line("all", all_outcomes)]
    print("\n".join(map(one_line, lines)))
    return 1 if all_problems else 0


def line(name: str, outcomes: Sequence[CaseOutcome]) -> str:
    """Return one line about a group, or about all."""
    num_agreed = sum(not outcome.problems for outcome in outcomes)
    max_deviation = max((outcome.max_deviation for outcome in outcomes), default=0.0)
    num_rounded = sum(outcome.num_rounded for outcome in outcomes)

    rounded_note = f", not counting {num_rounded} rounded in the file" if num_rounded else ""
    return (f"{name:<24}{num_agreed:>5} of {len(outcomes)} agree, "
            f"worst deviation {max_deviation:.1e}{rounded_note}")


def read(path: str) -> dict[str, list[Case]]:
    """Return the cases of a file by group. Raise ValueError if it is no file of cases."""
    groups: Any = parse_object(read_bytes(path, REMEDY, LARGEST), path, REMEDY).get("groups")
    case_lists = [*groups.values()] if isinstance(groups, dict) else []
    if not fits(case_lists, [[dict]]) or not any(case_lists):
        raise ValueError(f'{path} has no object "groups" of lists of cases: {REMEDY}')
    return dict(groups)


# --- comparing --------------------------------------------------------------------------------------------------------

def compared(case: Case, group: str) -> CaseOutcome:
    """Compute a case and compare it with its expected values. Raise ValueError if it has none, or is invalid."""
    results = computed(case, group)
    expected_results = {name: case[name] for name in EXPECTED if name in case}
    values = list(pairs(expected_results, results, "", case))
    if not values:
        raise ValueError(f"{name_of(case)} has no expected value: add one")

    tolerance = case.get("rel_tol", TOLERANCE)
    if not fits(tolerance, float) or tolerance < 0:
        raise ValueError(f"{name_of(case)} has rel_tol={short_repr(tolerance)}: give a number of at least 0")

    problems, max_deviation, num_rounded = [], 0.0, 0
    for name, expected_value, computed_value in values:
        difference = abs(computed_value - expected_value)
        deviation = difference / (abs(expected_value) or 1.0)
        if deviation > tolerance and "inputs" in case and difference <= half_unit(expected_value):
            num_rounded += 1
            continue

        max_deviation = max(max_deviation, deviation)
        if deviation > tolerance:
            problems.append(f"{case.get('id', '?')}: {name} expected {expected_value}, got {computed_value}")
    return CaseOutcome(problems, max_deviation, num_rounded)


def pairs(expected: Any, result: Any, name: str, case: Case) -> Iterator[Value]:
    """Yield each expected number of a case, at any depth, with the computed one."""
    if isinstance(expected, dict) and isinstance(result, dict):
        for key, value in expected.items():
            if key not in result:
                raise ValueError(f"{name_of(case)} expects {short_repr(key)}, which is unknown: remove it")
            yield from pairs(value, result[key], f"{name}.{key}".lstrip("."), case)

    elif isinstance(expected, list) and isinstance(result, list) and len(expected) == len(result):
        for index, (value, result_value) in enumerate(zip(expected, result)):
            yield from pairs(value, result_value, f"{name}[{index}]", case)

    elif fits(expected, float) and not isinstance(result, (dict, list)):
        yield name, expected, float(result)
    else:
        raise ValueError(f"{name_of(case)} expects {name}={short_repr(expected)}: give it the form of the result")


def half_unit(value: float) -> float:
    """Return half a unit of the last digit that a number shows, plus a margin for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** exponent * (1 + 1e-6) if isinstance(exponent, int) else 0.0


def name_of(case: Case) -> str:
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
    results: Results = {"nonsi_cost": S * failure_cost,
                        "ideal_dsi_cost": counted(cost_model.dsi(*setting), windows, S).cost}
    decoding_by_name = {"si": cost_model.si(*setting), "dsi": cost_model.dsi(*setting, "original")}
    for name, decoding in decoding_by_name.items():
        results[name] = dict(zip(("cost", "iters"), counted(decoding, windows, S)))
    return results


# --- analytic quantities ----------------------------------------------------------------------------------------------

def lookahead(target_latency: float, drafter_latency: float, SP: int) -> Results:
    """Return the smallest lookahead of Eq. 1, the servers that it needs, and the most that any lookahead can use."""
    min_lookahead = formulas.least_lookahead(target_latency, drafter_latency, SP)
    return {"expected": min_lookahead,
            "required_at_k": formulas.servers_needed(target_latency, drafter_latency, min_lookahead),
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
    num_later = N - 1
    bound = t1 * p * num_later + t2 * ((1 - p) * num_later + 1)
    return {"expected": bound, "nonsi": t2 * N}


def output_tokens(target_latency: float, drafter_latency: float, lookahead: int, times: Mapping[str, float],
                  SP: float = math.inf) -> Results:
    """Return the tokens of Figure 1 and Table 1 at given times, if no draft is accepted (worst) or all are (best)."""
    tick = target_latency / TICKS
    draft_ticks = max(1, round(drafter_latency / tick))
    num_servers = min(SP, 1 + int(formulas.servers_needed(TICKS, draft_ticks, lookahead)))

    moments = [moment / tick * (1 + formulas.SLACK) for moment in times.values()]
    num_tokens = 2 + lookahead + int(max(moments, default=0) / min(TICKS, draft_ticks))
    if max(num_tokens, num_servers) > MAX_TOKENS:
        raise ValueError(f"needs more than {MAX_TOKENS} tokens or servers: give earlier times, or fewer servers")

    target, drafter = Forward(TICKS, TICKS), Forward(draft_ticks, draft_ticks)
    plan = EventPlan(num_tokens, lookahead, int(num_servers), target, drafter)
    method_by_name = {"nonsi": "non-SI", "si": "SI", "dsi": "DSI"}
    counts: Results = {}
    for bound, is_correct in (("worst", False), ("best", True)):
        counts[bound] = {}
        for name, method in method_by_name.items():
            outcome = decode(method, plan, [is_correct] * num_tokens)
            counts[bound][name] = list(map(outcome.settled_by, moments))
    return {"expected": counts}


def forwards(target_latency: float, drafter_latency: float, lookahead: int, mean_accepted: float,
             N: int) -> Results:
    """Return the cost of SI by counting forwards (appendix F.3): a round settles one token more than it accepts."""
    num_rounds = N / (mean_accepted + 1)
    si_cost = num_rounds * (target_latency + lookahead * drafter_latency)
    plain_cost = target_latency * N
    return {"expected": {"target_forwards": num_rounds, "drafter_forwards": num_rounds * lookahead,
                         "si": si_cost, "nonsi": plain_cost, "speedup": plain_cost / si_cost}}


def visible(a: float, lookahead: int) -> Results:
    """Return the share of target forwards that add latency, and the speed-up by model parallelism that equals it."""
    visible_share = formulas.visible_fraction(a, lookahead)
    with np.errstate(divide="ignore"):
        return {"expected": {"visible_fraction": visible_share, "mp_breakeven": 1 / visible_share}}


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
    group_kind = group[:-1]  # offline_trace from offline_traces
    kind = case.get("kind", group_kind if group_kind in KINDS else group)
    if isinstance(kind, str) and kind in KINDS:
        return _call(KINDS[kind], case, "params")
    if kind != "analytic":
        raise ValueError(f"{name_of(case)} has kind {short_repr(kind)}, which is unknown: give one of "
                         f"{', '.join([*KINDS, 'analytic'])}")

    quantity = str(case.get("quantity", "")).lower()
    functions = [function for words, function in QUANTITIES.items() if words in quantity]
    if not functions:
        raise ValueError(f"{name_of(case)} has quantity {short_repr(case.get('quantity'))}, which is unknown: give a "
                         f"text that contains one of {', '.join(QUANTITIES)}")

    inputs = case.get("inputs")
    if not isinstance(inputs, list):
        return _call(functions[0], case, "inputs")
    single_cases = ({**case, "inputs": single_inputs} for single_inputs in inputs)
    all_results = (_call(functions[0], single_case, "inputs") for single_case in single_cases)
    return {"expected": [results["expected"] for results in all_results]}


def _call(function: Callable[..., Results], case: Case, part_name: str) -> Results:
    """Call a function with the arguments from a part of a case and from its draws; other values are ignored."""
    check(case, {part_name: OBJECT}, name_of(case), MEND, needed=[part_name])
    draws = {name: case[name] for name in DRAWS if name in case}
    inputs = {**case[part_name], **draws}

    parameters = signature(function).parameters
    needed_names = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    check(inputs, INPUTS, f"{name_of(case)}, in its {part_name},", MEND, needed_names)

    try:
        return function(**{name: inputs[name] for name in parameters if name in inputs})
    except ValueError as error:
        raise ValueError(f"{name_of(case)} {error}") from error
