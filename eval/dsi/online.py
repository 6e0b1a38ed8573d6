"""Simulate SI and DSI by events on a virtual clock, over texts with modelled or recorded acceptance.

Beside it stands the exact mean in the accounting of the online simulator that was published with the paper on DSI. It
differs from the true cost: a run of n accepted drafts settles n tokens, and the target's own token after them is lost.
Every run begins with a verification of no drafts, and SI waits for it, too. Runs are sampled until they have more than
the wanted tokens, and the last one costs one verification. The first forward of every server takes longer, and so does
that of the drafter until a token is settled. Nothing else takes time.

So a run of SI costs T + (floor(n/k) + 1)(k d + T), and a run of DSI (floor(n/k) + 1) k d + T if it has enough servers.
The first run of DSI is simulated verification by verification. Later runs are assumed to use servers that have
computed before.
"""
from __future__ import annotations

import heapq
from itertools import count, cycle, islice
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from config.files import fits, read_json_file
from eval.dsi.events import EventPlan, Forward, decode
from eval.dsi.keys import Online
from eval.metrics import NAN
from eval.tables import in_columns, number
from launch.progress import ProgressBar

TICK = 1e-9  # seconds
MAX_RUN = 20  # most accepted drafts of a run in the published simulator
PLAIN = "non-SI"
COLUMNS = ("", "predicted s", "published s", "plain/it", "forwards")
NOTE = """\
Simulated: no model is run. Times are seconds per text.
predicted  mean over the repeats +- its standard error, if only forwards take time
published  exact mean in the accounting of the published online simulator, with enough servers
plain/it   predicted time of plain decoding divided by that of the method
forwards   of the target per token, aborted ones included"""
TicksByMethod = Mapping[str, Sequence[Tuple[int, int]]]  # the ticks and the forwards of each text, by method


def main(config: Online) -> int:
    samples: dict[str, list[tuple[int, int]]] = {method: [] for method in (PLAIN, "SI", "DSI")}

    texts = texts_of(config)
    for text_number in ProgressBar(range(config.num_repeats), desc="virtual clock", unit="text", delay=1, leave=False):
        is_correct = next(texts)
        for method, method_samples in samples.items():
            outcome = decode(method, plan_of(config, text_number), is_correct)
            method_samples.append((outcome.ticks, outcome.num_forwards))

    print(f"k={config.k}, {config.servers} servers of the target, preemption {config.preemption}, "
          f"{config.num_repeats} texts of {config.S} tokens\n")
    print(table(config, samples))
    print(f"\n{NOTE}")
    return 0


def texts_of(config: Online) -> Iterator[list[bool]]:
    """Yield texts without end: for each position whether its draft is correct, sampled or recorded."""
    if config.traces:
        for trace in cycle(read_traces(config.traces)):
            yield list(islice(cycle(trace), config.S))

    random_state = np.random.RandomState(config.random_seed)
    while True:
        run_lengths = accepted_runs(config.a, config.maximum_correct_tokens, random_state)
        yield spread(run_lengths, config.S)


def read_traces(path: str) -> list[list[bool]]:
    """Return the recorded matches of each non-empty text in a JSON file. Raise ValueError if it holds none."""
    traces = read_json_file(path)
    are_matches = fits(traces, [[lambda value: value in (0, 1)]])
    if not are_matches or not any(traces):
        raise ValueError(f"{path} holds no matches: give a JSON list with a list of 0 and 1 for each text, "
                         "such as [[1, 1, 0, 1], [0, 1]]")
    return [list(map(bool, text)) for text in traces if text]


def accepted_runs(acceptance: float, max_accepted: int, random_state: np.random.RandomState) -> Iterator[int]:
    """Yield numbers of accepted drafts in a row, at most `max_accepted`, without end.

    With a generator of the same seed, the simulator published with the paper on DSI samples the same numbers.
    """
    while True:
        if acceptance == 1:
            yield max_accepted
        else:
            num_accepted = int(random_state.geometric(1 - acceptance)) - 1
            yield min(num_accepted, max_accepted)


def spread(run_lengths: Iterable[int], num_tokens: int) -> list[bool]:
    """Return for each of `num_tokens` positions whether its draft is correct; an incorrect one ends each run."""
    endless = (is_correct for length in run_lengths for is_correct in [True] * length + [False])
    return list(islice(endless, num_tokens))


def plan_of(config: Online, text_number: int) -> EventPlan:
    """Return the plan for the text of this number, in ticks."""
    seconds = config.failure_cost, config.failure_cost_sub, config.c, config.c_sub
    first_target, later_target, first_draft, later_draft = (round(duration / TICK) for duration in seconds)
    return EventPlan(config.S, config.k, config.servers, Forward(first_target, later_target),
                     Forward(first_draft, later_draft), stops=config.preemption == "instant",
                     seed=config.random_seed + text_number)


