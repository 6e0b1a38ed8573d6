"""The native kernels: a row has one set of bits, and all methods write one text; `tests/test_native_values.py` compares
the values of rows with right ones.

With sanitizers, which end the tests at an access beyond memory or at undefined behaviour:
CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all" ASAN_OPTIONS=detect_leaks=0 \
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    .venv/bin/python -m pytest -n 0 tests/test_native.py
"""
import ctypes
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from config.failure import CUT_FILE
from config.presets import ROOT
from config.profiles import PROFILES
from config.schema.families import FAMILIES
from launch.run import run
from launch.timing import random_weights
from model.drafts.mixture import Mixture
from model.drafts.suffix import Suffix
from model.llama import LlamaConfig, Scales, Slice
from model.native import compiler, packing, structures
from model.native.compiler import levels, library, private_folder
from model.native.layers import NativeSlice, reason_against
from model.native.linear import NativeProducts
from model.sample import Sampler
from model.weights.blocks import QUANTIZERS
from model.weights.blocks import quantize as to_blocks
from model.weights.quant import BLOCKS, LINEAR_WEIGHT, can_be_quantized
from pipeline.trace import OFF
from scripts import generate
from sim.clock import VirtualClock
from sim.cluster import Cluster
from sim.paths import Paths
from sim.stages import Work
from tests.checkpoints import refused
from tests.same_rows import LENGTH, alone, chain, in_trees
from tests.saved import PROMPT, answer_of, run_program
from tests.tiny import SPECULATIVE, Oracle, Tiny, admit_text, pipeline, write

try:
    library()
except ValueError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)

SIZES = LlamaConfig(hidden=104, layers=2, heads=6, kv_heads=2, head_dim=24, intermediate=200, vocab=50, context=256,
                    eps=1e-6, theta=1e4)  # no size is a multiple of a group or of a block
FAMILY = {
    "llama": SIZES,
    "qwen2": replace(SIZES, family=FAMILIES["qwen2"]),
    "qwen3": replace(SIZES, family=FAMILIES["qwen3"], kv_heads=6, head_dim=72),
    "ministral": replace(SIZES, windows=(16, 0)),
    "phi3": replace(SIZES, rotated_share=0.75, head_dim=16),
    "gemma2": replace(SIZES, family=FAMILIES["gemma2"], windows=(16, 0), scales=Scales(10.2, scores=0.2, score_cap=5)),
    "gemma3": replace(SIZES, family=FAMILIES["gemma3_text"], windows=(16, 0), local_theta=1e3),
    "granite": replace(SIZES, family=FAMILIES["granite"], scales=Scales(12.0, residual=0.22, scores=0.05)),
    "smollm3": replace(SIZES, skips_rope=(True, False)),
}
WHOLE_GROUPS = {"hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 24, "intermediate": 160}  # for weights in blocks
KINDS = ("none", *QUANTIZERS)
of_each_kind = pytest.mark.parametrize("kind", KINDS)
LEVELS = {level.name: level for level in levels()}


def sizes_of(family, kind="none"):
    return FAMILY[family] if kind == "none" else replace(FAMILY[family], **WHOLE_GROUPS)


@lru_cache(maxsize=None)
def plain_tensors(family, kind):
    """Random weights by name."""
    sizes, made = sizes_of(family, kind), {}
    for name, tensor in random_weights(Slice(sizes, 0, sizes.layers)).items():
        if tensor.dim() == 1:
            tensor = tensor + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))
        made[name] = tensor
    return made


@lru_cache(maxsize=None)
def tensors_of(family, kind="none"):
    """The same weights, in blocks."""
    return {name: quantized(name, x, kind) for name, x in plain_tensors(family, kind).items()}


def quantized(name, tensor, kind):
    is_quantized = kind != "none" and LINEAR_WEIGHT.search(name) and can_be_quantized(kind, tensor.shape)
    return to_blocks(kind, tensor) if is_quantized else tensor


