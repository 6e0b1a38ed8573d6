"""The options of `python3 -m scripts.train_ssm`, and their checks before any long computation.

This module knows nothing about models.
"""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from config.values import listed
from train.command import Options

ABOUT = "Fine-tune drafters for a target one after another, each on the mistakes of the previous ones (boost-tuning)."
EXAMPLE = """\
examples:
  python3 -m scripts.train_ssm toy/llama toy/draft_a toy/draft_a toy/draft_a --out my_ssms
  python3 -m scripts.train_ssm toy/llama toy/draft_a toy/draft_b --out my_ssms --data questions.jsonl
  python3 -m scripts.train_ssm models/vicuna-7b models/llama-68m --out my_ssms --data prompts.json --device cuda

  python3 -m scripts.train_ssm models/smollm2-135m --layers 0,1,2,3,28,29 --out my_ssms --data prompts.json

  then: bash run_pipe.sh pipeline_type=specinfer ssm=my_ssms/ssm1,my_ssms/ssm2

  The target generates a text for each prompt, so no labels are needed. A text is cut into stretches of a few tokens,
  each to be predicted from the whole text before it. The first drafter is fine-tuned on all stretches. The stretches
  that it then predicts token for token are removed, the second drafter is fine-tuned on the rest, and so on. A folder
  may be named several times, as the beginning of several drafters.

  FILE holds questions as in eval/data, one JSON object with "turns" per line, of which the first turn is used, or is a
  .json list of texts. By default the prompts come from the bundled models' grammar. OUT gets the drafters as ssm1, ssm2
  and so on, whole models in Hugging Face format. If the command is interrupted, run it again: it continues from the
  files in OUT. At the end training.json there holds the tokens that a pass of the target verifies along its texts for
  held-out prompts, by each drafter and by merged trees of several.
"""


def parser() -> Options:
    options = Options("train_ssm", ABOUT, EXAMPLE)
    add, number = options.add_argument, options.number

    add("target", metavar="TARGET", type=Path, help="the target in Hugging Face format, with its tokenizer")
    add("drafts", metavar="DRAFT", type=Path, nargs="*", help="the drafters to begin with, with the same tokenizer")
    add("--layers", metavar="N,N", default="", help="begin with one more drafter, before the others: the target with "
        "only these of its layers, counted from 0")
    add("--out", metavar="OUT", type=Path, required=True, help="folder for the drafters and the checkpoints")
    add("--data", metavar="FILE", type=Path, help="prompts; default: the bundled models' grammar")
    number("--prompts", (2, 1 << 30), 2000, "prompts to use, chosen at random (2000)")

    number("--new-tokens", (2, 1 << 20), 64, "most tokens of a text (64)")
    number("--temperature", (0, 1e3), 0.0, "temperature of the target's texts; 0: greedy decoding", "T")
    number("--stretch", (1, 1 << 20), 8, "tokens per stretch (8)")
    number("--steps", (1, 1 << 40), 200, "steps of each drafter's training (200)")
    number("--batch", (1, 1 << 20), 16, "texts per step (16)")
    number("--rate", (0, 1e3), 5e-4, "learning rate (0.0005)", "R")
    number("--judged", (1, 1 << 20), 60, "number of prompts to hold out for the figures (60)")

    options.common(50, "none")
    return options


def layers_of(args: Namespace, num_layers: int) -> list[int]:
    """Return the layers that `--layers` keeps of a target's `num_layers` layers. Raise ValueError for a wrong list."""
    number_words = listed(args.layers)
    layer_numbers = [int(word) if word.isdecimal() else num_layers for word in number_words]
    is_rising = sorted(set(layer_numbers)) == layer_numbers
    if not is_rising or any(layer_number >= num_layers for layer_number in layer_numbers):
        raise ValueError(f"--layers {args.layers} is invalid: give layers from 0 to {num_layers - 1} in rising order, "
                         f"such as 0,1,{num_layers - 1}")
    return layer_numbers


def check(args: Namespace) -> None:
    """Raise ValueError for options that cannot work."""
    parser().check(args)
    if not args.drafts and not args.layers:
        raise ValueError("there is no initial drafter: name a folder, or add --layers 0,1,... of the target")
    if args.judged >= args.prompts:
        raise ValueError(f"--judged {args.judged} leaves nothing to learn of --prompts {args.prompts}: lower it")
    input_dirs = [folder.resolve() for folder in (args.target, *args.drafts)]
    if args.out.resolve() in input_dirs:
        raise ValueError(f"--out {args.out} is the folder of an input model; choose another folder")
