"""Questions from standard input: a pipe, a file, or a conversation on a terminal."""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from multiprocessing.connection import Connection

import pytest

from config.cli import parse
from config.dialect import is_question
from launch.conversation import Conversation, with_question
from launch.pipeline import Pipeline
from launch.screen import WordWrap
from tests.checkpoints import refused
from tests.forked import Forked, be_program
from tests.saved import SLOW, here

QUESTION = "What does a baker do?"


# --- words ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("word, expected", [
    (QUESTION, True), ("What is 1+1=?", True), ("prompt=What is it?", False), ("toy", False), ("temperature =1", False),
    ("", False), (" ", False)])
def test_a_word_with_spaces_before_any_equals_sign_is_a_question(word, expected):
    assert is_question(word) == expected


@pytest.mark.parametrize("typed, words", [
    ("hello", ["prompt=hello"]), ("toy hello", ["toy", "prompt=hello"]),
    ("hello toy seed=1", ["toy", "seed=1", "prompt=hello"]),
    ("what is rain", ["prompt=what is rain"]), ("what is temperature", ["prompt=what is temperature"]),
    ("Hello? --seed 1", ["seed=1", "prompt=Hello?"])])
def test_a_word_that_is_no_preset_and_no_key_is_a_question(typed, words):
    assert with_question(typed.split()) == words


@pytest.mark.parametrize("typed, sentence", [
    ("vicuna7b", "unknown preset vicuna7b: did you mean vicuna-7b?"),
    ("vicuna7b what is rain", "unknown preset vicuna7b: did you mean vicuna-7b?"),
    ("temperature", "temperature has no value: write temperature=VALUE"),
    ("ours.json", "files of presets are not read"), ("./a/model.gguf", "unknown preset ./a/model.gguf")])
def test_a_mistyped_preset_a_key_and_a_path_are_no_question(typed, sentence, offered):
    offered("")
    with refused(sentence):
        parse(with_question(typed.split()))


@pytest.mark.parametrize("pieces, lines", [
    (["one two three four"], ["one two ", "three four"]),
    (["on", "e tw", "o thr", "ee four"], ["one two ", "three four"]),
    (["ten letter", "s\nx"], ["ten ", "letters", "x"]), (["averyverylongword x"], ["averyverylongword", "x"]),
    (["one averyverylongword"], ["one ", "averyverylongword"]), (["日本 日本語"], ["日本 ", "日本語"]),
    (["ab  cd\n\n", "e"], ["ab  cd", "", "e"]), (["0123456789 a"], ["0123456789", "a"]), ([""], [""])])
def test_lines_of_ten_columns_end_between_words_however_the_text_comes(pieces, lines):
    wrap = WordWrap(10)
    shown = "".join(map(wrap.add, pieces)) + wrap.end()
    assert shown.split("\n") == lines


@pytest.fixture
def offered(monkeypatch):
    """Sets what standard input is, and its content."""
    def offer(kind, content=b""):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        monkeypatch.setattr("sys.stdin", os.fdopen(reader))
        if kind != "pipe":
            monkeypatch.setattr("launch.conversation.input_kind", lambda: kind)
    return offer


def test_a_pipe_holds_the_question_unless_there_is_one(offered):
    offered("pipe", b"  What does\na baker do?\n")
    assert with_question(["toy", "seed=1"]) == ["toy", "seed=1", "prompt=What does\na baker do?"]
    offered("pipe", b"another")
    for word in ("prompt=abc", "prompt_ids=1", "question_file=x"):
        assert with_question(["toy", word]) == ["toy", word]
    assert with_question([QUESTION, "toy"]) == ["toy", f"prompt={QUESTION}"]
    assert with_question(["demo"]) == ["demo"]
    assert with_question(["toy", "prompt=-"]) == ["toy", "prompt=another"]


def test_without_a_terminal_and_a_text_the_question_is_the_default_one(offered):
    offered("pipe", b"a\0b")
    with refused("standard input is no question"):
        with_question(["toy"])
    offered("pipe", b" \n")
    assert with_question(["toy"]) == ["toy"]
    offered("")
    assert with_question(["toy"]) == ["toy"]
    with refused("reads the question from standard input, which is empty"):
        with_question(["toy", "prompt=-"])


def test_a_terminal_without_a_question_gives_a_conversation(offered):
    offered("terminal")
    assert with_question(["toy"]) == ["toy", "prompt=-", "reuse=true"]
    assert with_question(["toy", "reuse=false"]) == ["toy", "reuse=false", "prompt=-"]
    assert with_question(["toy", "hosts=x"]) == ["toy", "hosts=x", "prompt=-"]
    assert with_question(["demo"]) == ["demo"] and with_question(["--help"]) == ["--help"]


def test_the_question_of_a_pipe_is_answered(offered, saved, capsys):
    words = [f"model_dir={saved / '0+2+2'}", "template=none", "max_new_tokens=4", "ignore_eos=true"]
    assert here(*words, "prompt=abc") == 0
    expected = capsys.readouterr().out.split("\n\n")[:2]
    offered("pipe", b"abc\n")
    assert here(*words) == 0
    assert capsys.readouterr().out.split("\n\n")[:2] == expected


# --- commands ---------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pipeline(saved):
    with Pipeline.open(model_dir=str(saved / "0+2+2"), link="threads", dtype="float64", template="none",
                       max_new_tokens=6, ignore_eos=True) as opened:
        yield opened


