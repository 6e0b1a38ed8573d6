"""Types and quantized weights side by side, on one device: the time of a segment, and how far results are off.

It knows nothing about pipelines: a stage is timed by itself, on random layers.
"""
from __future__ import annotations

import argparse
import statistics
import time
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import lines
from config.presets import ROOT
from model.cache import TreeCache
from model.checkpoint import Checkpoint
from model.llama import LlamaConfig, Slice, fill
from model.quant import KINDS, Recast, compress, load, probe
from model.text import Text
from model.weights import HEAD
from scripts.bench.sizes import Size, read

TOY = ROOT / "toy" / "llama"
SIZES = (Size("layers", 1, "layers of the stage"), Size("hidden", 4096, "its width, as in a 7B model"),
         Size("intermediate", 11008, "width of the MLP"), Size("heads", 32, "heads of the attention"),
         Size("context", 512, "tokens that are settled"), Size("repeats", 9, "segments per median"))
SAMPLE = 2  # questions of each task that the bundled model reads


class Form(NamedTuple):
    """A type to compute in, and the kind of weights of the layers."""

    dtype: torch.dtype
    kind: str

    def __str__(self) -> str:
        name = str(self.dtype)[len("torch."):]
        return name if self.kind == "none" else f"{name}, {self.kind}"


PLAIN = Form(torch.bfloat16, "none")
FORMS = [Form(dtype, kind) for dtype in (torch.float32, torch.bfloat16, torch.float16) for kind in ("none", *KINDS)]


class Stage(NamedTuple):
    """A slice in one form, its cache, and what it is fed."""

    body: Slice
    cache: TreeCache
    x_TD: Tensor

    def segment(self, rows: int) -> Tensor:
        """What the layers make of so many rows that stand behind one another, and leave no trace in the cache."""
        nodes = list(range(1 << 20, (1 << 20) + rows))
        self.cache.admit(nodes, [0, *nodes[:-1]], 0)
        pos_T = torch.arange(self.cache.settled, self.cache.settled + rows, device=self.x_TD.device)
        out: Tensor = self.body(self.x_TD[:rows], pos_T, self.cache)
        self.cache.drop()
        return out

    def seconds(self, rows: int) -> float:
        start = time.perf_counter()
        self.segment(rows)[-1, -1].item()  # which waits for the device
        return time.perf_counter() - start


def stages(argv: list[str]) -> int:
    """The command `python -m scripts.bench stages`."""
    args = read("python -m scripts.bench stages", SIZES, argv, len(FORMS))
    torch.set_grad_enabled(False)
    forms = [form for form in FORMS if args.device != "cpu" or form.dtype != torch.float16]
    for form in forms:
        probe(form.kind, form.dtype, args.device)
    compare_times(args, forms)
    compare_texts(forms, args.device)
    return 0


def build(args: argparse.Namespace, forms: list[Form]) -> dict[Form, Stage]:
    """The same random layers in every form, with the same random text in their caches."""
    sizes = LlamaConfig(args.hidden, args.layers + 2, args.heads, args.heads, args.hidden // args.heads,
                        args.intermediate, vocab=1, context=2 * args.context + max(args.rows), eps=1e-6, theta=1e4)
    plain = Slice(sizes, 1, args.layers + 1)
    weights = {name: torch.randn(p.shape) / p.shape[-1] ** 0.5 if p.dim() > 1 else torch.ones(p.shape)
               for name, p in plain.named_parameters()}
    x_TD, text = torch.randn(max(args.rows), args.hidden), list(range(args.context))
    made: dict[Form, Stage] = {}
    for form in tqdm(forms, desc="quantizing", leave=False):
        body = Slice(sizes, 1, args.layers + 1)
        fill(body, weights, form.dtype, args.device)
        compress(body, form.kind, form.dtype)
        cache = sizes.cache(args.layers, sizes.context, torch.empty(0, dtype=form.dtype, device=args.device))
        for part in (cache.keys, cache.values):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
        cache.admit(text, [0, *text[:-1]], args.context)
        made[form] = Stage(body, cache, x_TD.to(args.device, form.dtype))
    return made


