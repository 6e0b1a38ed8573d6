"""Every command of the README and of the pages is typed, up to the point where its words have been read.

Shells run the blocks as they stand, with stand-ins in place of Python and of foreign programs. What reaches a Python is
then read in this process by the very command, which ends as soon as its parser is content.
"""
from __future__ import annotations

import argparse
import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any

import pytest

import eval
import scripts
import train
from config import cli, keys
from config.presets import ROOT
from eval import results_index
from tests.sources import FLOORS, project_text
from tests.test_docs import DOCS, blocks

PAGES = [*DOCS, ROOT / "toy" / "README.md"]
PYTHONS = ("python", "python3", ".venv/bin/python", "board/bin/python", "board/bin/pip", ".venv/bin/hf")
FOREIGN = ("apt", "apt-get", "cmake", "curl", "docker", "git", "hf", "llm", "make", "open-webui", "pip", "sleep")
TOOLS = ("cat", "cksum", "dirname", "env", "mkdir", "uname")
LISTS = ("requirements.txt", "serve/requirements.txt", "tests/requirements.txt")
FIRST = "|".join(map(re.escape, ("bash", "sudo", "source", "until", *PYTHONS, *FOREIGN)))
BEGINS = rf"\s*(?:[A-Z_]+=\S+ )*(?:{FIRST}) "
USAGE = re.compile(r"\[|\bCOMMAND\b|\.NAME\b|^python3 -m dsi$")  # of commands that stand for others, or of others
OWN = re.compile(r"check_\w+|push|make_keys|netem|netns_cluster|run_worker")  # scripts that read their words themselves
STUB = f"""#!{shutil.which("bash")}
name="${{0##*/}}"
if [ "$name" = sudo ]; then exec env "$@"; fi
if [ "$name" = bash ] && [[ ! "$1" =~ {OWN.pattern.replace("?", "").replace(chr(92) + "w+", "")} ]]; then
    exec {shutil.which("bash")} "$@"
fi
if [ "$1" = -c ]; then exit 0; fi
printf '%s\\0' "$name" "$@" $'\\n' >>"$TYPED"
"""


READS = ("model_dir", "base_dir", "eagle_dir", "draft_dir", "question_file", "eagle", "check", "folder", "target",
         "given")
OTHERS = re.compile(r"\b[A-Z]+(_[A-Z]+)?\b|/models/|^models/|splits/vicuna|/my_opt/")
FILES = {"planner.md": ["boards.json"]}  # that pages show


class Read(BaseException):
    """A command has read its words, and would begin."""


def reading(original):
    def read(*args, **options):
        raise Read(original(*args, **options))

    return read


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """A clone in which nothing is installed, and every parser ends its command."""
    for package in (scripts, eval, train):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    clone = tmp_path_factory.mktemp("clone")
    furnish(clone)
    with pytest.MonkeyPatch.context() as patch:
        replaced = {cli.parse: reading(cli.parse), keys.read_keys: reading(keys.read_keys),
                    results_index.read: reading(str)}
        for module in [module for name, module in sys.modules.items()
                       if name.partition(".")[0] in FLOORS]:
            for name, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in replaced:
                    patch.setattr(module, name, replaced[value])
        patch.setattr(argparse.ArgumentParser, "parse_args", reading(argparse.ArgumentParser.parse_args))
        patch.setattr(subprocess, "run", reading(lambda words, **_: None if words[0] == "git" else words[1:]))
        patch.setattr("eval.points.subprocess", SimpleNamespace(Popen=reading(lambda words, **_: words[1:]),
                                                                STDOUT=None))
        started = reading(lambda program, words, _: ["-m", *words[3:]] if program != "bash" else None)
        patch.setattr("os.execvpe", started)
        patch.setattr("signal.signal", lambda *_: None)
        patch.setattr("launch.hub.fetch", lambda *_, **__: ROOT / "toy" / "llama")  # without a network
        patch.setattr("tempfile.tempdir", str(clone))
        patch.chdir(clone)
        yield clone


