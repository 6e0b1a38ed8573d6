"""The documentation says what the code does."""
from __future__ import annotations

import re
import subprocess
import sys

from config.methods import METHODS
from config.presets import ROOT
from tests.test_layers import FLOORS

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def test_methods_md_has_a_section_for_every_method_and_the_lines_that_it_quotes_are_those_of_the_code():
    code = "".join((ROOT / name).read_text(encoding="utf-8") for name in (
        "pipeline/strategies.py", "model/rules.py", "tp/layers.py", "tp/overlap.py"))
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    quoted = blocks(ROOT / "docs" / "methods.md", "python")
    assert re.findall(r"^## (\w+): ", page, re.M) == list(METHODS)
    assert len(quoted) == len(METHODS)
    assert [block for block in quoted if block.strip() not in code] == []


def test_the_readme_lists_every_method():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [row for row in rows if row in METHODS] == list(METHODS)


def test_every_file_that_the_documentation_links_to_exists():
    for path in DOCS:
        for link in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def files_of_the_structure():
    """The Python files that docs/structure.md lists: a folder at the margin, its files below it."""
    block = re.search(r"^## Files$.*?```\n(.*?)```", (ROOT / "docs" / "structure.md").read_text(encoding="utf-8"),
                      re.M | re.S)
    folder = ""
    for line in block[1].splitlines():
        name = re.match(r" *(\S*)", line)[1]
        if line[:1].strip():
            folder = "" if name == "./" else name
        elif name.endswith(".py"):
            yield folder + name


def test_every_python_file_has_one_line_in_the_structure():
    listed = [name for name in files_of_the_structure() if not name.startswith("tests/")]
    there = {path.relative_to(ROOT).as_posix() for folder in FLOORS for path in (ROOT / folder).rglob("*.py")}
    there.update(path.name for path in ROOT.glob("*.py"))
    assert len(listed) == len(set(listed))
    assert {name for name in there if not name.endswith("__init__.py")} - set(listed) == set()
    assert set(listed) - there == set()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300


def test_the_readmes_program_runs_in_few_lines():
    program, = blocks(ROOT / "README.md", "python")
    assert len(program.splitlines()) <= 15
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 20
