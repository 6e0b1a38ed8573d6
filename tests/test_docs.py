"""The documentation says what the code does."""
from __future__ import annotations

import re

import pytest

from config.cli import EXAMPLES
from config.methods import METHODS
from config.presets import ROOT
from config.schema.families import FAMILIES
from tests.sources import FLOORS, project_text

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


UNUSUAL = ("told", "foretold", "anew", "whoever", "dear", "thereof", "held to be", "in vain")


def anchor(heading):
    """The name under which GitHub links to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def needs_the_toy(command):
    """Whether a command has folders of the toy, or a split of its eight layers."""
    split = re.search(r"\bstages=(\d+(?:\+\d+)+)", command)
    return bool(re.search("[=:,]toy/", command)) or bool(split) and sum(map(int, split[1].split("+"))) == 8


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", project_text(path), re.S)


def test_methods_md_has_a_section_for_every_method():
    page = project_text("docs/methods.md")
    assert re.findall(r"^## (\w+): ", page, re.M) == list(METHODS)


def test_the_readme_has_a_table_of_five_methods():
    rows = re.findall(r"^\| `(\w+)` \|", project_text("README.md"), re.M)
    assert len(rows) == 5 and set(rows) <= METHODS.keys()


def test_every_file_that_the_documentation_links_to_exists():
    for path in DOCS:
        for link in re.findall(r"\]\((?!http)([^)#]+)", project_text(path)):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_room_is_in_the_structure():
    page = project_text("docs/structure.md")
    rooms = {path.parent.relative_to(ROOT).as_posix()
             for folder in FLOORS for path in (ROOT / folder).rglob("*.py")}
    assert {room for room in rooms if f"{room}/" not in page} == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_the_documentation_keeps_to_ordinary_words(path):
    text = " ".join(project_text(path).split())
    assert re.findall(rf"\b({'|'.join(UNUSUAL)})\b", text, re.I) == []


def test_commands_for_the_toy_name_it():
    """Else they would run the model that is there where none is named."""
    texts = [EXAMPLES, *(project_text(path) for path in DOCS)]
    commands = [found for text in texts
                for found in re.findall(r"bash (?:run_\w+|tp/run_tp)\.sh[^`#\n]*", text)]
    asked = [command for command in commands if needs_the_toy(command)]
    assert len(asked) >= 4
    assert [command for command in asked if not re.search(r"\.sh toy\b|model(_dir)?=", command)] == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_heading_that_the_documentation_links_to_exists(path):
    for link, heading in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", project_text(path)):
        there = project_text(path.parent / link if link else path)
        assert heading in map(anchor, re.findall(r"^#+ (.+)$", there, re.M)), f"{link}#{heading}"


def test_the_readmes_program_runs_in_few_lines(capfd, engines_are_forked):
    program, = blocks(ROOT / "README.md", "python")
    assert len(program.splitlines()) <= 15
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert len(capfd.readouterr().out.split()) > 20


def test_the_families_of_the_readme_are_those_of_the_page_on_models():
    page = project_text("docs/models.md")
    table = page.partition("## Families")[2].partition("- **Tests.**")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")][1:]
    kinds = {kind for row in rows for kind in re.findall(r"`(\w+)`", row[1])}
    cells = (re.sub(r"\(.*?\)|1 to 3\.2|also 16k|but 350m|dense", "", row[2]) for row in rows)
    models = {name.strip() for cell in cells for name in re.split("[,;]", cell)} - {""}
    readme = project_text("README.md")
    listed = readme.partition("[Families](docs/models.md#families): ")[2].partition(". Others")[0]
    assert kinds == set(FAMILIES)
    assert {name.strip() for name in " ".join(listed.split()).split(",")} == models
