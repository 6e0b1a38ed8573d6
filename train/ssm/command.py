"""Fine-tune drafters for a target one after another, each on the mistakes of the previous ones (boost-tuning).

This is the command; its parts are in train/ssm/.
"""
from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from config.files import write_json
from eval.pair_keys import MeasureKeys
from eval.pairs import open_model as open_pair
from eval.tokens_per_pass import Array, merged_passes
from launch.progress import ProgressBar
from launch.split.write import TEXT_FILES
from model.text import chosen as template_of
from model.weights.checkpoint import Checkpoint
from model.weights.parts import read_sizes
from train.command import open_accelerator, prepare, run
from train.course import Course, Hyperparameters
from train.data import Rows, answer_row, batch_at
from train.ssm.boost import learn, ranks_of, without_predicted
from train.ssm.options import check, layers_of, parser
from train.ssm.texts import prompts_of, texts_of
from train.terms import digest, mark, settings
from train.writer import Prompts, TextWriter, open_model

SHAPES = ("1,1,1,1,1,1,1,1", "1,1,3,1,1,1,1,1")  # of the trees of the figures
RECORD, TEXTS, KEPT = "training.json", "texts", "layers"
NOT_TERMS = ("target", "drafts", "out", "data", "judged", "save_every", "device", "threads")
OF_TEXTS = ("prompts", "template", "new_tokens", "temperature", "seed", "target", "data")  # terms of the texts
Figures = Dict[str, Dict[str, float]]  # name -> shape of a tree -> tokens per pass
Ranks = List[Array]  # of the tokens of each text, [N]


