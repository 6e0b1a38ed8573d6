"""Boards measured over ssh, by an ssh that stays on this machine."""
from __future__ import annotations

import io
import json
import sys

import pytest

from config.console import run
from config.presets import ROOT, TOY
from config.profiles import read
from eval.plan import command
from launch import measure, timing
from launch.measure import boards_of, measured_board
from launch.timing import CONTEXTS, ROWS
from tests.checkpoints import refused
from tests.json_files import load_json
from tests.saved import wait_until
from tests.test_push import SSH, save_program

ASKED = {"config": load_json(TOY / "llama" / "config.json"),
         "layers": 2, "dtype": "auto",
         "device": "cpu", "quant": "none", "threads": 1, "context": 256, "kernel": "torch", "seconds": 1e6}


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """A hosts file of rank 0 and two boards; b1 has the program."""
    save_program(tmp_path / "ssh", SSH)
    for name in ("b1", "b2"):
        (tmp_path / name).mkdir()
    (tmp_path / "b1" / "it's").symlink_to(ROOT)
    monkeypatch.setenv("SSH", str(tmp_path / "ssh"))
    monkeypatch.setenv("PYTHON", sys.executable)
    path = tmp_path / "hosts.txt"
    path.write_text("b0\nb1 user=me folder=it's\nb2\n")
    return path


def measured(path):
    """The times of the one board of a hosts file."""
    board, = boards_of(str(path))
    return measured_board(board, str(path), ASKED)


def program(tmp_path, text):
    """Put another program onto board b2."""
    (tmp_path / "b2" / "flowspec").mkdir(exist_ok=True)
    (tmp_path / "b2" / "flowspec" / "run_jetson.sh").write_text(text)


def test_a_board_times_random_layers_and_its_wire_and_one_that_cannot_is_named(hosts, tmp_path):
    only = tmp_path / "only.txt"
    only.write_text("b0\nb1 folder=it's\n")
    one = measured(only)
    asked = [(rows, context) for context in CONTEXTS if context + max(ROWS) < 256
             for rows in (1, *ROWS)]
    assert [(found.rows, found.context) for found in one.passes] == asked
    assert min(one.passes)[2] > 0
    assert one.latency > 0 and one.mbps > 0
    wrong = {**ASKED, "device": "cuda:77"}
    with refused("b1 of ", " was not measured (device=cuda:77 does not exist here"):
        measured_board(*boards_of(str(only)), str(only), wrong)
    for text, message in (("echo '{}'", "printed nothing"), ("echo no torch >&2; exit 2", "no torch"), ("", "nothing")):
        program(tmp_path, text)
        only.write_text("b0\nb2\n")
        with refused("b2 of ", " was not measured (", message, "copy the program there"):
            measured(only)


@pytest.mark.parametrize("text", ["sleep 60", "read asked; echo; sleep 60", "exec sleep 60 <&-"])
def test_a_board_that_falls_silent_is_given_up(hosts, tmp_path, monkeypatch, text):
    monkeypatch.setattr(measure, "MAX_SILENCE", 0.5)
    monkeypatch.setattr(measure, "EXIT_SECONDS", 0.1)
    program(tmp_path, text)
    hosts.write_text("b0\nb2\n")
    with pytest.raises(ValueError, match=r"b2 of .* was not measured \((it sent nothing|Broken pipe)"):
        measured(hosts)


def test_a_board_beats_while_it_measures(monkeypatch, capsys):
    monkeypatch.setattr(timing, "BEAT_SECONDS", 0.01)
    beats = []

    def answered(asked):
        assert wait_until(lambda: beats.append(capsys.readouterr().out) or any(beats), 30)
        return {"passes": []}

    monkeypatch.setattr(timing, "measure", answered)
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}\nand a line that times the wire\n"))
    assert run(timing.main, []) == 0
    *others, answer, empty = capsys.readouterr().out.splitlines()
    assert not "".join([*beats, *others]).strip()
    assert json.loads(answer) == {"passes": []} and not empty


def test_a_plan_measures_the_boards_of_a_hosts_file_into_a_profile(hosts, tmp_path, output_of):
    """Board b2 answers as one that takes three times as long, so it gets fewer layers."""
    took = [[rows, context, 10.0 * (1 + context / 512)]
            for context in CONTEXTS for rows in (1, *ROWS)]
    for name, factor in (("b1", 1), ("b2", 3)):
        slower = [[rows, context, factor * time] for rows, context, time in took]
        answer = json.dumps({"passes": slower, "free": 1.0, "code": "x"})
        (tmp_path / name / "f").mkdir()
        (tmp_path / name / "f" / "run_jetson.sh").write_text(f"read asked\necho '{answer}'\nexec sed -u 's/.*//'")
    hosts.write_text("b0\nb1 folder=f\nb2 folder=f\n")

    profile_file = tmp_path / "site.json"
    words = ["toy", f"hosts={hosts}", f"measured={profile_file}", "sets=qa", "max_new_tokens=4", "drafts=eagle"]
    output = output_of(command.main, words)
    assert output.startswith(f"boards of {hosts}, measured over ssh") and "pipeline_type=" in output.splitlines()[-1]
    profile = read(str(profile_file))
    assert profile.factors == (1.0, 3.0) and profile.layers == 8 and profile.weights > 0
    assert profile.level > 0 and profile.verdict > 0
    assert [link[:2] for link in profile.links] == [(0, 1), (0, 2)]
    assert profile.model + 16 * profile.token == pytest.approx(10 * (1 + 16 / 512), rel=1e-3)
    assert profile.row < 1e-9


@pytest.mark.parametrize("asked, message", [("{}", "received an unknown request"), ("x", "is not JSON")])
def test_the_program_of_a_board_refuses_what_is_no_request(monkeypatch, sentence_of, asked, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    assert message in sentence_of(run, timing.main, [])
