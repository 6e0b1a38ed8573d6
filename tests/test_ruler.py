"""How much code a room may have, and how it has to read: tokens, compound nouns, and blank lines between steps.

Blank lines, comments and docstrings are free. A quota is no aim: `found_value` for `found` is worse. What counts is
that a stranger says after one reading what a function does.
"""
from __future__ import annotations

import ast
import tokenize
from collections import Counter
from pathlib import Path
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple

import pytest
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Whitespace

from tests.sources import FLOORS, FUNCTIONS, NOT_SOURCE, ROOT, Source, measured_files, python_files, tracked

Raise = Tuple[int, str]  # tokens, and what a user can do now


class Room(NamedTuple):
    """The line of a room: its tokens when the ruler began, and what it was given since then, each with its reason."""

    start: int
    raises: Sequence[Raise] = ()

    @property
    def ceiling(self) -> int:
        return self.start + sum(tokens for tokens, _ in self.raises)


# A room's count lies between LEAST_SHARE and all of its ceiling. A room that shrinks lowers its `start`. One that grows
# adds a raise, whose reason says what a user can do now: ROOMS["sim"] = Room(7_700, [(250, "a wire may lose ...")]).
SOURCE_ROOMS = {
    "flowspec": Room(0, [
        (3_489, "one install brings a command and a pipeline for any program, beside its own packages")]),
    "config": Room(23_334, [
        (926, "a model loads whose config has fields that its class ignores; one that versions read otherwise "
              "is named"),
        (738, "a cluster's file says what rank 0's own work takes, and which share of messages a wire loses"),
        (1_436, "this year's families load, and pairing codes and the folder of models can be given"),
        (299, "a word beside a question is named, and this year's presets have sizes and splits"),
        (315, "a start leaves out half of torch's import, and tables of figures are aligned alike")]),
    "model": Room(61_414, [
        (5_689, "tools and thoughts work in the formats of twelve families, and copied text costs no network"),
        (6_959, "models with convolutions and delta nets guess in trees; tokenizers are read without transformers"),
        (1_408, "GGUF files of this year's families and models as more writers publish them load"),
        (70, "a prompt's text does not depend on how busy the machine is, and a GGUF file is checked once"),
        (106, "a level asks how many of its guesses are worth their time"),
        (78, "a guess that scores better raises the guesses below it"),
        (85, "copies of a suffix alone begin with the chances that were measured")]),
    "pipeline": Room(21_064, [
        (494, "several requests on one machine rest together where plain decoding is faster"),
        (405, "chains in windows run beside trees, and no guesses flood a ring that was not measured yet"),
        (18, "rows are shared by the measured round trip, and only live rows are asked for"),
        (111, "people see what each board does, and a recurrent family has virtual time"),
        (37, "several requests send as soon as the first stage is free, and costly rows are known from the start"),
        (588, "a level reads what pays on this ring under this load, and slow wires of several boards are found"),
        (128, "segments behind a queue count as late, so that it drains")]),
    "cluster": Room(20_414, [
        (304, "a worker of another version is named first, a damaged part comes again, a killed worker returns"),
        (2_507, "boards are found in the network, and a code brings their keys"),
        (214, "each board says how busy it is, its memory and its round trip, and one with Python 3.8 joins"),
        (28, "a board over ssh and one in the lobby answer lines by the same code")]),
    "tp": Room(5_856),
    "sim": Room(7_517, [
        (223, "a wire repeats lost messages, and rank 0's own work is in virtual time"),
        (418, "methods are compared in virtual time for recurrent families, too")]),
    "launch": Room(40_277, [
        (440, "a start measures the rows of a full batch, and a line says what trials of guessing cost"),
        (1_675, "a question needs no preset, may be pasted, and is answered with the sampling that the model "
                "recommends; a transfer to boards is seen"),
        (6_125, "rank 0 measures boards that it found and shares out a model; a program asks a pipeline in another "
                "process"),
        (2_697, "people see their boards on one page or in a terminal, and what would make them faster")]),
    "eval": Room(37_625, [
        (3_102, "one command compares all methods on all clusters; edits and the share of right guesses have tables"),
        (55, "a short contest still answers as many questions as run at once"),
        (124, "results go on in another clone of the project"),
        (478, "peers of any prompt length and several requests at once, and files of three kinds"),
        (550, "speeds have a figure for each seed, texts a hash, and raw answers a file from which others compute")]),
    "serve": Room(20_464, [
        (497, "an answer goes on while others send megabytes; Codex and Claude Code are served with their own tools"),
        (19, "help names the command that was typed, whatever folder it runs in"),
        (372, "sampling counts in three protocols, more clients are served, and boards are seen on the page")]),
    "dsi": Room(0, [
        (47, "python -m dsi is typed as the published README prints it")]),
    "eval/dsi": Room(11_988, [
        (214, "the published simulator's words are read, as type=heatmap heatmap.ndim=20"),
        (158, "rows of simulate table are read where its command is")]),
    "eval/flowspec": Room(2_092),
    "eval/load": Room(2_603),
    "eval/plan": Room(2_922, [
        (103, "a plan counts states and codes as the check before loading does")]),
    "eval/specinfer": Room(3_659, [
        (11, "SpecInfer's option for the requests of a batch is read")]),
    "train": Room(17_670, [
        (4, "norms and layers are imported from where they stand"),
        (190, "a head learns from the answers that its user has kept"),
        (130, "a head learns to be accepted where texts are sampled, in the number type that is faster here")]),
    "scripts": Room(4_367, [
        (3_635, "a contributor sees for any file which of its steps no test would miss"),
        (89, "help and mistakes of run_pipe.sh are read before torch is imported"),
        (53, "commands import less of torch, and their help names what was typed"),
        (17, "a start imports its libraries in an eighth less time")]),
    "split_and_save_models": Room(597, [
        (16, "a preset's head goes into a split without being named"),
        (25, "help names the command that was typed at the start")]),
}
OTHER_ROOMS = {
    "tests": Room(274_317, [
        (40_520, "a wrong value in a layer, kernel, rule or format fails a test that transformers, numpy or "
                 "gguf judges"),
        (11_228, "boards, wires, windows, edits, pasted questions and sampling out of files are tested"),
        (16_882, "this year's families, found boards, the package, tokenizers and cached codes are judged by "
                 "others' values"),
        (7_611, "published layouts, agents' chats, boards on a page and mixed kernels are judged by others' "
                "values"),
        (2_524, "quantized recent families, lean starts, costly rows and a late template are judged by others' "
                "values"),
        (1_149, "levels by measured times, delayed messages and slow wires are judged by trying all, and "
              "by a profile's times"),
        (1_002, "queues, raised scores, answers at once and random files of each kind are judged"),
        (253, "levels of several requests, and those refused for long, are judged"),
        (190, "copies with and without networks are judged by hand"),
        (150, "a chain of a draft's own outputs ends where they leave their range, and long texts show prunes"),
        (840, "figures by seed, hashes of texts and raw answers are compared with those that a test puts there"),
        (290, "lessons of a user's own answers are the tokens that were kept"),
        (170, "the loss of a head by acceptance, and the number type of each processor, are judged")]),
    "toy": Room(3_451, [
        (193, "copies of the toy with noise are drafts of any accuracy")]),
    "toy/corpus": Room(11_467),
    "C": Room(13_364, [
        (70, "threads, locks and memory of the kernels are counted, so that none is lost"),
        (939, "states of delta nets are computed in C, and a long conversation takes half the memory"),
        (48, "a long context is read a fifth faster, with the same bits"),
        (121, "a row of a long context is read from large pages, and checks for prunes cost no row of "
              "plain decoding"),
        (196, "with AVX-512, scores of two slots and sixteen elements of a value are computed at once"),
        (307, "with AVX-512, sixteen lanes are summed at once, and weights of sixteen slots are computed")]),
    "shell": Room(6_735, [
        (267, "commands of the original READMEs run as printed, and rank 0's line needs no ssh"),
        (381, "a worker needs no argument, downloads are seen, and a newer transformers can be compared"),
        (87, "a first run of the tests compiles once, and a worker shows its status"),
        (15, "a person's first start takes a third less processor time")]),
    "page": Room(24_957, [  # of the server's chat and of the timeline, without the libraries in serve/vendor
        (52, "the page shows the thoughts of a model apart from its answer"),
        (438, "each tab of the page has a conversation of its own, and none is lost"),
        (50, "parts of the page lie in its landmarks, and a toy is called a toy"),
        (1_293, "a view shows each board, the slowest one and what would help, also where stores are forbidden")]),
    "docs": Room(40_350, [  # words, not tokens
        (1_480, "a reader finds the fields, call formats and limits of each family and of the server"),
        (3_930, "a reader finds where chains and trees win, other systems, edits, and every cluster's table"),
        (1_600, "a reader finds found boards, the package, recurrent layers and the newest tables"),
        (516, "a reader finds the page of boards and what this year's files hold"),
        (1_756, "a reader finds the eight first questions, what each preset needs of a board, and what a head "
                "learns from its user"),
        (356, "a reader finds how many guesses a level reads, how slow wires count, and this processor's tables"),
        (625, "a reader finds what drains a queue and the tables of one commit"),
        (569, "tables of one commit with many requests, and forms beside llama.cpp, are found"),
        (960, "a reader finds every cluster's table with three more drafts, and losses of a head that do not pay"),
        (730, "a reader finds three seeds, eleven kinds of questions with all methods, and the raw answers"),
        (540, "a reader finds what conversations, norms and a second layer bring a head")]),
}
ROOMS = {**SOURCE_ROOMS, **OTHER_ROOMS}
LEAST_SHARE = 0.98
LEAST_REASON = 6  # words
MOST_SOURCE_AT_START, MOST_TESTS_AT_START = 285_000, 275_000

