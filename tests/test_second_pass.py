"""What a second pass of bad input found: nothing that was typed or written reaches a terminal or a file unasked."""
from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from config.presets import ROOT
from config.run_config import RunConfig
from launch.hosts.board import BOARD, find_board
from launch.run import run
from launch.split.write import split
from model.weights.parts import Part
from scripts import generate
from tests.checkpoints import refused
from tests.saved import here

ASK = ("prompt_ids=5,17,40", "ignore_eos=true", "max_new_tokens=4")


@pytest.mark.parametrize("word", ["draft=\33[2J", "temprature\33=1", "seed=" + "9" * 5000, "stages=" + "1+" * 20000,
                                  "question_file=\33[2Jx", "x" * 100_000, "a\nb\nc=1"])
def test_what_was_typed_is_reported_in_one_short_line_that_no_terminal_obeys(capsys, word):
    assert run(generate.GENERATE, [word]) == 2
    printed = capsys.readouterr().err.strip()
    assert printed.isprintable() and len(printed) < 1100 and printed.startswith("flowspec: ")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_that_no_launcher_of_ours_has_set_is_reported(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "1")
    assert run(generate.GENERATE, ["toy"]) == 2
    assert f"{name}=1 in the environment was not set by FlowSpec: unset it" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["9" * 5000, "\u0661", "\33[2J", "-1"])
@pytest.mark.parametrize("name", ["NODE_RANK", "MASTER_PORT"])
def test_a_number_of_a_board_is_reported_by_its_name(name, value):
    environment = {BOARD: "1", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", name: value}
    with pytest.raises(ValueError, match=f"{name}=.* is not possible: give a number from 0 to"):
        find_board(RunConfig(), environment)


def test_a_config_that_was_edited_in_one_ranks_folder_is_noticed(saved, tmp_path):
    split(saved / "base", tmp_path / "parts", "0+2+2", progress=False)
    path = tmp_path / "parts" / "stage_1" / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-01'))
    assert path.read_text() != text and path.stat().st_size == len(text)
    with refused("config.json has changed since it was written (its hash differs)"):
        Part(tmp_path / "parts" / "stage_1")


def test_the_lock_of_a_split_follows_no_link_and_waits_for_no_pipe(saved, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for name in ("linked", "piped"):
        (tmp_path / name).mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(precious)
    os.mkfifo(tmp_path / "piped" / ".lock")
    for name in ("linked", "piped"):
        with refused(str(tmp_path / name)):
            split(saved / "base", tmp_path / name, "0+2+2", progress=False)
    assert precious.read_text() == "kept"
    assert stat.S_ISFIFO((tmp_path / "piped" / ".lock").stat().st_mode)


def test_an_output_destroys_nothing_that_the_run_reads(saved, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"turns": ["who?"]}) + "\n")
    parts = saved / "0+2+2"
    assert here(f"model_dir={parts}", f"question_file={questions}", f"output={questions}") == 2
    assert "is the question file" in capsys.readouterr().err
    assert here(f"model_dir={parts}", *ASK, f"output={parts / 'stage_0' / 'config.json'}") == 2
    assert "which the run reads" in capsys.readouterr().err
    Part(parts / "stage_0").verify()


def test_a_trace_forgets_only_its_own_files(saved, tmp_path):
    (tmp_path / "rank_list.jsonl").write_text("mine")
    (tmp_path / "rank_7.jsonl").write_text("")
    assert here(f"model_dir={saved / '0+2+2'}", *ASK, f"trace={tmp_path}") == 0
    assert (tmp_path / "rank_list.jsonl").read_text() == "mine" and not (tmp_path / "rank_7.jsonl").exists()


def test_a_closed_stdout_is_no_traceback(saved):
    words = ["-m", "scripts.generate", f"model_dir={saved / '0+2+2'}", "processes=false", *ASK]
    ended = subprocess.run(["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, *words],
                           cwd=ROOT, text=True,
                           capture_output=True)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
