"""scripts/env.sh makes .venv once, no matter who starts, stops or fails. A stand-in takes Python's and pip's place;
scripts/check_setup.sh tries the real ones."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Iterator

import pytest

from config.presets import ROOT

# Notes what it is asked to install. By files beside the clone it fails (`says`), has no CPU build of torch
# (`no_torch`), or waits for `go` (`wait`).
PYTHON = r"""#!/usr/bin/env bash
here="$(dirname "$0")"
case "$*" in
    "-c import ensurepip, venv") ! [ -e "$here/no_ensurepip" ] ;;
    "-c import sys; sys.exit(sys.version_info"*) ! [ -e "$here/old" ] ;;
    "-c from importlib"*) ! [ -e "$TOP/no_torch" ] ;;
    --version) echo "Python 3.11.2" ;;
    "-m venv --clear --without-pip "*)
        if [ -e "$TOP/venv_says" ]; then cat "$TOP/venv_says" && exit 1; fi
        rm -rf "${@: -1}" && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    *"-m ensurepip "*) touch "$here/pip" ;;
    *"install -q --no-index pip") [ -e "$here/pip" ] ;;
    *" pip>=24.1") echo "$*" >>"$here/newer_pip" && ! [ -e "$TOP/no_newer_pip" ] ;;
    *"-m pip config list") ! [ -e "$TOP/index" ] || cat "$TOP/index" ;;
    *"-m pip "*)
        echo "$PIP_USE_PEP517 ${@: -1}" >>"$TOP/asked"
        echo "$PIP_RETRIES" >>"$TOP/retries"
        [[ "$*" != *" --compile "* ]] || touch "$TOP/compiled"
        if [ -e "$TOP/shows" ]; then cat "$TOP/shows"; fi
        if [ -e "$TOP/wait" ]; then until [ -e "$TOP/go" ]; do sleep 0.02; done; fi
        if [ -e "$TOP/no_torch" ] && [[ "$*" = *+cpu ]]; then echo "ERROR: there is none" >&2 && exit 1; fi
        if [ -e "$TOP/says" ]; then cat "$TOP/says" >&2 && exit 1; fi ;;
    *) echo "the stand-in was asked $*" >&2 && exit 9 ;;
esac
"""
UV = r"""#!/usr/bin/env bash
echo "uv ${@: -1}" >>"$TOP/asked"
[[ "$*" != *" --compile-bytecode "* ]] || touch "$TOP/compiled"
! [ -e "$TOP/uv_fails" ]
"""
TOOLS = "bash cat cksum cp dirname env flock grep mkdir rm sed sleep touch uname".split()
START = ("bash", "-c", 'set -euo pipefail; source scripts/env.sh; make_env "$@"; echo "$PY"', "start")


def end(begun: subprocess.Popen[str]) -> tuple[str, str, int]:
    """What it said, on standard output and standard error, and its exit code."""
    try:
        return (*begun.communicate(timeout=600), begun.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(begun.pid, signal.SIGKILL)  # with all that it began
        raise


class Clone:
    """What of the project a first start needs, in a folder whose name has a space."""

    def __init__(self, top: Path) -> None:
        self.top, self.root, self.bin = top, top / "a clone", top / "bin"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "tests").mkdir()
        (self.root / "serve").mkdir()
        for name in ("run_server.sh", "scripts/env.sh", "requirements.txt", "serve/requirements.txt",
                     "tests/requirements.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.python("python3")
        (self.bin / "tools").mkdir()  # without this machine's Pythons
        for name in filter(shutil.which, TOOLS):
            (self.bin / "tools" / name).symlink_to(shutil.which(name) or "")

    def python(self, name: str, *lacks: str) -> Path:
        """A Python in a folder of its own, so that it has what the other ones lack."""
        folder = self.bin / name
        folder.mkdir(parents=True)
        (folder / name).write_text(PYTHON)
        (folder / name).chmod(0o755)
        for lack in lacks:
            (folder / lack).touch()
        return folder / name

    def add_uv(self) -> None:
        uv = self.bin / "tools" / "uv"
        uv.write_text(UV)
        uv.chmod(0o755)

    def begin(self, *lists: str, command=START, **options) -> subprocess.Popen[str]:
        env = {"PATH": os.pathsep.join(map(str, self.bin.iterdir())),
               "TOP": str(self.top), **options.pop("env", {})}
        return subprocess.Popen([*command, *lists], cwd=self.root, env=env, text=True,
                                start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def start(self, *lists: str, **options) -> tuple[int, str]:
        """The exit code, and the last line on standard error or else on standard output."""
        out, err, code = end(self.begin(*lists, **options))
        return code, (err or out).splitlines()[-1]

    def refusal(self, *lists: str, **options) -> str:
        """What is said of a start that cannot be."""
        code, said = self.start(*lists, **options)
        assert code == 2
        return said

    @property
    def ready(self) -> tuple[int, str]:
        return 0, f"{self.root}/.venv/bin/python"

    @property
    def asked(self) -> list[str]:
        return (self.top / "asked").read_text().splitlines()

    def begin_and_wait(self) -> subprocess.Popen[str]:
        """A start that has come as far as pip, which waits."""
        (self.top / "wait").touch()
        begun = self.begin()
        while begun.poll() is None and not (self.top / "asked").exists():
            time.sleep(0.02)
        return begun


@pytest.fixture
def clone() -> Iterator[Clone]:
    """Where other users may read too, unlike pytest's own folders."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    yield Clone(top)
    shutil.rmtree(top)


