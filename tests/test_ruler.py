"""How much code a room may have, and how it has to read: tokens, compound nouns, and blank lines between steps.

Blank lines, comments and docstrings are free. A quota is no aim: `found_value` for `found` is worse. What counts is
that a stranger says after one reading what a function does.
"""
from __future__ import annotations

import ast
import tokenize
from collections import Counter
from typing import Iterable, Iterator, NamedTuple

import pytest

from tests.sources import FLOORS, FUNCTIONS, NOT_SOURCE, ROOT, Source, measured_files, tracked

CEILINGS = {  # tokens of code: lower a ceiling when its room has shrunk, raise it for a new capability
    "config": 23_437,
    "model": 64_026,
    "pipeline": 21_611,
    "cluster": 20_486,
    "tp": 5_890,
    "sim": 7_792,
    "launch": 40_879,
    "eval": 48_502,
    "serve": 20_591,
    "eval/dsi": 16_660,
    "eval/flowspec": 2_212,
    "eval/load": 2_587,
    "eval/plan": 16_924,
    "eval/specinfer": 3_691,
    "train": 18_922,
    "scripts": 5_422,
    "split_and_save_models": 608,
}
LONGEST_FUNCTION = 506  # tokens
LONG_BODY = 12  # lines from which on a function's body has to show its steps
EMPTY_NAMES = {"found", "place", "own", "one", "said", "known", "given", "asked", "made", "held"}
ENOUGH_NAMES = 20  # in a file, before the share of its compounds says something

# What the whole source has reached. These figures may only get better.
COMPOUND_SHARE = 0.35
BLANK_SHARE = 0.118
EMPTY_COUNT = 0

# What a new file has to reach, and each old one that was rewritten.
FINAL_COMPOUND_SHARE = 0.25
FINAL_BLANK_SHARE = 0.05
OLD_FILES = ROOT / "tests" / "old_files.txt"  # those that still have to be rewritten; the list only gets shorter

BUILTINS = {"bool", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"}


class Reading(NamedTuple):
    """How a piece of source reads."""

    names: Counter[str]  # definitions: assigned names and attributes, arguments and functions
    blank_lines: int  # in the bodies of long functions
    body_lines: int

    @property
    def name_count(self) -> int:
        return sum(self.names.values())

    @property
    def compound_share(self) -> float:
        compounds = sum(count for name, count in self.names.items() if "_" in name.strip("_"))
        return compounds / max(1, self.name_count)

    @property
    def blank_share(self) -> float:
        return self.blank_lines / max(1, self.body_lines)

    @property
    def empty_count(self) -> int:
        return sum(self.names[name] for name in EMPTY_NAMES)


def reading_of(files: Iterable[Source]) -> Reading:
    """Count names and lines over some files."""
    names: Counter[str] = Counter()
    blank_lines = body_lines = 0

    for source in files:
        names.update(defined_names(source))
        for body in long_bodies(source):
            blank_lines += sum(not line.strip() for line in body)
            body_lines += len(body)

    return Reading(names, blank_lines, body_lines)


def defined_names(source: Source) -> Iterator[str]:
    """The names that a file defines, without `self`, `cls`, `_` and the special methods of Python."""
    for node in source.nodes:
        name = _defined_name(node)
        is_special = name.startswith("__") and name.endswith("__")
        if name.strip("_") and not is_special and name not in ("self", "cls"):
            yield name


def _defined_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, FUNCTIONS) else ""


def long_bodies(source: Source) -> Iterator[list[str]]:
    """The lines of each function's body, without its docstring, if they are a dozen or more."""
    all_lines = source.text.splitlines()
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            statements = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            body = all_lines[statements[0].lineno - 1:node.end_lineno] if statements else []
            if len(body) >= LONG_BODY:
                yield body


def token_count(source: Source, first_line: int = 0, last_line: float = float("inf")) -> int:
    return sum(token.type != tokenize.NEWLINE and first_line <= token.start[0] <= last_line for token in source.tokens)


