"""A worker's part of a split model, which rank 0 sends over the encrypted connection of the rendezvous.

A stage has three files. Only their fixed names are requested and written; sizes and hashes are those of the manifest. A
part is kept, by the hash of its manifest, in a folder that only this user may enter, so that it is sent once. A file
that broke off is continued.
"""
from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Callable, Mapping

from config.console import say
from config.files import (
    SPACE_REMEDY,
    as_value_error,
    cache_folder,
    check_space,
    make_private_folder,
    one_at_a_time,
    replace,
)
from config.schema.fields import check
from config.schema.untrusted import parse_object
from launch.progress import ProgressBar
from model.weights.parts import BYTES_AT_ONCE, MANIFEST, MANIFEST_FIELDS, NEEDED_FIELDS, WEIGHTS, Part, hash_of

STAGE_FILES = ("config.json", WEIGHTS)  # besides the manifest; rank 0 alone has a tokenizer and a head
PIECE_BYTES = 1 << 20
MANIFEST_BYTES = 1 << 24  # at most
SENDER = "the manifest that rank 0 sent"
COPIED = "copy the part with bash scripts/push.sh, and give model_dir="
ReadPiece = Callable[[str, int], bytes]  # from a file's name and an offset to its next bytes; none at its end


# --- rank 0 -----------------------------------------------------------------------------------------------------------

class PartSender:
    """Rank 0's side: reads the files of other ranks' parts, and shows how much of each rank's weights has been sent.

    `folder_of` returns the folder of a rank's part.
    """

    def __init__(self, folder_of: Callable[[int], Path]) -> None:
        self._folder_of = folder_of
        self._bar_of_rank: dict[int, ProgressBar] = {}

    def piece(self, rank: int, file_name: str, offset: int) -> bytes:
        """Return the next bytes of a file of a rank's part; none at its end, or without it."""
        if file_name not in (MANIFEST, *STAGE_FILES):
            return b""

        part_file = self._folder_of(rank) / file_name
        piece = read_piece(part_file, offset)
        if file_name == WEIGHTS and piece:
            self._show(rank, offset + len(piece), part_file.stat().st_size)
        return piece

    def _show(self, rank: int, num_sent: int, num_bytes: int) -> None:
        if rank not in self._bar_of_rank:
            self._bar_of_rank[rank] = ProgressBar(total=num_bytes, unit="B", unit_scale=True, desc=f"to rank {rank}")
        bar = self._bar_of_rank[rank]
        bar.update(num_sent - bar.n)
        if num_sent == num_bytes:
            self._bar_of_rank.pop(rank).close()


def read_piece(part_file: Path, offset: int) -> bytes:
    """Return the next bytes of a file; none at its end, or without it."""
    try:
        with part_file.open("rb") as opened_file:
            opened_file.seek(offset)
            return opened_file.read(PIECE_BYTES)
    except OSError:
        return b""


# --- a worker ---------------------------------------------------------------------------------------------------------

def received_part(request_piece: ReadPiece, split_id: str) -> Path:
    """Return a folder with this rank's part of a split, once all of it is here.

    Raises ValueError for anything else than a stage's part, for a changed file, and if the disk is too small.
    """
    manifest_bytes = _manifest_from(request_piece)
    manifest = parse_object(manifest_bytes, SENDER, COPIED)
    check(manifest, MANIFEST_FIELDS, SENDER, COPIED, NEEDED_FIELDS)
    if manifest["split_id"] != split_id or manifest["files"].keys() != set(STAGE_FILES):
        raise ValueError(f"{SENDER} is not that of a stage of its split: {COPIED}")

    kept_folder = cache_folder() / "parts" / hashlib.sha256(manifest_bytes).hexdigest()
    part_folder = kept_folder / f"stage_{int(manifest['rank'])}"
    with as_value_error(kept_folder, SPACE_REMEDY):
        make_private_folder(kept_folder)
        with one_at_a_time(part_folder):
            if not _is_sound(part_folder):
                _receive_files(request_piece, part_folder, manifest["files"])
                replace(part_folder / MANIFEST, manifest_bytes)
    return kept_folder


def _is_sound(part_folder: Path) -> bool:
    """Whether all of a part is here, and no tensor has changed since it was received."""
    if not (part_folder / MANIFEST).is_file():
        return False
    try:
        weights = Part(part_folder).weights
        for name in weights.names():
            weights.read_stored(name)  # compares its checksum
    except ValueError as error:
        say(f"{error}; what has changed of it is received again")
        return False
    return True


def _manifest_from(request_piece: ReadPiece) -> bytes:
    manifest_bytes = b""
    while (piece := request_piece(MANIFEST, len(manifest_bytes))) and len(manifest_bytes) < MANIFEST_BYTES:
        manifest_bytes += piece

    if not manifest_bytes or piece:
        raise ValueError(f"rank 0 does not have this rank's part of its split to send: {COPIED}")
    return manifest_bytes


def _receive_files(request_piece: ReadPiece, part_folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Receive the files of a part that are not complete. Raises ValueError, and OSError for a disk that fails."""
    num_bytes = sum(entry["bytes"] for entry in files.values())
    check_space(part_folder, num_bytes, "this rank's part of the model has",
                f"free some space there, as in {part_folder.parent.parent}, which keeps the parts of earlier runs",
                part_folder.iterdir())

    with ProgressBar(total=num_bytes, unit="B", unit_scale=True, desc="receiving this rank's part") as bar:
        for file_name in STAGE_FILES:
            _receive_file(request_piece, part_folder / file_name, files[file_name], bar)


def _receive_file(request_piece: ReadPiece, path: Path, entry: Mapping[str, Any], bar: ProgressBar) -> None:
    """Receive one file, after the bytes that an earlier start received, and compare it with its hash."""
    num_bytes, digest = entry["bytes"], hashlib.sha256()
    if path.is_file() and hash_of(path) == entry["sha256"]:
        bar.update(num_bytes)
        return

    incomplete_path = path.with_name(f"{path.name}.incomplete")
    with incomplete_path.open("a+b") as incomplete_file:
        incomplete_file.seek(0)
        while block := incomplete_file.read(BYTES_AT_ONCE):
            digest.update(block)
        offset = incomplete_file.tell()
        bar.update(offset)

        while offset < num_bytes and (piece := request_piece(path.name, offset)):
            incomplete_file.write(piece)
            digest.update(piece)
            offset += len(piece)
            bar.update(len(piece))
        incomplete_file.flush()
        os.fsync(incomplete_file.fileno())

    if offset < num_bytes:
        raise ValueError(f"rank 0 could not read on in {path.name} of this rank's part: look at its disk, then start "
                         "the run again, which continues after what came")
    if digest.hexdigest() != entry["sha256"]:
        incomplete_path.unlink()
        raise ValueError(f"{path.name} of this rank's part differs from its hash after it was sent: start the run "
                         f"again, or {COPIED}")
    incomplete_path.replace(path)
