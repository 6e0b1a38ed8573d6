"""A comparison with the alternatives llama.cpp and transformers, on this machine, in one process.

All compute one model, from one GGUF file, alternately. Times are elapsed and processor times: if other programs use the
cores, only the latter are the cost of a token.
"""
from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple

import torch

from config.console import say
from config.dialect import OptionParser
from config.profiles import PROFILES
from eval.bench import Cost, by_turns, cost, number
from eval.bench.rpc import compare
from eval.tables import in_columns
from launch.pipeline import Pipeline
from launch.split.gguf import unpack
from launch.split.write import split

LLAMA = "llama.cpp"
# type, layers and LM head of ours, auto as in the file; the forms without quantization are also those of transformers
FORMS = (("float32", "auto", "auto"), ("float32", "none", "none"), ("bfloat16", "none", "none"),
         ("bfloat16", "int4", "int4"))
ROWS = (16, 64)  # tokens of the prompts that are read
WRITTEN = 32  # tokens of an answer, after the shorter prompt
CONTEXT = 512
SEVEN_B = {"embedding_length": 4096, "feed_forward_length": 11008, "attention.head_count": 32,
           "attention.head_count_kv": 32, "attention.key_length": 128, "attention.value_length": 128,
           "rope.dimension_count": 128}  # sizes by their names in GGUF
LAYERS = 2  # of a model of those sizes in one process
BLOCK = 32  # weights that share a scale and a least value in a GGUF file of kind Q4_1
HEAD = ("", "tokens/s", "16 rows, ms", "64 rows, ms", "of processor: a token, ms", "16 rows, ms", "64 rows, ms")
Ask = Callable[[List[int], int], None]  # reads a prompt of token ids, and writes this many tokens after it
Took = Mapping[Tuple[str, int, int], Sequence[Cost]]  # by name, rows of the prompt and tokens of the answer


