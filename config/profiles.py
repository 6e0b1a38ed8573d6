"""The profiles: how long the devices and wires of a cluster take, for pipelines that are emulated on one machine.

It knows nothing about how the time is spent (sim/devices.py). Times are milliseconds of the whole model that a
profile stands for; a stage takes the share of its layers, whatever small model really computes there.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence


@dataclass(frozen=True)
class Profile:
    """One cluster and the model on it.

    A stage with all layers needs `model + row * max(0, rows - free) + token * n` milliseconds for a segment of `rows`
    rows behind `n` tokens of text. A message of b bytes needs `latency`, and the time of b bytes at `mbps`.
    """

    about: str
    layers: int  # of the model
    row_bytes: int  # of one row of its hidden states
    model: float  # ms: all layers, for a few rows
    row: float  # ms: for each row above `free`
    free: int  # rows that cost nothing beside reading the weights
    token: float  # ms: for each token of the text before, whose keys and values are read
    level: float  # ms: one level of the draft's tree
    verdict: float  # ms: LM head and verification of a segment that has come back
    latency: float  # ms: of a message
    mbps: float  # Mbit/s of a wire, each way
    step: float  # ms: latency of one step of a collective
    jitter: float = 0.0  # ms: a message's latency is uniformly up to so much longer
    vocab: int = 32_000  # tokens of the model
    weights: float = 0.0  # GB: of all layers; 0: not known

    def slowed(self, factor: float) -> Profile:
        """The same cluster in slow motion: every time is `factor` times as long, and every rate a `factor`-th."""
        times = ("model", "row", "token", "level", "verdict", "latency", "step", "jitter")
        stretched = {name: getattr(self, name) * factor for name in times}
        return replace(self, mbps=self.mbps / factor, **stretched)

    def board(self, rank: int) -> Profile:
        """The times of the board of one rank; here all boards are alike."""
        return self

    @property
    def heat(self) -> Sequence[tuple[float, float]]:
        """When a board gets slower: after so many seconds of computing, and by which factor; here none does."""
        return ()

    def drafting(self, source: str) -> Profile:
        """The times of rank 0's board with those of a source of guesses; here all sources are alike."""
        return self

    def link(self, sender: int, receiver: int) -> Profile:
        """The times of the wire between the boards of two ranks; here all wires are alike."""
        return self

    def stage(self, share: float, rows: int, context: int) -> float:
        """Seconds that a stage with this share of the layers needs for `rows` rows behind `context` tokens of text."""
        paid = max(0, rows - self.free)
        whole_model = self.model + self.row * paid + self.token * context
        return share * whole_model / 1e3

    def draft(self, asked: Sequence[int]) -> float:
        """Seconds of a level of the draft for several requests at once, of each of which so many rows are asked about.

        Beyond the rows that one request has, or that cost a stage nothing, each costs the draft the share of a pass
        that it costs the model.
        """
        beyond = sum(asked) - max(self.free, *asked)
        costlier = 1 + self.row / self.model * max(0, beyond)
        return costlier * self.level / 1e3 if any(asked) else 0.0

    def transfer(self, size: int) -> float:
        """Seconds for which `size` bytes occupy a wire."""
        return size * 8 / (self.mbps * 1e6)


# Weights of all layers: 12 hidden^2 numbers each, of two bytes, or of half a byte.
#
# The testbed of the FlowSpec paper: five boards on 1 Gbit/s, LLaMA-2 or Vicuna 7B in fp16, 8 layers a board. Those are
# 3.2 GB, which 68 GB/s read in 48 ms; 60 ms with what kernels and Python add, and 0.5 ms for each row above 16, bring a
# model of the schedule within a few per cent of the published ratios. A token's keys and values are 0.5 MB, read in
# 0.008 ms. A level of the draft takes 12 ms, and the original spends 15 ms in Python on a tree of seven levels when it
# is done; here a tree is never done, and each level has its share of that work: 14 ms. 8 ms for a verdict are those of
# the LM head and of the original's verification. A row is 8 KB, 0.066 ms on the wire. A collective's step costs more
# than a message, since gloo stages device memory through the host: with 2.9 ms, a pass of 64 all-reduces of 80 rows
# over four boards takes 1.7 s, and at the mean accepted length of the paper's heads that is its 2.0 to 2.3 tokens/s for
# Megatron.
_JETSON_7B = Profile("five Jetson boards, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=240, row=2,
                     free=16, token=0.008, level=14, verdict=8, latency=1.5, mbps=1000, step=2.9, weights=12.9)

PROFILES = {
    "jetson-7b": _JETSON_7B,
    # The same boards with 13B in 4 bits: 370 ms for 10 layers, since unpacking the weights takes longer than reading
    # them, and so nothing more for up to 64 rows. The draft head is larger and stays in fp16.
    "jetson-13b": replace(_JETSON_7B, about="five Jetson boards, 1 Gbit/s, a 13B model in 4 bits", layers=40,
                          row_bytes=10240, model=1480, row=6, free=64, token=0.012, level=17, weights=6.3),
    # Desktops with a GPU of 360 GB/s each: 13.5 GB of weights in 37 ms.
    "lan-1g": Profile("five desktops with GPUs, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=40,
                      row=0.05, free=64, token=0.0015, level=2.1, verdict=1.5, latency=0.3, mbps=1000, step=0.5,
                      weights=12.9),
    # The boards on a wireless network: half the rate that 802.11ac promises on one stream, and latencies that vary.
    "wifi": replace(_JETSON_7B, about="five Jetson boards, wireless, a 7B model in fp16", latency=4, mbps=200, step=6,
                    jitter=4),
    # Four fast GPUs in one machine: 4 ms a stage, wires of 100 Gbit/s.
    "server": Profile("one server with five GPUs, a 7B model in fp16", layers=32, row_bytes=8192, model=16, row=0.01,
                      free=128, token=0.0003, level=0.7, verdict=0.6, latency=0.05, mbps=100_000, step=0.05,
                      weights=12.9),
}
