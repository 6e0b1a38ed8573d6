"""The project's own files, as the tests of its shape read them: rooms, syntax trees and tokens."""
from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from functools import lru_cache
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"config": 0, "model": 1, "pipeline": 2, "cluster": 3, "tp": 3,
          "sim": 4, "launch": 5, "eval": 6, "serve": 6,
          "eval/dsi": 7, "eval/flowspec": 7, "eval/load": 7, "eval/plan": 7, "eval/specinfer": 7, "train": 7,
          "toy/corpus": 6,
          "flowspec": 8, "scripts": 8, "toy": 8, "split_and_save_models": 8, "dsi": 8}
NOT_SOURCE = ("tests", "toy")  # folders that no user runs, with sums of their own
COUNTED = {"NAME", "OP", "NUMBER", "STRING"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    """One Python file: its path in the repository and its text."""

    path: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        return Path(self.path).with_suffix("").parts

    @property
    def room(self) -> str:
        return room_of(self.parts)

    @property
    def floor(self) -> int | None:
        """None for tests, which may import anything."""
        return FLOORS.get(self.room)

    @property
    def nodes(self) -> Sequence[ast.AST]:
        """Every node of its syntax tree."""
        return _nodes(self.text)

    @property
    def tokens(self) -> Sequence[tokenize.TokenInfo]:
        """Its names, operators, numbers and strings, and the ends of its statements; no docstrings."""
        return _tokens(self.text)


def room_of(parts: Sequence[str]) -> str:
    """The room of a file or of an imported module, by the parts of its name."""
    nested_room = "/".join(parts[:2])
    return nested_room if nested_room in FLOORS else parts[0]


@lru_cache(maxsize=None)
def tracked() -> tuple[str, ...]:
    """The project's files: what git knows or would add; outside of git, all but hidden folders."""
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True,
                             capture_output=True)
    if listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]

    return tuple(name for name in names if (ROOT / name).is_file() and not name.startswith(".venv/"))


@lru_cache(maxsize=None)
def python_files() -> tuple[Source, ...]:
    """Every Python file of the project."""
    return tuple(Source(name, (ROOT / name).read_text(encoding="utf-8")) for name in tracked()
                 if name.endswith(".py") and not any(part.startswith(".") for part in Path(name).parts))


def project_text(name: str | Path) -> str:
    """What a page of the documentation says, or another file of the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def measured_files() -> list[Source]:
    """The files whose shape is measured: all but the tests."""
    return [source for source in python_files() if source.parts[0] != "tests"]


@lru_cache(maxsize=None)
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@lru_cache(maxsize=None)
def _tokens(text: str) -> list[tokenize.TokenInfo]:
    docstring_starts = _docstring_starts(text)
    all_tokens = _with_whole_fstrings(tokenize.generate_tokens(io.StringIO(text).readline))

    return [token for token in all_tokens if token.start not in docstring_starts
            and (token.type == tokenize.NEWLINE or tokenize.tok_name[token.type] in COUNTED)]


def _with_whole_fstrings(tokens: Iterator[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Merge the tokens of an f-string into one string: from Python 3.12 on its parts are tokens of their own."""
    depth = 0
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            depth += 1
            if depth == 1:
                yield token._replace(type=tokenize.STRING)
        elif kind == "FSTRING_END":
            depth -= 1
        elif depth == 0:
            yield token


def _docstring_starts(text: str) -> set[tuple[int, int]]:
    """The line and column of every docstring."""
    starts = set()
    for node in _nodes(text):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            starts.add((docstring.lineno, docstring.col_offset))

    return starts
