"""Files that a user names: errors give the file and the line, and output is written atomically."""
import json
import os
import socket
import stat
import threading

import pytest

from config import files
from config.files import check_folder, check_output, fits, lines, read_json_file, streams, write
from tests.checkpoints import refused

DEEP = "[" * 100_000
REMEDY = "choose another"


@pytest.mark.parametrize("data, found", [
    (b'{"a": 1}\n[2]', [(1, {"a": 1}), (2, [2])]),
    (b'\xef\xbb\xbf{"a": 1}\r\n\r\n \t\r\n[2]\r\n', [(1, {"a": 1}), (4, [2])]),
    ('"a\u2028b\x85c"\n2'.encode(), [(1, "a\u2028b\x85c"), (2, 2)]),
    (b'"\\ud83d\\ude00"', [(1, "\U0001f600")]),
    (b"", []), (b"\n\n", []),
], ids=["lines", "mark and blank lines", "other ends of lines", "pairs", "empty", "blank"])
def test_what_is_harmless_in_a_file_of_lines_is_read(tmp_path, data, found):
    (tmp_path / "a").write_bytes(data)
    assert list(lines(tmp_path / "a")) == found


@pytest.mark.parametrize("data, sentence", [
    (b'1\n{"a": }', "line 2 of {} is not JSON (Expecting value, column 7): do this"),
    (b"1\n\xff", "line 2 of {} is not UTF-8 (invalid start byte at byte 0): save it as UTF-8"),
    ("é".encode("latin-1"), "is not UTF-8"), ('"a"'.encode("utf-16"), "line 1 of {} is not UTF-8"),
    (DEEP.encode(), "line 1 of {} is nested too deeply (more than 64 lists and objects within each other): do this"),
    (b'1\n\n{"a": ["\\uD800"]}', "line 3 of {} has half a character"),
    (b"9" * 5000, "line 1 of {} has a whole number of thousands of digits: write fewer"),
    (b'"a\x00b"', "line 1 of {} is not JSON (Invalid control character"),
], ids=lambda value: value[:12] if isinstance(value, bytes) else "")
def test_what_is_wrong_with_a_line_is_reported_with_the_file_and_the_line(tmp_path, data, sentence):
    (tmp_path / "a").write_bytes(data)
    with refused(sentence.format(tmp_path / "a")):
        list(lines(tmp_path / "a", "do this"))


def test_a_last_line_that_is_still_written_does_not_count(tmp_path):
    (tmp_path / "a").write_bytes('1\n"é'.encode()[:-1])
    assert list(lines(tmp_path / "a", growing=True)) == [(1, 1)]
    with refused("line 2 of"):
        list(lines(tmp_path / "a"))


def test_a_whole_file_names_the_line_that_is_broken(tmp_path):
    (tmp_path / "a").write_text("[1,\n2,\n}")
    with refused("a is not JSON (Expecting value, line 3, column 1)"):
        read_json_file(tmp_path / "a")
    (tmp_path / "a").write_text(DEEP)
    with refused("a is nested too deeply"):
        read_json_file(tmp_path / "a")


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, sentence in (("none", "there is no file"), ("", "name a file"), ("pipe", "name a file that you may read"),
                           ("x" * 300, "File name too long"), ("pipe/x", "Not a directory")):
        with refused(sentence):
            read_json_file(tmp_path / name)
    with refused("/dev/zero is a folder, a device or a pipe: name a file that you may read"):
        read_json_file("/dev/zero")


@pytest.mark.parametrize("value, form, fit", [
    ({"a": 1, "b": 2}, {"a": int}, True), ({"b": 1}, {"a": int}, False), ([], {"a": int}, False),
    ([1, 2], [int], True), ([1, "2"], [int], False), ("ab", [str], False),
    ([0.5, 2], (float, int), True), ([0.5], (float, int), False), ([2, 0.5], (float, int), False),
    (True, int, False), (1, bool, False), (1, float, True), (True, float, False),
    (float("nan"), float, False), (10 ** 400, float, False),
    (3, lambda value: value == 3, True), (4, lambda value: value == 3, False)])
def test_a_form_says_what_a_piece_of_json_has_to_be(value, form, fit):
    assert fits(value, form) is fit


# Writing


def test_a_file_is_replaced_as_a_whole_keeps_its_mode_and_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to(tmp_path / "new" / "made")
    write(tmp_path / "link", "né\udcff", REMEDY)
    write(tmp_path / "dangling", b"made", REMEDY)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "real").read_text(encoding="utf-8") == "né\\udcff"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    assert (tmp_path / "new" / "made").read_bytes() == b"made"


@pytest.mark.parametrize("act",
                         [lambda path: check_output(path, REMEDY), lambda path: write(path, "new", REMEDY)],
                         ids=["check", "write"])
def test_what_cannot_be_written_is_refused_in_one_sentence_and_stays(tmp_path, act):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "socket"))
        for name, reason in (("folder", "it is a folder"), ("socket", "it is a socket"),
                             ("x" * 300, "File name too long"), ("file/x", "Not a directory")):
            with refused(f"cannot be written ({reason}): choose another"):
                act(tmp_path / name)
    with refused("it is open in one process only"):
        act("/dev/fd/63")

    assert (tmp_path / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_check_makes_the_folder_and_leaves_what_is_there(tmp_path):
    (tmp_path / "a").write_text("old")
    check_output(tmp_path / "a", REMEDY)
    check_output(tmp_path / "new" / "b", REMEDY)
    check_folder(tmp_path / "more" / "c", REMEDY)
    assert (tmp_path / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "c", "more", "new"]
    with refused("a cannot be written (File exists): choose another"):
        check_folder(tmp_path / "a", REMEDY)


def test_devices_and_pipes_are_written_through(tmp_path):
    before = os.stat("/dev/null")
    write("/dev/null", "x", REMEDY)
    check_output("/dev/null", REMEDY)
    after = os.stat("/dev/null")
    assert stat.S_ISCHR(after.st_mode) and after.st_ino == before.st_ino and streams("/dev/null")
    assert not streams(tmp_path / "none") and not streams(tmp_path)
    if stat.S_ISCHR(os.stat("/dev/full").st_mode):
        with refused("/dev/full cannot be written (No space left on device)"):
            write("/dev/full", "x", REMEDY)
    os.mkfifo(tmp_path / "pipe")
    with refused("pipe cannot be written"):  # nobody reads
        write(tmp_path / "pipe", "x", REMEDY)
    heard = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    text = "y" * 200_000  # more than a pipe holds
    for _ in range(1000):
        try:
            write(tmp_path / "pipe", text, REMEDY)
            break
        except ValueError:  # the reader has not opened it yet
            threading.Event().wait(0.01)
    reader.join(60)

    assert heard == [text.encode()]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_full_disk_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch):
    write(tmp_path / "a", json.dumps([1]), REMEDY)

    def full(file, data):
        os.close(file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_and_sync", full)
    with refused("a cannot be written (No space left on device): choose another"):
        write(tmp_path / "a", json.dumps([1, 2]), REMEDY)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "[1]"
