"""What only a GPU's owner can measure, as a page to paste: exact texts, a stage's time, the way over the CPU, energy.

Each check writes a section. One that fails is a sentence there, and the others go on. On a CPU the same checks run, and
the page says so.
"""
from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from config.dialect import OptionParser
from config.files import SPACE_REMEDY, write
from config.methods import METHODS
from eval.bench import QUESTIONS, cost, decoders_of, request_for, whole_number
from eval.metrics import divergence
from eval.results import current_commit
from eval.tables import markdown
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.spec import device_named
from launch.timing import computed_rows, inputs, random_stage
from model.llama import LlamaConfig
from model.sample import Sampler
from pipeline.decode import Decoder
from pipeline.messages import Segment
from pipeline.stage import Stage

NUMBER_TYPES = ("float32", "bfloat16", "float16")
QUANTIZED_FORMS = (("bfloat16", "int8"), ("float16", "nf4"))
RING_METHODS = [name for name, method in METHODS.items() if method.target == "ring"]
STAGE_ROWS = (1, 4, 16, 64)
CONTEXT = 128  # tokens of text in a timed layer's cache
SEGMENT_ROWS = (1, 16, 64)  # whose way over the CPU is timed
COPIED_BYTES = 1 << 28  # more than caches hold
SLOW_WIRES = "server"  # a profile, whose emulated wires delay segments, so that prunes overtake them
POWER_COMMAND = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
POWER_SECONDS = 0.1  # between two samples
QUESTION = QUESTIONS[3]


class GpuOptions(NamedTuple):
    """What the checks are measured with."""

    device: str
    num_tokens: int  # of an answer
    hidden: int  # width of a stage's layers
    intermediate: int
    repeats: int  # segments per figure


CheckLines = Iterator[str]
Check = Callable[[GpuOptions], CheckLines]


# --- the machine ------------------------------------------------------------------------------------------------------

def machine_facts(options: GpuOptions) -> CheckLines:
    """The device, the versions, and the speed of its memory."""
    device_name = f"CPU, {platform.processor() or 'unknown'} (**no GPU: this page shows nothing about one**)"
    if torch.device(options.device).type == "cuda":
        device_name = torch.cuda.get_device_name(options.device)
    commit = current_commit() or "of an unknown commit"

    yield f"- device: {device_name}"
    yield f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"- FlowSpec {commit}, {date.today()}"
    yield f"- a copy reads and writes {copy_bandwidth(options) / 1e9:.0f} GB/s"


