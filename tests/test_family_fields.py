"""A family reads, refuses or ignores each field of a `config.json` as its class in `transformers` does.

Weights are drawn so that scores are of order one: with smaller ones every softmax is uniform, and windows, caps and
rotations would hardly matter. Texts are longer than the windows and than the trained length of scaled positions.
"""
import hashlib
import inspect
import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from config.presets import ROOT
from config.schema.families import FAMILIES, ROTATED, SIZES
from model.llama import LlamaConfig
from model.native.compiler import has_library
from model.native.layers import reason_against
from model.sample import Sampler
from model.weights.unfold import Unfolded
from model.whole import NativeWhole, Whole
from tests.checkpoints import refused
from tests.json_files import save_json
from tests.test_families import PROMPT, VOCAB, config_class

NUM_LAYERS, NUM_NEW, TRAINED_LENGTH = 4, 5, 40
FULL, SLIDING, DELTA = "full_attention", "sliding_attention", "linear_attention"
CLASS_NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mimo": "Qwen2", "opt": "OPT",
    "smollm3": "SmolLM3", "phi3": "Phi3", "olmo2": "Olmo2", "granite": "Granite", "glm": "Glm", "glm4": "Glm4",
    "ministral": "Ministral", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "lfm2": "Lfm2", "qwen3_next": "Qwen3Next",
    "olmo3": "Olmo3", "seed_oss": "SeedOss", "ernie4_5": "Ernie4_5"}  # of this transformers
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.3, 2.0], "long_factor": [1.0, 4.0, 9.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH}
LINEAR = {"type": "linear", "rope_type": "linear", "factor": 4.0}

VALUES = {  # of fields that are read: the value in the drawn config, and others
    "sliding_window": (25, [8, None]), "use_sliding_window": (True, [False]), "max_window_layers": (1, [3]),
    "layer_types": (None, [[SLIDING, FULL, FULL, SLIDING]]), "sliding_window_pattern": (2, [4]),
    "no_rope_layers": (None, [[1, 0, 1, 1]]), "no_rope_layer_interval": (3, [2]),
    "query_pre_attn_scalar": (20, [5]), "attn_logit_softcapping": (4.0, [1.0, None]),
    "final_logit_softcapping": (8.0, [3.0, None]), "rope_local_base_freq": (1000.0, [30.0]),
    "embedding_multiplier": (0.5, [3.0]), "residual_multiplier": (0.4, [1.3]), "attention_multiplier": (0.3, [0.1]),
    "logits_scaling": (0.5, [4.0]), "norm_topk_prob": (False, [True]), "num_experts_per_tok": (2, [3]),
    "attention_bias": (True, [False, None]), "partial_rotary_factor": (0.5, [1.0]),
    "rms_norm_eps": (1e-5, [0.5]), "rope_theta": (10000.0, [100.0]), "tie_word_embeddings": (False, [True]),
    "rope_scaling": (None, [LINEAR, YARN, {**YARN, "truncate": None, "beta_fast": 4.0}]),
    "num_key_value_heads": (2, [1]), "full_attn_idxs": ([1, 3], [[0, 3]]), "conv_L_cache": (3, [2]),
    "block_auto_adjust_ff_dim": (True, [False]), "block_ffn_dim_multiplier": (1.0, [1.5]),
    "block_multiple_of": (8, [10]), "block_ff_dim": (40, [60]), "norm_eps": (1e-5, [0.5]), "theta": (10000.0, [100.0]),
    "tie_embedding": (False, [True]), "full_attention_interval": (2, [3]), "linear_conv_kernel_dim": (4, [2]),
    "linear_key_head_dim": (8, [12]), "linear_value_head_dim": (12, [8]), "linear_num_key_heads": (2, [1]),
    "linear_num_value_heads": (4, [2]), "shared_expert_intermediate_size": (24, [16])}
SPECIAL = {  # families in which other values show more
    "phi3": {"rope_scaling": (LONGROPE, [None]), "original_max_position_embeddings": (TRAINED_LENGTH, [130]),
             "partial_rotary_factor": (0.5, [])},  # another one needs other factors
    "olmo2": {"rope_scaling": (None, [{"type": "linear", "factor": 4.0}])},
    "olmo3": {"sliding_window": (25, [8])},
    "ministral": {"sliding_window": (25, [8])}, "gemma2": {"sliding_window": (25, [8])},
    "gemma3_text": {"sliding_window": (25, [8])}, "gpt_oss": {"sliding_window": (25, [8])},
    "lfm2": {"layer_types": (None, [["conv", "conv", FULL, "conv"]]), "rms_norm_eps": (1e-5, []),
             "rope_theta": (10000.0, []), "tie_word_embeddings": (False, [])},  # which have other names there
    "qwen3_next": {"layer_types": (None, [[FULL, DELTA, DELTA, FULL]])}}