def test_the_first_start_installs_each_list_once_and_later_ones_ask_nobody(clone):
    code, said = clone.start("tests/requirements.txt")
    assert code == 0 and said == "flowspec: installing tests/requirements.txt ..."
    lists = [f"1 {clone.root}/{name}" for name in ("requirements.txt", "tests/requirements.txt")]
    assert clone.asked == lists, "each once, and what has no wheel is built apart"
    assert clone.start() == clone.start("tests/requirements.txt") == clone.ready and clone.asked == lists
    with (clone.root / "tests" / "requirements.txt").open("a") as file:
        file.write("more\n")
    assert clone.start() == clone.ready and clone.asked == lists
    assert clone.start("tests/requirements.txt")[0] == 0
    assert clone.asked == [*lists, lists[1]]


def test_the_packages_of_the_server_are_installed_by_its_own_start(clone):
    clone.start()
    assert clone.asked == [f"1 {clone.root}/requirements.txt"]
    assert "fastapi" not in Path(clone.asked[0][2:]).read_text()
    code, said = clone.start(command=["bash", "run_server.sh"])
    assert (code, said) == (9, "the stand-in was asked -m flowspec serve")
    assert clone.asked[1:] == [f"1 {clone.root}/serve/requirements.txt"]


@pytest.mark.parametrize("is_there", [True, False])
def test_an_old_pip_is_replaced_once_where_a_newer_one_is_found(clone, is_there):
    if not is_there:
        (clone.top / "no_newer_pip").touch()
    assert clone.start()[0] == 0 and clone.start("tests/requirements.txt")[0] == 0
    assert len((clone.root / ".venv" / "bin" / "newer_pip").read_text().splitlines()) == 1
    assert len(clone.asked) == 2


@pytest.mark.parametrize("without", ["", "uv_fails", "index"])
def test_uv_installs_where_the_machine_has_it_and_pip_where_that_fails_or_has_indexes_of_its_own(clone, without):
    clone.add_uv()
    if without:
        (clone.top / without).write_text("global.index-url='file:///here'\n" if without == "index" else "")
    assert clone.start()[0] == 0
    assert clone.asked == {"": [f"uv {clone.root}/requirements.txt"],
                           "uv_fails": [f"uv {clone.root}/requirements.txt", f"1 {clone.root}/requirements.txt"],
                           "index": [f"1 {clone.root}/requirements.txt"]}[without]
    assert clone.start() == clone.ready


@pytest.mark.parametrize("has_uv", [True, False])
@pytest.mark.parametrize("value", ["", "1"])
def test_modules_are_compiled_by_the_installation_only_where_python_may_not_write_them_later(clone, has_uv, value):
    if has_uv:
        clone.add_uv()
    assert clone.start(env={"PYTHONDONTWRITEBYTECODE": value})[0] == 0
    assert (clone.top / "compiled").exists() == bool(value)


@pytest.mark.skipif(os.uname()[::4] != ("Linux", "x86_64")
                    or Path("/dev/nvidia0").exists() or
                    bool(shutil.which("nvidia-smi")), reason="needs a machine that would take the CPU build")
def test_the_cpu_build_of_torch_is_tried_first_and_is_not_needed(clone):
    (clone.top / "no_torch").touch()
    out, err, code = end(clone.begin())
    assert code == 0 and "no CPU build was installed (there is none); the general build follows (larger)" in err
    assert [line.rpartition("/")[2].partition("==")[0] for line in clone.asked] == ["1 torch", "requirements.txt"]
    assert clone.asked[0].endswith("+cpu") and "ERROR" not in err


OFFLINE = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError("HTTPSConnection(host='a', port=1): \
Failed to establish a new connection: [Errno 101] Network is unreachable")': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0
"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n"
NESTED = """\
  error: subprocess-exited-with-error
  × pip subprocess to install build dependencies did not run successfully.
  ╰─> [2 lines of output]
      ERROR: No matching distribution found for setuptools>=40.8.0
error: subprocess-exited-with-error
× pip subprocess to install build dependencies did not run successfully.
"""
@pytest.mark.parametrize("says, reason", [
    (OFFLINE, "No matching distribution found for torch==2.13.0 (connection broken: [Errno 101] Network is "
              "unreachable); check the network and pip's settings"),
    (FULL, "Could not install packages due to an OSError: [Errno 28] No space left on device; free some space in ROOT "
           "and /tmp"),
    (NESTED, "No matching distribution found for setuptools>=40.8.0; check the network and pip's settings"),
    ("WARNING: something else\n", "it ended with exit code 1; fix that"),
], ids="offline full nested mute".split())
def test_the_last_sentence_has_pips_own_reason_and_the_next_start_asks_again(clone, says, reason):
    (clone.top / "says").write_text(says)
    got = f"{reason}, then type the command again.".replace("ROOT", str(clone.root))
    assert clone.start() == (2, f"flowspec: pip could not install requirements.txt: {got}")
    (clone.top / "says").unlink()
    assert clone.start()[0] == 0 and len(clone.asked) == 2


