"""What a reference case asks for: a function for every kind of case, and for every analytic quantity.

The arguments of an analytic quantity are named as the inputs of its cases. Results are named as expected values are. A
field that is missing or makes no sense is a ValueError.
"""
from __future__ import annotations

import math
from inspect import signature
from typing import Any, Callable, Dict, Mapping

import numpy as np

from config.schema.fields import OBJECT, Kind, check, list_of, number, whole
from config.schema.untrusted import shown
from eval.dsi import formulas
from eval.dsi.counting import Times, count_dsi, count_si, settled

Case = Mapping[str, Any]
Found = Dict[str, Any]  # by the names of expected values
POSITIVE, SHARE = number(1e-12, 1e12), number(0, 1)
COUNT, TOKENS = whole(1, 1_000_000_000), whole(1, 1_000_000)
DRAWS = list_of(whole(0, 1_000_000_000), 1_000_000)
MOMENT = number(0, 1e18)


def _are_moments(value: Any) -> bool:
    return isinstance(value, dict) and all(map(MOMENT.fits, value.values()))


MOMENTS = Kind(f"an object of moments, each {MOMENT.words}", _are_moments)
SETTING = {
    "c": POSITIVE, "failure_cost": POSITIVE, "a": SHARE, "k": COUNT, "S": TOKENS,
    "accept_draws": DRAWS, "pad_with": whole(0, 1_000_000_000),
}
INPUTS = {
    "target_latency": POSITIVE, "drafter_latency": POSITIVE, "SP": COUNT, "lookahead": COUNT,
    "c": POSITIVE, "failure_cost": POSITIVE, "a": SHARE, "k": COUNT,
    "t1": POSITIVE, "t2": POSITIVE, "p": SHARE, "N": TOKENS,
    "mean_accepted": number(0, 1e9), "times": MOMENTS,
}
REMEDY = "mend the case"
LONGEST = 1_000_000  # windows of DSI that are followed


def named(case: Case) -> str:
    """How a sentence calls a case."""
    return f"the case {shown(case.get('id', '?'))}"


# --- counting ---------------------------------------------------------------------------------------------------------

def deterministic(case: Case) -> Found:
    """No draft is right (a = 0), or every draft is (a = 1)."""
    given = _part(case, "params", SETTING, ["c", "a", "k", "S", "failure_cost"])
    if given["a"] not in (0, 1):
        raise ValueError(f"{named(case)} has a={given['a']}, which leaves its cost to chance: give 0 or 1")
    return _counted(given, [], given["k"] if given["a"] == 1 else 0)


def trace(case: Case) -> Found:
    """The accepted drafts are given in the case, window by window."""
    given = _part(case, "params", SETTING, ["c", "k", "S", "failure_cost"])
    check(case, SETTING, named(case), REMEDY, needed=["accept_draws"])
    return _counted(given, case["accept_draws"], case.get("pad_with", 0))


def _counted(given: Case, draws: list[int], padding: int) -> Found:
    times = Times(given["failure_cost"], given["c"])
    text = times, given["k"], given["S"], draws, padding
    si, dsi = count_si(*text), count_dsi(*text, "original")
    return {"nonsi_cost": given["S"] * times.target, "ideal_dsi_cost": count_dsi(*text, "corrected").cost,
            "si": {"cost": si.cost, "iters": si.iterations},
            "dsi": {"cost": dsi.cost, "iters": dsi.iterations}}


def _part(case: Case, name: str, table: Mapping[str, Kind], needed: list[str]) -> Any:
    """The parameters or inputs of a case, checked."""
    check(case, {name: OBJECT}, named(case), REMEDY, needed=[name])
    check(case[name], table, f"{named(case)}, in its {name},", REMEDY, needed)
    return case[name]


# --- analytic ---------------------------------------------------------------------------------------------------------

def lookahead(target_latency: float, drafter_latency: float, SP: int) -> Found:
    """The least lookahead of Eq. 1, the servers that it needs, and the most that are of use at any."""
    least = formulas.least_lookahead(target_latency, drafter_latency, SP)
    return {"expected": least,
            "required_at_k": formulas.servers_needed(target_latency, drafter_latency, least),
            "useful_max_SP": formulas.servers_needed(target_latency, drafter_latency, 1)}