class Model:
    """Native layers and a cache; `read` gives the hidden states of rows."""

    def __init__(self, family, kind="none", code_type=None, level=None, threads=1):
        self.sizes = sizes_of(family, kind)
        body, windows = Slice(self.sizes, 0, self.sizes.layers), self.sizes.windows
        self.body = NativeSlice(body, tensors_of(family, kind), threads, windows, level)
        self.cache = self.new_cache(code_type)

    def new_cache(self, code_type=None):
        return self.sizes.cache(self.sizes.layers, 256, torch.empty(0), self.sizes.windows, code_type)

    def read(self, rows, text, cache=None):
        """Read rows of node, parent, position and token, of which the first `text` are settled."""
        cache = cache or self.cache
        nodes, parents, positions, tokens = zip(*rows)
        cache.admit(nodes, parents, text)
        return self.body(torch.tensor(tokens), torch.tensor(positions), cache)


TEXT = [random.Random(1).randrange(50) for _ in range(LENGTH)]


@pytest.mark.parametrize("family, kind, code_type", [
    *((family, "none", None) for family in FAMILY),
    ("llama", "none", torch.int8), ("llama", "none", torch.int16), ("ministral", "Q4_1", torch.int8),
    ("ministral", "Q4_1", torch.int16), ("qwen2", "Q8_0", None), ("qwen3", "Q8_0", torch.int16),
    ("qwen3", "Q4_1", None)])
def test_a_row_has_the_same_bits_alone_in_trees_and_by_every_instruction_set(family, kind, code_type):
    wanted = alone(Model(family, kind, code_type), TEXT)
    for level in LEVELS.values():
        for threads in (1, 3):
            model = Model(family, kind, code_type, level, threads)
            assert torch.equal(in_trees(model, TEXT, random.Random(threads), 50), wanted), (level.name, threads)


@pytest.mark.parametrize("level", LEVELS)
@of_each_kind
def test_a_row_has_the_same_bits_beside_any_number_of_others(kind, level):
    model = Model("llama", kind, level=LEVELS[level])
    prompt = chain(TEXT[:21])
    guesses = [(100 + i, 20, 21, i % 50) for i in range(130)]
    wanted = None
    for rows in (130, *range(1, 20), 31, 32, 33, 63, 64, 65, 127, 129):
        model.cache.clear()
        model.read(prompt, len(prompt))
        made = model.read(guesses[:rows], 0)
        wanted = made if wanted is None else wanted
        assert torch.equal(made, wanted[:rows]), rows


def test_the_order_of_the_slots_changes_nothing():
    """The same path in a cache where other rows came before, between and behind, and were partly dropped."""
    model, rng = Model("llama"), random.Random(3)
    path = [(200 + i, 199 + i if i else 20, 21 + i, i) for i in range(9)]
    orders = []
    for trial in range(8):
        cache = model.new_cache()
        model.read(chain(TEXT[:21]), 21, cache)
        others = [(300 + i, 20, 21, 7 * i % 50) for i in range(12)]
        made = []
        for row in path:
            noise = [others.pop() for _ in range(rng.randrange(2)) if others] if trial else []
            made.append(model.read([*noise, row], 0, cache)[-1:])
            if trial % 2:
                cache.retain({node for node, *_ in path} | set(rng.sample(range(300, 312), 6)))
        orders.append(torch.cat(made))

    assert all(torch.equal(made, orders[0]) for made in orders[1:])


def test_weights_that_fit_into_bfloat16_have_the_bits_of_float32(monkeypatch):
    model = Model("llama")
    halved = {name: tensor.bfloat16().float() for name, tensor in tensors_of("llama").items()}

    def body():
        return NativeSlice(Slice(SIZES, 0, 2), halved, 1)

    def rows(of):
        model.body, model.cache = of, model.new_cache()
        return alone(model, TEXT)

    half = body()
    monkeypatch.setattr("model.native.packing.torch.equal", lambda *_: False)
    whole = body()
    monkeypatch.undo()
    forms = [{layer.down.form for layer in each._structures} for each in (half, whole)]
    assert forms == [{1}, {0}]
    assert torch.equal(rows(half), rows(whole))


