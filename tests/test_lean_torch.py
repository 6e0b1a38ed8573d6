"""What a start imports, and that what it leaves out comes where it is needed."""
import sys

import pytest

from tests.saved import run_program

QUANTIZED = """
from config.lean_torch import import_shape_rules, omit_shape_rules
omit_shape_rules()
import sys, torch
print("torch._decomp" in sys.modules)
from model.weights.quant import library
quantized, state = library().quantize_4bit(torch.arange(64.0), quant_type="nf4")
print(quantized.shape, float(library().dequantize_4bit(quantized, state).max()), "torch._decomp" in sys.modules)
"""


def test_a_run_imports_neither_transformers_nor_rules_for_shapes():
    words = "toy prompt=Hi template=vicuna max_new_tokens=2".split()
    done = run_program(sys.executable, "-X", "importtime", "-m", "scripts.generate", *words)
    assert done.returncode == 0, done.stderr
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"torch", "tokenizers", "model.tokenizer"} <= names
    assert not {"transformers", "huggingface_hub", "torch._decomp"} & names


def test_rules_for_shapes_come_with_the_library_that_needs_them():
    pytest.importorskip("bitsandbytes")
    done = run_program(sys.executable, "-c", QUANTIZED)
    assert done.stdout == "False\ntorch.Size([32, 1]) 63.0 True\n", done.stderr
