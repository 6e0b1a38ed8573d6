"""A comparison with the alternatives llama.cpp and transformers, on this machine, in one process.

All compute one model, from one GGUF file, alternately. Times are elapsed and processor times: if other programs use the
cores, only the latter are the cost of a token.
"""
from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple

import torch

from config.console import say
from config.dialect import OptionParser
from eval.bench import Cost, cost, transformers_model, whole_number
from eval.tables import in_columns
from launch.pipeline import Pipeline
from launch.progress import ProgressBar
from launch.split.write import split

LLAMA_CPP = "llama.cpp"
# type, layers and LM head of ours, auto as in the file; the forms without quantization are also those of transformers
FORMS = (("float32", "auto", "auto"), ("float32", "none", "none"), ("bfloat16", "none", "none"),
         ("float32", "int8", "int8"), ("float32", "int4", "int4"))
PROMPT_LENGTHS = (16, 64)  # tokens
NUM_TOKENS = 32  # of an answer, after the shorter prompt
CONTEXT = 512
SIZES_7B = {"embedding_length": 4096, "feed_forward_length": 11008, "attention.head_count": 32,
           "attention.head_count_kv": 32, "attention.key_length": 128, "attention.value_length": 128,
           "rope.dimension_count": 128}  # sizes by their names in GGUF
NUM_LAYERS = 2  # of a model of those sizes
BLOCK_WEIGHTS = 32  # that share a scale and a least value in a GGUF file of kind Q4_1
HEADING = ("", "tokens/s", "16 rows, ms", "64 rows, ms", "of processor: a token, ms", "16 rows, ms", "64 rows, ms")
WriteAnswer = Callable[[List[int], int], object]  # reads a prompt of token ids, and writes this many tokens after it
Costs = Mapping[Tuple[str, int, int], Sequence[Cost]]  # by name, tokens of the prompt and of the answer