class Training:
    """One call of the command: the pair of models, the prompts, and the drafters to tune."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        if open_accelerator(args).num_processes > 1:
            raise ValueError("train_ssm runs in a single process; start it without accelerate launch")
        self.device = torch.device(args.device)
        measured = MeasureKeys(dtype="float32", device=str(self.device))
        self.pair = open_pair(str(args.target), measured)
        room = self.pair.whole.config.context
        for folder in dict.fromkeys(args.drafts):
            drafter = open_pair(str(folder), measured, self.pair)
            room = min(room, drafter.whole.config.context)
        self.held, self.prompts = self._prompts(room - args.new_tokens)
        data = json.dumps([self.held, self.prompts]).encode()
        self.terms = settings(args, NOT_TERMS)  # without the initial drafter, which `tune` adds
        self.terms.update(target=mark(self.pair.whole.source), data=digest(data))
        ends = self.pair.text.end_ids
        self.writer = TextWriter(self.pair.whole, ends, args.new_tokens, args.temperature, args.seed)

    def _prompts(self, room: int) -> tuple[Prompts, Prompts]:
        """Return the held-out prompts and those for training, of at most `room` tokens each."""
        args, text = self.args, self.pair.text
        chosen = prompts_of(args.data, args.prompts, args.seed)
        ids = (text.prompt_ids([prompt], args.template) for prompt in chosen)
        fitting = [prompt for prompt in ids if len(prompt) <= room]
        if len(fitting) <= args.judged:
            raise ValueError(f"only {len(fitting)} prompts leave room for {args.new_tokens} tokens in the context, and "
                             f"--judged {args.judged} are held out: add prompts, or lower --new-tokens or --judged")
        return fitting[:args.judged], fitting[args.judged:]

    def tune(self, name: str, source: Path, rows: Rows) -> PreTrainedModel:
        """Fine-tune the drafter in `source` on rows, write it to OUT/`name`, and read it as the drafting code will."""
        args, model = self.args, open_model(source, self.device)
        some = [row for row in rows if row.answers.any()]
        def lesson(step: int) -> dict[str, float]:
            return learn(model, batch_at(step, some, args.batch, args.seed))

        file, steps = Checkpoint(source), args.steps
        plan = Hyperparameters(name, steps, args.rate, warm_up=max(1, steps // 20), saved_every=args.save_every)
        left_N = torch.cat([row.answers for row in rows])
        left = digest(left_N.numpy().tobytes())
        terms = {**self.terms, "draft": mark(file), "left": left}
        Course(plan, model, args.out / f"{name}.pt", terms, open_accelerator(args)).run(lesson)
        store(model, file, args.out / name)
        return open_model(args.out / name, self.device)

    def boosted(self, rows: Rows) -> Iterator[tuple[str, int]]:
        """Tune one drafter after another, and yield its name and the number of tokens that were left for it."""
        left = rows
        for number, source in enumerate(self.args.drafts, 1):
            tokens = sum(int(row.answers.sum()) for row in left)
            if not tokens:
                print(f"train_ssm: nothing is left for drafter {number}: the previous ones predict every stretch")
                return
            name = f"ssm{number}"
            model = self.tune(name, source, left)
            left = without_predicted(left, ranks_of(model, rows), self.args.stretch)
            yield name, tokens


def keep_layers(target: Path, numbers: Sequence[int], folder: Path) -> None:
    """Write the target with only these of its layers."""
    source, model = Checkpoint(target), open_model(target, torch.device("cpu"))
    config, body = dict(source.config), getattr(model.base_model, "decoder", model.base_model)  # OPT's are in a decoder
    body.layers = nn.ModuleList([body.layers[number] for number in numbers])
    config["num_hidden_layers"] = len(numbers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][number] for number in numbers]
    store(model, source, folder)
    write_json(folder / "config.json", config)


def store(model: PreTrainedModel, source: Checkpoint, folder: Path) -> None:
    """Write a drafter in Hugging Face format, with the config, the tokenizer and the number type of its source."""
    dtype = source.form(source.names()[-1]).dtype
    model.to(dtype=dtype).save_pretrained(str(folder), safe_serialization=True)  # type: ignore[call-arg]
    for name in ("config.json", *TEXT_FILES):
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


def train(args: Namespace) -> None:
    """Run the whole training, which writes drafters and the record of their accuracy into OUT."""
    check(args)
    kept = layers_of(args, read_sizes(Checkpoint(args.target)).layers)
    prepare(args, args.out, "choose another --out", RECORD)
    args.template = template_of(args.template, args.target)
    if kept:
        keep_layers(args.target, kept, args.out / KEPT)
        args.drafts.insert(0, args.out / KEPT)
    training = Training(args)
    terms = {name: training.terms[name] for name in OF_TEXTS}
    texts = texts_of(training.writer, training.prompts, args.out / TEXTS, terms)
    rows = [answer_row(*text) for text in texts]
    left = dict(training.boosted(rows))
    figures = evaluated(training, list(left))
    record = {"tokens_left": left, "texts": len(rows), "held_out_texts": len(training.held),
              "tokens_per_pass": figures, **training.terms}
    write_json(args.out / RECORD, record)
    show(record)


def evaluated(training: Training, names: Sequence[str]) -> Figures:
    """Return the tokens per pass by the original first drafter, by each tuned one, and by merged trees of several."""
    args, held = training.args, training.held
    texts = training.writer.write(held)
    bar = ProgressBar(texts, total=len(held), desc="held out", unit="text", leave=False)
    rows = [answer_row(*text) for text in bar]

    def ranked(folder: Path) -> Ranks:
        return list(ranks_of(open_model(folder, training.device), rows))

    made = [ranked(args.out / name) for name in names]
    compared = {f"{args.drafts[0]} as it was": [ranked(args.drafts[0])]}
    compared.update((name, [found]) for name, found in zip(names, made))
    for count in range(2, len(names) + 1):
        compared[f"{' and '.join(names[:count])}, merged"] = made[:count]
    return {name: {shape: round(verified(drafters, shape), 3) for shape in SHAPES}
            for name, drafters in compared.items()}


def verified(drafters: Sequence[Ranks], expansion: str) -> float:
    """Return the verified tokens per pass with merged trees of drafters with these ranks."""
    widths = list(map(int, expansion.split(",")))
    tokens = sum(len(rank_N) - 1 for rank_N in drafters[0])
    passes = sum(merged_passes(rank_DN, widths) for rank_DN in zip(*drafters))
    return tokens / passes if passes else 1.0


def show(record: dict[str, Any]) -> None:
    """Print the tokens that were left for each drafter, and the tokens per pass."""
    for name, tokens in record["tokens_left"].items():
        print(f"{name}: {tokens} tokens of {record['texts']} texts to learn from")
    print(f"tokens per pass of the target, {record['held_out_texts']} held-out texts, by the shape of the tree")
    figures = record["tokens_per_pass"]
    size, [shapes, *_] = max(map(len, figures)), figures.values()
    print(" " * size + "".join(f"{shape:>20}" for shape in shapes))
    for name, by_shape in figures.items():
        print(f"{name:<{size}}" + "".join(f"{verified:>20.2f}" for verified in by_shape.values()))


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, "train_ssm", parser().parse_args(argv))
