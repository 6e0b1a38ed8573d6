"""Boards that find each other: the code that pairs them, strangers, names, and the hosts file that is written."""
from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from cluster import lobby, pairing
from cluster.agreement import code_version
from cluster.board import Line, read_hosts, stages_for
from cluster.discovery import BOARD, ROOT, Announced, Neighbours, plain_name
from cluster.keys import KEY_FILES, read_keys
from cluster.pairing import CodeDoor, give_keys, new_code, plate_of, store_keys
from cluster.store import Entries, StoreServer
from config.run_config import RunConfig
from launch import gather, join, share, timing
from launch.gather import Authority, codes_for, gathered
from launch.join import knock, wait_for_keys
from launch.measure import LayerTimes
from launch.share import ModelShape, fixed_stages, proposal
from launch.timing import Passed
from launch.words import resolve
from tests.checkpoints import refused
from tests.saved import wait_until

HERE, OTHER_HERE, CODE, OTHER = "127.0.0.1", "127.0.0.2", "47-318205", "47-318206"
FILES = {name: f"text of {name}\n" for name in KEY_FILES}
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl here")


def announced(port=0, name="pi-3", **texts):
    return Announced(name, HERE, port, {"plate": "47", "code": code_version(), **texts})


@pytest.fixture
def door():
    with CodeDoor(HERE, CODE) as opened:
        yield opened


def no_keys():
    raise AssertionError("keys were made for a board that did not prove its code")


# --- codes ------------------------------------------------------------------------------------------------------------

def test_the_right_code_brings_the_keys_and_a_wrong_one_nothing(door, capsys):
    with refused("it has another code"):
        give_keys((HERE, door.port), OTHER, no_keys)
    give_keys((HERE, door.port), CODE, FILES.copy)
    assert door.received.get(timeout=20) == FILES and door.received.empty()
    errors = []
    wait_until(lambda: errors.append(capsys.readouterr().err) or "".join(errors), 20)
    assert "".join(errors).startswith(f"flowspec: {HERE} tried a wrong code, and got nothing")


def test_three_exchanges_are_followed_by_a_pause(door, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pairing.time, "monotonic", lambda: now[0])
    for _ in range(2):
        for _ in range(pairing.MAX_TRIES):
            with refused("it has another code"):
                give_keys((HERE, door.port), OTHER, no_keys)
        with pytest.raises(ConnectionError, match="it pauses for 60 seconds after 3 tries"):
            give_keys((HERE, door.port), CODE, no_keys)
        now[0] += pairing.PAUSE_SECONDS
    give_keys((HERE, door.port), CODE, FILES.copy)
    assert door.received.get(timeout=20) == FILES


def test_a_try_counts_even_if_the_stranger_leaves_after_the_proof(door):
    from spake2 import SPAKE2_A

    for _ in range(pairing.MAX_TRIES):
        with socket.create_connection((HERE, door.port)) as stranger:
            stranger.sendall(SPAKE2_A(OTHER.encode()).start().hex().encode() + b"\n")
            assert stranger.recv(1)
    with pytest.raises(ConnectionError):
        give_keys((HERE, door.port), CODE, no_keys)


@pytest.mark.parametrize("line", [b"\n", b"GET / HTTP/1.1\n", b"41" * 32 + b"\n", b"41" + b"00" * 32 + b"\n",
                                  b"42" + b"ff" * 32 + b"\n", b"\xff\xfe\n", b"41" * 30_000])
def test_junk_gets_no_answer_from_a_board(door, line):
    with socket.create_connection((HERE, door.port)) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    assert door.received.empty()


@contextmanager
def stranger_that_answers(make_line):
    """Who announces himself as a board, and answers rank 0's message with this line; all that he receives after."""
    heard = []

    def answer():
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(make_line(lines.readline().strip()))
            heard.append(lines.readline())

    with socket.create_server((HERE, 0)) as server:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1], heard
        thread.join(20)


