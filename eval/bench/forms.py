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

TOY_DIR = ROOT / "toy" / "llama"
COPIED_BYTES = 1 << 27  # more than caches hold
QUESTIONS_PER_TASK = 2  # that the bundled model reads
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
    stages_by_form = build(args, forms)
    min_rows, max_rows = min(args.rows), max(args.rows)

    # measurements
    copy_speeds = [_copy_speed(args.device) for _ in range(args.repeats)]
    jobs = {(form, num_rows): partial(cost, stage.segment, num_rows)
            for num_rows in args.rows for form, stage in stages_by_form.items()}
    seconds = {key: min(costs).wall
               for key, costs in by_turns(jobs, args.repeats).items()}
    copy_speeds += [_copy_speed(args.device) for _ in range(args.repeats)]
    copy_speed = max(copy_speeds)
    errors = _errors(stages_by_form, max_rows)

    print(f"{args.layers} layer(s) of width {args.hidden} and {args.intermediate}, {args.context} tokens of context, "
          f"{args.device}, {torch.get_num_threads()} threads: ms per segment, minimum of {args.repeats}, and over the "
          f"time of {PLAIN}; error: of what the layers add, against {forms[0]}; reads: bytes of weights a second with "
          f"{min_rows} row(s), over the {copy_speed / 1e9:.1f} GB/s that a copy reads and writes")

    # table
    table = []
    for form, stage in stages_by_form.items():
        num_bytes = size_of(stage.stage.part)
        read_share = num_bytes / seconds[form, min_rows] / copy_speed
        times = [f"{1e3 * seconds[form, num_rows]:.2f} {seconds[form, num_rows] / seconds[PLAIN, num_rows]:.2f}x"
                 for num_rows in args.rows]
        table.append([str(form), f"{num_bytes / 1e6:.0f}", f"{errors[form]:.4f}", f"{100 * read_share:.0f}%", *times])
    heading = ("form", "MB", "error", "reads", *(f"{num_rows} rows" for num_rows in args.rows))
    print(in_columns(heading, table))


def _copy_speed(device: str) -> float:
    """Return the bytes that a copy reads and writes per second."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    copy_cost = cost(lambda: target.copy_(source)[-1].item())  # `item` waits for the device
    return 2 * COPIED_BYTES / copy_cost.wall


def _errors(stages_by_form: Mapping[Form, FormStage], num_rows: int) -> dict[Form, float]:
    """Return, for each form, the relative error of what the layers add to their input, against the first form."""
    added_by_form = {}
    for form, stage in stages_by_form.items():
        added_TD = stage.segment(num_rows) - stage.x_TD[:num_rows]
        added_by_form[form] = added_TD.double().cpu()

    exact_TD = next(iter(added_by_form.values()))
    return {form: float((added_TD - exact_TD).norm() / exact_TD.norm())
            for form, added_TD in added_by_form.items()}


def compare_texts(forms: list[Form], device: str) -> None:
    """Print how often the bundled model finds the same token likeliest when reading held-out questions and answers."""
    texts = _held_out_texts()
    exact_logprobs, table = None, []
    for form in ProgressBar(forms, desc="reading", leave=False):
        model = Whole(Checkpoint(TOY_DIR), form.dtype, device, form.kind)
        logits = [model.logits(ids, model.cache(len(ids)), len(ids)) for ids in texts]
        logprobs = torch.cat(logits).float().cpu().log_softmax(-1)
        if exact_logprobs is None:
            exact_logprobs = logprobs

        is_same = (logprobs.argmax(-1) == exact_logprobs.argmax(-1)).double()
        divergence = (exact_logprobs.exp() * (exact_logprobs - logprobs)).sum(-1)
        table.append([str(form), f"{100 * float(is_same.mean()):.2f} %", f"{float(divergence.mean()):.5f}"])

    print(f"the bundled model on {sum(map(len, texts))} tokens of held-out text, against {forms[0]}")
    print(in_columns(("form", "same token likeliest", "KL, nats"), table))


def _held_out_texts() -> list[list[int]]:
    """Return the token ids of questions of each task, with their answers and the question again."""
    text, prompts = Text(TOY_DIR), []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        for _, entry in islice(lines(path), QUESTIONS_PER_TASK):
            question, answer = entry["turns"][0], entry["reference"][0]
            prompts.append(text.prompt_ids([question, answer, question], "vicuna"))
    return prompts
