"""Slices compute what transformers' LLaMA computes."""
from __future__ import annotations

import pytest
import torch

from model.cache import attention
from model.llama import LlamaConfig, Slice, fill

SIZES = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 80, "vocab_size": 61,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu",
         "attention_bias": False, "mlp_bias": False}


def reference(**changes):
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = TheirConfig(**{**SIZES, **changes}, initializer_range=0.3)
    return LlamaForCausalLM(config).eval(), LlamaConfig.read(config.to_dict())


def slices(model, sizes, bounds):
    tensors = {name[6:]: x
               for name, x in model.state_dict().items() if name.startswith("model.")}
    parts = []
    for first, last in zip(bounds, bounds[1:]):
        part = Slice(sizes, first, last)
        fill(part, {name: tensors[name] for name, _ in part.named_parameters()}, torch.float32, "cpu")
        parts.append((part, sizes.cache(last - first, 64, tensors["norm.weight"])))
    return parts


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("bounds", [[0, 4],
                                    [0, 1, 4], [0, 1, 2, 3, 4]])
def test_hidden_states_equal_those_of_transformers_in_any_split(kv_heads, bounds):
    model, sizes = reference(num_key_value_heads=kv_heads)
    ids = torch.randint(0, 61, (20,), generator=torch.Generator().manual_seed(1))
    theirs = model.model(ids[None]).last_hidden_state[0]
    x, start = ids, 0
    parts, outs = slices(model, sizes, bounds), []
    for chunk in (7, 1, 12):  # as text comes: in chunks
        nodes = list(range(start, start + chunk))
        x = ids[start:start + chunk]
        for part, cache in parts:
            cache.admit(nodes, [max(0, node - 1) for node in nodes], text=chunk)
            x = part(x, torch.tensor(nodes), cache)
        outs.append(x)
        start += chunk
    torch.testing.assert_close(torch.cat(outs), theirs, atol=1e-4, rtol=1e-4)


def test_a_branch_is_computed_as_if_it_were_the_text():
    model, sizes = reference(num_key_value_heads=2)
    (part, cache), = slices(model, sizes, [0, 4])
    cache.admit([0, 1, 2], [0, 0, 1], text=3)
    part(torch.tensor([5, 6, 7]),
         torch.tensor([0, 1, 2]), cache)
    # two branches from node 2: 3-5 and 4-6, their rows mixed
    cache.admit([3, 4, 5, 6], [2, 2, 3, 4], text=0)
    out = part(torch.tensor([8, 9, 10, 11]),
               torch.tensor([3, 3, 4, 4]), cache)
    for row, text in ((2, [5, 6, 7, 8, 10]),
                      (3, [5, 6, 7, 9, 11])):
        theirs = model.model(torch.tensor([text])).last_hidden_state[0, -1]
        torch.testing.assert_close(out[row], theirs, atol=1e-4, rtol=1e-4)


def test_attention_without_the_fused_kernel_is_the_same(monkeypatch):
    q, k, v = (torch.randn(heads, rows, 8, dtype=torch.float64)
               for heads, rows in ((6, 5), (2, 9), (2, 9)))
    mask = torch.zeros(5, 9, dtype=torch.float64).masked_fill_(torch.rand(5, 9) < 0.3, float("-inf"))
    mask[:, 0] = 0
    fused = attention(q, k, v, mask)
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    torch.testing.assert_close(attention(q, k, v, mask), fused)


@pytest.mark.parametrize("field, value", [("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
                                          ("hidden_act", "gelu"), ("attention_bias", True)])
def test_what_would_be_computed_wrongly_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        LlamaConfig.read({**SIZES, field: value})


def test_weights_must_fit_exactly():
    sizes = LlamaConfig.read(SIZES)
    part = Slice(sizes, 0, 1)
    good = {name: torch.zeros(p.shape) for name, p in part.named_parameters()}
    fill(part, good, torch.float32, "cpu")
    for bad, words in (({**good, "extra": torch.zeros(1)}, "unexpected"),
                       ({k: v for k, v in good.items() if "q_proj" not in k}, "missing"),
                       ({**good, "embed_tokens.weight": torch.zeros(60, 48)}, "shape")):
        with pytest.raises(ValueError, match=words):
            fill(Slice(sizes, 0, 1), bad, torch.float32, "cpu")
