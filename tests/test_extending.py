"""The strategy and the draft that docs/extending.md shows run everywhere: by command, evaluation, plan and server."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from config.presets import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
STRATEGY, ROW, DRAFT, DRAFT_NAMES, DRAFT_IMPORT, DRAFT_ROW = re.findall(r"```python\n(.*?)```", PAGE, re.S)
OF_STRATEGY, OF_DRAFT = (block.splitlines() for block in re.findall(r"```\n(bash run_pipe.sh.*?)```", PAGE, re.S))
COMMANDS = [*OF_STRATEGY, *OF_DRAFT]
NAME = re.match(r"def (\w+)", STRATEGY)[1]
LAUNCHERS = {"run_pipe.sh": "scripts.generate", "run_eval.sh": "scripts.evaluate emulated",
             "run_server.sh": "serve"}
SHORTER = {"run_pipe.sh": ["link=threads", "max_new_tokens=16"], "run_eval.sh": ["link=threads"]}
LEFT_OUT = shutil.ignore_patterns(".*", "docs", "tests", "splits", "models", "results", "board")
END = "-- end --\n"
PROGRAM = """
import json, os, runpy, sys, threading, time

os._exit = sys.exit  # with which some commands end

def serve(*words):
    from scripts.serve import build
    engine, _ = build([*words, "link=threads"])
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    while engine.health.status == "loading":
        time.sleep(0.05)
    answer = engine.call(lambda pipeline: pipeline.generate("What does a baker do?", max_new_tokens=8)).result()
    print(answer.answer.new_tokens, "tokens")
    engine.stop()
    thread.join()

for module, *sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        serve(*sys.argv[1:]) if module == "serve" else runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, (module, end.code)
    print("-- end --", flush=True)
"""
@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project into which the blocks of the page were pasted."""
    folder = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    paste(folder / "pipeline" / "strategies.py", r"^STRATEGIES:", f"{STRATEGY}\n\nSTRATEGIES:")
    paste(folder / "pipeline" / "strategies.py", r"\)\}\n\Z", f", {NAME})}}\n")
    paste(folder / "config" / "methods.py", r"^METHODS = \{\n", f"METHODS = {{\n{ROW}")
    (folder / "model" / "drafts" / "bigram.py").write_text(DRAFT, encoding="utf-8")
    paste(folder / "config" / "drafts.py", r'"none"\)$', f'"none",\n{DRAFT_NAMES})')
    paste(folder / "launch" / "drafts.py", r"^(?=from model.drafts.dflash)", DRAFT_IMPORT)
    paste(folder / "launch" / "drafts.py", r"^(?=}\n\Z)", DRAFT_ROW)
    return folder


def paste(path, where, text):
    pasted, places = re.subn(where, lambda found: text,
                             path.read_text(encoding="utf-8"), flags=re.M)
    assert places == 1
    path.write_text(pasted, encoding="utf-8")


def typed(command):
    """The module and the words of a command of the page, whose launchers would make an environment first."""
    words = shlex.split(command)[1:]
    if words[0] == "-m":
        return words[1:]
    return [*LAUNCHERS[words[0]].split(),
            *words[1:], *SHORTER.get(words[0], [])]


def test_the_page_has_one_function_of_some_ten_lines_and_one_row():
    assert len(STRATEGY.splitlines()) <= 12
    assert len(ROW.splitlines()) == 1
    assert [command.split()[1] for command in OF_STRATEGY] == ["run_pipe.sh", "run_eval.sh", "-m", "run_server.sh"]


def test_a_draft_needs_one_file_and_three_lines_in_two_others():
    assert len(DRAFT.splitlines()) <= 50
    assert [len(block.splitlines()) for block in (DRAFT_NAMES, DRAFT_IMPORT, DRAFT_ROW)] == [1, 1, 1]
    assert [command.split()[1] for command in OF_DRAFT] == ["run_pipe.sh", "run_eval.sh"]


def test_what_the_page_shows_runs_as_pasted(project):
    """By command, evaluation, plan and server, one after the other in one process of the copied project."""
    words = [sys.executable, "-c", PROGRAM, json.dumps([typed(command) for command in COMMANDS])]
    environment = {**os.environ, "PYTHONPATH": str(project)}  # which scripts/env.sh sets to the project itself
    ran = subprocess.run(words, cwd=project, env=environment, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    assert ran.returncode == 0, ran.stdout
    *shown, rest = ran.stdout.split(END)
    assert rest.strip() == ""
    words_shown = ("verifications", NAME, NAME, "8 tokens", "of bigram", "streaming")
    assert len(shown) == len(words_shown)
    for text, word in zip(shown, words_shown):
        assert word in text
