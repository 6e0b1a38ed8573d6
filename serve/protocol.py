"""OpenAI's protocol: the fields of a body, and the input of the pipeline that follows from them.

This module knows nothing about HTTP or engines. A field that is invalid, or requests something that the pipeline cannot
do, is `Refused` by name; unknown fields are ignored.
"""
from __future__ import annotations

import gc
import json
import re
import secrets
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, Literal, Mapping, NamedTuple, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from config.files import SURROGATE, has_half_character
from config.keys import allowed_values
from config.run_config import SAMPLING, RunConfig
from config.schema.untrusted import one_line, parse_object, short_repr
from config.values import Range
from launch.pipeline import Prompt
from model.grammar import Guide
from model.text import own_template, taken_variables
from serve.fields import unsupported_field
from serve.tools import CallFormat, calls_of, dialect_of

MOST_CHOICES = 16  # choices of one request: prompts times n
MOST_STOPS = 4
SEEDS = 1 << 64
ALL = -1  # some clients send this for top_k=0
TOKEN = re.compile("[0-9]{1,9}")
ROLES = {"developer": "system"}  # role of a message -> its name in templates, if different
TYPES = ("str", "NamedTool")  # pydantic's names of types in the place of an error, for fields with several types
Facts = Dict[str, Any]  # of JSON
Item = TypeVar("Item")
Renamed = Callable[[Facts], Facts]
Items = Annotated[list[Item], Field(fail_fast=True)]  # validated up to the first error: there may be a million
CHOOSING = tuple(name for name in SAMPLING if name != "logit_bias")  # all numbers
MOST_BIASES, MOST_BIAS = 1024, 100.0  # tokens of a logit_bias, and the largest value
UNLIMITED = -1  # in the place of a number of tokens: as many as fit
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # the first that is given counts
OF_RUNS = allowed_values(RunConfig)
NUMBERS = {  # field -> its range
    **{name: OF_RUNS[name] for name in CHOOSING},
    **dict.fromkeys(TOKEN_LIMITS, OF_RUNS["max_new_tokens"]),
    "n": Range(1, MOST_CHOICES), "top_logprobs": Range(0, 20), "logprobs": Range(0, 5)}


class Refused(Exception):
    """A request that is not answered: the message, the field, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400,
                 retry: int = 0) -> None:
        super().__init__(message)
        self.message, self.param, self.code = one_line(message), param, code
        self.status, self.retry = status, retry  # seconds until the client may retry; 0: a retry changes nothing

    @property
    def body(self) -> Facts:
        """The error in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Choice(NamedTuple):
    """The input of the pipeline for one choice of an answer: a prompt, its template, and options.

    `field` is the field of the prompt, `variables` are those of the template in addition to the messages, and `echo` is
    whether the answer begins with the prompt. `guide` is the grammar of the answer, and `guided_by` the field of that.
    `dialect` is the format of tool calls in the answer, None if it cannot have any. A `prompt_only` answer ends with
    the prompt.
    """

    prompt: Prompt
    template: str
    options: Mapping[str, Any] = {}
    field: str = "prompt"
    variables: Mapping[str, Any] = {}
    echo: bool = False
    guide: Guide | None = None
    guided_by: str = ""
    dialect: CallFormat | None = None
    prompt_only: bool = False

    @property
    def wants_logprobs(self) -> bool:
        return self.options.get("logprobs") is not None


class Strict(BaseModel):
    """A body with strictly typed fields; unknown fields are ignored, and null counts as missing."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None}


def _whole(number: Any) -> Any:
    """Return 8.0 as 8, since some clients know one type of numbers only."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _listed(content: Any) -> Any:
    """Return a single object as a list of it."""
    return [content] if isinstance(content, dict) else content


def _unless_empty(text: Any) -> Any:
    """Return None for an empty text, with which clients of llama.cpp leave a grammar out."""
    return None if text == "" else text


Whole = Annotated[int, BeforeValidator(_whole)]


class StreamOptions(Strict):
    include_usage: bool = False  # whether a stream ends with its usage


class ContentPart(Strict):
    type: str
    text: str = ""


