"""Create the bundled models: texts, tokenizer, chat model, drafters, EAGLE heads, held-out questions."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from config.console import command
from config.dialect import OptionParser
from config.files import check_folder
from config.presets import ROOT, TOY
from toy.corpus import dialogues as corpus
from toy.recipe import llama, pack, teach, tokenizer
from toy.recipe.llama import OptShape, Shape
from toy.recipe.train import ToyHyperparameters

Make = Callable[[str, Path, Path], None]
HEAD_STEPS = ("head", "deep")  # steps that create heads
DIALOGUES, SOURCE_CHARACTERS = 72_000, 3_000_000
# The training and size of each model of a family: the chat model, which has the family's name, then its drafters.
FAMILIES: dict[str, dict[str, tuple[ToyHyperparameters, Shape]]] = {
    "llama": {
        "llama": (ToyHyperparameters("base", steps=1500),
                  Shape(layers=8, hidden=192, heads=3, wide=512)),
        "draft_a": (ToyHyperparameters("draft_a", steps=700, processes=1, seed=1),
                    Shape(layers=2, hidden=128, heads=2, wide=352)),
        "draft_b": (ToyHyperparameters("draft_b", steps=700, processes=1, seed=2),
                    Shape(layers=1, hidden=96, heads=2, wide=256))},
    # A small OPT with a drafter: trained in minutes instead of an hour, and not in the repository.
    "opt": {
        "opt": (ToyHyperparameters("opt", steps=500, processes=1, seed=4),
                OptShape(layers=4, hidden=160, heads=4, wide=640)),
        "opt_draft": (ToyHyperparameters("opt_draft", steps=250, processes=1, seed=5),
                      OptShape(layers=1, hidden=96, heads=2, wide=384))}}
# 600 steps of two processes make too accurate a head (5.9 tokens a pass): stopped early, it is wrong about as often as
# public heads, and the schedules that this repository compares differ.
HEAD = ToyHyperparameters("head", steps=240, processes=1, warm_up=30, rate=2e-3, seed=3)
# The head that does not drift: 225 steps on the chat model's features, 75 more with words, 140 on its own outputs. A
# third more of the former make too accurate a head, as above.
DEEP = ToyHyperparameters("deep", steps=440, processes=1, warm_up=30, own_steps=140,
                       rate=2e-3, seed=3, batch=32)


def data(family: str, work_dir: Path, out_dir: Path) -> None:
    """Write the dialogues and gather the standard library's source (seconds)."""
    corpus.write(work_dir, DIALOGUES, SOURCE_CHARACTERS)


def pieces(family: str, work_dir: Path, out_dir: Path) -> None:
    """Train a tokenizer of 4,096 pieces and pack the corpus (a minute)."""
    tokenizer.make(work_dir, out_dir / family)
    pack.pack(work_dir, out_dir / family)


def base(family: str, work_dir: Path, out_dir: Path) -> None:
    """Train the chat model, 8 layers, two processes (about half an hour on two cores)."""
    llama.fit(*FAMILIES[family][family], work_dir, out_dir / family)


def drafters(family: str, work_dir: Path, out_dir: Path) -> None:
    """Train two smaller models at once, one process each (minutes)."""
    model_settings = {name: settings for name, settings in FAMILIES[family].items() if name != family}
    processes = [multiprocessing.Process(target=llama.fit, args=(*settings, work_dir, out_dir / name))
                 for name, settings in model_settings.items()]

    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise ValueError("a drafter failed, see its message above; `make_toy drafters` continues from its last "
                             "checkpoint")

    for model_name in model_settings:
        tokenizer.copy(out_dir / family, out_dir / model_name)


def head(family: str, work_dir: Path, out_dir: Path) -> None:
    """Train the EAGLE head on the chat model's features (minutes)."""
    teach.fit(HEAD, work_dir, out_dir / family, out_dir / "eagle")


