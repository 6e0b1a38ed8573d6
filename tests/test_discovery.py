"""Boards that announce themselves, and the hosts file that comes of it; over a zeroconf that stays in this process."""
from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from config.run_config import RunConfig
from launch.hosts import discovery
from launch.hosts.board import BOARD, read_hosts
from launch.hosts.discovery import Announced, board_of, hosts_text, read_announcement
from pipeline.failure import PeerLost
from tests.saved import boards_of, models

BOARD_OF = ContextVar("the board that a thread is", default=1)
WAY = {BOARD: "1", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return boards_of(models(tmp_path_factory.getbasetemp() / "saved"), tmp_path_factory.mktemp("own"))


@pytest.fixture
def network(monkeypatch):
    """A zeroconf whose announcements reach all who listen in this process, and who listens."""
    services, listening = {}, []

    class Zeroconf:
        def __init__(self, interfaces):
            self.heard = None

        def register_service(self, info):
            services[info.name] = info
            for heard in list(listening):
                heard(info.name)

        def get_service_info(self, kind, name):
            return services[name]

        def close(self):
            listening.remove(self.heard)

    def browser(zeroconf, kind, listener):
        zeroconf.heard = lambda name: listener.add_service(zeroconf, kind, name)
        listening.append(zeroconf.heard)
        for name in list(services):
            zeroconf.heard(name)

    def info(kind, name, port, addresses, properties):
        said = {key.encode(): value.encode() for key, value in properties.items()}
        shown = [".".join(map(str, each)) for each in addresses]
        return SimpleNamespace(name=name, properties=said, parsed_addresses=lambda: shown)

    module = ModuleType("zeroconf")
    module.__spec__ = ModuleSpec("zeroconf", None)
    module.Zeroconf, module.ServiceBrowser, module.ServiceInfo = Zeroconf, browser, info
    monkeypatch.setitem(sys.modules, "zeroconf", module)
    monkeypatch.setattr(discovery, "SETTLE", 0.5)
    monkeypatch.setattr(discovery, "addresses", lambda: {"eth0": f"10.0.0.{BOARD_OF.get()}"})
    monkeypatch.setattr(discovery.socket, "gethostname", lambda: str(BOARD_OF.get()))
    monkeypatch.setattr(discovery.getpass, "getuser", lambda: "me")
    return listening


def as_board(number, work):
    """Do this on a thread that is the board 10.0.0.NUMBER."""
    def begin():
        BOARD_OF.set(number)
        work()

    thread = threading.Thread(target=begin)
    thread.start()
    return thread


def test_boards_find_each_other_and_the_file_stays_the_truth(network, own, tmp_path, capsys):
    found = {}

    def come(number, folder, **more):
        hosts = tmp_path / f"hosts{number}"
        config = RunConfig(discover=True, hosts=str(hosts), model_dir=str(own / folder))
        with pytest.raises(ValueError, match="no line of"):  # these addresses are not this machine's
            board_of(config, {**WAY, **more})
        found[number] = hosts.read_text()

    (own / "both").mkdir()
    for rank in (1, 2):
        (own / "both" / f"stage_{rank}").symlink_to(own / f"board{rank}" / f"stage_{rank}")
    threads = [as_board(number, lambda number=number, folder=folder: come(number, folder))
               for number, folder in ((7, "board2"), (8, "both"), (9, "board0"), (6, "board1"))]
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(set(found.values())) == 1 and network == []
    lines = read_hosts(str(tmp_path / "hosts7"))
    assert [line.address for line in lines] == ["10.0.0.9", "10.0.0.6", "10.0.0.7", "10.0.0.8"]
    assert lines[3].stands_in(3) == [1, 2] and {line.user for line in lines} == {"me"}
    (tmp_path / "hosts7").write_text("127.0.0.1\n10.0.0.2\n")
    config = RunConfig(discover=True, hosts=str(tmp_path / "hosts7"))
    assert board_of(config, WAY).rank == 0 and (tmp_path / "hosts7").read_text() == "127.0.0.1\n10.0.0.2\n"


def test_a_board_that_nobody_answers_names_who_is_missing(network, own, tmp_path):
    config = RunConfig(discover=True, hosts=str(tmp_path / "hosts"), model_dir=str(own / "board1"), wait=1)
    with pytest.raises(PeerLost, match="rank 0 and rank 2 did not announce itself within 1 seconds"):
        board_of(config, WAY)
    assert network == [] and not (tmp_path / "hosts").exists()


def test_without_the_package_or_a_folder_a_sentence_says_what_to_do(network, own, tmp_path, monkeypatch):
    config = RunConfig(discover=True, hosts=str(tmp_path / "hosts"))
    with pytest.raises(ValueError, match="give model_dir=FOLDER"):
        board_of(config, WAY)
    monkeypatch.setattr(discovery, "addresses", lambda: {"lo": "127.0.0.1", "a": "10.0.0.1", "b": "10.0.0.2"})
    with pytest.raises(ValueError, match="over which network do the other boards come"):
        board_of(config, {BOARD: "1"})
    monkeypatch.setattr(discovery, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="-m pip install zeroconf, or write .*hosts by hand"):
        board_of(config, WAY)
    with pytest.raises(ValueError, match="start bash run_jetson.sh discover=true"):
        board_of(RunConfig(discover=True), {})


def test_two_boards_that_are_one_rank_are_named():
    with pytest.raises(ValueError, match="two boards say that they are rank 1: b1 and b2; give one of them another"):
        hosts_text([Announced("s", "1", "b1"), Announced("s", "0", "b0"), Announced("s", "1", "b2")])


@pytest.mark.parametrize(("rank", "line"), [
    ("x", "10.0.0.1"), ("1", "10.0.0.2"), ("1", "10.0.0.1 user=-l"), ("1", "10.0.0.1\x1b[2J"), ("1", ""),
    ("", "10.0.0.1"), ("1", "10.0.0.1 spare"), ("11111", "10.0.0.1"),
])
def test_an_announcement_that_a_stranger_made_up_is_ignored(rank, line):
    said = {b"split": b"s", b"rank": rank.encode(), b"line": line.encode()}
    assert read_announcement(["10.0.0.1"], said) is None
    assert read_announcement(["10.0.0.1"], {**said, b"rank": b"1", b"line": b"10.0.0.1 user=me"})