LANGUAGES = {".c": "C", ".h": "C", ".sh": "shell", "run": "shell", ".js": "page", ".css": "page", ".html": "page",
             ".md": "docs"}  # by the ending of a file, but Python
LEXERS = {"C": "c", "shell": "bash", ".js": "javascript", ".css": "css", ".html": "html"}
DATA = {".csv", ".gz", ".json", ".jsonl", ".png", ".svg", ".safetensors", ".txt", ".model", ".toml", ".cff",
        ".gitignore", "LICENSE"}
VENDORED = "serve/vendor/"
LONGEST_FUNCTION = 506  # tokens
LONG_BODY = 12  # lines from which on a function's body has to show its steps
ENOUGH_NAMES = 20  # in a file, before the share of its compounds says something
LEAST_COMPOUND_SHARE = 0.25  # of each file
LEAST_BLANK_SHARE = 0.05
UNMEASURED = "pipeline/strategies.py"  # its short names are those of the papers' algorithms


class Floor(NamedTuple):
    """What the files of an area have reached together. It may only rise: within FLOOR_WIDTH of what is there now."""

    compound_share: float
    blank_share: float


FLOOR_WIDTH = 0.01
AREA_FLOORS = {"source": Floor(0.357, 0.118), "toy": Floor(0.523, 0.107), "tests": Floor(0.200, 0.063)}
VAGUE_NAMES = {  # how often something is called so; a count may only fall
    "source": {"found": 0, "place": 0, "own": 0, "one": 0, "said": 0, "known": 0, "given": 0, "asked": 0, "made": 0,
               "held": 0, "kind": 82, "form": 64, "facts": 35, "part": 51, "step": 24, "body": 30},
    "toy": {"found": 0, "place": 0, "own": 0, "one": 0, "said": 0, "known": 0, "given": 0, "asked": 0, "made": 0,
            "held": 0, "kind": 0, "form": 0, "facts": 0, "part": 1, "step": 4, "body": 0},
    "tests": {"found": 120, "place": 41, "own": 51, "one": 37, "said": 67, "known": 11, "given": 21, "asked": 75,
              "made": 32, "held": 37, "kind": 80, "form": 20, "facts": 13, "part": 56, "step": 12, "body": 30},
}
EMPTY_NAMES = {name for name, count in VAGUE_NAMES["source"].items() if not count}

