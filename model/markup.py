"""How families of models mark thoughts and calls of tools in their answers: one table, and a reader of answers.

A family is a row of FORMATS: the words of its template by which it is recognised, patterns of its calls, and one of the
functions that read a call. Only a format's own marks with the name of an offered tool are a call; all else stays text.
Patterns are those of the package regex, which can say that a text may yet match; a star in them has a limit.
"""
from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from typing import Any, Callable, Collection, Generator, Mapping, NamedTuple, Optional, Union

NAME, NEVER = r'(?P<name>[^\s"\\{}<>\[\]]{1,128})', "(?!)"
THOUGHTS_BEGIN, THOUGHTS_END = r"(?P<thoughts><think>|\[THINK\])", r"\s*+(?:</think>|\[/THINK\])"
OPEN_THOUGHTS = re.compile(r"(?:<think>|\[THINK\])\s*\Z")  # at the end of a prompt
OBJECT_HEAD = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
CALL_KEYS = r'(?=\{\s*"(?:name|arguments|parameters|type|function|id)"\s*:)'  # the first one of a call
PYTHON_WORDS = {"True": True, "False": False, "None": None}  # some templates show values as Python writes them
JSON_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), list: ("array",),
    dict: ("object",), type(None): ("null",)}
MAX_REPEATS = 200  # of a star in a pattern: so the work for a piece of an answer does not grow with the answer
Schemas = Mapping[str, Any]  # of the arguments of tools, by the names of the tools


class CallPart(NamedTuple):
    """A part of a call: first its name, then pieces of the JSON of its arguments."""

    name: str = ""
    arguments: str = ""


class Thought(NamedTuple):
    """A piece of the thoughts before an answer."""

    text: str


AnswerPart = Union[str, CallPart, Thought]  # a string is text of the answer itself
AnswerParts = Generator[Optional[AnswerPart], None, Any]  # None: more text is needed


class CallText(NamedTuple):
    """How a family writes calls: texts before all, between two and after all, and a call's up to and after arguments.

    `call` has the tool's name as NAME, and in JSON as "NAME". Without `between` there is one call only.
    """

    call: str
    call_end: str = ""
    before: str = ""
    between: str | None = None
    after: str = ""


class CallFormat(NamedTuple):
    """A family's format of calls; the fields that are texts are patterns.

    A pattern must not end in what may be missing, since it would match before that comes.
    """

    template_mark: str  # in the templates of the family
    marks: tuple[str, ...]  # texts of its format, which an answer shows even if they are special tokens
    opening: str  # what begins a call, or several
    read: Callable[[CallReader, Any], AnswerParts]  # reads what follows a match of `opening`
    closings: tuple[str, ...] = ()  # what may stand after a call, in this order
    bare_opening: str = NEVER  # what begins a call at the beginning of an answer, too
    pair_name: str = NEVER  # of an argument outside JSON ...
    pair_ends: tuple[str, str] = (NEVER, NEVER)  # ... and what stands before and after its value
    text: CallText | None = None  # None: no grammar writes this format
    has_system_tools: bool = False  # whether templates read the tools from the system message
    also: tuple[CallFormat, ...] = ()  # formats with the same mark

    @property
    def has_calls(self) -> bool:
        return self.opening != NEVER


