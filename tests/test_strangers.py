"""What anybody in the boards' network may write to them: to the store and the door, and in the place of rank 0."""
import json
import pickle
import select
import socket
import struct
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.agreement import OTHER_CODE, Junk, clean, code_version, judge_facts, judge_ways
from cluster.board import Board, Line
from cluster.heartbeat import Heartbeat
from cluster.sockets import MAX_STRANGERS
from cluster.store import Entries, Store, StoreClient, StoreServer, shut_down
from config.failure import PeerLost
from config.schema.untrusted import one_line
from launch.trace import learn_time, send_time
from pipeline.trace import NoTrace
from tests.json_files import json_values
from tests.saved import wait_until
from tests.tiny import in_threads

HERE = "127.0.0.1"
EVIL = "\x1b]0;owned\x07\x1b[2J\r\n\u202eflowspec: all is well"
FACTS = {"host": "b", "address": "10.0.0.1", "code": code_version(), "worker": False,
         "world": 3, "split": "s", "settings": {"dtype": "auto"},
         "interface": "eth0", "port": 1}


@pytest.fixture
def keeper():
    found = StoreServer((HERE, 0), Entries())
    yield found
    found.close(0)


def connected(keeper):
    return socket.create_connection((HERE, keeper.port), timeout=20)


@pytest.fixture
def own_store(keeper):
    """The store as rank 0 itself has it."""
    return Store(keeper.entries.reply_to_root)


def answer_of(*values):
    """A line of the store's protocol."""
    return json.dumps(values).encode() + b"\n"


def follower(keeper, rank):
    wire = StoreClient((HERE, keeper.port), ("rank 0 (b0)", f"rank {rank} (b{rank})"), 20)
    assert wire.greet(rank) == ""
    return Store(wire.ask)


def throw(keeper, *pieces):
    """What a stranger's connection gets back for some bytes."""
    with connected(keeper) as way:
        got = b""
        try:
            for piece in pieces:
                way.sendall(piece)
            way.shutdown(socket.SHUT_WR)
            while more := way.recv(1 << 16):
                got += more
        except OSError:
            pass  # it was sent away before it had said all
        return got


def reset(keeper):
    """A port scan: there and gone."""
    with connected(keeper) as way:
        way.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def works(keeper, rank=7):
    """Whether a board finds the store as it should be."""
    store = follower(keeper, rank)
    store.set(f"0//cpu//{rank}", bytes(range(256)))
    own = Store(keeper.entries.reply_to_root)
    return own.get(f"0//cpu//{rank}") == bytes(range(256)) and store.add("heartbeat/losses", 0) == 0


# --- the store --------------------------------------------------------------------------------------------------------

def test_ranks_write_read_count_and_wait(keeper, own_store):
    one, two = follower(keeper, 1), follower(keeper, 2)
    assert one.look("split/0") is None and not one.check(["split/0"])
    threading.Timer(0.2, own_store.set, ("split/0", "abc")).start()
    assert one.get("split/0") == b"abc" and two.check(["split/0"])
    beats = "heartbeat/1"
    assert [one.add(beats, 1), one.add(beats, 1), two.add(beats, 0), own_store.add(beats, 0)] == [1, 2, 2, 2]


def test_boards_of_the_hosts_file_are_known_by_their_addresses():
    board = Board(0, HERE, 1, "", 1.0,
                  [Line("localhost"), Line("10.0.0.9", spare="")])
    assert board.listed_addresses() == {HERE, "10.0.0.9"}


def test_the_store_listens_at_its_address_alone(keeper):
    assert works(keeper)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", keeper.port), timeout=20)


@pytest.mark.parametrize("pieces", [
    [b""], [b"\n"], [b"\x00\x85\x9d\x54\x0c"], [b"GET / HTTP/1.1\r\n", b"Host: b\r\n\r\n"],
    [pickle.dumps({"a": 1})],
    [b"[" * 255 + b"\n"], [b"x" * 100_000], [b'["flowspec", "1"]\n'], [b'["flowspec", 0]\n'], [b'["flowspec", -1]\n'],
    [b'["flowspec", true]\n'], [b'["flowspec", 1e3]\n'], [b'["flowspec", 99999]\n'], [b'["look", "facts/0", null]\n'],
    [b'["set", "heartbeat/lost", "rank 1"]\n'], [b'["add", "heartbeat/losses", 1]\n'], [b"\xff\xfe\n"],
], ids=range(17))
def test_who_does_not_say_which_rank_it_is_gets_nothing_and_harms_nobody(keeper, capfd, pieces):
    assert throw(keeper, *pieces) == b""
    assert works(keeper)
    printed = capfd.readouterr().err
    assert "Traceback" not in printed and printed.replace("\n", "").isprintable()
    named = f"flowspec: {HERE} sent data to port {keeper.port} that is not part of this run"
    assert printed.count(named) == (pieces != [b""]), printed


