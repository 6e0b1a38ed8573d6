"""scripts/push.sh copies each board its own part, over an ssh that stays on this machine."""
from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from config.presets import ROOT
from launch.hosts.agreement import code_version
from tests.saved import models

SSH = """#!/bin/sh
# ssh [-l USER] HOST COMMAND, on this machine: each host is a folder beside this file
if [ "$1" = -l ]; then shift 2; fi
cd "$(dirname "$0")/${1#*@}" && shift && exec sh -c "$*"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models(tmp_path_factory.getbasetemp() / "saved")


@pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync")
def test_each_board_gets_its_own_part_which_it_compares_with_the_hashes(saved, tmp_path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("b0 user=me\nb1 folder=f\nb2\n")
    for name in ("b0", "b1", "b2"):
        (tmp_path / name).mkdir()

    def push(*words):
        return subprocess.run(["bash", ROOT / "scripts" / "push.sh", f"hosts={tmp_path / 'hosts'}", *words], text=True,
                              env={**os.environ, "SSH": str(tmp_path / "ssh")}, capture_output=True)

    split_dir = f"split={saved / '0+2+2'}"
    assert push(split_dir, "dry=true").returncode == 0 and not any(tmp_path.glob("b*/*"))
    assert push(split_dir).stdout.count("compared with the hashes, all the same") == 3
    parts = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.glob("b*/**/manifest.json"))
    assert parts == [f"b{rank}/{folder}/splits/0+2+2/stage_{rank}"
                     for rank, folder in enumerate(("flowspec", "f", "flowspec"))]
    weights = tmp_path / parts[1] / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that rsync sees no change
    wrong = push(split_dir, "ranks=1")
    assert wrong.returncode == 2 and "on b1 differs from its manifest" in wrong.stderr
    assert push("code=true", "ranks=1").returncode == 0 and (tmp_path / "b1" / "f" / "run_jetson.sh").exists()
    assert code_version(tmp_path / "b1" / "f") == code_version() and (tmp_path / "b1" / "f" / "hosts.txt").exists()
    assert "no line for rank 7, only for 0 to 2" in push(split_dir, "ranks=7").stderr