DOWNLOADS = """Looking in indexes: https://index/simple
Collecting torch==2.13.0 (from -r requirements.txt (line 3))
  Downloading https://index/torch-2.13.0-cp311-cp311-linux_x86_64.whl.metadata (29 kB)
Downloading https://index/torch-2.13.0-cp311-cp311-linux_x86_64.whl (189.3 MB)
Downloading idna-3.10-py3-none-any.whl (70 kB)
Using cached numpy-2.2.0-cp311-cp311-manylinux.whl (16.4 MB)
Installing collected packages: torch, numpy
Successfully installed torch-2.13.0 numpy-2.2.0
"""


def test_large_downloads_are_shown_while_packages_are_installed(clone):
    (clone.top / "shows").write_text(DOWNLOADS)
    _, messages, code = end(clone.begin())
    assert code == 0
    assert messages.splitlines()[-4:] == [
        "flowspec: installing requirements.txt ...", "flowspec:   torch (189.3 MB)", "flowspec:   numpy (16.4 MB)",
        "flowspec:   unpacking them ..."]


def test_what_venv_complains_of_is_reported(clone):
    (clone.top / "venv_says").write_text("some words\nError: [Errno 28] No space left on device\n")
    said = clone.refusal()
    assert "could not make" in said and "Error: [Errno 28] No space left on device; fix that" in said


@pytest.mark.parametrize("lack", ["pip", "python"])
def test_half_an_environment_is_made_again(clone, lack):
    assert clone.start()[0] == 0
    (clone.root / ".venv" / ".installed-requirements.txt").unlink()
    (clone.root / ".venv" / "bin" / lack).unlink()
    _, said, code = end(clone.begin())
    assert "making the environment .venv" in said and code == 0


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
@pytest.mark.parametrize("killed", [False, True])
def test_a_second_start_waits_for_the_first_even_if_that_was_killed_and_finds_all_done(clone, killed):
    first = clone.begin_and_wait()
    second = clone.begin()
    assert second.stderr and second.stderr.readline() == (
        "flowspec: another start is filling .venv; waiting for it ...\n")
    if killed:
        first.kill()  # what it started goes on
    (clone.top / "go").touch()
    assert end(second) == (clone.ready[1] + "\n", "", 0)
    assert end(first)[2] == (-signal.SIGKILL if killed else 0)
    assert len(clone.asked) == 1


@pytest.mark.parametrize("signum, code",
                         [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_start_that_is_stopped_leaves_nothing_in_the_way_of_the_next(clone, signum, code):
    begun = clone.begin_and_wait()
    os.killpg(begun.pid, signum)
    _, said, ended = end(begun)
    assert ended == code
    assert code < 0 or said.endswith("flowspec: stopped; type the command again to continue.\n")
    (clone.top / "go").touch()
    assert clone.start()[0] == 0 and len(clone.asked) == 2


def shut(folder: Path) -> dict[str, int]:
    """Takes away from everybody the right to write there; how to start as somebody who heeds that."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & 0o555)
    return {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}


def reopen(folder: Path) -> None:
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        path.chmod(0o755)


def test_a_clone_that_may_only_be_read_serves_if_it_is_ready_and_else_says_what_to_do(clone):
    said = clone.refusal(**shut(clone.root))
    assert f"you may not write to {clone.root}: let its owner" in said
    reopen(clone.root)
    assert clone.start()[0] == 0
    assert clone.start(**shut(clone.root)) == clone.ready
    said = clone.refusal("tests/requirements.txt", **shut(clone.root))
    assert f"you may not write to {clone.root}/.venv: let its owner" in said
    reopen(clone.root)


@pytest.mark.parametrize("typed, retries", [({}, "0"), ({"PIP_RETRIES": "3"}, "3")])
def test_without_a_network_there_is_one_try(clone, typed, retries):
    assert clone.start(env=typed)[0] == 0
    assert set((clone.top / "retries").read_text().split()) == {retries}


def test_a_python_that_cannot_make_environments_is_passed_over_or_refused(clone):
    (clone.bin / "python3" / "no_ensurepip").touch()
    said = clone.refusal()
    assert "no Python 3.10 or newer with its venv module was found" in said and "python3-venv" in said
    old = clone.python("python3.13", "old")
    said = clone.refusal(env={"PYTHON": str(old)})
    assert f"PYTHON={old} is not Python 3.10 or newer with its venv module: name another" in said
    clone.python("python3.12")
    assert clone.start()[0] == 0
