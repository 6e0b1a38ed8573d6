"""The shape of the code: floors, statements and names, checked by `ast` over every file of the project.

A rule is a function from a file to its problems. Each rule also meets a source that breaks it, so that it can fail.
"""
from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Callable, Iterable, Iterator

import graphlib
import pytest

from tests.sources import FLOORS, NOT_SOURCE, ROOT, Source, measured_files, python_files, room_of, tracked

LABORATORIES = [room for room, floor in FLOORS.items() if floor == 7]  # each is one subject, deleted by its folder
TOP = 8
ARGUMENTS = 6
STATEMENT, LINE = 120, 25  # tokens; tables of a module, whose names are in capitals, may be as long as they are
DENSE = 0.02  # of the lines of code, those that may have more tokens than LINE
VAGUE = {"utils", "util", "common", "base", "manager", "handler"}
MODULE_NAME = re.compile(r"^[a-z_]+(?:\.[a-z_]+)+(?= |$)")  # "scripts.plan", or with arguments: "scripts.bench load"
RANK = re.compile(r"(^|[._])rank(\(\))?$")
ROLE = re.compile(r"(^|\.)_?is_(draft|first|last|main|master)(_stage|_rank|_process)?$")
QUAINT = re.compile(r"\b(told|anew|whoever|thereof|foretold|dearest|held\W+to\W+be|in\W+vain|of\W+late)\b", re.I)
RIDDLES = re.compile(r"\b(none's|whom|obey(s|ed)?|hears|foresees?|taught|shall|so\W+many)\b", re.I)  # except in tests
OTHER_TEXTS = ("tests/test_docs.py", "tests/test_layers.py", "toy/corpus/")  # with these words, or their own English
FOREIGN_PATH = re.compile(r"(?<![\w.}/-])/(home/|root/|work\b)")


Rule = Callable[[Source], Iterator[str]]


