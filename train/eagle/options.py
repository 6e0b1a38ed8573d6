"""What the training of a head takes, and what of it is refused before anything long begins.

It knows nothing about heads.
"""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from config.schema.heads import BLOCK_SIZES
from model.text import AUTO, CONVERSATIONS
from model.weights.checkpoint import SOURCES
from train.command import Options
from train.eagle.heads import DIALECTS
from train.eagle.loss import STARTS

ABOUT = "Trains an EAGLE draft head for a model, on conversations that are like those it shall answer."
EXAMPLE = """\
examples:
  python -m scripts.train_eagle toy/llama my_head --data talks.jsonl
  python -m scripts.train_eagle models/smollm2 my_head --own 20000 --eagle3 --draft-vocab 8192 --keep-features
  python -m scripts.train_eagle toy/llama my_blocks --data talks.jsonl --block 8
  python -m scripts.train_eagle models/vicuna-7b my_head3 --data talks.jsonl --eagle3 --device cuda
  python -m scripts.train_eagle models/vicuna-7b mended --data talks.jsonl --from models/EAGLE-Vicuna-7B --device cuda

  then: bash run_pipe.sh base_dir=toy/llama eagle_dir=my_head stages=0+2+2+2+2

  A head is taught in two parts. In the first one it reads the model's features, which makes it good; in the last
  quarter of it EAGLE-1/2 has no noise, and words count as much as features. In the second part it reads what it made
  itself, pass after pass, at half the rate, since a head of EAGLE-1/2 that never did so guesses worse with every guess
  that it stands on: it drifts. --from mends a head that drifts by the second part alone. --authors is the course of
  EAGLE's authors; with --passes 2 --word-weight 1 --noise 0 it is that of toy/eagle.

  A line of FILE is {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]} as in
  ShareGPT, or {"messages": [{"role": "user", "content": "..."}, ...]}, or {"turns": [...], "reference": [...]}. The
  best answers are those that the model itself gives, as --own makes them. If it is interrupted, type the same command
  again: it goes on from OUT_DIR/training.pt. At the end OUT_DIR/training.json holds how often the head's best guess was
  the model's, and the mean accepted length, on questions that were held out.
"""
CHECKPOINT = "training.pt"


def parser() -> Options:
    made = Options("train_eagle", ABOUT, EXAMPLE)
    add = made.add_argument
    add("model_dir", metavar="MODEL_DIR", type=Path, help="the model in Hugging Face form, with its tokenizer")
    add("out_dir", metavar="OUT_DIR", type=Path, help="where the head goes, and the checkpoint of its training")
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="FILE", type=Path, help="conversations, one JSON object a line")
    source.add_argument("--own", type=int, metavar="N", help="the model makes so many conversations itself, questions "
                        "and answers, which OUT_DIR/own.jsonl then holds")
    made.bounds["--own"] = (2, 1 << 40)
    add("--keep-features", action="store_true", help="what the model makes of each conversation stays in "
        "OUT_DIR/features until the training ends (about 8 bytes a token and size): it is read once, not every epoch")
    add("--eagle3", action="store_true", help="a head of EAGLE-3 (the model needs 7 layers); else of EAGLE-1/2")
    made.number("--block", (BLOCK_SIZES[0], BLOCK_SIZES[-1]), None, "instead a head of DFlash (7 layers, too), whose "
                "blocks have so many tokens, the one before the guesses included; it has one part, of --epochs")
    add("--partial", metavar="STAGES", default="", help="instead a head of SPD for draft=spd, which reads what stages "
        "have made of guesses under way: how many, or their layers, as 0+8+8+7+7, as in the key stages; it has one "
        "part, of --epochs, and begins with the layer of --from")
    made.number("--layers", (1, 64), 2, "of a head of DFlash (2; its authors have 5)")
    add("--dialect", choices=list(DIALECTS), help="the form of a head of EAGLE-3, which this makes: eagle3 as EAGLE, "
        "SpecForge and AngelSlim publish it; eagle3.1 with its norms; vllm; speculators, nested and with its norms")
    add("--template", choices=[AUTO, *CONVERSATIONS, "own"], default=AUTO,
        help="how the model wants its questions; auto: own, the tokenizer's chat template, or else vicuna")
    _add_parts(made)
    _add_data(made)
    add("--dtype", choices=["auto", "float64", "float32", "bfloat16"], default="auto",
        help="of the arithmetic; auto: bfloat16 on cuda and on processors with avx512_bf16 or amx_bf16, where it takes "
        "about half the time, else float32. Weights that learn are float32")
    made.machine(every=100)
    return made


