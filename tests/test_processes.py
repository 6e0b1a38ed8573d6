"""One machine: who has ended is named, who is asked to end does, and nobody else can come in.

The ranks of most of these tests are tests/rank.py, which needs no torch.
"""
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import processes
from cluster.folder import COUNTER_DIGITS, Folder, private_folder
from cluster.heartbeat import LOSS_KEY
from cluster.processes import spawn
from config import failure
from config.failure import PeerLost
from config.presets import ROOT
from launch import ranks
from serve import running
from serve.engine import Health
from tests.checkpoints import refused
from tests.forked import command
from tests.saved import ENDLESS, run_program, wait_until
from tests.test_failure import in_full_flow
from tests.tiny import in_threads


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Hands the handlers back to pytest, and gives ranks that do not end less time."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(processes, "subprocess", subprocess)  # no stand-in of tests/forked.py
    before = {number: signal.getsignal(number) for number in processes.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ends(*words):
    return spawn(["tests.rank", *words], len(words))


def test_a_launcher_needs_no_torch():
    """Which takes seconds to import, and memory for as long as the ranks live."""
    words = "import cluster.processes, sys; sys.exit('torch' in sys.modules)"
    assert run_program(sys.executable, "-c", words).returncode == 0


# --- how ranks end ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, code, message", [
    ("0 0 0", 0, ""),
    ("3 0 0", 3, ""),  # the command's own verdict
    ("wait kill:9 wait", 75, "rank 1 was killed (SIGKILL): by hand, or by the system if memory ran short"),
    ("wait kill:7 wait", 75, "rank 1 was killed (SIGBUS): a file was cut while it was in use, or its disk failed"),
    ("deaf deaf kill:9", 75, "rank 2 was killed (SIGKILL)"),  # and not those that the launcher kills then
    ("kill:15 deaf deaf", 75, "rank 0 was killed (SIGTERM)"),
    ("kill:11 75 75", 75, "rank 0 was killed (SIGSEGV)"),
    ("75 75 2", 2, ""),  # that rank has said why
    ("deaf 75 deaf", 75, "rank 1 ended too early, with exit code 75"),
    ("0 deaf deaf", 0, ""),  # the answer was there
])
def test_whatever_ends_ranks_is_reported_in_one_sentence(capfd, monkeypatch, words, code, message):
    if not {"wait", "deaf"} & set(words.split()):
        monkeypatch.setattr(processes, "GRACE_SECONDS", 60)  # all end by themselves, however busy the machine is
    assert ends(*words.split()) == code
    shown = capfd.readouterr().err.strip()
    assert shown.startswith(f"flowspec: {message}") if message else shown == ""
    assert "\n" not in shown


def test_what_the_ranks_have_agreed_on_is_reported_if_a_stopped_one_cannot(capfd, monkeypatch):
    """As of rank 0 that was stopped: the others end, and the launcher kills it, which is not the reason."""
    found = "rank 0 was lost: it has been silent for 10 seconds\33[2J"
    start_ranks = processes.start_ranks

    def start(command, folder, *rest, may_fork):
        Folder(folder).set(LOSS_KEY, found)
        return start_ranks(command, folder, *rest, may_fork)

    monkeypatch.setattr(processes, "start_ranks", start)
    assert ends("deaf", "75", "75") == 75
    assert capfd.readouterr().err == "\nflowspec: rank 0 was lost: it has been silent for 10 seconds\\x1b[2J\n"


def test_a_rank_that_ends_before_all_have_met_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "join", lambda folder, rank, world: time.sleep(60))
    with private_folder() as folder:
        others = processes.start_ranks(["tests.rank", "", "deaf", "kill:9", "deaf"], folder, 4, range(1, 4))
        Path(folder, "here0").touch()
        try:
            with pytest.raises(PeerLost, match=r"rank 2 was killed \(SIGKILL\)"):
                ranks.join_beside(others, str(tmp_path), 4)
        finally:
            others.kill()


@pytest.mark.parametrize("number, times, root", [
    (signal.SIGINT, 1, "wait"), (signal.SIGINT, 8, "wait"),
    (signal.SIGTERM, 1, "wait"), (signal.SIGHUP, 2, "deaf"),
    (signal.SIGQUIT, 1, "wait"), (signal.SIGINT, 8, "deaf")])
