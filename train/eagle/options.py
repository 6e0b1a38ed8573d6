"""The options of the training of a head, and their checks before any long computation.

This module knows nothing about heads.
"""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from config.schema.block_heads import BLOCK_SIZES
from model.weights.checkpoint import SOURCES
from train.command import Options
from train.eagle.heads import DIALECTS
from train.eagle.loss import STARTS

ABOUT = "Train an EAGLE draft head for a model, on conversations similar to those it will answer."
EXAMPLE = """\
examples:
  python3 -m scripts.train_eagle toy/llama my_head --data talks.jsonl
  python3 -m scripts.train_eagle models/smollm2 my_head --own 20000 --eagle3 --draft-vocab 8192 --keep-features
  python3 -m scripts.train_eagle toy/llama my_blocks --data talks.jsonl --block 8
  python3 -m scripts.train_eagle models/vicuna-7b my_head3 --data talks.jsonl --eagle3 --device cuda
  python3 -m scripts.train_eagle models/vicuna-7b fixed --data talks.jsonl --from models/EAGLE-Vicuna-7B --device cuda
  accelerate launch --num_processes 2 -m scripts.train_eagle models/vicuna-7b my_head --data talks.jsonl

  then: bash run_pipe.sh base_dir=toy/llama eagle_dir=my_head stages=0+2+2+2+2

  A head is trained in two parts. In the first part it reads the model's features; in the last quarter of this part
  EAGLE-1/2 has no noise, and words count as much as features. In the second part it reads its own outputs, pass after
  pass, at half the rate. An EAGLE-1/2 head without this part drifts: it guesses worse with every guess of its own
  before. --from repairs a head that drifts, by the second part only. --authors is the training of EAGLE's authors; with
  --passes 2 --word-weight 1 --noise 0 it is that of toy/eagle.

  A line of FILE is {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]} as in
  ShareGPT, or {"messages": [{"role": "user", "content": "..."}, ...]}, or {"turns": [...], "reference": [...]}. The
  best answers are the model's own, as --own generates them. If the command is interrupted, run it again: it continues
  from OUT_DIR/training.pt. At the end OUT_DIR/training.json holds the agreement of the head's best guess with the
  model, and the mean accepted length, on held-out questions.
"""
CHECKPOINT = "training.pt"


def parser() -> Options:
    option_parser = Options("train_eagle", ABOUT, EXAMPLE)
    add = option_parser.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="the model in Hugging Face format, with its tokenizer")
    add("out_dir", metavar="OUT_DIR", type=Path, help="folder for the head and the checkpoint of its training")

    source = option_parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="FILE", type=Path, help="conversations, one JSON object per line, or "
                        "a file of run_pipe.sh's answers=, so that the head learns from its user")
    source.add_argument("--own", type=int, metavar="N", help="let the model generate N conversations, questions and "
                        "answers, and write them to OUT_DIR/own.jsonl")
    option_parser.bounds["--own"] = (2, 1 << 40)

    add("--keep-features", action="store_true", help="keep the model's features of each conversation in "
        "OUT_DIR/features until the training ends (about 8 bytes per token and hidden unit), to compute them once")
    add("--eagle3", action="store_true", help="train an EAGLE-3 head (the model needs 7 layers); default: EAGLE-1/2")
    block_sizes = BLOCK_SIZES[0], BLOCK_SIZES[-1]
    option_parser.number("--block", block_sizes, None, "train a DFlash head (7 layers, too), with "
                         "blocks of N tokens, including the one before the guesses; it has one part, of --epochs")
    option_parser.number("--layers", (1, 64), 2, "layers of a DFlash head (2; its authors' have 5)")
    add("--dialect", choices=list(DIALECTS), help="train an EAGLE-3 head in this form: eagle3, as published by EAGLE, "
        "SpecForge and AngelSlim; eagle3.1, with its norms; vllm; speculators, nested and with its norms")

    _add_parts(option_parser)
    _add_data(option_parser)
    add("--dtype", choices=["auto", "float64", "float32", "bfloat16"], default="auto",
        help="number type; auto: bfloat16 on cuda, on AMD's processors with avx512_bf16 and on those with amx_bf16, "
        "else float32. Trained weights are float32")

    option_parser.common(checkpoint_steps=100)
    return option_parser


def _add_parts(option_parser: Options) -> None:
    """Add the options for the parts of the training, and their length."""
    add, number = option_parser.add_argument, option_parser.number
    number("--epochs", (0, 1e6), 4.0, "epochs of the first part (4)")
    number("--own-epochs", (0, 1e6), 1.5, "epochs of the second part (1.5)")
    add("--from", dest="given", metavar="HEAD", type=Path, help="folder of a head for this model to repair: begin with "
        "its weights, and train the second part only")

    add("--authors", action="store_true", help="one part instead of two: all passes at all places from the first step "
        "on")

    number("--rate", (0, 1e3), None, "learning rate; default: EAGLE's, 3e-5 for a model of size 4096 (EAGLE-3: 5e-5), "
           "and inversely proportional to the size for others", "R")

    number("--passes", (1, 64), None, "passes of the second part: the first reads the model's features, each later one "
           "the head's outputs of the previous pass (8; --authors: 1, with --eagle3 7)")
    number("--starts", (1, 1 << 20), STARTS, "random places of a conversation where later passes or blocks start "
           "(10; --authors: all)")

    number("--noise", (0, 1e3), 0.1, "amplitude of noise on the features in the first part, EAGLE-1/2 (0.1)", "X")
    number("--word-weight", (0, 1e6), 0.1, "weight of words against features in the first part, EAGLE-1/2 (0.1)", "X")


def _add_data(option_parser: Options) -> None:
    """Add the options for the data."""
    number = option_parser.number
    number("--batch", (1, 1 << 20), 4, "conversations per batch, which several processes share (4)")
    number("--accumulate", (1, 1 << 20), 1, "batches per step, whose gradients are added up (1)")

    number("--length", (3, 1 << 30), 2048, "most tokens of a conversation, which is cut after them (2048)")
    number("--draft-vocab", (1, 1 << 30), 32000, "vocabulary of an EAGLE-3 head: the most used tokens of the answers "
           "(32000)")
    number("--judged", (0, 1 << 20), 24, "held-out questions to answer at the end with trees of 60 nodes, for the "
           "figures (24); 0: no figures")


def check(args: Namespace) -> None:
    """Raise ValueError for options that cannot work, before any long computation."""
    option_parser = parser()
    option_parser.check(args)
    if args.dialect and args.given:
        raise ValueError("--from keeps the form of its head; omit --dialect")
    args.eagle3 = args.eagle3 or bool(args.dialect)
    if args.block and (args.eagle3 or args.given or args.authors):
        raise ValueError("--block trains a new DFlash head; omit --eagle3, --dialect, --from and --authors")

    for option_name in ("own_epochs", "passes", "noise", "word_weight"):
        is_changed = getattr(args, option_name) != option_parser.get_default(option_name)
        if is_changed and args.block:
            raise ValueError(f"--{option_name.replace('_', '-')} applies to EAGLE heads only; omit it")

    if args.given and args.authors:
        raise ValueError("--from trains only the second part, which --authors does not have; omit one of them")
    if args.passes == 1 and not args.authors:
        raise ValueError("--passes 1 has no pass over the head's own outputs; give 2 to 64, or add --authors")

    weight_files = [file_name for file_name in SOURCES if (args.out_dir / file_name).exists()]
    if weight_files and not (args.out_dir / CHECKPOINT).exists():
        raise ValueError(f"{args.out_dir} already holds {weight_files[0]}, but no training to continue; choose another "
                         "folder")
