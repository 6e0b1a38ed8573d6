"""What a start imports, and that what it leaves out comes where it is needed."""
import os
import re
import subprocess
import sys

import pytest

from config import lean_torch
from tests.saved import ROOT, run_program

QUANTIZED = """
from config.lean_torch import import_left_out, make_lean
make_lean()
import sys, torch
print([name for name in ("torch._decomp", "torch.export._trace", "torch.nn.qat.modules") if name in sys.modules])
from model.weights.quant import library
from model.weights.quant_layers import probe
compilers = torch.compile, torch._disable_dynamo
probe("nf4", torch.float32, "cpu")
quantized, state = library().quantize_4bit(torch.arange(64.0), quant_type="nf4")
print(quantized.shape, float(library().dequantize_4bit(quantized, state).max()), "torch._decomp" in sys.modules)
print([name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor."))])
print(compilers == (torch.compile, torch._disable_dynamo))
print(torch.cond is torch._higher_order_ops.cond, torch.vmap(torch.sum)(torch.ones(2, 3)).tolist())
print(torch.masked.sum(torch.ones(2)).item())
"""


def test_a_run_imports_neither_transformers_nor_rules_for_shapes():
    words = "toy prompt=Hi template=vicuna max_new_tokens=2 link=threads".split()  # in one process, split or not
    done = run_program(sys.executable, "-X", "importtime", "-m", "scripts.generate", *words)
    assert done.returncode == 0, done.stderr
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"torch", "tokenizers", "model.tokenizer"} <= names
    left_out = {"torch._decomp", "torch.export", "torch.nn.qat", "torch.masked"}
    assert not left_out.union(("transformers", "huggingface_hub")) & names


def test_rules_for_shapes_come_with_the_library_that_needs_them_and_the_compiler_of_torch_does_not():
    pytest.importorskip("bitsandbytes")
    done = run_program(sys.executable, "-c", QUANTIZED)
    assert done.stdout.splitlines() == [
        "[]", "torch.Size([32, 1]) 63.0 True", "[]", "True", "True [3.0, 3.0]", "2.0"], done.stderr


LEAN = """
from config.lean_torch import make_lean
make_lean()
import sys, torch
from launch.timing import measure
from model.weights.onednn import _tested_unit
linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
print(_tested_unit(linear, linear.weight) > 0, "torch._decomp" in sys.modules)
sizes = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5}
request = {"config": sizes, "layers": 1, "dtype": "float32", "device": "cpu", "quant": "none", "threads": 1,
           "context": 256, "kernel": "torch", "seconds": 0.0}
print(len(measure(request)["passes"]) > 0)
"""


def test_without_them_a_board_is_timed_and_packed_products_are_tried():
    done = run_program(sys.executable, "-c", LEAN)
    assert done.stdout == "True False\nTrue\n", done.stderr


def test_torch_is_known_as_required_and_of_another_version_only_rules_for_shapes_are_left_out():
    required, = re.findall(r"^torch==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    names, cpu_names = lean_torch.left_out_modules(required), lean_torch.left_out_modules(f"{required}+cpu")
    assert names == (*lean_torch.LEFT_OUT, lean_torch.SHAPE_RULES) and cpu_names == (*names, lean_torch.GPU_KERNELS)
    assert lean_torch.left_out_modules("2.3.1+cpu") == (lean_torch.SHAPE_RULES,)


def test_a_table_that_cannot_be_written_is_a_failure(tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question_id": 1, "turns": ["Hi"]}\n')
    words = f"toy question_file={tmp_path / 'questions.jsonl'} max_new_tokens=1 link=threads".split()
    with open("/dev/full", "w", encoding="ascii") as full:
        done = run_program(sys.executable, "-m", "scripts.generate", *words, capture_output=False, stdout=full,
                           stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert done.returncode == 2 and "No space left on device" in done.stderr
