"""Types and quantized weights side by side, on one device: the time of a segment, and how far results are off.

It knows nothing about pipelines: a stage is timed by itself, on random layers.
"""
from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from typing import Dict, NamedTuple, Tuple

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import lines
from config.presets import ROOT
from eval.bench.sizes import Size, read
from model.cache import TreeCache
from model.llama import LlamaConfig, Slice, fill
from model.text import Text
from model.weights.checkpoint import Checkpoint
from model.weights.parts import HEAD
from model.weights.quant import KINDS, Recast, compress, load, probe

TOY = ROOT / "toy" / "llama"
SIZES = (
    Size("layers", 1, "layers of the stage"),
    Size("hidden", 4096, "its width, as in a 7B model"),
    Size("intermediate", 11008, "width of the MLP"),
    Size("heads", 32, "heads of the attention"),
    Size("context", 512, "tokens that are settled"),
    Size("repeats", 9, "segments per median"))
SAMPLE = 2  # questions of each task that the bundled model reads


class Form(NamedTuple):
    """A type to compute in, and the kind of weights of the layers."""

    dtype: torch.dtype
    kind: str

    def __str__(self) -> str:
        name = str(self.dtype)[len("torch."):]
        return name if self.kind == "none" else f"{name}, {self.kind}"


PLAIN = Form(torch.bfloat16, "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = [Form(dtype, kind) for dtype in DTYPES for kind in ("none", *KINDS)]


class Stage(NamedTuple):
    """A slice in one form, its cache, and what it is fed."""

    body: Slice
    cache: TreeCache
    x_TD: Tensor

    def segment(self, rows: int) -> Tensor:
        """What the layers make of so many rows, each of which continues the one before: `[T, D]`.

        They leave no trace in the cache.
        """
        nodes = list(range(1 << 20, (1 << 20) + rows))
        self.cache.admit(nodes, [0, *nodes[:-1]], 0)
        pos_T = torch.arange(rows, device=self.x_TD.device) + self.cache.settled
        out: Tensor = self.body(self.x_TD[:rows], pos_T, self.cache)
        self.cache.drop()
        return out

    def added(self, rows: int) -> Tensor:
        """What the layers add to their input, `[T, D]` in float64 on the CPU."""
        change = self.segment(rows) - self.x_TD[:rows]
        return change.double().cpu()

    def seconds(self, rows: int) -> float:
        """How long a segment takes."""
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


Times = Dict[Tuple[Form, int], float]


def build(args: argparse.Namespace, forms: list[Form]) -> dict[Form, Stage]:
    """The same random layers in every form, with the same random text in their caches."""
    config = _config(args)
    first, last = 1, args.layers + 1
    weights = _weights(Slice(config, first, last))
    x_TD = torch.randn(max(args.rows), args.hidden)
    made: dict[Form, Stage] = {}
    for form in tqdm(forms, desc="quantizing", leave=False):
        body = Slice(config, first, last)
        fill(body, weights, form.dtype, args.device)
        compress(body, form.kind, form.dtype)
        cache = _cache(args, config, form.dtype)
        made[form] = Stage(body, cache, x_TD.to(args.device, form.dtype))
    return made


def _config(args: argparse.Namespace) -> LlamaConfig:
    """A model of which the stage has neither the first nor the last layer, so that it neither embeds nor norms."""
    context = 2 * args.context + max(args.rows)
    layers, head_dim = args.layers + 2, args.hidden // args.heads
    return LlamaConfig(args.hidden, layers, args.heads, args.heads, head_dim, args.intermediate, vocab=1,
                       context=context, eps=1e-6, theta=1e4)


def _weights(body: Slice) -> dict[str, Tensor]:
    """Random matrices that keep a row's length about as it is, and norms of ones."""
    found = {}
    for name, parameter in body.named_parameters():
        shape = parameter.shape
        is_norm = parameter.dim() == 1
        found[name] = torch.ones(shape) if is_norm else torch.randn(shape) / shape[-1] ** 0.5
    return found


def _cache(args: argparse.Namespace, config: LlamaConfig, dtype: torch.dtype) -> TreeCache:
    """A KV cache in which a text of `--context` tokens has been settled, with random keys and values."""
    like = torch.empty(0, dtype=dtype, device=args.device)
    cache = config.cache(args.layers, config.context, like)
    for stored in (cache.keys, cache.values):
        generator = torch.Generator().manual_seed(1)
        stored.copy_(torch.randn(stored.shape, generator=generator))
    text = list(range(args.context))
    cache.admit(text, [0, *text[:-1]], args.context)
    return cache


def compare_times(args: argparse.Namespace, forms: list[Form]) -> None:
    """Time all forms by turns, so that what disturbs one disturbs all, and print a line for each."""
    made = build(args, forms)
    took = _times(args, made)
    errors = _errors(made, max(args.rows))
    print(f"{args.layers} layer(s) of width {args.hidden} and {args.intermediate}, {args.context} tokens of context, "
          f"{args.device}, {torch.get_num_threads()} threads: ms per segment, median of {args.repeats}, and over the "
          f"time of {PLAIN}; error: of what the layers add, against {forms[0]}")
    columns = "".join(f"{f'{rows} rows':>18}" for rows in args.rows)
    print(f"  {'':<16}{'MB':>7}{'error':>9}{columns}")
    for form, stage in made.items():
        size = sum(p.numel() * p.element_size() for p in stage.body.parameters())
        line = f"  {str(form):<16}{size / 1e6:7.0f}{errors[form]:9.4f}"
        for rows in args.rows:
            mine, plain = took[form, rows], took[PLAIN, rows]
            line += f"{1e3 * mine:10.2f}{mine / plain:7.2f}x"
        print(line)


def _times(args: argparse.Namespace, made: dict[Form, Stage]) -> Times:
    """Median seconds of a segment, for each form and number of rows."""
    took: dict[tuple[Form, int], list[float]] = {}
    for _ in tqdm(range(1 + args.repeats), desc="segments", leave=False):
        for form, stage in made.items():
            for rows in args.rows:
                took.setdefault((form, rows), []).append(stage.seconds(rows))
    return {key: statistics.median(times[1:]) for key, times in took.items()}  # the first round warms up


def _errors(made: dict[Form, Stage], rows: int) -> dict[Form, float]:
    """How far what the layers add is from what those of the first form add, in parts of the latter's length."""
    added = {form: stage.added(rows) for form, stage in made.items()}
    exact = next(iter(added.values()))
    length = exact.norm()
    return {form: float((x - exact).norm() / length) for form, x in added.items()}


def compare_texts(forms: list[Form], device: str) -> None:
    """Print how often the bundled model finds the same token likeliest, reading the held-out questions and answers."""
    texts = _held_out()
    exact = None
    print(f"the bundled model on {sum(map(len, texts))} tokens of held-out text, against {forms[0]}")
    print(f"  {'':<16}{'same token likeliest':>22}{'KL, nats':>12}")
    for form in tqdm(forms, desc="reading", leave=False):
        body, head_VD = toy(form, device)
        logits_TV = torch.cat([logits(ids, body, head_VD) for ids in texts])
        said = logits_TV.log_softmax(-1)
        exact = said if exact is None else exact
        same = (said.argmax(-1) == exact.argmax(-1)).double()
        divergence = (exact.exp() * (exact - said)).sum(-1)
        print(f"  {str(form):<16}{100 * float(same.mean()):20.2f} %{float(divergence.mean()):12.5f}")


def _held_out() -> list[list[int]]:
    """Token ids of questions of each task, with their answers and the question once more."""
    text, found = Text(TOY), []
    for path in sorted((ROOT / "eval" / "data").glob("*.jsonl")):
        for _, entry in islice(lines(path), SAMPLE):
            question, answer = entry["turns"][0], entry["reference"][0]
            found.append(text.prompt_ids([question, answer, question], "vicuna"))
    return found


def toy(form: Form, device: str) -> tuple[Slice, Tensor]:
    """The bundled model in one form, and its LM head, which is not quantized."""
    source = Checkpoint(TOY)
    sizes = LlamaConfig.read(source.config)
    body = Slice(sizes, 0, sizes.layers)
    held = [name for name in source.names() if name != HEAD]
    names = {name[len("model."):]: name for name in held}
    load(body, form.kind, Recast(source, names, form.kind), form.dtype, device)
    return body, source.read(HEAD).to(device, form.dtype)


def logits(ids: list[int], body: Slice, head_VD: Tensor) -> Tensor:
    """The logits of a whole text that is read at once, `[T, V]` in float32 on the CPU."""
    config, size, device = body.config, len(ids), head_VD.device
    nodes = list(range(size))
    cache = config.cache(config.layers, size, head_VD)
    cache.admit(nodes, [0, *nodes[:-1]], size)
    ids_T, pos_T = torch.tensor(ids, device=device), torch.arange(size, device=device)
    out_TD = body(ids_T, pos_T, cache)
    return (out_TD @ head_VD.t()).float().cpu()
