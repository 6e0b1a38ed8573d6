"""Whatever a thread of a rank dies of is reported as a loss, by name; nothing waits for it for ever.

And the trace of a run that was lost can be read.
"""
import ast
import socket
import time
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from cluster import heartbeat, transport
from cluster.folder import Folder
from cluster.heartbeat import BEAT_SECONDS, Heartbeat, report_loss
from cluster.sockets import BoardDoor
from cluster.transport import TCP_CLOSE, ProcessLink, SocketWire
from config.failure import guarded
from config.presets import ROOT
from eval.observe.timeline_page import page
from pipeline import trace
from pipeline.link import Peers
from pipeline.messages import Header, Reset, Segment
from pipeline.trace import Trace, merge, read
from sim import devices
from tests.checkpoints import refused
from tests.forked import ranks
from tests.saved import ENDLESS, here, wait_until

WORDS = (*ENDLESS, "timeout=5", "threads_per_rank=1", "device=cpu", "profile=server")
ALL = ["data sender", "data listener", "emulated wire", "heartbeat", "watch"]
THREADS = {0: [*ALL, "control sender"], 1: [*ALL, "control listener"]}


def poison(sick, thread, rank):
    """One kind of thread of one rank shall die of something that nobody foresaw."""
    def die():
        time.sleep(1)
        raise KeyError("unforeseen")

    def start(name, run, failed):
        return guarded(name, die if (rank, name) == (sick, thread) else run, failed)

    for module in (transport, devices, heartbeat):
        module.guarded = start


@pytest.mark.parametrize("sick", THREADS)
def test_whatever_a_thread_dies_of_ends_all_ranks_with_its_name(saved, tmp_path, sick):
    words = [f"model_dir={saved / '0+4'}", *WORDS]
    with ExitStack() as stack:
        runs = {thread: stack.enter_context(ranks(tmp_path / thread, words, 2, partial(poison, sick, thread)))
                for thread in THREADS[sick]}
        for thread, run in runs.items():
            assert run.codes() == [75, 75], thread
            assert run.noted == f"rank {sick} failed: KeyError: 'unforeseen' (in its thread {thread})"


def test_threads_are_started_in_one_place():
    """Those of boards that meet have guards of their own."""
    own = ("config/failure.py", "cluster/rendezvous.py")
    for path in [*(ROOT / "pipeline").glob("*.py"),
                 *(ROOT / "tp").glob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        calls = (node.func for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Call))
        if path.relative_to(ROOT).as_posix() not in own:
            assert not any(ast.unparse(call).endswith("Thread") for call in calls), path


# --- links ------------------------------------------------------------------------------------------------------------

