"""Recompute the reference cases of the paper's offline simulator and analysis, and report which agree.

One function counts the cost of a text; each analytic quantity has its own. The arguments of these have the names of the
inputs of their cases, and all results have the names of the expected values.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence

import numpy as np

from config.files import fits, read_json_file
from config.keys import Checked, key
from config.schema.untrusted import one_line, short_repr
from eval.dsi import cost_model, formulas
from eval.dsi.keys import COMMAND
from eval.dsi.paper import output_tokens

Case = Mapping[str, Any]
Problems = List[str]  # a line for each value of a case that does not agree
ComputedValues = Dict[str, Any]  # by the names of expected values
REMEDY = "name a JSON file of reference cases, such as tests/golden/dsi/cases.json"
TOLERANCE = 1e-9  # relative tolerance of a case without rel_tol


@dataclass(frozen=True)
class Cases(Checked):
    """Recompute reference cases of the paper's offline simulator and of its analysis, and compare the results.

    The exit code is 0 if all agree, 1 if one does not, and 2 if the file is invalid. A counted cost agrees within the
    relative tolerance of its case (rel_tol, or 1e-9). An analytic value also agrees if it rounds to the digits that the
    file shows.
    """

    EXAMPLES = f"  {COMMAND} cases tests/golden/dsi/cases.json"

    file: str = key("", "JSON file of cases; the key may be omitted if it is the first argument", heading="Input",
        names_file=True)

    def problems(self) -> Iterator[str]:
        if not self.file:
            yield f"file is missing: {REMEDY}"


def main(config: Cases) -> int:
    """Print how many cases of each group agree, and return the exit code."""
    content = read_json_file(config.file, REMEDY)
    if not fits(content, {"groups": dict}) or not fits([*content["groups"].values()], [[dict]]):
        raise ValueError(f'{config.file} has no object "groups" of lists of cases: {REMEDY}')

    problems_by_group = {group: list(map(problems_of, cases)) for group, cases in content["groups"].items()}
    all_cases = list(chain(*problems_by_group.values()))
    all_problems = list(chain(*all_cases))

    lines = [line(group, cases) for group, cases in problems_by_group.items()]
    lines += [*all_problems, line("all", all_cases)]
    print("\n".join(map(one_line, lines)))
    return 1 if all_problems else 0


def line(name: str, problems_by_case: Sequence[Problems]) -> str:
    """Return one line about a group, or about all."""
    num_agreed = problems_by_case.count([])
    return f"{name:<24}{num_agreed:>5} of {len(problems_by_case)} agree"


# --- comparing --------------------------------------------------------------------------------------------------------

def problems_of(case: Case) -> Problems:
    """Return a line for each expected value of a case that the computed one differs from.

    Raise ValueError for an invalid case.
    """
    try:
        results = computed(case)
        computed_values = dict(numbers(results))
        expected_values = dict(numbers({name: case[name] for name in results if name in case}))
        values_by_name = {name: (computed_values[name], expected) for name, expected in expected_values.items()}
        tolerance = float(case.get("rel_tol", TOLERANCE))
        if not expected_values:
            raise ValueError("it has no expected value")
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the case {short_repr(case.get('id'))} is invalid ({error!r}): correct it") from error

    problems = []
    for name, (computed_value, expected_value) in values_by_name.items():
        rounding = half_unit(expected_value) if "inputs" in case else 0.0
        max_difference = max(tolerance * (abs(expected_value) or 1.0), rounding)
        if abs(computed_value - expected_value) > max_difference:
            problems.append(f"{case.get('id')}: {name} expected {expected_value}, got {computed_value}")
    return problems


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number in a value, at any depth, with its name. Raise TypeError or ValueError for others."""
    if isinstance(value, list):
        value = {str(index): element for index, element in enumerate(value)}
    if isinstance(value, dict):
        for inner_name, inner_value in value.items():
            yield from numbers(inner_value, f"{name}.{inner_name}".lstrip("."))
    elif math.isfinite(value):
        yield name, value
    else:
        raise ValueError(f"{name} is {value}")


