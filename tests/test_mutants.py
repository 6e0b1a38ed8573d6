"""The command scripts.mutants: what it changes in a file, and which changes the tests of a small project notice."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from config.presets import ROOT
from scripts.mutants import files_testing, main, mutations

PYTHON_TEXT = b"""\
def scaled(values, factor):
    values = [value for value in values if value]
    other = list(values)
    other.append(factor)
    if len(values) > 3:
        factor *= 2
    return [value * factor for value in values] if factor else f"{1 if factor else 2}"
"""
C_TEXT = b"""\
#define EACH(i) for (int i = 0; i < 4; i++)
HELPER int scale(int x, int *sums) {
    EACH(i) sums[i] += x;
    int y = x ? 1 : 2;
    y = x;
    x = 2 * x;
    while (x < 9) x++;
    if (x == 3)
        report(x);
    return x;
}
"""


def changes(path, content):
    return [(mutation.line, mutation.action, content[mutation.start:mutation.end].decode())
            for mutation in mutations(Path(path), content)]


def test_calls_changing_assignments_and_conditions_of_python_are_left_out():
    assert changes("some.py", PYTHON_TEXT) == [
        (2, "removed", "values = [value for value in values if value]"), (2, "negated", "value"),
        (4, "removed", "other.append(factor)"), (5, "negated", "len(values) > 3"), (6, "removed", "factor *= 2"),
        (7, "negated", "factor")]
    first = mutations(Path("some.py"), PYTHON_TEXT)[0]
    assert first.applied(PYTHON_TEXT).splitlines()[1] == b"    pass"


def test_calls_changing_assignments_and_conditions_of_c_are_left_out():
    pytest.importorskip("tree_sitter_c")
    assert changes("some.c", C_TEXT) == [
        (3, "removed", "sums[i] += x;"), (4, "negated", "x"), (6, "removed", "x = 2 * x;"), (7, "negated", "(x < 9)"),
        (7, "removed", "x++;"), (8, "negated", "(x == 3)"), (9, "removed", "report(x);")]


def test_the_tests_of_a_file_are_those_that_import_it():
    assert files_testing("model/law.py") == ["tests/test_penalties.py"]
    assert "tests/test_native.py" in files_testing("model/native/slice.c")


@pytest.fixture
def small_project(tmp_path):
    """A project of one function, whose test does not look at what becomes of zeros, and a test of recorded output."""
    (tmp_path / "tests").mkdir()
    files = {
        "scale.py": "def scaled(values, factor):\n    values = list(values)\n    values.append(1)\n"
                    "    values = [value for value in values if value]\n"
                    "    return [value * factor for value in values]\n",
        "tests/test_scale.py": "import pytest\nfrom scale import scaled\n\n"
                               "def test_values():\n    assert scaled((2, 3), 2)[:2] == [4, 6]\n\n"
                               "@pytest.mark.recorded\n"
                               "def test_recorded():\n    assert scaled((2, 3), 2) == [4, 6, 2]\n",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["recorded: ours"]\npythonpath = ["."]\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def tried_in(project, *words):
    """What the command prints when it is run in another project."""
    program = ("import sys\nfrom pathlib import Path\nfrom scripts import mutants\n"
               "mutants.ROOT = Path(sys.argv[1])\nmutants.RESULTS = mutants.ROOT / 'results'\n"
               "sys.exit(mutants.main(sys.argv[2:]))")
    process = subprocess.run([sys.executable, "-c", program, str(project), *words], cwd=ROOT, check=True,
                             stdout=subprocess.PIPE, text=True)
    return process.stdout.splitlines()


def test_survivors_are_named_and_tried_once_more_after_a_test_was_added(small_project):
    path = str(small_project / "scale.py")
    assert tried_in(small_project, path, "--jobs", "2") == [
        "scale.py: 4 mutants tried, of 4; no test notices 2",
        "  line 3: removed `values.append(1)`",
        "  line 4: removed `values = [value for value in values if value]`"]

    (small_project / "tests" / "test_scale.py").write_text(
        "from scale import scaled\n\ndef test_all():\n    assert scaled([0, 2], 2) == [4, 2]\n")
    assert tried_in(small_project, path)[0] == "scale.py: 4 mutants tried, of 4; no test notices 2"
    assert tried_in(small_project, path, "--again") == ["scale.py: 4 mutants tried, of 4; no test notices 0"]


@pytest.mark.parametrize("words, sentence", [
    (["README.md"], "README.md is no Python or C file of this project: name one, as model/tree.py"),
    (["model/none.py"], "model/none.py does not exist: name a Python or C file of this project, as model/tree.py"),
    (["model/weights/packed.py"], "no file of tests imports model/weights/packed.py: name some, as in --tests "
                                    "tests/test_tree.py"),
], ids=lambda value: value[0])
def test_what_cannot_have_mutants_is_refused(words, sentence, sentence_of):
    assert sentence in sentence_of(main, words)
