"""The profiles: the times that the devices and wires of a cluster need, for pipelines emulated on one machine.

`sim/devices.py` spends these times. They are milliseconds for the whole model that a profile stands for; a stage needs
the share of its layers, whatever small model it really computes. A JSON file can describe
another cluster: it gives the differences from a profile that it names, as in
`{"like": "jetson-7b", "factors": [1, 1, 2], "links": [[2, 3, 20, 100]]}`, or all fields that have no default.
"""
from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Iterator, Sequence, Tuple

from config import files
from config.drafts import ALONE
from config.schema.fields import COUNT, Kind, integer, list_of, number, one_of
from config.schema.untrusted import short_repr

FILE_ENDING = ".json"
OTHER_REMEDY = "name another profile="
EXAMPLE_FILE = '{"like": "jetson-7b", "factors": [1, 2]}'
MAX_MILLISECONDS = 1e7  # nearly three hours; doubles do not resolve short times added to much longer ones
MAX_BOARDS = 1024
MAX_LOSS = 0.9  # share of messages; with more of them lost, one may hardly arrive
MAX_FACTOR = 1e4  # of a board; its inverse is the smallest
LevelTime = Tuple[str, float]  # a source of guesses, milliseconds
LinkTimes = Tuple[int, int, float, float]  # two ranks, milliseconds of a message, Mbit/s
OWN_TIMES = (0.6, 0.01, 0.11)  # `own_times` of one core of an AMD EPYC (Zen 4), by `python3 -m scripts.bench overhead`
# the fields that slow motion scales
TIME_FIELDS = ("model", "row", "token", "expert", "level", "verdict", "latency", "step", "jitter", "repeat")


@dataclass(frozen=True)
class Profile:
    """One cluster and the model on it; rank 0's board drafts, and the others hold layers.

    A stage with all layers needs `model + row * max(0, rows - free) + token * n` milliseconds for a segment of `rows`
    rows after `n` tokens of text, and `expert` for each expert per layer in addition to those of one row. A message of
    b bytes needs `latency` plus b bytes at `mbps`. `factors` and `links` list the boards and wires that differ.
    """

    about: str
    layers: int  # of the model
    row_bytes: int  # of one row of its hidden states
    model: float  # ms: all layers, for a few rows
    row: float  # ms: for each row above `free`
    free: int  # rows that cost nothing in addition to reading the weights
    token: float  # ms: for reading the keys and values of each token of the text before
    level: float  # ms: one level of the draft's tree
    verdict: float  # ms: LM head and verification of a returned segment
    latency: float  # ms: of a message
    mbps: float  # Mbit/s of a wire, each way
    step: float  # ms: latency of one step of a collective
    jitter: float = 0.0  # ms: the most by which a message's latency is longer, uniformly distributed
    loss: float = 0.0  # share of messages that are lost, and sent again
    repeat: float = 0.0  # ms: by which a message is later each time that it is lost
    expert: float = 0.0  # ms: reading the weights of one more expert in every layer
    experts: int = 0  # experts of a layer
    chosen: int = 0  # experts of a layer that compute a row
    weights: float = 0.0  # GB: of all layers; 0: unknown
    factors: tuple[float, ...] = ()  # of the boards of ranks 1, 2, ...: multiples of the time of a layer
    memory: tuple[float, ...] = ()  # GB: of the boards of ranks 1, 2, ...; empty: unknown
    levels: tuple[LevelTime, ...] = ()  # milliseconds of a level for drafts that differ from `level`
    own_times: tuple[float, ...] = OWN_TIMES  # ms of rank 0's work: a message that came back, a row sent, a guess read
    links: tuple[LinkTimes, ...] = ()  # wires that differ; each is the same both ways

    def slowed(self, factor: float) -> Profile:
        """Return the same cluster in slow motion: all times are multiplied by `factor`, and all rates divided by it."""
        times = {name: getattr(self, name) * factor for name in TIME_FIELDS}
        links = tuple((a, b, latency * factor, mbps / factor) for a, b, latency, mbps in self.links)
        levels = tuple((name, level * factor) for name, level in self.levels)
        own_times = _scaled(factor, self.own_times)
        return replace(self, mbps=self.mbps / factor, links=links, levels=levels, own_times=own_times, **times)

    def own_seconds(self, num_messages: int = 0, num_rows: int = 0, num_guesses: int = 0) -> float:
        """Return the seconds of rank 0's own work with messages that came back, rows that it sends, and guesses after
        which its draft's networks guess."""
        message, row, guess = self.own_times
        return (num_messages * message + num_rows * row + num_guesses * guess) / 1e3

    def board(self, rank: int) -> Profile:
        """Return the profile with the times of one rank's board."""
        factor = dict(enumerate(self.factors, 1)).get(rank, 1.0)
        return replace(self, model=self.model * factor, row=self.row * factor, token=self.token * factor,
                       expert=self.expert * factor)

    def drafting(self, source: str) -> Profile:
        """Return the profile with the time that this source of guesses needs for a level."""
        return replace(self, level=dict(self.levels).get(source, self.level))

    def link(self, sender: int, receiver: int) -> Profile:
        """Return the profile with the times of the wire between the boards of two ranks."""
        for a, b, latency, mbps in self.links:
            if {a, b} == {sender, receiver}:
                return self.wired(latency, mbps)
        return self

    def wired(self, latency: float, mbps: float) -> Profile:
        """Return the profile with wires of this latency and rate.

        A step of a collective includes a message, so it changes by as much as the latency.
        """
        step = max(0.0, self.step + (latency - self.latency))
        return replace(self, latency=latency, mbps=mbps, step=step)

    def stage(self, share: float, rows: int, context: int) -> float:
        """Return the seconds of a stage with this share of the layers for `rows` rows after `context` tokens."""
        num_paid_rows = max(0, rows - self.free)
        all_layers_ms = self.model + self.row * num_paid_rows + self.token * context
        if self.expert:
            num_more_experts = touched(self.experts, self.chosen, rows) - self.chosen
            all_layers_ms += self.expert * num_more_experts
        return share * all_layers_ms / 1e3

    def draft(self, rows_by_request: Sequence[int]) -> float:
        """Return the seconds of a level for several requests. Rows beyond the largest, or `free`, add time."""
        num_paid_rows = sum(rows_by_request) - max(self.free, *rows_by_request)
        cost_factor = 1 + self.row / self.model * max(0, num_paid_rows)
        return cost_factor * self.level / 1e3 if any(rows_by_request) else 0.0

    def transfer(self, num_bytes: int) -> float:
        """Return the seconds for which a message of this size occupies a wire."""
        return num_bytes * 8 / (self.mbps * 1e6)


