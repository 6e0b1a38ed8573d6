"""Which rank a board is and where it meets the others: the hosts file, the environment and keys."""
import os
import socket

import pytest

from cluster.board import BOARD_VARIABLE, Board, Line, find_board, main, read_hosts, stages_for
from config.presets import ROOT
from config.run_config import RunConfig
from launch.ranks import command_elsewhere
from tests.checkpoints import refused

WRONG = ("0", "0.0", "-8", "x", "", "8GB", "nan", "8,8", "9999999")


def boards_in(folder, text):
    """What a hosts file with this text names."""
    (folder / "hosts").write_text(text)
    return read_hosts(str(folder / "hosts"))


def test_a_hosts_file_has_a_line_for_each_rank(tmp_path):
    assert boards_in(tmp_path, "# ours\n10.0.0.1\n\nme@b1 interface=eth1  # slow\nb2 user=you folder=/f\n") == [
        Line("10.0.0.1"), Line("b1", "me", interface="eth1"), Line("b2", "you", "/f")]


@pytest.mark.parametrize("text, message", [
    ("b0\n", "names 1 boards: write one line for each rank"),
    ("b0\nb1 eth0\n", "line 2 of"), ("b0\nb1 iface=eth0\n", "is no board: write [USER@]ADDRESS"),
    ("user=me\nb1\n", "line 1 of"), ("me@\nb1\n", "line 1 of"), ("b0\n-b1\n", "line 2 of ... begins with -"),
    ("b0\nb1 user=-l\n", "line 2 of"), ("b0\nb1 folder=-x\n", "line 2 of"), ("b0\nb1 user=a user=b\n", "line 2 of"),
    ("b0\n\0b1\n", "line 2 of"), ("b0\nb1\x1b[2J\n", "line 2 of"), ("b0\nb..1\n", "line 2 of"),
    ("b0\n" + "b" * 64 + "\n", "line 2 of"), ("b0\nb1/x\n", "line 2 of"), ("b0\nb1:22\n", "line 2 of"),
    ("b0\nb1\u2028b2\n", "line 2 of"), ("b0\nb1\nb2 spare=0\n", "line 3 of"),
    *((f"b0\nb1 memory={room}\n", "line 2 of") for room in WRONG),
    ("b0\nb1 spare\n", "names 1 boards"), ("b0\nb1\nb2 spare=1,2\n", "spare for rank 2, but lines for ranks 0 to 1"),
])
def test_a_line_that_is_no_board_is_named(tmp_path, text, message):
    with refused(*message.split(" ... ")):
        boards_in(tmp_path, text)


def test_spares_stand_behind_the_ranks_and_are_found_by_their_lines(tmp_path, capsys):
    text = "b0\n127.0.0.1 spare\nb1\nb2 folder=/f\nb3 user=me spare=2,1\n"
    board = found({}, text, tmp_path, master="b0")
    assert (board.rank, board.world, board.is_spare) == (3, 3, True)
    assert board.named(3) == "spare (127.0.0.1)"
    assert [line.stands_in(3) for line in board.lines] == [(),
                                                           (), (), range(1, 3), [2, 1]]
    assert not found({"NODE_RANK": "2"}, text, tmp_path).is_spare
    assert main([str(tmp_path / "hosts")]) == 0
    assert capsys.readouterr().out == (f"0 0 b0 flowspec\n1 1 b1 flowspec\n2 2 b2 /f\n3 1,2 . {ROOT}\n"
                                       "4 2,1 me@b3 flowspec\n")


def test_a_hosts_file_of_another_editor_is_read_or_refused(tmp_path):
    path, text = tmp_path / "hosts", "10.0.0.1\r\nb\u00fccher user=j\u00fcrgen\r\n"
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_hosts(str(path)) == [Line("10.0.0.1"), Line("b\u00fccher", "j\u00fcrgen")]
    for coding, message in (("latin-1", "is not UTF-8"), ("utf-16", "is not UTF-8"),
                            ("utf-16-le", "UTF-8|line 1 of .* is no board")):
        path.write_bytes(text.encode(coding))
        with pytest.raises(ValueError, match=message):
            read_hosts(str(path))
    for wrong, message in ((tmp_path, "is a folder, a device or a pipe"), (tmp_path / "none", "there is no file")):
        with refused(message):
            read_hosts(str(wrong))


def test_rank_0_listens_at_the_address_that_the_others_can_find(monkeypatch):
    for master in ("127.0.0.1", "localhost"):
        assert Board(0, master, 1, "", 1, ()).listen_address() == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")  # as some systems know their own name
    monkeypatch.setattr("cluster.board.is_here", lambda address: True)
    monkeypatch.setattr("cluster.board.addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.1"})
    assert Board(0, "b0", 1, "eth0", 1, ()).listen_address() == "10.0.0.1"
    with refused("b0 is 127.0.1.1 on this board, which no other", "eth0 10.0.0.1"):
        Board(0, "b0", 1, "", 1, ()).listen_address()