BUILTINS = {"bool", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"}


# --- counts -----------------------------------------------------------------------------------------------------------

def token_count(source: Source, first_line: int = 0, last_line: float = float("inf")) -> int:
    return sum(token.type != tokenize.NEWLINE and first_line <= token.start[0] <= last_line for token in source.tokens)


def tokens_of(text: str, lexer_name: str) -> int:
    """The tokens of a text in another language than Python, without its comments."""
    pieces = get_lexer_by_name(lexer_name).get_tokens(text)
    return sum(bool(piece.strip()) and token_type not in Comment and token_type not in Whitespace
               for token_type, piece in pieces)


def room_and_count(path: str, text: str) -> tuple[str, int]:
    """The room of a file in another language than Python, and its tokens, or its words if it is a page of docs."""
    ending = ending_of(path)
    room = LANGUAGES[ending]
    count = len(text.split()) if room == "docs" else tokens_of(text, LEXERS.get(ending) or LEXERS[room])
    return room, count


def ending_of(path: str) -> str:
    return Path(path).suffix or Path(path).name


def counts_by_room() -> Counter[str]:
    counts: Counter[str] = Counter()
    for source in python_files():
        counts[source.room] += token_count(source)

    for path in tracked():
        if ending_of(path) in LANGUAGES and not path.startswith(VENDORED):
            room, count = room_and_count(path, (ROOT / path).read_text(encoding="utf-8"))
            counts[room] += count
    return counts


def files_by_area() -> dict[str, list[Source]]:
    areas: dict[str, list[Source]] = {area: [] for area in AREA_FLOORS}
    for source in python_files():
        areas[source.parts[0] if source.parts[0] in NOT_SOURCE else "source"].append(source)
    return areas


# --- the table of rooms -----------------------------------------------------------------------------------------------

def rooms_off_their_line(rooms: Mapping[str, Room], counts: Mapping[str, int]) -> Iterator[str]:
    """The rooms whose count is above their ceiling, or so far below it that the ceiling says nothing."""
    for name, room in rooms.items():
        count = counts.get(name, 0)
        if count > room.ceiling:
            yield f"{name} has {count:,} tokens, more than {room.ceiling:,}: make it smaller, or raise it with a reason"
        elif count < LEAST_SHARE * room.ceiling:
            yield f"{name} has {count:,} tokens, fewer than {LEAST_SHARE:.0%} of {room.ceiling:,}: lower its start"


def unjustified_raises(rooms: Mapping[str, Room]) -> Iterator[str]:
    """The raises that do not say, in a sentence of their own, what a user can do now."""
    reasons = Counter(reason for room in rooms.values() for _, reason in room.raises)
    for name, room in rooms.items():
        for tokens, reason in room.raises:
            if tokens <= 0:
                yield f"{name} is raised by {tokens} tokens: a room that shrinks lowers its start"
            if len(reason.split()) < LEAST_REASON:
                yield f"{name} is raised by {tokens} tokens for {reason!r}: say what a user can do now"
            if reasons[reason] > 1:
                yield f"{name} is raised by {tokens} tokens for a reason that stands twice: {reason!r}"


def sum_at_start(rooms: Mapping[str, Room]) -> int:
    return sum(room.start for room in rooms.values())


# --- how files read ---------------------------------------------------------------------------------------------------

class Reading(NamedTuple):
    """How a piece of source reads."""

    names: Counter[str]  # definitions: assigned names and attributes, arguments and functions
    blank_lines: int  # in the bodies of long functions
    body_lines: int

    @property
    def name_count(self) -> int:
        return sum(self.names.values())

    @property
    def compound_share(self) -> float:
        compounds = sum(count for name, count in self.names.items() if "_" in name.strip("_"))
        return compounds / max(1, self.name_count)

    @property
    def blank_share(self) -> float:
        return self.blank_lines / max(1, self.body_lines)


def reading_of(files: Iterable[Source]) -> Reading:
    """Count names and lines over some files."""
    names: Counter[str] = Counter()
    blank_lines = body_lines = 0

    for source in files:
        names.update(defined_names(source))
        for body in long_bodies(source):
            blank_lines += sum(not line.strip() for line in body)
            body_lines += len(body)

    return Reading(names, blank_lines, body_lines)


def defined_names(source: Source) -> Iterator[str]:
    """The names that a file defines, without `self`, `cls`, `_` and the special methods of Python."""
    for node in source.nodes:
        name = _defined_name(node)
        is_special = name.startswith("__") and name.endswith("__")
        if name.strip("_") and not is_special and name not in ("self", "cls"):
            yield name


def _defined_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, FUNCTIONS) else ""