def lost(numbers, *sent):
    """What a link says of the first of its threads that dies, at a wire whose other end has sent these and is gone."""
    found, wire = [], SocketWire()
    wire.outgoing[1], there = socket.socketpair()
    wire.incoming[2] = wire.outgoing[1]
    with there:
        there.sendall(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
    link = ProcessLink(Peers(2, [1]) if not sent else Peers(None, [1]),
                       lambda *failure: found.append(failure))
    link.begin((wire, wire))
    for msg in sent:
        link.send(msg)

    assert wait_until(lambda: found, 10)
    thread, error = found[0]
    return thread, f"{type(error).__name__}: {error}"


class SilentConnection:
    """A connection that the system has given up after its last `send`."""

    family = socket.AF_INET

    def getsockopt(self, level, name, size):
        return bytes([TCP_CLOSE if (level, name) == (socket.IPPROTO_TCP, socket.TCP_INFO) else 0] * size)


def test_a_connection_that_the_system_gives_up_while_nothing_is_sent_is_a_loss():
    losses, wire = [], SocketWire()
    wire.outgoing[1] = SilentConnection()
    link = ProcessLink(Peers(None, [1]), lambda *loss: losses.append(loss))
    link.begin((wire,))
    assert wait_until(lambda: losses, 10)
    [(thread, error)] = losses
    assert (thread, str(error)) == ("data sender", "rank 1 was lost: its connection broke")


@pytest.mark.parametrize("patience, milliseconds", [(2.5, 2500), (0, 0), (2_592_000, (1 << 31) - 1)])
def test_a_way_between_boards_breaks_once_nothing_is_acknowledged_for_so_long(patience, milliseconds):
    with BoardDoor("127.0.0.1", None, 7, patience=patience) as door, door.reach(door.name) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds


@pytest.mark.parametrize("numbers, sentence", [
    ((99, 0, 0, 0, 0, 0), "a message of unknown kind 99"),
    ((0, -1, 2, 4, 0, 1), "a message of impossible size or type"),
    ((0, 8, 2, 4, -2, 1), "a message of impossible size or type"),
    ((0, 8, 2, 4, 0, 9), "a message of impossible size or type"),
    ((0, 1 << 60, 2, 4, 0, 1), "a message of impossible size or type"),
    ((0, 8, 1 << 31, 1 << 31, 0, 1), "a message of impossible size or type"),
    ((3, 0, 1 << 30, 0, 1, 0), "a message of impossible size or type"),
    ((2, 0, 0, 0, -1, 0), "a Reset of 0 numbers"),
])
def test_a_malformed_message_is_the_loss_of_who_sent_it(monkeypatch, numbers, sentence):
    set_aside = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty",
                        lambda size, **kind: (set_aside.append(size), empty(size, **kind))[1])
    thread, error = lost(numbers)
    assert (thread, error[:len("PeerLost: rank 2 was lost: it sent ")]) == (
        "data listener", "PeerLost: rank 2 was lost: it sent ")
    assert sentence in error and error.endswith("run the same version of FlowSpec on all ranks")
    assert max(set_aside) <= len(Header._fields)


def test_a_broken_connection_is_the_loss_of_the_peer_and_anything_else_is_reported_as_what_it_is():
    assert lost(()) == ("data listener", "PeerLost: rank 2 was lost: its connection broke")
    assert lost((), Reset(0)) == ("data sender", "PeerLost: rank 1 was lost: its connection broke")
    thread, error = lost((), Segment(0, [1], [0],
                                     [1], 0, torch.zeros(1, dtype=torch.int32)))
    assert (thread, error[:10]) == ("data sender", "ValueError")  # a type that no message has


# --- the heartbeat ----------------------------------------------------------------------------------------------------

class Torn(Folder):
    """A store that fails in a way that nobody foresaw."""

    def add(self, key, amount):
        raise ZeroDivisionError if key == "heartbeat/0" else OSError(28, "No space left on device", key)


def heard(store, rank=0, timeout=0.5, world=2):
    """What a heartbeat says of a loss; it goes on to beat."""
    found = []
    beating = Heartbeat(store, rank, world, timeout)
    beating.start(found.append)
    beating.begin("")
    return beating, found


@pytest.mark.parametrize("loss", ["rank 1 was lost: it hangs", "rank 1 (board1, 10.0.0.2) was lost: it hangs"])
def test_a_loss_names_its_board_once(tmp_path, loss):
    store = Folder(str(tmp_path))
    names = "rank 0 (board0, 10.0.0.1)", "rank 1 (board1, 10.0.0.2)"
    Heartbeat(store, 0, 2, 5.0, names).report_at_once(loss)
    assert heartbeat.reported_loss(store) == "rank 1 (board1, 10.0.0.2) was lost: it hangs"


def test_a_pulse_that_breaks_says_so(tmp_path):
    for rank, why in ((0, "ZeroDivisionError: "), (1, "[Errno 28] No space left on device: 'heartbeat/1'")):
        _, message = heard(Torn(str(tmp_path)), rank, timeout=30)
        assert wait_until(lambda message=message: message, 10)
        assert message == [f"rank {rank} failed: {why} (in its thread heartbeat)"]