def copy_bandwidth(options: GpuOptions) -> float:
    """Return the bytes that a copy within the device's memory reads and writes per second."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)[-1].item()  # which waits for the device

    return 2 * COPIED_BYTES / least_seconds(options, copy)


def least_seconds(options: GpuOptions, call: Callable[..., object], *args: Any) -> float:
    """Return the least time of several calls, the first of which warms up."""
    return min(cost(call, *args).wall for _ in range(options.repeats + 1))


# --- exactness --------------------------------------------------------------------------------------------------------

def text_differences(options: GpuOptions) -> CheckLines:
    """Whether all methods over the ring write one text, by number type, temperature and stages."""
    heading = ("number type", "temperature", "stages", "methods with the text of `ar`", "others, from which token on")
    rows = []
    for number_type in NUMBER_TYPES:
        reference: dict[float, list[int]] = {}
        for stages in ("1", "3"):
            with open_toy(options, dtype=number_type, stages=stages) as pipeline:
                decoders = decoders_of(pipeline, RING_METHODS)
                for temperature in (0.0, 1.0):
                    texts = {method: answer_ids(pipeline, decoder, temperature, options.num_tokens)
                             for method, decoder in decoders.items()}
                    expected = reference.setdefault(temperature, texts["ar"])
                    rows.append([number_type, f"{temperature:g}", stages, *compared(texts, expected)])

    yield from markdown(heading, rows)


def open_toy(options: GpuOptions, **keys: str) -> Pipeline:
    """Open the bundled model on the device, with all ranks in this process."""
    return Pipeline.open("toy", **{"device": options.device, "link": "threads", **keys})


def answer_ids(pipeline: Pipeline, decoder: Decoder, temperature: float, num_tokens: int) -> list[int]:
    """Return the token ids of an answer to the question."""
    question = request_for(pipeline, QUESTION)
    sampled = replace(question, sampler=Sampler(temperature, seed=1), max_new_tokens=num_tokens, end=frozenset())
    return list(decoder.complete(sampled).token_ids)


def compared(texts: dict[str, list[int]], expected: list[int]) -> tuple[str, str]:
    """Return how many texts are as expected, and the others with the token from which on they differ."""
    others = [f"{method} {divergence(text, expected)}" for method, text in texts.items() if text != expected]
    return f"{len(texts) - len(others)} of {len(texts)}", ", ".join(others)


def row_bits(options: GpuOptions) -> CheckLines:
    """Whether a row of a stage has the same bits alone and beside others."""
    heading = ("number type", "row counts with other bits than the row alone", "largest difference, relative")
    rows = []
    for number_type in NUMBER_TYPES:
        layer = timed_layer(options, number_type)
        alone_D = layer.outputs(1)[0]
        differing = {num_rows: row_D for num_rows in range(2, 1 + max(STAGE_ROWS))
                     if not torch.equal(row_D := layer.outputs(num_rows)[0], alone_D)}
        exact_D = alone_D.double()
        differences = [float((row_D.double() - exact_D).norm() / exact_D.norm()) for row_D in differing.values()]
        largest = max(differences, default=0.0)
        rows.append([number_type, as_ranges(list(differing)) or "none", f"{largest:.1e}"])

    yield from markdown(heading, rows)


def as_ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as text, with a range for those that follow one another."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("–".join(map(str, ends)) for ends in ranges)


def overtaking_prunes(options: GpuOptions) -> CheckLines:
    """Whether prunes that overtake segments between processes change a text."""
    keys = {"device": options.device, "max_new_tokens": str(options.num_tokens), "ignore_eos": "true", "seed": "1",
            "dtype": "float32", "stages": "3"}
    with Pipeline.open("toy", **keys, link="threads", pipeline_type="ar") as pipeline:
        expected = pipeline.generate(QUESTION).answer.token_ids

    for profile in ("none", SLOW_WIRES):
        with Pipeline.open("toy", **keys, profile=profile, pipeline_type="continuous") as pipeline:
            answer = pipeline.generate(QUESTION).answer
        difference = divergence(answer.token_ids, expected)
        verdict = "the text of `ar`" if difference is None else f"**another text from token {difference} on**"
        yield f"- `continuous` in 4 processes, profile={profile}: {verdict}, {answer.tokens_per_second:.1f} tokens/s"


# --- time -------------------------------------------------------------------------------------------------------------

class TimedLayer(NamedTuple):
    """A stage of one random layer, with a text of CONTEXT tokens in its cache, and rows that may follow."""

    stage: Stage
    rows_TD: Tensor

    def outputs(self, num_rows: int) -> Tensor:
        """Return the layer's outputs `[num_rows, D]` for the first rows; its cache is left with the text alone."""
        return computed_rows(self.stage, 0, range(CONTEXT, CONTEXT + num_rows), self.rows_TD)

    @property
    def num_bytes(self) -> int:
        """The bytes of its weights."""
        layer: Any = self.stage.part
        return sum(weights.numel() * weights.element_size() for weights in layer.parameters())


