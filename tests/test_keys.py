"""With keys only boards of one cluster join, and nobody else reads or disturbs what travels between them."""
from __future__ import annotations

import os
import shutil
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from cluster.keys import read_keys
from cluster.sockets import GREETING, MARK, BoardDoor, Connections
from cluster.store import Entries, Store, StoreClient, StoreServer
from cluster.transport import CONTROL, DATA
from pipeline.link import Peers
from tests.checkpoints import refused
from tests.saved import boards_of, run_program, token_ids
from tests.test_hosts import ASK, ends, meet_here, reference, said, starting
from tests.test_push import SSH, save_program

HERE = "127.0.0.1"
GREETED = GREETING.pack(MARK, 7, DATA, 0)  # by rank 0 in membership 7
SECRET = b"what travels between boards"
pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl here")


def make_keys(folder, *words, **environment):
    return run_program("bash", "scripts/make_keys.sh", f"keys={folder / 'cluster'}", *words,
                       env={**os.environ, **environment})


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """The keys of two boards in each of two clusters."""
    found = []
    for name in ("one", "other"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "hosts").write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n")
        assert make_keys(folder, f"hosts={folder / 'hosts'}", "push=false").returncode == 0
        found.append([read_keys(folder / "cluster" / str(rank)) for rank in range(2)])
    return found


@pytest.fixture
def keeper(clusters):
    found = StoreServer((HERE, 0), Entries(), clusters[0][0])
    yield found
    found.close(0)


def address_of(keeper):
    return HERE, keeper.port


def client(keeper, keys):
    return StoreClient(address_of(keeper), ("rank 0", "rank 1"), 20, keys)


@contextmanager
def door_of(keys):
    """The door of rank 1 in membership 7, and what it has let in."""
    with BoardDoor(HERE, keys, 7) as door:
        made = Connections(1, [Peers(0, [], root_rank=0)])
        yield door, made
        made.cut()
        made.close()


# --- the links --------------------------------------------------------------------------------------------------------

def test_a_board_of_the_cluster_is_let_in_and_no_other(clusters):
    (own, same), (other, _) = clusters
    with door_of(own) as (door, made):
        for keys in (None, other):
            with BoardDoor(HERE, keys, 7) as stranger, stranger.reach(door.name) as way:
                way.settimeout(20)
                try:
                    way.sendall(GREETED)
                    assert way.recv(1) != b"f"  # an alert of TLS, or the end
                except OSError:
                    pass
        made.accept(door)
        assert made.missing == {(DATA, 0), (CONTROL, 0)}
        with BoardDoor(HERE, same, 7) as friend, friend.reach(door.name) as way:
            way.sendall(GREETED)
            while (DATA, 0) in made.missing:
                made.accept(door)
            way.sendall(SECRET)
            assert made.wires[DATA].incoming[0].recv(100) == SECRET


@contextmanager
def spied(name, heard):
    """A place that passes all that comes on to the door of this name, and back, and notes it; the place's name."""
    address, _, port = name.rpartition(":")
    ways = []

    def pass_on(source, target):
        with suppress(OSError):  # it was closed
            while data := source.recv(1 << 16):
                heard.append(data)
                target.sendall(data)

    def accept():
        source, _ = spy.accept()
        target = socket.create_connection((address, int(port)))
        ways.extend((source, target))
        for each in ((source, target), (target, source)):
            threading.Thread(target=pass_on, args=each, daemon=True).start()

    with socket.create_server((HERE, 0)) as spy:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{HERE}:{spy.getsockname()[1]}"
        for way in ways:
            way.close()


def test_who_listens_reads_nothing_and_cannot_play_it_again(clusters):
    own, same = clusters[0]
    heard = []
    with door_of(own) as (door, made), spied(door.name, heard) as place, BoardDoor(HERE, same, 7) as friend:
        with friend.reach(place) as way:
            way.sendall(GREETED + SECRET)
            while (DATA, 0) in made.missing:
                made.accept(door)
            assert made.wires[DATA].incoming[0].recv(100) == SECRET
        said = b"".join(heard)
        assert len(said) > 500 and SECRET not in said and MARK not in said
        made.missing.add((DATA, 0))
        with BoardDoor(HERE, None, 7) as stranger, stranger.reach(door.name) as again:
            again.settimeout(20)
            with suppress(OSError):
                again.sendall(said)
                while again.recv(1 << 16):
                    pass
        made.accept(door)
        assert (DATA, 0) in made.missing


# --- the store --------------------------------------------------------------------------------------------------------

def test_the_store_answers_boards_of_its_cluster_alone(clusters, keeper, capsys):
    (_, same), (other, _) = clusters
    for keys in (None, other):
        with pytest.raises(OSError):
            client(keeper, keys).greet(1)
    assert client(keeper, same).greet(1) == ""
    assert capsys.readouterr().err.count("it has no key of this cluster") == 1


