"""Describe a GGUF file by a model folder in Hugging Face form, which everything else can read.

Weights stay in the file: the folder lists where each is. Only what is small, or in rare forms, is converted, tensor by
tensor. The library `gguf` knows how llama.cpp names and quantizes weights. The config and the tokenizer follow from the
file's metadata. Nothing in the file is executed: its chat template is only copied.
"""
from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from config.files import NoSpace, check_space, one_at_a_time, replace
from config.schema.families import CONVOLUTION, FAMILIES, published
from config.schema.fields import CONFIG, check
from config.schema.untrusted import one_line, read_json, short_repr
from launch.progress import ProgressBar
from launch.split.gguf_tokenizer import Vocabulary
from model.llama import LlamaConfig
from model.rotary import Rotary
from model.weights.blocks import TYPES_BY_NAME
from model.weights.checkpoint import CODES_BY_DTYPE, GGUF_LIST, TensorForm, half_a_head_apart, sample, writing
from model.weights.parts import tensor_shapes
from model.weights.unfold import FUSED_LAYERS

SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # as GGUF names them
FOLDER_FORM = 6  # a folder of an older form, whose tokenizer may split texts wrongly, is made again
PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.I)  # the names that gguf-split gives to the parts of a file

ROPE_FACTORS, LONGROPE_FACTORS = "rope_freqs.weight", ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}
METADATA_KEYS = {  # fields of config.json -> keys in the metadata of an architecture
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "num_experts_per_tok": "expert_used_count",
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
SCALING_KEYS = {  # fields of rope_scaling -> keys in the metadata below rope.scaling
    "original_max_position_embeddings": "original_context_length", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow"}
ROPE_KEYS = (  # keys below rope that have an effect here, or nowhere
    "dimension_count", "dimension_sections", "freq_base", "scale_linear",
    *(f"scaling.{key}" for key in ("type", "factor", "attn_factor", "finetuned", *SCALING_KEYS.values())))
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {  # keys that are not read, and the only values that change nothing
    "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (-1, 1), "rope.scaling.alpha": (0, 1),
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,), "attention.shared_kv_layers": (0,), "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1), "expert_group_count": (0, 1), "leading_dense_block_count": (0,),
    "use_parallel_residual": (False,), "router_logit_softcapping": (0,),
    "swin_norm": (False,)}

ROTATED_LAYERS = ("self_attn.q_proj", "self_attn.k_proj")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
NAME_ENDINGS = (".weight", ".bias")  # of tensors
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

BIASES = (  # names of tensors that end as llama.cpp's converter writes them
    ("expert_bias", "expert_bias.bias"), ("e_score_correction_bias", "e_score_correction.bias"),
    ("dt_bias", "dt_proj.bias"))
DECAYS = ".ssm_a"  # the name of a tensor without an ending: the negative speeds of a delta net
FUSED = {**FUSED_LAYERS, "in_proj_ba": ("in_proj_b", "in_proj_a")}


class Architecture(NamedTuple):
    """An architecture of llama.cpp, as far as its files differ from LLaMA's."""

    model_type: str
    is_interleaved: bool = False  # the two dimensions of a rotary wave are adjacent, unlike in Hugging Face's weights
    extra_keys: Mapping[str, str] = {}  # besides METADATA_KEYS
    defaults: Mapping[str, Any] = {}  # values of config.json that files leave out
    layers_of_largest: int = 0  # of the only size in which hidden_size / heads scales attention, not head_dim


EXPERT_SIZE_KEYS = {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"}
EXPERT_KEYS = {**EXPERT_SIZE_KEYS, "norm_topk_prob": "expert_weights_norm"}
LOCAL_EXPERT_KEYS = {"num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"}
CONVOLUTION_KEYS = {"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"}
DELTA_KEYS = {
    "full_attention_interval": "full_attention_interval", "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank"}
SPARSE_DELTA_KEYS = {
    **DELTA_KEYS, **EXPERT_SIZE_KEYS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
ARCHITECTURES = {
    "llama": Architecture("llama", is_interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", extra_keys=EXPERT_KEYS, defaults={"norm_topk_prob": True}),
    "phi3": Architecture("phi3"),
    "gemma2": Architecture("gemma2", layers_of_largest=46),
    "gemma3": Architecture(
        "gemma3_text", extra_keys={"rope_local_base_freq": "rope.freq_base_swa"}, layers_of_largest=62),
    "olmo2": Architecture("olmo2"),
    "granite": Architecture("granite", is_interleaved=True),
    "glm4": Architecture("glm4"),
    "smollm3": Architecture("smollm3", is_interleaved=True),
    "seed_oss": Architecture("seed_oss"),
    "ernie4_5": Architecture("ernie4_5"),
    "lfm2": Architecture(
        "lfm2", extra_keys=CONVOLUTION_KEYS, defaults={"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture("lfm2_moe", extra_keys={
        **CONVOLUTION_KEYS, **EXPERT_SIZE_KEYS, "num_dense_layers": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale"}),
    "minimax-m2": Architecture("minimax_m2", extra_keys=LOCAL_EXPERT_KEYS),
    "qwen3next": Architecture("qwen3_next", extra_keys=SPARSE_DELTA_KEYS),
    "qwen35": Architecture("qwen3_5_text", extra_keys=DELTA_KEYS, defaults={"tiled_value_heads": True}),
    "qwen35moe": Architecture("qwen3_5_moe_text", extra_keys=SPARSE_DELTA_KEYS, defaults={"tiled_value_heads": True}),
    "gpt-oss": Architecture("gpt_oss", extra_keys=LOCAL_EXPERT_KEYS),
}
WITH_WINDOWS = {"llama": "mistral", "olmo2": "olmo3"}  # families that other ones with windows are called
MIXTRAL = Architecture("mixtral", is_interleaved=True, extra_keys={"num_local_experts": "expert_count"})
DOWNLOAD_AGAIN = "download it again, or take the same model in safetensors"


# --- the folder -------------------------------------------------------------------------------------------------------

def is_gguf(path: str | Path) -> bool:
    """Whether a path has the name of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf"


def unpack(path: Path, folder: Path, progress: bool = True) -> Path:
    """Describe a GGUF file, or all parts of one, by a model folder; a finished folder is kept. The file must stay.

    Peak memory is about the largest tensor. Raises ValueError for a damaged file, an unsupported model, or a folder
    that holds another model.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give the path of a GGUF file")

    list_path = folder / GGUF_LIST
    samples = {str(part.absolute()): sample(part) for part in parts_of(path)}  # a cache's link has the name
    source = {"form": FOLDER_FORM, "files": samples}
    if (folder / "config.json").is_file() and not list_path.is_file():
        raise ValueError(f"{folder} holds another model: give an empty or new folder")
    if _is_complete(list_path, source):  # before the lock, so that users who may only read the folder can use it
        return folder

    with _explained(path), one_at_a_time(folder):
        if _is_complete(list_path, source):
            return folder
        file = GgufFile(path)
        list_path.unlink(missing_ok=True)
        left_in_file = file.write_weights(folder / "model.safetensors", progress)
        file.write_text(folder)
        replace(list_path, json.dumps({**source, "tensors": left_in_file}).encode())
    return folder


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model, in order, of which `path` is any one. Raises ValueError if one is missing."""
    part_name = PART_NAME.fullmatch(path.name)
    if not part_name:
        return [path]

    stem, count = part_name.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    missing_part = next((part for part in parts if not part.is_file()), None)
    if missing_part:
        raise ValueError(f"{path} is one of {len(parts)} parts of a model, but {missing_part} is missing: download all "
                         "parts into one folder")
    return parts


def is_current(folder: Path) -> bool:
    """Whether a folder was completely made from a GGUF file, in the present form."""
    list_path = folder / GGUF_LIST
    return list_path.is_file() and read_json(list_path).get("form") == FOLDER_FORM


def _is_complete(list_path: Path, source: dict[str, Any]) -> bool:
    """Whether a folder was completely made from this file."""
    return list_path.is_file() and source.items() <= read_json(list_path).items()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise ValueError, with the file and a remedy, for any error: a damaged file may raise anything in libraries."""
    try:
        yield
    except (OSError, NoSpace):
        raise
    except ImportError as error:
        raise ValueError(f"{path} needs the package {error.name} to be read: type pip install gguf") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read ({one_line(reason[:200])}): {DOWNLOAD_AGAIN}") from error


# --- the file ---------------------------------------------------------------------------------------------------------

class GgufFile:
    """A GGUF file: its model's config, and its tensors under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        # the metadata, which the first part has, and the tensors
        self.path = path
        parts = parts_of(path)
        readers = [*map(_open, parts)]
        self._reader = readers[0]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._paths = {tensor.name: str(part.absolute()) for part, reader in zip(parts, readers)
                       for tensor in reader.tensors}
        if self._value("count", 1, of="split") not in (0, len(parts)):
            raise ValueError("it is one of several parts, without its name: join them with gguf-split --merge")

        # the architecture
        name_field = self._reader.fields.get("general.architecture")
        if name_field is None:
            raise ValueError("it does not name its architecture (general.architecture), so it holds no model")
        self._architecture_name = str(name_field.contents())
        if self._architecture_name not in ARCHITECTURES:
            raise ValueError(f"a model of the kind {self._architecture_name} is not supported, only "
                             f"{', '.join(ARCHITECTURES)}")
        is_mixtral = self._model_value("expert_count") and self._architecture_name == "llama"
        self._architecture = MIXTRAL if is_mixtral else ARCHITECTURES[self._architecture_name]

        # the model
        self._vocabulary = Vocabulary(self._value)
        self.config = self._read_config()
        self._sizes = LlamaConfig.read(self.config)
        architecture_numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._name_map = get_tensor_name_map(architecture_numbers[self._architecture_name], self._sizes.layers)

    def _model_value(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's metadata."""
        return self._value(key, default, self._architecture_name)

    def _value(self, key: str, default: Any = None, of: str = "tokenizer.ggml") -> Any:
        """Return a value of the metadata, by default of the tokenizer."""
        field = self._reader.get_field(f"{of}.{key}")
        return default if field is None else field.contents()

    def _read_config(self) -> dict[str, Any]:
        """Return the content of the model's `config.json`; raises ValueError for an unsupported model."""
        architecture = self._architecture
        model_type = architecture.model_type
        config: dict[str, Any] = {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]}

        # the fields that the file gives
        metadata_keys = {**METADATA_KEYS, **architecture.extra_keys}
        values = {field: self._model_value(key) for field, key in metadata_keys.items()}
        present_values = {field: value for field, value in values.items() if value is not None}
        config.update({**architecture.defaults, **present_values}, **self._token_ids())
        config["vocab_size"] = int(self._tensors["token_embd.weight"].shape[1])
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        if config.get("sliding_window") == 0:  # as llama.cpp's converter writes that there are no windows
            config["sliding_window"] = None
        with_windows = WITH_WINDOWS.get(model_type)
        if with_windows and config.get("sliding_window"):
            config.update(model_type=with_windows, architectures=[FAMILIES[with_windows].architecture])
        heads_by_layer = config.get("num_key_value_heads")
        if isinstance(heads_by_layer, list) and "conv_L_cache" in config:  # 0 for a convolution
            config["num_key_value_heads"] = max(heads_by_layer)
            config["layer_types"] = ["full_attention" if num_heads else CONVOLUTION for num_heads in heads_by_layer]
        if "linear_num_value_heads" in config:
            config["linear_value_head_dim"] = self._model_value("ssm.inner_size") // config["linear_num_value_heads"]
        check({**config, "rope_scaling": None}, CONFIG, "its metadata")
        self._leave_out_layers_ahead(config)

        # those that follow from them
        hidden_per_head = config["hidden_size"] // config["num_attention_heads"]
        head_dim = config.setdefault("head_dim", hidden_per_head)
        if architecture.layers_of_largest:
            is_largest = config["num_hidden_layers"] == architecture.layers_of_largest
            config["query_pre_attn_scalar"] = hidden_per_head if is_largest else head_dim

        window_pattern = self._model_value("attention.sliding_window_pattern")
        if isinstance(window_pattern, list):
            config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in window_pattern]
        elif window_pattern:
            config["sliding_window_pattern"] = int(window_pattern)

        rotated_dim = self._model_value("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated_dim / head_dim
        if model_type in ("glm4", "gpt_oss", "seed_oss"):
            config["attention_bias"] = any(name.endswith("attn_q.bias") for name in self._tensors)

        self._refuse_unread(head_dim, rotated_dim)
        config["rope_scaling"] = self._rope_scaling(config)
        check(config, CONFIG, "its metadata")
        return config

    def _leave_out_layers_ahead(self, config: dict[str, Any]) -> None:
        """Leave out the last layers if they are for multi-token prediction."""
        num_all = config["num_hidden_layers"]
        config["num_hidden_layers"] -= self._model_value("nextn_predict_layers", 0)
        prefixes = tuple(f"blk.{layer}." for layer in range(config["num_hidden_layers"], num_all))
        kept_names = [name for name in self._tensors if not name.startswith(prefixes)]
        self._tensors = {name: self._tensors[name] for name in kept_names}

    def _refuse_unread(self, head_dim: int, rotated_dim: int) -> None:
        """Raise ValueError for metadata that would change what the model computes, but is not read."""
        same_sizes = {"attention.value_length": head_dim, "attention.key_length_swa": head_dim,
                      "attention.value_length_swa": head_dim, "rope.dimension_count_swa": rotated_dim}
        fine_values = {**WITHOUT_EFFECT, **{key: (size,) for key, size in same_sizes.items()}}
        read_keys = {*(f"rope.{key}" for key in ROPE_KEYS), *self._architecture.extra_keys.values()}

        for field in self._reader.fields:
            name, _, key = field.partition(".")
            can_matter = key in fine_values or key.startswith("rope.")
            if name != self._architecture_name or key in read_keys or not can_matter:
                continue
            value = self._model_value(key)
            if value not in fine_values.get(key, ()):
                raise ValueError(f"it says {field}={short_repr(value)}, which is not supported")

    def _token_ids(self) -> dict[str, Any]:
        """Return the ids of the tokens with a role, under their names in a `config.json`."""
        ids, end_ids = self._vocabulary.ids, self._vocabulary.end_ids
        only_end_id = end_ids[0] if end_ids else None  # null, since an omitted id would be the family's
        return {"bos_token_id": ids.get("bos"), "eos_token_id": end_ids if len(end_ids) > 1 else only_end_id,
                "pad_token_id": ids.get("pad")}

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the `rope_scaling`, from the metadata and the tensors."""
        factor = self._model_value("rope.scaling.factor") or self._model_value("rope.scale_linear") or 1.0
        if ROPE_FACTORS in self._tensors and factor == 1:
            return self._llama3_scaling(config)

        values = {name: self._model_value(f"rope.scaling.{key}") for name, key in SCALING_KEYS.items()}
        scaling = {name: value for name, value in values.items() if value}
        attention_factor = self._model_value("rope.scaling.attn_factor") or 1.0
        if LONGROPE_FACTORS[0] in self._tensors:
            long_factor, short_factor = (self._tensors[name].data.tolist() for name in LONGROPE_FACTORS)
            config["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
            scaling = {"type": "longrope", "long_factor": long_factor, "short_factor": short_factor}
            return {**scaling, "attention_factor": attention_factor} if attention_factor != 1 else scaling

        rope_type = self._model_value("rope.scaling.type", "linear")
        if rope_type == "yarn" and attention_factor != 1:
            scaling["attention_factor"] = attention_factor * (1 + 0.1 * math.log(factor))
        elif attention_factor != 1:
            raise ValueError(f"rope.scaling.attn_factor={attention_factor:g} goes with yarn only, not with {rope_type}")
        if ROPE_FACTORS in self._tensors:
            raise ValueError(f"it has both {ROPE_FACTORS} and rope.scaling.factor={factor:g}, which is not supported")

        if rope_type == "none" or rope_type == "linear" and factor == 1:
            return None
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False
        return {"rope_type": rope_type, "factor": factor, **scaling}

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the `rope_scaling` of Llama 3.1 and later; the file holds only the divisor of each frequency."""
        factors = torch.from_numpy(self._tensors[ROPE_FACTORS].data.copy())
        llama3_scaling = {**LLAMA3_SCALING, "factor": float(factors.max())}
        both_sizes = (LlamaConfig.read({**config, "rope_scaling": scaling}) for scaling in (None, llama3_scaling))
        plain_frequency, scaled_frequency = (Rotary(sizes.turns).frequency() for sizes in both_sizes)
        has_plain_shape = plain_frequency.shape == factors.shape
        if not has_plain_shape or not torch.allclose(plain_frequency / factors, scaled_frequency, rtol=1e-3):
            raise ValueError("its rotary positions are scaled in a way that is not supported")
        return llama3_scaling

    def write_weights(self, path: Path, progress: bool) -> dict[str, Any]:
        """Write the tensors that do not stay in the file to a safetensors file; return entries of the others."""
        forms = self._decoder_forms()
        tensor_names = {name: self._tensor_name(name) for name in forms}
        missing_name = next((name for name in tensor_names.values() if name not in self._tensors), "")
        if missing_name:
            raise ValueError(f"it lacks {missing_name}")
        unused_names = self._tensors.keys() - tensor_names.values() - {ROPE_FACTORS, *LONGROPE_FACTORS}
        if unused_names:
            raise ValueError(f"it holds {min(unused_names)}, which no {self._architecture_name} model has")

        # the tensors that stay in the file, and those that are converted
        family = self._sizes.family
        entries = {}
        for name, form in forms.items():
            if entry := self._entry(name, tensor_names[name], form):
                entries[published(name, family)] = entry
        converted_forms = {name: form for name, form in forms.items() if published(name, family) not in entries}

        needed_bytes = sum(form.bytes for form in converted_forms.values())
        check_space(path.parent, needed_bytes, f"{self.path} unpacks to",
                    "free some space, or choose another output folder")
        progress_bar = ProgressBar(total=needed_bytes, unit="B", unit_scale=True, desc=f"unpacking {self.path.name}",
                                   disable=not progress)
        written_forms = {published(name, family): form for name, form in converted_forms.items()}
        with progress_bar, writing(path, written_forms) as file:
            for name, form in converted_forms.items():
                weights = self._weights(name, self._tensors[tensor_names[name]], form)
                file.write(published(name, family), weights)
                progress_bar.update(form.bytes)
        return entries

    def _entry(self, name: str, tensor_name: str, form: TensorForm) -> dict[str, Any] | None:
        """Return where a matrix is in the file; None for a tensor that must be converted."""
        tensor, expert = self._tensors[tensor_name], EXPERT.search(name)
        stored_form = self._stored_form(tensor, form)
        if not stored_form:
            return None

        shape = tuple(map(int, reversed(tensor.shape)))
        matrix_shape = shape[1:] if expert else shape
        if _without_ones(matrix_shape) != _without_ones(form.shape):
            raise ValueError(f"{tensor.name} has the shape {matrix_shape} instead of {form.shape}")

        first_byte = int(tensor.data_offset)
        if expert:
            first_byte += int(expert[1]) * stored_form.bytes
        return {
            "file": self._paths[tensor_name],
            "dtype": CODES_BY_DTYPE[stored_form.dtype],
            "shape": stored_form.shape,
            "start": first_byte,
            "turned": self._sizes.head_dim if self._is_interleaved(name) else 0,
        }

    def _stored_form(self, tensor: Any, form: TensorForm) -> TensorForm | None:
        """Return the form in which the file holds a matrix, if it can stay there."""
        type_name = tensor.tensor_type.name
        if len(form.shape) != 2 or self._is_swapped:
            return None
        if type_name in PLAIN_TYPES:
            return TensorForm(PLAIN_TYPES[type_name], form.shape)
        if type_name not in TYPES_BY_NAME:
            return None

        block = TYPES_BY_NAME[type_name]
        num_outputs, num_inputs = form.shape
        return TensorForm(torch.uint8, (num_outputs, num_inputs // block.num_weights, block.num_bytes))

    @property
    def _is_swapped(self) -> bool:
        """Whether the file's bytes are in the other order than this machine's, which is that of all usual files."""
        return bool(self._reader.byte_order != "I")

    def _is_interleaved(self, name: str) -> bool:
        """Whether the two dimensions of a rotary wave are adjacent in a tensor of the file."""
        return self._architecture.is_interleaved and any(layer_name in name for layer_name in ROTATED_LAYERS)

    def _tensor_name(self, name: str) -> str:
        """Return llama.cpp's name for a tensor of the decoder; there all experts of a layer are one tensor."""
        usual_name = EXPERT.sub(".experts.", published(name, self._sizes.family))
        for ending, tensor_ending in BIASES:
            usual_name = re.sub(rf"\b{ending}$", tensor_ending, usual_name)
        usual_names = usual_name, usual_name[len("model."):]  # those of LFM2's experts begin with their layers
        known_names = [self._name_map.get_name(each, NAME_ENDINGS) for each in usual_names]
        tensor_name: str = next(filter(None, known_names), usual_name)
        return tensor_name if tensor_name.endswith((*NAME_ENDINGS, DECAYS)) else f"{tensor_name}.weight"

    def _decoder_forms(self) -> dict[str, TensorForm]:
        """Return the forms of the decoder's tensors, with products fused where the file has them fused."""
        forms: dict[str, TensorForm] = {}
        for name, shape in tensor_shapes(self._sizes):
            layer_name = name.split(".")[-2]
            for fused_name, part_names in FUSED.items():
                if "experts" in name or layer_name not in part_names:
                    continue
                first_part = name.replace(layer_name, part_names[0])
                if self._tensor_name(first_part) not in self._tensors:
                    name = name.replace(layer_name, fused_name)

            rows_before = forms[name].shape[0] if name in forms else 0
            forms[name] = TensorForm(torch.float32, (rows_before + shape[0], *shape[1:]))
        return forms

    def _weights(self, name: str, tensor: Any, form: TensorForm) -> Tensor:
        """Return a tensor in float32, dequantized, with its rows in Hugging Face's order."""
        from gguf import dequantize

        expert = EXPERT.search(name)
        data = tensor.data[int(expert[1])] if expert else tensor.data
        weights = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        if _without_ones(weights.shape) != _without_ones(form.shape):
            raise ValueError(f"{tensor.name} has the shape {tuple(weights.shape)} instead of {form.shape}")
        weights = weights.view(form.shape)
        if tensor.name.endswith(DECAYS):
            weights = torch.log(-weights)
        if self._is_interleaved(name):
            weights = half_a_head_apart(weights, self._sizes.head_dim)
        is_norm = weights.dim() == 1 and "linear_attn" not in name
        if self._sizes.family.norm_weight_plus_one and is_norm:
            weights = weights - 1
        return weights

    def write_text(self, folder: Path) -> None:
        """Write `config.json`, and the files of the tokenizer with its chat template."""
        tokenizer = self._vocabulary.tokenizer(strips_spaces=self._architecture_name == "phi3")
        tokenizer.chat_template = self._value("chat_template", of="tokenizer")
        tokenizer.save_pretrained(folder, legacy_format=False)
        generation = {name: self._value(f"sampling.{key}", of="general") for name, key in SAMPLING_KEYS.items()}
        replace(folder / "generation_config.json", json.dumps(generation, indent=1).encode())
        replace(folder / "config.json", json.dumps(self.config, indent=1).encode())


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes of the dimensions that a file must have: it may omit those of size 1."""
    return [size for size in shape if size != 1]


def _open(path: Path) -> Any:
    """Return the library's reader, with an error for reads beyond the end of the file."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) != int(count):
                raise ValueError("it is cut off")
            return values

    reader = Reader(path)
    if reader.byte_order == "S":
        raise ValueError("it is big-endian: take the little-endian file of this model, which is the usual one")
    return reader
