"""Several hosts: each rank is started by itself, and whatever is wrong ends all of them with one sentence.

Ranks meet over loopback, or, where the tests may make them, over network namespaces with wires that can be cut.
"""
import atexit
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cluster import rendezvous as rendezvous
from cluster.agreement import code_version, judge_facts, judge_ways
from cluster.board import BOARD_VARIABLE, Board
from cluster.store import StoreClient
from config.presets import ROOT
from eval.bench.places import make_keys
from launch.run import run
from model.sample import Sampler
from scripts import generate
from tests.checkpoints import split_quietly
from tests.forked import CONTEXT, write_into
from tests.saved import ENDLESS, answer_of, boards_of, run_program, token_ids, wait_until
from tests.test_strangers import FACTS
from tests.tiny import TINY

ASK = ("prompt_ids=5,17,40", "max_new_tokens=12", "seed=4", "temperature=0.7", "ignore_eos=true", "dtype=float64")
FRAGILE = (*ENDLESS, "timeout=2", "recover=false")


@pytest.fixture(scope="module")
def own(saved, tmp_path_factory):
    return boards_of(saved, tmp_path_factory.mktemp("own"))


def be_board(words, environment, space, files):
    """What run_jetson.sh starts, in a process that has Python's modules already, perhaps in a namespace."""
    write_into(files)
    os.environ.update({BOARD_VARIABLE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if space:
        with open(f"/run/netns/{space}", "rb") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    rendezvous.RETURN_SECONDS = 1.0
    if environment.get("OTHER_CODE"):
        rendezvous.code_version = lambda: "d"
    code = run(generate.GENERATE, words)
    atexit._run_exitfuncs()  # which multiprocessing leaves out
    sys.stdout.flush()
    os._exit(code)


def starting(folder, own):
    """Yields what starts the rank of one board, which writes to `folder`; at the end, what still runs is ended."""
    started = []

    def begin(rank, *words, space="", folder=folder, **environment):
        part = [] if any(word.startswith("model_dir") for word in words) else [f"model_dir={own / f'board{rank}'}"]
        files = [str(folder / f"{name}{rank}") for name in ("out", "err")]
        begun = CONTEXT.Process(target=be_board, args=([*part, *words],
                                                       {"NODE_RANK": str(rank), **environment},
                                                       space, files))
        begun.start()
        started.append(begun)
        return begun

    yield begin
    for begun in started:
        begun.kill()
        begun.join()


@pytest.fixture
def start(tmp_path, own):
    yield from starting(tmp_path, own)


def meet_here(tmp_path):
    """Keys of a hosts file whose boards are this machine, and of a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n")
    return f"hosts={tmp_path / 'hosts'}", f"master=:{port}", "wait=120"


@pytest.fixture
def loopback(tmp_path):
    return meet_here(tmp_path)


def ends(runs, seconds=600):
    """The exit codes; None of those that go on."""
    end = time.monotonic() + seconds
    for begun in runs:
        begun.join(max(0.1, end - time.monotonic()))
    return [begun.exitcode for begun in runs]


def errors_of(tmp_path, rank):
    """What a board has printed on its terminal."""
    return (tmp_path / f"err{rank}").read_text()


def said(tmp_path, rank):
    """The last line on a board's terminal."""
    text = errors_of(tmp_path, rank)
    assert "Traceback" not in text, text
    return text.strip().splitlines()[-1]


def last_lines(tmp_path):
    """Those on the terminals of three boards."""
    return [said(tmp_path, rank) for rank in range(3)]


def printed_by_all(tmp_path):
    return "".join(errors_of(tmp_path, rank) for rank in range(3))


def reference():
    return TINY.text([5, 17, 40], 12, Sampler(0.7, seed=4))


def flows(tmp_path, runs):
    out = tmp_path / "out0"  # made by rank 0's process, in its own time
    return wait_until(lambda: out.is_file() and out.stat().st_size > 50, 60) and all(run.is_alive() for run in runs)


# --- what is judged ---------------------------------------------------------------------------------------------------

def test_one_character_makes_another_version(tmp_path):
    shutil.copytree(ROOT / "cluster", tmp_path / "cluster")
    before = code_version(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert code_version(tmp_path / "copy") == before
    with (tmp_path / "copy" / "cluster" / "board.py").open("a") as file:
        file.write("#")
    assert code_version(tmp_path / "copy") != before


def facts(**change):
    return {**FACTS, **change}


@pytest.mark.parametrize("change, message", [
    ({}, ""), ({"error": "no disk"}, "rank 1 (b): no disk"),
    ({"code": "d"}, "rank 1 (b, 10.0.0.1) has other code than rank 0 (d, not " + code_version()),
    ({"code": "d", "error": "no disk"}, "has other code than rank 0"),
    ({"split": "t"}, "rank 1 (b, 10.0.0.1) holds a part of another split"),
    ({"world": 2}, "rank 1 (b, 10.0.0.1) holds a part of another split"),
    ({"settings": {"dtype": "float16"}}, "was started with dtype=float16, but rank 0 with auto: type the same keys"),
])
def test_what_does_not_fit_is_reported_of_the_board(change, message):
    sentence = judge_facts({0: facts(), 1: facts(**change)},
                           Board(0, "10.0.0.1", 1, "", 1, ()))
    assert message in sentence and bool(message) == bool(sentence)


def test_the_board_that_most_cannot_reach_is_named():
    found = {rank: facts() for rank in range(3)}
    names = ["rank 0 (x)", "rank 1 (y)", "rank 2 (z)"]
    assert judge_ways(found, {0: [], 1: [], 2: []}, names) == ""
    assert judge_ways(found, {0: [2], 1: [2], 2: [0, 1]},
                      names).startswith("rank 2 (z) cannot be reached by rank 0, 1")


# --- namespaces -------------------------------------------------------------------------------------------------------

def may_make_namespaces():
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"flowspec-try-{os.getpid()}"
    made = run_program("ip", "netns", "add", name).returncode == 0
    return made and run_program("ip", "netns", "del", name).returncode == 0


def listed_namespaces():
    return run_program("ip", "netns", "list").stdout


namespaces = pytest.mark.skipif(not may_make_namespaces(), reason="needs root, ip, tc and the right to make namespaces")


def cluster(*words, **options):
    return subprocess.Popen(["bash", str(ROOT / "scripts" / "netns_cluster.sh"), *words], text=True, cwd=ROOT,
                            env={**os.environ, "PYTHON": sys.executable}, stdin=subprocess.DEVNULL, **options)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The names of six namespaces with wires between them."""
    logs = tmp_path_factory.mktemp("network")
    with cluster("boards=6", f"logs={logs}", stdout=subprocess.PIPE) as run:
        names = [run.stdout.readline().split()[2] for _ in range(6)]
        assert "hosts file" in run.stdout.readline()
        yield names
        run.terminate()
    assert not any(name in listed_namespaces() for name in names)


@pytest.fixture(scope="module")
def astray(network, own, tmp_path_factory):
    """A board that looks for rank 0 where nobody is; it takes its time, beside the other tests."""
    folder = tmp_path_factory.mktemp("astray")
    for start in starting(folder, own):
        yield start(7, *ASK, "model_dir=x", space=network[0], MASTER_ADDR="10.77.0.99"), folder


@namespaces
def test_three_namespaces_write_the_reference_text_over_slow_wires(saved, astray, tmp_path):
    words = [f"model_dir={saved / '0+2+2'}", *ASK, f"output={tmp_path / 'out.json'}"]
    with cluster("boards=3", "rate_mbps=50", f"logs={tmp_path}", "--", *words, stdout=subprocess.PIPE,
                 stderr=subprocess.PIPE) as run:
        shown, printed = run.communicate(timeout=600)
    assert run.returncode == 0 and "rank 0 (board0, 10.77.0.1)" in printed, printed
    assert token_ids(tmp_path / "out.json") == reference()
    assert f"flowspec-{run.pid}" not in listed_namespaces()


@namespaces
def test_a_board_whose_wire_is_cut_in_mid_run_ends_and_so_do_all(start, network, tmp_path):
    runs, folders = {}, {0: tmp_path / "0", 2: tmp_path / "2"}
    for first, (lost, folder) in zip((0, 3), folders.items()):  # three namespaces for each
        folder.mkdir()
        (folder / "hosts").write_text("".join(f"10.77.0.{first + rank + 1}\n" for rank in range(3)))
        runs[lost] = [start(rank, f"hosts={folder / 'hosts'}", *FRAGILE, space=network[first + rank], folder=folder)
                      for rank in range(3)]
    assert all(flows(folder, runs[lost]) for lost, folder in folders.items())

    def set_wires(state):
        for board in (network[0], network[5]):
            run_program("ip", "-n", board, "link", "set", "eth0", state, check=True)

    set_wires("down")
    try:
        assert ends(runs[0]) == ends(runs[2]) == [75, 75, 75]
    finally:
        set_wires("up")
    for lost, address in ((0, "10.77.0.1"), (2, "10.77.0.6")):
        last = last_lines(folders[lost])
        assert all(f"rank {lost} ({socket.gethostname()}, {address})" in message for message in last), last


@namespaces
def test_a_dead_way_between_two_stages_ends_all_though_every_heartbeat_arrives(start, network, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"10.77.0.{rank + 1}\n" for rank in range(3)))
    runs = [start(rank, f"hosts={tmp_path / 'hosts'}", *FRAGILE, space=network[rank]) for rank in range(3)]
    assert flows(tmp_path, runs)
    way = "ip", "-n", network[1], "neigh", "{}", "10.77.0.3", "dev", "eth0"
    nowhere = "lladdr", "02:00:00:00:00:99", "nud", "permanent"
    subprocess.run([*(word.format("replace") for word in way), *nowhere], check=True)
    try:
        assert ends(runs) == [75, 75, 75]
    finally:
        subprocess.run([word.format("delete") for word in way], check=True)
    last = last_lines(tmp_path)

    assert all("rank 2 (" in message and "was lost: its connection broke" in message for message in last), last


@namespaces
def test_a_wrong_interface_is_reported_on_all_boards(start, network, tmp_path):
    (tmp_path / "hosts").write_text("10.77.0.1\n10.77.0.2 interface=lo\n10.77.0.3\n")
    runs = [start(rank, f"hosts={tmp_path / 'hosts'}", *ASK, space=network[rank]) for rank in range(3)]
    assert ends(runs) == [2, 2, 2]
    last = last_lines(tmp_path)
    assert last[0] == last[1] == last[2], last
    assert "127.0.0.1) cannot be reached by rank 0, 2 at its interface lo: name the interface of the cable" in last[0]


# --- ranks over loopback ----------------------------------------------------------------------------------------------

def test_the_command_teaches_and_asks_for_what_it_cannot_know():
    environment = {**os.environ, "PYTHON": sys.executable}
    found = run_program("bash", "run_jetson.sh", "--help", env=environment)
    assert found.returncode == 0 and "NODE_RANK" in found.stdout
    assert "usage: bash run_jetson.sh [PRESET]" in found.stdout
    for given, said in (({}, "which rank is this board?"), ({"PYTHON": "no"}, "PYTHON=no has no torch: name")):
        wrong = run_program("bash", "run_jetson.sh", env={**environment, **given})
        assert wrong.returncode and wrong.stderr.startswith("flowspec: " + said) and wrong.stdout == ""


def test_boards_with_their_own_parts_alone_write_the_reference_text(start, loopback, tmp_path):
    runs = [start(rank, *loopback, *ASK, f"output={tmp_path / 'out.json'}") for rank in (2, 0, 1)]
    assert ends(runs) == [0, 0, 0], said(tmp_path, 0)
    assert token_ids(tmp_path / "out.json") == reference()
    assert "flowspec: waiting for rank " in printed_by_all(tmp_path)
    assert said(tmp_path, 2).startswith("flowspec: all 3 ranks are here, unencrypted: use only networks that")


def test_a_board_that_was_killed_before_all_agreed_comes_again(start, loopback, tmp_path):
    runs = [start(rank, *loopback, *ASK, f"output={tmp_path / 'out.json'}") for rank in (0, 1)]
    address = "127.0.0.1", int(loopback[1].rpartition(":")[2])
    assert wait_until(lambda: socket.socket().connect_ex(address) == 0, 60)
    killed = StoreClient(address, ("rank 0", "rank 2"), 20)
    assert killed.greet(2) == ""
    killed.close()
    assert ends([*runs, start(2, *loopback, *ASK)]) == [0, 0, 0], said(tmp_path, 0)
    assert token_ids(tmp_path / "out.json") == reference()


def other_split(saved, tmp_path):
    split_quietly(saved / "base", tmp_path / "other", "0+2+2")
    return [f"model_dir={tmp_path / 'other'}"]


def test_boards_that_hold_copies_write_the_reference_text(start, saved, tmp_path):
    """Each of them has its own part alone, which is the same for all replicas."""
    for rank, number in enumerate((0, 1, 1)):
        shutil.copytree(saved / "0+4" / f"stage_{number}", tmp_path / f"board{rank}" / f"stage_{number}")
    keys = ("pipeline_type=dsi", "replicas=2", "lookahead=2", *ASK, *meet_here(tmp_path))
    runs = [start(rank, f"model_dir={tmp_path / f'board{rank}'}", *keys, f"output={tmp_path / 'answer.json'}")
            for rank in range(3)]
    assert ends(runs) == [0, 0, 0], last_lines(tmp_path)
    assert token_ids(tmp_path / "answer.json") == reference()


@pytest.mark.parametrize("wrong, message", [
    ("code", ", 127.0.0.1) has other code than rank 0"),
    ("split", ", 127.0.0.1) holds a part of another split than rank 0's"),
    ("keys", ", 127.0.0.1) was started with max_length=77, but rank 0 with 2048"),
    ("part", "): there is no folder"),
    ("interface", "): the interface eth77 has no IPv4 address on this board, which has lo 127.0.0.1"),
])
def test_a_board_that_does_not_fit_ends_all_with_its_name(start, saved, loopback, tmp_path, wrong, message):
    words = {"split": other_split(saved, tmp_path)} if wrong == "split" else {
        "keys": ["max_length=77"], "part": [f"model_dir={tmp_path / 'none'}"]}
    more = {"code": {"OTHER_CODE": "1"}, "interface": {"GLOO_SOCKET_IFNAME": "eth77"}}.get(wrong, {})
    runs = [start(0, *loopback, *ASK), start(1, *loopback, *ASK),
            start(2, *loopback, *ASK, *words.get(wrong, []), **more)]
    assert ends(runs) == [2, 2, 2]
    last = last_lines(tmp_path)
    assert last[0] == last[1] == last[2] and last[0].startswith("flowspec: rank 2 (") and message in last[0], last


def test_a_board_that_comes_twice_is_reported_and_one_that_never_comes_is_named(start, loopback, tmp_path):
    first = start(1, *loopback[:2], *ASK, "wait=12")
    assert wait_until((tmp_path / "err1").exists, 10)
    (tmp_path / "err1").rename(tmp_path / "first")
    runs = [start(0, *loopback[:2], *ASK, "wait=12"),
            start(1, *loopback[:2], *ASK, "wait=12")]
    assert sorted(ends([first, *runs])) == [2, 75, 75]
    both = [(tmp_path / "first").read_text(), errors_of(tmp_path, 1)]
    assert sum("flowspec: rank 1 is there already" in text for text in both) == 1
    never = "rank 2 (127.0.0.3) did not come within 12 seconds: start run_jetson.sh or"
    assert never in said(tmp_path, 0) and sum(never in text for text in both) == 1


def test_rank_0_on_a_board_without_the_masters_address_or_with_a_busy_port_is_reported(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        runs = [start(0, *ASK, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(busy.getsockname()[1]))]
        assert ends(runs) == [2] and "choose another with master=:PORT" in said(tmp_path, 0)
    assert ends([start(0, *ASK, MASTER_ADDR="203.0.113.7")]) == [2]
    assert "203.0.113.7 is no address of this board, which has lo 127.0.0.1" in said(tmp_path, 0)


def test_a_board_that_is_killed_or_stopped_by_hand_in_mid_run_is_named_on_all_others(start, tmp_path):
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    asked = {killed: FRAGILE, stopped: ENDLESS}  # what a person stops is not started again
    runs = {folder: [start(rank, *keys, *asked[folder], folder=folder) for rank in range(3)]
            for folder, keys in ((folder, meet_here(folder)) for folder in (killed, stopped))}
    assert flows(killed, runs[killed]) and flows(stopped, runs[stopped])
    runs[killed][2].kill()
    os.kill(runs[stopped][1].pid, signal.SIGINT)
    assert ends(runs[killed]) == [75, 75, -signal.SIGKILL]
    assert ends(runs[stopped]) == [75, 130, 75]
    host = socket.gethostname()

    assert said(killed, 0) == said(killed, 1)
    assert said(killed, 0).startswith(f"flowspec: rank 2 ({host}, 127.0.0.1) was lost: its connection broke")
    assert all(f"rank 1 ({host}, 127.0.0.1) failed: it was stopped" in said(stopped, rank) for rank in (0, 2))


def test_a_board_that_is_started_again_or_a_spare_in_its_place_goes_on_with_the_answer(start, saved, own, tmp_path,
                                                                                       loopback):
    with (tmp_path / "hosts").open("a") as hosts:
        hosts.write("127.0.0.4 spare\n127.0.0.1 spare=2\n")
    words = ["prompt_ids=5,17,40", "seed=4", "temperature=0.7", "ignore_eos=true", "max_new_tokens=500"]
    alone = answer_of(tmp_path, f"model_dir={saved / '0+2+2'}", *words, "dtype=float64")["token_ids"]
    common = [*loopback, *words, "dtype=float64", f"output={tmp_path / 'out.json'}"]
    keyed = make_keys(tmp_path)
    asked = [[*common, *([f"keys={tmp_path / 'keys' / str(number)}"] if keyed else [])] for number in range(5)]
    spares = [start(number, *asked[number], f"model_dir={own / 'board2'}") for number in (3, 4)]
    runs = [start(rank, *asked[rank]) for rank in range(3)]
    out, err, host = tmp_path / "out0", tmp_path / "err0", socket.gethostname()
    for number in (3, 4):
        waits = tmp_path / f"err{number}"
        assert wait_until(waits.exists, 60)
        assert wait_until(lambda waits=waits: "waiting until rank 2 (127.0.0.3) is lost" in waits.read_text(), 60)
    for lost in (1, 2):
        printed = out.stat().st_size if lost == 2 else 0
        assert wait_until(lambda printed=printed: out.is_file() and out.stat().st_size > printed + 20, 60)
        runs[lost].kill()
        assert wait_until(lambda lost=lost: f"waiting for rank {lost} ({host}" in err.read_text(), 30)
        if lost == 1:
            other = start(lost, *asked[lost], "max_length=77")
            assert ends([other]) == [2] and f"rank {lost} (" in said(tmp_path, lost), "it has other keys than before"
            runs[lost] = start(lost, *asked[lost])
    assert ends([runs[0], runs[1], *spares]) == [0, 0, 0, 0], said(tmp_path, 0)
    assert said(tmp_path, 4) == "flowspec: rank 0 (127.0.0.1) has ended, and this spare was not needed"
    line = f"flowspec: rank 2 ({host}, a spare, 127.0.0.1) stands in for rank 2 ({host}, 127.0.0.1): 3 "

    assert [errors_of(tmp_path, rank).count(line) for rank in (0, 1, 3)] == [1, 1, 1]
    assert f"cannot stand in: there is no folder {own / 'board2' / 'stage_1'}" in err.read_text()
    assert token_ids(tmp_path / "out.json") == alone and len(alone) == 500
    assert err.read_text().count("; all ranks are connected again, and answers continue") == 2


def listening(pid):
    """The addresses at which a process listens, as the system writes them."""
    mine = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6")
            for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    return [row[1].partition(":")[0]
            for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def test_strangers_change_nothing_and_a_rank_0_that_stands_still_is_reported_as_that(start, loopback, tmp_path):
    ended, port = threading.Event(), int(loopback[1].rpartition(":")[2])

    def annoy():
        idle = []
        while not ended.wait(0.02):
            with suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                idle[-1].sendall((b"", b"\x1b[2Jowned\n", b"[" * 200 + b"\n", b'["flowspec", 0]\n')[len(idle) % 4])

    thread = threading.Thread(target=annoy)
    thread.start()
    try:
        runs = [start(rank, *loopback, *ENDLESS, "timeout=4", "recover=false") for rank in range(3)]
        assert flows(tmp_path, runs), said(tmp_path, 0)
        assert {address for begun in runs for address in listening(begun.pid)} == {"0100007F"}  # 127.0.0.1
    finally:
        ended.set()
        thread.join()
    assert errors_of(tmp_path, 0).count("that is not part of this run") == 1
    os.kill(runs[0].pid, signal.SIGSTOP)
    assert ends(runs[1:]) == [75, 75]
    for rank in (1, 2):
        name = f"rank 0 ({socket.gethostname()}, 127.0.0.1)"
        found = f"flowspec: {name} was lost: its board answers, but its program does"
        assert said(tmp_path, rank).startswith(found)
    assert "\x1b" not in printed_by_all(tmp_path)


def test_a_stranger_in_a_boards_seat_ends_no_rank_in_a_traceback_and_reaches_no_screen_unescaped(
        start, loopback, tmp_path):
    runs = [start(rank, *loopback, *ASK) for rank in range(2)]
    address = "127.0.0.1", int(loopback[1].rpartition(":")[2])
    assert wait_until(lambda: socket.socket().connect_ex(address) == 0, 60)
    stranger = StoreClient(address, ("rank 0", "rank 2"), 20)
    assert stranger.greet(2) == ""
    for junk in ("{}", "[]", "null", '{"world": "x"}', "[" * 9999):
        with pytest.raises(RuntimeError):
            stranger.ask("set", "facts/2", junk)
    evil = {"host": "b\x1b[2J", "code": code_version(), "worker": True, "settings": {"\r": "\x07"},
            "error": "\x1b[31mall is well\r\n"}
    stranger.ask("set", "facts/2", json.dumps(evil))
    stranger.close()  # rank 0 waits for that
    assert ends(runs) == [2, 2]
    shown = ["\\x1b[31mall is well" in said(tmp_path, rank) and said(tmp_path, rank).isprintable()
             for rank in range(2)]

    assert shown == [True, True]


@namespaces
def test_a_master_that_cannot_be_reached_is_reported(astray):
    board, folder = astray
    assert ends([board]) == [75]
    assert "rank 0 cannot be reached at 10.77.0.99:29500 from rank 7" in said(folder, 7)