def test_what_is_noted_first_is_what_all_tell_and_a_terminal_does_not_obey_it(tmp_path):
    store = Folder(str(tmp_path))
    beating, found = heard(store, timeout=30)
    other, _ = heard(store, rank=1, timeout=30)
    other.report_at_once("rank 1 failed: \33[2J\rno room")
    beating.report_at_once("rank 0 failed: too late")
    assert wait_until(lambda: found, 10) and found == ["rank 1 failed: \\x1b[2J\\rno room"]
    assert beating.wait_for_loss() == found[0]
    (tmp_path / "heartbeat%2Flost").write_bytes(b"\xff\xfe" + b"x" * 5000)
    assert len(report_loss(store, "")) < 1100


def test_who_slept_itself_listens_again_before_it_calls_others_silent(tmp_path, monkeypatch):
    store = Folder(str(tmp_path))
    now = [0.0]
    beats = iter([BEAT_SECONDS, 60.0])
    beating = Heartbeat(store, 0, 3, timeout=10)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    heard = []

    def wait(seconds):
        heard.append(beating.silent_peers())
        now[0] = next(beats, now[0])
        return len(heard) == 3

    monkeypatch.setattr(beating._is_stopped, "wait", wait)
    beating._restart_timeouts()
    beating._beat()
    assert now[0] == 60.0 and heard == [[], [], []]


# --- the trace of a lost run ------------------------------------------------------------------------------------------

def test_the_trace_of_a_run_that_was_lost_can_be_read_and_a_cut_line_at_its_end_does_no_harm(saved, tmp_path):
    folder = tmp_path / "trace"
    words = [f"model_dir={saved / '0+2+2'}", *WORDS[:-1], f"trace={folder}"]
    with ranks(tmp_path / "run", words, 3) as run:
        assert wait_until(lambda: len(run.text(0, 1)) > 200, 60), run.text(0)
        for written in (folder / "rank_1.jsonl", folder / "rank_2.jsonl"):
            assert wait_until(lambda written=written: '"forward"' in written.read_text(), 30)
        run.processes[2].kill()
        assert run.codes() == [75, 75, -9]
    last = folder / "rank_2.jsonl"
    whole_lines = last.read_bytes().rpartition(b"\n")[0] + b"\n"  # it may have been killed within a line
    last.write_bytes(whole_lines)
    whole = read(folder)
    assert {(span["rank"], span["name"]) for span in whole} >= {(0, "send"), (1, "forward"), (2, "forward")}
    last.write_bytes(whole_lines[:-9])

    assert len(read(folder)) == len(whole) - 1
    assert merge(folder).is_file() and "</html>" in page(folder)


@pytest.mark.parametrize("line", ["null", "[]", "7", "{", '{"rank": 0}', "\\xff", "[" * 100_000,
                                  '{"rank": 0, "name": "send", "t0": "x", "t1": 1, "thread": "m"}'])
def test_a_line_that_is_no_span_is_named(tmp_path, line):
    Trace(str(tmp_path), 0).close()
    (tmp_path / "rank_0.jsonl").write_text(f"{line}\n")
    with refused("line 1 of ", "rank_0.jsonl is ", ": delete this line, or trace the run again"):
        read(tmp_path)


def test_a_full_disk_is_reported_with_the_file_and_once(tmp_path, capsys):
    (tmp_path / "rank_0_1.jsonl").symlink_to("/dev/full")
    full = Trace(str(tmp_path), 0)
    for _ in range(2):
        full.note("grow", 0.0)
    full.close()
    assert capsys.readouterr().err == (
        f"flowspec: {tmp_path / 'rank_0_1.jsonl'} cannot be written (No space left on device): make room there, or "
        "choose another trace=; the trace of rank 0 ends here\n")


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_answer(saved, tmp_path, capsys, monkeypatch):
    words = [f"model_dir={saved / '0+2+2'}", "prompt_ids=5,17,40", "max_new_tokens=40", "ignore_eos=true"]
    assert here(*words) == 0
    text = capsys.readouterr().out.splitlines()[0]
    monkeypatch.setattr(trace, "open", lambda *args, **kinds: open("/dev/full", "w"), raising=False)
    assert here(*words, f"trace={tmp_path}") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == text and "Traceback" not in printed.err
    assert [f"the trace of rank {rank} ends here" in printed.err for rank in range(3)] == [True] * 3