class Braces:
    """A counter of open braces in an object that arrives in pieces; braces in strings do not count."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._after_backslash = False  # whether the next letter is in a string, or after a backslash

    def end(self, text: str) -> int:
        """Return where the object ends in the text that follows; -1 if it does not end there."""
        for end, letter in enumerate(text, 1):
            if self._after_backslash or letter == "\\":
                self._after_backslash = not self._after_backslash
            elif letter == '"':
                self._in_string = not self._in_string
            elif letter in "{}" and not self._in_string:
                self._depth += 1 if letter == "{" else -1
                if not self._depth:
                    return end
        return -1


# --- the reader -------------------------------------------------------------------------------------------------------

class CallReader:
    """A parser of an answer's text as it arrives: text, thoughts, and of a call first the name, then its arguments.

    Without `schemas` any name is a tool's. `in_thoughts` is whether the prompt has begun the thoughts.
    """

    def __init__(self, call_format: CallFormat | None, schemas: Schemas | None = None, in_thoughts: bool = False
                 ) -> None:
        self.format = call_format or THINKING
        self.schemas = schemas
        self.unread = ""
        self.is_complete = False  # whether nothing follows the unread text
        self._in_thoughts = in_thoughts
        self._blanks: list[str] = []  # held back: they belong to a text if one follows
        self._holds_blanks, self._drops_blanks = True, False
        self._has_parts = self.line_has_text = False  # whether there are parts so far; whether the last line has text
        self._part_iterator = self._all_parts()

    def read(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain once this text follows."""
        self.unread += text
        return [piece for piece in takewhile(bool, self._part_iterator) if piece]

    def finish(self) -> list[AnswerPart]:
        """Return the last parts; the beginning of what might have become a call is text."""
        self.is_complete = True
        return [piece for piece in self._part_iterator if piece]

    def take(self, size: int) -> str:
        """Remove the first `size` characters of the unread text, and return them."""
        piece, self.unread = self.unread[:size], self.unread[size:]
        return piece

    def matched(self, pattern: str) -> Generator[None, None, Any]:
        """Take a match at the beginning of the unread text, and return it; None if there is none."""
        while (match := compiled(pattern).match(self.unread, partial=not self.is_complete)) and match.partial:
            yield None
        if match:
            self.take(match.end())
        return match

    def text_parts(self, size: int) -> AnswerParts:
        """Yield the first `size` characters of the unread text, unless they are blanks to hold back."""
        piece = self.take(size)
        self._blanks.append(piece)
        if not piece or (self._holds_blanks and not piece.strip()):
            return

        piece = "".join(self._blanks).lstrip() if self._drops_blanks else "".join(self._blanks)
        self._blanks, self._holds_blanks, self._drops_blanks, self._has_parts = [], False, False, True
        line = piece.rpartition("\n")[2]
        self.line_has_text = bool(line.strip()) or (self.line_has_text and line == piece)
        yield piece

    def thought_parts(self, end_pattern: str = THOUGHTS_END) -> AnswerParts:
        """Yield thoughts up to their end, without blanks around them; the blanks after them are no text, either."""
        end, has_begun = None, False
        while not end or end.partial:
            end = compiled(end_pattern).search(self.unread, partial=not self.is_complete)
            piece = self.take(end.start() if end else len(self.unread))
            thought = piece if has_begun else piece.lstrip()
            if thought:
                has_begun = True
                yield Thought(thought)

            if end and not end.partial:
                self.take(end.end() - end.start())
            elif self.is_complete:
                break
            else:
                yield None

        self.end_block(drops_blanks=True)

    def argument_parts(self) -> AnswerParts:
        """Yield the arguments of a call, an object in JSON, up to its closing brace."""
        braces = Braces()
        while (object_end := braces.end(self.unread)) < 0 and not self.is_complete:
            if self.unread:
                yield CallPart(arguments=self.take(len(self.unread)))
            yield None

        if self.unread:
            yield CallPart(arguments=self.take(object_end if object_end >= 0 else len(self.unread)))

    def object_text(self, braces: Braces) -> Generator[None, None, str]:
        """Take the text up to the brace with which all that `braces` has counted are closed, and return it."""
        pieces = []
        while (object_end := braces.end(self.unread)) < 0 and not self.is_complete:
            pieces.append(self.take(len(self.unread)))
            yield None

        pieces.append(self.take(object_end if object_end >= 0 else len(self.unread)))
        return "".join(pieces)

    def closing_parts(self) -> AnswerParts:
        """Skip what closes a call, and return whether there is such a text."""
        is_closed = False
        for pattern in self.format.closings:
            closing = yield from self.matched(pattern)
            is_closed = is_closed or bool(closing)
        self.end_block()
        return is_closed

    def end_block(self, drops_blanks: bool = False) -> None:
        """Note the end of a call or of thoughts: blanks around it are no text."""
        self._blanks, self._holds_blanks, self._drops_blanks, self._has_parts = [], True, drops_blanks, True
        self.line_has_text = False

    def offers(self, opening: Any) -> bool:
        """Return whether the match of an opening names no tool, or one that may be called."""
        name = opening.groupdict().get("name")
        return name is None or self.schemas is None or name in self.schemas

    def _all_parts(self) -> AnswerParts:
        if self._in_thoughts:
            yield from self.thought_parts()
        bare_opening = yield from self.matched(self.format.bare_opening)
        if bare_opening and self.offers(bare_opening):
            yield from self.format.read(self, bare_opening)
        elif bare_opening:
            self.unread = bare_opening[0] + self.unread

        # thoughts, calls, and the text between them
        formats = (self.format, *self.format.also)
        openings = compiled("|".join([THOUGHTS_BEGIN, *(call_format.opening for call_format in formats)]))
        while self.unread or not self.is_complete:
            opening = openings.search(self.unread, partial=not self.is_complete)
            yield from self.text_parts(opening.start() if opening else len(self.unread))
            if not opening or opening.partial:
                if not self.is_complete:
                    yield None
                continue

            size = opening.end() - opening.start()
            if self.line_has_text if opening["thoughts"] else not self.offers(opening):  # it is only mentioned
                yield from self.text_parts(size)
                continue

            if not opening["thoughts"]:
                self.format = next(row for row in formats if compiled(row.opening).match(self.unread))
            self.take(size)
            yield from self.thought_parts() if opening["thoughts"] else self.format.read(self, opening)

        if not self._has_parts:
            yield "".join(self._blanks)


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Return a compiled pattern of the package regex, which comes with transformers; its stars are bounded."""
    bounded_pattern = pattern.replace("*", f"{{0,{MAX_REPEATS}}}")
    return import_module("regex").compile(bounded_pattern, import_module("regex").DOTALL)


# --- calls, one function for each way of writing them -----------------------------------------------------------------

def object_calls(reader: CallReader, opening: Any) -> AnswerParts:
    """Read calls that are JSON objects with a name and arguments, one after another or in a list."""
    before_object = opening[0]
    while True:
        head = yield from reader.matched(OBJECT_HEAD)
        if head and not reader.offers(head):
            reader.unread = head[0] + reader.unread

        if head and reader.offers(head):
            yield CallPart(head["name"])
            yield from reader.argument_parts()
            yield from _skipped_object_end(reader)
        elif not (yield from _whole_object(reader, before_object)):
            return

        is_closed = yield from reader.closing_parts()
        between = None if is_closed else (yield from reader.matched(r"[\s,;]*(?=\{)"))
        if not between:
            return
        before_object = between[0]


def _skipped_object_end(reader: CallReader) -> AnswerParts:
    """Skip what follows the arguments in the object of a call, such as an id."""
    other_keys = yield from reader.matched(r'\s*(?:\}|,\s*(?="))')
    if not other_keys or other_keys[0].endswith("}"):
        return

    yield from reader.object_text(Braces(depth=1))


def _whole_object(reader: CallReader, before_object: str) -> AnswerParts:
    """Read an object with other keys, or in another order, and return whether it is a call; if not, yield its text."""
    begins_call = yield from reader.matched(CALL_KEYS)
    object_text = (yield from reader.object_text(Braces())) if begins_call else ""

    name, arguments = _named_call(object_text, has_mark=bool(before_object.strip("\n ,;[")))
    is_offered = bool(name) and (reader.schemas is None or name in reader.schemas)
    if is_offered:
        yield CallPart(name)
        yield CallPart(arguments=arguments)
    else:
        reader.unread = before_object + object_text + reader.unread
        yield from reader.text_parts(len(before_object) + len(object_text))
    return is_offered


def _named_call(object_text: str, has_mark: bool) -> tuple[str, str]:
    """Return the name and the arguments of a call in an object; an empty name if it is no call.

    Arguments may be a text with JSON; after a mark they may be missing.
    """
    try:
        call = json.loads(object_text)
        call = call.get("function", call) if isinstance(call.get("function", ""), dict) else call

        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if arguments is None and (has_mark or {"arguments", "parameters"} & call.keys()):
            arguments = {}

        argument_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        is_call = isinstance(name, str) and isinstance(json.loads(argument_text), dict)

    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return "", ""
    return (name, argument_text) if is_call else ("", "")


def named_call(reader: CallReader, opening: Any) -> AnswerParts:
    """Read the arguments of a call, an object in JSON, after the tool's name."""
    yield CallPart(opening["name"])
    yield from reader.argument_parts()
    yield from reader.closing_parts()


