"""Published heads: supported fields of their config.json, and errors for heads that are other networks."""
import re

import pytest
import torch
from torch import nn

from config.run_config import RunConfig
from config.schema.heads import LAYERS, head_problems, read_dialect
from launch.drafts import build_draft
from launch.spec import RankSpec
from model.drafts.draft import NoDraft
from model.drafts.eagle import Eagle, Fit
from model.drafts.head_files import fit_head, load_head
from model.drafts.heads import Eagle3Head, EagleHead
from model.drafts.network import ModelDraft
from model.llama import LlamaConfig
from model.sample import Sampler
from model.weights.checkpoint import Checkpoint
from tests.checkpoints import refused, save_checkpoint, split_quietly, tensors_of
from tests.saved import PROMPT, answer_of, ranks_of, save_model
from tests.tiny import CAPACITY, DEEP, admit_text, pipeline, random_tensor, weights, write

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 53, "rms_norm_eps": 1e-6,
         "hidden_act": "silu", "max_position_embeddings": 256, "num_hidden_layers": 1, "model_type": "llama"}
BASE = {**SIZES, "num_hidden_layers": 24, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}
INNER, OUTPUTS = [2, 12, 21], [1, 11, 20]  # of a model of 24 layers
ORIGINAL = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
            "transformers_version": "4.28.1"}
FORGE = {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 8, "initializer_range": 0.02,
         "max_window_layers": 36, "num_key_value_heads": 2, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
         "transformers_version": "4.51.0", "use_sliding_window": False}
