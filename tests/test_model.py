"""Slices compute what transformers' LLaMA computes."""
import torch

from model.attention import attention
from model.llama import LlamaConfig, Slice, fill
from tests.checkpoints import refused

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