def _scaled(factor: float, times: Sequence[float]) -> tuple[float, ...]:
    return tuple(factor * time for time in times)


def touched(experts: int, chosen: int, rows: int) -> float:
    """Return the mean number of experts that compute `rows` rows, if every row chooses independently and uniformly."""
    return experts * (1 - (1 - chosen / experts) ** rows)


# The weights of a layer are 12 hidden^2 numbers, of two bytes or of half a byte.
#
# The testbed of the FlowSpec paper: five boards on 1 Gbit/s, LLaMA-2 or Vicuna 7B in fp16, 8 layers per board. These
# are 3.2 GB, which are read at 68 GB/s in 48 ms. With 60 ms, which include kernels and Python, and 0.5 ms for each row
# above 16, a model of the schedule is within a few per cent of the published ratios. A token's keys and values are
# 0.5 MB, read in 0.008 ms. A level of the draft takes 12 ms. The LM head has 0.26 GB, read in 4 ms. A core of these
# boards has 1.5 GHz, and the one that was measured up to 3.7 GHz and more instructions per clock: rank 0's own work is
# assumed to take three times as long. A row is 8 KB, 0.066 ms on the wire. A collective's step takes
# longer than a message, since gloo stages device memory through the host: with 2.9 ms, a pass of 64 all-reduces of 80
# rows over four boards takes 1.7 s. At the mean accepted length of the paper's heads this gives its 2.0 to 2.3 tokens/s
# for Megatron.
_JETSON_7B = Profile("five Jetson boards, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=240, row=2,
                     free=16, token=0.008, level=12, verdict=4, latency=1.5, mbps=1000, step=2.9, weights=12.9,
                     own_times=_scaled(3, OWN_TIMES))

