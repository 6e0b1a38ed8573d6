"""Every line of the lists of packages can be installed with every Python that the README promises."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from config.presets import ROOT
from tests.saved import run_program

OLDEST, NEWEST = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text(encoding="utf-8"))[0]
PROMISED = [f"3.{minor}" for minor in range(int(OLDEST), int(NEWEST) + 1)]
PC = ("requirements.txt", "serve/requirements.txt", "tests/requirements.txt")
BOARDS = ("requirements_jetson.txt", "serve/requirements.txt")
JETPACK5 = ("manylinux_2_17_aarch64", "manylinux2014_aarch64", "manylinux_2_28_aarch64")
JETPACK6 = (*JETPACK5, "manylinux_2_34_aarch64")
EVERY = "FLOWSPEC_INDEX" in os.environ  # scripts/check_setup.sh asks for all lines, not only for those that are cheap
QUIET = ("-q", "--disable-pip-version-check", "--timeout", "15", "--dry-run", "--no-deps", "--ignore-installed")


def held(names: tuple[str, ...], python: str) -> list[Requirement]:
    """The lines that hold for a Python, without their conditions: pip would ask the Python that runs it."""
    lines = [line.partition("#")[0].strip() for name in names
             for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    found = []
    for line in map(Requirement, filter(None, lines)):
        if line.marker is None or line.marker.evaluate({"python_version": python}):
            line.marker = None
            found.append(line)
    return found


def pythons_of(line: Requirement) -> str | None:
    """The Pythons that the release of this line says it needs; None if that release is not installed here."""
    try:
        about = metadata(line.name)
    except PackageNotFoundError:
        return None
    return (about["Requires-Python"] or "") if line.specifier.contains(about["Version"]) else None


@pytest.mark.parametrize("python", PROMISED)
def test_no_release_that_is_installed_here_refuses_a_promised_python(python):
    needs = {str(line): pythons_of(line) for line in held(PC, python)}
    assert {line: need for line, need in needs.items()
            if need and not SpecifierSet(need).contains(f"{python}.0")} == {}


def resolve(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What pip would install, of these packages alone."""
    return run_program(sys.executable, "-m", "pip", "install", *QUIET, *words)


@pytest.mark.parametrize("names, python, platforms", [
    *((PC, python, ()) for python in PROMISED),
    (BOARDS[:1], "3.8", JETPACK5), (BOARDS, "3.10", JETPACK6)])
def test_the_index_has_a_wheel_of_every_line(names, python, platforms, tmp_path):
    """Without check_setup.sh it is asked for releases alone that are not installed here: all of them take a minute."""
    asked = [str(line) for line in held(names, python) if EVERY or pythons_of(line) is None]
    if not asked:
        pytest.skip("every release is installed here; scripts/check_setup.sh asks for them all the same")
    other = [f"--platform={platform}" for platform in platforms]
    ran = resolve("--only-binary=:all:", f"--python-version={python}", *other, "--target", tmp_path, *asked)
    if ran.returncode and resolve("--target", tmp_path, "tqdm").returncode:  # which runs everywhere
        pytest.skip("no index of packages can be asked")
    assert ran.returncode == 0, ran.stderr