def imports(source):
    """The modules that a file names, with the names taken from a package as modules of it."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def programs(source):
    """The modules that a file names in strings, as the programs that it starts; a Command may name itself."""
    own_names = {id(node.args[0]) for node in source.nodes
                 if isinstance(node, ast.Call) and ast.unparse(node.func) == "Command" and node.args}
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own_names:
            yield from MODULE_NAME.findall(node.value)


def climbs(source):
    """Imports of a floor that is not below the file's own; the commands and the toy's recipe may share theirs."""
    if source.floor is None and source.parts[0] != "tests":
        yield f"is in no room of a floor: name its folder in {Path(__file__).name}"
    for name in imports(source):
        other = room_of(name.split("."))
        if name.startswith("."):
            yield f"imports {name} by its place: write the whole name"
        elif source.floor is not None and other in FLOORS and other != source.room:
            if FLOORS[other] >= source.floor and source.floor < TOP:
                yield f"imports {name}, which is not on a lower floor"
        elif source.floor == 0 and other not in sys.stdlib_module_names and other != "config":
            yield f"imports {name}: config needs the standard library only"

    for name in programs(source) if source.floor is not None else ():
        other = room_of(name.split("."))
        if FLOORS.get(other, -1) >= source.floor and other != source.room and source.floor < TOP:
            yield f"starts {name}, which is not on a lower floor"


def distributes(source):
    if source.floor == 1 and any(name.startswith("torch.distributed") for name in imports(source)):
        yield "imports torch.distributed: model knows one device"
    for node in source.nodes if source.floor == 1 else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield f"line {node.lineno} uses torch.distributed: model knows one device"


def uses_tensors(source):
    if source.path == "model/tree.py":
        yield from (f"imports {name}: the tree knows no tensors" for name in imports(source)
                    if name.split(".")[0] in ("torch", "numpy"))


def asks_much(source):
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            names = [arg.arg for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs]]
            count = len(names) - (names[:1] in (["self"], ["cls"])) + (a.vararg is not None) + (a.kwarg is not None)
            if count > ARGUMENTS:
                yield f"{node.name} has {count} arguments, more than {ARGUMENTS}"


def is_vague(source):
    yield from (f"is called {part}: name what it is" for part in source.parts if VAGUE & set(part.split("_")))


def asks_for_a_role(source):
    if source.path == "launch/run.py" or source.parts[0] in NOT_SOURCE:
        return  # toy's recipe trains data-parallel: its ranks have no roles in a pipeline
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            ranks = [bool(RANK.search(ast.unparse(side))) for side in sides]
            others = [side for side, is_rank in zip(sides, ranks) if not is_rank]
            if any(ranks) and not all(isinstance(side, ast.Name) for side in others):  # `peer != rank` is no role
                yield f"line {node.lineno} compares a rank: roles are objects, made in launch/run.py"
        elif isinstance(node, (ast.Name, ast.Attribute)) and ROLE.search(ast.unparse(node)):
            yield f"line {node.lineno} asks for a role: {ast.unparse(node)}"


def names_a_machine(source):
    yield from (f"line {number} names a path of one machine: {line.strip()[:60]}"
                for number, line in enumerate(source.text.splitlines(), 1) if FOREIGN_PATH.search(line))


def is_quaint(source):
    if source.path.endswith((".py", ".sh")) and not source.path.startswith(OTHER_TEXTS):
        patterns = [QUAINT] if source.parts[0] == "tests" else [QUAINT, RIDDLES]
        for found in chain.from_iterable(each.finditer(source.text.replace("_", " ")) for each in patterns):
            line = source.text.count("\n", 0, found.start()) + 1
            yield f"line {line} says {found[0]!r}: write ordinary technical English"


def statements(source: Source) -> Iterator[tuple[int, int]]:
    """The line and the number of tokens of each statement that is no table of its module."""
    statement: list[tokenize.TokenInfo] = []
    for token in source.tokens:
        statement.append(token)
        if token.type == tokenize.NEWLINE:
            first = statement[0]
            is_table = first.start[1] == 0 and first.string.isupper()
            if not is_table:
                yield first.start[0], len(statement) - 1
            statement = []


def lines(source: Source) -> Counter[int]:
    """How many tokens each line of code has; a text over several lines counts for none."""
    code = [token for token in source.tokens if token.type != tokenize.NEWLINE]
    return Counter(token.start[0] for token in code if token.start[0] == token.end[0])


def says_much(source):
    worst = sorted(statements(source), key=lambda statement: -statement[1])
    yield from (f"line {line} begins a statement of {count} tokens" for line, count in worst if count > STATEMENT)


def dense(files: Iterable[Source]) -> tuple[float, list[str]]:
    """The share of lines with more tokens than LINE, and the ten worst."""
    counts = [(count, f"{source.path}:{line}") for source in files for line, count in lines(source).items()]
    many = sorted((entry for entry in counts if entry[0] > LINE), reverse=True)
    return len(many) / max(1, len(counts)), [f"{place} has {count} tokens" for count, place in many[:10]]


def is_dense(source):
    share, worst = dense([source])
    if share > DENSE:
        yield f"has {share:.1%} lines of more than {LINE} tokens: {', '.join(worst)}"


def problems(rule: Rule, files: Iterable[Source]) -> list[str]:
    return [f"{source.path} {problem}" for source in files for problem in rule(source)]


def test_no_file_imports_in_circles():
    known = {".".join(source.parts): source for source in python_files()}
    graph = {name: set(imports(source)) & set(known) for name, source in known.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_laboratory_is_there():
    assert [room for room in LABORATORIES if not (ROOT / room).is_dir()] == []


@lru_cache(maxsize=None)
def texts() -> list[Source]:
    """Every file of text, but huge ones."""
    files = [(name, (ROOT / name).read_bytes())
             for name in tracked() if (ROOT / name).stat().st_size < 1 << 21]
    return [Source(name, data.decode(errors="replace")) for name, data in files if b"\0" not in data]


@pytest.mark.parametrize("rule, files", [
    (climbs, python_files),
    (distributes, python_files),
    (uses_tensors, python_files),
    (asks_much, python_files),
    (is_vague, python_files),
    (asks_for_a_role, python_files),
    (names_a_machine, texts),
    (is_quaint, texts),
], ids=lambda value: value.__name__)
def test_the_project_keeps_the_rule(rule, files):
    assert problems(rule, files()) == []


def test_no_statement_has_more_than_120_tokens():
    found = problems(says_much, measured_files())
    worst = sorted(found, key=lambda problem: -int(problem.split()[-2]))[:10]
    assert found == [], "name what stands in the middle:\n" + "\n".join(worst)


def test_few_lines_hold_more_than_25_tokens():
    share, worst = dense(measured_files())
    assert share <= DENSE, f"{share:.2%} of the lines are dense, first of all\n" + "\n".join(worst)


BROKEN = [
    (climbs, "config/cli.py", "import torch"),
    (climbs, "config/cli.py", "from model.tree import verify"),
    (climbs, "model/drafts/eagle.py", "def f():\n    from pipeline import stage"),
    (climbs, "launch/run.py", "from eval.tally import Tally"),
    (climbs, "pipeline/stage.py", "from . import trace"),
    (climbs, "launch/words.py", "run([python, '-m', 'eval.plan.command start'])"),
    (climbs, "extra/thing.py", ""),
    (distributes, "model/llama.py", "from torch import distributed as d"),
    (distributes, "model/llama.py", "import torch\ntorch.distributed.barrier()"),
    (uses_tensors, "model/tree.py", "from torch import Tensor"),
    (asks_much, "model/tree.py", "class A:\n    def f(self, a, b, c, d, *e, f, g): ..."),
    (is_vague, "model/tensor_utils.py", ""),
    (asks_for_a_role, "pipeline/stage.py", "if rank == 0: pass"),
    (asks_for_a_role, "pipeline/stage.py", "if self.rank == world - 1: pass"),
    (asks_for_a_role, "pipeline/stage.py", "if config.is_first_stage: pass"),
    (says_much, "pipeline/stage.py", f"x = [{'y, ' * STATEMENT}]"),
    (says_much, "pipeline/stage.py", "def f():\n    return (" + "a +\n" * STATEMENT + "a)"),
    (is_dense, "pipeline/stage.py", "x = 1\n" * 30 + f"x = {'1 + ' * LINE}1"),
    (names_a_machine, "docs/any.md", "cd /" + "work/main"),
    (is_quaint, "pipeline/stage.py", "def _told():\n    # tried in\n    # vain\n"),
    (is_quaint, "pipeline/stage.py", "# a stage hears of it"),
]
SOUND = [
    (climbs, "toy/recipe/train.py", "from model.llama import Slice\nfrom launch import run\nimport torch"),
    (climbs, "tp/group.py", "from pipeline.requests import Target\nimport torch"),
    (climbs, "eval/command.py", "START = Command('scripts.evaluate start', main)\nx = 'launch.run'"),
    (asks_much, "model/tree.py", "class A:\n    def f(self, a, b, c, d, e, f): ..."),
    (asks_for_a_role, "launch/run.py", "if rank == 0: pass"),
    (asks_for_a_role, "config/failure.py", "others = [peer for peer in range(world) if peer != rank]"),
    (asks_for_a_role, "model/tree.py", "key = self._rank(node)"),
    (says_much, "pipeline/stage.py", f"TABLE = [{'y, ' * STATEMENT}]"),
    (is_dense, "pipeline/stage.py", "x = 1\n" * 50 + f"x = {'1 + ' * LINE}1"),
    (is_quaint, "run_pipe.sh", "# untold and invaluable; of later tries one is made again"),
    (names_a_machine, "README.md", "see https://example.org/home/ and my/work and $HOME/work"),
]


@pytest.mark.parametrize("rule, path, text", BROKEN)
def test_every_rule_finds_a_file_that_breaks_it(rule, path, text):
    assert problems(rule, [Source(path, text)])


@pytest.mark.parametrize("rule, path, text", SOUND)
def test_no_rule_troubles_a_file_that_keeps_it(rule, path, text):
    assert not problems(rule, [Source(path, text)])
