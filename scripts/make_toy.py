"""The maker of the bundled models: texts, tokenizer, chat model, drafters, EAGLE heads, held-out questions."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from config.files import check_folder
from toy.corpus import dialogues as corpus
from toy.recipe import llama, pack, teach, tokenizer
from toy.recipe.llama import OptShape, Shape
from toy.recipe.train import Hyperparameters

ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "toy"
HEADS = ("head", "deep")  # steps that make them
DIALOGUES, SOURCE_BYTES = 72_000, 3_000_000


class Models(NamedTuple):
    """The chat model of a family and its drafters: their folders, how long they are trained, and their sizes."""

    chat: str
    base: Hyperparameters
    shape: Shape
    drafters: dict[str, tuple[Hyperparameters, Shape]]


BASE = Hyperparameters("base", steps=1500)
BASE_SHAPE = Shape(layers=8, hidden=192, heads=3, wide=512)
DRAFT_A = Hyperparameters("draft_a", steps=700, processes=1, seed=1)
DRAFT_B = Hyperparameters("draft_b", steps=700, processes=1, seed=2)
LLAMA = Models("llama", BASE, BASE_SHAPE, {
    "draft_a": (DRAFT_A, Shape(layers=2, hidden=128, heads=2, wide=352)),
    "draft_b": (DRAFT_B, Shape(layers=1, hidden=96, heads=2, wide=256)),
})
# To have an OPT and a drafter for it at all: minutes instead of an hour, and not in the repository.
OPT_BASE = Hyperparameters("opt", steps=500, processes=1, seed=4)
OPT_SHAPE = OptShape(layers=4, hidden=160, heads=4, wide=640)
OPT_DRAFT = Hyperparameters("opt_draft", steps=250, processes=1, seed=5)
OPT = Models("opt", OPT_BASE, OPT_SHAPE, {
    "opt_draft": (OPT_DRAFT, OptShape(layers=1, hidden=96, heads=2, wide=384)),
})
FAMILIES = {"llama": LLAMA, "opt": OPT}
# 600 steps of two processes make a head that is right too often (5.9 tokens a pass): stopped early, it is wrong about
# as often as the public heads are, and the schedules that this repository compares have something to lose.
HEAD = Hyperparameters("head", steps=240, processes=1, warm_up=30, rate=2e-3, seed=3)
# The one that does not drift: 225 steps on the chat model's features, 75 more with words, 140 on its own outputs. A
# third more of the former make a head that is right too often, as above.
DEEP = Hyperparameters("deep", steps=440, processes=1, warm_up=30, own=140, rate=2e-3, seed=3, batch=32)


def pieces(models: Models, work: Path, out: Path) -> None:
    tokenizer.make(work, out / models.chat)
    pack.pack(work, out / models.chat)


def drafters(models: Models, work: Path, out: Path) -> None:
    """All at once: each is one process of one thread."""
    makers = []
    for name, (settings, shape) in models.drafters.items():
        values = settings, shape, work, out / name
        maker = multiprocessing.Process(target=llama.fit, args=values)
        maker.start()
        makers.append(maker)
    for maker in makers:
        maker.join()
        if maker.exitcode:
            raise SystemExit("make_toy: a drafter failed; its message stands above, `make_toy drafters` goes on from "
                             "its last checkpoint")
    for name in models.drafters:
        tokenizer.copy(out / models.chat, out / name)


def questions(models: Models, work: Path, out: Path) -> None:
    target = ROOT / "eval" / "data" if out == TOY else out / "data"
    corpus.write_questions(target, work)


class Step(NamedTuple):
    """What is made of models in `work` and `out`, what it takes, and the files of `work` that it needs."""

    make: Callable[[Models, Path, Path], object]
    about: str
    duration: str = ""
    needs: Sequence[str] = ()


CORPUS, ROWS = ("dialogues.jsonl", "library.jsonl"), ("rows.npy", "weights.npy")
STEPS = {
    "data": Step(lambda models, work, out: corpus.write(work, DIALOGUES, SOURCE_BYTES),
                 "write the dialogues and gather the standard library's source", "seconds"),
    "tokenizer": Step(pieces, "learn 4,096 pieces and pack the corpus", "a minute", CORPUS),
    "base": Step(lambda models, work, out: llama.fit(models.base, models.shape, work, out / models.chat),
                 "train the chat model, 8 layers, two processes", "about half an hour on two cores", ROWS),
    "drafters": Step(drafters, "train two smaller models, one process each", "minutes", ROWS),
    "head": Step(lambda models, work, out: teach.fit(HEAD, work, out / models.chat, out / "eagle"),
                 "train the EAGLE head on the chat model's features", "minutes", ROWS),
    "deep": Step(lambda models, work, out: teach.fit_deep(DEEP, work, out / models.chat, out / "eagle_deep"),
                 "train the one that does not drift, then on its own outputs", "a quarter of an hour", CORPUS[:1]),
    "questions": Step(questions, "write held-out questions to eval/data", needs=CORPUS[:1]),
}
LISTED = "\n".join(f"  {name:<10} {step.about:<62} {step.duration and f'({step.duration})'}".rstrip()
                   for name, step in STEPS.items())
EPILOG = f"""steps, in this order (all of them without a name):
{LISTED}

