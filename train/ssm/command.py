"""Fine-tunes drafters for a target one after another, each on what those before it get wrong (boost-tuning).

This is the command; what it does is in train/ssm/.
"""
from __future__ import annotations

import hashlib
import json
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from config.files import write_json
from config.templates import chosen
from eval.pair_keys import Measured
from eval.pairs import Model, answer, check_pair
from eval.pairs import open_model as open_pair
from eval.tokens_per_pass import Array, merged_passes, ranks
from launch.spec import usable
from launch.split.write import TEXT_FILES
from model.sample import Sampler
from model.weights.checkpoint import Checkpoint
from train.course import Course, Hyperparameters, ended, sweep
from train.eagle.teacher import mark
from train.ssm.boost import Lesson, right, still_left
from train.ssm.options import check, parser
from train.ssm.texts import Chosen, prompts_of, texts_of
from train.writer import Prompts, Text, Writer, open_model

EXPANSIONS = ["1,1,1,1,1,1,1,1", "1,1,3,1,1,1,1,1"]
RECORD, TEXTS = "training.json", "texts.json"
NOT_TERMS = ("target", "drafts", "out", "data", "judged", "expansion", "single", "save_every", "device", "threads")
OF_TEXTS = ("prompts", "template", "new_tokens", "temperature", "seed", "target", "data")  # what decides the texts
Figures = Dict[str, Dict[str, float]]  # name -> shape of a tree -> tokens per pass
Ranks = List[Array]  # of the tokens of each text, [N]
Drafters = Sequence[Ranks]


class Task(NamedTuple):
    """What a drafter learns: texts, which of the tokens of each are left for it, `[N]`, and for how many steps."""

    texts: Sequence[Text]
    left: Chosen
    steps: int


class Training:
    """One call of the command: the pair, its texts, and the drafters that are made of them."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.device = usable(args.device, "--device ")
        place, threads = str(self.device), args.threads or 0
        self.measured = Measured(dtype="float32", device=place, threads=threads)
        self.pair = open_pair(str(args.target), self.measured)
        contexts = [self.pair.whole.config.context]
        for folder in dict.fromkeys(args.drafts):
            drafter = open_pair(str(folder), self.measured)
            check_pair(self.pair, drafter)
            contexts.append(drafter.whole.config.context)
        self.held, self.prompts = self._prompts(min(contexts) - args.new_tokens)
        self.target = open_model(args.target, self.device)
        self.terms = self._terms()

    def _prompts(self, room: int) -> tuple[Prompts, Prompts]:
        """The prompts, of at most `room` tokens, that are held out, and those that are learnt from."""
        args, text = self.args, self.pair.text
        chosen = prompts_of(args.data, args.prompts, args.seed)
        ids = [text.prompt_ids([prompt], args.template) for prompt in chosen]
        fitting = [prompt for prompt in ids if len(prompt) <= room]
        if len(fitting) <= args.judged:
            raise ValueError(f"{len(fitting)} prompts leave room for {args.new_tokens} tokens in the context, of which "
                             f"--judged {args.judged} are held out: give more prompts, or less of one of both")
        learnt = fitting[args.judged:]
        return fitting[:args.judged], sorted(learnt, key=len)  # texts beside each other are best equally long

    def _terms(self) -> dict[str, Any]:
        """What decides the result, but the drafter that is begun with."""
        settings = vars(self.args).items()
        terms = {name: value for name, value in settings if name not in NOT_TERMS}
        terms["target"] = mark(self.pair.whole.source)
        prompts = json.dumps([self.held, self.prompts])
        terms["data"] = short_hash(prompts.encode())
        return terms

    def texts(self) -> list[Text]:
        """What the target writes to the prompts that are learnt from."""
        args, ends = self.args, sorted(self.pair.text.end_ids)
        writer = Writer(self.target, ends, args.new_tokens, args.temperature, args.seed)
        terms = {name: self.terms[name] for name in OF_TEXTS}
        return texts_of(writer, self.prompts, args.out / TEXTS, terms)

    def tune(self, name: str, source: Path, task: Task) -> PreTrainedModel:
        """Fine-tune the drafter in `source` on a task, write it into the folder `name` of OUT, and read it from there,
        as the drafting code will."""
        args, model = self.args, open_model(source, self.device)
        lesson = Lesson(model, task.texts, task.left, args.batch, args.seed)
        if args.distributions:
            lesson.teacher = self.target
        file, warm_up = Checkpoint(source), max(1, task.steps // 20)
        plan = Hyperparameters(name, task.steps, args.rate, warm_up=warm_up, saved_every=args.save_every)
        terms = {**self.terms, "draft": mark(file), "steps": task.steps}
        every_N = torch.cat(list(task.left))
        terms["left"] = short_hash(every_N.numpy().tobytes())
        Course(plan, model, args.out / f"{name}.pt", terms).run(lesson)
        store(model, file, args.out / name)
        return open_model(args.out / name, self.device)

    def boosted(self, texts: Sequence[Text]) -> Iterator[tuple[str, int]]:
        """Tune one drafter after the other; its name, and how many tokens were left for it."""
        left = whole_of(texts)
        for number, source in enumerate(self.args.drafts, 1):
            tokens = sum(int(left_N.sum()) for left_N in left)
            if not tokens:
                print(f"train_ssm: nothing is left for drafter {number}: those before it foresee every stretch")
                return
            model = self.tune(f"ssm{number}", source, Task(texts, left, self.args.steps))
            left = still_left(left, right(model, texts), self.args.stretch)
            yield f"ssm{number}", tokens


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def whole_of(texts: Sequence[Text]) -> list[Tensor]:
    """That all tokens of the texts are left."""
    return [torch.ones(len(text.ids), dtype=torch.bool) for text in texts]


def store(model: PreTrainedModel, source: Checkpoint, folder: Path) -> None:
    """Write a drafter as Hugging Face has it, with the config, the tokenizer and the number type of its source."""
    dtype = source.form(source.names()[-1]).dtype
    model.to(dtype=dtype).save_pretrained(str(folder), safe_serialization=True)  # type: ignore[call-arg]
    for name in ("config.json", *TEXT_FILES):
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


class Judge:
    """The target's texts, of `limit` tokens at most, and what drafters foresee of them."""

    def __init__(self, target: Model, prompts: Prompts, limit: int, sampler: Sampler,
                 measured: Measured) -> None:
        self.measured = measured
        shown = tqdm(prompts, desc="held out", unit="text", leave=False)
        self.texts = [Text(prompt, answer(target, prompt, limit, sampler)) for prompt in shown]

    def ranks(self, folder: Path) -> Ranks:
        """How many tokens the drafter in a folder finds likelier than those of the texts."""
        whole = open_pair(str(folder), self.measured).whole
        found = []
        for prompt, ids in self.texts:
            read = [*prompt, *ids[:-1]]
            logits_NV = whole.logits(read, whole.cache(len(read)), len(ids))
            found.append(ranks(logits_NV, ids))
        return found

    def verified(self, drafters: Drafters, expansion: str) -> float:
        """Tokens that a pass verifies with merged trees of these drafters, whose ranks are given."""
        widths = list(map(int, expansion.split(",")))
        tokens = sum(len(text.ids) - 1 for text in self.texts)
        passes = sum(merged_passes(rank_DN, widths) for rank_DN in zip(*drafters))
        return tokens / passes if passes else 1.0