REFUSED_VALUES = {
    "hidden_act": "gelu", "hidden_activation": "silu", "attention_bias": True, "mlp_bias": True,
    "partial_rotary_factor": 0.25, "use_bidirectional_attention": True, "mlp_only_layers": [1],
    "decoder_sparse_step": 2, "activation_function": "gelu", "enable_bias": False,
    "layer_norm_elementwise_affine": False, "do_layer_norm_before": False, "_remove_final_layer_norm": True,
    "swiglu_limit": 1.0, "swiglu_alpha": 1.0}
READ_BY_TRANSFORMERS_5 = {"swiglu_limit", "swiglu_alpha", "use_bidirectional_attention"}
OTHERS = {  # fields that no family reads
    "pretraining_tp": 2, "attention_dropout": 0.5, "resid_pdrop": 0.5, "dropout": 0.5, "use_cache": False,
    "qkv_bias": True, "use_qk_norm": True, "clip_qkv": 0.1, "logit_scale": 3.0, "layer_norm_eps": 0.5,
    "rotary_pct": 0.25, "rope_interleave": True, "attention_chunk_size": 8, "routed_scaling_factor": 2.5,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 8,
    "first_k_dense_replace": 1, "router_jitter_noise": 0.5, "num_nextn_predict_layers": 1}


def values_of(model_type):
    """The values of the fields that a family reads, without sizes."""
    every_value = {**VALUES, **SPECIAL.get(model_type, {})}
    family = FAMILIES[model_type]
    return {field: values for field, values in every_value.items()
            if field in family.fields and field not in family.supported}


def drawn(model_type):
    """The `config.json` of a tiny model in which every option has a value."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4,
             "max_position_embeddings": 160, "intermediate_size": 40, "head_dim": 12, "num_local_experts": 4,
             "num_experts": 4, "moe_intermediate_size": 24, "ffn_dim": 64, "word_embed_proj_dim": 48}
    read_sizes = {field: size for field, size in sizes.items() if field in FAMILIES[model_type].fields}
    chosen = {field: value for field, (value, _) in values_of(model_type).items()}
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    architecture = FAMILIES[model_type].architecture
    return {"model_type": model_type, "architectures": [architecture], **read_sizes, **chosen, **no_tokens}


def drawn_weights(model):
    """Fill a model with weights that depend only on their names and shapes."""
    for name, parameter in model.named_parameters():
        digest = hashlib.md5(f"{name}{tuple(parameter.shape)}".encode()).digest()
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))
        is_bias = parameter.dim() == 1 or name.endswith(("_bias", "sinks"))
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif is_bias or "embed" in name:
            parameter.data = noise * (0.5 if is_bias else 1)
        else:
            num_inputs = parameter.shape[1]
            parameter.data = noise * 1.7 / num_inputs ** 0.5


class Compared:
    """The tiny model of a config in `transformers`, and in a folder for us."""

    @torch.no_grad()
    def __init__(self, config, folder):
        model_type = config["model_type"]
        class_name = CLASS_NAMES[model_type]
        their_config = config_class(class_name).from_dict(
            {**config, "model_type": "qwen2" if model_type == "mimo" else model_type})
        their_config._attn_implementation = "eager"
        self.model = getattr(transformers, f"{class_name}ForCausalLM")(their_config).eval()
        drawn_weights(self.model)
        self.model.tie_weights()
        self.scores = self.log_probabilities(PROMPT)

        folder.mkdir(exist_ok=True)
        tensors = {name: x.contiguous().clone() for name, x in self.model.state_dict().items()
                   if not (their_config.tie_word_embeddings and name == "lm_head.weight")}
        save_file(tensors, folder / "model.safetensors")
        save_json(folder / "config.json", config)
        self.folder = folder

    def log_probabilities(self, ids):
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    @torch.no_grad()
    def text(self):
        """Greedy text, each token with the whole text before it."""
        ids = list(PROMPT)
        for _ in range(NUM_NEW):
            ids.append(int(self.log_probabilities(ids)[-1].argmax()))
        return ids[len(PROMPT):]

    @torch.no_grad()
    def agrees(self):
        """Whether torch's layers, and those in C where they compute this family, give the same log-probabilities."""
        source = Unfolded(self.folder)
        context = len(PROMPT) + NUM_NEW if "rms_norm_eps" in self.model.config.to_dict() else None
        whole = Whole(source, torch.float32, "cpu", context=context)
        got = whole.logits(PROMPT, whole.cache(len(PROMPT)), len(PROMPT)).log_softmax(-1)
        torch.testing.assert_close(got, self.scores, atol=2e-3, rtol=1e-3)

        is_native = has_library() and not reason_against(whole.config, torch.float32, whole.device, "none")
        if is_native and whole.config.rope != "longrope":
            native = NativeWhole(source)
            token_ids, slots = torch.tensor(PROMPT), native.cache(len(PROMPT))
            positions = list(range(len(PROMPT)))
            slots.admit(positions, [position - 1 for position in positions], len(PROMPT))
            logits = native.lm_head(native.body(token_ids, torch.tensor(positions), slots))
            torch.testing.assert_close(logits.log_softmax(-1), self.scores, atol=2e-2, rtol=1e-2)
        return whole


