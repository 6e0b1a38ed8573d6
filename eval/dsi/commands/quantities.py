"""What a reference case asks for, computed: a function for every kind of case, and for every analytic quantity.

Each is given a case, a JSON object, looks over what it needs, and returns everything that it can say about it, under
the names that the case's expected values have. A field that is missing or makes no sense is a ValueError.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Mapping

import numpy as np

from config.schema.fields import OBJECT, Kind, check, list_of, number, whole
from config.schema.untrusted import shown
from eval.dsi import formulas
from eval.dsi.counting import Times, count_dsi, count_si, settled

Case = Mapping[str, Any]
Found = Dict[str, Any]  # by the names of expected values
Computing = Callable[[Case], Found]
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


def params(case: Case, *needed: str) -> Any:
    """The parameters of a case of counting, looked over."""
    return _part(case, "params", SETTING, needed)


def inputs(case: Case, *needed: str) -> Any:
    """The inputs of an analytic case, looked over."""
    return _part(case, "inputs", INPUTS, needed)


def _part(case: Case, name: str, table: Mapping[str, Kind],
          needed: tuple[str, ...]) -> Any:
    check(case, {name: OBJECT}, named(case), REMEDY, needed=[name])
    check(case[name], table, f"{named(case)}, in its {name},", REMEDY, needed)
    return case[name]


# --- counting ---------------------------------------------------------------------------------------------------------

def deterministic(case: Case) -> Found:
    """No draft is right (a = 0), or every draft is (a = 1)."""
    given = params(case, "c", "a", "k", "S", "failure_cost")
    if given["a"] not in (0, 1):
        raise ValueError(f"{named(case)} has a={given['a']}, which leaves its cost to chance: give 0 or 1")
    return _counted(given, [], given["k"] if given["a"] == 1 else 0)


def trace(case: Case) -> Found:
    """What is accepted stands in the case, window by window."""
    given = params(case, "c", "k", "S", "failure_cost")
    check(case, SETTING, named(case), REMEDY, needed=["accept_draws"])
    return _counted(given, case["accept_draws"], case.get("pad_with", 0))


def _counted(given: Case, draws: list[int], padding: int) -> Found:
    times = Times(given["failure_cost"], given["c"])
    text = times, given["k"], given["S"], draws, padding
    si = count_si(*text)
    dsi = count_dsi(*text, "original")
    ideal = count_dsi(*text, "corrected")
    return {"nonsi_cost": given["S"] * times.target, "ideal_dsi_cost": ideal.cost,
            "si": {"cost": si.cost, "iters": si.iterations},
            "dsi": {"cost": dsi.cost, "iters": dsi.iterations}}


# --- analytic ---------------------------------------------------------------------------------------------------------

def lookahead(case: Case) -> Found:
    """The least lookahead of Eq. 1, the servers that it needs, and the most that are of use at any."""
    given = inputs(case, "target_latency", "drafter_latency", "SP")
    times = given["target_latency"], given["drafter_latency"]
    least = formulas.least_lookahead(*times, given["SP"])
    return {"expected": least, "required_at_k": formulas.servers_needed(*times, least),
            "useful_max_SP": formulas.servers_needed(*times, 1)}


def long_run(case: Case) -> Found:
    """The cost per token of a text without end."""
    given = inputs(case, "c", "a", "k", "failure_cost")
    setting = given["failure_cost"], given["c"], given["a"], given["k"]
    return {"expected": {
        "nonsi": formulas.nonsi_rate(given["failure_cost"]), "si": formulas.si_rate(*setting),
        "dsi_sim": formulas.dsi_rate(*setting, "original"),
        "dsi_sim_without_min": formulas.dsi_rate(*setting, "original", bare=False),
        "dsi_ideal": formulas.dsi_rate(*setting), "dsi_ideal_without_min": formulas.dsi_rate(*setting, bare=False)}}


def proposition(case: Case) -> Found:
    """The bound of Proposition 1."""
    given = inputs(case, "t1", "t2", "p", "N")
    drafter, target, tokens = given["t1"], given["t2"], given["N"]
    bound = formulas.proposition_bound(target, drafter, given["p"], tokens)
    return {"expected": bound, "nonsi": target * tokens}


def output_tokens(case: Case) -> Found:
    """The tokens of Figure 1 and Table 1 at given moments, if no draft is right (worst) or every draft is (best)."""
    given = inputs(case, "target_latency", "drafter_latency", "lookahead", "times")
    times = Times(given["target_latency"], given["drafter_latency"])
    lookahead, moments = given["lookahead"], given["times"].values()
    servers = given.get("SP") or float("inf")
    window = min(times.target, times.drafter * lookahead)
    if max(moments, default=0) > LONGEST * window:
        raise ValueError(f"{named(case)} has moments after more than {LONGEST} windows; {REMEDY}")
    found: dict[str, dict[str, list[int]]] = {}
    for name, right in (("worst", False), ("best", True)):
        counts = [settled(times, lookahead, moment, right, servers) for moment in moments]
        found[name] = {}
        for method in ("nonsi", "si", "dsi"):
            found[name][method] = [count[method] for count in counts]
    return {"expected": found}


def forwards(case: Case) -> Found:
    """SI by counting forwards, as in appendix F.3."""
    given = inputs(case, "target_latency", "drafter_latency", "lookahead", "mean_accepted", "N")
    target, tokens = given["target_latency"], given["N"]
    counted = formulas.si_forwards(target, given["drafter_latency"], given["lookahead"], given["mean_accepted"], tokens)
    plain = target * tokens
    return {"expected": {"target_forwards": counted.target_forwards, "drafter_forwards": counted.drafter_forwards,
                         "si": counted.cost, "nonsi": plain, "speedup": plain / counted.cost}}


def visible(case: Case) -> Found:
    """The forwards of the target that cost latency, and the speed-up by model parallelism that is as good."""
    given = inputs(case, "a", "lookahead")
    share = formulas.visible_fraction(given["a"], given["lookahead"])
    with np.errstate(divide="ignore"):
        return {"expected": {"visible_fraction": share, "mp_breakeven": 1 / share}}


def perfect(case: Case) -> Found:
    """DSI over SI if every draft is right, for each of a list of inputs, or for one."""
    asked = case.get("inputs")
    if not isinstance(asked, list):
        return {"expected": _perfect(case)}
    return {"expected": [_perfect({**case, "inputs": each}) for each in asked]}


def _perfect(case: Case) -> Any:
    given = inputs(case, "c", "k")
    return formulas.perfect_speedup(given.get("failure_cost", 1.0), given["c"], given["k"])


KINDS: dict[str, Computing] = {"offline_deterministic": deterministic, "offline_trace": trace}
QUANTITIES: dict[str, Computing] = {  # by words out of an analytic case's `quantity`
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
    return found[0](case)