def furnish(clone: Path) -> None:
    """Fill a folder with the project, stand-ins and an environment that says that all is installed."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (clone / path.name).symlink_to(path)
    for folder in ("bin", ".venv/bin", "board/bin", "bitsandbytes"):
        (clone / folder).mkdir(parents=True, exist_ok=True)
    (clone / "stub").write_text(STUB)
    (clone / "stub").chmod(0o755)
    for name in ("bash", "sudo", "python", "python3", *FOREIGN):
        (clone / "bin" / name).symlink_to(clone / "stub")
    for name in PYTHONS[2:]:
        (clone / name).symlink_to(clone / "stub")
    for name in TOOLS:
        (clone / "bin" / name).symlink_to(shutil.which(name) or "")
    (clone / ".venv" / "bin" / "activate").touch()
    stamps = 'source scripts/env.sh; for list in "$@"; do cksum <"$list" >"$(stamp_of "$list")"; done'
    subprocess.run([shutil.which("bash"), "-ec", stamps, "stamps", *LISTS],
                   cwd=clone, check=True)


def commands(page: Path) -> list[str]:
    """The blocks of a page that a person would paste, and the commands in its text."""
    text = project_text(page)
    pasted = [block for language in ("", "bash")
              for block in blocks(page, language) if re.match(BEGINS, block)]
    prose = re.sub("```.*?```", "", text, flags=re.S)
    inline = [" ".join(code.split()) for code in re.findall("`([^`]+)`", prose)]
    return [*pasted, *(code.replace(" ...", "") for code in inline
                       if re.match(BEGINS, code) and not USAGE.search(code))]


def reach(clone: Path, command: str) -> list[list[str]]:
    """What reaches a Python or a script that reads its words itself, once a shell has run this."""
    log = clone / "typed"
    log.write_bytes(b"")
    env = {"PATH": str(clone / "bin"), "TYPED": str(log), "HOME": str(clone)}
    shell = subprocess.Popen([shutil.which("bash"), "-ec", command],
                             cwd=clone, env=env, text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = shell.communicate()
    assert shell.returncode == 0, said
    lines = log.read_text().split("\0\n\0")[:-1]
    return [line.split("\0") for line in lines]


def leave(config: Any) -> None:
    """Make what this command would leave behind, as far as commands after it read that."""
    for name in ("out_dir", "out", "trace"):
        if getattr(config, name, None):
            Path(getattr(config, name)).mkdir(parents=True, exist_ok=True)
    if getattr(config, "preset", ""):
        Path(config.preset).write_text('{"preset": "toy", "keys": {}}')


def lacking(config: Any) -> list[str]:
    """What a command would read and is not there, but for names in capitals, models to download and boards' folders."""
    paths = [Path(getattr(config, name, None) or ".") for name in READS]
    return [str(path) for path in paths if not path.exists() and not OTHERS.search(str(path))]


def read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Type `python WORDS` or `bash SCRIPT WORDS` in this process."""
    program, *words = words
    if program == "bash":
        script = project_text(words[0])
        own = words[1:words.index("--")] if "--" in words else words[1:]
        assert [word for word in own if "=" in word
                and word.partition("=")[0] + "=" not in script] == []
    elif program.startswith("python"):
        words = words[2:] if words[:2] == ["-m", "pdb"] else words
        module, rest = (words[1], words[2:]) if words[0] == "-m" else ("", words[1:])
        if module.partition(".")[0] not in FLOORS and module:
            assert find_spec(module), f"there is no {module}"
            return
        monkeypatch.setattr(sys, "argv", [words[0], *rest])
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except Read as end:
            config, = end.args
            if isinstance(config, list):
                read(["python", *config], monkeypatch)
            else:
                leave(config)
                assert lacking(config) == []
        except SystemExit as end:
            assert not end.code, end.code
        else:
            pytest.fail("it has read nothing")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES,
                         ids=lambda page: page.name if page.name != "README.md" else page.parent.name)
def test_every_command_of_a_page_can_be_typed(page, typed, monkeypatch, capsys):
    for path, content in zip(FILES.get(page.name, ()), blocks(page, "json")):
        (typed / path).write_text(content)
    wrong = []
    for command in commands(page):
        try:
            for words in reach(typed, command):
                read(words, monkeypatch)
        except AssertionError as error:
            wrong.append(f"{command}\n{error}\n{capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)