def test_a_conversation_answers_after_all_earlier_texts_with_the_options_that_were_set(pipeline, capsys):
    conversation = Conversation(pipeline)
    for line in ("abc", "/set temperature=0.5", "/set seed = 3", "def", "", "/tree", "/help"):
        assert conversation.take(line)
    first = pipeline.generate("abc").text
    second = "".join(pipeline.stream(["abc", first, "def"], temperature=0.5, seed=3))
    assert conversation.texts == ["abc", first, "def", second]
    printed = capsys.readouterr().out

    assert first in printed and second in printed
    assert "temperature=0.5, top_p=1.0, top_k=0, seed=3, max_new_tokens=6" in printed
    assert conversation.shows_tree
    assert conversation.take("/new") and conversation.texts == []
    assert not conversation.take("/exit")


@pytest.mark.parametrize("line, sentence", [
    ("/set temprature=1", "did you mean temperature?"), ("/set temperature=-1", "temperature=-1.0 is not possible"),
    ("/set stages=2", "is the same for all answers"), ("/nothing", "there is no command /nothing"),
    ("x " * 4000, "shorten the prompt")])
def test_a_mistake_is_one_sentence_and_changes_nothing(pipeline, capsys, line, sentence):
    conversation = Conversation(pipeline)
    assert conversation.take(line)
    assert sentence in capsys.readouterr().out
    assert conversation.texts == [] and conversation.options == {}


def test_a_question_that_is_too_long_with_the_earlier_ones_names_the_way_out(pipeline, capsys):
    conversation = Conversation(pipeline)
    long_question = "x " * 4000
    conversation.take(long_question)
    assert "/new" not in capsys.readouterr().out
    conversation.take("abc")
    conversation.take("/set temperature=-1")
    assert "/new" not in capsys.readouterr().out
    conversation.take(long_question)
    assert "shorten the prompt" in (printed := capsys.readouterr().out) and "/new forgets it" in printed
    assert len(conversation.texts) == 2


# --- on a terminal ----------------------------------------------------------------------------------------------------

def be_on_terminal(words, environment, terminal):
    """Be a command that a person has typed there."""
    os.setsid()
    for number in range(3):
        os.dup2(terminal.fileno(), number)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)
    be_program(["scripts.generate", *words], environment)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *words, **environment):
        self.number, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
        with Connection(theirs) as terminal:
            self.process = Forked(be_on_terminal, words, environment, terminal)
        self.shown = ""

    def press(self, keys):
        os.write(self.number, keys.encode())

    def see(self, *patterns):
        """Read until the screen shows one after the other, after what was seen before; return the last match."""
        for pattern in patterns:
            match = self._see(pattern)
        return match

    def interrupt_line(self):
        """Press Ctrl-C at the prompt until another one comes.

        Python's readline misses a signal between its prompt and its wait for keys, until the next signal.
        """
        for _ in range(6):
            self.press("\x03")
            if select.select([self.number], [], [], 10 * SLOW)[0]:
                break
        self.see("> ")

    def _see(self, pattern):
        while not (match := re.search(pattern, self.shown, re.S)):
            assert select.select([self.number], [], [], 60 * SLOW)[0], self.shown
            self.shown += os.read(self.number, 1 << 16).decode(errors="replace").replace("\r", "")
            self.shown = re.sub(r"\x1b\[\?2004[hl]", "", self.shown)  # the terminal is asked to mark pasted lines
        self.shown = self.shown[match.end():]
        return match

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.number)


@pytest.fixture
def terminal(saved, tmp_path):
    opened = []

    def start(*words, profile="server"):
        opened.append(Terminal(f"model_dir={saved / '0+2+2'}", "template=none", "dtype=float64", "ignore_eos=true",
                               f"profile={profile}", *words, XDG_CACHE_HOME=str(tmp_path)))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_person_asks_stops_an_answer_with_ctrl_c_and_ends_with_ctrl_d(terminal, tmp_path):
    window = terminal("max_new_tokens=4", profile="jetson-7b")
    window.see("Emulated in real time: five Jetson boards", "Ctrl-D ends.*> ")
    window.press("abc\r")
    window.see(r"  4 tokens, \d of them guessed in advance, [\d.]+ tokens/s \(emulated\)\n\n> ")
    window.press("/set max_new_tokens=400\r")
    window.see("max_new_tokens=400\n> ")
    window.press("/tree\rabc\r")
    window.see("stage 2 ")
    window.press("\x03")
    window.see(r"\(emulated\), stopped\n\n> ")
    window.interrupt_line()
    window.press("\x04")
    assert window.process.wait(60 * SLOW) == 0
    history = (tmp_path / "flowspec" / "history").read_text().splitlines()

    assert history == ["abc", "/set max_new_tokens=400", "/tree", "abc"]


def test_pasted_lines_are_one_question_and_keys_during_an_answer_wait_for_the_next(terminal):
    window = terminal("max_new_tokens=12")
    window.see("Ctrl-D ends.*> ")
    window.press("/tree\r")
    window.see("shown from the next answer on\n> ")
    for typed in ("\x1b[200~ab\ncd\x1b[201~\r", '"""ab\rcd"""\r'):
        window.press(typed)
        window.see("ab", "cd", "stage 2 ")
        window.press("/set\r")
        answered = window.see(r"\(emulated\)\n\n> ")
        assert "/set" not in answered.string[:answered.end()]
        window.see("temperature=[^>]*> ")
    window.press("\x04")
    assert window.process.wait(60 * SLOW) == 0


def test_the_demo_ends_with_a_comparison_in_one_line(terminal):
    window = terminal("prompt=abc", "live=true", "max_new_tokens=12")
    window.see("Emulated in real time", "abc", "stage 2 ", "became text", "12 tokens")
    line = window.see(r"\nThe same text ([\d.]+) times as fast: ([\d.]+) tokens/s, plain decoding ([\d.]+) "
                      r"\(emulated\).\n")
    assert all(float(figure) > 0 for figure in line.groups())
    assert window.process.wait(60 * SLOW) == 0