def train(args: Namespace) -> None:
    """The whole of it: drafters in OUT, and the record of what they are worth."""
    check(args)
    sweep(args.out, TEXTS, RECORD)
    args.template = chosen(args.template, args.target)
    if args.threads:
        torch.set_num_threads(args.threads)
    training = Training(args)
    texts = training.texts()
    left = dict(training.boosted(texts))
    if args.single:
        steps = args.steps * len(args.drafts)
        training.tune("single", args.drafts[0], Task(texts, whole_of(texts), steps))
    figures = judged(training, list(left))
    record = {"tokens_left": left, "texts": len(texts), "held_out_texts": len(training.held),
              "tokens_per_pass": figures, **training.terms}
    write_json(args.out / RECORD, record)
    show(record)


def judged(training: Training, names: Sequence[str]) -> Figures:
    """The tokens per pass by the first drafter as it was, by each of those that were made, and by trees of several."""
    args = training.args
    sampler = Sampler(args.temperature, seed=args.seed) if args.temperature else Sampler()
    judge = Judge(training.pair, training.held, args.new_tokens, sampler, training.measured)
    own = {name: judge.ranks(args.out / name) for name in names}
    compared = {f"{args.drafts[0]} as it was": [judge.ranks(args.drafts[0])]}
    compared.update((name, [own[name]]) for name in names)
    if args.single:
        compared["single"] = [judge.ranks(args.out / "single")]
    for count in range(2, len(names) + 1):
        some = names[:count]
        compared[f"{' and '.join(some)}, merged"] = [own[name] for name in some]
    found: Figures = {name: {} for name in compared}
    for name, drafters in compared.items():
        for shape in args.expansion:
            found[name][shape] = round(judge.verified(drafters, shape), 3)
    return found


def show(record: dict[str, Any]) -> None:
    """Print the tokens that were left for each drafter, and the tokens per pass."""
    for name, tokens in record["tokens_left"].items():
        print(f"{name}: {tokens} tokens of {record['texts']} texts to learn from")
    figures = record["tokens_per_pass"]
    size = max(map(len, figures))
    print(f"tokens per pass of the target, {record['held_out_texts']} texts that were held out, by the shape of a tree")
    shapes = next(iter(figures.values()))
    print(" " * size + "".join(f"{shape:>20}" for shape in shapes))
    for name, by_shape in figures.items():
        cells = [f"{verified:>20.2f}" for verified in by_shape.values()]
        print(f"{name:<{size}}" + "".join(cells))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.expansion = args.expansion or EXPANSIONS
    return ended("train_ssm", partial(train, args))
