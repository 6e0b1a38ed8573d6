"""Boards that have the whole model split it for themselves, perhaps all into one folder at the same time."""
import fcntl
import shutil
import threading
from dataclasses import replace

import pytest

from config.run_config import RunConfig
from launch import prepare, share_out
from model.weights.parts import MANIFEST, Part
from tests.saved import wait_until


@pytest.fixture
def board(monkeypatch, tmp_path, saved):
    """What rank 1's board does in a fresh clone, and the folder in which it does that."""
    monkeypatch.setattr(prepare, "HOME", tmp_path)
    monkeypatch.setenv("RANK", "1")
    config = RunConfig(base_dir=str(saved / "base"), eagle_dir=str(saved / "head"), stages="0+2+2")
    return lambda: prepare.split_of(config, may_write=False), tmp_path / "splits" / "base-0+2+2-head"


def test_a_board_waits_for_the_board_that_still_writes(board):
    split, folder = board
    (folder / "stage_1").mkdir(parents=True)  # the other board has come so far
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=split)
        thread.start()
        thread.join(1)
        assert thread.is_alive() and not (folder / "stage_1" / MANIFEST).exists()
    assert wait_until(lambda: not thread.is_alive(), 60) and Part(folder / "stage_1").rank == 1


@pytest.mark.parametrize("broken", [
    lambda part: (part / MANIFEST).unlink(), lambda part: (part / "model.safetensors").write_bytes(b"half"),
    lambda part: (part / MANIFEST).write_text("{"), lambda part: shutil.rmtree(part),
], ids=["manifest", "weights", "half a manifest", "folder"])
def test_a_split_that_broke_off_is_made_whole(board, broken):
    split, folder = board
    split()
    broken(folder / "stage_1")
    assert split() == folder and Part(folder / "stage_1").rank == 1


def test_a_board_reads_its_own_part_alone(board):
    split, folder = board
    split()
    (folder / "stage_0" / MANIFEST).write_text("{")
    assert prepare.open_part(folder, 1).rank == 1


def test_what_is_whole_is_left_alone(board):
    split, folder = board
    split()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    split()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_runs_with_different_heads_do_not_write_into_one_folder():
    config = RunConfig(base_dir="base")
    names = [prepare._split_name(replace(config, eagle_dir=head), "0+4", "none")
             for head in ("", "deep", "other/flat")]
    assert names == ["base-0+4", "base-0+4-deep", "base-0+4-flat"]


def test_a_model_is_split_for_the_boards_of_a_hosts_file(monkeypatch, tmp_path, saved, capsys):
    monkeypatch.setattr(prepare, "HOME", tmp_path)
    (tmp_path / "hosts").write_text("b0\nb1 memory=1\nb2 memory=8\n")
    words = [f"hosts={tmp_path / 'hosts'}", f"model={saved / 'base'}"]
    assert share_out.main(words) == 0
    folder = tmp_path / "splits" / "base-0+1+3"
    assert capsys.readouterr().out == f"{folder}\n" and Part(folder / "stage_2").layers == (1, 4)
    assert share_out.main([*words, "stages=2", "quant=int4"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'splits' / 'base-0+2+2-int4'}\n"
