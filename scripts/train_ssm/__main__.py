"""Fine-tunes drafters for a target one after another, each on what those before it get wrong (boost-tuning).

This is the command; what it does is in scripts/train_ssm/.
"""
from __future__ import annotations

import hashlib
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from config.files import ROOM, write
from config.measures import Measured
from eval.pairs import Model, answer, check_pair
from eval.pairs import open_model as open_pair
from eval.verified import merged_passes, ranks
from launch.devices import usable
from launch.split.plan import TEXT_FILES
from model.checkpoint import Checkpoint
from model.sample import Sampler
from scripts.train_eagle.course import Course, Hyperparameters
from scripts.train_eagle.teacher import mark
from scripts.train_ssm.boost import Lesson, right, still_left
from scripts.train_ssm.options import check, parser
from scripts.train_ssm.texts import Text, Writer, open_model, prompts_of, texts_of

EXPANSIONS = ["1,1,1,1,1,1,1,1", "1,1,3,1,1,1,1,1"]
RECORD, TEXTS = "training.json", "texts.json"
NOT_TERMS = ("target", "drafts", "out", "data", "judged", "expansion", "single", "save_every", "device", "threads")
OF_TEXTS = ("prompts", "template", "new_tokens", "temperature", "seed")  # what decides the texts


class Training:
    """One call of the command: the pair, its texts, and the drafters that are made of them."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.device = usable(args.device, "--device ")
        measured = Measured(dtype="float32", device=str(self.device), threads=args.threads or 0)
        self.pair = open_pair(str(args.target), measured)
        for folder in dict.fromkeys(args.drafts):
            check_pair(self.pair, open_pair(str(folder), measured))
        self.measured = measured
        found = prompts_of(args.data, args.prompts, args.seed)
        ids = [self.pair.text.prompt_ids([prompt], args.template) for prompt in found]
        contexts = [Checkpoint(folder).config.get("max_position_embeddings") or 2048 for folder in args.drafts]
        room = min(self.pair.whole.config.context, *contexts) - args.new_tokens
        fitting = [prompt for prompt in ids if len(prompt) <= room]
        if len(fitting) <= args.judged:
            raise ValueError(f"{len(fitting)} prompts leave room for {args.new_tokens} tokens in the context, of which "
                             f"--judged {args.judged} are held out: give more prompts, or less of one of both")
        self.held = fitting[:args.judged]
        self.prompts = sorted(fitting[args.judged:], key=len)  # texts beside each other are best equally long
        self.target = open_model(args.target, self.device)

    @property
    def terms(self) -> dict[str, Any]:
        """What decides the result, but the drafter that is begun with."""
        settings = {name: value for name, value in vars(self.args).items() if name not in NOT_TERMS}
        content = json.dumps([self.held, self.prompts]).encode()
        source = self.pair.whole.source
        data = hashlib.sha256(content).hexdigest()[:16]
        return {**settings, "target": mark(source, source.names()[-1]), "data": data}

    def texts(self) -> list[Text]:
        """What the target writes to the prompts that are learnt from."""
        args = self.args
        writer = Writer(self.target, sorted(self.pair.text.end_ids), args.new_tokens, args.temperature, args.seed)
        terms = {name: value for name, value in self.terms.items() if name in (*OF_TEXTS, "target", "data")}
        return texts_of(writer, self.prompts, args.out / TEXTS, terms)

    def tune(self, name: str, source: Path, steps: int, lesson: tuple[Sequence[Text], Sequence[Tensor]]
             ) -> PreTrainedModel:
        """Fine-tune the drafter in `source` on what is left of the texts, write it into the folder `name` of OUT, and
        read it from there, as whoever drafts with it will."""
        args, model = self.args, open_model(source, self.device)
        taught = Lesson(model, *lesson, args.batch, args.seed)
        if args.distributions:
            taught.teacher = self.target
        file = Checkpoint(source)
        plan = Hyperparameters(name, steps, args.rate, warm_up=max(1, steps // 20), seed=args.seed,
                               saved_every=args.save_every)
        left = hashlib.sha256(torch.cat(list(lesson[1])).numpy().tobytes()).hexdigest()[:16]
        terms = {**self.terms, "draft": mark(file, file.names()[-1]), "steps": steps, "left": left}
        Course(plan, model, args.out / f"{name}.pt", terms).run(taught)
        store(model, file, args.out / name)
        return open_model(args.out / name, self.device)

    def boosted(self, texts: Sequence[Text]) -> Iterator[tuple[str, int]]:
        """Tune one drafter after the other; its name, and how many tokens were left for it."""
        left = [torch.ones(len(text.ids), dtype=torch.bool) for text in texts]
        for number, source in enumerate(self.args.drafts, 1):
            tokens = sum(int(left_N.sum()) for left_N in left)
            if not tokens:
                print(f"train_ssm: nothing is left for drafter {number}: those before it foresee every stretch")
                return
            model = self.tune(f"ssm{number}", source, self.args.steps, (texts, left))
            left = still_left(left, list(right(model, texts)), self.args.stretch)
            yield f"ssm{number}", tokens


def store(model: PreTrainedModel, source: Checkpoint, folder: Path) -> None:
    """Write a drafter as Hugging Face has it, with the config, the tokenizer and the number type of its source."""
    dtype = source.form(source.names()[-1]).dtype
    model.to(dtype=dtype).save_pretrained(str(folder), safe_serialization=True)  # type: ignore[call-arg]
    for name in ("config.json", *TEXT_FILES):
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, folder / name)


class Judge:
    """The target's own texts to the prompts that were held out, and what drafters foresee of them."""

    def __init__(self, training: Training) -> None:
        self.measured, args = training.measured, training.args
        sampler = Sampler(args.temperature, seed=args.seed) if args.temperature else Sampler()
        shown = tqdm(training.held, desc="held out", unit="text", leave=False)
        self.texts = [Text(prompt, answer(training.pair, prompt, args.new_tokens, sampler)) for prompt in shown]

    def ranks(self, folder: Path) -> list[Any]:
        """The ranks of each text's tokens `[N]` for the drafter in a folder."""
        drafter: Model = open_pair(str(folder), self.measured)
        found = []
        for prompt, ids in self.texts:
            read = [*prompt, *ids[:-1]]
            found.append(ranks(drafter.whole.logits(read, drafter.whole.cache(len(read)), len(ids)), ids))
        return found

    def verified(self, drafters: Sequence[list[Any]], expansion: str) -> float:
        """Tokens that a pass verifies with merged trees of these drafters, whose ranks are given."""
        widths = [int(width) for width in expansion.split(",")]
        tokens = sum(len(ids) - 1 for _, ids in self.texts)
        passes = sum(merged_passes(rank_DN, widths) for rank_DN in zip(*drafters))
        return tokens / passes if passes else 1.0