def message_of_board(message, code, proof):
    from cryptography.fernet import Fernet
    from spake2 import SPAKE2_B

    exchange = SPAKE2_B(code.encode())
    own_message = exchange.start().hex().encode()
    secret = exchange.finish(bytes.fromhex(message.decode()))
    return own_message + b" " + Fernet(pairing.urlsafe_b64encode(secret)).encrypt(proof) + b"\n"


@pytest.mark.parametrize("make_line", [
    lambda message: b"HTTP/1.1 400 Bad Request\r\n", lambda message: message + b" " + message + b"\n",
    partial(message_of_board, code=OTHER, proof=pairing.PROOF), partial(message_of_board, code=CODE, proof=b"else")])
def test_a_stranger_who_announces_himself_gets_nothing(make_line):
    with stranger_that_answers(make_line) as (port, heard), pytest.raises(ValueError):
        give_keys((HERE, port), CODE, no_keys)
    assert heard == [b""]


def test_codes_have_announced_digits_and_six_secret_ones():
    codes = {new_code() for _ in range(50)}
    assert len(codes) > 40
    resolve(["toy", f"codes={','.join(codes)}"])
    with refused("codes=318205 is not possible"):
        resolve(["toy", "codes=318205"])
    assert [*codes_for(announced(), ["46-318205", CODE])] == [CODE] and plate_of(CODE) == "47"


def test_a_board_without_a_code_is_named_and_left_out(capsys):
    assert [*codes_for(announced(), ["46-318205"])] == []
    assert capsys.readouterr().err == f"flowspec: pi-3 ({HERE}) is left out: its code was not given, as codes=47-...\n"


# --- names and versions -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("announced_name, name", [
    ("pi-3", "pi-3"), ("../../etc", "etc"), ("", "board"), ("Anna's PC.local", "Anna-s-PC-local"),
    ("\x1b[2J", "2J"), ("é/", "board"), ("x" * 99, "x" * 30), ("a name=b", "a-name-b")])
def test_a_name_is_safe_for_files_and_lines(announced_name, name):
    assert plain_name(announced_name) == name
    assert read_hosts_text(f"b0\nb1 name={name}\n")[1].name == name


def read_hosts_text(text, path="/dev/shm/flowspec-test-hosts"):
    with open(path, "w") as file:
        file.write(text)
    try:
        return read_hosts(path)
    finally:
        os.unlink(path)


def test_boards_of_one_name_get_suffixes(tmp_path):
    authority = Authority(tmp_path / "keys")
    (tmp_path / "cluster_keys" / "pi").mkdir(parents=True)
    (tmp_path / "cluster_keys" / "pi-2").mkdir()
    assert [authority._free_name(name) for name in ("pi", "pi-3")] == ["pi-3", "pi-3"]


def test_a_board_of_another_version_is_named_and_not_asked_for_its_code(tmp_path, capsys):
    assert Authority(tmp_path / "keys").pair(announced(code="old"), [CODE]) == ""
    assert capsys.readouterr().err == (
        f"flowspec: pi-3 ({HERE}) has other code than this machine (old, not {code_version()}): bring one version to "
        "all boards; nothing is sent to it\n")


def test_keys_of_another_cluster_are_left_alone(tmp_path):
    store_keys(tmp_path / "keys", FILES)
    with refused("has keys of a cluster whose authority is not in", "move the first folder away"):
        Authority(tmp_path / "keys").own_keys()
    assert (tmp_path / "keys" / "board.key").read_text() == FILES["board.key"]


# --- announcements ----------------------------------------------------------------------------------------------------

