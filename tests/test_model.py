"""Slices, rotary positions and whole models compute what transformers computes."""
from dataclasses import replace

import gguf
import pytest
import torch
from torch import nn

from model import plain_layers, whole
from model.attention import attention
from model.cache import together
from model.llama import Experts, LlamaConfig, Slice, fill
from model.native.compiler import has_library
from model.native.linear import NativeProducts
from model.plain_layers import LayerNorm, RMSNorm
from model.rotary import Rotary, Turns, rotate
from model.sample import Sampler
from model.weights.unfold import Unfolded
from model.whole import NativeWhole, Whole, open_whole
from tests.checkpoints import edited_tensors, refused
from tests.saved import FORM, save_model
from tests.tiny import CONFIG, TINY, admit_text, random_tensor, weights

SIZES = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 80, "vocab_size": 61,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu",
         "attention_bias": False, "mlp_bias": False}


def test_attention_without_the_fused_kernel_is_the_same(monkeypatch):
    q, k, v = (torch.randn(heads, rows, 8, dtype=torch.float64)
               for heads, rows in ((6, 5), (2, 9), (2, 9)))
    mask = torch.zeros(5, 9, dtype=torch.float64).masked_fill_(torch.rand(5, 9) < 0.3, float("-inf"))
    mask[:, 0] = 0
    fused = attention(q, k, v, mask)
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    torch.testing.assert_close(attention(q, k, v, mask), fused)


def test_weights_must_fit_exactly():
    sizes = LlamaConfig.read(SIZES)
    part = Slice(sizes, 0, 1)
    good = {name: torch.zeros(p.shape) for name, p in part.named_parameters()}
    fill(part, good, torch.float32, "cpu")
    for bad, words in (({**good, "extra": torch.zeros(1)}, "unexpected"),
                       ({k: v for k, v in good.items() if "q_proj" not in k}, "missing"),
                       ({**good, "embed_tokens.weight": torch.zeros(60, 48)}, "shape")):
        with refused(words):
            fill(Slice(sizes, 0, 1), bad, torch.float32, "cpu")


# --- against transformers ---------------------------------------------------------------------------------------------

TEXT = [(7 * i * i + 3 * i) % CONFIG.vocab for i in range(40)]


def llama_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**FORM, "attn_implementation": "eager"})).double()
    tensors = {f"model.{name}": tensor for name, tensor in TINY.tensors.items()}
    model.load_state_dict({**tensors, "lm_head.weight": TINY.lm_head.weight})
    return model


@pytest.fixture(scope="module")
def reference():
    """What the LLaMA of transformers computes of a text with the weights of the tiny model of all tests."""
    return llama_of_transformers()(torch.tensor([TEXT]), output_attentions=True, output_hidden_states=True)


def test_the_tiny_model_of_all_tests_computes_what_transformers_computes(reference):
    torch.testing.assert_close(TINY.logits(TEXT), reference.logits[0], atol=1e-5, rtol=1e-6)


def test_the_tiny_model_attends_unevenly_in_all_layers(reference):
    """Else a layer without norms, rotary positions or scale would compute nearly the same."""
    for weights_1HTS in reference.attentions:
        assert weights_1HTS[0, :, 20:].max(-1).values.mean() > 0.25, "uniform weights are below 0.05"