def _add_parts(made: Options) -> None:
    """The options that say what is taught, and how long."""
    add, number = made.add_argument, made.number
    number("--epochs", (0, 1e6), 4.0, "how often each conversation is read in the first part (4)")
    number("--own-epochs", (0, 1e6), 1.5, "the same in the second part (1.5)")
    add("--from", dest="given", metavar="HEAD", type=Path, help="the folder of a head for this model that is to be "
        "mended: only the second part, with its weights to begin with")
    add("--authors", action="store_true", help="one part instead of two: all passes at all places from the first step "
        "on")
    number("--rate", (0, 1e3), None, "of learning; default: EAGLE's, which is 3e-5 for a model of size 4096 (EAGLE-3: "
           "5e-5), and in inverse proportion to the size for others", "R")
    number("--passes", (1, 64), None, "of the second part: the first reads the model's features, each other one what "
           "the head made in the one before (8; --authors: 1, with --eagle3 7)")
    number("--starts", (1, 1 << 20), STARTS, "places of a conversation, drawn by chance, where the later passes start, "
           "or blocks (10; --authors: all)")
    number("--noise", (0, 1e3), 0.1, "on the features in the first part, EAGLE-1/2: at most so much (0.1)", "X")
    number("--word-weight", (0, 1e6), 0.1, "of words beside features in the first part, EAGLE-1/2 (0.1)", "X")


def _add_data(made: Options) -> None:
    """The options that say what is read, and what of it."""
    number = made.number
    number("--batch", (1, 1 << 20), 4, "conversations in a step (4)")
    number("--length", (3, 1 << 30), 2048, "longer ones are cut after so many tokens (2048)")
    number("--limit", (2, 1 << 40), 68000, "conversations that are taken, by chance (68000)")
    made.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="kept back for the figures at the "
                      "end (0.05)")
    number("--draft-vocab", (1, 1 << 30), 32000, "tokens that a head of EAGLE-3 knows: those that answers use most "
           "(32000)")
    number("--seed", (0, (1 << 63) - 1), 0, "of the beginning, the order and the noise (0)")
    number("--judged", (0, 1 << 20), 24, "held-out questions that are answered at the end with trees of 60 nodes, for "
           "the figures (24); 0: no figures")


def check(args: Namespace) -> None:
    """Raise ValueError for what could not end well, before anything long begins."""
    options = parser()
    options.check(args)
    if args.dialect and args.given:
        raise ValueError("--from keeps the form of the head that it mends; leave out --dialect")
    args.eagle3 = args.eagle3 or bool(args.dialect)
    if args.partial and (args.eagle3 or args.block or args.authors):
        raise ValueError("--partial makes a head of SPD; leave out --eagle3, --dialect, --block and --authors")
    if args.block and (args.eagle3 or args.given or args.authors):
        raise ValueError("--block makes a new head of DFlash; leave out --eagle3, --dialect, --from and --authors")
    for flag in ("own_epochs", "passes", "noise", "word_weight"):
        if (args.partial or args.block) and getattr(args, flag) != options.get_default(flag):
            raise ValueError(f"--{flag.replace('_', '-')} applies to EAGLE heads only; leave it out")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out {args.held_out} is no share; give a number between 0 and 1")
    if args.given and args.authors:
        raise ValueError("--from takes the second part alone, which --authors does not have; leave out one of them")
    if args.passes == 1 and not args.authors:
        raise ValueError("--passes 1 has no pass over the head's own outputs; give 2 to 64, or add --authors")
    weights = [name for name in SOURCES if (args.out_dir / name).exists()]
    if weights and not (args.out_dir / CHECKPOINT).exists():
        raise ValueError(f"{args.out_dir} holds {weights[0]} already, and no training that could go on; choose another "
                         "folder")