def half_unit(value: float) -> float:
    """Return half a unit of the last digit that a number shows, plus a margin for the rounding of doubles."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5 * 10.0 ** int(exponent) * (1 + 1e-6)


# --- quantities -------------------------------------------------------------------------------------------------------

def computed(case: Case) -> ComputedValues:
    """Return all results for a case. Raise LookupError, TypeError or ValueError if it is invalid."""
    if "params" in case:
        return counted_costs(case, **case["params"])
    quantity = case["quantity"].lower()
    [function] = [function for words, function in QUANTITIES.items() if words in quantity]

    if isinstance(case["inputs"], list):
        return {"expected": [function(**inputs)["expected"] for inputs in case["inputs"]]}
    return function(**case["inputs"])


def counted_costs(case: Case, c: float, k: int, S: int, failure_cost: float, a: float = 0) -> ComputedValues:
    """Return the costs by a number of accepted drafts for each window; without draws none is accepted, or all (a = 1).
    """
    if a not in (0, 1):
        raise ValueError(f"its cost is random with a={a}")
    draws = case.get("accept_draws", [])[:S]
    windows = np.full(S, case.get("pad_with", a * k))
    windows[:len(draws)] = draws

    setting = failure_cost, c, k
    decodings = cost_model.si(*setting), cost_model.dsi(*setting, "original"), cost_model.dsi(*setting)
    si, dsi, ideal_dsi = (cost_model.counted(decoding, windows, S)._asdict() for decoding in decodings)
    return {"nonsi_cost": S * failure_cost, "si": si, "dsi": dsi, "ideal_dsi_cost": ideal_dsi["cost"]}


def lookahead(target_latency: float, drafter_latency: float, SP: int) -> ComputedValues:
    """Return the smallest lookahead of Eq. 1, the servers that it needs, and the most that any lookahead can use."""
    min_lookahead = formulas.least_lookahead(target_latency, drafter_latency, SP)
    return {"expected": min_lookahead,
            "required_at_k": formulas.servers_needed(target_latency, drafter_latency, min_lookahead),
            "useful_max_SP": formulas.servers_needed(target_latency, drafter_latency, 1)}


def long_run(c: float, a: float, k: int, failure_cost: float = 1.0) -> ComputedValues:
    """Return the cost per token in the long run."""
    setting = failure_cost, c, a, k
    return {"expected": {
        "nonsi": failure_cost, "si": formulas.si_rate(*setting),
        "dsi_sim": formulas.dsi_rate(*setting, "original"),
        "dsi_sim_without_min": formulas.dsi_rate(*setting, "original", has_bare=False),
        "dsi_ideal": formulas.dsi_rate(*setting), "dsi_ideal_without_min": formulas.dsi_rate(*setting, has_bare=False)}}


def proposition(t1: float, t2: float, p: float, N: int) -> ComputedValues:
    """Return the bound of Proposition 1 on the mean time of N tokens by DSI with lookahead 1."""
    num_later = N - 1
    bound = t1 * p * num_later + t2 * ((1 - p) * num_later + 1)
    return {"expected": bound, "nonsi": t2 * N}


def forwards(target_latency: float, drafter_latency: float, lookahead: int, mean_accepted: float,
             N: int) -> ComputedValues:
    """Return the cost of SI by counting forwards (appendix F.3): a round settles one token more than it accepts."""
    num_rounds = N / (mean_accepted + 1)
    si_cost = num_rounds * (target_latency + lookahead * drafter_latency)
    plain_cost = target_latency * N
    return {"expected": {"target_forwards": num_rounds, "drafter_forwards": num_rounds * lookahead,
                         "si": si_cost, "nonsi": plain_cost, "speedup": plain_cost / si_cost}}


def visible(a: float, lookahead: int) -> ComputedValues:
    """Return the share of target forwards that add latency, and the speed-up by model parallelism that equals it."""
    visible_share = formulas.visible_fraction(a, lookahead)
    return {"expected": {"visible_fraction": visible_share, "mp_breakeven": 1 / visible_share}}


def perfect(c: float, k: int) -> ComputedValues:
    """Return the speed-up of DSI over SI if every draft is accepted: (T + k d) / ((k + 1) d)."""
    rates = long_run(c, 1.0, k)["expected"]
    return {"expected": rates["si"] / rates["dsi_ideal"]}


QUANTITIES: dict[str, Callable[..., ComputedValues]] = {  # by words that occur in the `quantity` of an analytic case
    "minimal lookahead": lookahead, "long-run cost per token": long_run, "proposition 1": proposition,
    "number of output tokens": lambda **inputs: {"expected": output_tokens(**inputs)},
    "counting forwards": forwards, "fraction of target forwards": visible, "dsi/si speedup with a=1": perfect}
