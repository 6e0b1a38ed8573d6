"""`python3 -m scripts.simulate` as it is typed: its keys, what is said of mistakes, and how it is interrupted."""
from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial

import pytest

from config.keys import allowed_values, options, read_keys
from config.presets import ROOT
from config.values import Range
from eval.dsi import original
from eval.dsi.command import COMMANDS, main
from eval.dsi.formulas import least_lookahead, servers_needed
from eval.dsi.keys import Heatmap, Offline, Online, Simulation
from eval.tables import in_columns
from tests.checkpoints import refused
from tests.saved import run_program

COMMAND = [sys.executable, "-m", "scripts.simulate"]


@pytest.mark.parametrize("words",
                         [[], ["cases", "tests/golden/dsi/cases.json"]], ids=" ".join)
def test_a_closed_output_ends_a_command_quietly(words):
    ran = subprocess.Popen([*COMMAND, *words],
                           cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout is not None and ran.stderr is not None
    ran.stdout.close()
    assert ran.stderr.read() == b""
    assert ran.wait() == 128 + signal.SIGPIPE


def test_an_interrupt_ends_a_command_without_a_traceback():
    """Also one in a shell's background, where interrupts are ignored at first."""
    words = [*COMMAND, "online", "num_repeats=2000"]
    terminal, its_end = os.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # a bar needs columns
    ran = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=its_end,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    os.close(its_end)
    shown = os.read(terminal, 1)  # the bar
    ran.send_signal(signal.SIGINT)
    with suppress(OSError):  # the terminal's end
        while some := os.read(terminal, 4096):
            shown += some
    os.close(terminal)
    out, _ = ran.communicate()
    assert (ran.returncode, out) == (128 + signal.SIGINT, b"")
    assert b"Traceback" not in shown


@pytest.mark.parametrize("typed, words", [
    ("", "offline accounting=original"), ("simul.c=.05", "offline accounting=original c=.05"),
    ("type=sanity simul.num_target_servers=None simul.S=50", "offline accounting=original num_target_servers=0 S=50"),
    ("type=heatmap heatmap.ndim=20", "heatmap accounting=original ndim=20"), ("--type table", "paper")])
def test_the_command_line_of_the_published_simulator_is_a_command(typed, words, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(original, "simulate", lambda argv: ran.append(argv) or 0)
    assert original.main(typed.split()) == 0 and ran == [words.split()]
    assert capsys.readouterr().err == f"flowspec: this is python3 -m scripts.simulate {words}\n"


@pytest.mark.parametrize("typed, sentence", [
    ("load_results=x", "unknown key load_results: a table takes seconds and is not loaded: leave it out"),
    ("type=heatmap heatmap.online=True", "unknown key online: no map is drawn by events"),
    ("type=heat", "unknown type heat: did you mean heatmap?")])
def test_what_is_not_possible_in_the_published_command_line_says_what_to_type(typed, sentence, error_of):
    assert f"flowspec: {sentence}" in error_of(original.main, typed.split())


def test_the_published_command_computes_what_the_command_of_this_project_does(output_of):
    words = ["offline", "accounting=original", "c=.05", "S=100"]
    theirs = run_program(sys.executable, "-m", "dsi", "simul.c=.05", "simul.S=100")
    assert theirs.returncode == 0 and theirs.stdout == output_of(main, words) != ""


def test_an_unknown_command_is_refused(output_of, capsys):
    assert main(["heatmpa"]) == 2 and main(["?"]) == 2
    shown = capsys.readouterr()
    assert shown.err == ("flowspec: unknown command heatmpa: did you mean heatmap?\n"
                         f"flowspec: unknown command ?: choose one of {', '.join(COMMANDS)}\n")
    printed = output_of(main, []) + output_of(main, ["--help"])
    assert all(printed.count(f"\n{name} ") == 2 for name in COMMANDS)


MISTAKES = {  # the command with its words, and what is said of them
    "acceptance do_sample=true temperature=0": "temperature=0 draws nothing",
    "acceptance do_sample=true top_p=0": "top_p=0 draws nothing",
    "acceptance temperature=0.5": "temperature=0.5 counts only where tokens are drawn: add do_sample=true",
    "acceptance sets=c4:FILE": "c4 is no format of prompts: choose among cnn_dailymail, alpaca, mbpp, mbpp_docstring",
    "acceptance sets=qa,qa": "names something twice",
    "acceptance sets=mbpp:": "mbpp: names no file",
    "acceptance num_examples=21 sets=qa": "more than the 20 of qa",
    "acceptance max_new_tokens=2048 sets=qa": "no prompt of qa leaves room",
    "acceptance template=nope": "template=nope is unknown",
    "acceptance device=tpu": "device=tpu is not possible: give auto, cpu",
    "acceptance drafts=x": "unknown key drafts: did you mean draft",
    "acceptance draft=nowhere": "there is no folder",
    "acceptance target=": "name the folder of a model",
    "cases": "file is missing: name",
    "cases no": "there is no file",
    "cases no x=1": "unknown key x",
    "heatmap ndim=1": "ndim=1 is not possible: give a number from 2 to 50",
    "heatmap grid=big": "grid=big is unknown: choose one of ndim, paper",
    "heatmap grid=paper ndim=2": "ndim is ignored with grid=paper: omit one of them",
    "heatmap output=": "output= is empty: name a folder",
    "heatmap hop=0.1": "the maps compare no pipelines: leave it out",
    "latency max_new_tokens=1": "leaves no token after the first to time: give 2 or more",
    "latency do_sample=true temperature=0": "temperature=0 draws nothing",
    "latency rows=1,4": "passes over several tokens are not timed: leave it out",
    "latency device=cuda:99": "device=cuda:99 does not exist here",
    "offline accounting=exact": "choose one of corrected, original",
    "offline k=1": "is too small for k=1",
    "offline picture=costs.png": "the table shows mean and deviation of the texts: leave it out",
    "online c=5": "c=5 exceeds failure_cost=1, but the drafter must not be slower than the target: give c=1 or less",
    "online a=1.1": "give a number from 0 to 1",
    "online k=1.5": "k=1.5 is not a whole number",
    "online k=1": "needs 10: give num_target_servers=10 or more, 0 for as many as needed, or k=2 or more",
    "online num_target_servers=-1": "give 0 for as many as needed or a number from 1",
    "online num_repeat=3": "did you mean num_repeats?",
    "online k": "write k=VALUE",
    "online k=3 k=3": "k is given twice",
    "online toy": '"toy" is not key=value',
    "online simul_type=both": "SI and DSI are both simulated: leave it out",
    "online c_sub=0.2": "target: give c_sub=0.1 or less",
    "online num_target_servers=2000": "give num_target_servers=1024 or less",
    "online num_target_servers=0 k=1 c_sub=0.0001": "give num_target_servers=1024 or less, or a larger k",
    "online traces=nowhere.json": "nowhere.json",
    "paper table=1": "all tables are printed: leave it out",
    "paper S=20": "give a number from 21",
    "paper num_target_servers=1": "give a number from 2",
    "table output=rows.csv": "rows.csv is not possible: give a file that ends in .json",
    "table drafts=": "drafts is empty",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_fix(
        words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2

    shown = capsys.readouterr()
    said = shown.err.strip().splitlines()[-1]
    assert said.startswith("flowspec: ") and MISTAKES[words] in said
    assert shown.out == "" and list(tmp_path.iterdir()) == []


def test_nothing_said_means_the_values_of_the_paper():
    asked = read_keys([], Simulation, "any")
    assert asked == Simulation()
    assert vars(asked) == {"c": 0.1, "a": 0.9,
                           "k": 5, "failure_cost": 1.0, "S": 1000, "num_target_servers": 7,
                           "random_seed": 42, "num_repeats": 5}


def test_what_the_sentence_about_servers_names_is_enough_and_the_least():
    for c, failure_cost, k in ((0.1, 1.0, 1), (1 / 7, 1.0, 1),
                               (2.5, 37.7, 2), (0.01, 1.0, 3)):
        needed = servers_needed(failure_cost, c, k)
        simulation = partial(Simulation, c=c, failure_cost=failure_cost)
        simulation(k=k, num_target_servers=needed)
        for servers in range(1, needed):
            least = least_lookahead(failure_cost, c, servers)
            with refused(f"needs {needed}: ", f" or k={least} or more"):
                simulation(k=k, num_target_servers=servers)
            simulation(k=least, num_target_servers=servers)
            assert least == 1 or servers_needed(failure_cost, c, least - 1) > servers


def test_every_number_among_the_keys_has_a_range_that_its_default_is_in():
    for kind in (Heatmap, Offline, Online):
        ranges = {name: allowed for name, allowed in allowed_values(kind).items() if isinstance(allowed, Range)}
        found = {option.name: option for option in options(kind) if option.type_name in ("int", "float")}
        assert set(found) == set(ranges)
        assert all(ranges[name].holds(option.default) for name, option in found.items())


def test_columns_are_as_wide_as_they_need_be():
    rows = [["short", "1", "[1.0, 2.0]"], ["the end of a name of more than twenty characters", "100", "-"]]
    assert in_columns(["", "n", "interval"], rows).splitlines() == [
        "                        n    interval",
        "short                   1  [1.0, 2.0]",
        "an twenty characters  100           -"]
    assert in_columns(["pair", "set", "n"], [["a", "b", "1"]], names=2) == "pair  set  n\na     b    1"
