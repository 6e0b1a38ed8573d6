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

VOCABULARY_SIZE = 4096
NUM_DIALOGUES, NUM_SOURCES = 16_000, 60  # that the tokenizer is trained on
SOURCE_PIECE_LENGTH = 2000  # characters
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
TOKENIZER_CONFIG = {
    **SPECIAL_TOKENS,
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 2048,
    "sp_model_kwargs": {}}
TRAINING_OPTIONS = {
    "vocab_size": VOCABULARY_SIZE,
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "add_dummy_prefix": True,
    "character_coverage": 0.9995,
    "max_sentence_length": 20_000,
    "num_threads": 2,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "unk_surface": " \u2047 ",
    "minloglevel": 2}


def training_texts(work_dir: Path) -> Iterator[str]:
    """Yield the training texts of the tokenizer: questions, answers and source code, with line ends and indentation."""
    for questions, answers in islice(read(work_dir, "dialogues"), NUM_DIALOGUES):
        yield from questions
        yield from answers
    for source_text in islice(read(work_dir, "library"), NUM_SOURCES):
        yield from pieces_of(source_text, SOURCE_PIECE_LENGTH)


def pieces_of(text: str, piece_length: int) -> list[str]:
    """Cut a text into pieces of `piece_length` characters."""
    return [text[start:start + piece_length] for start in range(0, len(text), piece_length)]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make(work_dir: Path, target_dir: Path) -> None:
    """Train the tokenizer, and write tokenizer.model, tokenizer.json and the other files that `AutoTokenizer` reads."""
    target_dir.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=training_texts(work_dir), model_prefix=str(target_dir / "tokenizer"), **TRAINING_OPTIONS)
    (target_dir / "tokenizer.vocab").unlink()

    _write_json(target_dir / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(target_dir / "special_tokens_map.json", SPECIAL_TOKENS)
    (target_dir / "tokenizer.json").unlink(missing_ok=True)  # an old file would be loaded in place of the new model
    fast_tokenizer = LlamaTokenizerFast.from_pretrained(str(target_dir))
    fast_tokenizer.backend_tokenizer.save(str(target_dir / "tokenizer.json"))


def copy(source_dir: Path, target_dir: Path) -> None:
    """Copy the tokenizer into the folder of another model."""
    for file_name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source_dir / file_name, target_dir / file_name)
