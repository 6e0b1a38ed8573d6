"""Shared parts of the training commands: options with bounded numbers, the folder of the results, exit codes."""
from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, NoReturn

import torch
from accelerate import Accelerator

from config.dialect import OptionParser
from config.files import check_folder
from config.old_names import OLD_OPTIONS
from launch.spec import device_named
from model.text import AUTO, CONVERSATIONS, OWN


class Options(OptionParser):
    """The argument parser of a command, with bounds for its numbers."""

    def __init__(self, command_name: str, about: str, examples: str) -> None:
        super().__init__(prog=f"python3 -m scripts.{command_name}", description=about, epilog=examples,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.bounds: dict[str, tuple[float, float]] = {}

    def number(self, flag: str, bounds: tuple[float, float], default: float | None, help: str,
               metavar: str = "N") -> None:
        """Add an option that takes a number within `bounds`, of the type of the upper one."""
        self.bounds[flag] = bounds
        self.add_argument(flag, type=type(bounds[1]), default=default, metavar=metavar, help=help)

    def common(self, checkpoint_steps: int, *more_templates: str) -> None:
        """Add the options of every training: template, seed, interval of checkpoints, device and threads."""
        templates = [AUTO, *CONVERSATIONS, OWN, *more_templates]
        self.add_argument("--template", choices=templates, default=AUTO, help="template of prompts; auto: own, the "
                          "tokenizer's chat template, or vicuna if it has none")
        self.number("--seed", (0, (1 << 63) - 1), 0, "seed of everything that is random (0)")

        about = f"steps between two checkpoints ({checkpoint_steps})"
        self.number("--save-every", (1, 1 << 40), checkpoint_steps, about)
        self.add_argument("--device", default="auto", help="cpu or cuda; auto: cuda if available")
        self.number("--threads", (1, 1 << 10), None, "threads for arithmetic; default: torch's choice")

    def error(self, message: str) -> NoReturn:
        """End the command because of wrong words; an option of an earlier version is answered with what to do."""
        for old_option, advice in OLD_OPTIONS.items():
            if old_option in message.split():
                message = f"unknown option {old_option}: {advice}"
        super().error(message)

    def check(self, args: Namespace) -> None:
        """Raise ValueError for a number out of its bounds."""
        for flag, (min_value, max_value) in self.bounds.items():
            value = getattr(args, flag[2:].replace("-", "_"))
            if value is not None and not min_value <= value <= max_value:
                raise ValueError(f"{flag} {value} is out of range; give {min_value} to {max_value}")


def open_accelerator(args: Namespace, num_batches: int = 1) -> Accelerator:
    """Return the processes and the device of a training: those of `accelerate launch`, or this process alone.

    A step has the mean gradient of `num_batches` batches, unless accelerate's environment has another number.
    `args.device` becomes the device of this process. Raise ValueError for a device or a number type that does not work.
    """
    device = device_named(args.device, "--device ")
    accelerator = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=num_batches)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(f"--mixed_precision {accelerator.mixed_precision} is not supported; give bf16 or no")
    if args.device == "auto":
        args.device = str(accelerator.device)
    return accelerator


def prepare(args: Namespace, results_dir: Path, remedy: str) -> None:
    """Prepare the folder of the results, and the threads."""
    check_folder(results_dir, remedy)
    if args.threads:
        torch.set_num_threads(args.threads)


def run(train: Callable[[Namespace], Any], command_name: str, args: Namespace) -> int:
    """Call `train`, print its errors under the name of the command, and return the exit code."""
    try:
        train(args)
    except (ValueError, OSError) as error:
        print(f"{command_name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command_name}: stopped; run the same command again to continue from the last checkpoint",
              file=sys.stderr)
        return 130
    return 0
