"""What a person asks and where answers shall go: what is wrong is refused before a start, and no answer is lost."""
import errno
import io
import json
import os
import shutil
import sys

import pytest

from config import files
from config.files import read_json_file
from launch.spec import device_named
from launch.split.write import store
from tests.checkpoints import refused
from tests.json_files import change_json, edited_json, save_json_lines
from tests.saved import here, run_program

GOOD = '{"turns": ["who?"]}\n'


@pytest.fixture
def ask(saved):
    def ask(*words):
        asked = [] if any(word.startswith("question_file=") for word in words) else ["prompt=abc"]
        return here(f"model_dir={saved / '0+2+2'}", "template=none", "max_new_tokens=4", "ignore_eos=true", *asked,
                    *words)
    return ask


@pytest.fixture
def unstarted(ask, monkeypatch, capsys):
    """What is printed, in one sentence, without a start."""
    def unstarted(*words):
        with monkeypatch.context() as context:
            context.setattr("launch.run.alone", lambda *_: pytest.fail("it started"))
            assert ask(*words) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("flowspec: ") and printed.count("\n") == 1 and printed.endswith("\n")
        return printed
    return unstarted


@pytest.mark.parametrize("text, message", [
    ("", "has no questions: write one JSON object per line"), ("\n \n", "has no question"),
    (GOOD + '{"turns": "abc"}', "line 2 of"), (GOOD + '{"turns": []}', "line 2 of"), ("null", "line 1 of"),
    (GOOD + "\n" + '{"turns": ["\\ud800"]}', "line 3 of"), ("[" * 100_000, "is nested too deeply"),
    ('{"turns": ["\xe9"]}'.encode("latin-1"), "line 1 of"),
], ids=["empty", "blank", "text", "no turn", "null", "half a character", "deep", "latin"])
def test_a_question_file_that_is_wrong_is_reported_before_the_start(unstarted, tmp_path, text, message):
    path = tmp_path / "asked.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = unstarted(f"question_file={path}")
    assert message in said and str(path) in said


def test_questions_that_are_not_there_are_reported_before_the_start(unstarted, tmp_path):
    (tmp_path / "asked").write_text(GOOD * 2)
    assert "questions=2: leaves no question of" in unstarted(f"question_file={tmp_path / 'asked'}",
                                                             "questions=2:")
    assert "there is no file" in unstarted(f"question_file={tmp_path / 'nowhere'}")
    assert "name a file" in unstarted(f"question_file={tmp_path}")


def test_what_is_harmless_in_a_question_file_is_asked(ask, tmp_path):
    (tmp_path / "asked").write_bytes('\ufeff{"turns": ["a\u2028b", "c"]}\r\n\r\n{"turns": ["d"]}\r\n\r\n'.encode())
    assert ask(f"question_file={tmp_path / 'asked'}", f"output={tmp_path / 'out'}") == 0
    assert [(found["question_id"], found["prompt"]) for found in read_json_file(tmp_path / "out")] == [
        (None, "a\u2028b"), (None, "c"), (None, "d")]


@pytest.mark.parametrize("place, message", [
    (".", "(it is a folder)"), ("x" * 300, "File name too long"), ("file/x", "Not a directory"),
    ("/dev/fd/63", "it is open in one process only")])
