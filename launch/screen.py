"""How an answer is shown while it comes: as text, or on a terminal with its guesses and stages below it.

`rich` draws on terminals; where it is missing, as on some boards, the text appears alone.
"""
from __future__ import annotations

import re
import shutil
import sys
import time
from importlib.util import find_spec
from typing import Any, Callable, Iterator

from config.cli import shown_path
from config.run_config import RunConfig
from config.schema.untrusted import escaped
from launch.drawing import MARKS, GuessView, Scene, StyledLine, num_cells, picture
from launch.pipeline import Generation, Pipeline
from model.text import TokenTexts
from pipeline.decode import Decoder

FRAME_SECONDS = 0.1  # between two pictures
MAX_GUESSES = 60  # of a picture, the likeliest ones
MAX_TREE_LINES = 8
LEFT_LINES = 14  # of the terminal, for the text above the picture, and for the stages
FATES = [*MARKS]  # of rows, in the order in which they are drawn
END_NAME = "(end)"  # of a guess that the answer ends
END_LETTERS = 14  # of the text, at which the tree begins
STYLES = {"text": "green", "guess": "cyan", "unsent": "grey58", "wrong": "bright_black",
          "branch": "bright_black", "label": "grey58", "": ""}


def pieces_of(decoder: Decoder, generation: Generation) -> Iterator[str]:
    """Yield the pieces of a submitted answer that does not wait, and an empty text whenever its tree may differ."""
    for piece in generation:
        if not piece and not generation.ready:
            decoder.turn()
        yield piece


