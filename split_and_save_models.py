"""Split a Hugging Face model into one folder for each rank, tensor by tensor, so that a rank reads its own folder only.

This is the command; the work is done in launch/split/.
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Sequence

from cluster.board import COMMAND_VARIABLE
from config.cli import RUN_PIPE
from config.console import EXIT_INTERRUPTED, NEEDED_PACKAGES, ended_by, enter, say
from config.dialect import OptionParser
from config.run_config import QUANTIZATIONS, RunConfig

if __name__ == "__main__":
    enter(*NEEDED_PACKAGES)

from launch.split.write import AUTO_HEAD, Layout, check, split
from model.weights.parts import Part

EXAMPLE = """\
example:
  python split_and_save_models.py models/vicuna-7b split/vicuna-7b --stages 0+8+8+8+8 --eagle models/eagle-vicuna-7b
  python split_and_save_models.py models/vicuna-7b split/vicuna-7b-nf4 --stages 0+8+8+8+8 --quant nf4
  python split_and_save_models.py models/vicuna-7b split/vicuna-7b-tp --tp 4 --eagle models/eagle-vicuna-7b
  python split_and_save_models.py models/vicuna-7b split/vicuna-7b-2x2 --stages 0+16+16 --tp 2
  python split_and_save_models.py SmolLM2-135M-Instruct.Q4_1.gguf split/smollm2 --stages 4
  python split_and_save_models.py --check split/vicuna-7b

  OUT_DIR/stage_0 gets the language-model head, the tokenizer and the draft head; OUT_DIR/stage_1 ... stage_N get the
  layers, the first of them also the embedding and the last one the final norm. Copy each folder to the board that runs
  that rank. Memory needed: about the largest tensor. If it is interrupted, type the same command again: finished
  folders are kept.

  --tp shares layers (tensor parallel): without --stages all ranks, rank 0 included, hold a share of every layer; with
  --stages, N consecutive ranks share each stage: with N=2, stage_1 and stage_2 the first stage, and so on.
"""


def report(parts: list[Part]) -> None:
    """Print what each folder holds, and its size."""
    for part in parts:
        num_bytes = sum(file_bytes for file_bytes, _ in part.files.values())
        first_layer, end_layer = part.layers
        contents = f"layers {first_layer} to {end_layer - 1}" if first_layer < end_layer else "drafts"
        if first_layer < end_layer and len(part.shares) > 1:
            contents = f"share {part.member + 1} of {len(part.shares)} of {contents}"
        print(f"{part.folder}: {contents}, {num_bytes / 1e6:,.1f} MB")

    if len(parts) < parts[0].world:
        print(f"{len(parts)} of {parts[0].world} ranks are here")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the program with the usage."""
    parser = OptionParser(prog=os.environ.get(COMMAND_VARIABLE), description=__doc__.splitlines()[0], epilog=EXAMPLE,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", metavar="MODEL_DIR", help="a model in Hugging Face form; or "
                        "a GGUF file, whose quantized weights stay as they are")
    parser.add_argument("out_dir", nargs="?", metavar="OUT_DIR", help="where the folders stage_0, stage_1, ... go")
    parser.add_argument("--stages", metavar="SPLIT", help="layers per rank, as 0+2+2+2+2 (rank 0 drafts and has none); "
                        "a number of stages: equal shares, larger ones last; or auto:4: 4 stages of about equal size")
    parser.add_argument("--eagle", metavar="DIR", help="the EAGLE draft head of the model "
                        "(safetensors or .bin), or none; default: that of a preset's model, if it is here and fits")
    parser.add_argument("--quant", choices=QUANTIZATIONS, default="none", help="quantize the layers' weights: "
                        "smaller folders, less exact text; LM head and draft head are not quantized")
    parser.add_argument("--tp", metavar="N", default="0", help="ranks that share each layer; or their speeds, as "
                        "2,1,1,1, if they differ; see below")
    parser.add_argument("--check", metavar="OUT_DIR", help="write nothing: compare an existing split with its hashes")

    args = parser.parse_args(argv)
    has_layout = args.stages or args.tp != "0"
    if not (args.check or (args.model_dir and args.out_dir and has_layout)):
        parser.error("MODEL_DIR, OUT_DIR and --stages or --tp are needed (or --check OUT_DIR alone); see --help")
    return args


def write(args: argparse.Namespace) -> list[Part]:
    """Split the model as the arguments specify; raises ValueError for what cannot work."""
    try:
        run_keys = RunConfig("ar" if args.stages else "tp", tp=args.tp)
    except ValueError as problem:
        raise ValueError(str(problem).replace("tp=", "--tp ")) from None
    layout = Layout(args.quant, run_keys.speeds)
    stages = args.stages or ""
    eagle_dir = None if args.eagle == "none" else args.eagle or AUTO_HEAD
    part_dirs = split(args.model_dir, args.out_dir, stages, eagle_dir, layout=layout)
    return [Part(folder) for folder in part_dirs]


def next_command(args: argparse.Namespace) -> str:
    """Return the command that answers a question with the new split."""
    method = "" if args.stages else " pipeline_type=tp"
    return f'{RUN_PIPE} model_dir={shlex.quote(args.out_dir)}{method} prompt="What does a baker do?"'


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        report(check(args.check) if args.check else write(args))
        if not args.check:
            print(f"next: {next_command(args)}")
    except (ValueError, OSError) as error:
        return ended_by(error)
    except KeyboardInterrupt:
        say("stopped; type the same command again to continue", "\n")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
