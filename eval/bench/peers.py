"""A comparison with the alternatives llama.cpp and transformers, on this machine, in one process.

All compute one model, from one GGUF file, alternately: they read prompts and write answers. Times are elapsed
and processor times: if other programs use the cores, only the latter are the cost of a token.
"""
from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import chain, count, product
from pathlib import Path
from typing import Callable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from config.console import say
from config.dialect import OptionParser
from eval.bench import Cost, Stopwatch, transformers_model, whole_number
from eval.bench.shapes import add_shapes, of_shapes
from eval.tables import in_columns
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.split.write import split

LLAMA_CPP = "llama.cpp"
AS_IN_FILE = ("float32", "auto", "auto")
# type, layers and LM head of ours, auto as in the file; the forms without quantization are also those of transformers
FORMS = (AS_IN_FILE, ("float32", "none", "none"), ("bfloat16", "none", "none"), ("float32", "int8", "int8"),
         ("float32", "int4", "int4"))
PROMPT_LENGTHS = [16, 64]  # tokens
NUM_TOKENS = 32  # of an answer
SPARE_TOKENS = 64  # of a context, beyond prompt and answer
PromptIds = Sequence[List[int]]  # token ids, of requests at once

# Writes an answer of NUM_TOKENS tokens to each prompt, and calls the function when the first token of one is there.
WriteAnswers = Callable[[PromptIds, Callable[[], None]], None]


class AnswerCost(NamedTuple):
    """The cost of all prompts, up to the last first token, and that of each further token."""

    prompts: Cost
    token: Cost


Costs = Mapping[Tuple[str, int], Sequence[AnswerCost]]  # by name, and tokens of a prompt


