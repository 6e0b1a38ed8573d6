"""JSON as tests draw it, and as they read, write and change it in files."""
from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterable, Iterator


def json_values(*more_leaves: Any, keys: Any = None) -> Any:
    """Any JSON, and more leaves, as Hypothesis draws it."""
    from hypothesis import strategies as st  # which no rank needs

    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), *more_leaves)
    names = st.text(max_size=4) if keys is None else keys
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
                        max_leaves=6)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def load_json_lines(path: Path) -> list[Any]:
    """What each line of a file says."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def save_json_lines(path: Path, entries: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def change_json(path: Path, **fields: Any) -> None:
    """Give fields of a file's object other values; the rest stays."""
    save_json(path, {**load_json(path), **fields})


@contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    """What a file holds, to be changed in place; it is written again behind the block."""
    content = load_json(path)
    yield content
    save_json(path, content)