class WordWrap:
    """The line breaks between words of a text that comes in pieces; the last word waits for its end."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_used, self._word = 0, ""

    def add(self, piece: str) -> str:
        """Return what can be shown now."""
        *spaced_words, self._word = re.split(r"(?<=\s)", self._word + piece)
        return "".join(map(self._placed, spaced_words))

    def end(self) -> str:
        """Return the rest."""
        return self._placed(self._word)

    def _placed(self, spaced_word: str) -> str:
        word = spaced_word.rstrip(" ")
        num_used = self._num_used + num_cells(word)
        if num_used > self._num_columns and self._num_used:
            self._num_used = 0
            return "\n" + self._placed(spaced_word)

        if word.endswith("\n"):
            self._num_used = 0
            return word
        shown_word = spaced_word if num_used < self._num_columns else word  # a space would begin the next line
        self._num_used = num_used + len(shown_word) - len(word)
        return shown_word


class TextScreen:
    """An answer as text alone; on a terminal, lines end between words."""

    def __init__(self) -> None:
        self._wrap = WordWrap(shutil.get_terminal_size().columns) if sys.stdout.isatty() else None

    def __enter__(self) -> TextScreen:
        return self

    def show(self, generation: Generation, piece: str) -> None:
        """Show the answer as it is now, with its newest piece."""
        shown_text = escaped(piece)
        print(self._wrap.add(shown_text) if self._wrap else shown_text, end="", flush=True)

    def __exit__(self, *error: object) -> None:
        print(self._wrap.end() if self._wrap else "")


class LiveScreen(TextScreen):
    """An answer with the guesses and the stages below it. Finished lines scroll up as on any terminal."""

    def __init__(self, pipeline: Pipeline, console: Any, shows_guesses: bool) -> None:
        from rich.live import Live

        config = pipeline.config
        assert pipeline.text is not None, "only texts are drawn"
        self._pipeline, self._shows_guesses = pipeline, shows_guesses
        self._names = TokenTexts(pipeline.text.tokenizer)
        self._num_stages = 0 if config.replicated else pipeline.ring.depth - 1
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._num_printed = 0  # finished lines
        self._answer_text = ""
        self._next_frame = 0.0  # time of the next picture

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def show(self, generation: Generation, piece: str) -> None:
        from rich.console import Group

        self._answer_text += piece
        now = time.monotonic()
        if now < self._next_frame:
            return

        self._next_frame = now + FRAME_SECONDS
        last_line = self._print_finished()
        drawn_lines = self._picture(generation) if self._shows_guesses else []
        self._live.update(Group(last_line, *drawn_lines), refresh=True)

    def _picture(self, generation: Generation) -> list[Any]:
        """Return the lines below the text, with the figures so far."""
        num_tree_lines = max(1, min(MAX_TREE_LINES, self._console.height - LEFT_LINES))
        scene = scene_of(generation, self._name_of, self._num_stages)
        figures: StyledLine = [(summary(self._pipeline, generation), "label")]
        lines = picture(scene, self._console.width - 1, num_tree_lines)
        return [styled(line) for line in ([], *lines, [], figures)]

    def _name_of(self, token: int) -> str:
        assert self._pipeline.text is not None, "only texts are drawn"
        return END_NAME if token in self._pipeline.text.end_ids else self._names(token).name

    def __exit__(self, *error: object) -> None:
        last_line = self._print_finished()
        self._live.stop()
        self._console.print(last_line)

    def _print_finished(self) -> Any:
        """Print the lines that are finished above the picture, and return the last line."""
        from rich.text import Text

        lines = Text(escaped(self._answer_text)).wrap(self._console, self._console.width)
        *finished, last_line = [*lines] or [Text()]
        for line in finished[self._num_printed:]:
            self._live.console.print(line)

        self._num_printed = len(finished)
        return last_line


def screen_for(pipeline: Pipeline, draws: bool, shows_guesses: bool = True) -> TextScreen:
    """Return the screen for an answer: text alone, unless it `draws` and standard output is a terminal."""
    if not draws or pipeline.text is None or not sys.stdout.isatty() or find_spec("rich") is None:
        return TextScreen()
    from rich.console import Console

    console = Console(highlight=False)
    return TextScreen() if console.is_dumb_terminal else LiveScreen(pipeline, console, shows_guesses)


# --- words ------------------------------------------------------------------------------------------------------------

def introduction(config: RunConfig) -> str:
    """Return what is about to be seen: the devices, whether they are emulated, the method and the draft."""
    lossy = f" verify={config.lossy_rule} (lossy)" if config.lossy_rule else ""
    method = f"pipeline_type={config.pipeline_type} draft={config.draft}{lossy}"
    if not config.cluster:
        return f"Live on {devices_of(config)}: {method}."
    time = "virtual time" if config.virtual else "real time"
    model = shown_path(config.base_dir or config.model_dir)
    return (f"{config.kind.capitalize()} in {time}: {config.cluster.about}.\n"
            f"Text of the small model {model}; {method}")


def devices_of(config: RunConfig) -> str:
    """Return what a run computes on, as messages name it."""
    if config.cluster:
        return f"the {config.kind} cluster"
    return "these boards" if config.hosts else "this machine, where ranks share cores"


def summary(pipeline: Pipeline, generation: Generation) -> str:
    """Return the figures of an answer in a few words."""
    answer, kind = generation.answer, pipeline.config.kind
    rate = f"{answer.tokens_per_second:.1f} tokens/s{'' if kind == 'real' else f' ({kind})'}"
    tokens = "1 token" if answer.new_tokens == 1 else f"{answer.new_tokens} tokens"
    lossy = f", lossy: {answer.divergence_per_token:.3f} nats per token" if pipeline.config.lossy_rule else ""
    return f"{tokens}, {generation.accepted} of them guessed in advance, {rate}{lossy}"


# --- pictures ---------------------------------------------------------------------------------------------------------

def styled(line: StyledLine) -> Any:
    """Return a line of a picture as rich prints it."""
    from rich.text import Text

    parts = [(text, STYLES[style]) for text, style in line]
    return Text.assemble(*parts, no_wrap=True)


def scene_of(generation: Generation, name_of: Callable[[int], str], num_stages: int) -> Scene:
    """Return the state of an answer: the likeliest guesses, and the rows in each stage by the time that they left."""
    tree = generation.tree
    tip_score = tree.nodes[tree.tip].score
    ranked = sorted(tree.live, key=lambda node: (-tree.nodes[node].score, node))
    guesses = []
    for node in ranked[:MAX_GUESSES]:
        guess = tree.nodes[node]
        parent = guess.parent if guess.parent in tree.live else None
        is_sent = node not in tree.unsent_guesses
        name, score = name_of(guess.token), guess.score - tip_score
        guesses.append(GuessView(node, parent, name, score, is_sent))

    words = generation.text.split()
    text_end = "…" + escaped(words[-1])[-END_LETTERS:] if words else "…"
    return Scene(text_end, guesses, stages_of(generation, num_stages))


def stages_of(generation: Generation, num_stages: int) -> list[list[str]]:
    """Return the fates of the rows in each stage."""
    tree = generation.tree
    settled = set(tree.trunk)

    def fate_of(node: int) -> str:
        if node in settled:
            return "text"
        return "guess" if node in tree.live else "wrong"

    stages: list[list[str]] = [[] for _ in range(num_stages)]
    for nodes, passed in generation.segments_under_way if stages else ():
        stage = min(int(passed * num_stages), num_stages - 1)
        stages[stage] += map(fate_of, nodes)
    return [sorted(fates, key=FATES.index) for fates in stages]