def deep(family: str, work_dir: Path, out_dir: Path) -> None:
    """Train the head that does not drift, finally on its own outputs (a quarter of an hour)."""
    teach.fit(DEEP, work_dir, out_dir / family, out_dir / "eagle_deep")


def questions(family: str, work_dir: Path, out_dir: Path) -> None:
    """Write held-out questions to eval/data."""
    target = ROOT / "eval" / "data" if out_dir == TOY else out_dir / "data"
    corpus.write_questions(target, work_dir)


CORPUS_FILES, ROW_FILES = ("dialogues.jsonl", "library.jsonl"), ("rows.npy", "weights.npy")
STEPS: dict[str, tuple[Make, Sequence[str]]] = {  # each with the files of `work` that it needs
    "data": (data, ()),
    "tokenizer": (pieces, CORPUS_FILES),
    "base": (base, ROW_FILES),
    "drafters": (drafters, ROW_FILES),
    "head": (head, ROW_FILES),
    "deep": (deep, CORPUS_FILES[:1]),
    "questions": (questions, CORPUS_FILES[:1])}
STEP_LIST = "\n".join(f"  {name:<10} {make.__doc__}" for name, (make, _) in STEPS.items())
EPILOG = f"""steps, in this order (by default all of them):
{STEP_LIST}

Training continues from its last checkpoint in --work; remove that folder to begin again.

With --family opt, also written family=opt, the steps make a small OPT and a drafter for it, without heads, in --out;
--work may be that of an earlier run.

  python3 -m scripts.make_toy                   everything
  python3 -m scripts.make_toy family=opt --out my_opt
  python3 -m scripts.make_toy head questions    these two, from what --work and --out hold
"""


def run(family: str, chosen_steps: Sequence[str], work_dir: Path, out_dir: Path) -> None:
    """Run these steps in order. Raises ValueError for a step that the family lacks, or if an earlier one is missing."""
    # checks
    unknown_steps = [step for step in chosen_steps if step not in STEPS]
    if unknown_steps:
        raise ValueError(f"there is no step {unknown_steps[0]!r}; the steps are: {' '.join(STEPS)}")
    if family != "llama" and any(step in HEAD_STEPS for step in chosen_steps):
        raise ValueError(f"heads are made for llama only: leave out {' and '.join(HEAD_STEPS)}, or --family {family}")
    if family != "llama" and out_dir == TOY:
        raise ValueError(f"the models of --family {family} do not belong in {TOY}: name a folder with --out")
    for folder, key in ((work_dir, "--work"), (out_dir, "--out")):
        check_folder(folder, f"choose another {key}")

    ordered_steps = [step for step in STEPS if step in chosen_steps]
    for step in ordered_steps:
        make, file_names = STEPS[step]
        needed_paths = [work_dir / file_name for file_name in file_names]
        missing_paths = [path for path in needed_paths if not path.is_file()]
        if step in HEAD_STEPS and not (out_dir / family / "config.json").is_file():
            missing_paths.append(out_dir / family)
        if missing_paths:
            raise ValueError(f"the step {step} needs {missing_paths[0]}, which is missing: run the earlier steps "
                             "first, or name the folders that have it with --work and --out")

        make(family, work_dir, out_dir)


@command
def main(argv: Sequence[str]) -> int:
    parser = OptionParser(prog="python3 -m scripts.make_toy", description=__doc__, epilog=EPILOG,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one or several of: {' '.join(STEPS)}")
    parser.add_argument("--work", type=Path, default=Path(".toy_work"),
                        help="corpus and checkpoints (default .toy_work)")
    parser.add_argument("--out", type=Path, default=TOY, help="where the models go (default toy/)")
    parser.add_argument("--family", choices=FAMILIES, default="llama",
                        help="family of the models to train (default llama)")
    options = parser.parse_args(argv)

    possible_steps = [step for step in STEPS if options.family == "llama" or step not in HEAD_STEPS]
    run(options.family, options.steps or possible_steps, options.work, options.out.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