def compare_times(args: argparse.Namespace, forms: list[Form]) -> None:
    """Time all forms by turns, so that what disturbs one disturbs all; errors are those of what the layers add."""
    made = build(args, forms)
    took: dict[tuple[Form, int], list[float]] = {}
    for _ in tqdm(range(1 + args.repeats), desc="segments", leave=False):  # the first round warms up
        for form, stage in made.items():
            for rows in args.rows:
                took.setdefault((form, rows), []).append(stage.seconds(rows))
    added = {form: (stage.segment(max(args.rows)) - stage.x_TD).double().cpu() for form, stage in made.items()}
    exact = added[forms[0]]
    print(f"{args.layers} layer(s) of width {args.hidden} and {args.intermediate}, {args.context} tokens of context, "
          f"{args.device}, {torch.get_num_threads()} threads: ms per segment, median of {args.repeats}, and over the "
          f"time of {PLAIN}; error: of what the layers add, against {forms[0]}")
    print(f"  {'':<16}{'MB':>7}{'error':>9}" + "".join(f"{f'{rows} rows':>18}" for rows in args.rows))
    for form, stage in made.items():
        size = sum(p.numel() * p.element_size() for p in stage.body.parameters())
        line = f"  {str(form):<16}{size / 1e6:7.0f}{float((added[form] - exact).norm() / exact.norm()):9.4f}"
        for rows in args.rows:
            mine, plain = (statistics.median(took[key, rows][1:]) for key in (form, PLAIN))
            line += f"{1e3 * mine:10.2f}{mine / plain:7.2f}x"
        print(line)


def compare_texts(forms: list[Form], device: str) -> None:
    """The bundled model reads the held-out questions with their answers: does it find the same token likeliest?"""
    text, heard = Text(TOY), []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        for _, entry in islice(lines(path), SAMPLE):
            heard.append(text.prompt_ids([entry["turns"][0], entry["reference"][0], entry["turns"][0]], "vicuna"))
    exact = None
    print(f"the bundled model on {sum(map(len, heard))} tokens of held-out text, against {forms[0]}")
    print(f"  {'':<16}{'same token likeliest':>22}{'KL, nats':>12}")
    for form in tqdm(forms, desc="reading", leave=False):
        said = torch.cat([logits(ids, *toy(form, device)) for ids in heard]).log_softmax(-1)
        exact = said if exact is None else exact
        same = (said.argmax(-1) == exact.argmax(-1)).double().mean()
        print(f"  {str(form):<16}{100 * float(same):20.2f} %"
              f"{float((exact.exp() * (exact - said)).sum(-1).mean()):12.5f}")


@lru_cache(maxsize=1)
def toy(form: Form, device: str) -> tuple[Slice, Tensor]:
    """The bundled model in one form, and its LM head, which is not quantized."""
    source = Checkpoint(TOY)
    sizes = LlamaConfig.read(source.config)
    body = Slice(sizes, 0, sizes.layers)
    names = {name[len("model."):]: name for name in source.names() if name != HEAD}
    load(body, form.kind, Recast(source, names, form.kind), form.dtype, device)
    return body, source.read(HEAD).to(device, form.dtype)


def logits(ids: list[int], body: Slice, head_VD: Tensor) -> Tensor:
    """Of a whole text, read at once, `[T, V]` in float32."""
    nodes, cache = list(range(len(ids))), body.config.cache(body.config.layers, len(ids), head_VD)
    cache.admit(nodes, [0, *nodes[:-1]], len(ids))
    out = body(torch.tensor(ids, device=head_VD.device), torch.arange(len(ids), device=head_VD.device), cache)
    return (out @ head_VD.t()).float().cpu()
