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
from itertools import chain, product
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from config.console import say
from config.dialect import OptionParser
from eval.bench import Cost, Stopwatch, transformers_model, whole_number
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
SIZES_7B = {"embedding_length": 4096, "feed_forward_length": 11008, "attention.head_count": 32,
           "attention.head_count_kv": 32, "attention.key_length": 128, "attention.value_length": 128,
           "rope.dimension_count": 128}  # sizes by their names in GGUF
NUM_LAYERS = 2  # of a model of those sizes


class Kind(NamedTuple):
    """The blocks of a kind of GGUF file: scale factors in float16, then the rest."""

    num_weights: int
    num_bytes: int
    factors: Sequence[float]  # for a matrix with one input


KINDS = {"Q4_1": Kind(32, 20, [0.2, -1.5]), "Q8_0": Kind(32, 34, [0.02]), "Q4_K": Kind(256, 144, [0.006, 0.05])}

Prompts = Sequence[List[int]]  # token ids, of requests at once

# Writes an answer of NUM_TOKENS tokens to each prompt, and calls the function when the first token of one is there.
WriteAnswers = Callable[[Prompts, Callable[[], None]], None]


class AnswerCost(NamedTuple):
    """The cost of all prompts, up to the last first token, and that of each further token."""

    prompts: Cost
    token: Cost


Costs = Mapping[Tuple[str, int], Sequence[AnswerCost]]  # by name, and tokens of a prompt


def peers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench peers`."""
    parser = OptionParser(prog="python3 -m scripts.bench peers")
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="a model of llama.cpp")
    parser.add_argument("--shapes", choices=("own", "7b"), default="own",
                        help="7b: random weights of a 7B model's shapes, two layers (own)")
    parser.add_argument("--kind", choices=tuple(KINDS), default="Q4_1", help="kind of the random weights (Q4_1)")
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
        gguf_path, model_dir = args.file, Path(folder)
        if args.shapes == "7b":
            gguf_path = model_dir / "random.gguf"
            write_random(args.file, gguf_path, NUM_LAYERS, args.kind)
        split(gguf_path, model_dir / "split", "1")

        context = max(args.prompts) + NUM_TOKENS + SPARE_TOKENS
        forms = FORMS if args.forms == "all" else [AS_IN_FILE]
        for num_threads in args.threads:
            limits = Limits(num_threads, args.requests, context)
            costs = measured(gguf_path, model_dir, limits, forms, args.prompts, args.repeats)
            print(f"{args.file.name}, {args.shapes} shapes, {num_threads} thread(s), one process, {args.requests} "
                  f"request(s) at once, minimum of {args.repeats}; in brackets the speed over that of the first line")
            for clock, words in zip(Cost._fields, ("elapsed", "of processor")):
                print(in_columns(heading(words, args.prompts), table(costs, args.prompts, clock), names=0))
    return 0


def _refuse_processes(typed_count: str) -> None:
    raise argparse.ArgumentTypeError("llama.cpp over several processes is not measured any more: leave it out; "
                                     "docs/performance.md has the last figures, beside llama.cpp and transformers")


# --- the programs -----------------------------------------------------------------------------------------------------

class Limits(NamedTuple):
    """What each program may use."""

    num_threads: int
    num_requests: int  # at once
    context: int  # tokens of a request


def _opened(gguf_path: Path, model_dir: Path, limits: Limits, forms: Sequence[tuple[str, str, str]],
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


def llama_cpp(gguf_path: Path, limits: Limits) -> WriteAnswers:
    """Return llama.cpp, by the package `xllamacpp`, with the weights as in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(gguf_path), limits.context * limits.num_requests
    params.n_parallel, params.verbosity = limits.num_requests, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = limits.num_threads
    server = xllamacpp.Server(params)

    def write_one(prompt: list[int], note_first: Callable[[], None]) -> None:
        unnoted = [note_first]

        def take(piece: object) -> bool:
            if unnoted:
                unnoted.pop()()
            return False  # whether to stop

        server.handle_completions({"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "cache_prompt": False,
                                   "ignore_eos": True, "stream": True}, take)

    def write(prompts: Prompts, note_first: Callable[[], None]) -> None:
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

    def write(prompts: Prompts, note_first: Callable[[], None]) -> None:
        ids = torch.tensor(prompts)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
                       do_sample=False, pad_token_id=0, streamer=Streamer(note_first))

    return write


def ours(pipeline: Pipeline) -> WriteAnswers:
    """Return plain decoding on a pipeline of one stage."""

    def write(prompts: Prompts, note_first: Callable[[], None]) -> None:
        answers = [pipeline.submit(prompt, max_new_tokens=NUM_TOKENS) for prompt in prompts]
        for answer in answers:  # reading one advances all
            next(answer)
            note_first()

        for answer in answers:
            for _ in answer:
                pass

    return write


# --- their costs ------------------------------------------------------------------------------------------------------

def measured(gguf_path: Path, model_dir: Path, limits: Limits, forms: Sequence[tuple[str, str, str]],
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


def answer_cost(write: WriteAnswers, prompts: Prompts) -> AnswerCost:
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
    seconds_by_name = {}
    for name in dict.fromkeys(name for name, _ in costs):
        repeated = (costs[name, length] for length in prompt_lengths)
        figures_by_length = ([[getattr(figure, clock) for figure in answer] for answer in answers]
                             for answers in repeated)
        seconds_by_name[name] = [min(figure) for figures in figures_by_length for figure in zip(*figures)]

    rows = []
    first_seconds = next(iter(seconds_by_name.values()))
    for name, seconds in seconds_by_name.items():
        rows.append([name, *(f"{1e3 * own:.1f} ({first / own:.2f})" for first, own in zip(first_seconds, seconds))])
    return rows


# --- a model of other shapes ------------------------------------------------------------------------------------------

def write_random(like: Path, path: Path, num_layers: int, kind_name: str = "Q4_1") -> None:
    """Write a GGUF file of this kind with SIZES_7B and random weights, and the tokenizer of `like`."""
    import gguf
    import numpy as np

    sizes = {**SIZES_7B, "block_count": num_layers}
    reader, kind = gguf.GGUFReader(like), KINDS[kind_name]
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, sizes)
    hidden, intermediate = sizes["embedding_length"], sizes["feed_forward_length"]
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    random = np.random.default_rng(1)

    def matrix(name: str, num_outputs: int, num_inputs: int) -> None:
        shape = num_outputs, num_inputs // kind.num_weights, kind.num_bytes
        blocks = random.integers(0, 256, shape, dtype=np.uint8)
        factors = np.array([factor / num_inputs ** 0.5 for factor in kind.factors], dtype=np.float16)
        blocks[..., :factors.nbytes] = factors.view(np.uint8)
        writer.add_tensor(name, blocks.reshape(num_outputs, -1), raw_dtype=gguf.GGMLQuantizationType[kind_name])

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    matrix("token_embd.weight", vocab_size, hidden)
    norm("output_norm.weight")
    for layer in range(num_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", hidden, hidden)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{name}.weight", intermediate, hidden)
        matrix(f"blk.{layer}.ffn_down.weight", hidden, intermediate)
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")

    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _copy_fields(reader: Any, writer: Any, sizes: Mapping[str, int]) -> None:
    """Copy the fields of a file about its model and its tokenizer, with these sizes."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        size_name = name.removeprefix("llama.")
        element_type = field.types[-1] if len(field.types) > 1 else None
        value = sizes.get(size_name, field.contents())
        writer.add_key_value(name, value, field.types[0], sub_type=element_type)