PROFILES = {
    "jetson-7b": _JETSON_7B,
    # The same boards with 13B in 4 bits: 370 ms for 10 layers, since unpacking the weights takes longer than reading
    # them, so up to 64 rows cost nothing more. The draft head and the LM head are larger and stay in fp16.
    "jetson-13b": replace(_JETSON_7B, about="five Jetson boards, 1 Gbit/s, a 13B model in 4 bits", layers=40,
                          row_bytes=10240, model=1480, row=6, free=64, token=0.012, level=15, verdict=5, weights=6.3),
    # Desktops with a GPU of 360 GB/s each: 13.5 GB of weights in 37 ms. Here and below, rank 0 has a core as the one
    # that was measured.
    "lan-1g": Profile("five desktops with GPUs, 1 Gbit/s, a 7B model in fp16", layers=32, row_bytes=8192, model=40,
                      row=0.05, free=64, token=0.0015, level=2.1, verdict=1.5, latency=0.3, mbps=1000, step=0.5,
                      weights=12.9),
    # Four of the boards on a wireless network: half the nominal rate of 802.11ac on one stream; a message takes 3 to 20
    # ms, and is sent again after two mean round trips, as TCP's tail loss probe does.
    "wifi": replace(_JETSON_7B, about="four Jetson boards, wireless, a 7B model in fp16", latency=3, mbps=200, step=13,
                    jitter=17, loss=0.01, repeat=46),
    # Two of the desktops: half of the layers on each, and the draft beside the first half. 4 bits are 3.6 GB, read in
    # 10 ms; unpacking takes half as long. A row takes 13 GFLOP, 0.5 ms at 26 TFLOP/s, so 30 rows cost nothing more.
    "two-pcs": Profile("two desktops with GPUs, 1 Gbit/s, a 7B model in 4 bits", layers=32, row_bytes=8192, model=15,
                       row=0.5, free=30, token=0.0015, level=2.1, verdict=1.5, latency=0.3, mbps=1000, step=0.5,
                       weights=3.6, factors=(1, 1), links=((0, 1, 0.02, 50_000),)),
    # Qwen3-30B-A3B on Raspberry Pi 5 boards, in 2.7 bits a weight. One board of 16 GB was measured with llama.cpp
    # (geerlingguy/ai-benchmarks, 47): 8 tokens/s, so 125 ms a token, of which the LM head takes about 20, and prompts
    # with 92 ms a token. The 8 experts of a row are 1.6 MB in each of 48 layers; at the same 9 GB/s one more expert
    # takes 8.5 ms. About half of a row's work is hidden behind that.
    "pi-30b": Profile("four Raspberry Pi 5 boards, 1 Gbit/s, a 30B model of which 3B compute a token", layers=48,
                      row_bytes=8192, model=105, row=45, free=1, token=0.011, level=12, verdict=20, latency=0.3,
                      mbps=1000, step=0.5, weights=9.9, expert=8.5, experts=128, chosen=8,
                      own_times=_scaled(3, OWN_TIMES)),
    # Four fast GPUs in one machine: 4 ms per stage, wires of 100 Gbit/s.
    "server": Profile("one server with five GPUs, a 7B model in fp16", layers=32, row_bytes=8192, model=16, row=0.01,
                      free=128, token=0.0003, level=0.7, verdict=0.6, latency=0.05, mbps=100_000, step=0.05,
                      weights=12.9),
    # Six machines with GPUs in as many cities, 12 to 75 ms apart: plain decoding yields 4 to 5
    # tokens/s. The wires of the ring differ; a prune takes 29 ms.
    "wan": Profile("six machines with GPUs in six cities, a 7B model in fp16", layers=32, row_bytes=8192, model=58,
                   row=0.3, free=16, token=0, level=1.5, verdict=1, latency=29, mbps=200, step=29, weights=12.9,
                   factors=(1, 1, 1, 1, 1),
                   links=((0, 1, 12, 200),
                          (1, 2, 35, 200),
                          (2, 3, 75, 200),
                          (3, 4, 20, 200),
                          (4, 5, 29, 200),
                          (5, 0, 40, 200))),
}


# --- files ------------------------------------------------------------------------------------------------------------

def _row(*columns: tuple[str, Kind]) -> Kind:
    """Return the kind of a list with these columns."""
    row_form = tuple(kind.fits for _, kind in columns)
    column_words = ", ".join(f"{name} ({kind.words})" for name, kind in columns)
    return Kind(f"a list of {column_words}", lambda row: files.fits(row, row_form))


TIME_KIND, RATE_KIND = number(0, MAX_MILLISECONDS), number(0.001, 1e6)
FACTOR_KIND = number(1 / MAX_FACTOR, MAX_FACTOR)
TEXT_KIND = Kind("a text", lambda value: files.fits(value, str))
SOURCE_KIND = Kind(f"{', '.join(ALONE)}, ssm1, ssm2 or so on",
              lambda value: value in ALONE or TEXT_KIND.fits(value) and bool(re.fullmatch("ssm[1-9][0-9]{0,2}", value)))