class CalledFunction(Strict):
    name: str
    arguments: str = "{}"  # JSON


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def shown(self) -> Facts:
        """The call as templates read it: with the arguments as an object, if they are valid JSON."""
        facts = self.model_dump()
        with suppress(ValueError):
            facts["function"]["arguments"] = parse_object(self.function.arguments.encode(), "arguments")
        return facts


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[ContentPart] | None, BeforeValidator(_listed)] = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str = ""
    name: str = ""

    def shown(self, place: str, own: bool) -> Facts:
        """Return the message as templates read it; `own`: for the tokenizer's own template, which may support tools."""
        if self.tool_calls and not own:
            raise Refused(f"{place}.tool_calls is not supported by this model's template: leave it out",
                          f"{place}.tool_calls", "unsupported_parameter")
        facts = {"role": ROLES.get(self.role, self.role), "content": self._text(f"{place}.content")}
        calls = [call.shown for call in self.tool_calls or ()]
        extra = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return {**facts, **{key: value for key, value in extra.items() if value and own}}

    def _text(self, place: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type != "text":
                name = f"{place}.{index}.type"
                raise Refused(f"{name} is {short_repr(part.type)}, which is not supported: send text only", name,
                              "unsupported_parameter")
        return "".join(part.text for part in self.content)


class Function(Strict):
    name: str
    description: str = ""
    parameters: Facts = {}


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: Function


class Tool(NamedTool):
    type: Literal["function"]


class Schema(Strict):
    name: str = ""
    schema_: Facts = Field({}, alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema_: Facts | None = Field(default=None, alias="schema")  # llama.cpp's form

    @property
    def guide(self) -> Guide | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        if self.type == "json_schema" and schema is None:
            raise Refused("response_format.json_schema is missing: give it with a schema", "response_format")
        return Guide.json_schema(schema)


class StructuredOutputs(Strict):
    """vLLM's present form of a grammar."""

    json_: Facts | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_additional_properties: bool = False

    @property
    def guide(self) -> Guide | None:
        for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
            if getattr(self, name):
                raise Refused(f"structured_outputs.{name} is not supported: leave it out", "structured_outputs",
                              "unsupported_parameter")
        given = {"guided_json": self.json_, "guided_regex": self.regex, "guided_choice": self.choice,
                 "guided_grammar": self.grammar}
        guides = [GUIDES[name](value) for name, value in given.items() if value is not None]
        guides += [Guide.json_schema()] if self.json_object else []
        if len(guides) > 1:
            raise Refused("structured_outputs has several grammars: give one of them", "structured_outputs")
        return guides[0] if guides else None


def _json_guide(schema: Facts | str) -> Guide:
    return Guide("json_schema", schema) if isinstance(schema, str) else Guide.json_schema(schema)


def _choice_guide(texts: list[str]) -> Guide:
    if not texts:
        raise Refused("the list of texts to choose from is empty: give some", "guided_choice")
    return Guide("choice", json.dumps(texts))


GUIDES: dict[str, Callable[[Any], Guide | None]] = {  # fields that name a grammar of the answer
    "response_format": lambda form: form.guide,
    "structured_outputs": lambda form: form.guide,
    **dict.fromkeys(("guided_json", "json_schema"), _json_guide),
    "guided_choice": _choice_guide,
    **dict.fromkeys(("guided_regex", "regex"), partial(Guide, "regex")),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), partial(Guide, "grammar"))}