def test_idle_strangers_and_junk_keep_no_board_from_the_store(clusters, keeper, capsys):
    idle = [socket.create_connection(address_of(keeper), timeout=20) for _ in range(300)]
    for way in idle[::3]:
        with suppress(OSError):  # it was sent away
            way.send(b"\x16\x03\x01 junk" * 9)
    way = client(keeper, clusters[0][1])
    assert way.greet(1) == ""
    for stranger in idle:
        stranger.close()
    assert Store(way.ask).add("heartbeat/1", 1) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_start_that_somebody_has_captured_takes_no_seat_of_the_store(clusters, keeper):
    heard = []
    address, port = address_of(keeper)
    with spied(f"{address}:{port}", heard) as place:
        host, _, spy = place.rpartition(":")
        way = StoreClient((host, int(spy)), ("rank 0", "rank 1"), 20, clusters[0][1])
        assert way.greet(1) == ""
        Store(way.ask).set("heartbeat/1", "3")
    said = b"".join(heard)
    assert len(said) > 500 and b"flowspec" not in said and b"heartbeat" not in said
    way.close()
    keeper.seats.clear()
    with socket.create_connection(address_of(keeper), timeout=20) as again, suppress(OSError):
        again.sendall(said)
        while again.recv(1 << 16):
            pass
    assert keeper.seats == {} and Store(keeper.entries.reply_to_root).look("heartbeat/1") == b"3"


# --- whole runs -------------------------------------------------------------------------------------------------------

@pytest.fixture
def start(tmp_path, saved):
    yield from starting(tmp_path, boards_of(saved, tmp_path / "own"))


def test_boards_with_keys_write_the_reference_text_and_one_without_cannot_join(start, tmp_path):
    loopback = meet_here(tmp_path)
    assert make_keys(tmp_path, loopback[0], "push=false").returncode == 0
    keys = [f"keys={tmp_path / 'cluster' / str(rank)}" for rank in range(3)]
    asked = [*loopback[:2], *ASK, f"output={tmp_path / 'out.json'}"]
    runs = [start(rank, *asked, keys[rank]) for rank in range(2)]
    assert ends([start(2, *asked, "wait=2")]) == [75]
    runs.append(start(2, *asked, keys[2]))
    assert ends(runs) == [0, 0, 0], said(tmp_path, 0)
    assert token_ids(tmp_path / "out.json") == reference()
    assert said(tmp_path, 2) == "flowspec: all 3 ranks are here, encrypted"


# --- keys that are wrong, and the command that makes them -------------------------------------------------------------

def test_keys_that_are_not_whole_or_not_secret_are_refused(clusters, tmp_path):
    with refused("has no cluster.crt, which a board's keys need"):
        read_keys(tmp_path)
    (tmp_path / "hosts").write_text("127.0.0.1\n127.0.0.2\n")
    made = make_keys(tmp_path, f"hosts={tmp_path / 'hosts'}", "push=false")
    assert made.returncode == 0 and made.stdout.count("\n") == 3, made.stderr
    first, second = tmp_path / "cluster" / "0", tmp_path / "cluster" / "1"
    secrets = first / "board.key", tmp_path / "cluster" / "cluster.key"
    assert [path.stat().st_mode & 0o077 for path in secrets] == [0, 0]
    (first / "board.key").chmod(0o644)
    with refused("board.key: chmod 600"):
        read_keys(first)
    shutil.copy(first / "board.key", second / "board.key")
    (second / "board.key").chmod(0o600)
    with refused("make them again with bash scripts/make_keys.sh"):
        read_keys(second)


def test_keys_come_to_their_boards_and_stay_as_they_are(tmp_path):
    save_program(tmp_path / "ssh", SSH)
    for name in ("b0", "b1"):
        (tmp_path / name).mkdir()
    (tmp_path / "hosts").write_text("b0\nb1 folder=it's\n")
    held = []
    for _ in range(2):
        made = make_keys(tmp_path, f"hosts={tmp_path / 'hosts'}", SSH=str(tmp_path / "ssh"))
        assert made.returncode == 0, made.stderr
        places = tmp_path / "b0" / "flowspec" / "keys", tmp_path / "b1" / "it's" / "keys"
        held.append([(place / "board.key").read_bytes() for place in places])
        assert all(read_keys(place) and not place.stat().st_mode & 0o077 for place in places)
    assert held[0] == held[1]
    assert held[0][0] != held[0][1]
    assert not list(tmp_path.glob("b*/**/cluster.key"))


@pytest.mark.parametrize("words, message", [
    ([], "which boards? Give hosts=FILE"),
    (["hosts=none"], "there is no file none"),
    (["key=x"], "unknown word key=x: give hosts=FILE"),
    (["hosts=hosts", "ranks=a"], "ranks=a is not possible"),
])
def test_a_command_that_cannot_work_says_why(tmp_path, words, message):
    made = make_keys(tmp_path, *words)
    assert made.returncode == 2 and message in made.stderr and not (tmp_path / "cluster").exists(), made.stderr
