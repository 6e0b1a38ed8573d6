"""`python3 -m scripts.simulate` as it is typed: interrupted, read by somebody who has had enough, misspelled."""
from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from config.presets import ROOT
from eval.dsi.command import COMMANDS, main
from eval.tables import in_columns

COMMAND = [sys.executable, "-m", "scripts.simulate"]


@pytest.mark.parametrize("words",
                         [[], ["paper", "--help"], ["cases", "tests/golden/dsi/cases.json"]], ids=" ".join)
def test_a_closed_output_ends_a_command_quietly(words: list[str]) -> None:
    ran = subprocess.Popen([*COMMAND, *words],
                           cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout is not None and ran.stderr is not None
    ran.stdout.close()
    assert ran.stderr.read() == b""
    assert ran.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])  # SIG_IGN: from a shell's background
def test_an_interrupt_ends_a_command_without_a_traceback(inherited: signal.Handlers) -> None:
    words = [*COMMAND, "online", "num_repeats=2000"]
    ran = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, inherited))
    assert ran.stdout is not None and ran.stderr is not None
    shown = ran.stderr.read(1)  # the bar
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate()
    assert (ran.returncode, out) == (128 + signal.SIGINT, b"")
    assert b"Traceback" not in shown + err


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heatmpa"]) == 2 and main(["?"]) == 2
    shown = capsys.readouterr()
    assert shown.err == ("flowspec: unknown command heatmpa: did you mean heatmap?\n"
                         f"flowspec: unknown command ?: choose one of {', '.join(COMMANDS)}\n")
    assert main([]) == 0 and main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f"\n{name} ") == 2 for name in COMMANDS)


def test_columns_are_as_wide_as_they_need_be() -> None:
    rows = [["short", "1", "[1.0, 2.0]"], ["the end of a name of more than twenty characters", "100", "-"]]
    assert in_columns(["", "n", "interval"], rows).splitlines() == [
        "                        n    interval",
        "short                   1  [1.0, 2.0]",
        "an twenty characters  100           -"]
    assert in_columns(["pair", "set", "n"], [["a", "b", "1"]], names=2) == "pair  set  n\na     b    1"
