"""What `python -m scripts.train_ssm` takes, and what is refused before anything long begins.

It knows nothing about models.
"""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from config.keys import listed
from config.trees import wrong_widths
from model.text import AUTO, CONVERSATIONS
from train.command import Options

ABOUT = "Fine-tunes drafters for a target one after another, each on what those before it get wrong (boost-tuning)."
EXAMPLE = """\
examples:
  python -m scripts.train_ssm toy/llama toy/draft_a toy/draft_a toy/draft_a --out my_ssms
  python -m scripts.train_ssm toy/llama toy/draft_a toy/draft_b --out my_ssms --data questions.jsonl --single
  python -m scripts.train_ssm models/vicuna-7b models/llama-68m --out my_ssms --data prompts.json --device cuda

  python -m scripts.train_ssm models/smollm2-135m --layers 0,1,2,3,28,29 --out my_ssms --data prompts.json

  then: bash run_pipe.sh pipeline_type=specinfer ssm=my_ssms/ssm1,my_ssms/ssm2

  The target writes a text to each prompt, which needs no labels. A text is cut into stretches of a few tokens; each is
  to be foreseen from all that comes before it. The first drafter is fine-tuned on all stretches. Those that it then
  writes token for token as the target did are taken out, and the second one is fine-tuned on the rest, and so on. One
  folder may be named several times, and is the beginning of several drafters.

  FILE holds questions as eval/data has them, one JSON object with "turns" a line, of which the first turn is taken, or
  is a .json list of texts; without one the prompts are those of the bundled models' grammar. OUT gets the drafters as
  ssm1, ssm2 and so on, whole models in Hugging Face form. If it is interrupted, type the same command again: it goes on
  from what lies in OUT. At the end training.json there says how many tokens a pass of the target verifies along its
  texts to prompts that were held out, by one of the drafters and by trees of several that are merged.
"""


def parser() -> Options:
    made = Options("train_ssm", ABOUT, EXAMPLE)
    add, number = made.add_argument, made.number
    add("target", metavar="TARGET", type=Path, help="the target in Hugging Face form, with its tokenizer")
    add("drafts", metavar="DRAFT", type=Path, nargs="*", help="the drafters to begin with, with the same tokenizer")
    add("--layers", metavar="N,N", default="", help="begin with one drafter more, before the others: the target with "
        "these of its layers alone, counted from 0")
    add("--out", metavar="OUT", type=Path, required=True, help="where the drafters go, and the checkpoints")
    add("--data", metavar="FILE", type=Path, help="prompts; default: the bundled models' grammar")
    number("--prompts", (2, 1 << 30), 2000, "prompts that are taken, by chance (2000)")
    add("--template", choices=[AUTO, *CONVERSATIONS, "own", "none"], default=AUTO,
        help="around a prompt; auto: own, the tokenizer's, or else vicuna")
    number("--new-tokens", (2, 1 << 20), 64, "of a text, at most (64)")
    number("--temperature", (0, 1e3), 0.0, "at which the target writes; 0: likeliest tokens", "T")
    number("--stretch", (1, 1 << 20), 8, "tokens of a stretch (8)")
    number("--steps", (1, 1 << 40), 200, "of each drafter's training (200)")
    number("--batch", (1, 1 << 20), 16, "texts in a step (16)")
    number("--rate", (0, 1e3), 5e-4, "of learning (0.0005)", "R")
    add("--distributions", action="store_true", help="learn the target's whole distributions instead of its tokens")
    add("--single", action="store_true", help="also fine-tune the first DRAFT on everything for as many steps as all "
        "drafters together, into OUT/single, for comparison")
    number("--judged", (1, 1 << 20), 60, "of the prompts, those held out for the figures (60)")
    add("--expansion", action="append", metavar="WIDTHS", help="shape of the trees that the figures are counted for; "
        "may be given several times (1,1,1,1,1,1,1,1 and 1,1,3,1,1,1,1,1)")
    number("--seed", (0, (1 << 63) - 1), 0, "of the prompts, the texts and the order (0)")
    made.machine(every=50)
    return made


def layers_of(args: Namespace, held: int) -> list[int]:
    """The layers that `--layers` keeps of a target that has so many; raises ValueError for others."""
    words = listed(args.layers)
    numbers = [int(word) if word.isdecimal() else held for word in words]
    if any(number >= held for number in numbers) or sorted(set(numbers)) != numbers:
        raise ValueError(f"--layers {args.layers} is no list of layers from 0 to {held - 1} in rising order, as 0,1,"
                         f"{held - 1}")
    return numbers


def check(args: Namespace) -> None:
    """Raise ValueError for what could not end well."""
    parser().check(args)
    for expansion in args.expansion:
        wrong = wrong_widths(expansion)
        if wrong:
            raise ValueError(f"--expansion {expansion} {wrong}")
    if not args.drafts and not args.layers:
        raise ValueError("there is no drafter to begin with: name a folder, or add --layers 0,1,... of the target")
    if args.judged >= args.prompts:
        raise ValueError(f"--judged {args.judged} leaves nothing to learn of --prompts {args.prompts}: give less")
    read = [folder.resolve() for folder in (args.target, *args.drafts)]
    if args.out.resolve() in read:
        raise ValueError(f"--out {args.out} is a model that is read; choose another folder")