def test_outputs_after_paths_repeat_whatever_was_computed_before_or_with_them():
    """So the virtual cluster keeps them for all methods, questions and requests."""
    together, alone_first = (path_outputs() for _ in range(2))
    rng = random.Random(5)
    texts = [[rng.randrange(50) for _ in range(3)] for _ in range(9)]
    texts += [texts[0] + [rng.randrange(50) for _ in range(30)], texts[1][:2] + [7, 9]]

    wanted, _ = together.outputs([path_of(together, text) for text in texts])
    for text in reversed(texts):
        alone_first.outputs([path_of(alone_first, [*text[:2], rng.randrange(50)])])
        path = path_of(alone_first, text)
        last, _ = alone_first.outputs([path])
        assert torch.equal(last[0], wanted[texts.index(text)])
    assert together.repeats_bits


def path_outputs():
    return Paths([Model("llama").body], (), torch.empty(0), torch.int16)


def path_of(paths, text):
    path = paths.root
    for token in text:
        path = paths.after(path, token)
    return path


def test_a_cluster_of_native_layers_keeps_the_outputs_of_all_questions():
    cluster = Cluster(PROFILES["server"], VirtualClock(), [[Work(lambda rows, text: 0.004, layers=4)]],
                      path_outputs(), [OFF] * 2)
    first = cluster.paths.after(cluster.paths.root, 30)
    for same_prompt in (True, False):
        cluster.restart(same_prompt)
        assert cluster.paths.after(first, 31) == 1


# --- texts ------------------------------------------------------------------------------------------------------------

