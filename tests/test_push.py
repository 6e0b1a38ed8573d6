"""scripts/push.sh copies each board its own part, over an ssh that stays on this machine."""
import os
import shutil
import sys

import pytest

from cluster.agreement import code_version
from cluster.keys import read_keys
from config.presets import ROOT
from tests.saved import run_program

SSH = """#!/bin/sh
# ssh [-l USER] [--] HOST COMMAND, on this machine: each host is a folder beside this file
if [ "$1" = -l ]; then shift 2; fi
if [ "$1" = -- ]; then shift; fi
cd "$(dirname "$0")/${1#*@}" && shift && exec sh -c "$*"
"""
needs_rsync = pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync")


def save_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def push(tmp_path):
    """The command, whose boards b0, b1 and b2 are folders."""
    save_program(tmp_path / "ssh", SSH)
    (tmp_path / "hosts").write_text("b0 user=me\nb1 folder=f\nb2\n")
    for name in ("b0", "b1", "b2"):
        (tmp_path / name).mkdir()

    def run(*words, hosts="", **environment):
        if hosts:
            (tmp_path / "hosts").write_text(hosts)
        return run_program("bash", "scripts/push.sh", f"hosts={tmp_path / 'hosts'}", *words,
                           env={**os.environ, "SSH": str(tmp_path / "ssh"), **environment})

    return run


@needs_rsync
def test_each_board_gets_its_own_part_which_it_compares_with_the_hashes(saved, tmp_path, push):
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

    assert wrong.returncode == 2 and "b1:f/splits/0+2+2/stage_1 differs from its manifest" in wrong.stderr
    assert push("code=true", "ranks=1").returncode == 0 and (tmp_path / "b1" / "f" / "run_jetson.sh").exists()
    assert code_version(tmp_path / "b1" / "f") == code_version()
    assert (tmp_path / "b1" / "f" / "hosts.txt").exists()
    assert "no line for rank 7, only for 0 to 2" in push(split_dir, "ranks=7").stderr


@needs_rsync
def test_a_spare_gets_the_parts_for_which_it_may_stand_in(saved, tmp_path, push):
    (tmp_path / "b3").mkdir()
    done = push(f"split={saved / '0+2+2'}", "ranks=0,3", hosts="b0\nb1\nb3 spare\nb2\n")
    assert done.returncode == 0 and done.stdout.count("all the same") == 3, done.stderr
    parts = [sorted(path.name for path in tmp_path.glob(f"b{rank}/flowspec/splits/0+2+2/*")) for rank in range(4)]
    assert parts == [["stage_0"], [], [], ["stage_1", "stage_2"]]


@needs_rsync
def test_the_line_of_this_machine_needs_no_ssh(saved, tmp_path):
    clone, home, log = tmp_path / "clone", tmp_path / "home", tmp_path / "log"
    for name in ("scripts", "cluster", "config"):
        shutil.copytree(ROOT / name, clone / name)
    save_program(tmp_path / "ssh", SSH.replace('cd "', f'echo "$*" >>{log}; cd "'))
    (tmp_path / "b1").mkdir()
    home.mkdir()
    (tmp_path / "hosts").write_text("127.0.0.1\nb1\n127.0.0.1 folder=other user=me\n127.0.0.1 user=you\n")
    around = {**os.environ, "SSH": str(tmp_path / "ssh"), "PYTHON": sys.executable, "HOME": str(home), "USER": "me"}

    def typed(name, *words):
        return run_program("bash", str(clone / "scripts" / name), f"hosts={tmp_path / 'hosts'}", "ranks=0,1,2", *words,
                           env=around, cwd=tmp_path)

    done = typed("push.sh", "code=true", f"split={saved / '0+1+1+2'}")
    assert done.returncode == 0 and done.stdout.count("all the same") == 3, done.stderr
    assert f"the program of this machine is in {clone} already" in done.stdout and not (clone / "hosts.txt").exists()
    assert (home / "other" / "scripts" / "push.sh").is_file() and (home / "other" / "hosts.txt").is_file()
    assert [path.name for path in clone.glob("splits/0+1+1+2/*")] == ["stage_0"]
    assert [path.name for path in home.glob("other/splits/0+1+1+2/*")] == ["stage_2"]

    done = typed("make_keys.sh", f"keys={tmp_path / 'cluster'}")
    assert done.returncode == 0 and all(
        read_keys(folder / "keys") for folder in (clone, home / "other", tmp_path / "b1" / "flowspec")), done.stderr
    assert "127.0.0.1" not in log.read_text()
    assert typed("make_keys.sh", "ranks=3").returncode == 2 and "you@127.0.0.1" in log.read_text()