def paired_call(reader: CallReader, opening: Any) -> AnswerParts:
    """Read the arguments of a call, each as its name and its value, which is a text or JSON."""
    yield CallPart(opening["name"])
    schema = (reader.schemas or {}).get(opening["name"])
    properties = schema.get("properties") if isinstance(schema, dict) else None
    before_pair = "{"

    while pair := (yield from reader.matched(reader.format.pair_name)):
        value_begin, value_end = reader.format.pair_ends
        yield from reader.matched(value_begin)
        value_text, has_end = yield from _text_before(reader, value_end)

        name = pair["key"].strip()
        yield CallPart(arguments=f"{before_pair}{_json(name)}: ")
        if not has_end:  # the answer is cut off here
            yield CallPart(arguments=_json(value_text)[:-1])
            return

        yield from reader.matched(value_end)
        value_schema = properties.get(name) if isinstance(properties, dict) else None
        yield CallPart(arguments=_json(_value(value_text, value_schema)))
        before_pair = ", "

    is_closed = yield from reader.closing_parts()

    begins_pair = compiled(reader.format.pair_name).match(reader.unread, partial=True)
    if begins_pair and not is_closed and reader.unread.strip():  # the answer is cut off in the name of an argument
        reader.take(len(reader.unread))
        yield CallPart(arguments=before_pair)
    elif is_closed or reader.unread.strip():
        yield CallPart(arguments="{}" if before_pair == "{" else "}")