def long_run(c: float, a: float, k: int, failure_cost: float) -> Found:
    """The cost per token of a text without end."""
    setting = failure_cost, c, a, k
    return {"expected": {
        "nonsi": failure_cost, "si": formulas.si_rate(*setting),
        "dsi_sim": formulas.dsi_rate(*setting, "original"),
        "dsi_sim_without_min": formulas.dsi_rate(*setting, "original", bare=False),
        "dsi_ideal": formulas.dsi_rate(*setting), "dsi_ideal_without_min": formulas.dsi_rate(*setting, bare=False)}}


def proposition(t1: float, t2: float, p: float, N: int) -> Found:
    """The bound of Proposition 1."""
    return {"expected": formulas.proposition_bound(t2, t1, p, N), "nonsi": t2 * N}


def output_tokens(target_latency: float, drafter_latency: float, lookahead: int, times: Mapping[str, float],
                  SP: float = math.inf) -> Found:
    """The tokens of Figure 1 and Table 1 at given moments, if no draft is right (worst) or every draft is (best)."""
    window = min(target_latency, drafter_latency * lookahead)
    if max(times.values(), default=0) > LONGEST * window:
        raise ValueError(f"has moments after more than {LONGEST} windows; {REMEDY}")
    found: dict[str, dict[str, list[int]]] = {}
    for name, right in (("worst", False), ("best", True)):
        counts = [settled(Times(target_latency, drafter_latency), lookahead, moment, right, SP)
                  for moment in times.values()]
        found[name] = {}
        for method in ("nonsi", "si", "dsi"):
            found[name][method] = [count[method] for count in counts]
    return {"expected": found}


def forwards(target_latency: float, drafter_latency: float, lookahead: int, mean_accepted: float, N: int) -> Found:
    """SI by counting forwards, as in appendix F.3: a round settles one token more than is accepted."""
    rounds = N / (mean_accepted + 1)
    plain, si = target_latency * N, rounds * (target_latency + lookahead * drafter_latency)
    return {"expected": {"target_forwards": rounds, "drafter_forwards": rounds * lookahead, "si": si, "nonsi": plain,
                         "speedup": plain / si}}


def visible(a: float, lookahead: int) -> Found:
    """The forwards of the target that cost latency, and the speed-up by model parallelism that is as good."""
    share = formulas.visible_fraction(a, lookahead)
    with np.errstate(divide="ignore"):
        return {"expected": {"visible_fraction": share, "mp_breakeven": 1 / share}}


def perfect(c: float, k: int, failure_cost: float = 1.0) -> Found:
    """DSI over SI if every draft is right: (T + k d) / ((k + 1) d)."""
    setting = failure_cost, c, 1.0, k
    return {"expected": formulas.si_rate(*setting) / formulas.dsi_rate(*setting)}


KINDS: dict[str, Callable[[Case], Found]] = {"offline_deterministic": deterministic, "offline_trace": trace}
QUANTITIES: dict[str, Callable[..., Found]] = {  # by words out of an analytic case's `quantity`
    "minimal lookahead": lookahead, "long-run cost per token": long_run, "proposition 1": proposition,
    "number of output tokens": output_tokens, "counting forwards": forwards,
    "fraction of target forwards": visible, "dsi/si speedup with a=1": perfect}


def computed(case: Case, group: str) -> Found:
    """All that can be said about a case, whose kind is what it says, or else what its group is called.

    Raises ValueError for a kind or a quantity that there is not.
    """
    one_of_them = group[:-1]  # as offline_trace of offline_traces
    kind = case.get("kind", one_of_them if one_of_them in KINDS else group)
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind](case)
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
        return _of_inputs(found[0], case)
    several = [_of_inputs(found[0], {**case, "inputs": each}) for each in asked]
    return {"expected": [one["expected"] for one in several]}


def _of_inputs(function: Callable[..., Found], case: Case) -> Found:
    """A quantity for the inputs of a case, of which those that it does not ask for are ignored."""
    arguments = signature(function).parameters
    needed = [name for name, argument in arguments.items() if argument.default is argument.empty]
    given = _part(case, "inputs", INPUTS, needed)
    try:
        return function(**{name: given[name] for name in arguments if name in given})
    except ValueError as error:
        raise ValueError(f"{named(case)} {error}") from error