def test_who_asks_the_launcher_to_end_gets_that_and_nothing_else(capfd, number, times, root):
    before = signal.getsignal(number)

    def press():
        wait_until(lambda: signal.getsignal(number) != before, 10)
        for _ in range(times):
            time.sleep(0.05)
            os.kill(os.getpid(), number)

    with in_threads(press, [()]):
        assert ends(root, "deaf", "deaf") == 128 + number
    assert capfd.readouterr().err == ""


def test_a_hangup_that_the_shell_has_forbidden_is_not_heard():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGHUP)).start()
    assert ends("0", "0") == 0


def deaf():
    """As a shell starts what runs in its background, under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("numbers, code", [
    ([signal.SIGINT], 130), ([signal.SIGQUIT], 131),
    ([signal.SIGHUP, signal.SIGTERM], 143)], ids=str)
def test_a_run_in_the_background_hears_all_but_a_hangup_and_leaves_nothing(tmp_path, numbers, code):
    words = "import sys; from cluster.processes import spawn; sys.exit(spawn(['tests.rank', 'wait'], 1))"
    with subprocess.Popen([sys.executable, "-c", words], cwd=ROOT,
                          env={**os.environ, "TMPDIR": str(tmp_path)},
                          preexec_fn=deaf) as launcher:
        wait_until(lambda: list(tmp_path.glob("*/here0")) or launcher.poll() is not None, 60)
        for number in numbers:
            launcher.send_signal(number)
    assert launcher.returncode == code and not list(tmp_path.iterdir())


def test_ctrl_c_within_a_second_counts_once():
    from config.console import interrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    for _ in range(8):
        interrupt(signal.SIGINT, None)


# --- where they meet --------------------------------------------------------------------------------------------------

def test_the_folder_is_private_and_gone_at_the_end(monkeypatch):
    found = []

    def start(command, place, world, numbers, returning, may_fork):
        folder = Path(place)
        found.extend([folder, stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid])
        return SimpleNamespace(deaths={})

    monkeypatch.setattr(processes, "start_ranks", start)
    monkeypatch.setattr(processes, "_await", lambda ranks, stops: {})
    assert ends("0") == 0
    assert found[1:] == [0o700, os.getuid()]
    assert not found[0].exists()


def using(folder, act):
    """A process that lives until it is killed, and the private folder among `folder` with which it does something."""
    words = f"from cluster.folder import hold, private_folder; import sys, time; {act}; time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", words],
                               cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)},
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_a_start_removes_the_folders_that_killed_processes_left_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher, used = using(tmp_path, "kept = private_folder(); print(kept.__enter__(), flush=True)")
    rank, _ = using(tmp_path, f"hold({str(used)!r}); print(flush=True)")
    own, other = tmp_path / "flowspec-notes", os.getuid() + 1
    shutil.copytree(used, tmp_path / "elsewhere")
    (tmp_path / "flowspec-link").symlink_to(tmp_path / "elsewhere")
    own.mkdir()
    try:
        for process in (launcher, rank):
            with private_folder():
                assert used.is_dir(), "it is in use"
            process.kill()
            process.wait()
        with monkeypatch.context() as context, private_folder():
            assert not used.exists()
            shutil.copytree(tmp_path / "elsewhere", used)
            context.setattr(os, "getuid", lambda: other)
            with private_folder():
                assert used.is_dir(), "it is another user's"
    finally:
        for process in (launcher, rank):
            process.kill()
            process.wait()
    with private_folder() as new:
        assert {path.name for path in tmp_path.iterdir()} == {
            Path(new).name, own.name, "elsewhere", "flowspec-link"}

    assert list((tmp_path / "elsewhere").iterdir())


def test_starts_at_once_harm_no_folder_of_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start():
        with private_folder() as folder:
            Folder(folder).set("key", "value")
            return Folder(folder).get("key") == b"value"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: start(), range(100)))
    assert not list(tmp_path.iterdir())


def test_a_folder_counts_what_all_add_and_does_not_grow():
    with private_folder() as path:
        stores = [Folder(path) for _ in range(4)]
        with in_threads(lambda store: [store.add("heartbeat/1", 1) for _ in range(50)], zip(stores)):
            pass
        assert stores[0].add("heartbeat/1", 0) == 200
        assert stores[0].add("never", 0) == 0
        assert [file.stat().st_size for file in Path(path).glob("heartbeat*")] == [COUNTER_DIGITS]
        stores[1].set("../split/0", "abc")
        assert stores[2].get("../split/0") == b"abc"
        assert not (Path(path).parent / "split").exists()
    with pytest.raises(PeerLost, match="the launcher and its folder .* are gone"):
        stores[0].add("heartbeat/1", 0)


def sockets(pids):
    """The local addresses of all internet sockets of these processes, in hexadecimal."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue  # closed meanwhile
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found