def peers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench peers`."""
    parser = OptionParser(prog="python3 -m scripts.bench peers")
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="a model of llama.cpp")
    parser.add_argument("--shapes", choices=("own", "7b"), default="own",
                        help="7b: random weights of a 7B model's shapes, two layers (own)")
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
            write_random(args.file, gguf_path, NUM_LAYERS)
        split(gguf_path, model_dir / "split", "1")
        for num_threads in args.threads:
            costs = measured(gguf_path, model_dir, num_threads, args.repeats)
            print(f"{args.file.name}, {args.shapes} shapes, {num_threads} thread(s), one process, minimum of "
                  f"{args.repeats}; in brackets the speed over that of the first line")
            print(in_columns(HEADING, table(costs), names=0))
    return 0


def _refuse_processes(typed_count: str) -> None:
    raise argparse.ArgumentTypeError("llama.cpp over several processes is not measured any more: leave it out; "
                                     "docs/performance.md has the last figures, beside llama.cpp and transformers")


# --- the programs -----------------------------------------------------------------------------------------------------

def _opened(gguf_path: Path, model_dir: Path, num_threads: int,
            open_pipelines: ExitStack) -> Iterator[tuple[str, WriteAnswer]]:
    if find_spec("xllamacpp") is not None:
        yield LLAMA_CPP, llama_cpp(gguf_path, num_threads)

    torch.set_num_threads(num_threads)
    for dtype, quant, quant_head in FORMS:
        if quant == "none":
            yield f"transformers, {dtype}", of_transformers(gguf_path, dtype)

        pipeline = open_pipelines.enter_context(Pipeline.open(
            model_dir=str(model_dir / "split"), stages="1", link="threads", pipeline_type="ar", dtype=dtype,
            quant=quant, quant_head=quant_head, max_length=CONTEXT, threads_per_rank=num_threads, ignore_eos=True,
            template="none"))
        names = {"auto": "as in the file", "none": dtype}
        yield f"ours, {names.get(quant, quant)}", ours(pipeline)


def llama_cpp(gguf_path: Path, num_threads: int) -> WriteAnswer:
    """Return llama.cpp, by the package `xllamacpp`, with the weights as in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(gguf_path), CONTEXT
    params.n_parallel, params.verbosity = 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(params)

    def ask(prompt: list[int], num_tokens: int) -> None:
        server.handle_completions({"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "cache_prompt": False,
                                   "ignore_eos": True})

    return ask


def of_transformers(gguf_path: Path, dtype: str) -> WriteAnswer:
    """Return the `generate` of transformers."""
    model = transformers_model(gguf_path, getattr(torch, dtype))

    def ask(prompt: list[int], num_tokens: int) -> None:
        ids = torch.tensor([prompt])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                       do_sample=False, pad_token_id=0)

    return ask


def ours(pipeline: Pipeline) -> WriteAnswer:
    """Return plain decoding on a pipeline of one stage."""
    return lambda prompt, num_tokens: pipeline.generate(prompt, max_new_tokens=num_tokens)


# --- their costs ------------------------------------------------------------------------------------------------------

def measured(gguf_path: Path, model_dir: Path, num_threads: int, repeats: int) -> Costs:
    """Return the costs of prompts of PROMPT_LENGTHS tokens and of an answer.

    The programs alternate, so that a disturbance affects all of them. Every other turn runs them in reverse, since the
    second finds the processor's caches warm. The first turn warms up and does not count.
    """
    tasks = [(PROMPT_LENGTHS[0], NUM_TOKENS), *((length, 1) for length in PROMPT_LENGTHS)]
    costs = defaultdict(list)

    with ExitStack() as open_pipelines:
        asks = dict(_opened(gguf_path, model_dir, num_threads, open_pipelines))
        jobs = list(product(asks, tasks))
        for turn in ProgressBar(range(repeats + 1), desc="turns", leave=False):
            for name, (length, num_tokens) in reversed(jobs) if turn % 2 else jobs:
                prompt = list(range(100, 100 + length))
                costs[name, length, num_tokens].append(cost(asks[name], prompt, num_tokens))

    return {key: repeated[1:] for key, repeated in costs.items()}


def table(costs: Costs) -> list[list[str]]:
    """Return a row per program: tokens/s of plain decoding and ms of prompts, elapsed and processor, with ratios."""
    seconds_by_name: dict[str, list[float]] = defaultdict(list)
    for clock in range(len(Cost._fields)):
        least = {key: min(repeated[clock] for repeated in costs[key]) for key in costs}
        for name in dict.fromkeys(name for name, _, _ in costs):
            prompt_seconds = [least[name, length, 1] for length in PROMPT_LENGTHS]
            answer_seconds = least[name, PROMPT_LENGTHS[0], NUM_TOKENS]
            token_seconds = max(answer_seconds - prompt_seconds[0], 1e-9) / (NUM_TOKENS - 1)
            seconds_by_name[name] += [token_seconds, *prompt_seconds]

    rows = []
    first_seconds = next(iter(seconds_by_name.values()))
    for name, seconds in seconds_by_name.items():
        figures = [1 / seconds[0], *(1e3 * value for value in seconds[1:])]
        ratios = [first / other for first, other in zip(first_seconds, seconds)]
        rows.append([name, *(f"{figure:.1f} ({ratio:.2f})" for figure, ratio in zip(figures, ratios))])
    return rows


# --- a model of other shapes ------------------------------------------------------------------------------------------

def write_random(like: Path, path: Path, num_layers: int) -> None:
    """Write a GGUF file of kind Q4_1 with SIZES_7B and random weights, and the tokenizer of `like`."""
    import gguf
    import numpy as np

    sizes = {**SIZES_7B, "block_count": num_layers}
    reader, kind = gguf.GGUFReader(like), gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, sizes)
    hidden, intermediate = sizes["embedding_length"], sizes["feed_forward_length"]
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    random = np.random.default_rng(1)

    def matrix(name: str, num_outputs: int, num_inputs: int) -> None:
        shape = num_outputs, num_inputs // BLOCK_WEIGHTS, 20
        blocks = random.integers(0, 256, shape, dtype=np.uint8)
        step_and_least = 0.2 / num_inputs ** 0.5, -1.5 / num_inputs ** 0.5
        scale = np.array(step_and_least, dtype=np.float16)
        blocks[..., :4] = scale.view(np.uint8)
        writer.add_tensor(name, blocks.reshape(num_outputs, -1), raw_dtype=kind)

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
