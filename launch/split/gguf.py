"""Convert a GGUF file, tensor by tensor, into a model folder in Hugging Face form, which everything else can read.

The library `gguf` knows how llama.cpp names and quantizes weights. The config is read from the file's metadata; the
tokenizer by transformers, or here. Nothing in the file is executed: its chat template is only copied.
"""
from __future__ import annotations

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from config.files import one_at_a_time, replace
from config.schema.families import FAMILIES, published
from config.schema.fields import CONFIG, check
from config.schema.untrusted import read_json, short_repr
from model.llama import LlamaConfig
from model.rotary import Rotary
from model.weights.checkpoint import Form, sample, writing
from model.weights.parts import shapes
from model.weights.unfold import FUSED

MARK = "gguf.json"  # identifies the file from which a folder was made; written last
FACTORS, LONG = "rope_freqs.weight", ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
FIELDS = {  # of config.json -> keys in the metadata of an architecture
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "num_experts_per_tok": "expert_used_count",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
WORDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
TURNED = ("self_attn.q_proj", "self_attn.k_proj")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
KINDS = (".weight", ".bias")  # endings of tensor names
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST


class Architecture(NamedTuple):
    """An architecture of llama.cpp, as far as its files differ from LLaMA's."""

    kind: str  # the model_type
    interleaved: bool = False  # the two dimensions of a rotary wave are adjacent, unlike in Hugging Face's weights
    fields: Mapping[str, str] = {}  # further FIELDS
    defaults: Mapping[str, Any] = {}  # values of config.json that files leave out
    larger: int = 0  # layers of the only size in which hidden_size / heads scales attention, not head_dim
    bpe: bool = False  # its tokenizer is built here, as transformers does not read it
    pieces: bool = False  # its tokenizer is built here if it is SentencePiece's: transformers gets the merges wrong


SPARSE = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", fields=SPARSE, defaults={"norm_topk_prob": True}),
    "phi3": Architecture("phi3"),
    "gemma2": Architecture("gemma2", larger=46, pieces=True),
    "gemma3": Architecture("gemma3_text", larger=62, pieces=True),
    "olmo2": Architecture("olmo2", bpe=True),
    "granite": Architecture("granite", interleaved=True, bpe=True),
    "glm4": Architecture("glm4", bpe=True),
    "smollm3": Architecture("smollm3", interleaved=True, bpe=True),
    "gpt-oss": Architecture(
        "gpt_oss", fields={"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
        bpe=True),
}
MIXTRAL = Architecture("mixtral", interleaved=True, fields={"num_local_experts": "expert_count"})
PIECES = {  # how a text is split before a tokenizer's merges, by the name in a file
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WORD % "{1,3}"),
    "qwen2": WORD % "",
    **dict.fromkeys(("refact", "smollm", "starcoder"),
                    r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDINGS
              + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDINGS
              + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + REST,
}
USUAL, SPECIAL, ADDED = 1, 3, 4  # kinds of tokens
SPACE = "\u2581"  # of SentencePiece
REMEDY = "download it again, or take the same model in safetensors"


def is_gguf(path: str | Path) -> bool:
    """Whether a path has the name of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def unpack(path: Path, folder: Path, progress: bool = True) -> Path:
    """Write a GGUF file as a model folder with all weights in float32; a finished folder is kept.

    Peak memory is about the largest tensor. Raises ValueError for a damaged file, an unsupported model, or a folder
    that holds another model.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a GGUF file")
    mark, source = folder / MARK, {"file": sample(path), "dtype": "float32"}
    if (folder / "config.json").is_file() and not mark.is_file():
        raise ValueError(f"{folder} holds another model: give an empty or new folder")
    if _is_made(mark, source):  # before the lock, so that users who may only read the folder can use it
        return folder
    with _explained(path), one_at_a_time(folder):
        if _is_made(mark, source):
            return folder
        file = GgufFile(path)
        mark.unlink(missing_ok=True)
        file.write_weights(folder / "model.safetensors", progress)
        file.write_text(folder)
        replace(mark, json.dumps(source).encode())
    return folder


def _is_made(mark: Path, source: dict[str, str]) -> bool:
    """Whether a folder was completely made from this file."""
    return mark.is_file() and read_json(mark) == source


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise ValueError, with the file and a remedy, for any error: a damaged file may raise anything in libraries."""
    try:
        yield
    except OSError:
        raise
    except ImportError as error:
        raise ValueError(f"{path} needs the package {error.name} to be read: type pip install gguf") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read ({short_repr(reason)[1:-1]}): {REMEDY}") from error


class GgufFile:
    """A GGUF file: its model's config, and its tensors under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._name = str(self._reader.fields["general.architecture"].contents())
        if self._name not in ARCHITECTURES:
            raise ValueError(f"a model of the kind {self._name} is not supported, only {', '.join(ARCHITECTURES)}")
        self._architecture = MIXTRAL if self._model_value("expert_count") and self._name == "llama" else \
            ARCHITECTURES[self._name]
        self.config = self._read_config()
        self._sizes = LlamaConfig.read(self.config)
        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(numbers[self._name], self._sizes.layers)

    def _model_value(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's metadata."""
        return self._value(key, default, self._name)

    def _value(self, key: str, default: Any = None, of: str = "tokenizer.ggml") -> Any:
        """Return a value of the metadata, by default of the tokenizer."""
        field = self._reader.get_field(f"{of}.{key}")
        return default if field is None else field.contents()

    def _read_config(self) -> dict[str, Any]:
        """Return the content of the model's `config.json`; raises ValueError for an unsupported model."""
        own = self._architecture
        family = FAMILIES[own.kind]
        config: dict[str, Any] = {"model_type": own.kind, "architectures": [family.architecture]}
        fields = {**FIELDS, **own.fields}
        found = {name: self._model_value(key) for name, key in fields.items()}
        found.update((name, self._value(key)) for name, key in WORDS.items())
        known = {name: value for name, value in found.items() if value is not None}
        config.update(known, **own.defaults)
        config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        if own.kind == "llama" and config.get("sliding_window"):
            config.update(model_type="mistral", architectures=[FAMILIES["mistral"].architecture])
        check({**config, "rope_scaling": None}, CONFIG, "its metadata")
        if own.kind == "olmo2" and config.get("sliding_window"):
            raise ValueError("it has sliding windows, as OLMo 3 has, which are not supported")
        heads = config["num_attention_heads"]
        width = config.setdefault("head_dim", config["hidden_size"] // heads)
        if own.larger:
            by_model = config["num_hidden_layers"] == own.larger
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads if by_model else width
        turned = self._model_value("rope.dimension_count", width)
        if turned != width:
            config["partial_rotary_factor"] = turned / width
        if own.kind in ("glm4", "gpt_oss"):
            config["attention_bias"] = any(name.endswith("attn_q.bias") for name in self._tensors)
        config["rope_scaling"] = self._scaling(config)
        check(config, CONFIG, "its metadata")
        return config

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the `rope_scaling`, from the metadata and the tensors."""
        if FACTORS in self._tensors:
            return self._stretched(config)
        trained = self._model_value("rope.scaling.original_context_length")
        if LONG[0] in self._tensors:
            long, short = (self._tensors[name].data.tolist() for name in LONG)
            config["original_max_position_embeddings"] = trained
            return {"type": "longrope", "long_factor": long, "short_factor": short}
        kind = self._model_value("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._model_value("rope.scaling.factor", 1.0)}
        if trained:
            scaling["original_max_position_embeddings"] = trained
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False
        return scaling

    def _stretched(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the `rope_scaling` of Llama 3.1 and later; the file holds only the divisor of each frequency."""
        factors = torch.from_numpy(self._tensors[FACTORS].data.copy())
        scaling = {**LLAMA3, "factor": float(factors.max())}
        sizes = (LlamaConfig.read({**config, "rope_scaling": how}) for how in (None, scaling))
        plain, scaled = (Rotary(each.turns).frequency() for each in sizes)
        if plain.shape != factors.shape or not torch.allclose(plain / factors, scaled, rtol=1e-3):
            raise ValueError("its rotary positions are scaled in a way that is not supported")
        return scaling

    def write_weights(self, path: Path, progress: bool) -> None:
        """Write all tensors to a safetensors file."""
        forms = self._forms()
        names = {name: self._theirs(name) for name in forms}
        lacking = next((name for name in names.values() if name not in self._tensors), "")
        if lacking:
            raise ValueError(f"it lacks {lacking}")
        left = self._tensors.keys() - names.values() - {FACTORS, *LONG}
        if left:
            raise ValueError(f"it holds {min(left)}, which no {self._name} model has")
        need, free = sum(form.bytes for form in forms.values()), shutil.disk_usage(path.parent).free
        if need > free:
            raise ValueError(f"it unpacks to {need / 1e9:.2f} GB, but the disk of {path.parent} has {free / 1e9:.2f}")
        bar = tqdm(total=need, unit="B", unit_scale=True, desc=f"unpacking {self.path.name}", disable=not progress)
        family = self._sizes.family
        theirs = {published(name, family): form for name, form in forms.items()}
        with bar, writing(path, theirs) as file:
            for name, form in forms.items():
                weights = self._weights(name, self._tensors[names[name]], form)
                file.write(published(name, family), weights)
                bar.update(form.bytes)

    def _theirs(self, name: str) -> str:
        """Return llama.cpp's name for a tensor of the decoder; there all experts of a layer are one tensor."""
        usual = EXPERT.sub(".experts.", published(name, self._sizes.family))
        theirs: str = self._names.get_name(usual, KINDS) or usual
        return theirs if theirs.endswith(KINDS) else f"{theirs}.weight"

    def _forms(self) -> dict[str, Form]:
        """Return the forms of the decoder's tensors, with products fused where the file has them fused."""
        forms: dict[str, Form] = {}
        for name, shape in shapes(self._sizes):
            part = name.split(".")[-2]
            for together, parts in FUSED.items():
                if "experts" in name or part not in parts:
                    continue
                if self._theirs(name.replace(part, parts[0])) not in self._tensors:
                    name = name.replace(part, together)
            rows = forms[name].shape[0] if name in forms else 0
            forms[name] = Form(torch.float32, (rows + shape[0], *shape[1:]))
        return forms

    def _weights(self, name: str, tensor: Any, form: Form) -> Tensor:
        """Return a tensor in float32, dequantized, with its rows in Hugging Face's order."""
        from gguf import dequantize

        expert = EXPERT.search(name)
        data = tensor.data[int(expert[1])] if expert else tensor.data
        weights = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        if tuple(weights.shape) != form.shape:
            raise ValueError(f"{tensor.name} has the shape {tuple(weights.shape)} instead of {form.shape}")
        if self._architecture.interleaved and any(part in name for part in TURNED):
            heads = weights.unflatten(0, (-1, self._sizes.head_dim // 2, 2))  # the two of a wave are adjacent
            weights = heads.transpose(1, 2).reshape(weights.shape)
        if self._sizes.family.one_more and weights.dim() == 1:  # a norm
            weights = weights - 1
        return weights

    def write_text(self, folder: Path) -> None:
        """Write `config.json`, and the files of the tokenizer with its chat template."""
        from transformers import AutoTokenizer

        about = self._architecture
        if about.bpe or about.pieces and self._value("model") == "llama":
            tokenizer = self._tokenizer()
        else:
            begins = self._value("add_bos_token")  # which transformers does not read
            known = {} if begins is None else {"add_bos_token": bool(begins)}
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, legacy=True, **known)
        tokenizer.save_pretrained(folder, legacy_format=False)
        self._drop_surplus(folder / "tokenizer.json")
        replace(folder / "config.json", json.dumps(self.config, indent=1).encode())

    def _drop_surplus(self, path: Path) -> None:
        """Remove tokens that the file does not have: transformers 5 adds GPT-2's end to every byte-level tokenizer."""
        written, tokens = json.loads(path.read_bytes()), len(self._value("tokens"))
        known = [token for token in written["added_tokens"] if token["id"] < tokens]
        if known != written["added_tokens"]:
            written["added_tokens"] = known
            replace(path, json.dumps(written, ensure_ascii=False).encode())

    def _tokenizer(self) -> Any:
        """Build the tokenizer of an architecture for which transformers builds none, or an incorrect one."""
        from tokenizers import AddedToken, processors
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self._value("tokens")
        made = self._pieces(tokens) if self._value("model") == "llama" else self._bytes(tokens)
        for token, kind in zip(tokens, self._value("token_type")):
            if kind in (SPECIAL, ADDED):
                made.add_tokens([AddedToken(token, normalized=False, special=kind == SPECIAL)])
        numbers = {name: self._value(key) for name, key in WORDS.items()}
        given = {name: number for name, number in numbers.items() if number is not None}
        named = {name.replace("_id", ""): tokens[number] for name, number in given.items()}
        if self._value("add_bos_token") and "bos_token" in named:
            first = named["bos_token"], numbers["bos_token_id"]
            made.post_processor = processors.TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
        template = self._value("chat_template", of="tokenizer")
        return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **named)

    def _bytes(self, tokens: list[str]) -> Any:
        """Build a byte-level tokenizer, which merges pairs in the order of the file."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        how = self._value("pre", "")
        if self._value("model") != "gpt2" or how not in PIECES:
            raise ValueError(f"its tokenizer splits texts as {how or self._value('model')} does, which is not "
                             f"supported, only {', '.join(PIECES)}")
        merges = [tuple(pair.split(" ")) for pair in self._value("merges")]
        made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES[how]), "isolated"), byte])
        made.decoder = decoders.ByteLevel()
        return made

    def _pieces(self, tokens: list[str]) -> Any:
        """Build SentencePiece's tokenizer: of all pairs that form a token, that of the highest score is merged."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        score = dict(zip(tokens, self._value("scores")))
        kinds = zip(tokens, self._value("token_type"))
        usual = [token for token, kind in kinds if kind == USUAL]
        cuts = ((token, token[:place], token[place:]) for token in usual for place in range(1, len(token)))
        pairs = [cut for cut in cuts if cut[1] in score and cut[2] in score]
        pairs.sort(key=lambda cut: -score[cut[0]])
        vocabulary = {token: number for number, token in enumerate(tokens)}
        unknown = tokens[self._value("unknown_token_id", 0)]
        made = Tokenizer(models.BPE(
            vocabulary, [(left, right) for _, left, right in pairs], unk_token=unknown, fuse_unk=True,
            byte_fallback=True))
        begins = [normalizers.Prepend(SPACE)] if self._value("add_space_prefix", True) else []
        made.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", SPACE)])
        made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                          *([decoders.Strip(" ", 1, 0)] if begins else [])])
        return made


def _open(path: Path) -> Any:
    """Return the library's reader, with an error for reads beyond the end of the file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError("it is cut off")
            return found

    return Reader(path)
