"""The published tables of the paper on DSI: Table 1 beside the same tokens by events, and the rows of Tables 2 and 3.

Table 1 counts the tokens of Figure 1 at four moments: a drafter of a seventh of the target's latency, lookahead 1,
seven target servers. The moments are not given in the paper; with 2T, 4(T + d), 8T and 8(T + d) all its numbers follow.
"""
from __future__ import annotations

from typing import Iterator, NamedTuple

from eval.dsi.cases import output_tokens
from eval.tables import markdown

TARGET, DRAFTER, LOOKAHEAD, SERVERS = 7.0, 1.0, 1, 7
MOMENTS = {
    "2T": 2 * TARGET,
    "4(T + d)": 4 * (TARGET + DRAFTER),
    "8T": 8 * TARGET,
    "8(T + d)": 8 * (TARGET + DRAFTER),
}
METHODS = {"non-SI": "nonsi", "SI": "si", "DSI": "dsi"}
PUBLISHED_TOKENS = {
    "worst": {
        "non-SI": (2, 4, 8, 9),
        "SI": (1, 4, 7, 8),
        "DSI": (2, 4, 8, 9),
    },
    "best": {
        "non-SI": (2, 4, 8, 9),
        "SI": (2, 8, 14, 16),
        "DSI": (8, 26, 50, 58),
    },
}


class PaperRow(NamedTuple):
    """A row of the paper's Table 2: milliseconds per token, the acceptance rate, and the speed-up of DSI over SI.

    `first_target` and `first_drafter` are ratios of a first forward to a later one (Table 3, without Phi3 on Alpaca).
    """

    pair: str
    data: str
    target: float
    drafter: float
    acceptance: float
    published: float
    first_target: float = 1.2
    first_drafter: float = 1.2


TABLE = (
    PaperRow("Starcoder-15B / 168M", "HumanEval", 20.6, 6.8, 0.93, 1.92, 1.35, 1.19),
    PaperRow("Starcoder-15B / 168M", "MBPP", 21.0, 6.8, 0.90, 1.66, 1.54, 1.20),
    PaperRow("Phi3-14B / 4B", "Alpaca", 49.6, 33.4, 0.87, 1.60),
    PaperRow("Phi3-14B / 4B", "HumanEval", 52.1, 34.0, 0.95, 1.41, 1.29, 1.23),
    PaperRow("Phi3-14B / 4B", "CNN-DM", 52.4, 34.6, 0.93, 1.39, 4.77, 3.88),
    PaperRow("Phi3-14B / 4B", "MBPP", 52.2, 34.3, 0.94, 1.37, 1.43, 1.27),
    PaperRow("Vicuna-13B / 68M", "CNN-DM", 37.7, 2.5, 0.63, 1.47, 5.36, 1.04),
    PaperRow("Vicuna-13B / 68M", "Alpaca", 33.3, 2.5, 0.58, 1.41, 1.15, 1.05),
    PaperRow("Vicuna-7B / 68M", "CNN-DM", 29.4, 2.5, 0.67, 1.29, 4.53, 1.06),
    PaperRow("Vicuna-7B / 68M", "Alpaca", 26.0, 2.5, 0.59, 1.70, 1.19, 1.06),
)


def table_1() -> Iterator[str]:
    """Yield the lines of Table 1: published tokens, and those of the events of this project."""
    computed_tokens = output_tokens(TARGET, DRAFTER, LOOKAHEAD, MOMENTS, SERVERS)["expected"]
    rows = []
    for case, of_methods in PUBLISHED_TOKENS.items():
        for method, published in of_methods.items():
            rows.append((case, method, "paper", *map(str, published)))
            rows.append(("", "", "events", *map(str, computed_tokens[case][METHODS[method]])))

    yield "Tokens at four moments, if no draft is accepted (worst) and if all are (best); T = 7 d, k = 1, 7 servers:\n"
    yield from markdown(("case", "method", "", *MOMENTS), rows)


def table_3() -> Iterator[str]:
    """Yield the lines of Table 3: the published ratios of a first forward to a later one."""
    rows = [(row.pair, row.data, f"{row.first_target:.2f}", f"{row.first_drafter:.2f}") for row in TABLE
            if (row.pair, row.data) != ("Phi3-14B / 4B", "Alpaca")]
    yield "Published ratios of TTFT to TPOT, as `online` of Table 2 uses them; they are of models and GPUs, so they can"
    yield "only be measured: python3 -m scripts.simulate table target=DIR drafts=DIR does that for other models.\n"
    yield from markdown(("target / drafter", "data", "target", "drafter"), rows)
