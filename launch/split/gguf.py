"""A GGUF file becomes a model folder in Hugging Face form, tensor by tensor, which everything else can read.

It knows how llama.cpp names, orders and quantizes weights, by the library `gguf`; config and tokenizer are read out of
the file's metadata by transformers. Nothing in the file is executed: its chat template is only copied.
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
from config.schema.untrusted import read_json, shown
from model.llama import LlamaConfig
from model.rotary import Rotary
from model.weights.checkpoint import Form, sample, writing
from model.weights.parts import shapes
from model.weights.unfold import FUSED

MARK = "gguf.json"  # of which file a folder was made; written last
FACTORS, LONG = "rope_freqs.weight", ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
FIELDS = {  # of a config.json, and where the metadata of an architecture have them
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
KINDS = (".weight", ".bias")  # how names of tensors end
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*" + REST


class Architecture(NamedTuple):
    """What llama.cpp calls a family, as far as it differs from LLaMA's in a file."""

    kind: str  # the model_type
    turned: bool = False  # the two dimensions of a wave are neighbours, as they are not at Hugging Face
    fields: Mapping[str, str] = {}  # more of them
    says: Mapping[str, Any] = {}  # what files leave out
    larger: int = 0  # layers of the one size whose attention is scaled by the model's heads, not by their width
    bpe: bool = False  # its tokenizer is made here, as transformers does not read it
    pieces: bool = False  # and so it is if it is SentencePiece's, whose merges transformers gets wrong