def train(args: Namespace) -> None:
    """The whole of it: drafters in OUT, and the record of what they are worth."""
    check(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    training = Training(args)
    texts = training.texts()
    left = dict(training.boosted(texts))
    if args.single:
        every = [torch.ones(len(text.ids), dtype=torch.bool) for text in texts]
        training.tune("single", args.drafts[0], args.steps * len(args.drafts), (texts, every))
    judge = Judge(training)
    names = list(left)
    by_folder = {name: judge.ranks(args.out / name) for name in (*names, *(["single"] if args.single else []))}
    compared = {f"{args.drafts[0]} as it was": [judge.ranks(args.drafts[0])]}
    compared |= {name: [held] for name, held in by_folder.items()}
    for count in range(2, len(names) + 1):
        compared[f"{' and '.join(names[:count])}, merged"] = [by_folder[name] for name in names[:count]]
    figures = {name: {widths: round(judge.verified(held, widths), 3) for widths in args.expansion}
               for name, held in compared.items()}
    record = {"tokens_left": left, "texts": len(texts), "held_out_texts": len(judge.texts),
              "tokens_per_pass": figures, **training.terms}
    write(args.out / RECORD, json.dumps(record, indent=1) + "\n", ROOM)
    show(record)


def show(record: dict[str, Any]) -> None:
    """Print the tokens that were left for each drafter, and the tokens per pass."""
    for name, tokens in record["tokens_left"].items():
        print(f"{name}: {tokens} tokens of {record['texts']} texts to learn from")
    figures = record["tokens_per_pass"]
    size = max(map(len, figures))
    print(f"tokens per pass of the target, {record['held_out_texts']} texts that were held out, by the shape of a tree")
    for place, (name, by_shape) in enumerate(figures.items()):
        if not place:
            print(" " * size + "".join(f"{shape:>20}" for shape in by_shape))
        print(f"{name:<{size}}" + "".join(f"{verified:>20.2f}" for verified in by_shape.values()))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.expansion = args.expansion or EXPANSIONS
    try:
        train(args)
    except (ValueError, OSError) as error:
        print(f"train_ssm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntrain_ssm: stopped; type the same command again to go on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