def found(environment, text="", tmp_path=None, **keys):
    if text:
        (tmp_path / "hosts").write_text(text)
        keys["hosts"] = str(tmp_path / "hosts")
    return find_board(RunConfig(**keys), {BOARD_VARIABLE: "1", **environment})


def test_keys_go_before_the_environment_and_that_before_the_hosts_file(tmp_path):
    text = "10.9.9.9 interface=a\n127.0.0.1 interface=b\n"
    board = found({}, text, tmp_path)
    assert board[:5] == (1, "10.9.9.9", 29500, "b", 300)
    assert board.named(0) == "rank 0 (10.9.9.9)"
    environment = {"NODE_RANK": "0", "MASTER_ADDR": "10.8.8.8", "MASTER_PORT": "7", "GLOO_SOCKET_IFNAME": "c"}
    assert found(environment, text, tmp_path)[:4] == (0, "10.8.8.8", 7, "c")
    assert found(environment, text, tmp_path, master="10.7.7.7:8")[:4] == (0, "10.7.7.7", 8, "c")
    assert found(environment)[:4] == (0, "10.8.8.8", 7, "c")


def test_without_a_board_or_in_a_rank_no_others_are_waited_for():
    assert find_board(RunConfig(), {"NODE_RANK": "1"}) is None
    assert found({"RANK": "1"}) is None


@pytest.mark.parametrize("key", ["keys", "master"])
def test_a_key_of_several_hosts_is_refused_where_all_ranks_are_here(key):
    keys = {key: "x"}
    with refused(f"{key}=x is for several hosts, and all ranks are here: add hosts=FILE"):
        find_board(RunConfig(**keys), {})
    assert find_board(RunConfig(**keys), {"RANK": "1"}) is None


@pytest.mark.parametrize("environment, text, message", [
    ({}, "", "which rank is this board"), ({"NODE_RANK": "1"}, "", "where is rank 0"),
    ({"NODE_RANK": "x"}, "", "NODE_RANK=x is not possible"),
    ({"NODE_RANK": "2"}, "b0\nb1\n", "give a number from 0 to 1"),
    ({}, "203.0.113.1\n203.0.113.2\n", "no line of ... is this board, which has lo 127.0.0.1"),
    ({}, "127.0.0.1\n127.0.0.2\n", "ranks 0, 1 in ... are all this machine: choose one"),
    ({"NODE_RANK": "1", "MASTER_ADDR": "a..b"}, "", "'a..b' is no name or address of a board"),
    ({"NODE_RANK": "\u00b2"}, "", "is not possible"),
])
def test_a_board_that_is_not_known_is_asked_for(tmp_path, environment, text, message):
    with refused(*message.split(" ... ")):
        found(environment, text, tmp_path)


def test_a_hosts_file_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with refused("is a folder, a device or a pipe: write one line for each rank"):
        read_hosts(str(tmp_path / "hosts"))


def test_a_split_for_boards_goes_by_their_memory_if_all_lines_say_it(tmp_path):
    def stages(text):
        return stages_for(boards_in(tmp_path, text), "hosts")

    assert stages("b0\nb1\nb2\n") == stages("b0 memory=4\nb1\nb2\n") == "auto:2"
    assert stages("b0\nb1 memory=8\nb2 memory=15.5 user=me\nb3 spare memory=8\n") == "auto:8,15.5"
    assert stages("b0\nb1 memory=8\n") == "auto:1"
    with refused("hosts gives memory= for 1 of 2 boards after rank 0's, but not for b2: give it for all of them"):
        stages("b0\nb1 memory=8\nb2\n")


def test_the_command_for_other_boards_has_no_keys_of_this_one():
    words = ["toy", "hosts=h", "keys=cluster/0", "template=own", "prompt=two words"]
    own_keys = ", with keys=FOLDER if its own keys are not in keys/"
    assert command_elsewhere(words) == f"bash run_jetson.sh toy hosts=h 'prompt=two words'{own_keys}"
    assert command_elsewhere(words[:2]) == "bash run_jetson.sh toy hosts=h"


def test_the_address_of_rank_0_stands_once_in_a_sentence():
    lines = [Line("10.0.0.1"), Line("10.0.0.2")]
    board = Board(1, "10.0.0.1", 29500, "", 1, lines)
    assert f"{board.named(0)} cannot be reached at {board.meeting_point(board.named(0))}" == (
        "rank 0 (10.0.0.1) cannot be reached at port 29500")
    assert Board(1, "10.0.0.1", 29500, "", 1, ()).meeting_point("rank 0") == "10.0.0.1:29500"