SPARSE = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
ARCHITECTURES = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", fields=SPARSE, says={"norm_topk_prob": True}),
    "phi3": Architecture("phi3"),
    "gemma2": Architecture("gemma2", larger=46, pieces=True),
    "gemma3": Architecture("gemma3_text", larger=62, pieces=True),
    "olmo2": Architecture("olmo2", bpe=True),
    "granite": Architecture("granite", turned=True, bpe=True),
    "glm4": Architecture("glm4", bpe=True),
    "smollm3": Architecture("smollm3", turned=True, bpe=True),
    "gpt-oss": Architecture(
        "gpt_oss", fields={"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"},
        bpe=True),
}
MIXTRAL = Architecture("mixtral", turned=True, fields={"num_local_experts": "expert_count"})
PIECES = {  # how a tokenizer's text is cut before its merges, by the name that a file gives
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
    """Whether a name is that of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def unpack(path: Path, folder: Path, progress: bool = True) -> Path:
    """Write a GGUF file as a model folder with all weights in float32; a folder that is finished is kept.

    The peak of memory is about the largest tensor. ValueError for a file that is damaged, a model that is not
    supported, or a folder that holds another model.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a GGUF file")
    mark, source = folder / MARK, {"file": sample(path), "dtype": "float32"}
    if (folder / "config.json").is_file() and not mark.is_file():
        raise ValueError(f"{folder} holds another model: give a folder that is empty or not there")
    if _is_made(mark, source):  # which those may use who may only read it
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
    """Whether a folder was made of this file, to the end."""
    return mark.is_file() and read_json(mark) == source


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file and a remedy, whatever goes wrong with it: a damaged one may raise anything in the libraries."""
    try:
        yield
    except OSError:
        raise
    except ImportError as error:
        raise ValueError(f"{path} needs the package {error.name} to be read: type pip install gguf") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read ({shown(reason)[1:-1]}): {REMEDY}") from error


class GgufFile:
    """A GGUF file: its model's config, and its tensors under their names at Hugging Face."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._name = str(self._reader.fields["general.architecture"].contents())
        if self._name not in ARCHITECTURES:
            raise ValueError(f"a model of the kind {self._name} is not supported, only {', '.join(ARCHITECTURES)}")
        self._architecture = MIXTRAL if self._said("expert_count") and self._name == "llama" else \
            ARCHITECTURES[self._name]
        self.config = self._read_config()
        self._sizes = LlamaConfig.read(self.config)
        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._names = get_tensor_name_map(numbers[self._name], self._sizes.layers)

    def _said(self, key: str, default: Any = None) -> Any:
        """What the metadata of the architecture say."""
        return self._word(key, default, self._name)

    def _word(self, key: str, default: Any = None, of: str = "tokenizer.ggml") -> Any:
        """What the metadata say, usually of the tokenizer."""
        field = self._reader.get_field(f"{of}.{key}")
        return default if field is None else field.contents()

    def _read_config(self) -> dict[str, Any]:
        """What the model's `config.json` would say; ValueError if that is not supported."""
        own = self._architecture
        family = FAMILIES[own.kind]
        config: dict[str, Any] = {"model_type": own.kind, "architectures": [family.architecture]}
        fields = {**FIELDS, **own.fields}
        found = {name: self._said(key) for name, key in fields.items()}
        found.update((name, self._word(key)) for name, key in WORDS.items())
        known = {name: value for name, value in found.items() if value is not None}
        config.update(known, **own.says)
        config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        if own.kind == "llama" and config.get("sliding_window"):
            config.update(model_type="mistral", architectures=[FAMILIES["mistral"].architecture])
        check({**config, "rope_scaling": None}, CONFIG, "its metadata")
        if own.kind == "olmo2" and config.get("sliding_window"):
            raise ValueError("it has windows, as OLMo 3, which is not supported")
        heads = config["num_attention_heads"]
        width = config.setdefault("head_dim", config["hidden_size"] // heads)
        if own.larger:
            by_model = config["num_hidden_layers"] == own.larger
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads if by_model else width
        turned = self._said("rope.dimension_count", width)
        if turned != width:
            config["partial_rotary_factor"] = turned / width
        if own.kind in ("glm4", "gpt_oss"):
            config["attention_bias"] = any(name.endswith("attn_q.bias") for name in self._tensors)
        config["rope_scaling"] = self._scaling(config)
        check(config, CONFIG, "its metadata")
        return config

    def _scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The `rope_scaling`, out of the metadata and what stands among the tensors."""
        if FACTORS in self._tensors:
            return self._stretched(config)
        trained = self._said("rope.scaling.original_context_length")
        if LONG[0] in self._tensors:
            long, short = (self._tensors[name].data.tolist() for name in LONG)
            config["original_max_position_embeddings"] = trained
            return {"type": "longrope", "long_factor": long, "short_factor": short}
        kind = self._said("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._said("rope.scaling.factor", 1.0)}
        if trained:
            scaling["original_max_position_embeddings"] = trained
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False
        return scaling

    def _stretched(self, config: dict[str, Any]) -> dict[str, Any]:
        """The `rope_scaling` of Llama 3.1 and later, of which the file holds only what each wave is divided by."""
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
        """The name at llama.cpp of a tensor of the decoder's; all experts of a layer are one there."""
        usual = EXPERT.sub(".experts.", published(name, self._sizes.family))
        theirs: str = self._names.get_name(usual, KINDS) or usual
        return theirs if theirs.endswith(KINDS) else f"{theirs}.weight"

    def _forms(self) -> dict[str, Form]:
        """The decoder's tensors, products together where the file has them so."""
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
        """A tensor as float32, dequantized, its rows in the order of Hugging Face."""
        from gguf import dequantize

        expert = EXPERT.search(name)
        data = tensor.data[int(expert[1])] if expert else tensor.data
        weights = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        if tuple(weights.shape) != form.shape:
            raise ValueError(f"{tensor.name} has the shape {tuple(weights.shape)} instead of {form.shape}")
        if self._architecture.turned and any(part in name for part in TURNED):
            heads = weights.unflatten(0, (-1, self._sizes.head_dim // 2, 2))  # there the two of a wave are neighbours
            weights = heads.transpose(1, 2).reshape(weights.shape)
        if self._sizes.family.one_more and weights.dim() == 1:  # a norm
            weights = weights - 1
        return weights

    def write_text(self, folder: Path) -> None:
        """Write `config.json`, and the files of the tokenizer with its chat template."""
        from transformers import AutoTokenizer

        about = self._architecture
        if about.bpe or about.pieces and self._word("model") == "llama":
            tokenizer = self._tokenizer()
        else:
            begins = self._word("add_bos_token")  # which transformers does not read
            known = {} if begins is None else {"add_bos_token": bool(begins)}
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, legacy=True, **known)
        tokenizer.save_pretrained(folder, legacy_format=False)
        self._drop_surplus(folder / "tokenizer.json")
        replace(folder / "config.json", json.dumps(self.config, indent=1).encode())

    def _drop_surplus(self, path: Path) -> None:
        """Leave out the tokens that the file has not: transformers 5 adds GPT-2's end to every tokenizer of bytes."""
        written, tokens = json.loads(path.read_bytes()), len(self._word("tokens"))
        known = [token for token in written["added_tokens"] if token["id"] < tokens]
        if known != written["added_tokens"]:
            written["added_tokens"] = known
            replace(path, json.dumps(written, ensure_ascii=False).encode())

    def _tokenizer(self) -> Any:
        """The tokenizer of an architecture of which transformers reads none, or not as it is."""
        from tokenizers import AddedToken, processors
        from transformers import PreTrainedTokenizerFast

        tokens: list[str] = self._word("tokens")
        made = self._pieces(tokens) if self._word("model") == "llama" else self._bytes(tokens)
        for token, kind in zip(tokens, self._word("token_type")):
            if kind in (SPECIAL, ADDED):
                made.add_tokens([AddedToken(token, normalized=False, special=kind == SPECIAL)])
        numbers = {name: self._word(key) for name, key in WORDS.items()}
        given = {name: number for name, number in numbers.items() if number is not None}
        named = {name.replace("_id", ""): tokens[number] for name, number in given.items()}
        if self._word("add_bos_token") and "bos_token" in named:
            first = named["bos_token"], numbers["bos_token_id"]
            made.post_processor = processors.TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
        template = self._word("chat_template", of="tokenizer")
        return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **named)

    def _bytes(self, tokens: list[str]) -> Any:
        """A tokenizer of bytes, of which pairs are merged in the order of the file."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        how = self._word("pre", "")
        if self._word("model") != "gpt2" or how not in PIECES:
            raise ValueError(f"its tokenizer cuts texts as {how or self._word('model')} does, which is not supported, "
                             f"only {', '.join(PIECES)}")
        merges = [tuple(pair.split(" ")) for pair in self._word("merges")]
        made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES[how]), "isolated"), byte])
        made.decoder = decoders.ByteLevel()
        return made

    def _pieces(self, tokens: list[str]) -> Any:
        """SentencePiece's tokenizer: of all pairs that are a token together, the one of the highest score is merged."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        score = dict(zip(tokens, self._word("scores")))
        kinds = zip(tokens, self._word("token_type"))
        usual = [token for token, kind in kinds if kind == USUAL]
        cuts = ((token, token[:place], token[place:]) for token in usual for place in range(1, len(token)))
        pairs = [cut for cut in cuts if cut[1] in score and cut[2] in score]
        pairs.sort(key=lambda cut: -score[cut[0]])
        vocabulary = {token: number for number, token in enumerate(tokens)}
        unknown = tokens[self._word("unknown_token_id", 0)]
        made = Tokenizer(models.BPE(
            vocabulary, [(left, right) for _, left, right in pairs], unk_token=unknown, fuse_unk=True,
            byte_fallback=True))
        begins = [normalizers.Prepend(SPACE)] if self._word("add_space_prefix", True) else []
        made.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", SPACE)])
        made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                          *([decoders.Strip(" ", 1, 0)] if begins else [])])
        return made


def _open(path: Path) -> Any:
    """The library's reader, which refuses to look beyond the end of the file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) != int(count):
                raise ValueError("it is cut off")
            return found

    return Reader(path)