def test_a_reset_connection_and_hundreds_that_say_nothing_keep_nobody_out(keeper, capfd):
    for _ in range(20):
        reset(keeper)
    idle = [connected(keeper) for _ in range(300)]
    half = [connected(keeper) for _ in range(5)]
    for way in half:
        way.sendall(b'["flow')
    assert works(keeper)
    assert len(keeper._strangers) <= MAX_STRANGERS
    for way in idle + half:
        way.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_board_among_a_crowd_comes_in_at_one_of_its_tries(keeper):
    wire = StoreClient((HERE, keeper.port), ("rank 0", "rank 1"), 20)
    crowd = [connected(keeper) for _ in range(2 * MAX_STRANGERS)]
    assert wait_until(lambda: select.select([wire._connection], [], [], 0)[0], 20)  # it was the oldest
    with pytest.raises(OSError):
        wire.greet(1)
    assert works(keeper, 1)
    for way in crowd:
        way.close()


def test_a_lost_seat_is_taken_from_a_known_address_alone(keeper, capfd):
    names = "rank 0", "rank 1"
    first = StoreClient((HERE, keeper.port), names, 20)
    assert first.greet(1) == ""
    first.close()
    assert wait_until(lambda: keeper.gone_ranks() == [1], 20)
    keeper.patience, keeper.board_addresses = 60.0, {"10.0.0.1"}
    with pytest.raises(OSError):
        StoreClient((HERE, keeper.port), names, 20).greet(1)
    assert "without keys only boards of the hosts file" in capfd.readouterr().err
    keeper.board_addresses.add(HERE)
    assert StoreClient((HERE, keeper.port), names, 20).greet(1) == ""


def test_who_took_a_seat_that_is_not_his_writes_no_more_than_its_entries_in_their_forms(keeper, own_store, capfd):
    one, stranger = follower(keeper, 1), follower(keeper, 2)
    one.set("facts/1", json.dumps(FACTS))
    one.add("heartbeat/1", 3)
    own_store.set("facts/verdict", json.dumps(["", False, []]))
    for forged in (("set", "facts/1", "{}"),
                   ("set", "facts/verdict", json.dumps([EVIL, False, []])),
                   ("add", "heartbeat/1", 1 << 40), ("set", "clock/2/time/0", "0.5"),
                   ("set", "facts/2", "[]"), ("set", "facts/2", json.dumps({**FACTS, "port": "x"})),
                   ("set", "facts/2", "[" * 100_000), ("set", "facts/2", "9" * 100_000),
                   ("set", "x", "y" * (1 << 21)),
                   ("delete", "facts/1", None), ("list", "", None), ("set", "heartbeat/2", EVIL),
                   ("look", EVIL * 99, None),
                   ("add", "heartbeat/losses", 1 << 80), ("set", "split/2", "\u2028"), ("add", "facts/1", 1)):
        with pytest.raises(RuntimeError, match="refuses this rank's entry"):
            stranger._ask(*forged)
    assert json.loads(one.get("facts/1")) == FACTS
    assert json.loads(one.get("facts/verdict")) == ["", False, []]
    assert one.add("heartbeat/1", 0) == 3 and own_store.look("facts/2") is None
    printed = capfd.readouterr().err

    assert printed.count("\n") == 2 and f"{HERE} sent data to port" in printed and "as rank 2" in printed
    assert printed.replace("\n", "").isprintable()


def test_the_store_cannot_be_filled_without_end(keeper):
    stranger = follower(keeper, 2)
    with pytest.raises(RuntimeError, match="the store is full"):
        for number in range(70):
            stranger.set(f"heap/{number}", b"x" * (1 << 20))
    assert works(keeper)


def test_a_loss_that_somebody_made_up_reaches_no_screen_unescaped(keeper, own_store):
    stranger, heard = follower(keeper, 2), []
    assert stranger.add("heartbeat/losses", 1) == 1
    stranger.set("heartbeat/lost", EVIL)
    heartbeat = Heartbeat(own_store, 0, 3, 20)
    heartbeat.start(heard.append)
    heartbeat.begin("")
    assert wait_until(lambda: heard, 20) and heard[0].isprintable() and "all is well" in heard[0]


def test_ranks_of_two_machines_agree_about_the_time_over_the_store(keeper, own_store):
    trace, noted = NoTrace(), {}
    trace.note = lambda name, since, **facts: noted.update(facts)
    with in_threads(send_time, [(own_store, [1], "here", lambda: time.monotonic() + 1000)]):
        learn_time(follower(keeper, 1), 1, "there", trace)
    assert noted["ahead"] == pytest.approx(1000, abs=5)


# --- a rank 0 that is none --------------------------------------------------------------------------------------------