def test_an_output_that_cannot_be_written_is_reported_before_the_start(unstarted, tmp_path, place, message):
    (tmp_path / "file").write_text("old")
    said = unstarted(f"output={tmp_path / place}")
    assert message in said and said.endswith(": choose another output=\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_an_output_that_fills_the_disk_leaves_the_answers_on_the_screen(ask, tmp_path, monkeypatch, capsys):
    (tmp_path / "asked").write_text(GOOD * 3)
    put, count = files._write_and_sync, iter(range(9))

    def full(file, data):
        if next(count) < 1:
            return put(file, data)
        os.close(file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_and_sync", full)
    assert ask(f"question_file={tmp_path / 'asked'}", f"output={tmp_path / 'out'}") == 2
    shown = capsys.readouterr()
    assert f"{tmp_path / 'out'} cannot be written (No space left on device): its content is printed above" in shown.err
    assert len(json.loads(shown.out)) == 2, "the answers so far"
    assert len(read_json_file(tmp_path / "out")) == 1 and len(list(tmp_path.iterdir())) == 2, "the old file stays"
    assert ask(f"output={tmp_path / 'out'}") == 2
    _, _, record = capsys.readouterr().out.partition("\n{")
    assert json.loads("{" + record)["new_tokens"] == 4


def test_a_link_is_followed_a_device_stays_and_a_pipe_gets_all_answers_once(ask, tmp_path):
    (tmp_path / "asked").write_text(GOOD * 3)
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    before = os.stat("/dev/null").st_rdev
    assert ask(f"output={tmp_path / 'link'}") == ask("output=/dev/null") == 0
    assert (tmp_path / "link").is_symlink() and read_json_file(tmp_path / "real")["new_tokens"] == 4
    assert os.stat("/dev/null").st_rdev == before
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as reader:
        assert ask(f"question_file={tmp_path / 'asked'}", f"output={tmp_path / 'pipe'}") == 0
        assert len(json.loads(reader.read())) == 3, "the pipe holds more than that"


def test_a_device_that_is_not_here_is_reported_before_the_start(unstarted, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "cuda does not exist here (CUDA devices: none that this torch can use): choose another, or device=cpu" in (
        unstarted("device=cuda"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "device=cuda:2 does not exist here (CUDA devices: cuda:0, cuda:1)" in unstarted("device=cuda:2")
    assert [str(device_named(name)) for name in ("cuda", "cuda:1", "cpu", "auto")] == ["cuda", "cuda:1", "cpu", "cuda"]
    with refused("--device meta is unknown"):
        device_named("meta", "--device ")


def test_a_dash_is_no_name_of_an_output_file(unstarted):
    assert "/- would be a file of this name: give /dev/stdout for standard output, or choose another output=" in (
        unstarted("output=-"))


def test_bytes_that_are_not_utf_8_are_reported_before_the_start(unstarted):
    assert "prompt has bytes that are not UTF-8: write it in UTF-8" in unstarted("prompt=a\udcff")


def test_a_chat_template_that_fails_ends_the_start_before_weights_are_read(ask, saved, tmp_path, monkeypatch, error_of):
    own = shutil.copytree(saved / "0+2+2", tmp_path / "own")
    path = own / "stage_0" / "tokenizer_config.json"
    change_json(path, chat_template="{{ raise_exception('no') }}")
    manifest = own / "stage_0" / "manifest.json"
    monkeypatch.setattr("launch.pipeline.build_draft", lambda *_: pytest.fail("weights are read"))
    if manifest.is_file():
        with edited_json(manifest) as content:
            content["files"]["tokenizer_config.json"] = store(path, path.read_bytes())
    assert "the chat template of the tokenizer in" in error_of(here, f"model_dir={own}", "prompt=abc", "template=own")


@pytest.mark.parametrize("words, message", [
    ("pipeline_type=continuous", "pipeline_type=continuous has a pipeline: type bash run_pipe.sh"),
    ("tp_type=mega", "tp_type=mega is unknown: choose tp_type=tp or tp_type=galaxy"),
    ("tp_type=tp seed=1 tp_type=galaxy", "tp_type is given twice: leave one of them out")])
def test_run_tp_sh_speaks_of_its_own_key(words, message):
    done = run_program("bash", "tp/run_tp.sh", *words.split())
    assert done.returncode == 2 and done.stderr.startswith(f"flowspec: {message}")
    assert done.stderr.count("\n") == 1


class BrokenStream(io.StringIO):
    """A stream that can be written to for a few characters."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        if self.tell() + len(text) > 3:
            raise self.error
        return super().write(text)

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)  # a file that may be replaced


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
GONE = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.parametrize("error, code", [(FULL, 2), (GONE, 141)], ids=["full", "gone"])
@pytest.mark.parametrize("several", [False, True], ids=["prompt", "questions"])
def test_an_output_file_is_whole_though_nothing_can_be_printed(ask, tmp_path, monkeypatch, several, error, code):
    questions = tmp_path / "questions.jsonl"
    save_json_lines(questions, ({"question_id": i, "turns": ["abc"]} for i in range(2)))
    words = [f"question_file={questions}"] if several else []
    assert ask(*words, f"output={tmp_path / 'right.json'}") == 0
    errors = io.StringIO()
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", BrokenStream(error))
        context.setattr(sys, "stderr", BrokenStream(error) if several else errors)
        assert ask(*words, f"output={tmp_path / 'found.json'}") == code
    if error is FULL and not several:
        assert f"standard output cannot be written (No space left on device): the answer is in {tmp_path}" in (
            errors.getvalue())
    found, right = ([content] if isinstance(content, dict) else content for content in (
        read_json_file(tmp_path / name) for name in ("found.json", "right.json")))

    assert [answer["token_ids"] for answer in found] == [answer["token_ids"] for answer in right]
    assert len(found) == 1 + several


def test_without_an_output_file_an_answer_that_cannot_be_printed_ends(ask, monkeypatch, capsys):
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", BrokenStream(FULL))
        assert ask() == 2
    assert capsys.readouterr().err.endswith("flowspec: [Errno 28] No space left on device\n")