Training goes on from its last checkpoint in --work; remove that folder to begin again.

With --family opt, which may be written family=opt, they make a small OPT and a drafter for it, without heads, in --out;
--work may be that of a run before.

  python -m scripts.make_toy                   everything
  python -m scripts.make_toy family=opt --out my_opt
  python -m scripts.make_toy head questions    these two, from what --work and --out hold
"""


def run(models: Models, steps: Sequence[str], work: Path, out: Path) -> None:
    """Take these steps in their order. Raises ValueError if one lacks what an earlier one makes, or has no folder."""
    for folder, key in ((work, "--work"), (out, "--out")):
        check_folder(folder, f"choose another {key}")
    for name in (name for name in STEPS if name in steps):
        needed = [work / file for file in STEPS[name].needs]
        lacking = [path for path in needed if not path.is_file()]
        if name in HEADS and not (out / models.chat / "config.json").is_file():
            lacking.append(out / models.chat)
        if lacking:
            raise ValueError(f"the step {name} needs {lacking[0]}, which is not there: take the steps before it first, "
                             "or name the folders that have it with --work and --out")
        STEPS[name].make(models, work, out)


def check(asked: argparse.Namespace) -> None:
    """Raise ValueError for what no family has."""
    unknown = [step for step in asked.steps if step not in STEPS]
    if unknown:
        raise ValueError(f"there is no step {unknown[0]!r}; the steps are: {' '.join(STEPS)}")
    if asked.family != "llama" and any(step in HEADS for step in asked.steps):
        raise ValueError(f"heads are made for llama only: leave out {' and '.join(HEADS)}, or --family {asked.family}")
    if asked.family != "llama" and asked.out.resolve() == TOY:
        raise ValueError(f"the models of --family {asked.family} have no place in {TOY}: name a folder with --out")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_toy", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one or several of: {' '.join(STEPS)}")
    parser.add_argument("--work", type=Path, default=Path(".toy_work"),
                        help="corpus and checkpoints (default .toy_work)")
    parser.add_argument("--out", type=Path, default=TOY, help="where the models go (default toy/)")
    parser.add_argument("--family", choices=FAMILIES, default="llama",
                        help="of the models that are trained (default llama)")
    words = sys.argv[1:] if argv is None else argv
    asked = parser.parse_args([re.sub("^(family|work|out)=", r"--\1=", word) for word in words])
    try:
        check(asked)
        made = [step for step in STEPS if asked.family == "llama" or step not in HEADS]
        models, out = FAMILIES[asked.family], asked.out.resolve()
        run(models, asked.steps or made, asked.work, out)
    except (ValueError, OSError) as error:
        print(f"make_toy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
