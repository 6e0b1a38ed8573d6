"""Questions from standard input: one text from a pipe or a file, or a conversation on a terminal.

Ctrl-C stops an answer, and Ctrl-D ends the conversation. Lines with a slash are commands. Typed lines are kept in the
user's cache, for the arrow keys of later conversations.
"""
from __future__ import annotations

import os
import signal
import stat
import sys
import termios
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from typing import Any, Callable, Iterator, Mapping, Sequence

from cluster.board import is_one_rank
from cluster.processes import keep_ctrl_c
from config.cli import with_bare_question
from config.files import cache_folder
from config.keys import HELP, preset_of, raw_values
from config.presets import PRESETS
from config.run_config import QUESTION_KEYS
from config.schema.untrusted import one_line
from launch.pipeline import Pipeline
from launch.screen import introduction, pieces_of, screen_for, summary

STANDARD_INPUT = "-"  # value of the key `prompt`
MAX_PROMPT_BYTES = 100_000  # Linux allows a word of a command 131,072
HISTORY_LINES = 1000
QUOTES = '"""'  # around a question of several lines
LOCAL_MODES = 3  # place of a terminal's local modes in what termios returns
COMMANDS = {
    "/set": "show the options of an answer; /set temperature=0.7 changes one",
    "/tree": "show the guesses while an answer comes, or hide them",
    "/new": "forget the conversation so far",
    "/help": "show these lines",
    "/exit": "end, as does Ctrl-D"}
SHOWN_OPTIONS = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")


# --- what standard input offers ---------------------------------------------------------------------------------------

def input_kind() -> str:
    """Return what standard input is: a terminal, a pipe (or a file), or nothing to read a question from."""
    try:
        number = sys.stdin.fileno()
        if os.isatty(number):
            return "terminal" if sys.stdout.isatty() else ""
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # it is closed, or replaced by a program
        return ""
    return "pipe" if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def with_question(argv: Sequence[str]) -> list[str]:
    """Return the words of a run; if they have no question, standard input may have it, or hold a conversation.

    Raises ValueError for `prompt=-` if nothing can be read.
    """
    words = with_bare_question(argv)
    raw = raw_values(words)
    is_named = raw.get("prompt") == STANDARD_INPUT
    has_question = not (is_named or raw.keys().isdisjoint(QUESTION_KEYS))
    preset = PRESETS.get(preset_of(words))
    shows_itself = preset is not None and preset.live
    if has_question or shows_itself or "RANK" in os.environ or {*HELP}.intersection(words):
        return words

    others = [word for word in words if not word.startswith("prompt=")]
    kind = input_kind()
    if kind == "terminal":
        is_alone = not is_one_rank(raw.get("hosts", "")) and "reuse" not in raw
        return [*others, f"prompt={STANDARD_INPUT}", *["reuse=true"] * is_alone]
    question = _read_question() if is_named or kind == "pipe" else ""
    if is_named and not question:
        raise ValueError("prompt=- reads the question from standard input, which is empty: type it in quotes instead")
    return [*others, f"prompt={question}"] if question else words


def _read_question() -> str:
    """Read standard input to its end; raises ValueError for a text that no question can be."""
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if sys.stdin else b""
    if len(content) > MAX_PROMPT_BYTES or b"\0" in content:
        raise ValueError(f"standard input is no question: give a text of at most {MAX_PROMPT_BYTES} bytes, without NUL")
    return content.decode("utf-8", "surrogateescape").strip()


# --- the conversation -------------------------------------------------------------------------------------------------

