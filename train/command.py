"""How the commands of training begin and end: options whose numbers have bounds, the folder of a result, exit codes."""
from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable

import torch

from config.files import check_folder
from launch.spec import usable


class Options(argparse.ArgumentParser):
    """The options of a command."""

    def __init__(self, name: str, about: str, examples: str) -> None:
        super().__init__(prog=f"python -m scripts.{name}", description=about, epilog=examples,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.bounds: dict[str, tuple[float, float]] = {}

    def number(self, flag: str, bounds: tuple[float, float], default: float | None, help: str,
               metavar: str = "N") -> None:
        """An option that takes a number between its least and its greatest value, and of the type of that."""
        self.bounds[flag] = bounds
        self.add_argument(flag, type=type(bounds[1]), default=default, metavar=metavar, help=help)

    def machine(self, every: int) -> None:
        """The options that say where a training runs, and how often it is saved."""
        self.number("--save-every", (1, 1 << 40), every, f"steps between two checkpoints ({every})")
        self.add_argument("--device", default="auto", help="cpu or cuda; auto: cuda if there is one")
        self.number("--threads", (1, 1 << 10), None, "for arithmetic; default: as torch chooses")

    def check(self, args: Namespace) -> None:
        """Raise ValueError for a number that is out of its bounds."""
        for flag, (least, most) in self.bounds.items():
            value = getattr(args, flag[2:].replace("-", "_"))
            if value is not None and not least <= value <= most:
                raise ValueError(f"{flag} {value} makes no sense; give {least} to {most}")


def begin(args: Namespace, folder: Path, remedy: str, *names: str) -> None:
    """Prepare the device and the folder of the results, and remove the halves of files of these `names` in it, which
    `config.files.replace` was writing when the process was killed."""
    check_folder(folder, remedy)
    usable(args.device, "--device ")
    for name in names:
        for half in folder.glob(f"{name}.*.part"):
            half.unlink(missing_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)


def run(train: Callable[[Namespace], Any], name: str, args: Namespace) -> int:
    """The exit code of the command of this name, which trains."""
    try:
        train(args)
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped; type the same command again to go on from the last checkpoint", file=sys.stderr)
        return 130
    return 0
