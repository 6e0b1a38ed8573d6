"""What boards run keeps to Python 3.8 and torch 1.11, or asks before it uses more.

scripts/check_legacy.sh runs it there; these tests only read it. A rule is a function from a source to its problems, and
also meets sources that break it and sources that keep it.
"""
import ast
import re

import pytest

from config.presets import ROOT
from tests.sources import FLOORS

FOLDERS = [room for room, floor in FLOORS.items() if floor <= 5]  # the engine
COMMANDS = ("__init__", "generate", "doctor")
FILES = [*(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
         *(ROOT / "scripts" / f"{name}.py" for name in COMMANDS), ROOT / "split_and_save_models.py"]

# Names that came after torch 1.11 and after Python 3.8; what stands before a dot must match too.
TORCH = """
    scaled_dot_product_attention rms_norm nn.RMSNorm nn.Buffer nn.attention flex_attention torch.compile torch.compiler
    torch._dynamo torch.export torch.func torch.vmap torch.nested torch.library torch.mps backends.mps
    torch.accelerator torch.get_device_module torch.set_default_device torch.get_default_device
    torch.set_float32_matmul_precision torch.uint16 torch.uint32 torch.uint64 torch.float8_e4m3fn torch.float8_e5m2
    untyped_storage index_reduce unravel_index swap_tensors
    get_node_local_rank all_gather_into_tensor reduce_scatter_tensor split_group device_mesh init_device_mesh
    store.check store.append store.multi_get store.multi_set store.queue_push store.queue_pop has_extended_api
"""
PYTHON = """
    removeprefix removesuffix functools.cache graphlib zoneinfo is_relative_to math.lcm ast.unparse with_stem
    itertools.pairwise bit_count stdlib_module_names inspect.get_annotations tomllib ExceptionGroup contextlib.chdir
"""
NEWER = [re.compile(rf"(^|[._]){re.escape(name)}$") for name in (TORCH + PYTHON).split()]
WORDS = {  # of calls
    "torch.load": {"weights_only", "mmap"}, "load_state_dict": {"assign"}, "init_process_group": {"device_id"},
    "new_group": {"use_local_synchronization", "device_id"}, "send": {"group_dst"}, "recv": {"group_src"},
    "LaunchConfig": {"local_addr", "logs_specs", "signals_to_handle"}, "zip": {"strict"},
    "dataclass": {"slots", "kw_only"},
}
GENERIC = {"list", "dict", "set", "frozenset", "tuple", "type", "deque", "defaultdict", "Counter", "OrderedDict",
           "SimpleQueue", "Queue"}


def text(node):
    """A dotted name, or an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{text(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def names(node):
    """What a condition speaks of: names, attributes and texts."""
    return {word for part in ast.walk(node) for word in (
        getattr(part, "id", None), getattr(part, "attr", None), getattr(part, "value", None))
            if isinstance(word, str)}


def annotations(node):
    """Never evaluated, with `from __future__ import annotations`."""
    return [note for note in (getattr(node, "annotation", None), getattr(node, "returns", None)) if note]


def walk(node, asked=frozenset()):
    """Every node outside of annotations, with the names that were asked for before it runs."""
    yield node, asked
    for child in ast.iter_child_nodes(node):
        if child in annotations(node):
            continue
        condition = getattr(node, "test", None) if isinstance(node, (ast.If, ast.IfExp)) else None
        if isinstance(node, ast.BoolOp) and child is not node.values[0]:
            condition = node.values[0]
        yield from walk(child, asked | names(condition) if condition is not None and child is not condition else asked)


def not_38(source):
    try:
        ast.parse(source, feature_version=(3, 8))
    except SyntaxError as error:
        yield f"line {error.lineno} is not Python 3.8: {error.msg}"


def evaluates_generics(source):
    """`list[int]` and `int | None` are for annotations only: Python 3.8 cannot evaluate them."""
    for node, _ in walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and text(node.value).split(".")[-1] in GENERIC:
            yield f"line {node.lineno} evaluates {ast.unparse(node)}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and "None" in (
                ast.unparse(node.left), ast.unparse(node.right)):
            yield f"line {node.lineno} evaluates {ast.unparse(node)}"


def needs_newer(source):
    """Names and words that the old versions do not have, unless a condition asked for them."""
    for node, asked in walk(ast.parse(source)):
        used = [text(node)] if isinstance(node, (ast.Attribute, ast.Name)) else []
        if isinstance(node, ast.ImportFrom):
            used = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        yield from (f"line {node.lineno} uses {name}, which the old version lacks: ask hasattr() first" for name in used
                    if name.split(".")[-1] not in asked and any(newer.search(name) for newer in NEWER))
        if isinstance(node, ast.Call):
            for call in (call for call in WORDS if f".{text(node.func)}".endswith(f".{call}")):
                yield from (f"line {node.lineno} gives {call} the word {word.arg}, which the old version lacks"
                            for word in node.keywords if word.arg in WORDS[call] - asked)


RULES = (not_38, evaluates_generics, needs_newer)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_boards_run_keeps_to_python_3_8_and_torch_1_11(rule):
    assert [f"{path.relative_to(ROOT)} {problem}" for path in FILES
            for problem in rule(path.read_text(encoding="utf-8"))] == []


def test_what_boards_run_evaluates_no_annotation():
    assert [str(path.relative_to(ROOT)) for path in FILES if path.read_text(encoding="utf-8").strip()
            and "from __future__ import annotations" not in path.read_text(encoding="utf-8")] == []


def test_the_legacy_section_pins_what_python_3_8_can_install_and_leaves_torch_to_nvidia():
    lines = (ROOT / "requirements_jetson.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[\w-]+==[\w.]+ ; python_version (>= "3\.10"|< "3\.9")', pin) for pin in pins)
    legacy = {pin.split("==")[0]: pin.split("==")[1].split()[0]
              for pin in pins if '< "3.9"' in pin}
    assert {"transformers", "sentencepiece", "protobuf", "safetensors", "tqdm", "jinja2", "fschat"} <= set(legacy)
    assert legacy["numpy"].startswith("1.")
    assert not {"torch", "accelerate"} & {pin.split("==")[0] for pin in pins}


@pytest.mark.parametrize(("rule", "source"), [
    (not_38, "match x:\n    case 1: pass"),
    (not_38, "with (open(a) as b, open(c) as d): pass\ntry: pass\nexcept* ValueError: pass"),
    (evaluates_generics, "Alias = list[int]"),
    (evaluates_generics, "class A(deque[int]): pass"),
    (evaluates_generics, "Alias = str | None"),
    (needs_newer, "out = F.scaled_dot_product_attention(q, k, v)"),
    (needs_newer, "if fast:\n    F.scaled_dot_product_attention(q, k, v)"),
    (needs_newer, "from torch.nn.attention import sdpa_kernel"),
    (needs_newer, "if self._store.check([key]): pass"),
    (needs_newer, "torch.load(path, mmap=True)"),
    (needs_newer, "for a, b in zip(x, y, strict=True): pass"),
    (needs_newer, "name.removeprefix('model.')"),
])
def test_every_rule_finds_what_breaks_it(rule, source):
    assert list(rule(source))


@pytest.mark.parametrize(("rule", "source"), [
    (not_38, "if (n := len(x)) > 3: print(f'{n=}')"),
    (evaluates_generics, "def f(x: list[int] | None) -> dict[str, int]:\n    y: set[int] = set()\n    return x[0] | y"),
    (needs_newer, "if hasattr(F, 'scaled_dot_product_attention'):\n    F.scaled_dot_product_attention(q)"),
    (needs_newer, "fast = hasattr(torch, 'compile') and torch.compile(model)"),
    (needs_newer, "x = getattr(torch, 'float8_e4m3fn', None)"),
    (needs_newer, "link.send(message)\nself.check(x)\nre.compile('x')"),
    (needs_newer, "torch.load(path, map_location='cpu')"),
])
def test_no_rule_troubles_what_keeps_it(rule, source):
    assert not list(rule(source))
