"""The tokenizer: a sentencepiece BPE model of 4,096 pieces in the format of LLaMA's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import sentencepiece
from transformers import LlamaTokenizerFast

from toy.corpus.dialogues import read

VOCABULARY = 4096
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def texts(folder: Path, dialogues: int, sources: int) -> Iterator[str]:
    """Yield the training texts of the tokenizer: questions, answers and source code, with line ends and indentation."""
    for questions, answers in islice(read(folder, "dialogues"), dialogues):
        yield from questions
        yield from answers
    for text in islice(read(folder, "library"), sources):
        yield from pieces(text, 2000)


def pieces(text: str, size: int) -> list[str]:
    """Cut a text into pieces of `size` characters."""
    return [text[i:i + size] for i in range(0, len(text), size)]


def make(work: Path, target: Path) -> None:
    """Train the tokenizer, and write tokenizer.model, tokenizer.json and the other files that `AutoTokenizer` reads."""
    target.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts(work, 16_000, 60), model_prefix=str(target / "tokenizer"), vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, add_dummy_prefix=True, character_coverage=0.9995, max_sentence_length=20_000,
        num_threads=2,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1, unk_surface=" \u2047 ", minloglevel=2)
    (target / "tokenizer.vocab").unlink()
    config = SPECIAL | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
                        "legacy": False,
                        "clean_up_tokenization_spaces": False, "model_max_length": 2048, "sp_model_kwargs": {}}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "special_tokens_map.json").write_text(json.dumps(SPECIAL, indent=2) + "\n")
    (target / "tokenizer.json").unlink(missing_ok=True)  # an old file would be loaded in place of the new model
    fast = LlamaTokenizerFast.from_pretrained(str(target))
    fast.backend_tokenizer.save(str(target / "tokenizer.json"))


def copy(source: Path, target: Path) -> None:
    """Copy the tokenizer into the folder of another model."""
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / name, target / name)