def moves(compared, base):
    """Whether a change of the config changes what `transformers` computes."""
    return not torch.allclose(compared.scores, base.scores, atol=1e-3)


@pytest.mark.parametrize("model_type", CLASS_NAMES)
def test_a_field_that_is_read_is_read_as_by_transformers(model_type, tmp_path):
    config = drawn(model_type)
    base = Compared(config, tmp_path / "base")
    whole, text = base.agrees(), base.text()
    generated = whole.generate(PROMPT, whole.cache(len(PROMPT) + NUM_NEW), Sampler())
    assert [next(generated) for _ in range(NUM_NEW)] == text and len(set(text)) > 1

    for field, (_, other_values) in values_of(model_type).items():
        for value in other_values:
            changed = Compared({**config, field: value}, tmp_path / "changed")
            assert moves(changed, base), f"{field}={value!r} changes nothing, so the comparison proves nothing"
            changed.agrees()


@pytest.mark.parametrize("model_type", CLASS_NAMES)
def test_a_field_that_is_not_read_is_ignored_as_by_transformers(model_type, tmp_path):
    config, fields = drawn(model_type), FAMILIES[model_type].fields
    every_value = {**{field: other_values[0] for field, (_, other_values) in VALUES.items()}, **REFUSED_VALUES,
                   **OTHERS, "head_dim": 20, "moe_intermediate_size": 7, "num_experts": 3, "num_local_experts": 3}
    unread = {field: value for field, value in every_value.items() if field not in fields}
    base, changed = (Compared({**config, **more}, tmp_path / "model") for more in ({}, unread))

    assert torch.equal(changed.scores, base.scores)
    assert LlamaConfig.read({**config, **unread}) == LlamaConfig.read(config)


@pytest.mark.parametrize("model_type", CLASS_NAMES)
def test_a_value_is_refused_by_name_only_where_transformers_computes_something_else(model_type, tmp_path):
    config, supported = drawn(model_type), FAMILIES[model_type].supported
    base = Compared(config, tmp_path / "base")
    for field, supported_values in supported.items():
        first_value = supported_values[0]
        value = not first_value if isinstance(first_value, bool) else REFUSED_VALUES[field]
        with refused(f"{field}={value!r}"):
            LlamaConfig.read({**config, field: value})
        if field not in READ_BY_TRANSFORMERS_5:
            try:
                assert moves(Compared({**config, field: value}, tmp_path / "changed"), base), field
            except (RuntimeError, AttributeError):  # it cannot compute such a model either
                assert field in ("partial_rotary_factor", "layer_norm_elementwise_affine")


@pytest.mark.parametrize("model_type", CLASS_NAMES)
def test_an_omitted_field_has_the_default_of_its_class(model_type):
    their_class, defaults = config_class(CLASS_NAMES[model_type]), FAMILIES[model_type].defaults
    parameters = inspect.signature(their_class.__init__).parameters
    named = [field for field in defaults if field in parameters]
    assert {field: defaults[field] for field in named} == {field: parameters[field].default for field in named}

    theirs = their_class()
    num_heads, head_dim = theirs.num_attention_heads, theirs.hidden_size // theirs.num_attention_heads
    for field, usual_value in (("num_key_value_heads", num_heads), ("head_dim", head_dim), ("rope_theta", 10000.0)):
        if field in FAMILIES[model_type].fields:
            assert defaults.get(field, usual_value) == (getattr(theirs, field, None) or usual_value), field


# --- the page ---------------------------------------------------------------------------------------------------------


def rows_of_page():
    """The table in models.md: a row for the families that read the same."""
    families = {}
    of_every_family = {*SIZES, *ROTATED} - {"partial_rotary_factor"}
    for model_type, family in FAMILIES.items():
        read = sorted(family.fields.difference(of_every_family, family.supported))
        only = [f"{field}={json.dumps(values[0])}" for field, values in sorted(family.supported.items())]
        families.setdefault((" ".join(read) or "-", " ".join(only).replace('"', "")), []).append(f"`{model_type}`")
    return [f"| {', '.join(names)} | {read} | {only} |" for (read, only), names in families.items()]


def test_models_md_says_for_each_family_what_it_reads_and_refuses():
    assert "\n".join(rows_of_page()) in (ROOT / "docs" / "models.md").read_text()