class Body(Strict):
    """The fields that chats and completions share. Missing options are those with which the server was started."""

    model: str = ""
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    n_predict: Whole | None = None  # llama.cpp's name
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Whole | None, BeforeValidator(lambda top: 0 if top == ALL else top)] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: Whole | None = None
    n: Whole = 1
    stop: Annotated[Items[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")
    guided_json: Facts | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Facts | str | None = None  # of llama.cpp and SGLang, as the next
    regex: Annotated[str | None, BeforeValidator(_unless_empty)] = None
    ebnf: Annotated[str | None, BeforeValidator(_unless_empty)] = None
    grammar: Annotated[str | None, BeforeValidator(_unless_empty)] = None
    ignore_eos: bool | None = None
    user: str = ""
    flowspec_tree: bool = False  # FlowSpec's own: a stream also has `tree` events, which show the guesses

    @property
    def reported(self) -> Facts:
        """The options of an answer that request log-probabilities."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """The most tokens of the answer: UNLIMITED, 0 for the prompt alone, or None if none is given."""
        limits = [getattr(self, name) for name in TOKEN_LIMITS]
        return next((limit for limit in limits if limit is not None), None)

    @property
    def other_limits(self) -> tuple[int, ...]:
        """Numbers in the place of a limit that have a meaning of their own."""
        return (UNLIMITED,)

    def options(self, config: RunConfig) -> list[Facts]:
        """Return the options of each of `n` answers, with consecutive seeds."""
        given = {key: getattr(self, key) for key in CHOOSING}
        given["logit_bias"] = ",".join(f"{token}:{value:.6f}" for token, value in self.logit_bias.items()) or None
        limit = self.token_limit
        given["max_new_tokens"] = config.max_length if limit == UNLIMITED else limit if limit is None else max(1, limit)
        given["ignore_eos"] = self.ignore_eos
        options = {key: value for key, value in given.items() if value is not None}
        options.update(self.reported)
        if self.stop is not None:
            options["stop"] = self.stop
        sampled = options.get("temperature", config.temperature) > 0
        first = secrets.randbits(32) if sampled else config.seed
        if self.seed is not None:
            first = self.seed
        return [{**options, "seed": (first + number) % SEEDS} for number in range(self.n)]

    @property
    def guides(self) -> dict[str, Guide]:
        """The grammars that the answer has to follow, by the field that names each."""
        given = {name: getattr(self, name) for name in GUIDES}
        found = {name: GUIDES[name](value) for name, value in given.items() if value is not None}
        return {name: guide for name, guide in found.items() if guide}

    def choices(self, config: RunConfig) -> list[Choice]:
        """Return the input of the pipeline for each choice."""
        found = []
        for choice in self.asked(config):
            for field, guide in self.guides.items():
                choice = choice._replace(guide=guide, guided_by=field)
            found += [choice._replace(options=options) for options in self.options(config)]
        return found

    def asked(self, config: RunConfig) -> list[Choice]:
        """Return a choice for each prompt, still without its options."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Refused for numbers out of range, invalid biases or stop texts, and several grammars."""
        for name, allowed in NUMBERS.items():
            value = getattr(self, name, None)
            if value is None or name in TOKEN_LIMITS and value in self.other_limits:
                continue
            if not allowed.holds(value):
                raise Refused(f"{name}={short_repr(value)} is not possible: give {allowed.advice}", name)
        if self.seed is not None and not -SEEDS < self.seed < SEEDS:
            raise Refused(f"seed={short_repr(self.seed)} is not possible: give a number below 2 ** 64", "seed")
        self._check_biases()
        if len(self.guides) > 1:
            raise Refused(f"{' and '.join(self.guides)} are both given: give one of them", [*self.guides][-1])
        stops = self.stop or []
        if len(stops) > MOST_STOPS:
            raise Refused(f"stop has {len(stops)} texts: give {MOST_STOPS} at most", "stop")
        if any(map(SURROGATE.search, stops)):
            raise Refused("stop has half a character: give whole ones", "stop")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MOST_BIASES:
            raise Refused(f"logit_bias has {len(self.logit_bias)} tokens: give {MOST_BIASES} at most", "logit_bias")
        for token, value in self.logit_bias.items():
            if not TOKEN.fullmatch(token) or not abs(value) <= MOST_BIAS:
                raise Refused(f"logit_bias.{one_line(token)}={short_repr(value)} is not possible: give token ids, and "
                              f"numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}", "logit_bias")


class Chat(Body):
    """A body of /v1/chat/completions."""

    messages: Items[ChatMessage]
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # whether forced calls may be several
    chat_template_kwargs: Facts = {}  # variables of a tokenizer's own template
    echo: bool = False  # vLLM's, which is not supported
    logprobs: bool = False
    top_logprobs: Whole | None = None

    @property
    def reported(self) -> Facts:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    def check(self) -> None:
        super().check()
        if self.echo:
            raise Refused("echo is of /v1/completions: leave it out", "echo", "unsupported_parameter")
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs: add logprobs=true, or leave it out", "top_logprobs")
        if self.tools and self.logprobs:
            raise Refused("logprobs with tools is not supported: leave one of them out", "logprobs")
        if self.must_call and not self.called:
            raise Refused("tool_choice names no tool of this request: add it to tools, or leave it out", "tool_choice")
        if self.must_call and self.guides:
            raise Refused(f"{next(iter(self.guides))} and tool_choice exclude each other: leave one of them out",
                          "tool_choice")

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def called(self) -> dict[str, Facts]:
        """The functions that may be called, with the schemas of their arguments."""
        known = {tool.function.name: tool.function.parameters for tool in self.tools}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return {name: known[name]} if name in known else {}
        return {} if self.tool_choice == "none" else known

    def _dialect(self, config: RunConfig) -> CallFormat | None:
        """Return the format of tool calls in the answer, None if it cannot have any."""
        if not self.called:
            return None
        dialect = _dialect_of(config.first_folder, config.chat_template) if config.uses_jinja else None
        if dialect is None:
            raise Refused("tools is not supported, since this model's template does not support them: leave it out, "
                          "or serve with template=FILE, a template that does", "tools",
                          "unsupported_parameter")
        return dialect

    def asked(self, config: RunConfig) -> list[Choice]:
        own = config.uses_jinja
        messages = [message.shown(f"messages.{number}", own) for number, message in enumerate(self.messages)]
        if not messages:
            raise Refused("messages is empty: send one with the role user", "messages")
        self._check_variables(config)
        dialect, variables = self._dialect(config), self.chat_template_kwargs
        if dialect:
            variables = {**variables, "tools": [tool.model_dump() for tool in self.tools]}
        choice = Choice(messages, config.template, field="messages", variables=variables, dialect=dialect)
        if dialect and self.must_call:
            several = self.parallel_tool_calls and self.tool_choice == "required"
            choice = choice._replace(guide=calls_of(self.called, dialect, several), guided_by="tools")
        return [choice]

    def _check_variables(self, config: RunConfig) -> None:
        """Raise Refused for variables that the template does not read."""
        field = "chat_template_kwargs"
        if not self.chat_template_kwargs:
            return
        if not config.uses_jinja:
            raise Refused(f"{field} is not supported, since template={config.template} reads only the messages: "
                          "leave it out, or start the server with template=own", field, "unsupported_parameter")
        for name in sorted(taken_variables().intersection(self.chat_template_kwargs)):
            raise Refused(f"{field}.{one_line(name)} is reserved: leave it out", f"{field}.{name}",
                          "unsupported_parameter")


class Completion(Body):
    """A body of /v1/completions: prompts are continued as they are, without a template."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: bool = False
    logprobs: Whole | None = None  # number of likeliest tokens to report

    @property
    def reported(self) -> Facts:
        return {} if self.logprobs is None else {"logprobs": self.logprobs, "prompt_logprobs": self.echo}

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in order; a list of numbers is one prompt."""
        one = isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt)
        return cast("list[Prompt]", [self.prompt] if one else self.prompt)

    def asked(self, config: RunConfig) -> list[Choice]:
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise Refused(f"{len(self.prompts)} prompts with n={self.n} are too many answers: request at "
                          f"most {MOST_CHOICES}", "prompt")
        if not all(self.prompts):
            raise Refused("prompt is empty: give a text, or a list of token ids", "prompt")
        prompt_only = self.token_limit == 0
        return [Choice(prompt, "none", echo=self.echo, prompt_only=prompt_only) for prompt in self.prompts]

    @property
    def other_limits(self) -> tuple[int, ...]:
        return (UNLIMITED, 0) if self.echo else (UNLIMITED,)


class ToTokenize(Chat):
    """A body of /tokenize: a text without a template, or a chat in its template."""

    messages: Items[ChatMessage] = []
    prompt: str | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == ("messages" not in self.model_fields_set):
            raise Refused("give either prompt or messages", "prompt")

    def asked(self, config: RunConfig) -> list[Choice]:
        return super().asked(config) if self.prompt is None else [Choice(self.prompt, "none")]


@lru_cache(maxsize=8)
def _dialect_of(folder: Path, chat_template: str) -> CallFormat | None:
    return dialect_of(own_template(folder, chat_template))


def read_body(data: bytes, kind: type[Any], renamed: Renamed = dict) -> Any:
    """Return the body as `kind`, after `renamed` has translated its fields; raise Refused for the first invalid one.

    Call this only on the event loop's thread. A million small lists would trigger useless garbage collections.
    """
    gc.disable()
    try:
        found = parse_object(data, "the body", "send one JSON object")
        given = renamed({name: value for name, value in found.items() if value is not None})
        name = unsupported_field(given)
        if name:
            raise Refused(f"{name} is not supported: leave it out", name, "unsupported_parameter")
        body = kind.model_validate(given)
        body.check()
        for name, value in found.items():
            if has_half_character(data.decode(), value):
                raise Refused(f"{name} has half a character (a surrogate): write \\u escapes in pairs", name)
        return body
    except ValidationError as error:
        place, wrong = _first_error(error)
        raise Refused(f"{place}: {wrong}", place) from None
    except ValueError as error:
        raise Refused(str(error), code="invalid_json") from None
    finally:
        gc.enable()


def _first_error(error: ValidationError) -> tuple[str, str]:
    """Return the place of an invalid field, and what is wrong with it.

    For a field with several types, pydantic reports an error for each type, with the type's name in the place. The
    longest place is taken, since it belongs to the type that fits best.
    """
    errors = error.errors(include_url=False, include_context=False)
    furthest = max(errors, key=lambda one: len(one["loc"]))
    words = [str(word) for word in furthest["loc"] if word not in TYPES]
    place = ".".join(word for word in words if word.isidentifier() or word.isdigit())
    return place or "body", furthest["msg"]
