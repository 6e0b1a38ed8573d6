"""The picture of an answer: from a state to lines."""
import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch import screen as screens
from launch.drawing import GuessView, Scene, fitting, num_cells, picture, tree_lines

TINY, BOX = GuessView(6, 5, " tiny", -0.3, True), GuessView(12, 6, " box", -2.5, False)
GUESSES = [
    GuessView(4, None, " discovered", -0.1, True), GuessView(5, 4, " a", -0.2, True), TINY,
    GuessView(7, 6, " door", -0.5, False), BOX, GuessView(8, None, " found", -2.0, True),
    GuessView(9, 8, " the", -2.2, False), GuessView(10, 5, " small", -1.4, True),
    GuessView(11, None, " saw", -3.0, False)]


def plain(lines):
    return ["".join(text for text, _ in line) for line in lines]


def test_the_likeliest_path_is_the_first_line_and_depth_is_a_column():
    assert plain(tree_lines("…Maya", GUESSES, 60, 8)) == [
        "…Maya ┬ discovered ─ a ──┬ tiny ─┬ door",
        "      │                  │       └ box",
        "      │                  └ small",
        "      ├ found ────── the",
        "      └ saw"]


def test_what_does_not_fit_is_left_out_the_least_likely_first():
    assert plain(tree_lines("…Maya", GUESSES, 34, 2)) == [
        "…Maya ─ discovered ─ a ┬ tiny",
        "                       └ small"]
    assert [guess.node for guess in fitting(GUESSES, 1)] == [4, 5, 6, 7]
    assert plain(tree_lines("…Maya", GUESSES, 8, 3)) == ["…Maya"]
    assert plain(tree_lines("…", [], 60, 3)) == ["…"]


def test_every_part_has_the_style_of_its_meaning():
    line, = tree_lines("…a", [GuessView(4, None, " b", -0.1, True), GuessView(5, 4, " c", -0.2, False)], 60, 1)
    assert line == [("…a", "text"), (" ", ""), ("─", "branch"), (" ", ""), ("b", "guess"), (" ", ""), ("─", "branch"),
                    (" ", ""), ("c", "unsent")]


def test_a_wide_letter_takes_two_cells_and_no_sign_can_move_the_cursor():
    guesses = [GuessView(4, None, "你好", -0.1, True), GuessView(5, None, "\x1b[2J", -0.2, True),
               GuessView(6, 4, "\n", -0.3, True), GuessView(7, 5, " ", -0.4, True)]
    lines = plain(tree_lines("…", guesses, 60, 4))
    assert lines == ["… ┬ 你好 ─ ⏎", "  └ ?[2J ─ ␣"]
    assert num_cells(lines[0]) == num_cells(lines[1])


def test_rows_of_a_stage_stand_together_by_their_fates_and_the_picture_keeps_its_height():
    scene = Scene("…Maya", GUESSES[:1], [["text", "text", "guess", "wrong"], [], ["wrong"] * 30])
    assert plain(picture(scene, 20, 3)) == [
        "…Maya ─ discovered",
        "", "",
        "",
        "stage 1  ██▒░",
        "stage 2  ",
        "stage 3  ░░░░░░░░░░░",
        "         █ became text   ▒ may become text   ░ proved wrong   "]
    assert picture(scene, 20, 3)[4] == [("stage 1  ", "label"), ("██", "text"), ("▒", "guess"), ("░", "wrong")]
    assert len(picture(scene._replace(stages=()), 20, 3)) == 3


@pytest.mark.parametrize("seed", range(5))
def test_no_line_is_wider_or_lower_than_its_place(seed):
    import random

    generator = random.Random(seed)
    guesses = []
    for node in range(1, 60):
        parent = generator.choice([None, *(guess.node for guess in guesses)])
        above = next((guess.score for guess in guesses if guess.node == parent), 0.0)
        score = above + math.log(generator.uniform(0.01, 1))
        guesses.append(GuessView(node, parent, "x" * generator.randint(1, 9), score, generator.random() < 0.5))
    for width, height in ((20, 1), (40, 4), (80, 12)):
        lines = plain(tree_lines("…text", guesses, width, height))
        assert len(lines) <= height and max(map(num_cells, lines)) <= width


def test_every_line_of_an_answer_is_printed_once_above_the_picture(monkeypatch):
    monkeypatch.setattr(screens, "TokenTexts", lambda tokenizer: None)
    console = Console(file=io.StringIO(), width=24)
    pipeline = SimpleNamespace(config=SimpleNamespace(replicated=False), text=SimpleNamespace(tokenizer=None),
                               ring=SimpleNamespace(depth=5))
    words = [f"word{number}" for number in range(30)]
    pieces = [" ".join(words[:6]), *(f" {word}" for word in words[6:])]
    with screens.LiveScreen(pipeline, console, shows_guesses=False) as screen:
        for piece in pieces:
            screen._next_frame = 0.0
            screen.show(None, piece)

    assert console.file.getvalue().split() == words