def peers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench peers`."""
    parser = OptionParser(prog="python3 -m scripts.bench peers")
    add_shapes(parser)
    parser.add_argument("--forms", choices=("all", "file"), default="all",
                        help="file: only llama.cpp and ours with the weights as in the file (all)")
    parser.add_argument("--prompts", type=whole_number, nargs="+", default=PROMPT_LENGTHS, metavar="N",
                        help="tokens of a prompt (16 64)")
    parser.add_argument("--requests", type=whole_number, default=1, metavar="N",
                        help="requests at once, of llama.cpp and ours only if several (1)")
    parser.add_argument("--threads", type=whole_number, nargs="+", default=[1, 2],
                        metavar="N", help="of each (1 2)")
    parser.add_argument("--repeats", type=whole_number, default=5, metavar="N", help="repeats of each measurement (5)")
    parser.add_argument("--over", type=_refuse_processes, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if find_spec("xllamacpp") is None:
        say("llama.cpp is not installed, and is left out: type pip install xllamacpp")

    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        model_dir = Path(folder)
        gguf_path = of_shapes(args, model_dir)
        split(gguf_path, model_dir / "split", "1")

        context = max(args.prompts) + NUM_TOKENS + SPARE_TOKENS
        forms = FORMS if args.forms == "all" else [AS_IN_FILE]
        for num_threads in args.threads:
            limits = ProgramLimits(num_threads, args.requests, context)
            costs = measured(gguf_path, model_dir, limits, forms, args.prompts, args.repeats)
            print(f"{gguf_path.name}, {num_threads} thread(s), one process, {args.requests} "
                  f"request(s) at once, minimum of {args.repeats}; in brackets the speed over that of the first line")
            for clock, words in zip(Cost._fields, ("elapsed", "of processor")):
                rows = table(costs, args.prompts, clock)
                print(in_columns(heading(words, args.prompts), rows, names=0))
    return 0


def _refuse_processes(typed_count: str) -> None:
    raise argparse.ArgumentTypeError("llama.cpp over several processes is not measured any more: leave it out; "
                                     "docs/performance.md has the last figures, beside llama.cpp and transformers")


# --- the programs -----------------------------------------------------------------------------------------------------

class ProgramLimits(NamedTuple):
    """What each program may use."""

    num_threads: int
    num_requests: int  # at once
    context: int  # tokens of a request


def _opened(gguf_path: Path, model_dir: Path, limits: ProgramLimits, forms: Sequence[tuple[str, str, str]],
            open_pipelines: ExitStack) -> Iterator[tuple[str, WriteAnswers]]:
    if find_spec("xllamacpp") is not None:
        yield LLAMA_CPP, llama_cpp(gguf_path, limits)

    torch.set_num_threads(limits.num_threads)
    for dtype, quant, quant_head in forms:
        if quant == "none" and limits.num_requests == 1:
            yield f"transformers, {dtype}", of_transformers(gguf_path, dtype)

        pipeline = open_pipelines.enter_context(Pipeline.open(
            model_dir=str(model_dir / "split"), stages="1", link="threads", pipeline_type="ar", dtype=dtype,
            quant=quant, quant_head=quant_head, max_length=limits.context, max_requests=limits.num_requests,
            threads_per_rank=limits.num_threads, ignore_eos=True, template="none"))
        names = {"auto": "as in the file", "none": dtype}
        yield f"ours, {names.get(quant, quant)}", ours(pipeline)


def llama_cpp(gguf_path: Path, limits: ProgramLimits) -> WriteAnswers:
    """Return llama.cpp, by the package `xllamacpp`, with the weights as in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(gguf_path), limits.context * limits.num_requests
    params.n_parallel, params.verbosity = limits.num_requests, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = limits.num_threads
    server = xllamacpp.Server(params)

    def write_one(prompt: list[int], note_first: Callable[[], None]) -> None:
        piece_numbers = count()

        def take(piece: object) -> bool:
            if next(piece_numbers) == 0:
                note_first()
            return False  # whether to stop

        server.handle_completions({"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "cache_prompt": False,
                                   "ignore_eos": True, "stream": True}, take)

    def write(prompts: PromptIds, note_first: Callable[[], None]) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(write_one, prompts, [note_first] * len(prompts)))

    return write


class Streamer:
    """What `generate` of transformers passes its tokens to: the prompt first, then each new token."""

    def __init__(self, note_first: Callable[[], None]) -> None:
        self._note_first = note_first
        self._num_calls = 0

    def put(self, ids: torch.Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            self._note_first()

    def end(self) -> None:
        pass


def of_transformers(gguf_path: Path, dtype: str) -> WriteAnswers:
    """Return the `generate` of transformers, for one request."""
    model = transformers_model(gguf_path, getattr(torch, dtype))

    def write(prompts: PromptIds, note_first: Callable[[], None]) -> None:
        ids = torch.tensor(prompts)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
                       do_sample=False, pad_token_id=0, streamer=Streamer(note_first))

    return write


def ours(pipeline: Pipeline) -> WriteAnswers:
    """Return plain decoding on a pipeline of one stage."""

    def write(prompts: PromptIds, note_first: Callable[[], None]) -> None:
        answers = [pipeline.submit(prompt, max_new_tokens=NUM_TOKENS) for prompt in prompts]
        for answer in answers:  # reading one advances all
            next(answer)
            note_first()

        for answer in answers:
            for _ in answer:
                pass

    return write


# --- their costs ------------------------------------------------------------------------------------------------------

def measured(gguf_path: Path, model_dir: Path, limits: ProgramLimits, forms: Sequence[tuple[str, str, str]],
             prompt_lengths: Sequence[int], repeats: int) -> Costs:
    """Return the costs of prompts of these lengths and of their answers.

    The programs alternate, so that a disturbance affects all of them. Every other turn runs them in reverse, since the
    second finds the processor's caches warm. The first turn warms up and does not count.
    """
    costs = defaultdict(list)
    with ExitStack() as open_pipelines:
        programs = dict(_opened(gguf_path, model_dir, limits, forms, open_pipelines))
        jobs = list(product(programs, prompt_lengths))
        for turn in ProgressBar(range(repeats + 1), desc="turns", leave=False):
            for name, length in reversed(jobs) if turn % 2 else jobs:
                prompts = [list(range(100 + number, 100 + number + length)) for number in range(limits.num_requests)]
                costs[name, length].append(answer_cost(programs[name], prompts))

    return {key: repeated[1:] for key, repeated in costs.items()}


def answer_cost(write: WriteAnswers, prompts: PromptIds) -> AnswerCost:
    """Return the cost of answering these prompts at once."""
    stopwatch = Stopwatch()
    costs_to_first: list[Cost] = []
    write(prompts, lambda: costs_to_first.append(stopwatch.read()))
    whole, to_first = stopwatch.read(), costs_to_first[-1]

    num_further_tokens = len(prompts) * (NUM_TOKENS - 1)
    further = (all_seconds - first_seconds for all_seconds, first_seconds in zip(whole, to_first))
    return AnswerCost(to_first, Cost(*(seconds / num_further_tokens for seconds in further)))


def heading(clock: str, prompt_lengths: Sequence[int]) -> list[str]:
    """Return the heading of a table of the times by one clock."""
    columns = ((f"{length} tokens read", "a token after them") for length in prompt_lengths)
    return [f"ms, {clock}", *chain.from_iterable(columns)]


def table(costs: Costs, prompt_lengths: Sequence[int], clock: str) -> list[list[str]]:
    """Return a row per program: ms of prompts and of a token after them by one clock, the least, with ratios."""
    seconds_by_name: dict[str, list[float]] = defaultdict(list)
    for name in dict.fromkeys(name for name, _ in costs):
        for length in prompt_lengths:
            answer_costs = costs[name, length]
            seconds_by_name[name].append(min(getattr(answer.prompts, clock) for answer in answer_costs))
            seconds_by_name[name].append(min(getattr(answer.token, clock) for answer in answer_costs))

    rows = []
    first_seconds = next(iter(seconds_by_name.values()))
    for name, seconds in seconds_by_name.items():
        pairs = zip(first_seconds, seconds)
        rows.append([name, *(f"{1e3 * value:.1f} ({first / value:.2f})" for first, value in pairs)])
    return rows