class Conversation:
    """A conversation with a model: the texts of user and assistant in turn, and the options of the next answer."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.texts: list[str] = []
        self.options: dict[str, Any] = {}  # as typed
        self.shows_tree = pipeline.config.live

    def take(self, line: str) -> bool:
        """Answer a question, or execute a command; return whether the conversation goes on."""
        name, _, value = line.partition(" ")
        if name == "/exit":
            return False

        commands: Mapping[str, Callable[[str], None]] = {
            "/set": self.set_option, "/tree": self.toggle_tree, "/new": self.forget, "/help": show_help}
        try:
            if name in commands:
                commands[name](value.strip())
            elif name.startswith("/"):
                print(f"  there is no command {one_line(name)}; /help shows them")
            elif line.strip():
                self.answer(line.strip())
        except ValueError as error:
            print(f"  {one_line(str(error))}")
            if self.texts and name not in commands:
                print("  (with all that was said so far; /new forgets it)")
        return True

    def answer(self, question: str) -> None:
        """Print the answer to a question while it comes, up to its end or Ctrl-C."""
        asked_texts = [*self.texts, question]
        generation = self.pipeline.submit(asked_texts, waits=False, **self.options)
        screen = screen_for(self.pipeline, self.shows_tree)
        with closing(generation), interrupts() as pressed, hidden_keys(), screen:
            for piece in pieces_of(self.pipeline.decoder, generation):
                screen.show(generation, piece)
                if pressed:
                    break

        self.texts = [*asked_texts, generation.text]
        end = ""
        if pressed:
            end = ", stopped"
        elif self.pipeline.is_stopped_loop(generation):
            end = ", stopped, since it repeats itself"
        print(f"\n  {summary(self.pipeline, generation)}{end}\n", flush=True)

    def set_option(self, word: str) -> None:
        key, _, value = word.partition("=")
        if word:
            options = {**self.options, key.strip(): value.strip()}
            self.pipeline.answer_config(options)
            self.options = options
        config = self.pipeline.answer_config(self.options)
        names = dict.fromkeys((*SHOWN_OPTIONS, *self.options))
        print("  " + ", ".join(f"{name}={getattr(config, name)}" for name in names))

    def toggle_tree(self, _: str) -> None:
        self.shows_tree = not self.shows_tree
        print(f"  the guesses are {'shown' if self.shows_tree else 'hidden'} from the next answer on")

    def forget(self, _: str) -> None:
        self.texts = []
        print("  a new conversation begins")


def converse(pipeline: Pipeline) -> None:
    """Hold a conversation until Ctrl-D."""
    if pipeline.text is None:
        raise ValueError("a conversation needs a tokenizer, and this model has none: give token ids with prompt_ids=")
    keep_ctrl_c()
    conversation = Conversation(pipeline)
    print(introduction(pipeline.config))
    print("Type a question. /help shows the commands, Ctrl-C stops an answer, Ctrl-D ends.\n")
    with typed_lines() as read_line:
        while (line := read_line()) is not None and conversation.take(line):
            pass


def show_help(_: str = "") -> None:
    print("\n".join(f"  {name:<7} {about}" for name, about in COMMANDS.items()))


@contextmanager
def typed_lines() -> Iterator[Callable[[], str | None]]:
    """Yield a function that reads a line, which returns None at Ctrl-D. Keys edit it, if Python has readline."""
    history = cache_folder() / "history"
    editor: Any = None
    with suppress(ImportError, OSError):
        editor = import_module("readline")  # `input` uses it once it is imported
        editor.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one question; Python turns it off
        history.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            editor.read_history_file(history)

    try:
        yield _read_line
    finally:
        if editor is not None:
            editor.set_history_length(HISTORY_LINES)
            with suppress(OSError):
                editor.write_history_file(history)


def _read_line() -> str | None:
    """Return the next line, or the lines between two triple quotes; an empty one after Ctrl-C, and None at the end."""
    try:
        text = input("> ")
        if not text.startswith(QUOTES):
            return text

        while not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)):
            text += "\n" + input(". ")

        return text[len(QUOTES):-len(QUOTES)]
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


@contextmanager
def hidden_keys() -> Iterator[None]:
    """Keep keys that are typed meanwhile out of the text on the terminal; the next line begins with them."""
    modes = None
    with suppress(termios.error, OSError, ValueError):  # it is no terminal
        modes = termios.tcgetattr(sys.stdin.fileno())
    if modes is None:
        yield
        return

    hidden_modes = [*modes]
    hidden_modes[LOCAL_MODES] = modes[LOCAL_MODES] & ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, hidden_modes)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, modes)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list to which a first Ctrl-C is added; a second one raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note_press(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note_press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