def long_bodies(source: Source) -> Iterator[list[str]]:
    """The lines of each function's body, without its docstring, if they are a dozen or more."""
    all_lines = source.text.splitlines()
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            statements = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            body = all_lines[statements[0].lineno - 1:node.end_lineno] if statements else []
            if len(body) >= LONG_BODY:
                yield body


# --- rules: from a file to its problems -------------------------------------------------------------------------------

def functions_too_long(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            count = token_count(source, node.lineno, node.end_lineno)
            if count > LONGEST_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {count} tokens, more than {LONGEST_FUNCTION}"


def hard_to_read(source: Source) -> Iterator[str]:
    """What a file lacks: compound names, blank lines, names that say something."""
    reading = reading_of([source])
    if reading.name_count >= ENOUGH_NAMES and reading.compound_share < LEAST_COMPOUND_SHARE:
        yield f"has {reading.compound_share:.0%} compound names, fewer than {LEAST_COMPOUND_SHARE:.0%}"
    if reading.body_lines and reading.blank_share < LEAST_BLANK_SHARE:
        yield (f"has {reading.blank_share:.1%} blank lines in bodies of {LONG_BODY} lines and more, fewer than "
               f"{LEAST_BLANK_SHARE:.0%}: add one between two steps")
    for name in sorted(EMPTY_NAMES & reading.names.keys()):
        yield f"calls something {name}: name what it holds"


def builtins_as_no_ops(source: Source) -> Iterator[str]:
    """A callable's default that is a builtin type, as in `forget: Callable[[], object] = int`."""
    for node in source.nodes:
        if isinstance(node, ast.AnnAssign):
            defaults = [(node.annotation, node.value)]
        elif isinstance(node, FUNCTIONS):
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            with_default = positional[len(positional) - len(arguments.defaults):]
            pairs = [*zip(with_default, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
            defaults = [(argument.annotation, default) for argument, default in pairs]
        else:
            defaults = []

        for annotation, default in defaults:
            is_builtin = isinstance(default, ast.Name) and default.id in BUILTINS
            if is_builtin and annotation is not None and "Callable" in ast.unparse(annotation):
                yield f"line {default.lineno}: {default.id} stands for a function that does nothing: name one"


def repeated_classes(files: Iterable[Source]) -> list[str]:
    """The names of classes and of types that stand in several places."""
    places: dict[str, list[str]] = {}
    for source in files:
        for node in source.nodes:
            for name in _type_names(node):
                places.setdefault(name, []).append(f"{source.path}:{node.lineno}")

    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def _type_names(node: ast.AST) -> list[str]:
    """The class or the alias of a type that a node defines; a TypeVar is neither."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if not isinstance(node, ast.Assign) or node.col_offset or _is_type_variable(node.value):
        return []
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if name[:1].isupper() and not name.isupper()]


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"


# --- the project keeps them -------------------------------------------------------------------------------------------

def test_every_room_stays_on_its_line() -> None:
    counts = counts_by_room()
    rows = [f"{name:<24}{counts[name]:>9,}{room.ceiling:>9,}" for name, room in ROOMS.items()]
    in_source = sum(counts[name] for name in SOURCE_ROOMS)
    print("\n".join([f"{'room':<24}{'tokens':>9}{'ceiling':>9}", *rows, f"{'source':<24}{in_source:>9,}"]))

    assert set(counts) == set(ROOMS)
    assert set(SOURCE_ROOMS) == {room for room in FLOORS if not room.startswith(NOT_SOURCE)}
    assert list(rooms_off_their_line(ROOMS, counts)) == []


def test_every_raise_says_what_a_user_can_do_now() -> None:
    assert list(unjustified_raises(ROOMS)) == []


def test_the_rooms_began_within_their_sums() -> None:
    assert sum_at_start(SOURCE_ROOMS) <= MOST_SOURCE_AT_START
    assert ROOMS["tests"].start <= MOST_TESTS_AT_START


def test_every_file_is_data_or_counted() -> None:
    assert [path for path in tracked() if not path.startswith(VENDORED)
            and ending_of(path) not in LANGUAGES.keys() | DATA | {".py"}] == []


@pytest.mark.parametrize("area", AREA_FLOORS)
def test_an_area_reads_no_worse_than_it_did(area) -> None:
    reading, floor = reading_of(files_by_area()[area]), AREA_FLOORS[area]
    vague_counts = {name: reading.names[name] for name in VAGUE_NAMES[area]}
    print(f"{area}: compounds {reading.compound_share:.2%}, blank lines {reading.blank_share:.2%}, {vague_counts}")

    assert floor.compound_share <= reading.compound_share <= floor.compound_share + FLOOR_WIDTH
    assert floor.blank_share <= reading.blank_share <= floor.blank_share + FLOOR_WIDTH
    assert vague_counts == VAGUE_NAMES[area]


def test_no_function_is_longer_than_its_ceiling() -> None:
    assert [f"{source.path} {problem}" for source in measured_files() for problem in functions_too_long(source)] == []


def test_files_read_well() -> None:
    assert [f"{source.path} {problem}" for source in measured_files() if source.path != UNMEASURED
            for problem in hard_to_read(source)] == []


def test_no_builtin_stands_for_a_function_that_does_nothing() -> None:
    assert [f"{source.path} {problem}" for source in measured_files() for problem in builtins_as_no_ops(source)] == []


def test_a_class_name_stands_once() -> None:
    # the classes of flowspec/ have the names of those for which they stand in a user's program
    assert repeated_classes([source for source in measured_files() if source.room != "flowspec"]) == []


# --- each rule can fail -----------------------------------------------------------------------------------------------

PATH = "pipeline/stage.py"
STEPS = "    num_rows = 1\n" * LONG_BODY
ONE_WORD_NAMES = "".join(f"name{number} = 1\n" for number in range(ENOUGH_NAMES))


@pytest.mark.parametrize(("rule", "text"), [
    (functions_too_long, "def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION // 3)),
    (hard_to_read, ONE_WORD_NAMES),
    (hard_to_read, "def run_stage():\n" + STEPS),
    (hard_to_read, "found = 1\n"),
    (hard_to_read, "def f(place): ...\n"),
    (hard_to_read, "self.made = 1\n"),
    (builtins_as_no_ops, "class A:\n    met: Callable[[], object] = str"),
    (builtins_as_no_ops, "def f(forget: Callable[[], object] = int): ..."),
    (builtins_as_no_ops, "def f(*, forget: Callable[[], object] = int): ..."),
])
def test_every_rule_finds_a_file_that_breaks_it(rule, text):
    assert list(rule(Source(PATH, text)))


@pytest.mark.parametrize(("rule", "text"), [
    (functions_too_long, 'def f():\n    """' + "word " * 1000 + '"""\n' + "\n    # reason\n" * 1000 + "    x = 1\n"),
    (hard_to_read, ONE_WORD_NAMES.replace("name1", "row_name1")),
    (hard_to_read, "def run_stage():\n" + STEPS + "\n    num_rows = 1\n"),
    (hard_to_read, "x = 1\n"),
    (builtins_as_no_ops, "def f(size: int = 1, kind: type = int, read: Callable[[str], int] = read_size): ..."),
])
def test_no_rule_troubles_a_file_that_keeps_it(rule, text):
    assert not list(rule(Source(PATH, text)))


REASON = "a prompt may be continued after an interruption"


@pytest.mark.parametrize(("room", "count"), [
    (Room(1_000), 1_001),
    (Room(1_000), 979),
    (Room(1_000, [(100, REASON)]), 1_101),
    (Room(1_000, [(100, REASON)]), 1_077),
])
def test_a_room_off_its_line_is_reported(room, count):
    assert list(rooms_off_their_line({"sim": room}, {"sim": count}))


@pytest.mark.parametrize(("room", "count"), [
    (Room(1_000), 1_000),
    (Room(1_000), 980),
    (Room(1_000, [(100, REASON)]), 1_100),
])
def test_a_room_on_its_line_is_not_reported(room, count):
    assert not list(rooms_off_their_line({"sim": room}, {"sim": count}))


@pytest.mark.parametrize("rooms", [
    {"sim": Room(1_000, [(100, "")])},
    {"sim": Room(1_000, [(100, "the source as it stands")])},
    {"sim": Room(1_000, [(0, REASON)])},
    {"sim": Room(1_000, [(-1, REASON)])},
    {"sim": Room(1_000, [(100, REASON)]), "tp": Room(1_000, [(1, REASON)])},
])
def test_a_raise_without_a_reason_is_reported(rooms):
    assert list(unjustified_raises(rooms))


def test_a_raise_with_a_reason_is_not_reported():
    assert not list(unjustified_raises({"sim": Room(1_000, [(100, REASON), (7, REASON + " of power")])}))


@pytest.mark.parametrize(("text", "other_text"), [
    ("class Row: ...", "class Column: ...\nclass Row: ..."),
    ("class Row: ...", "Row = Tuple[int, str]"),
    ("Row = Tuple[int, str]", "class Table:\n    class Row: ..."),
])
def test_a_type_in_two_places_is_reported(text, other_text):
    assert len(repeated_classes([Source("a.py", text), Source("b.py", other_text)])) == 1


def test_names_that_are_no_types_may_stand_twice():
    text = "Row = TypeVar('Row')\nROWS = 1\ndef f():\n    Row = 1\n"
    assert repeated_classes([Source("a.py", text), Source("b.py", text)]) == []


def test_tokens_are_names_operators_numbers_and_strings():
    source = Source(PATH, '"""Page."""\n\nx = f"{a + b:{width}} of {c}" + "d"  # reason\n')
    assert token_count(source) == len(["x", "=", "f-string", "+", '"d"'])


@pytest.mark.parametrize(("path", "text", "room", "count"), [
    ("model/native/x.c", "/* reason */\nint x = 1;  // reason\n", "C", len(["int", "x", "=", "1", ";"])),
    ("run.sh", "# reason\nls $HOME\n", "shell", len(["ls", "$HOME"])),
    ("a/.ci/run", "ls\n", "shell", 1),
    ("docs/x.md", "Two words.\n", "docs", 2),
])
def test_other_languages_are_counted_without_comments(path, text, room, count):
    assert room_and_count(path, text) == (room, count)
