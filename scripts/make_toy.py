"""The maker of the bundled models: texts, tokenizer, chat model, drafters, EAGLE heads, held-out questions."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from config.files import check_folder
from toy.recipe import corpus, llama, pack, teach, tokenizer
from toy.recipe.llama import Shape
from toy.recipe.train import Hyperparameters

ROOT = Path(__file__).resolve().parent.parent
DIALOGUES, SOURCE_BYTES = 72_000, 3_000_000
BASE = Hyperparameters("base", steps=1500)
BASE_SHAPE = Shape(layers=8, hidden=192, heads=3, wide=512)
DRAFT_A = Hyperparameters("draft_a", steps=700, processes=1, seed=1)
DRAFT_B = Hyperparameters("draft_b", steps=700, processes=1, seed=2)
DRAFTERS = {
    "draft_a": (DRAFT_A, Shape(layers=2, hidden=128, heads=2, wide=352)),
    "draft_b": (DRAFT_B, Shape(layers=1, hidden=96, heads=2, wide=256)),
}
# 600 steps of two processes make a head that is right too often (5.9 tokens a pass): stopped early, it is wrong about
# as often as the public heads are, and the schedules that this repository compares have something to lose.
HEAD = Hyperparameters("head", steps=240, processes=1, warm_up=30, rate=2e-3, seed=3)
# The one that does not drift: 225 steps on the chat model's features, 75 more with words, 140 on its own outputs. A
# third more of the former make a head that is right too often, as above.
DEEP = Hyperparameters("deep", steps=440, processes=1, warm_up=30, own=140, rate=2e-3, seed=3, batch=32)


def data(work: Path, out: Path) -> None:
    corpus.write(work, DIALOGUES, SOURCE_BYTES)


def pieces(work: Path, out: Path) -> None:
    tokenizer.make(work, out / "llama")
    pack.pack(work, out / "llama")


def base(work: Path, out: Path) -> None:
    llama.fit(BASE, BASE_SHAPE, work, out / "llama")


def drafters(work: Path, out: Path) -> None:
    """Both at once: each is one process of one thread."""
    makers = []
    for name, (settings, shape) in DRAFTERS.items():
        maker = multiprocessing.Process(target=llama.fit, args=(settings, shape, work, out / name))
        maker.start()
        makers.append(maker)
    for maker in makers:
        maker.join()
        if maker.exitcode:
            raise SystemExit("make_toy: a drafter failed; its message stands above, `make_toy drafters` goes on from "
                             "its last checkpoint")
    for name in DRAFTERS:
        tokenizer.copy(out / "llama", out / name)


def head(work: Path, out: Path) -> None:
    teach.fit(HEAD, work, out / "llama", out / "eagle")


def deep(work: Path, out: Path) -> None:
    teach.fit_deep(DEEP, work, out / "llama", out / "eagle_deep")


def questions(work: Path, out: Path) -> None:
    target = ROOT / "eval" / "data" if out == ROOT / "toy" else out / "data"
    corpus.write_questions(target, work)


STEPS: dict[str, Callable[[Path, Path], None]] = {
    "data": data, "tokenizer": pieces, "base": base, "drafters": drafters, "head": head, "deep": deep,
    "questions": questions,
}
CORPUS, ROWS = ("dialogues.jsonl", "library.jsonl"), ("rows.npy", "weights.npy")
NEEDS = {  # files in --work
    "tokenizer": CORPUS,
    "base": ROWS,
    "drafters": ROWS,
    "head": ROWS,
    "deep": CORPUS[:1],
    "questions": CORPUS[:1],
}
EPILOG = """steps, in this order (all of them without a name):
  data       write the dialogues and gather the standard library's source   (seconds)
  tokenizer  learn 4,096 pieces and pack the corpus                         (a minute)
  base       train the chat model, 8 layers, two processes                  (about half an hour on two cores)
  drafters   train two smaller models, one process each                     (minutes)
  head       train the EAGLE head on the chat model's features              (minutes)
  deep       train the one that does not drift, then on its own outputs     (a quarter of an hour)
  questions  write held-out questions to eval/data

Training goes on from its last checkpoint in --work; remove that folder to begin anew.

  python -m scripts.make_toy                   everything
  python -m scripts.make_toy head questions    these two, from what --work and --out hold
"""


def run(steps: Sequence[str], work: Path, out: Path) -> None:
    """Take these steps in their order. Raises ValueError if one lacks what an earlier one makes, or has no folder."""
    for folder, key in ((work, "--work"), (out, "--out")):
        check_folder(folder, f"choose another {key}")
    for name in (name for name in STEPS if name in steps):
        needed = [work / file for file in NEEDS.get(name, ())]
        lacking = [path for path in needed if not path.is_file()]
        if name in ("head", "deep") and not (out / "llama" / "config.json").is_file():
            lacking.append(out / "llama")
        if lacking:
            raise ValueError(f"the step {name} needs {lacking[0]}, which is not there: take the steps before it first, "
                             "or name the folders that have it with --work and --out")
        STEPS[name](work, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_toy", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one or several of: {' '.join(STEPS)}")
    parser.add_argument("--work", type=Path, default=Path(".toy_work"),
                        help="corpus and checkpoints (default .toy_work)")
    parser.add_argument("--out", type=Path, default=ROOT / "toy", help="where the models go (default toy/)")
    asked = parser.parse_args(argv)
    unknown = [step for step in asked.steps if step not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; the steps are: {' '.join(STEPS)}")
    try:
        run(asked.steps or list(STEPS), asked.work, asked.out.resolve())
    except (ValueError, OSError) as error:
        print(f"make_toy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
