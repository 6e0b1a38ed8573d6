"""A model's LM head in every form: the time of a verdict, and how often it finds the same token likeliest."""
from __future__ import annotations

import argparse
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import lines
from config.presets import ROOT
from eval.bench import by_turns, cost, number
from eval.bench.stage import Form, size_of
from eval.tables import in_columns
from model.llama import Logits, fill
from model.text import Text
from model.weights.quant import compress, pack
from model.weights.unfold import Unfolded
from model.whole import Whole

KINDS = ("none", "int8", "int4")
FORMS = [Form(dtype, kind)
         for dtype in (torch.float32, torch.bfloat16) for kind in KINDS]
ROWS = (1, 16)
PIECE = 256  # tokens that are read in one pass
COLUMNS = ("form", "MB", "1 row, ms", "16 rows, ms", "same token likeliest")


def head(argv: list[str]) -> int:
    """Execute `python3 -m scripts.bench head`."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.bench head")
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a model in Hugging Face form")
    parser.add_argument("--tokens", type=number, default=2000, metavar="N", help="tokens of text to read (2000)")
    parser.add_argument("--repeats", type=number, default=20, metavar="N", help="verdicts per figure (20)")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    source = Unfolded(args.model)
    whole = Whole(source, torch.float32, "cpu")
    x_TD = _read(whole, text_of(args.model, args.tokens))
    exact_T = whole.lm_head(x_TD).argmax(-1)
    weight = whole.lm_head.product.weight
    heads = {form: _build(whole, weight, form)
             for form in tqdm(FORMS, desc="quantizing", leave=False)}
    jobs = {(form, rows): partial(cost, _judge, made, x_TD[:rows].to(form.dtype))
            for form, made in heads.items() for rows in ROWS}
    took = by_turns(jobs, args.repeats)
    print(f"LM head of {args.model.name}, {weight.shape[0]} x {weight.shape[1]}, {torch.get_num_threads()} thread(s), "
          f"minimum of {args.repeats}; on {len(x_TD)} tokens of text, against float32")
    table = []
    for form, made in heads.items():
        pieces = x_TD.to(form.dtype).split(PIECE)
        found_T = torch.cat([made(piece).argmax(-1) for piece in pieces])
        same = float((found_T == exact_T).double().mean())
        times = (f"{1e3 * min(took[form, rows]).wall:.2f}" for rows in ROWS)
        table.append((str(form), f"{size_of(made) / 1e6:.0f}", *times, f"{100 * same:.2f} %"))
    print(in_columns(COLUMNS, table, names=0))
    return 0


def _judge(head: Logits, x_TD: Tensor) -> None:
    """Compute a verdict on these rows."""
    head(x_TD).max(-1)


def _build(whole: Whole, weight: Tensor, form: Form) -> Logits:
    made = Logits(whole.config)
    fill(made, {"product.weight": weight}, form.dtype, "cpu")
    compress(made, form.kind, form.dtype)
    pack(made)
    return made


def text_of(folder: Path, tokens: int) -> list[int]:
    """Return token ids of questions of the bundled sets, with their answers."""
    text, found = Text(folder), []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        for _, entry in islice(lines(path), tokens):
            said = [*entry["turns"], *entry["reference"]]
            found += text.tokenizer("\n\n".join(said))["input_ids"]
            if len(found) >= tokens:
                return found[:tokens]
    return found


def _read(whole: Whole, ids: list[int]) -> Tensor:
    """Return the outputs `[T, D]` of the layers for a text, read in pieces that do not see each other."""
    made = []
    begins = range(0, len(ids), PIECE)
    for begin in tqdm(begins, desc="reading", leave=False):
        piece = ids[begin:begin + PIECE]
        cache, places = whole.cache(len(piece)), list(range(len(piece)))
        cache.admit(places, [0, *places[:-1]], len(piece))
        made.append(whole.body(torch.tensor(piece), torch.tensor(places), cache))
    return torch.cat(made)
