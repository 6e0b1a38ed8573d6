"""The recording of a terminal as an animated picture."""
from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from scripts.record import LAST_SECONDS, LINES, Shown, drawn, main, shown_lines

EMPTY = [()] * (LINES - 2)
FIRST, SECOND, OTHER = ((0, "first", "default"),), ((2, "<b>", "green"),), ((0, "other", "bold"),)
FRAMES = [(0.0, [FIRST, (), *EMPTY]), (1.0, [FIRST, SECOND, *EMPTY]), (2.0, [FIRST, OTHER, *EMPTY])]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_is_drawn_once_for_each_time_in_which_it_stays_the_same():
    assert list(shown_lines(FRAMES, 6.0)) == [
        Shown(0, FIRST, 0.0, 6.0), Shown(1, SECOND, 1.0, 2.0), Shown(1, OTHER, 2.0, 6.0)]


def test_the_picture_has_every_text_as_a_text_and_loads_nothing():
    svg = drawn(FRAMES)
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts == ["first", "<b>", "other"]
    assert f"{2.0 + LAST_SECONDS:.2f}s step-end infinite" in svg
    assert set(re.findall(r"https?://[^\"'\s]+", svg)) == {"http://www.w3.org/2000/svg"}


def test_a_command_is_recorded_as_it_is_seen(tmp_path, capsys):
    pytest.importorskip("pyte")
    program = "print('one\\n\\033[32mtwo\\033[0m')"
    assert main([str(tmp_path / "x.svg"), sys.executable, "-c", program]) == 0
    runs = ElementTree.parse(tmp_path / "x.svg").iter(f"{SVG}tspan")
    assert [(run.text, run.get("fill")) for run in runs] == [("one", "#d5d9e0"), ("two", "#7ee787")]
    assert "1 frames" in capsys.readouterr().out
