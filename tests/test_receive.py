"""Parts of a model that rank 0 sends to workers: whole, private, continued, and refused where anything is wrong."""
import hashlib
import shutil
import stat
from functools import partial
from types import SimpleNamespace

import pytest

from cluster.agreement import Junk, code_version
from cluster.board import Board
from cluster.rendezvous import Coordinator, WorkerBoard
from cluster.store import Entries, StoreServer
from config.cli import parse
from launch import receive
from launch.prepare import Prepared, part_number
from launch.receive import read_piece, received_part
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


def received(split, rank=1):
    return received_part(partial(read_piece, split / f"stage_{rank}"), split_id_of(split))


def test_a_part_is_received_whole_once_and_for_this_user_alone(split):
    kept = received(split, rank=2)
    for name in (MANIFEST, *receive.STAGE_FILES):
        assert (kept / "stage_2" / name).read_bytes() == (split / "stage_2" / name).read_bytes()
    Part(kept / "stage_2").verify()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700

    requested = []

    def request(name, offset):
        requested.append(name)
        return read_piece(split / "stage_2", name, offset)

    assert received_part(request, split_id_of(split)) == kept
    assert set(requested) == {MANIFEST}


def test_a_file_that_broke_off_is_continued(split):
    offsets = []

    def breaks_off(name, offset):
        if name == WEIGHTS and offset > 3000:
            raise ConnectionError
        return read_piece(split / "stage_1", name, offset)

    def goes_on(name, offset):
        offsets.append(offset if name == WEIGHTS else -1)
        return read_piece(split / "stage_1", name, offset)

    with pytest.raises(ValueError):
        received_part(breaks_off, split_id_of(split))
    kept = received_part(goes_on, split_id_of(split))
    assert min(offset for offset in offsets if offset >= 0) == 4000
    Part(kept / "stage_1").verify()


def test_what_came_is_kept_if_rank_0_cannot_read_on(split, tmp_path):
    def ends_early(name, offset):
        return b"" if name == WEIGHTS and offset >= 3000 else read_piece(split / "stage_1", name, offset)

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
    prepared = Prepared(parse([]), split, None, 3, None)
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
        received_part(partial(read_piece, split / "stage_1"), split_id)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.name for path in kept} <= {"config.json"}


def test_a_disk_without_room_is_refused_before_anything_is_sent(split, monkeypatch):
    monkeypatch.setattr("config.files.shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    with refused("but the disk of ", " has 0.00 GB: free some space there"):
        received(split)


def test_only_the_files_of_a_stage_are_sent(split):
    for name in ("tokenizer.json", "../stage_0/config.json", "/etc/passwd", ""):
        assert read_piece(split / "stage_1", name, 0) == b""
    assert read_piece(split / "stage_1", "config.json", 10 ** 9) == b""


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
    worker._root_facts = {"code": code_version(), "split": "x"}
    with refused("takes its part of the model from rank 0 with keys only: bash scripts/make_k"):
        worker._prepared(parse([]))