def _text_before(reader: CallReader, pattern: str) -> AnswerParts:
    """Take the text before a match, and return it, and whether the match comes."""
    pieces = []
    while True:
        match = compiled(pattern).search(reader.unread, partial=not reader.is_complete)
        pieces.append(reader.take(match.start() if match else len(reader.unread)))

        if reader.is_complete or (match and not match.partial):
            return "".join(pieces), bool(match)
        yield None


def _value(text: str, schema: Any) -> Any:
    """Return an argument's value: JSON of a type that its schema allows, or else the text."""
    types = schema.get("type") if isinstance(schema, dict) else None
    allowed = [types] if isinstance(types, str) else types
    try:
        value = PYTHON_WORDS[text.strip()] if text.strip() in PYTHON_WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_allowed = not isinstance(allowed, list) or any(name in allowed for name in JSON_TYPES[type(value)])
    return value if is_allowed and not isinstance(value, str) else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def python_calls(reader: CallReader, opening: Any) -> AnswerParts:
    """Read calls as Python writes them, in a list; they are parsed, and nothing is executed."""
    list_text, _ = yield from _text_before(reader, reader.format.closings[0])
    calls = _parsed_calls(list_text)
    if calls and all(reader.schemas is None or name in reader.schemas for name, _ in calls):
        for name, arguments in calls:
            yield CallPart(name)
            yield CallPart(arguments=arguments)
        yield from reader.closing_parts()
    else:
        reader.unread = opening[0] + list_text + reader.unread
        yield from reader.text_parts(len(opening[0]) + len(list_text))


def _parsed_calls(list_text: str) -> list[tuple[str, str]]:
    """Return the names of calls with their arguments in JSON; none if the text is anything but calls with literals."""
    try:
        calls = ast.parse(list_text.strip(), mode="eval").body.elts  # type: ignore[attr-defined]
        if any(call.args or any(pair.arg is None for pair in call.keywords) for call in calls):
            return []
        return [(call.func.id, _json({pair.arg: ast.literal_eval(pair.value) for pair in call.keywords}))
                for call in calls]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return []


def channel_message(reader: CallReader, opening: Any) -> AnswerParts:
    """Read a message of GPT-OSS's format, whose header names a channel, and for a call a recipient."""
    header = opening[0]
    if HEADER_END not in header:  # the end of a message
        return

    channel = CHANNEL_NAME.search(header)
    recipient = RECIPIENT.search(header)
    if recipient and reader.offers(recipient) and (yield from reader.matched(r"\s*(?=\{)")):
        yield CallPart(recipient["name"])
        yield from reader.argument_parts()
        reader.end_block()
    elif channel and channel[1] == "analysis":
        yield from reader.thought_parts(rf"\s*+(?:{MESSAGE_END})")
    else:
        before_text = header if "to=" in header else "\n\n" * reader.line_has_text
        reader.unread = before_text + reader.unread
        yield from reader.text_parts(len(before_text))


# --- the table --------------------------------------------------------------------------------------------------------

HEADER_END, HARMONY_END = "<|message|>", "<|return|>"
MESSAGE_END = r"<\|end\|>|(?=<\|start\|>|<\|channel\|>)"
HEADER_REST = r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(rf"\bto=functions\.{NAME}")
HARMONY = CallFormat(
    r"<\|channel\|>", ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>"),
    rf"(?:<\|start\|>[^<]*(?:<\|channel\|>[^<]*)?|<\|channel\|>[^<]*){HEADER_REST}|<\|end\|>", channel_message,
    bare_opening=rf"\s*to=[^<]*<\|channel\|>[^<]*{HEADER_REST}",
    text=CallText("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"))
DEEPSEEK = CallFormat(
    "<｜tool▁call", ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                    "<｜tool▁calls▁end｜>"),
    rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:\w*<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>)?\s*"
    r"(?:```(?:json)?\s*)?(?=\{)", named_call,
    closings=(r"\s*```", r"\s*<｜tool▁call▁end｜>", r"\s*<｜tool▁calls▁end｜>"),
    text=CallText("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>",
                  "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"))