PUBLISHED = {  # name: whether it is of EAGLE-3, and its fields beside the sizes
    "vicuna": (False, ORIGINAL),
    "llama 3": (False, {**ORIGINAL, "num_key_value_heads": 2, "rope_theta": 500000.0, "bias": False, "mlp_bias": False,
                        "attention_bias": False}),
    "qwen 2": (False, {**ORIGINAL, "num_key_value_heads": 2, "qkv_bias": False, "use_sliding_window": False,
                       "sliding_window": 131072, "max_window_layers": 28, "_name_or_path": "elsewhere"}),
    "llama 3.1": (True, {**ORIGINAL, "num_key_value_heads": 2, "draft_vocab_size": 53}),
    "llama 3.3": (True, {**ORIGINAL, "num_key_value_heads": 2, "draft_vocab_size": 53, "target_hidden_size": 32}),
    "vicuna 1.3": (True, {**ORIGINAL, "num_hidden_layers": 40, "draft_vocab_size": 53}),  # the target's layers
    "qwen 3": (True, {**FORGE, "draft_vocab_size": 53}),
    "transformers 5": (True, {**{key: FORGE[key] for key in FORGE if key not in ("rope_theta", "torch_dtype")},
                              "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                              "layer_types": ["full_attention"]}),
    "another's, with its options": (True, {**FORGE, "pretraining_tp": 1, "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True, "next_layer_regular": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}}),
    "layers left open": (True, {**FORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}),
}


def save(folder, third, config):
    """Write a head that fits BASE, with these fields in its config.json."""
    sizes = LlamaConfig.read({**SIZES, "num_key_value_heads": config.get("num_key_value_heads")})
    head = Eagle3Head(sizes, 32, 53, read_dialect({}, 24)) if third else EagleHead(sizes, bias=False)
    return Checkpoint(save_checkpoint(folder, {**SIZES, **config}, weights(head, seed=1)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_as_they_are_published_are_taken(tmp_path, name):
    third, config = PUBLISHED[name]
    assert isinstance(fit_head(save(tmp_path / "head", third, config), BASE), Eagle3Head if third else EagleHead)


@pytest.mark.parametrize("third", [False, True], ids=["eagle", "eagle3"])
def test_a_head_drifts_unless_it_was_taught_on_its_own_outputs(tmp_path, third):
    for i, (passes, drifts) in enumerate([({}, True),
                                          ({"unrolled_passes": None}, True), ({"unrolled_passes": 3}, True),
                                          ({"unrolled_passes": 4}, False), ({"unrolled_passes": 8}, False)]):
        head = fit_head(save(tmp_path / str(i), third, {**ORIGINAL, **passes}), BASE).to_empty(device="cpu")
        assert Eagle(head, nn.Identity(), 8).drifts == (drifts and not third)
    assert (ModelDraft.drifts, NoDraft.drifts) == (False, False)
    with refused("unrolled_passes='8', which should be a whole number from 1"):
        save(tmp_path / "text", third, {**ORIGINAL, "unrolled_passes": "8"})


def test_what_transformers_writes_of_a_llama_in_full_is_taken():
    from transformers import LlamaConfig as Theirs
    from transformers import Qwen2Config

    for kind in (Theirs, Qwen2Config):
        config = kind(**{**SIZES, "num_key_value_heads": 2}).to_dict()
        assert list(head_problems(config, False, 24, 256)) == []


OTHER = {  # what is reported: of EAGLE-3 or not, and the fields that say so
    "norm_before_residual=True, which is not supported (only False); take another head": (
        False, {"norm_before_residual": True}),
    "norm_output='yes', which is not supported (only true or false)": (True, {"norm_output": "yes"}),
    "lacks fc_norm.0.weight": (True, {"fc_norm": True}),
    "num_aux_hidden_states=4, which is not supported (only 3, one for each listed layer)": (
        True, {"num_aux_hidden_states": 4}),
    "aux_layer_ids_are='both', which is not supported (only inputs or outputs)": (True, {"aux_layer_ids_are": "both"}),
    "logit_scale=0.0625, which is not supported (only 1)": (True, {"logit_scale": 0.0625}),
    "num_hidden_layers=2, which is not supported (only 1)": (False, {"num_hidden_layers": 2}),
    "use_aux_hidden_state=False, which is not supported (only True)": (True, {"use_aux_hidden_state": False}),
    "use_last_layernorm=True, which is not supported (only False)": (False, {"use_last_layernorm": True}),
    "layer_types=['sliding_attention'], which": (True, {"layer_types": ["sliding_attention"]}),
    "sliding_window=255, which is not supported (only null, use_sliding_window=false or at least 256)": (
        True, {"sliding_window": 255, "use_sliding_window": True}),
    "eagle_aux_hidden_state_layer_ids=[1, 21, 11], which is not supported (only two or more layers in rising order)": (
        True, {"eagle_aux_hidden_state_layer_ids": [1, 21, 11]}),
    "reads the inputs of layers [4, 14, 25], but the model has 24; take the head for this model": (
        True, {"aux_hidden_state_layer_ids": [4, 14, 25], "aux_layer_ids_are": "inputs"}),
    "eagle_aux_hidden_state_layer_ids, which only an EAGLE-3 head has": (
        False, {"eagle_aux_hidden_state_layer_ids": INNER}),
    "eagle_config=[1], which should be an object": (True, {"eagle_config": [1]}),
    "has the unknown key 'residual_multiplier', which may change what the head computes; if it does not, "
    "delete it there": (True, {"residual_multiplier": 0.5}),
    "draft_vocab_size=-3, which should be a whole number from 1": (True, {"draft_vocab_size": -3}),
    "head: config.json says hidden_act='gelu'": (True, {"hidden_act": "gelu"}),
    "speculators_model_type='mlp', which is not supported (only 'eagle3')": (True, {"speculators_model_type": "mlp"}),
    "was trained for 'a/Qwen3-8B', a 'Qwen3ForCausalLM', but the model is a LlamaForCausalLM": (True, {
        "speculators_config": {"verifier": {"name_or_path": "a/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}}}),
    "config.json says hidden_size='wide', which should be a whole number": (
        True, {"transformer_layer_config": {"hidden_size": "wide"}, "hidden_size": None}),
}


@pytest.mark.parametrize("sentence", OTHER)
def test_a_head_that_describes_another_network_is_refused_by_name(tmp_path, sentence):
    third, config = OTHER[sentence]
    with refused(sentence):
        fit_head(save(tmp_path / "head", third, config), BASE)


def test_a_window_that_holds_the_whole_context_is_plain_attention(tmp_path):
    fit_head(save(tmp_path / "head", True, {"sliding_window": 256}), BASE)


@pytest.mark.parametrize("strategy", ["serial", "continuous"])
def test_a_head_that_foresees_next_to_nothing_is_noticed_once(strategy):
    said = []
    made = DEEP.eagle()
    draft = Eagle(made.network, lambda out: -made.lm_head(out),
                  CAPACITY, Fit("HEAD", said.append))
    with pipeline(DEEP, 2, strategy, draft) as decoder:
        for _ in range(2):
            assert write(decoder, PROMPT, 60) == DEEP.text(PROMPT, 60, Sampler())
    [sentence] = said
    assert re.match(r"the draft head in HEAD foresaw [0-3] of the first 32 tokens: it was probably trained for another",
                    sentence)


def test_a_head_that_is_right_now_and_then_is_no_stranger():
    said = []
    fit = Fit("HEAD", said.append)
    for number in range(40):
        fit.count(7, 7 if number % 8 == 0 else 8)
    assert said == [] and (fit.num_guesses, fit.num_correct) == (40, 5)


# Dialects of EAGLE-3: a tiny head in each form, compared with a plain implementation


SPEC = {"speculators_model_type": "eagle3", "speculators_version": "0.5.0", "architectures": ["Eagle3Speculator"],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b",
                                                                   "architectures": ["LlamaForCausalLM"]}}}
DIALECTS = {  # name: fields, the prefix of the first layer, whether the sizes are nested, and the layers that are read
    "as the authors": ({}, "midlayer.", False, INNER),
    "layers.0, other layers as outputs": ({LAYERS[0]: [3, 13, 22]},
                                          "layers.0.", False, [4, 14, 23]),
    "under model.": ({LAYERS[1]: [0, 7]}, "model.layers.0.", False, [1, 8]),
    "inputs, by a key": ({LAYERS[0]: [0, 7], "aux_layer_ids_are": "inputs"},
                         "midlayer.", False, [0, 7]),
    "nested, up to the last layer": ({"eagle_config": {LAYERS[0]: [4, 12, 18, 24], "norm_before_fc": True,
                                                       "num_aux_hidden_states": 4}}, "midlayer.", False,
                                     [4, 12, 18, 24]),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, "midlayer.", False, INNER),
    "truncated_vocab_size": ({"truncated_vocab_size": 40}, "midlayer.", False, INNER),
    "three layers": ({"num_hidden_layers": 3, "norm_before_residual": True}, "layers.0.", False, INNER),
    "speculators": ({**SPEC, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
                     LAYERS[0]: [3, 13, 22], "embed_requires_grad": False},
                    "layers.0.", True, [3, 13, 22]),
}


def publish(folder, name):
    """Return a random head of one layer or more in this dialect."""
    fields, first, nests, inner = DIALECTS[name]
    config = {**SIZES, "num_key_value_heads": 2, **fields}
    dialect = read_dialect(config, 24)
    vocab = config.get("truncated_vocab_size") or 53
    head = Eagle3Head(LlamaConfig.read(config), 32, vocab, dialect)
    outer = first[:-len("layers.0.")] if first.startswith("model.") else ""
    tensors = {}
    for key, x in weights(head, seed=7).items():
        if x.dim() == 1:
            x = torch.linspace(1, 1.1, len(x), dtype=x.dtype)
        tensors[key.replace("midlayer.", first) if key.startswith("midlayer.") else outer + key] = x
    if vocab < 53:
        shift = 53 - vocab
        tensors.update(d2t=torch.full((vocab,), shift), t2d=torch.arange(53) >= shift)
    if nests:
        config = {**fields, "transformer_layer_config": {**SIZES, "num_key_value_heads": 2}, "draft_vocab_size": 53}
    source = Checkpoint(save_checkpoint(folder, config, tensors))

    assert read_dialect(source.config, 24).inner == tuple(inner)
    return source


def rms(x, weight):
    mean = x.pow(2).mean(-1, keepdim=True)
    return weight * x / (mean + 1e-6).sqrt()


def turned(x, positions):
    """Return heads `[H, T, 8]` at rotary positions."""
    waves = 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angle = torch.cat([positions[:, None] / waves] * 2, -1)
    cos, sin = angle.cos().double(), angle.sin().double()
    swapped = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * cos + swapped * sin


def plain_layer(t, prefix, read, x):
    """Compute a decoder layer: causal attention of all rows `read`, and the feed-forward, added to `x`."""
    rows = len(read)
    q, k, v = (read @ t[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = ([y.view(rows, -1, 8).transpose(0, 1)]
               for y in (q, k, v))
    places = torch.arange(rows, dtype=torch.float32)
    k, v = turned(*k, places).repeat_interleave(2, 0), v[0].repeat_interleave(2, 0)
    later = torch.full((rows, rows), float("-inf")).triu(1)
    seen = turned(*q, places) @ k.transpose(1, 2) / 8 ** 0.5 + later
    heads = (seen.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x = x + heads @ t[f"{prefix}self_attn.o_proj.weight"].T
    y = rms(x, t[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (y @ t[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def plain_head(t, fields, first, inner, tokens, own):
    """Return the head's outputs for all `tokens`, of which the last `own` are fed with its outputs, and its logits."""
    on = {**fields, **fields.get("eagle_config", {})}.get
    if on("norm_before_fc"):
        inner = rms(inner, t["input_norm.weight"])
    if on("fc_norm"):
        parts = enumerate(inner.split(32, -1))
        inner = torch.cat([rms(x, t[f"fc_norm.{i}.weight"]) for i, x in parts], -1)
    feature = inner @ t["fc.weight"].T
    for _ in range(own + 1):
        x = t["embed_tokens.weight"][tokens[:len(feature)]]
        normed = rms(feature, t[f"{first}hidden_norm.weight"])
        both = torch.cat((rms(x, t[f"{first}input_layernorm.weight"]), normed), -1)
        x = plain_layer(t, first, both, normed if on("norm_before_residual") else feature)
        for i in range(1, on("num_hidden_layers", 1)):
            x = plain_layer(t, f"layers.{i}.", rms(x, t[f"layers.{i}.input_layernorm.weight"]), x)
        normed = rms(x, t["norm.weight"])
        out = normed if on("norm_output") else x
        feature = torch.cat((feature, out[-1:]))
    return out, normed @ t["lm_head.weight"].T


@pytest.mark.parametrize("name", DIALECTS)
def test_a_head_of_each_dialect_computes_what_its_dialect_says(tmp_path, name):
    source = publish(tmp_path / "head", name)
    fields, first, _, inner_layers = DIALECTS[name]
    head = load_head(source, BASE, None, torch.float64, "cpu")
    assert head.inner == tuple(inner_layers)
    tokens = torch.tensor(PROMPT[:6])
    inner = random_tensor(1, 4, 32 * len(inner_layers))
    cache = head.config.cache(head.config.layers, 8, head.fc.weight)
    made = [head(tokens[:4], inner, admit_text(cache, 4), cache)]
    for node in (4, 5):
        cache.admit([node], [node - 1], 0)
        position = torch.tensor([node])
        made.append(head(tokens[position], made[-1][-1:], position, cache))
    t = {key.replace("model.", ""): x for key, x in tensors_of(source).items()}
    first = first.replace("model.", "")
    out, logits = plain_head(t, fields, first, inner, tokens, own=2)
    made = torch.cat(made)
    torch.testing.assert_close(made, out, atol=1e-6, rtol=1e-6)  # rotary tables are float32 in both
    torch.testing.assert_close(head.logits(made), logits, atol=1e-6, rtol=1e-6)

    assert (head.shift is not None) == (len(logits[0]) < 53)


def test_a_split_passes_on_the_layers_that_its_head_reads_and_refuses_a_head_that_reads_others(tmp_path):
    save_model(tmp_path / "base", DEEP)
    for name, ids in (("near", [1, 4]), ("far", [0, 3, 8])):
        config = {**SIZES, "num_key_value_heads": 2, LAYERS[0]: ids, "aux_layer_ids_are": "inputs"}
        head = Eagle3Head(LlamaConfig.read(config), 32, 53, read_dialect(config, 8))
        save_checkpoint(tmp_path / name, config, weights(head, seed=3))
        split_quietly(tmp_path / "base", tmp_path / f"to {name}", "0+3+5", tmp_path / name)
    parts = ranks_of(tmp_path / "to far")
    assert [part.inner for part in parts] == [(0, 3, 8)] * 3
    words = (f"model_dir={tmp_path / 'to far'}", "prompt_ids=5,17,40,3", "max_new_tokens=20", "ignore_eos=true",
             "dtype=float64")
    plain, drafted = (answer_of(tmp_path, *words, f"pipeline_type={method}") for method in ("ar", "continuous"))

    assert plain["token_ids"] == drafted["token_ids"]
    config = RunConfig(model_dir=str(tmp_path / "to far"), dtype="float64")
    spec = RankSpec(config, parts[0], str(tmp_path / "near"))
    with refused("reads layers [1, 4], but the stages of this split pass on [0, 3, 8]: split the model again with"):
        build_draft(spec, None)
