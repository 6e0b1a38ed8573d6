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
from eval.tokens_per_pass import NumberArray, merged_passes
from launch.progress import ProgressBar
from launch.split.write import TEXT_FILES
from model.text import chosen as template_of
from model.weights.checkpoint import Checkpoint
from model.weights.parts import read_sizes
from train.command import open_accelerator, prepare, run
from train.course import Course, Hyperparameters
from train.data import TokenRows, answer_row, batch_at
from train.ssm.boost import learn, ranks_of, without_predicted
from train.ssm.options import check, layers_of, parser
from train.ssm.texts import prompts_of, texts_of
from train.terms import digest, mark, settings
from train.writer import Prompts, TextWriter, open_model

TREE_SHAPES = ("1,1,1,1,1,1,1,1", "1,1,3,1,1,1,1,1")  # of the trees of the figures
RECORD, TEXTS, KEPT_LAYERS = "training.json", "texts", "layers"
NOT_TERMS = ("target", "drafts", "out", "data", "judged", "save_every", "device", "threads")
TEXT_TERMS = ("prompts", "template", "new_tokens", "temperature", "seed", "target", "data")  # terms of the texts
PassesByTree = Dict[str, Dict[str, float]]  # name -> shape of a tree -> tokens per pass
RanksByText = List[NumberArray]  # of the tokens of each text, [N]