def test_what_is_announced_is_found_until_it_is_withdrawn():
    with Neighbours(HERE) as here, Neighbours(OTHER_HERE) as others:
        here.announce("pi", 4001, BOARD, plate="11")
        others.announce("pi", 4002, BOARD, plate="\x1b[2J")
        others.announce("laptop", 4003, ROOT)
        assert wait_until(lambda: len(here.with_role(BOARD)) == 2 and here.with_role(ROOT), 20)
        assert {(board.name, board.address, board.port, board.texts["plate"]) for board in here.with_role(BOARD)} == {
            ("pi", HERE, 4001, "11"), ("pi", OTHER_HERE, 4002, "\\x1b[2J")}
        [root] = here.with_role(ROOT)
        assert (str(root), root.other_code) == (f"laptop ({OTHER_HERE})", "")
        others.withdraw()
        assert wait_until(lambda: len(here.with_role(BOARD)) == 1 and not here.with_role(ROOT), 20)


class Quiet:
    """Neighbours of which some are announced, without a network."""

    boards: list[Announced] = []

    def __init__(self, address):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def announce(self, *words, **texts):
        pass

    withdraw = announce

    def with_role(self, role):
        return self.boards if role == BOARD else []


# --- from codes to a hosts file ---------------------------------------------------------------------------------------