def test_the_inputs_of_layers_are_those_of_transformers_and_the_last_output_is_not_normed(reference):
    cache = TINY.new_cache(len(TEXT))
    inner = dict.fromkeys((0, 2, 4))
    out = TINY.whole(torch.tensor(TEXT), admit_text(cache, len(TEXT)), cache, inner)
    for layer in (0, 2):
        torch.testing.assert_close(inner[layer], reference.hidden_states[layer][0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(out, reference.hidden_states[4][0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(torch.nn.functional.rms_norm(inner[4], (CONFIG.hidden,), None, CONFIG.eps), out)
    assert (inner[4] - out).abs().max() > 0.5


def test_a_slice_without_need_stops_before_its_next_layer():
    cache, calls = TINY.new_cache(8), []
    positions = admit_text(cache, 8)

    def still_needed():
        calls.append(len(calls))
        return len(calls) < 3

    assert TINY.whole(torch.tensor(TEXT[:8]), positions, cache, None, still_needed) is None
    assert calls == [0, 1, 2]


def test_only_the_first_slice_embeds_and_only_the_last_one_norms(reference):
    x, caches = torch.tensor(TEXT), [TINY.new_cache(len(TEXT), 2) for _ in range(2)]
    positions = [admit_text(cache, len(TEXT)) for cache in caches][0]
    first, last = TINY.slice(0, 2), TINY.slice(2, 4)
    middle = first(x, positions, together([caches[0]], [len(TEXT)]))
    torch.testing.assert_close(middle, reference.hidden_states[2][0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(last(middle, positions, caches[1]), reference.hidden_states[4][0], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("is_plus_one", [False, True])
def test_norms_without_the_fused_kernel_are_those_of_the_formula(monkeypatch, is_plus_one):
    norm = RMSNorm(6, 0.1, is_plus_one)
    fill(norm, {"weight": random_tensor(2, 6)}, torch.float64, "cpu")
    x_TD = random_tensor(3, 5, 6)
    expected = x_TD / (x_TD.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * (norm.weight + is_plus_one)
    torch.testing.assert_close(norm(x_TD), expected)
    monkeypatch.delattr(torch.nn.functional, "rms_norm")
    torch.testing.assert_close(norm(x_TD), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["LlamaRMSNorm", "GemmaRMSNorm", "LayerNorm"])
def test_norms_have_the_bits_of_transformers_in_every_type(monkeypatch, name, dtype):
    """Also where rows are not widened for their sums, as on a GPU, and where torch has no kernel for it."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x_TD, weight, bias = (random_tensor(seed, *shape).to(dtype) for seed, shape in enumerate(((5, 64), (64,), (64,))))
    if name == "LayerNorm":
        theirs, ours, tensors = nn.LayerNorm(64), LayerNorm(64, device="meta"), {"weight": weight, "bias": bias}
    else:
        theirs = {"LlamaRMSNorm": LlamaRMSNorm, "GemmaRMSNorm": GemmaRMSNorm}[name](64, eps=1e-5)
        ours, tensors = RMSNorm(64, 1e-5, name == "GemmaRMSNorm"), {"weight": weight}
    theirs.to(dtype).load_state_dict(tensors)
    fill(ours, tensors, dtype, "cpu")
    is_wide = dtype in (torch.float32, torch.float64)  # which transformers sums in float32

    monkeypatch.setattr(plain_layers, "for_sums", lambda x: x)
    for _ in range(2):
        got, expected = ours(x_TD), theirs(x_TD)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype), **({"atol": 1e-5, "rtol": 1e-5} if is_wide else {
            "atol": 0, "rtol": 0}))
        monkeypatch.delattr(torch.nn.functional, "rms_norm", raising=False)


@pytest.mark.parametrize("renorms", [True, False])
def test_the_weights_of_experts_are_computed_in_float32(renorms):
    experts = Experts(replace(CONFIG, experts=6, chosen=3, renorms_experts=renorms))
    fill(experts, weights(experts, 1), torch.bfloat16, "cpu")
    x_TD = random_tensor(3, 20, CONFIG.hidden).bfloat16()
    weight_TC, expert_TC = experts.route(x_TD)
    law_TX = experts.router(x_TD).double().softmax(-1)
    best_TC, expected_TC = law_TX.topk(3)
    if renorms:
        best_TC /= best_TC.sum(-1, keepdim=True)
    assert torch.equal(expert_TC, expected_TC) and weight_TC.dtype == torch.bfloat16
    assert torch.equal(weight_TC, best_TC.bfloat16())


# --- rotary positions -------------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [1.0, 1.3, 2, 3, 7, 60, 61, 9],
        "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = [("default", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3), ("yarn", YARN),
         ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}), ("yarn", {**YARN, "truncate": False}),
         ("yarn", {**YARN, "factor": 1.0}), ("yarn", {**YARN, "attention_factor": 1.7}),
         ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}), ("yarn", {**YARN, "mscale": 0.7}),
         ("yarn", {**YARN, "beta_fast": 4000.0, "beta_slow": 1.0}),
         ("yarn", {**YARN, "beta_fast": 8.0, "beta_slow": 3.0, "truncate": False}), ("yarn", {"factor": 4.0}),
         *(("yarn", {**YARN, "original_max_position_embeddings": length}) for length in (6, 4_000_000)),
         ("longrope", LONG), ("longrope", {**LONG, "factor": 1.0, "original_max_position_embeddings": 256}),
         ("longrope", {**LONG, "attention_factor": 1.3})]


@pytest.mark.parametrize("rope, scaling", ROPES, ids=range(len(ROPES)))
@pytest.mark.parametrize("theta", [10000.0, 33.0])
def test_rotary_tables_are_those_of_transformers(rope, scaling, theta):
    """The cosines and sines, of the first, of middle and of the last positions."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {**SIZES, "head_dim": 16, "num_attention_heads": 3, "rope_theta": theta, "max_position_embeddings": 256}
    rope_scaling = None if rope == "default" else {"rope_type": rope, **scaling}
    theirs = transformers.LlamaConfig(**fields, rope_scaling=rope_scaling)
    trained_length = scaling.get("original_max_position_embeddings")
    theirs.original_max_position_embeddings = trained_length
    table = LlamaRotaryEmbedding(theirs)
    position_T = torch.tensor([0, 1, 2, 30, 63, 64, 200, 255])
    cos_TE, sin_TE = (x[0] for x in table(torch.zeros(1), position_T[None]))

    outside = {"original_max_position_embeddings": trained_length} if rope == "longrope" else {}
    ours = Rotary(LlamaConfig.read({**fields, **outside, "rope_scaling": rope_scaling}).within(256).turns)
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-4), (torch.bfloat16, 0.04)):
        x_THE = random_tensor(4, 8, 3, 16).to(dtype)
        turned = rotate(x_THE, *ours.at(position_T, x_THE))
        halves = torch.cat((-x_THE[..., 8:], x_THE[..., :8]), -1)
        expected = x_THE * cos_TE[:, None] + halves * sin_TE[:, None]
        assert turned.dtype == dtype
        torch.testing.assert_close(turned, expected.to(dtype), atol=bound, rtol=0)


def test_only_the_first_dimensions_are_rotated_where_a_share_is():
    x_THE = random_tensor(4, 5, 3, 16)
    table = Rotary(Turns(16, 32, 100.0, share=0.75))
    position_T = torch.tensor([0, 1, 5, 9, 31])
    turned = rotate(x_THE, *table.at(position_T, x_THE))
    angle_TR = position_T[:, None] * 100.0 ** (-torch.arange(6) / 6.0)
    pairs = torch.complex(x_THE[..., :6], x_THE[..., 6:12]) * torch.polar(torch.ones(5, 1, 6), angle_TR[:, None])
    torch.testing.assert_close(turned[..., :6], pairs.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[..., 6:12], pairs.imag, atol=1e-5, rtol=0)
    assert torch.equal(turned[..., 12:], x_THE[..., 12:]) and torch.equal(turned[0], x_THE[0])


# --- whole models -----------------------------------------------------------------------------------------------------

@pytest.fixture
def source(tmp_path):
    save_model(tmp_path / "base")
    return Unfolded(tmp_path / "base")


def test_a_whole_model_writes_the_text_of_transformers_and_forgets_what_is_no_text(source, reference):
    ids = torch.tensor([TEXT])
    text = llama_of_transformers().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                            max_new_tokens=12, pad_token_id=0, eos_token_id=None)
    expected = text[0, len(TEXT):].tolist()
    model = Whole(source, torch.float64, "cpu")
    generated = model.generate(TEXT, model.cache(60), Sampler())
    assert [next(generated) for _ in range(12)] == expected

    cache = model.cache(50)
    model.logits(TEXT[:30], cache, 1)
    model.logits([5, 6, 7], cache, 1, is_text=False)
    cache.drop()
    got = model.logits(TEXT[30:], cache, 4)
    torch.testing.assert_close(got, reference.logits[0, -4:], atol=1e-5, rtol=1e-6)
    shorter = Whole(source, torch.float32, "cpu", context=50)
    assert (model.config.context, shorter.config.context) == (FORM["max_position_embeddings"], 50)
    assert shorter.lm_head.product.weight.dtype == torch.float32


def test_a_whole_model_is_quantized_to_the_blocks_that_are_asked_for(source):
    plain, rough = (Whole(source, torch.float32, "cpu", block_type) for block_type in ("none", "Q8_0"))
    weight, rounded_weight = (model.body.layers["1"].self_attn.o_proj.weight for model in (plain, rough))
    blocks = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(rounded_weight, torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)))
    assert torch.equal(rough.lm_head.product.weight, plain.lm_head.product.weight)


@pytest.mark.skipif(not has_library(), reason="no native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_product_in_c_has_the_numbers_of_weights_and_biases_of_every_type(dtype):
    shapes = (32, 64), (32,), (3, 64)
    weight, bias, x_TI = (random_tensor(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
    product = NativeProducts(1).linear(weight, bias)
    expected = x_TI.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(product(x_TI.float()).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(not has_library(), reason="no native kernels")
def test_a_model_is_opened_in_c_where_that_is_possible(source, reference, monkeypatch):
    model = open_whole(source, torch.float32, torch.device("cpu"))
    assert isinstance(model, NativeWhole)
    cache = model.cache(50)
    out = model.body(torch.tensor(TEXT), admit_text(cache, len(TEXT)), cache)
    # keys and values in 16 bits
    torch.testing.assert_close(model.lm_head(out), reference.logits[0].float(), atol=3e-3, rtol=1e-3)

    assert isinstance(open_whole(source, torch.float64, torch.device("meta")), Whole)
    monkeypatch.setattr(whole, "has_library", lambda: False)
    assert isinstance(open_whole(source, torch.float32, torch.device("cpu")), Whole)


def test_a_damaged_head_and_a_config_of_another_model_are_refused(tmp_path):
    save_model(tmp_path / "base")
    other = Unfolded(tmp_path / "base")
    other.config["vocab_size"] = 54
    with refused("has shape (53, 32) instead of (54, 32)"):
        Whole(other, torch.float32, "cpu")
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        with edited_tensors(tmp_path / "base") as tensors:
            tensors[name][7, 3] = float("nan")
        for make in (NativeWhole, lambda source: Whole(source, torch.float32, "cpu")) if has_library() else ():
            with refused(f"{name} in", "is not finite"):
                make(Unfolded(tmp_path / "base"))
        with edited_tensors(tmp_path / "base") as tensors:
            tensors[name][7, 3] = 0


def test_products_that_are_fused_share_the_memory_of_their_layers(source):
    layer = Whole(source, torch.float32, "cpu").body.layers["2"]
    for block, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
        fused_weight = block.fused_product.keywords["weight"]
        layer_weights = [getattr(block, name).weight for name in names]
        assert torch.equal(torch.cat(layer_weights), fused_weight)
        address = fused_weight.data_ptr()
        for layer_weight in layer_weights:
            assert layer_weight.data_ptr() == address
            address += layer_weight.numel() * layer_weight.element_size()