def tokens_by_room(files: Iterable[Source]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for source in files:
        counts[source.room] += token_count(source)
    return counts


# --- rules: from a file to its problems -------------------------------------------------------------------------------

def functions_too_long(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            count = token_count(source, node.lineno, node.end_lineno)
            if count > LONGEST_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {count} tokens, more than {LONGEST_FUNCTION}"


def hard_to_read(source: Source) -> Iterator[str]:
    """What keeps a file from the final values."""
    reading = reading_of([source])
    if reading.name_count >= ENOUGH_NAMES and reading.compound_share < FINAL_COMPOUND_SHARE:
        yield f"has {reading.compound_share:.0%} compound names, fewer than {FINAL_COMPOUND_SHARE:.0%}"
    if reading.body_lines and reading.blank_share < FINAL_BLANK_SHARE:
        yield (f"has {reading.blank_share:.1%} blank lines in bodies of {LONG_BODY} lines and more, fewer than "
               f"{FINAL_BLANK_SHARE:.0%}: add one between two steps")
    for name in sorted(EMPTY_NAMES & reading.names.keys()):
        yield f"calls something {name}: name what it holds"


def builtins_as_no_ops(source: Source) -> Iterator[str]:
    """A callable's default that is a builtin type, as in `forget: Callable[[], object] = int`."""
    for node in source.nodes:
        if isinstance(node, ast.AnnAssign):
            defaults = [(node.annotation, node.value)]
        elif isinstance(node, FUNCTIONS):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            with_default = positional[len(positional) - len(arguments.defaults):]
            pairs = [*zip(with_default, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
            defaults = [(argument.annotation, default) for argument, default in pairs]
        else:
            defaults = []

        for annotation, default in defaults:
            is_builtin = isinstance(default, ast.Name) and default.id in BUILTINS
            if is_builtin and annotation is not None and "Callable" in ast.unparse(annotation):
                yield f"line {default.lineno}: {default.id} stands for a function that does nothing: name one"


def repeated_classes(files: Iterable[Source]) -> list[str]:
    """The class names that stand in several places."""
    places: dict[str, list[str]] = {}
    for source in files:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")

    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


# --- the project keeps them -------------------------------------------------------------------------------------------

def old_files() -> list[str]:
    return OLD_FILES.read_text(encoding="utf-8").split()


def test_no_room_has_more_tokens_than_its_ceiling() -> None:
    counts = tokens_by_room(measured_files())
    rows = [f"{room:<24}{counts[room]:>9,}{ceiling:>9,}" for room, ceiling in CEILINGS.items()]
    print("\n".join([f"{'room':<24}{'tokens':>9}{'ceiling':>9}", *rows, f"{'all':<24}{sum(counts.values()):>9,}"]))

    assert set(CEILINGS) == {room for room in FLOORS if not room.startswith(NOT_SOURCE)}
    assert [room for room, ceiling in CEILINGS.items() if counts[room] > ceiling] == []


def test_no_function_is_longer_than_its_ceiling() -> None:
    assert [f"{source.path} {problem}" for source in measured_files() for problem in functions_too_long(source)] == []


def test_the_source_reads_no_worse_than_it_did() -> None:
    reading = reading_of(measured_files())
    print(f"compounds {reading.compound_share:.2%}, blank lines {reading.blank_share:.2%}, "
          f"empty names {reading.empty_count}")

    assert reading.compound_share >= COMPOUND_SHARE
    assert reading.blank_share >= BLANK_SHARE
    assert reading.empty_count <= EMPTY_COUNT


def test_new_and_rewritten_files_read_well() -> None:
    waiting = set(old_files())
    assert [f"{source.path} {problem}" for source in measured_files() if source.path not in waiting
            for problem in hard_to_read(source)] == []


def test_files_that_still_have_to_be_rewritten_exist() -> None:
    assert sorted(set(old_files()) - set(tracked())) == []


def test_no_builtin_stands_for_a_function_that_does_nothing() -> None:
    assert [f"{source.path} {problem}" for source in measured_files() for problem in builtins_as_no_ops(source)] == []


def test_a_class_name_stands_once() -> None:
    assert repeated_classes(measured_files()) == []


# --- each rule can fail -----------------------------------------------------------------------------------------------

PATH = "pipeline/stage.py"
STEPS = "    num_rows = 1\n" * LONG_BODY
ONE_WORD_NAMES = "".join(f"name{number} = 1\n" for number in range(ENOUGH_NAMES))


@pytest.mark.parametrize(("rule", "text"), [
    (functions_too_long, "def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION // 3)),
    (hard_to_read, ONE_WORD_NAMES),
    (hard_to_read, "def run_stage():\n" + STEPS),
    (hard_to_read, "found = 1\n"),
    (hard_to_read, "def f(place): ...\n"),
    (hard_to_read, "self.made = 1\n"),
    (builtins_as_no_ops, "class A:\n    met: Callable[[], object] = str"),
    (builtins_as_no_ops, "def f(forget: Callable[[], object] = int): ..."),
    (builtins_as_no_ops, "def f(*, forget: Callable[[], object] = int): ..."),
])
def test_every_rule_finds_a_file_that_breaks_it(rule, text):
    assert list(rule(Source(PATH, text)))


@pytest.mark.parametrize(("rule", "text"), [
    (functions_too_long, 'def f():\n    """' + "word " * 1000 + '"""\n' + "\n    # reason\n" * 1000 + "    x = 1\n"),
    (hard_to_read, ONE_WORD_NAMES.replace("name1", "row_name1")),
    (hard_to_read, "def run_stage():\n" + STEPS + "\n    num_rows = 1\n"),
    (hard_to_read, "x = 1\n"),
    (builtins_as_no_ops, "def f(size: int = 1, kind: type = int, read: Callable[[str], int] = read_size): ..."),
])
def test_no_rule_troubles_a_file_that_keeps_it(rule, text):
    assert not list(rule(Source(PATH, text)))


def test_a_class_name_in_two_places_is_reported():
    row, other = Source("a.py", "class Row: ..."), Source("b.py", "class Row: ...\nclass Column: ...")
    assert repeated_classes([row, other]) == ["Row: a.py:1, b.py:1"]


def test_tokens_are_names_operators_numbers_and_strings():
    source = Source(PATH, '"""Page."""\n\nx = f"{a + b:{width}} of {c}" + "d"  # reason\n')
    assert token_count(source) == len(["x", "=", "f-string", "+", '"d"'])