PYTHON = """#!/bin/sh
# a Python in which the split of a model is there already
case "$*" in *share_out*) echo "$*" >&2 && echo "$MADE" ;; *) exec %s "$@" ;; esac
"""


@needs_rsync
def test_a_model_is_split_for_the_boards_first(saved, tmp_path, push):
    save_program(tmp_path / "python", PYTHON % sys.executable)
    words = "model=a/b", "quant=int4"
    around = {"PYTHON": str(tmp_path / "python"), "MADE": str(saved / "0+2+2")}
    done = push(*words, "ranks=1", **around)
    assert done.returncode == 0 and f"hosts={tmp_path / 'hosts'} model=a/b quant=int4" in done.stderr
    assert [path.name for path in tmp_path.glob("b*/*/splits/0+2+2/*")] == ["stage_1"]
    assert "model_dir=splits/0+2+2" in done.stdout


@needs_rsync
@pytest.mark.parametrize("words, sentence", [
    ("model=a/b split=x", "leave split= and replicas= out"),
    ("model=a/b replicas=true", "leave split= and replicas= out"),
    ("ssm=x", "unknown word ssm=x: give hosts=FILE"),
    ("quant=int4", "quant=int4 needs a model: give model=NAME"),
    ("stages=4 split=x", "stages=4 needs a model: give model=NAME"),
    ("revision=v1", "unknown word revision=v1: give hosts=FILE"),
    ("model=", "unknown word model=: give hosts=FILE"),
    ("model=no-such-thing", "model=no-such-thing is no file or folder here: give the path"),
], ids=str)
def test_a_model_that_cannot_be_split_for_boards_is_refused(words, sentence, push, tmp_path):
    found = push(*words.split())
    assert found.returncode == 2 and sentence in found.stderr
    assert found.stderr.startswith("flowspec: ") and found.stderr.count("\n") == 1
    assert not any(tmp_path.glob("b?/*"))


@needs_rsync
@pytest.mark.parametrize("line", ["-oProxyCommand=true", "-l@b1", "b1 user=-l", "me@-b1", "b1 folder=-x"])
def test_what_begins_with_a_dash_reaches_neither_ssh_nor_rsync(push, tmp_path, line):
    found = push("code=true", hosts=f"b0\n{line}\n")
    assert found.returncode == 2 and "line 2 of" in found.stderr and "begins with -" in found.stderr
    assert not any(tmp_path.glob("b*/*"))


@needs_rsync
@pytest.mark.parametrize("ranks", [".*", "", "1,", "$(true)"])
def test_ranks_are_numbers_and_no_pattern(push, saved, tmp_path, ranks):
    found = push(f"split={saved / '0+2+2'}", f"ranks={ranks}")
    assert found.returncode == 2 and found.stderr.startswith("flowspec: ranks=") and found.stdout == ""
    assert not any(tmp_path.glob("b*/*"))


@needs_rsync
def test_a_quote_in_a_folder_stays_in_its_name(push, saved, tmp_path):
    whole = tmp_path / "it's;touch odd:1"
    shutil.copytree(saved / "0+2+2", whole)
    names = ["x';touch${IFS}owned;'", '"$(touch${IFS}owned)"', "~/a&b"]
    hosts = "".join(f"b{rank} folder={name}\n" for rank, name in enumerate(names))
    done = push(f"split={whole}", hosts=hosts)
    assert done.returncode == 0 and done.stdout.count("all the same") == 3, done.stderr
    for rank, name in enumerate([*names[:2], "a&b"]):
        assert [path.name for path in (tmp_path / f"b{rank}").iterdir()] == [name]
        assert (tmp_path / f"b{rank}" / name / "splits" / whole.name / f"stage_{rank}" / "manifest.json").is_file()