class Training:
    """One call of the command: the pair of models, the prompts, and the drafters to tune."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        measure_keys = MeasureKeys(dtype="float32", device=str(self.device))
        self.pair = open_pair(str(args.target), measure_keys)
        context_length = self.pair.whole.config.context
        for draft_dir in dict.fromkeys(args.drafts):
            drafter = open_pair(str(draft_dir), measure_keys, self.pair)
            context_length = min(context_length, drafter.whole.config.context)

        self.held_prompts, self.prompts = self._prompts(context_length - args.new_tokens)
        data = json.dumps([self.held_prompts, self.prompts]).encode()
        self.terms = settings(args, NOT_TERMS)  # without the initial drafter, which `tune` adds
        self.terms.update(target=mark(self.pair.whole.source), data=digest(data))

        end_ids = self.pair.text.end_ids
        self.writer = TextWriter(self.pair.whole, end_ids, args.new_tokens, args.temperature, args.seed)

    def _prompts(self, max_length: int) -> tuple[Prompts, Prompts]:
        """Return the held-out prompts and those for training, of at most `max_length` tokens each."""
        args, text = self.args, self.pair.text
        prompt_texts = prompts_of(args.data, args.prompts, args.seed)
        prompt_ids = (text.prompt_ids([prompt], args.template) for prompt in prompt_texts)
        fitting_prompts = [prompt for prompt in prompt_ids if len(prompt) <= max_length]

        if len(fitting_prompts) <= args.judged:
            raise ValueError(f"only {len(fitting_prompts)} prompts leave room for {args.new_tokens} tokens in the "
                             f"context, and --judged {args.judged} are held out: add prompts, or lower --new-tokens or "
                             "--judged")
        return fitting_prompts[:args.judged], fitting_prompts[args.judged:]

    def tune(self, draft_name: str, source: Path, rows: TokenRows) -> PreTrainedModel:
        """Fine-tune the drafter in `source` on rows, write it to OUT/`draft_name`, and open it for drafting."""
        args, model = self.args, open_model(source, self.device)
        rows_left = [row for row in rows if row.answers.any()]

        def lesson(step: int) -> dict[str, float]:
            return learn(model, batch_at(step, rows_left, args.batch, args.seed))

        source_file, num_steps = Checkpoint(source), args.steps
        hyperparameters = Hyperparameters(draft_name, num_steps, args.rate, warm_up=max(1, num_steps // 20),
                                          saved_every=args.save_every)

        left_N = torch.cat([row.answers for row in rows])
        left_digest = digest(left_N.numpy().tobytes())
        terms = {**self.terms, "draft": mark(source_file), "left": left_digest}
        Course(hyperparameters, model, args.out / f"{draft_name}.pt", terms, open_accelerator(args)).run(lesson)

        store(model, source_file, args.out / draft_name)
        return open_model(args.out / draft_name, self.device)

    def boosted(self, rows: TokenRows) -> Iterator[tuple[str, int]]:
        """Tune one drafter after another, and yield its name and the number of tokens that were left for it."""
        rows_left = rows
        for draft_number, source in enumerate(self.args.drafts, 1):
            num_tokens = sum(int(row.answers.sum()) for row in rows_left)
            if not num_tokens:
                print(f"train_ssm: nothing is left for drafter {draft_number}: the previous ones predict every stretch")
                return
            draft_name = f"ssm{draft_number}"
            model = self.tune(draft_name, source, rows_left)
            rows_left = without_predicted(rows_left, ranks_of(model, rows), self.args.stretch)
            yield draft_name, num_tokens


def keep_layers(target: Path, layer_numbers: Sequence[int], folder: Path) -> None:
    """Write the target with only these of its layers."""
    source, model = Checkpoint(target), open_model(target, torch.device("cpu"))
    config = dict(source.config)
    inner_model = getattr(model.base_model, "decoder", model.base_model)  # OPT's layers are in a decoder

    inner_model.layers = nn.ModuleList([inner_model.layers[layer_number] for layer_number in layer_numbers])
    config["num_hidden_layers"] = len(layer_numbers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer_number] for layer_number in layer_numbers]

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
    kept_layers = layers_of(args, read_sizes(Checkpoint(args.target)).layers)
    if open_accelerator(args).num_processes > 1:
        raise ValueError("train_ssm runs in a single process; start it without accelerate launch")
    prepare(args, args.out, "choose another --out")

    args.template = template_of(args.template, args.target)
    if kept_layers:
        keep_layers(args.target, kept_layers, args.out / KEPT_LAYERS)
        args.drafts.insert(0, args.out / KEPT_LAYERS)
    training = Training(args)

    terms = {name: training.terms[name] for name in TEXT_TERMS}
    texts = texts_of(training.writer, training.prompts, args.out / TEXTS, terms)
    rows = [answer_row(*text) for text in texts]
    tokens_left = dict(training.boosted(rows))

    figures = evaluated(training, list(tokens_left))
    record = {"tokens_left": tokens_left, "texts": len(rows), "held_out_texts": len(training.held_prompts),
              "tokens_per_pass": figures, **training.terms}
    write_json(args.out / RECORD, record)
    show(record)


def evaluated(training: Training, names: Sequence[str]) -> PassesByTree:
    """Return the tokens per pass by the original first drafter, by each tuned one, and by merged trees of several."""
    args, held_prompts = training.args, training.held_prompts
    texts = training.writer.write(held_prompts)
    progress_bar = ProgressBar(texts, total=len(held_prompts), desc="held out", unit="text", leave=False)
    rows = [answer_row(*text) for text in progress_bar]

    def ranked(folder: Path) -> RanksByText:
        return list(ranks_of(open_model(folder, training.device), rows))

    tuned_ranks = [ranked(args.out / name) for name in names]
    ranks_by_name = {f"{args.drafts[0]} as it was": [ranked(args.drafts[0])]}
    ranks_by_name.update((name, [draft_ranks]) for name, draft_ranks in zip(names, tuned_ranks))
    for num_merged in range(2, len(names) + 1):
        ranks_by_name[f"{' and '.join(names[:num_merged])}, merged"] = tuned_ranks[:num_merged]

    return {name: {shape: round(verified(drafters, shape), 3) for shape in TREE_SHAPES}
            for name, drafters in ranks_by_name.items()}


def verified(drafters: Sequence[RanksByText], expansion: str) -> float:
    """Return the verified tokens per pass with merged trees of drafters with these ranks."""
    widths = list(map(int, expansion.split(",")))
    num_tokens = sum(len(rank_N) - 1 for rank_N in drafters[0])
    num_passes = sum(merged_passes(rank_DN, widths) for rank_DN in zip(*drafters))
    return num_tokens / num_passes if num_passes else 1.0


def show(record: dict[str, Any]) -> None:
    """Print the tokens that were left for each drafter, and the tokens per pass."""
    for name, num_tokens in record["tokens_left"].items():
        print(f"{name}: {num_tokens} tokens of {record['texts']} texts to learn from")
    print(f"tokens per pass of the target, {record['held_out_texts']} held-out texts, by the shape of the tree:")
    for name, by_shape in record["tokens_per_pass"].items():
        figures = [f"{shape} {tokens_per_pass:.2f}" for shape, tokens_per_pass in by_shape.items()]
        print(f"  {name}: {'; '.join(figures)}")


def main(argv: Sequence[str] | None = None) -> int:
    return run(train, "train_ssm", parser().parse_args(argv))
