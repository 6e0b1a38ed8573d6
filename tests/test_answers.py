"""Earlier answers in a file: added texts are read again, the newest are kept, and invalid files are refused."""
import os
import stat

import pytest

from model.drafts.suffix import add_texts, load_texts
from tests.checkpoints import refused
from tests.json_files import load_json_lines
from tests.tiny import in_threads

HEAD = '{"vocabulary": 10}'


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "answers.jsonl"


def written(path, *lines):
    path.parent.mkdir()
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_what_was_added_is_read_again(path):
    assert load_texts(path, 10, 100) == []
    add_texts(path, [[1, 2], [3]], 10, 100)
    add_texts(path, iter([[9, 0]]), 10, 100)
    assert load_texts(path, 10, 100) == [[1, 2], [3], [9, 0]]


def test_the_newest_tokens_stay(path):
    for text in ([1, 2, 3], [4, 5], [], [6]):
        add_texts(path, [text], 10, 4)
    assert load_texts(path, 10, 9) == [[3], [4, 5], [6]]
    assert load_json_lines(path)[1:] == [[3], [4, 5], [6]]
    assert load_texts(path, 10, 3) == [[4, 5], [6]]
    assert load_texts(path, 10, 0) == []
    add_texts(path, [list(range(10))], 10, 4)
    assert load_texts(path, 10, 9) == [[6, 7, 8, 9]]


@pytest.mark.parametrize("before", [None, HEAD], ids=["new", "readable by all"])
def test_only_its_user_may_read_it(path, before):
    if before:
        written(path, before).chmod(0o644)
    add_texts(path, [[1]], 10, 100)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_holds_nothing(path):
    assert load_texts(written(path), 10, 100) == []


@pytest.mark.parametrize("lines, sentence", [
    ([HEAD, "[1]", "[1, 10]"], "line 3 of {} is not a list of token ids from 0 to 9: delete the"),
    ([HEAD, "[1, -1]"], "line 2 of {} is not a list"), ([HEAD, "[true]"], "line 2 of {} is not a list"),
    ([HEAD, "[1.0]"], "line 2 of {} is not a list"), ([HEAD, "5"], "line 2 of {} is not a list"),
    ([HEAD, "", "[1, 2"], "line 3 of {} is not JSON"),
    (["[1, 2]"], "line 1 of {} does not name the size of a vocabulary: delete the file"),
    (['{"vocabulary": 11}'], "{} holds answers of another vocabulary ({{'vocabulary': 11}}) than the model's, which "
                             "has 10 tokens: delete the file"),
], ids=["too large", "negative", "no number", "a fraction", "no list", "no JSON", "no head", "another vocabulary"])
def test_what_is_wrong_with_a_file_is_reported_and_the_file_stays(path, lines, sentence):
    content = written(path, *lines).read_text()
    with refused(sentence.format(path)):
        load_texts(path, 10, 100)
    with refused(sentence.format(path)):
        add_texts(path, [[1]], 10, 100)
    assert path.read_text() == content


def test_what_is_no_file_is_refused_and_left_as_it_is(path):
    path.mkdir(parents=True)
    mode = path.stat().st_mode
    with refused(f"{path} is a folder, a device or a pipe"):
        add_texts(path, [[1]], 10, 100)
    assert path.stat().st_mode == mode


def test_what_cannot_be_written_is_reported(path):
    path.parent.write_text("a file where a folder should be")
    with refused(f"{path} cannot be written (File exists): make room there"):
        add_texts(path, [[1]], 10, 100)


def test_what_several_add_at_once_is_all_there(path):
    with in_threads(add_texts, ((path, [[number]], 10, 100) for number in range(10))):
        pass
    assert sorted(load_texts(path, 10, 100)) == [[number] for number in range(10)]
    assert sorted(os.listdir(path.parent)) == ["answers.jsonl", "answers.jsonl.lock"]