def published(config: Online, method: str) -> float:
    """Return the mean seconds per text in the published simulator, or NaN if it has no such mean or never ends."""
    max_run = config.maximum_correct_tokens
    if method == PLAIN or config.traces or not config.a or not 0 < max_run < config.S:
        return NAN

    times = ForwardLatencies(config.failure_cost_sub, config.c_sub, config.failure_cost, config.c)
    num_servers = config.servers if method == "DSI" else None
    return online_mean(times, config.a, config.k, num_servers, config.S, max_run)


def table(config: Online, samples: TicksByMethod) -> str:
    """Return a table with one line for each method."""
    rows = []
    plain_ticks = np.mean(samples[PLAIN], 0)[0]

    for method, method_samples in samples.items():
        mean_ticks, mean_forwards = np.mean(method_samples, 0)
        predicted = f"{mean_ticks * TICK:.4f}"
        if config.num_repeats > 1:
            standard_error = np.std(method_samples, 0, ddof=1)[0] / config.num_repeats ** 0.5
            predicted += f" +- {standard_error * TICK:.4f}"

        rows.append([method, predicted, number(published(config, method), 4),
                     f"{plain_ticks / mean_ticks:.3f}", f"{mean_forwards / config.S:.2f}"])
    return in_columns(COLUMNS, rows)


# --- the accounting of the published online simulator -----------------------------------------------------------------

class ForwardLatencies(NamedTuple):
    """The times of a forward of target and drafter, and of the first forward of each."""

    target: float
    drafter: float
    first_target: float
    first_drafter: float


def online_mean(times: ForwardLatencies, acceptance: float, lookahead: int, num_servers: int | None, num_tokens: int,
                max_run: int = MAX_RUN) -> float:
    """Return the mean cost of a text by DSI with these servers, or by SI if `num_servers` is None.

    No run has more than `max_run` accepted drafts, which are fewer than the tokens. The acceptance is above 0, since
    the text would never end else.
    """
    # runs, by their accepted drafts
    num_accepted = np.arange(max_run + 1)
    chance = (1 - acceptance) * float(acceptance) ** num_accepted
    chance[-1] = float(acceptance) ** max_run
    num_windows = num_accepted // lookahead + 1
    num_awaited = 1 if num_servers else num_windows + 1  # verifications that the run waits for
    run_cost = num_windows * lookahead * times.drafter + times.target * num_awaited

    # mean remaining cost, by the number of settled tokens
    first_draft_extra = times.first_drafter - times.drafter
    remaining_cost = np.zeros(num_tokens + 1)
    for num_settled in range(num_tokens, -1, -1):
        settled_after = num_settled + num_accepted
        ends_text = settled_after > num_tokens
        next_cost = np.where(ends_text, times.target, run_cost + (0 if num_settled else first_draft_extra))
        cost_after = np.where(ends_text, 0.0, remaining_cost[np.minimum(settled_after, num_tokens)])

        # a run without accepted drafts returns to the same state, as the division considers
        cost_after[0] = 0.0
        remaining_cost[num_settled] = chance @ (next_cost + cost_after) / (1 - chance[0])

    first_cost = run_cost + first_draft_extra + times.first_target - times.target
    if num_servers:
        first_cost = np.array(_first_runs(times, lookahead, num_servers, max_run))
    return float(chance @ (first_cost + remaining_cost[num_accepted]))


def _first_runs(times: ForwardLatencies, lookahead: int, num_servers: int, max_run: int) -> list[float]:
    """Return the cost of the first run of DSI, by its accepted drafts from 0 to `max_run`.

    It is the end of the first verification with more drafts. A verification goes to an idle server that was used
    before, else to a new one. Else it waits, the newest first.
    """
    idle = [times.first_target] * num_servers  # the next forward of each idle server, the last one's first
    running: list[tuple[float, int]] = []  # verifications: their ends and their drafts
    waiting: list[int] = []  # drafts of each waiting verification
    run_costs: list[float] = []

    for num_drafts in count(0, lookahead):
        moment = times.first_drafter + (num_drafts - 1) * times.drafter if num_drafts else 0.0

        # verifications that have ended
        while running and running[0][0] <= moment:
            end_time, num_verified = heapq.heappop(running)
            run_costs += [end_time] * (num_verified - len(run_costs))
            if waiting:
                heapq.heappush(running, (end_time + times.target, waiting.pop()))
            else:
                idle.append(times.target)

        if len(run_costs) > max_run:
            break
        if idle:
            heapq.heappush(running, (moment + idle.pop(), num_drafts))
        else:
            waiting.append(num_drafts)
    return run_costs[:max_run + 1]