def peers(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench peers`."""
    parser = OptionParser(prog="python3 -m scripts.bench peers")
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="a model of llama.cpp")
    parser.add_argument("--shapes", choices=("own", "7b"), default="own",
                        help="7b: random weights of a 7B model's shapes, two layers or one for each process (own)")
    parser.add_argument("--threads", type=number, nargs="+", default=[1, 2],
                        metavar="N", help="of each (1 2)")
    parser.add_argument("--repeats", type=number, default=5, metavar="N", help="repeats of each measurement (5)")
    parser.add_argument("--over", type=number, metavar="N",
                        help="compare plain decoding over N processes instead, by llama.cpp's llama-bench and "
                             "ggml-rpc-server, at 1 thread each, with quant=int4 of ours")
    parser.add_argument("--wires", choices=PROFILES,
                        help="with --over: emulated wires of this cluster, in place of loopback")
    parser.add_argument("--binaries", metavar="DIR", help="folder of these programs, if not in PATH")
    args = parser.parse_args(argv)
    if args.wires and not args.over:
        parser.error("--wires are between processes: add --over N")
    if find_spec("xllamacpp") is None and not args.over:
        say("llama.cpp is not installed, and is left out: type pip install xllamacpp")
    with tempfile.TemporaryDirectory(prefix="flowspec-") as place:
        file = args.file
        if args.shapes == "7b":
            file = Path(place) / "random.gguf"
            write_random(args.file, file, args.over or LAYERS)
        split(file, Path(place) / "split", str(args.over or 1))
        if args.over:
            compare(args, file, Path(place))
            return 0
        unpack(file, Path(place) / "whole", plain=True)
        for threads in args.threads:
            took = measured(file, Path(place), threads, args.repeats)
            print(f"{args.file.name}, {args.shapes} shapes, {threads} thread(s), one process, minimum of "
                  f"{args.repeats}; in brackets the speed over that of the first line")
            print(in_columns(HEAD, table(took), names=0))
    return 0


# --- the programs -----------------------------------------------------------------------------------------------------

def _opened(file: Path, place: Path, threads: int,
            open_ones: ExitStack) -> Iterator[tuple[str, Ask]]:
    if find_spec("xllamacpp") is not None:
        yield LLAMA, llama_cpp(file, threads)
    torch.set_num_threads(threads)
    for dtype, quant, head in FORMS:
        if quant == "none":
            yield f"transformers, {dtype}", of_transformers(place / "whole", dtype)
        pipeline = open_ones.enter_context(Pipeline.open(
            model_dir=str(place / "split"), stages="1", processes=False, pipeline_type="ar", dtype=dtype, quant=quant,
            quant_head=head, max_length=CONTEXT, threads_per_rank=threads, ignore_eos=True, template="none"))
        yield f"ours, {described(dtype, quant)}", ours(pipeline)


def described(dtype: str, quant: str) -> str:
    """Return the name of a form."""
    return {"auto": "as in the file", "none": dtype}.get(quant, quant)


def llama_cpp(file: Path, threads: int) -> Ask:
    """Return llama.cpp, by the package `xllamacpp`, with the weights as in the file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = str(file), CONTEXT
    params.n_parallel, params.verbosity = 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def ask(prompt: list[int], tokens: int) -> None:
        server.handle_completions({"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False,
                                   "ignore_eos": True})
    return ask


def of_transformers(folder: Path, dtype: str) -> Ask:
    """Return the `generate` of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def ask(prompt: list[int], tokens: int) -> None:
        ids = torch.tensor([prompt])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                       do_sample=False, pad_token_id=0)
    return ask


def ours(pipeline: Pipeline) -> Ask:
    """Return plain decoding on a pipeline of one stage."""
    def ask(prompt: list[int], tokens: int) -> None:
        pipeline.generate(prompt, max_new_tokens=tokens)
    return ask


# --- their costs ------------------------------------------------------------------------------------------------------

def measured(file: Path, place: Path, threads: int, repeats: int) -> Took:
    """Return the costs of prompts of ROWS tokens and of an answer."""
    jobs = {}
    with ExitStack() as open_ones:
        for name, ask in _opened(file, place, threads, open_ones):
            asked = (ROWS[0], WRITTEN), *((rows, 1) for rows in ROWS)
            for rows, tokens in asked:
                prompt = list(range(100, 100 + rows))
                jobs[name, rows, tokens] = partial(cost, ask, prompt, tokens)
        return by_turns(jobs, repeats)


def table(took: Took) -> list[list[str]]:
    """Return a row per program: tokens/s of plain decoding and ms of prompts, elapsed and processor, with ratios."""
    least = {key: [min(each) for each in zip(*costs)]
             for key, costs in took.items()}

    def seconds(name: str) -> list[float]:
        """Return the elapsed, then the processor seconds of a token and of each prompt."""
        found = []
        for by in (0, 1):
            read = [least[name, rows, 1][by] for rows in ROWS]
            whole = least[name, ROWS[0], WRITTEN][by]
            found += [max(whole - read[0], 1e-9) / (WRITTEN - 1), *read]
        return found

    first, *_ = names = dict.fromkeys(name for name, _, _ in took)
    made = []
    for name in names:
        mine = seconds(name)
        shown = [1 / mine[0], *(1e3 * each for each in mine[1:])]
        ratios = [its / each for its, each in zip(seconds(first), mine)]
        made.append([name, *(f"{figure:.1f} ({ratio:.2f})" for figure, ratio in zip(shown, ratios))])
    return made


# --- a model of other shapes ------------------------------------------------------------------------------------------

def write_random(like: Path, path: Path, layers: int) -> None:
    """Write a GGUF file of kind Q4_1 with SEVEN_B's sizes and random weights, and the tokenizer of `like`."""
    import gguf
    import numpy as np

    sizes = {**SEVEN_B, "block_count": layers}
    reader, kind = gguf.GGUFReader(like), gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, sizes)
    wide, inner = sizes["embedding_length"], sizes["feed_forward_length"]
    words = len(reader.fields["tokenizer.ggml.tokens"].contents())
    chance = np.random.default_rng(1)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        shape = outputs, inputs // BLOCK, 20
        blocks = chance.integers(0, 256, shape, dtype=np.uint8)
        step_and_least = 0.2 / inputs ** 0.5, -1.5 / inputs ** 0.5
        scale = np.array(step_and_least, dtype=np.float16)
        blocks[..., :4] = scale.view(np.uint8)
        writer.add_tensor(name, blocks.reshape(outputs, -1), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(wide, dtype=np.float32))

    matrix("token_embd.weight", words, wide)
    norm("output_norm.weight")
    for layer in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", wide, wide)
        for part in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{part}.weight", inner, wide)
        matrix(f"blk.{layer}.ffn_down.weight", wide, inner)
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def _copy_fields(reader: Any, writer: Any, sizes: Mapping[str, int]) -> None:
    """Copy the fields of a file about its model and its tokenizer, with these sizes."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        of_sizes = name.removeprefix("llama.")
        element = field.types[-1] if len(field.types) > 1 else None
        value = sizes.get(of_sizes, field.contents())
        writer.add_key_value(name, value, field.types[0], sub_type=element)