END_COLUMN = "rank", integer(0, MAX_BOARDS)
FIELD_KINDS: dict[str, Kind] = {
    "like": one_of(*PROFILES), "about": TEXT_KIND,
    "layers": COUNT, "free": integer(0, MAX_BOARDS), "mbps": RATE_KIND,
    "model": number(1 / MAX_MILLISECONDS, MAX_MILLISECONDS),
    **dict.fromkeys((*TIME_FIELDS[1:], "weights"), TIME_KIND),
    "row_bytes": integer(1, (1 << 30) - 1),
    **dict.fromkeys(("experts", "chosen"), integer(0, MAX_BOARDS)), "loss": number(0, MAX_LOSS),
    "factors": list_of(FACTOR_KIND, MAX_BOARDS), "memory": list_of(TIME_KIND, MAX_BOARDS),
    "own_times": _row(("ms of a message", TIME_KIND), ("of a row", TIME_KIND), ("of a guess", TIME_KIND)),
    "levels": list_of(_row(("draft", SOURCE_KIND), ("ms", TIME_KIND)), MAX_BOARDS),
    "links": list_of(_row(END_COLUMN, END_COLUMN, ("ms", TIME_KIND), ("Mbit/s", RATE_KIND)), MAX_BOARDS)}


def is_file(name: str) -> bool:
    """Return whether the name of a profile is the name of a file."""
    return name.endswith(FILE_ENDING)


@lru_cache(maxsize=8)
def read(path: str) -> Profile:
    """Read the cluster that a file describes. Raises ValueError, with the remedy, for an invalid file."""
    content = files.read_json_file(path, OTHER_REMEDY)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: write one as {EXAMPLE_FILE}, or {OTHER_REMEDY}")
    for key, value in content.items():
        if key not in FIELD_KINDS:
            raise ValueError(f"{path} has the unknown key {short_repr(key)}: write some of {', '.join(FIELD_KINDS)}, "
                             f"or {OTHER_REMEDY}")
        if not FIELD_KINDS[key].fits(value):
            raise ValueError(f"{path} says {key}={short_repr(value)}: write {FIELD_KINDS[key].words}, or "
                             f"{OTHER_REMEDY}")

    values = vars(PROFILES[content.pop("like")]) if "like" in content else {}
    values = {**values, **{key: _as_tuples(value) for key, value in content.items()}}
    missing_keys = [field.name for field in fields(Profile) if field.name not in values and field.default is MISSING]
    if missing_keys:
        raise ValueError(f'{path} lacks {", ".join(missing_keys)}: add them, or "like" with one of '
                         f'{", ".join(PROFILES)}')

    cluster = Profile(**values)
    problem = next(_problems(cluster), "")
    if problem:
        raise ValueError(f"{path} {problem}, or {OTHER_REMEDY}")
    return cluster


def _as_tuples(value: Any) -> Any:
    """Return the value with tuples, which are immutable, in place of lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _problems(cluster: Profile) -> Iterator[str]:
    """Yield the contradictions in a file, each as the end of a sentence, with the fix."""
    num_factors, num_memory_sizes = len(cluster.factors), len(cluster.memory)
    if num_factors and num_memory_sizes and num_factors != num_memory_sizes:
        yield f"has factors of {num_factors} boards, but memory of {num_memory_sizes}: give both for every board"
    if cluster.chosen > cluster.experts or cluster.expert and not cluster.chosen:
        yield f"has chosen={cluster.chosen}, experts={cluster.experts}: give experts, and chosen from 1 to that number"

    linked_pairs = set()
    for a, b, *_ in cluster.links:
        pair = frozenset((a, b))
        if a == b or pair in linked_pairs:
            yield f"has {'a' if a == b else 'a second'} link between {a} and {b}: leave it out"
        linked_pairs.add(pair)

    num_boards = max(num_factors, num_memory_sizes)
    linked_ranks = [rank for link in cluster.links for rank in link[:2]]
    last_rank = max(linked_ranks, default=0)
    if last_rank > num_boards:
        yield (f"names board {last_rank}, but has only {num_boards}: give factors or memory for each board up to "
               f"{last_rank}")

    source_names = [source for source, _ in cluster.levels]
    if len(set(source_names)) < len(source_names):
        yield f"gives levels of {', '.join(source_names)}: give each draft only one"


def write(path: str, cluster: Profile) -> None:
    """Write a file that `read` reads."""
    files.write_json(path, asdict(cluster))
