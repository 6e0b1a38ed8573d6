"""A comparison of types and quantized weights on one device: the time of a segment, and the error of results."""
from __future__ import annotations

import argparse
from functools import partial
from itertools import islice
from typing import Mapping, Sequence

import torch

from config.files import lines
from config.presets import ROOT
from eval.bench import by_turns, cost
from eval.bench.stage import Form, FormStage, build, read, size_of
from eval.tables import in_columns
from launch.progress import ProgressBar
from model.text import Text
from model.weights.checkpoint import Checkpoint
from model.weights.quant import KINDS
from model.whole import Whole

TOY = ROOT / "toy" / "llama"
COPIED = 1 << 27  # bytes, more than caches hold
SAMPLE = 2  # questions of each task that the bundled model reads
PLAIN = Form(torch.bfloat16, "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [Form(dtype, kind) for dtype in DTYPES for kind in ("none", *KINDS)]


def stages(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench stages`."""
    args = read(argv, len(FORMS))
    torch.set_grad_enabled(False)
    forms = [form for form in FORMS if args.device != "cpu" or form.dtype != torch.float16]
    compare_times(args, forms)
    compare_texts(forms, args.device)
    return 0


def compare_times(args: argparse.Namespace, forms: Sequence[Form]) -> None:
    """Time all forms, and print a line for each."""
    made = build(args, forms)
    speeds = [_copy_speed(args.device) for _ in range(args.repeats)]
    jobs = {(form, rows): partial(cost, stage.segment, rows)
            for rows in args.rows for form, stage in made.items()}
    took = {key: min(costs).wall
            for key, costs in by_turns(jobs, args.repeats).items()}
    speeds += [_copy_speed(args.device) for _ in range(args.repeats)]
    errors = _errors(made, max(args.rows))
    print(f"{args.layers} layer(s) of width {args.hidden} and {args.intermediate}, {args.context} tokens of context, "
          f"{args.device}, {torch.get_num_threads()} threads: ms per segment, minimum of {args.repeats}, and over the "
          f"time of {PLAIN}; error: of what the layers add, against {forms[0]}; reads: bytes of weights a second with "
          f"{min(args.rows)} row(s), over the {max(speeds) / 1e9:.1f} GB/s that a copy reads and writes")
    table = []
    for form, stage in made.items():
        size = size_of(stage.stage.part)
        share = size / took[form, min(args.rows)] / max(speeds)
        times = [f"{1e3 * took[form, rows]:.2f} {took[form, rows] / took[PLAIN, rows]:.2f}x" for rows in args.rows]
        table.append([str(form), f"{size / 1e6:.0f}", f"{errors[form]:.4f}", f"{100 * share:.0f}%", *times])
    heading = ("form", "MB", "error", "reads", *(f"{rows} rows" for rows in args.rows))
    print(in_columns(heading, table))


def _copy_speed(device: str) -> float:
    """Return the bytes that a copy reads and writes per second."""
    numbers = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    other = torch.empty_like(numbers).copy_(numbers)
    took = cost(lambda: other.copy_(numbers)[-1].item())  # which waits for the device
    return 2 * COPIED / took.wall


def _errors(made: Mapping[Form, FormStage], rows: int) -> dict[Form, float]:
    """Return, for each form, the relative error of what the layers add to their input, against the first form."""
    added = {}
    for form, stage in made.items():
        out_TD = stage.segment(rows) - stage.x_TD[:rows]
        added[form] = out_TD.double().cpu()
    exact = next(iter(added.values()))
    return {form: float((x_TD - exact).norm() / exact.norm())
            for form, x_TD in added.items()}


def compare_texts(forms: list[Form], device: str) -> None:
    """Print how often the bundled model finds the same token likeliest when reading held-out questions and answers."""
    texts = _held_out()
    exact, table = None, []
    for form in ProgressBar(forms, desc="reading", leave=False):
        model = Whole(Checkpoint(TOY), form.dtype, device, form.kind)
        logits = [model.logits(ids, model.cache(len(ids)), len(ids)) for ids in texts]
        said = torch.cat(logits).float().cpu().log_softmax(-1)
        exact = said if exact is None else exact
        same = (said.argmax(-1) == exact.argmax(-1)).double()
        divergence = (exact.exp() * (exact - said)).sum(-1)
        table.append([str(form), f"{100 * float(same.mean()):.2f} %", f"{float(divergence.mean()):.5f}"])
    print(f"the bundled model on {sum(map(len, texts))} tokens of held-out text, against {forms[0]}")
    print(in_columns(("form", "same token likeliest", "KL, nats"), table))


def _held_out() -> list[list[int]]:
    """Return the token ids of questions of each task, with their answers and the question again."""
    text, found = Text(TOY), []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        for _, entry in islice(lines(path), SAMPLE):
            question, answer = entry["turns"][0], entry["reference"][0]
            found.append(text.prompt_ids([question, answer, question], "vicuna"))
    return found
