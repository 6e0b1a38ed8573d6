"""The tiny model of tests/tiny.py in files, with its draft head and a tokenizer of single characters, split over ranks.

And the commands that are run with it: in this process, or as a person types them.
"""
from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from split_and_save_models import split
from tests.tiny import CONFIG, Tiny, weights

SPECIAL = ["<unk>", "<s>", "</s>"]
SIGNS = string.ascii_lowercase + " .,:?!'\n" + string.digits  # one token each
SPLITS = ("0+4", "0+2+2", "0+1+1+2", "0+1+1+1+1")
FORM = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False,
        "hidden_size": CONFIG.hidden, "num_hidden_layers": CONFIG.layers, "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads, "head_dim": CONFIG.head_dim, "vocab_size": CONFIG.vocab,
        "intermediate_size": CONFIG.intermediate, "max_position_embeddings": CONFIG.context,
        "rms_norm_eps": CONFIG.eps, "rope_theta": CONFIG.theta, "bos_token_id": 1, "eos_token_id": 2}


def save_model(folder: Path) -> None:
    tiny = Tiny()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FORM))
    tensors = {f"model.{name}": x for name, x in tiny.tensors.items()}
    save_file({**tensors, "lm_head.weight": tiny.lm_head.weight.detach()}, folder / "model.safetensors")
    save_tokenizer(folder)


def save_head(folder: Path) -> None:
    """As EAGLE publishes its heads."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**FORM, "num_hidden_layers": 1}))
    torch.save(weights(Tiny().eagle().head, seed=3), folder / "pytorch_model.bin")


def save_tokenizer(folder: Path, more: int = 0) -> None:
    """A token for every sign, and `more` that the model does not know."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = [*SPECIAL, *SIGNS, *(chr(0x3b1 + i) for i in range(more))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": SPECIAL[0], "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2]}))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, `head` and a folder for each of the SPLITS; written once, whoever imports this."""
    folder = tmp_path_factory.getbasetemp() / "saved"
    if not folder.is_dir():
        save_model(folder / "base")
        save_head(folder / "head")
        for stages in SPLITS:
            split(folder / "base", folder / stages, stages, folder / "head", progress=False)
    return folder