def test_nothing_of_a_real_run_can_be_reached_from_elsewhere_and_ctrl_z_harms_nothing(saved, tmp_path):
    # a head of random weights is complained of, if it guesses for long enough
    words = [*ENDLESS, "timeout=2", "recover=1", "draft=suffix"]
    with command(tmp_path, "scripts.generate", f"model_dir={saved / '0+2+2'}", *words) as run:
        assert in_full_flow(run), run.stderr
        ranks = run.ranks()
        found = sockets([run.process.pid, *ranks.values()])
        assert found == []
        os.killpg(run.process.pid, signal.SIGSTOP)
        printed = len(run.stdout)
        time.sleep(3)  # longer than the timeout
        os.killpg(run.process.pid, signal.SIGCONT)
        assert wait_until(lambda: len(run.stdout) > printed + 2000 or run.process.poll() is not None, 30)
        assert run.process.poll() is None, run.stderr
        folder = run.folder()
        assert folder.is_dir()
        os.kill(ranks[0], signal.SIGSTOP)
        assert run.end(30) == 75

    assert run.stderr == "\nflowspec: rank 0 was lost: it has been silent for 2 seconds\n" and not folder.exists()


def test_a_server_that_is_asked_to_end_ends_the_ranks_that_still_load(monkeypatch, capfd):
    monkeypatch.setattr(running, "LEAVE_SECONDS", 60)
    started = []
    there = threading.Event()

    def load():
        with private_folder() as folder:
            ranks = processes.start_ranks(["tests.rank", "deaf", "deaf"], folder, 2, range(2))
            started.append(ranks)
            there.set()
            while not ranks.all_ended:
                time.sleep(0.01)

    loading = SimpleNamespace(health=Health("loading"), error=None, run=load, stop=lambda: None)
    interrupted = SimpleNamespace(
        bound_sockets=list, run=lambda sockets: there.wait(60) and signal.raise_signal(signal.SIGTERM))
    assert running.run(loading, interrupted) == 130
    assert started[0].ended() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert capfd.readouterr().err.strip() == "flowspec: stopped"


# --- what a machine allows --------------------------------------------------------------------------------------------

def test_too_few_open_files_are_refused_and_a_soft_limit_is_raised(monkeypatch):
    limits = {"now": (24, 1 << 16)}
    monkeypatch.setattr(processes.resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(processes.resource, "setrlimit", lambda which, both: limits.update(now=both))
    processes.allow_files(5)
    assert limits["now"] == (104, 1 << 16)
    limits["now"] = (24, 24)
    with refused("may need 104 open files, but ulimit -n allows a process 24: raise it, as in"):
        processes.allow_files(5)


@pytest.mark.parametrize("error, message", [
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nto allocate"), "there is not enough memory"),
    (MemoryError(), "there is not enough memory"),
    (ImportError("libtorch.so: failed to map segment from shared object"), "there is not enough memory"),
    (RuntimeError("can't start new thread"), "no more threads can be started"),
    (OSError(24, "Too many open files", "/x"), "no more files can be opened"),
])
def test_what_a_machine_has_too_little_of_is_reported_with_what_to_do(monkeypatch, error, message):
    def limit(most):
        monkeypatch.setattr(failure.resource, "getrlimit", lambda which: (most, most))

    limit(900_000_000)
    assert failure.explain(error).startswith(message) and "raise it, as in ulimit" in failure.explain(error)
    limit(failure.resource.RLIM_INFINITY)
    assert failure.explain(error).startswith(message) and "end other programs" in failure.explain(error)
    assert failure.is_expected(error) and "\n" not in failure.explain(error)


def test_a_shortage_that_another_rank_has_explained_is_not_explained_again():
    lost = failure.PeerLost(f"rank 1 failed: {failure.explain(MemoryError())}")
    assert failure.explain(lost) == str(lost)


def test_what_is_nobodys_want_keeps_its_own_words():
    assert failure.shortage(ValueError("the cache is full")) == ""
    assert failure.explain(ValueError("the cache is full")) == "the cache is full"
    assert failure.explain(KeyError(5)) == "KeyError: 5" and not failure.is_expected(KeyError(5))


def test_a_command_whose_modules_find_no_memory_says_so():
    limited = ["bash", "-c", 'ulimit -v 400000; exec "$0" -m scripts.generate', sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = run_program(*limited, env=environment)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.strip().startswith("flowspec: there is not enough memory"), ended.stderr
