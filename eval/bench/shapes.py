"""A GGUF file of a large model's shapes with random weights, for measurements where no such model is at hand."""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

from config.dialect import OptionParser

SIZES_7B = {"embedding_length": 4096, "feed_forward_length": 11008, "attention.head_count": 32,
           "attention.head_count_kv": 32, "attention.key_length": 128, "attention.value_length": 128,
           "rope.dimension_count": 128}  # sizes by their names in GGUF
NUM_LAYERS = 2


class BlockKind(NamedTuple):
    """The blocks of a kind of GGUF file: scale factors in float16, then the rest."""

    num_weights: int
    num_bytes: int
    factors: Sequence[float]  # for a matrix with one input


KINDS = {
    "Q4_1": BlockKind(32, 20, [0.2, -1.5]),
    "Q8_0": BlockKind(32, 34, [0.02]),
    "Q4_K": BlockKind(256, 144, [0.006, 0.05]),
}


def add_shapes(parser: OptionParser) -> None:
    """Add the options of the file to measure."""
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="a model of llama.cpp")
    parser.add_argument("--shapes", choices=("own", "7b"), default="own",
                        help="7b: random weights of a 7B model's shapes, two layers (own)")
    parser.add_argument("--kind", choices=tuple(KINDS), default="Q4_1", help="kind of the random weights (Q4_1)")


def of_shapes(args: Namespace, folder: Path) -> Path:
    """Return the file to measure: the one that was named, or one with random weights that is written to a folder."""
    if args.shapes == "own":
        named_file: Path = args.file
        return named_file

    path = folder / f"random-{args.kind}.gguf"
    write_random(args.file, path, NUM_LAYERS, args.kind)
    return path


def write_random(like: Path, path: Path, num_layers: int, kind_name: str) -> None:
    """Write a GGUF file of this kind with SIZES_7B and random weights, and the tokenizer of `like`."""
    import gguf
    import numpy as np

    sizes = {**SIZES_7B, "block_count": num_layers}
    reader, block_kind = gguf.GGUFReader(like), KINDS[kind_name]
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, sizes)
    hidden, intermediate = sizes["embedding_length"], sizes["feed_forward_length"]
    vocab_size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    random = np.random.default_rng(1)

    def matrix(name: str, num_outputs: int, num_inputs: int) -> None:
        shape = num_outputs, num_inputs // block_kind.num_weights, block_kind.num_bytes
        blocks = random.integers(0, 256, shape, dtype=np.uint8)
        factors = np.array([factor / num_inputs ** 0.5 for factor in block_kind.factors], dtype=np.float16)
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

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_fields(reader: Any, writer: Any, sizes: Mapping[str, int]) -> None:
    """Copy the fields of a file about its model and its tokenizer, with these sizes."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        size_name = name.removeprefix("llama.")
        element_type = field.types[-1] if len(field.types) > 1 else None
        value = sizes.get(size_name, field.contents())
        writer.add_key_value(name, value, field.types[0], sub_type=element_type)