@contextmanager
def pretender(*answers):
    """A server that takes a request for each answer, and then hangs up."""
    with socket.create_server((HERE, 0)) as door:
        def serve():
            way, _ = door.accept()
            with way, way.makefile("rb") as asked:
                for answer in answers:
                    asked.readline()
                    way.sendall(answer)
        threading.Thread(target=serve, daemon=True).start()
        yield StoreClient(door.getsockname(), ("rank 0 (b0)", "rank 1 (b1)"), 20)


@pytest.mark.parametrize("answer, message", [
    (b"HTTP/1.1 400 Bad Request\r\n", "is not the store of rank 0 (b0): give all boards another port"),
    (b"[1]\n", "is not the store of rank 0 (b0)"), (b"\x80\x04\n", "is not the store of rank 0 (b0)"),
    (b"", "rank 0 (b0) was lost: its program has ended"),
    (answer_of("ok", 7), "the store holds junk: facts/verdict"),
    (answer_of("ok", "null"), "the store holds junk: facts/verdict"),
    (answer_of("junk", EVIL), "all is well"),
])
def test_what_a_pretender_answers_is_reported_in_a_sentence(answer, message):
    with pretender(b'["welcome", ""]\n', answer) as wire:
        assert wire.greet(1) == ""
        with pytest.raises(RuntimeError) as error:
            Store(wire.ask).look("facts/verdict")
        assert message in str(error.value) and str(error.value).isprintable()


def test_a_pretenders_verdict_is_escaped():
    verdict = answer_of("ok", json.dumps([EVIL, True, []]))
    with pretender(b'["taken", "\\u001b[2J"]\n', verdict) as wire:
        assert wire.greet(1).isprintable()
        found, lost, _ = json.loads(Store(wire.ask).look("facts/verdict"))
        assert found.isprintable() and "all is well" in found and lost


def test_a_program_that_stands_still_is_distinguished_from_a_board_that_is_gone():
    with socket.create_server((HERE, 0)) as door:
        wire = StoreClient(door.getsockname(), ("rank 0 (b0)", "rank 1 (b1)"), 0.2)
        with pytest.raises(PeerLost, match="its board answers, but its program does not"):
            wire.ask("look", "a", None)
        gone = StoreClient(door.getsockname(), ("rank 0 (b0)", "rank 1 (b1)"), 0.2)
        shut_down(door)
    with pytest.raises(PeerLost, match=r"rank 0 \(b0\) was lost|rank 1 \(b1\) could not reach the machine of rank 0"):
        gone.ask("look", "a", None)


# --- entries and doors ------------------------------------------------------------------------------------------------

JSON = json_values(st.text(), keys=st.text())
KEYS = st.sampled_from("""facts/1 facts/verdict ways/1 ways/verdict heartbeat/1 heartbeat/lost 0//heartbeat/lost
    split/1 clock/1 clock/1/time/0 default_pg/split/0""".split())


@given(KEYS,
       st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_an_entry_has_its_form_or_is_junk(key, raw):
    try:
        found = clean(key, raw)
    except Junk as junk:
        assert str(junk).isprintable()
    else:
        assert clean(key, found) == found and found.decode().isprintable()


@given(st.dictionaries(st.sampled_from(list(FACTS)), JSON))
def test_facts_have_all_their_parts_or_are_junk(change):
    try:
        found = json.loads(clean("facts/1", json.dumps({**FACTS, **change}).encode()))
    except Junk:
        return
    if found["code"] == FACTS["code"]:
        assert {name: type(value) for name, value in found.items()} == {name: type(FACTS[name]) for name in FACTS}
    else:
        host, code = (one_line(({**FACTS, **change})[name]) for name in ("host", "code"))
        found.pop("address", None)
        assert found == {"host": host, "code": code, "settings": {}, "worker": False, "error": OTHER_CODE}


@pytest.mark.parametrize("other", [
    {"code": "d"}, {"code": "d", "news": 1}, {"code": "d", "settings": {"x": []}}], ids=str)
def test_a_rank_of_another_version_is_named_whatever_its_facts_look_like(other):
    entries = {rank: json.loads(clean(f"facts/{rank}", json.dumps({**FACTS, **change}).encode()))
             for rank, change in enumerate(({"error": "no disk"}, other))}
    for written in entries, {0: entries[1], 1: entries[0]}:
        sentence = judge_facts(written, Board(0, "10.0.0.1", 1, "", 1, ()))
        assert sentence.startswith("rank 1 (b") and f"{OTHER_CODE} ({written[1]['code']}, not " in sentence


@given(st.text())
def test_a_strangers_text_is_printable_and_an_honest_one_stays_as_it_is(text):
    assert one_line(text).isprintable()
    assert one_line(text) == text or not text.isprintable() or len(text) > 1000


def test_ways_to_ranks_that_are_none_are_not_looked_at():
    assert judge_ways({0: FACTS, 1: FACTS},
                      {0: [], 1: [900]}, ["rank 0", "rank 1"]) == ""