def timed_layer(options: GpuOptions, number_type: str, quant: str = "none") -> TimedLayer:
    """Return a layer of this type; its weights, text and rows are the same in every type, but for rounding."""
    num_heads = max(1, options.hidden // 128)
    max_context = CONTEXT + max(STAGE_ROWS)
    sizes = LlamaConfig(options.hidden, 1, num_heads, num_heads, options.hidden // num_heads, options.intermediate,
                        vocab=1, context=max_context, eps=1e-6, theta=1e4)
    like = torch.empty(0, dtype=getattr(torch, number_type), device=options.device)

    stage = random_stage(sizes, 1, like, quant, max_context)
    rows_TD = inputs(sizes, like)
    text = list(range(CONTEXT))
    stage.apply(Segment(0, text, [0, *text[:-1]], text, len(text), rows_TD[:CONTEXT]))
    return TimedLayer(stage, rows_TD)


def layer_times(options: GpuOptions) -> CheckLines:
    """A layer's time by rows, beside the time in which the memory delivers its weights."""
    bandwidth = copy_bandwidth(options)
    heading = ("weights", "MB", "ms to read them", *(f"{num_rows} rows, ms" for num_rows in STAGE_ROWS))
    rows = []
    for number_type, quant in (*((name, "none") for name in NUMBER_TYPES), *QUANTIZED_FORMS):
        label = number_type if quant == "none" else f"{number_type}, {quant}"
        try:
            layer = timed_layer(options, number_type, quant)
            pass_seconds = [least_seconds(options, layer.outputs, num_rows) for num_rows in STAGE_ROWS]
        except (ImportError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            rows.append([label, reason, *[""] * (len(heading) - 2)])
            continue

        read_seconds = layer.num_bytes / (bandwidth / 2)
        rows.append([label, f"{layer.num_bytes / 1e6:.0f}",
                     *(f"{1e3 * seconds:.3f}" for seconds in (read_seconds, *pass_seconds))])

    yield from markdown(heading, rows)


def way_over_the_cpu(options: GpuOptions) -> CheckLines:
    """What a segment costs on its way to the next stage, which leads over the CPU's memory."""
    heading = ("rows", "KB", "to the CPU, µs", "back, µs")
    rows = []
    for num_rows in SEGMENT_ROWS:
        segment_TD = torch.zeros(num_rows, options.hidden, dtype=torch.float16, device=options.device)
        host_TD = segment_TD.cpu()
        there = least_seconds(options, segment_TD.cpu)
        back = least_seconds(options, lambda: host_TD.to(options.device)[0, 0].item())  # noqa: B023
        num_bytes = 2 * options.hidden * num_rows
        rows.append([f"{num_rows}", f"{num_bytes / 1e3:.0f}", f"{1e6 * there:.0f}", f"{1e6 * back:.0f}"])

    yield from markdown(heading, rows)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices < 2:
        yield f"\n{num_devices} GPU(s): a link from GPU to GPU was not measured."


# --- energy -----------------------------------------------------------------------------------------------------------

def energy(options: GpuOptions) -> CheckLines:
    """The power that nvidia-smi reports while an answer is written."""
    if not shutil.which(POWER_COMMAND[0]):
        yield "nvidia-smi is not here: not measured."
        return

    heading = ("method", "tokens/s", "W", "J a token")
    rows = []
    with open_toy(options, dtype="float16", stages="2") as pipeline:
        for method, decoder in decoders_of(pipeline, ("ar", "continuous")).items():
            answer_ids(pipeline, decoder, 0.0, options.num_tokens)  # loads what the first answer needs

            with sampled_power() as samples:
                num_tokens = 4 * options.num_tokens
                token_seconds = cost(answer_ids, pipeline, decoder, 0.0, num_tokens).wall / num_tokens
            watts = mean(samples) if samples else float("nan")
            rows.append([method, f"{1 / token_seconds:.1f}", f"{watts:.0f}", f"{watts * token_seconds:.2f}"])

    yield from markdown(heading, rows)


@contextmanager
def sampled_power() -> Iterator[list[float]]:
    """Yield a list to which the power of the GPU is added, in watts, until the end."""
    samples: list[float] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(POWER_SECONDS):
            reply = subprocess.run(POWER_COMMAND, capture_output=True, text=True).stdout.split()
            with suppress(ValueError, IndexError):  # a GPU that reports no power
                samples.append(float(reply[0]))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield samples
    finally:
        is_over.set()
        sampler.join()


# --- the page ---------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    "Machine": machine_facts,
    "Texts of all methods": text_differences,
    "A row alone and beside others": row_bits,
    "Prunes that overtake": overtaking_prunes,
    "A layer's time": layer_times,
    "The way over the CPU": way_over_the_cpu,
    "Energy": energy,
}


def page(options: GpuOptions) -> CheckLines:
    """Yield the lines of the page; a check that fails is a sentence."""
    yield "# FlowSpec on this device\n"
    for title, check in ProgressBar(CHECKS.items(), desc="checks", unit="check"):
        yield f"## {title}\n\n{check.__doc__}\n"
        try:
            yield from check(options)
        except Exception as error:  # of any kind: the other checks are to be seen
            yield f"**It failed**: {type(error).__name__}: {error}"
        yield ""


def gpu(argv: Sequence[str]) -> int:
    """Execute `python3 -m scripts.doctor gpu`; return its exit code."""
    parser = OptionParser(prog="python3 -m scripts.doctor gpu", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N or cpu (auto)")
    sizes = {"tokens": (24, "tokens of an answer"), "hidden": (4096, "width of the timed layer"),
             "intermediate": (11008, "width of its MLP"), "repeats": (20, "segments per figure")}
    for name, (default, about) in sizes.items():
        parser.add_argument(f"--{name}", type=whole_number, default=default, metavar="N", help=f"{about} ({default})")
    parser.add_argument("-o", "--output", default="gpu_report.md", metavar="FILE", help="the page (gpu_report.md)")
    args = parser.parse_args(argv)

    device = str(device_named(args.device, "--device "))
    options = GpuOptions(device, args.tokens, args.hidden, args.intermediate, args.repeats)
    torch.set_grad_enabled(False)
    lines = []
    for line in page(options):
        print(line, flush=True)
        lines.append(line)

    write(Path(args.output), "\n".join(lines), SPACE_REMEDY)
    return 0
