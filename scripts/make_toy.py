"""Create the bundled models: texts, tokenizer, chat model, drafters, EAGLE heads, held-out questions."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from config.files import check_folder
from toy.corpus import dialogues as corpus
from toy.recipe import llama, pack, teach, tokenizer
from toy.recipe.llama import OptShape, Shape
from toy.recipe.train import Hyperparameters

Make = Callable[[str, Path, Path], None]
ROOT = Path(__file__).resolve().parent.parent
TOY = ROOT / "toy"
HEADS = ("head", "deep")  # steps that create heads
DIALOGUES, SOURCE_BYTES = 72_000, 3_000_000
# The training and size of each model of a family: the chat model, which has the family's name, then its drafters.
FAMILIES: dict[str, dict[str, tuple[Hyperparameters, Shape]]] = {
    "llama": {
        "llama": (Hyperparameters("base", steps=1500), Shape(layers=8, hidden=192, heads=3, wide=512)),
        "draft_a": (Hyperparameters("draft_a", steps=700, processes=1, seed=1),
                    Shape(layers=2, hidden=128, heads=2, wide=352)),
        "draft_b": (Hyperparameters("draft_b", steps=700, processes=1, seed=2),
                    Shape(layers=1, hidden=96, heads=2, wide=256))},
    # A small OPT with a drafter: trained in minutes instead of an hour, and not in the repository.
    "opt": {
        "opt": (Hyperparameters("opt", steps=500, processes=1, seed=4),
                OptShape(layers=4, hidden=160, heads=4, wide=640)),
        "opt_draft": (Hyperparameters("opt_draft", steps=250, processes=1, seed=5),
                      OptShape(layers=1, hidden=96, heads=2, wide=384))}}
# 600 steps of two processes make too accurate a head (5.9 tokens a pass): stopped early, it is wrong about as often as
# public heads, and the schedules that this repository compares differ.
HEAD = Hyperparameters("head", steps=240, processes=1, warm_up=30, rate=2e-3, seed=3)
# The head that does not drift: 225 steps on the chat model's features, 75 more with words, 140 on its own outputs. A
# third more of the former make too accurate a head, as above.
DEEP = Hyperparameters("deep", steps=440, processes=1, warm_up=30, own=140,
                       rate=2e-3, seed=3, batch=32)


def data(family: str, work: Path, out: Path) -> None:
    """Write the dialogues and gather the standard library's source (seconds)."""
    corpus.write(work, DIALOGUES, SOURCE_BYTES)


def pieces(family: str, work: Path, out: Path) -> None:
    """Train a tokenizer of 4,096 pieces and pack the corpus (a minute)."""
    tokenizer.make(work, out / family)
    pack.pack(work, out / family)


def base(family: str, work: Path, out: Path) -> None:
    """Train the chat model, 8 layers, two processes (about half an hour on two cores)."""
    llama.fit(*FAMILIES[family][family], work, out / family)


def drafters(family: str, work: Path, out: Path) -> None:
    """Train two smaller models at once, one process each (minutes)."""
    models = {name: how for name, how in FAMILIES[family].items() if name != family}
    makers = [multiprocessing.Process(target=llama.fit, args=(*how, work, out / name))
              for name, how in models.items()]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
        if maker.exitcode:
            raise SystemExit("make_toy: a drafter failed, see its message above; `make_toy drafters` continues from "
                             "its last checkpoint")
    for name in models:
        tokenizer.copy(out / family, out / name)


def head(family: str, work: Path, out: Path) -> None:
    """Train the EAGLE head on the chat model's features (minutes)."""
    teach.fit(HEAD, work, out / family, out / "eagle")


def deep(family: str, work: Path, out: Path) -> None:
    """Train the head that does not drift, finally on its own outputs (a quarter of an hour)."""
    teach.fit_deep(DEEP, work, out / family, out / "eagle_deep")


def questions(family: str, work: Path, out: Path) -> None:
    """Write held-out questions to eval/data."""
    target = ROOT / "eval" / "data" if out == TOY else out / "data"
    corpus.write_questions(target, work)


CORPUS, ROWS = ("dialogues.jsonl", "library.jsonl"), ("rows.npy", "weights.npy")
STEPS: dict[str, tuple[Make, Sequence[str]]] = {  # each with the files of `work` that it needs
    "data": (data, ()),
    "tokenizer": (pieces, CORPUS),
    "base": (base, ROWS),
    "drafters": (drafters, ROWS),
    "head": (head, ROWS),
    "deep": (deep, CORPUS[:1]),
    "questions": (questions, CORPUS[:1])}
LISTED = "\n".join(f"  {name:<10} {make.__doc__}" for name, (make, _) in STEPS.items())
EPILOG = f"""steps, in this order (by default all of them):
{LISTED}

Training continues from its last checkpoint in --work; remove that folder to begin again.

With --family opt, also written family=opt, the steps make a small OPT and a drafter for it, without heads, in --out;
--work may be that of an earlier run.

  python3 -m scripts.make_toy                   everything
  python3 -m scripts.make_toy family=opt --out my_opt
  python3 -m scripts.make_toy head questions    these two, from what --work and --out hold
"""


def run(family: str, steps: Sequence[str], work: Path, out: Path) -> None:
    """Run these steps in order. Raises ValueError for a step that the family lacks, or if an earlier one is missing."""
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        raise ValueError(f"there is no step {unknown[0]!r}; the steps are: {' '.join(STEPS)}")
    if family != "llama" and any(step in HEADS for step in steps):
        raise ValueError(f"heads are made for llama only: leave out {' and '.join(HEADS)}, or --family {family}")
    if family != "llama" and out == TOY:
        raise ValueError(f"the models of --family {family} do not belong in {TOY}: name a folder with --out")
    for folder, key in ((work, "--work"), (out, "--out")):
        check_folder(folder, f"choose another {key}")
    for name in (name for name in STEPS if name in steps):
        make, files = STEPS[name]
        needed = [work / file for file in files]
        lacking = [path for path in needed if not path.is_file()]
        if name in HEADS and not (out / family / "config.json").is_file():
            lacking.append(out / family)
        if lacking:
            raise ValueError(f"the step {name} needs {lacking[0]}, which is missing: run the earlier steps first, or "
                             "name the folders that have it with --work and --out")
        make(family, work, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m scripts.make_toy", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one or several of: {' '.join(STEPS)}")
    parser.add_argument("--work", type=Path, default=Path(".toy_work"),
                        help="corpus and checkpoints (default .toy_work)")
    parser.add_argument("--out", type=Path, default=TOY, help="where the models go (default toy/)")
    parser.add_argument("--family", choices=FAMILIES, default="llama",
                        help="family of the models to train (default llama)")
    words = sys.argv[1:] if argv is None else argv
    asked = parser.parse_args([re.sub("^(family|work|out)=", r"--\1=", word) for word in words])
    try:
        made = [step for step in STEPS if asked.family == "llama" or step not in HEADS]
        run(asked.family, asked.steps or made, asked.work, asked.out.resolve())
    except (ValueError, OSError) as error:
        print(f"make_toy: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