GLM = CallFormat(
    "<arg_key>", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    rf"<tool_call>\s*{NAME}\s*(?=<arg_key>|</tool_call>)", paired_call,
    closings=(r"\s*</tool_call>",), pair_name=r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    pair_ends=(NEVER, "</arg_value>"))
QWEN_CODER = CallFormat(
    "<function=", ("<tool_call>", "</tool_call>"), rf"(?:<tool_call>\s*)?<function={NAME}>", paired_call,
    closings=(r"\s*</function>", r"\s*</tool_call>"), pair_name=r"\s*<parameter=(?P<key>[^>]*)>",
    pair_ends=(r"\n", r"\n?</parameter>"))
GRANITE = CallFormat(
    r"<\|tool_call\|>", ("<|tool_call|>",), r"<\|tool_call\|>\s*\[?\s*(?=\{)", object_calls,
    closings=(r"\s*\]", r"\s*<\|/tool_call\|>"), bare_opening=r"\s*\[\s*(?=\{)",
    text=CallText('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", ", ", "]"))
PHI = GRANITE._replace(
    template_mark=r"<\|/?tool\|>", marks=("<|tool_call|>", "<|/tool_call|>"),
    opening=r"(?:<\|tool_call\|>|functools)\s*\[?\s*(?=\{)", bare_opening=NEVER,
    text=CallText('{"name": "NAME", "arguments": ', "}", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    has_system_tools=True)
MISTRAL_NAMED = CallFormat(
    r"\[ARGS\]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    rf"\[TOOL_CALLS\]\s*{NAME}\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{{)", named_call,
    text=CallText("[TOOL_CALLS]NAME[ARGS]", between=""))
MISTRAL = CallFormat(
    r"\[TOOL_CALLS\]", MISTRAL_NAMED.marks, r"\[TOOL_CALLS\]\s*\[?\s*(?=\{)", object_calls, closings=(r"\s*\]",),
    text=CallText('{"name": "NAME", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]"))
HERMES = CallFormat(
    "<tool_call>", ("<tool_call>", "</tool_call>"), r"<tool_call>\s*\[?\s*(?=\{)", object_calls,
    closings=(r"\s*\]", r"\s*</tool_call>"),
    text=CallText('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
    also=(GLM, QWEN_CODER))
LLAMA = CallFormat(
    r'<\|python_tag\|>|"name"\s*:[^\n]{0,80}"parameters"\s*:', ("<|python_tag|>",), r"<\|python_tag\|>\s*(?=\{)",
    object_calls, bare_opening=r"\s*(?:<\|python_tag\|>\s*)?(?=\{)",
    text=CallText('{"name": "NAME", "parameters": ', "}", between="; "))
GLM4 = CallFormat(
    r"<\|observation\|>", (), rf"\n{NAME}\n(?=\{{)", named_call, bare_opening=rf"\s*{NAME}\n(?=\{{)",
    text=CallText("NAME\n"))
LFM2 = CallFormat(
    r"<\|tool_list_start\|>|<\|tool_call_start\|>|List of tools: ", ("<|tool_call_start|>", "<|tool_call_end|>"),
    r"<\|tool_call_start\|>\s*(?=\[)", python_calls, closings=(r"\s*<\|tool_call_end\|>",))
THINKING = CallFormat(r"</?think>|\[THINK\]", ("<think>", "</think>"), NEVER, named_call)  # only thoughts
FORMATS = (  # the first that a template fits
    HARMONY, DEEPSEEK, GLM, QWEN_CODER, PHI, GRANITE, MISTRAL_NAMED, MISTRAL, HERMES, LLAMA, GLM4, LFM2, THINKING)


def dialect_of(template: str) -> CallFormat | None:
    """Return the format of a template's calls and thoughts; None if it has neither."""
    for call_format in FORMATS:
        needs_tools = call_format.has_calls and call_format is not HARMONY
        if re.search(call_format.template_mark, template) and ("tools" in template or not needs_tools):
            return call_format
    return None


def shown_marks(names: Collection[str]) -> frozenset[str]:
    """Return which of a tokenizer's added tokens are marks of a format that it has, so that an answer shows them."""
    token_names = frozenset(names)
    formats = [call_format for call_format in FORMATS if token_names.issuperset(call_format.marks[:1])]
    return token_names.intersection(mark for call_format in formats for mark in call_format.marks)
