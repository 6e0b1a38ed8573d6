"""Parts of a model that rank 0 sends to workers: whole, private, continued, and refused where anything is wrong."""
import hashlib
import json
import shutil
import stat
from functools import partial
from types import SimpleNamespace

import pytest

from cluster.agreement import Junk, code_version
from cluster.board import Board
from cluster.memberships import NEWEST
from cluster.rendezvous import Coordinator, WorkerBoard
from cluster.store import Entries, Store, StoreServer
from config.cli import parse
from launch import receive
from launch.prepare import part_number, prepare
from launch.receive import PartSender, received_part
from model.weights.parts import MANIFEST, WEIGHTS, Part
from tests.checkpoints import refused
from tests.json_files import change_json


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    monkeypatch.setattr(receive, "PIECE_BYTES", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def split(saved, tmp_path):
    return shutil.copytree(saved / "0+2+2", tmp_path / "split")


def split_id_of(split):
    return Part(split / "stage_1").split_id


def sent(split, rank=1):
    """What asks rank 0 for the pieces of a rank's part."""
    return partial(PartSender(lambda rank: split / f"stage_{rank}").piece, rank)


def received(split, rank=1):
    return received_part(sent(split, rank), split_id_of(split))


def test_a_part_is_received_whole_once_and_for_this_user_alone(split):
    kept = received(split, rank=2)
    for name in (MANIFEST, *receive.STAGE_FILES):
        assert (kept / "stage_2" / name).read_bytes() == (split / "stage_2" / name).read_bytes()
    Part(kept / "stage_2").verify()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700

    requested = []

    def request(name, offset):
        requested.append(name)
        return sent(split, 2)(name, offset)

    assert received_part(request, split_id_of(split)) == kept
    assert set(requested) == {MANIFEST}


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", MANIFEST])
def test_what_was_damaged_here_is_received_again_and_nothing_else(split, capsys, name):
    kept = received(split)
    with (kept / "stage_1" / name).open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\0")
    requested = []

    def request(name, offset):
        requested.append(name)
        return sent(split)(name, offset)

    assert received_part(request, split_id_of(split)) == kept
    Part(kept / "stage_1").verify()
    assert set(requested) == {MANIFEST, name}
    assert "what has changed of it is received again" in capsys.readouterr().err
    assert received(split) == kept and capsys.readouterr().err == ""


def test_rank_0_shows_how_much_of_each_part_it_has_sent(split, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, desc, **_):
            self.n, self.total, self.label, self.is_open = 0, total, desc, True
            bars.append(self)

        def update(self, num_more):
            self.n += num_more

        def close(self):
            self.is_open = False

    monkeypatch.setattr(receive, "ProgressBar", Bar)
    sender, num_bytes = PartSender(lambda rank: split / f"stage_{rank}"), (split / "stage_1" / WEIGHTS).stat().st_size
    sender.piece(1, "config.json", 0)
    shown = [(sender.piece(1, WEIGHTS, offset), bars[0].n)[1] for offset in (0, 1000, 0, 1000)]
    assert shown == [1000, 2000, 1000, 2000] and bars[0].is_open and bars[0].total == num_bytes
    sender.piece(2, WEIGHTS, 0)
    sender.piece(1, WEIGHTS, num_bytes - 7)
    sender.piece(1, WEIGHTS, num_bytes)
    assert [(bar.label, bar.n == bar.total, bar.is_open) for bar in bars] == [("to rank 1", True, False),
                                                                              ("to rank 2", False, True)]


def test_a_file_that_broke_off_is_continued(split):
    offsets = []

    def breaks_off(name, offset):
        if name == WEIGHTS and offset > 3000:
            raise ConnectionError
        return sent(split, 1)(name, offset)

    def goes_on(name, offset):
        offsets.append(offset if name == WEIGHTS else -1)
        return sent(split, 1)(name, offset)

    with pytest.raises(ValueError):
        received_part(breaks_off, split_id_of(split))
    kept = received_part(goes_on, split_id_of(split))
    assert min(offset for offset in offsets if offset >= 0) == 4000
    Part(kept / "stage_1").verify()


def test_what_came_is_kept_if_rank_0_cannot_read_on(split, tmp_path):
    def ends_early(name, offset):
        return b"" if name == WEIGHTS and offset >= 3000 else sent(split, 1)(name, offset)

    with refused("rank 0 could not read on in model.safetensors of this rank's part"):
        received_part(ends_early, split_id_of(split))
    [incomplete] = (tmp_path / "cache").rglob("*.incomplete")
    assert incomplete.stat().st_size == 3000


def test_a_folder_of_parts_that_others_may_enter_is_named(split):
    kept = received(split)
    kept.chmod(0o755)
    with refused(f"{kept} is not a folder that only this user may enter (mode 0700): remove"):
        received(split)


def test_replicas_receive_the_parts_of_the_split_again_whatever_else_lies_there(split):
    (split / "stage_1.old").mkdir()
    assert [part_number(rank, 3) for rank in range(6)] == [0, 1, 2, 1, 2, 1]
    prepared = prepare(parse([f"model_dir={split}", "pipeline_type=ar", "kernel=torch", "prompt_ids=1"]))
    for rank in (1, 2, 3, 4):
        expected = (split / f"stage_{part_number(rank, 3)}" / "config.json").read_bytes()
        assert prepared.piece(rank, "config.json", 0) == expected[:1000]


def test_only_new_pieces_give_a_rank_more_time(capsys):
    root = object.__new__(Coordinator)
    root.board, root._sent_offsets, root._deadline = Board(0, "here", 29500, "", 300, []), {}, 0.0
    pieces = SimpleNamespace(piece=lambda rank, name, offset: b"x" if offset < 3 else b"")

    def moves_deadline(offset):
        root._deadline = 0.0
        root._read_piece(pieces, 1, WEIGHTS, offset)
        return root._deadline > 0

    moved = [offset for offset in (0, 1, 1, 0, 2, 2, 3, 9) if moves_deadline(offset)]
    assert moved == [1, 2]
    assert capsys.readouterr().err.count("rank 1 receives its part of the model from here") == 1


@pytest.mark.parametrize("workers, gone, advice", [
    ((1, 2), [1], "its worker comes again by itself"), ((2,), [1], "start run_jetson.sh there again"),
    ((2,), [1, 2], "start run_jetson.sh there again")])
def test_a_worker_that_comes_by_itself_is_waited_for(capsys, workers, gone, advice):
    entries = Entries()
    root = object.__new__(Coordinator)
    root.board, root._reported_missing = Board(0, "here", 29500, "", 300, []), ""
    root.names = ["rank 0", "rank 1", "rank 2"]
    root._server = SimpleNamespace(patience=5, seats={}, gone_ranks=lambda patience=0: gone)
    root._store = Store(entries.reply_to_root)
    root._store.add(NEWEST, 2)
    for rank in (1, 2):
        rank_facts = {"host": "b", "code": code_version(), "settings": {}, "worker": rank in workers, "error": "none"}
        entries.reply(rank, ["set", f"facts/{rank}", json.dumps(rank_facts)])
    assert root._look_after() == ""
    names = ", ".join(root.names[rank] for rank in gone)
    assert capsys.readouterr().err == f"\nflowspec: waiting for {names}: {advice}\n"


def changed_weights(split):
    with (split / "stage_1" / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")


def changed_manifest(split, **fields):
    change_json(split / "stage_1" / MANIFEST, **fields)


ENTRY = {"bytes": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}


@pytest.mark.parametrize("change, message", [
    (changed_weights, "model.safetensors of this rank's part differs from its hash"),
    (partial(changed_manifest, split_id="another"), "is not that of a stage of its split"),
    (partial(changed_manifest, files={"../../x": ENTRY}), "files="),
    (partial(changed_manifest, files={"config.json": ENTRY, WEIGHTS: ENTRY, "x.py": ENTRY}), "not that of a stage"),
    (partial(changed_manifest, files={"config.json": {"bytes": -1, "sha256": "x"}, WEIGHTS: ENTRY}), "files="),
    (partial(changed_manifest, rank="../x"), "rank='../x'"),
    (lambda split: (split / "stage_1" / MANIFEST).write_text("[]"), "is not a JSON object"),
    (lambda split: (split / "stage_1" / MANIFEST).unlink(), "does not have this rank's part"),
], ids="weights split path file size rank list none".split())
def test_what_is_no_part_of_the_split_is_refused_and_not_kept(split, tmp_path, change, message):
    split_id = split_id_of(split)
    change(split)
    with refused(message):
        received_part(sent(split), split_id)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.name for path in kept} <= {"config.json"}


def test_a_disk_without_room_is_refused_before_anything_is_sent(split, monkeypatch):
    monkeypatch.setattr("config.files.shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    with refused("but the disk of ", " has 0.00 GB: free some space there"):
        received(split)


def test_only_the_files_of_a_stage_are_sent(split):
    for name in ("tokenizer.json", "../stage_0/config.json", "/etc/passwd", ""):
        assert sent(split, 1)(name, 0) == b""
    assert sent(split, 1)("config.json", 10 ** 9) == b""


@pytest.mark.parametrize("request_row", [
    [[], "config.json", 0], ["piece", {}, 0], ["piece", "config.json", -1], ["piece", "config.json", 1.5],
    ["piece", "config.json", True], ["piece", "config.json"], {}, None])
def test_a_request_of_another_form_reads_no_file(request_row):
    server = object.__new__(StoreServer)
    server.entries = Entries()
    server.read_piece = lambda *request: pytest.fail("a file was read")
    with pytest.raises(Junk):
        server._reply(1, request_row)


def test_a_worker_without_keys_receives_nothing():
    worker = object.__new__(WorkerBoard)
    worker.board = Board(1, "192.168.1.11", 29500, "", 1, [])
    worker._root_facts = {"code": code_version(), "split": "x", "settings": {}}
    with refused("takes its part of the model from rank 0 with keys only: bash scripts/make_k"):
        worker._prepared(parse([]))
    worker._root_facts = {"code": "another", "settings": {"temperature": "-1"}}
    with refused("has other code than rank 0"):
        worker._prepared(parse([]))