@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(gather, "Neighbours", Quiet)
    monkeypatch.setattr(gather, "own_address", lambda interface: HERE)
    monkeypatch.setattr(gather, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(lobby, "RETURN_SECONDS", 20.0)
    monkeypatch.setattr(Quiet, "boards", [])
    monkeypatch.setattr(gather.socket, "gethostname", lambda: "laptop")


def be_worker(door, key_folder, port, replies, stop):
    """What a worker does: it stores its keys, and knocks until the test ends."""
    store_keys(key_folder, door.received.get(timeout=20))
    keys = read_keys(key_folder)
    while not stop.is_set():
        try:
            replies.append(knock((HERE, port), keys))
        except OSError:
            time.sleep(0.02)


@pytest.fixture
def worker(door, tmp_path, monkeypatch):
    """The port of rank 0 to which a worker comes once it has keys, and what was replied to it."""
    with socket.create_server((HERE, 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(timing, "measure", lambda request: {
        "passes": [Passed(1, 16, 8.0), Passed(16, 16, 8.0)], "free": 1.0, "code": code_version()})
    replies, stop = [], threading.Event()
    thread = threading.Thread(target=be_worker, args=(door, tmp_path / "pi" / "keys", port, replies, stop))
    thread.start()
    yield port, replies
    stop.set()
    thread.join()


@needs_openssl
def test_a_board_is_paired_once_and_its_hosts_file_is_used_again(quiet, worker, door, tmp_path, monkeypatch, capsys):
    port, replies = worker
    Quiet.boards = [announced(door.port)]
    words = ["toy", f"keys={tmp_path / 'keys'}", f"master=:{port}", "hosts=auto", f"codes={CODE}"]
    resolved = resolve(words)
    hosts_file = tmp_path / "boards.txt"
    assert re.fullmatch(rf"{HERE} name=laptop\n{HERE} name=pi-3 layers=8 wire=\d+,\d+\.\d\n", hosts_file.read_text())
    assert (resolved.keys.run.hosts, resolved.keys.run.stages) == (str(hosts_file), "0+8")
    assert "pi-3   127.0.0.1  8       1.0      1.00" in capsys.readouterr().err
    assert stat.S_IMODE((tmp_path / "pi" / "keys").stat().st_mode) == 0o700

    # the second time
    Quiet.boards = []
    monkeypatch.setattr(share, "measured", lambda *words: pytest.fail("it was measured again"))
    hosts_file.write_text(hosts_file.read_text() + "# mine\n")
    assert resolve(words).keys.run.hosts == str(hosts_file)
    assert hosts_file.read_text().endswith("# mine\n")

    # the run
    server = StoreServer((HERE, port), Entries(), read_keys(tmp_path / "keys"))
    server.rank_of_name = {"pi-3": 5}
    try:
        assert wait_until(lambda: 5 in replies, 20) and set(replies) == {0, 5}
        assert server.seats == {}
    finally:
        server.close(0)


def replies_until_the_end(connection):
    with suppress(ConnectionResetError):
        return connection.recv(100)
    return b""


@needs_openssl
def test_a_stranger_without_keys_is_no_guest_and_learns_no_rank(quiet, tmp_path):
    keys = Authority(tmp_path / "keys").own_keys()
    other_keys = Authority(tmp_path / "other" / "keys").own_keys()
    with lobby.opened_lobby(HERE, 0, keys) as opened:
        with pytest.raises(OSError):
            knock((HERE, opened.port), other_keys)
        with socket.create_connection((HERE, opened.port)) as stranger:
            stranger.sendall(b'["flowspec", 0]\n')
            stranger.settimeout(20)
            assert b"[" not in replies_until_the_end(stranger)
        with refused("no board has come: type bash run_worker.sh on another machine"):
            opened.wait_for(set())
        with refused(f"port {opened.port} of {HERE} cannot be used (Address already in use): end the run"):
            lobby.opened_lobby(HERE, opened.port, keys)

    server = StoreServer((HERE, 0), Entries())
    try:
        with socket.create_connection((HERE, server.port)) as stranger:
            stranger.sendall(b'["flowspec", 0]\n')
            stranger.settimeout(20)
            assert stranger.recv(100) == b""
    finally:
        server.close(0)


def test_a_board_shows_its_code_and_listens_no_more_once_it_has_keys(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(join, "new_code", lambda: CODE)
    ports = []

    class Noted(Quiet):
        def announce(self, name, port, role, **texts):
            ports.append(port)
            threading.Thread(target=give_keys, args=((HERE, port), CODE, FILES.copy)).start()
            assert (name, role, texts) == ("pi-3", BOARD, {"plate": "47", "cores": "4 cores"})

    wait_for_keys(Noted(HERE), HERE, tmp_path / "keys", "pi-3", cores="4 cores")
    assert capsys.readouterr().out == f"pairing code: {CODE}\n"
    assert {name: (tmp_path / "keys" / name).read_text() for name in KEY_FILES} == FILES
    assert stat.S_IMODE((tmp_path / "keys" / "board.key").stat().st_mode) == 0o600
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, ports[0]))


@needs_openssl
def test_a_worker_comes_to_its_rank_0_by_what_is_announced_and_later_without(tmp_path, capsys):
    keys, other_keys = (Authority(tmp_path / name / "keys").own_keys() for name in ("one", "other"))
    server = StoreServer((HERE, 0), Entries(), keys)
    server.rank_of_name = {plain_name(socket.gethostname()): 3}
    neighbours, root_file = Quiet(HERE), tmp_path / "root"
    root = Announced("laptop", HERE, server.port, {"code": "old"})
    neighbours.with_role = lambda role: [root] if role == ROOT else []
    try:
        assert next(join.calls(neighbours, keys, root_file)) == ((HERE, server.port), 3)
        assert "rank 0 at laptop (127.0.0.1) has other code than this machine (old, not" in capsys.readouterr().err
        assert root_file.read_text() == f"{HERE}:{server.port}"
        assert next(join.calls(Quiet(HERE), keys, root_file)) == ((HERE, server.port), 3)
        with pytest.raises(OSError):
            knock((HERE, server.port), other_keys)
    finally:
        server.close(0)


# --- shares -----------------------------------------------------------------------------------------------------------

class Stub:
    """A board that was measured already; `ms` are those of a layer."""

    def __init__(self, name, ms, free, code=""):
        self.name, self.address = name, f"10.0.0.{name[-1]}"
        self.layers = LayerTimes([Passed(1, 16, 8.0 * ms), Passed(16, 16, 8.0 * ms)], free, code or code_version())

    with_layers = lobby.Guest.with_layers


@pytest.fixture
def shape(monkeypatch):
    monkeypatch.setattr(share, "layer_times", lambda board, request: board.layers)
    monkeypatch.setattr(share, "wire_times", lambda board: (0.1, 1000.0))
    return ModelShape.of(toy())._replace(layer_bytes=0.1e9)


def toy(*words):
    return resolve(["toy", "stages=0+8", *words]).keys.run


def test_layers_go_by_speed_and_room_and_the_table_says_so(shape, capsys):
    boards = [Stub("pi-1", 1, 8), Stub("pi-2", 3, 8), Stub("pi-3", 1, 0.3)]
    assert proposal(toy(), shape, boards) == [Line("10.0.0.1", name="pi-1", layers="6", wire="1000,0.1"),
                                              Line("10.0.0.3", name="pi-3", layers="2", wire="1000,0.1")]
    head, first, second, third, speed = capsys.readouterr().err.splitlines()[1:]
    assert (head.split(), first.split()) == (
        "board address layers GB free ms a layer ms away Mbit/s".split(),
        "pi-1 10.0.0.1 6 8.0 1.00 0.1 1000".split())
    assert (second.split()[2], third.split()[2]) == ("none", "2")
    row_ms = 1e3 * shape.sizes.hidden * 4 * 8 / 1e9
    round_ms, slowest_ms = 8 + 3 * 0.1 + 2 * row_ms, 6
    assert speed.startswith(f"expected: {1e3 / round_ms:.1f} tokens/s without guesses, "
                            f"{2e3 / (round_ms + slowest_ms):.1f} if every second guess is right")


def test_boards_without_room_or_of_another_version_are_named(shape, capsys):
    with refused("the model has 8 layers of 0.1 GB, and these boards have room for fewer: pi-1 2, pi-3 0; start more"):
        proposal(toy(), shape, [Stub("pi-1", 1, 0.3), Stub("pi-2", 1, 8, code="old"), Stub("pi-3", 1, 0)])
    assert f"pi-2 (10.0.0.2) is left out: it has other code than rank 0 (old, not {code_version()})" in (
        capsys.readouterr().err)
    with refused("no board can hold layers, for the reasons above"):
        proposal(toy(), shape, [Stub("pi-2", 1, 8, code="old")])


def test_a_given_split_decides_how_many_boards_there_are(saved):
    assert fixed_stages(toy(), has_stages=True) == [0, 8] and fixed_stages(toy(), has_stages=False) == []
    assert fixed_stages(RunConfig(model_dir=str(saved / "0+2+2")), has_stages=False) == [0, 2, 2]
    boards = [Stub("pi-1", 1, 8), Stub("pi-2", 1, 8)]
    assert [line.layers for line in gather.with_layers(boards, [0, 5, 3])] == ["5", "3"]
    with refused("the split is for 3 boards, and 2 came: start more of them"):
        gather.with_layers(boards, [0, 2, 2, 4])
    with refused("hosts=auto shares out layers: leave tp"):
        fixed_stages(resolve(["toy", "tp=2"]).keys.run, has_stages=False)
    with refused("there is no model to share out"):
        fixed_stages(RunConfig(), has_stages=False)


def test_a_hosts_file_with_layers_is_a_split(tmp_path):
    text = "b0\nb1 name=pi-1 layers=5 wire=1055,0.8\nb2 layers=3\nb3 spare\n"
    assert stages_for(read_hosts_text(text), "hosts") == "0+5+3"
    assert "".join(f"{line}\n" for line in read_hosts_text(text)) == text
    (tmp_path / "hosts").write_text(text)
    assert resolve(["toy", f"hosts={tmp_path / 'hosts'}"]).keys.run.stages == "0+5+3"
    assert resolve(["toy", f"hosts={tmp_path / 'hosts'}", "stages=0+4+4"]).keys.run.stages == "0+4+4"
    with refused("hosts gives layers= for 1 of 2 boards after rank 0's, but not for b2"):
        stages_for(read_hosts_text("b0\nb1 layers=5\nb2\n"), "hosts")


def test_no_second_run_on_the_port_of_a_run(quiet, tmp_path):
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        config = toy(f"keys={tmp_path / 'keys'}", f"master=:{port}")
        if shutil.which("openssl"):
            with refused(f"port {port} of {HERE} cannot be used"):
                gathered(config, has_stages=False)