class NativeTiny(Tiny):
    """The tiny model in float32 by native kernels."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.lm_head = self.lm_head.float()
        self.whole = self.slice(0, self.config.layers)

    def slice(self, first, last):
        body = Slice(self.config, first, last)
        made = {name: quantized(name, self.tensors[name].float(), self.kind) for name, _ in body.named_parameters()}
        return NativeSlice(body, made, 1)


TINIES = {kind: NativeTiny(kind) for kind in KINDS}
SAMPLERS = [Sampler(), Sampler(1.0, seed=4)]


@pytest.mark.parametrize("strategy, stages, kind", [
    *zip(["autoregressive", *SPECULATIVE], cycle([4, 1, 2]), cycle(KINDS)),
    *zip(["streaming"] * 3, (1, 2, 4), KINDS)])
def test_every_strategy_on_every_number_of_stages_writes_the_reference_text(strategy, stages, kind):
    tiny = TINIES[kind]
    for sampler in SAMPLERS:
        text = tiny.text(PROMPT, 14, sampler)
        for draft in (Oracle(PROMPT + text), Mixture([], Suffix())):
            with pipeline(tiny, stages, strategy, draft) as decoder:
                assert write(decoder, PROMPT, 14, sampler) == text


@pytest.mark.parametrize("words, methods", [
    (("temperature=0",), ("ar", "naive", "continuous", "streaming", "pipedec")),
    (("temperature=1", "seed=3", "quant_kv=int8"), ("ar", "naive", "continuous", "streaming")),
    (("temperature=0.8", "quant=int4", "quant_head=int4"), ("ar", "continuous", "pipedec")),
    (("temperature=0", "quant=int8", "quant_draft=true"), ("ar", "naive", "streaming")),
    (("temperature=1", "profile=server", "time=virtual"), ("ar", "continuous"))], ids=str)
def test_commands_write_one_text_with_native_kernels(words, methods, tmp_path):
    def text(method):
        return answer_of(tmp_path, "toy", "kernel=native", "draft=eagle+suffix", "max_new_tokens=20",
                         "ignore_eos=true", f"pipeline_type={method}", *words)["token_ids"]

    wanted, *others = map(text, methods)
    assert others == [wanted] * len(others)


@pytest.mark.parametrize("quant_kv", ["auto", "int8", "none"])
def test_virtual_time_writes_the_text_of_real_time_with_each_form_of_keys_and_values(quant_kv, tmp_path):
    words = ("toy", "kernel=native", "pipeline_type=ar", "max_new_tokens=20", "ignore_eos=true", "temperature=1",
             f"quant_kv={quant_kv}")
    virtual_answer = answer_of(tmp_path, *words, "profile=server", "time=virtual")
    assert virtual_answer["token_ids"] == answer_of(tmp_path, *words)["token_ids"]


# --- the border -------------------------------------------------------------------------------------------------------

C_STRUCTURES = "Weight", "Slots", "Layer", "Model", "Request", "Segment", "DeltaRows"
CONSTANTS = "PANEL", "FLOAT32", "BFLOAT16", "INT8", "SUBGROUP_INT8", "INT4"
RESULTS = "DONE", "GIVEN_UP", "NO_MEMORY"


def test_structures_and_constants_are_those_of_the_c_compiler(tmp_path):
    """Sizes, the offset of each field, and constants, printed by a program that includes slice.c."""
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed")
    wanted = {}
    for c_name in C_STRUCTURES:
        structure = getattr(structures, f"C{c_name}")
        wanted[f"sizeof({c_name})"] = ctypes.sizeof(structure)
        for field, _ in structure._fields_:
            wanted[f"offsetof({c_name}, {field})"] = getattr(structure, field).offset
    wanted.update((name, getattr(packing, name)) for name in CONSTANTS)
    wanted.update((name, getattr(structures, name)) for name in RESULTS)

    prints = "".join(f'    printf("%lld\\n", (long long){expression});\n' for expression in wanted)
    source = tmp_path / "layout.c"
    source.write_text('#include <stddef.h>\n#include <stdio.h>\n#include "slice.c"\n'
                      f"int main(void) {{\n{prints}}}\n")
    found = map(int, compiled_output("cc", [], compiler.LEVELS[-1], source, tmp_path / "layout").split())
    assert dict(zip(wanted, found)) == wanted


@pytest.mark.parametrize("x, positions", [
    (torch.zeros(3, 8), [0, 1, 2]), (torch.zeros(2, 104), [0, 1, 2]), (torch.zeros(3, 104), [0, 1, 256]),
    (torch.zeros(3, 104, dtype=torch.float64), [0, 1, 2])], ids=str)
def test_hidden_states_that_do_not_fit_the_layers_are_refused(x, positions):
    sizes = replace(SIZES, layers=4)
    tensors = random_weights(Slice(sizes, 1, 3))
    body, cache = NativeSlice(Slice(sizes, 1, 3), tensors, 1), sizes.cache(2, 256, torch.empty(0))
    admit_text(cache, 3)
    with pytest.raises(IndexError):
        body(x, torch.tensor(positions), cache)


def test_an_error_between_two_layers_is_passed_on_and_a_dead_segment_given_up():
    model = Model("llama")

    def fails():
        raise RuntimeError("a prune that cannot be read")

    row = torch.tensor([1]), admit_text(model.cache, 1), model.cache, None
    with pytest.raises(RuntimeError, match="a prune that cannot be read"):
        model.body(*row, fails)
    assert model.body(*row, lambda: False) is None


def test_ctrl_c_during_a_computation_is_raised_after_it():
    """Python runs the handler of a signal where Python code goes on, which is in a callback from C."""
    model, rows = Model("llama"), chain([TEXT[i % len(TEXT)] for i in range(200)])
    computes = threading.Event()

    def press():
        computes.wait()
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(6):
            computes.clear()
            pressing = threading.Thread(target=press)
            pressing.start()
            with pytest.raises(KeyboardInterrupt):
                computes.set()
                while pressing.is_alive():
                    model.cache.clear()
                    model.read(rows, len(rows))
                time.sleep(1)  # it may come as late as here, but it must come
            pressing.join()
    finally:
        signal.signal(signal.SIGINT, handler)


# --- what is computed by torch ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("sizes, dtype, kind, reason", [
    (SIZES, torch.float64, "none", "compute in float32 on a CPU"),
    (SIZES, torch.float32, "nf4", "have no nf4"),
    (replace(SIZES, hidden=4096), torch.float32, "none", "torch is faster in float32 for rows of more than 2048"),
    (replace(SIZES, hidden=4096), torch.float32, BLOCKS, ""),
    (SIZES, torch.float32, "int8", "have no int8"),
    (replace(SIZES, family=FAMILIES["olmo2"]), torch.float32, "none", "the layers of Olmo2ForCausalLM"),
    (replace(SIZES, family=FAMILIES["opt"]), torch.float32, "none", "the layers of OPTForCausalLM"),
    (replace(SIZES, experts=4, family=FAMILIES["mixtral"]), torch.float32, "none", "the layers of MixtralForCausalLM"),
    (replace(SIZES, head_dim=12), torch.float32, "none", "a multiple of 8"),
    *((sizes, torch.float32, BLOCKS, "") for sizes in FAMILY.values())])
def test_the_reason_why_torch_computes_layers(sizes, dtype, kind, reason):
    found = reason_against(sizes, dtype, torch.device("cpu"), kind)
    assert reason in found and bool(reason) == bool(found)


# --- the compiler -----------------------------------------------------------------------------------------------------

@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where libraries are kept that are compiled in a moment, without optimization."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "STRICT_FLAGS", (*compiler.STRICT_FLAGS, "-O0"))
    library.cache_clear()
    yield tmp_path / "flowspec" / "native"
    library.cache_clear()


def test_a_library_is_compiled_once_into_a_folder_of_the_user_alone(cache, monkeypatch, capsys):
    library()
    assert capsys.readouterr().err == "flowspec: compiling the kernels for this processor, once\n"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    [file] = cache.iterdir()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it was compiled again"))
    library.cache_clear()
    library()
    assert [*cache.iterdir()] == [file]


def test_a_damaged_library_is_compiled_again(cache):
    library()
    [file] = cache.iterdir()
    content = file.read_bytes()
    file.unlink()  # this process has it open
    damages = b"", content[:1000], content[:-1], bytes(len(content)), content[:5000] + b"x" + content[5001:]
    for damaged in damages:
        file.write_bytes(damaged)
        assert not compiler.is_whole(file)

    file.write_bytes(content[:len(content) // 2])  # the system ends a process that loads it
    library.cache_clear()
    library()
    assert [*cache.iterdir()] == [file] and compiler.is_whole(file)


def test_the_compiler_may_have_options(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc -DOF_CC")
    library()
    [with_options] = cache.iterdir()
    monkeypatch.setenv("CC", "cc")
    library.cache_clear()
    library()
    assert with_options in cache.iterdir() and len([*cache.iterdir()]) == 2


def test_a_disk_without_programs_is_named(cache, monkeypatch):
    monkeypatch.setattr(compiler.os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with refused("is on a disk from which no program may run (noexec): set XDG_CACHE_HOME"):
        library()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_folder_that_others_may_enter_is_refused(cache, mode):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    with refused("cannot be stored or loaded: "):
        library()


def test_a_link_in_place_of_the_folder_is_refused(cache, tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    cache.parent.mkdir()
    cache.symlink_to(other)
    with refused("cannot be stored or loaded: "):
        library()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    owner = os.getuid() + 1
    monkeypatch.setattr(compiler.os, "getuid", lambda: owner)
    with pytest.raises(OSError, match="only this user may enter"):
        private_folder(tmp_path / "native")


@pytest.mark.parametrize("script, reason", [
    ("echo 'slice.c:1: error: no vectors' >&2; exit 1", "slice.c:1: error: no vectors"), ("exit 3", "code 3")])
def test_a_compiler_that_fails_is_reported(cache, tmp_path, monkeypatch, script, reason):
    fake = tmp_path / "cc"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with refused(reason):
        library()
    assert [*cache.iterdir()] == [], "nothing half made is left"


def test_without_a_compiler_torch_computes_and_says_why(cache, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    asked = ("toy", "link=threads", "max_new_tokens=2", "pipeline_type=ar")
    assert run(generate.GENERATE, (*asked, "kernel=auto")) == 0
    assert ("kernel=torch, since there is no C compiler" in capsys.readouterr().err) == levels()[0].is_faster
    assert run(generate.GENERATE, (*asked, "kernel=native")) == 2
    assert "kernel=native is not possible here: there is no C compiler" in capsys.readouterr().err


READS_A_CUT_FILE = """
import os, sys
import numpy as np
from model.native.compiler import library
library()
mapped_bytes = np.memmap(sys.argv[1], np.uint8, "r")
os.truncate(sys.argv[1], 4096)
print(mapped_bytes[5000])
"""


@pytest.mark.parametrize("options, code, sentences", [
    ((), 2, [f"flowspec: {CUT_FILE}"]), (("-X", "faulthandler"), -signal.SIGBUS, [])])
def test_a_mapped_file_that_was_cut_ends_a_program_with_one_sentence_unless_it_handles_that(
        tmp_path, options, code, sentences):
    (tmp_path / "weights").write_bytes(bytes(10_000))
    done = run_program(sys.executable, *options, "-c", READS_A_CUT_FILE, str(tmp_path / "weights"))
    assert done.returncode == code and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("flowspec: ")] == sentences
    assert options or len(done.stderr.splitlines()) == 1


# --- linear layers outside of a stage ---------------------------------------------------------------------------------

@pytest.mark.parametrize("level", LEVELS)
@of_each_kind
def test_a_linear_layer_gives_a_row_the_same_bits_beside_any_number_of_others(kind, level):
    linear = torch.nn.Linear(96, 70)
    generator = torch.Generator().manual_seed(1)
    linear.weight.data, linear.bias.data = (torch.randn(x.shape, generator=generator) for x in linear.parameters())
    rows = torch.randn(70, 96, generator=generator)
    wanted = NativeProducts(1).quantized(kind, linear.weight, linear.bias)(rows)
    native = NativeProducts(2, LEVELS[level]).quantized(kind, linear.weight, linear.bias)
    for count in (1, 2, 5, 8, 17, 70):
        assert torch.equal(native(rows[:count]), wanted[:count])
    assert (wanted - linear(rows)).norm() < {"none": 1e-6, "Q8_0": 0.02, "Q4_1": 0.15}[kind] * wanted.norm()
    assert native(rows[:0]).shape == (0, 70)


def test_rows_of_another_width_are_refused():
    native = NativeProducts(1).linear(torch.zeros(3, 8))
    for rows in (torch.zeros(2, 9), torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8)):
        with pytest.raises(IndexError, match="instead of 8 numbers"):
            native(rows)


# --- other processors -------------------------------------------------------------------------------------------------

FOREIGN = {  # by compiler: how to run what it makes
    "cc": [],
    "aarch64-linux-gnu-gcc": ["qemu-aarch64"],
}


def compiled_output(compiler_name, runner, level, source, program):
    """What a program that includes slice.c prints, compiled for a level."""
    kinds = [flag for flag in compiler.STRICT_FLAGS if flag not in ("-shared", "-fPIC")]
    sources = [str(source), *(str(compiler.SOURCE_FOLDER / name) for name in ("delta.c", "pool.c"))]
    statically = ["-static"] if runner else []
    command = [compiler_name, *kinds, *level.flags, f"-I{compiler.SOURCE_FOLDER}", *statically, *sources]
    subprocess.run([*command, "-o", str(program), "-lm"], check=True)
    return subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True).stdout


@pytest.mark.recorded
@pytest.mark.parametrize("compiler_name, names", [("cc", list(LEVELS)),
                                                  ("aarch64-linux-gnu-gcc", ["dotprod", "plain"])], ids=str)
def test_every_instruction_set_prints_the_same_hashes(compiler_name, names, tmp_path):
    """ARM's with a cross-compiler and qemu-user, where both are installed."""
    runner = FOREIGN[compiler_name]
    if not all(map(shutil.which, [compiler_name, *runner])):
        pytest.skip(f"{compiler_name} or {runner} is not installed")
    wanted = (ROOT / "tests" / "golden" / "native_bits.txt").read_text()
    for level in compiler.LEVELS:
        if level.name in names:
            program = tmp_path / f"{compiler_name}-{level.name}"
            hashes = compiled_output(compiler_name, runner, level, ROOT / "tests" / "native_bits.c", program)
            assert hashes == wanted, level.name
