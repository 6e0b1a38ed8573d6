"""OpenAI's protocol: what a body may say, and what the pipeline is asked then.

It knows nothing about HTTP or engines. Every field that is wrong, or means something that the pipeline cannot do, is
`Refused` by its name; fields that are unknown are ignored.
"""
from __future__ import annotations

import gc
import json
import re
import secrets
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Callable, Dict, Literal, Mapping, NamedTuple, Sequence, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from config.files import HALF
from config.keys import Range
from config.run_config import RANGES, SAMPLING, RunConfig
from config.schema.untrusted import parse_object, plain, shown
from launch.pipeline import Prompt
from model.grammar import Guide
from model.text import own_template, taken_variables
from serve.tools import Dialect, calls_of, dialect_of

MOST_CHOICES = 16  # choices of one request: prompts times n
MOST_STOPS = 4
SEEDS = 1 << 64
ALL = -1  # what some clients write for top_k=0
TOKEN = re.compile("[0-9]{1,9}")
ROLES = {"developer": "system"}  # of a message, where a template has another name
TYPES = ("str", "NamedTool")  # as pydantic names them in the place of a mistake, where a field may have several
Facts = Dict[str, Any]  # of JSON
Item = TypeVar("Item")
Renamed = Callable[[Facts], Facts]
Items = Annotated[list[Item], Field(fail_fast=True)]  # read up to its first mistake: it may have a million of them
CHOOSING = tuple(key for key in SAMPLING if key in RANGES)  # as numbers, which the biases are not
MOST_BIASES, MOST_BIAS = 1024, 100.0  # tokens of a logit_bias, and what it may add
NUMBERS = {  # a field -> what it may be
    **{name: RANGES[name] for name in CHOOSING},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), RANGES["max_new_tokens"]),
    "n": Range(1, MOST_CHOICES), "top_logprobs": Range(0, 20), "logprobs": Range(0, 5)}
# Fields that would change the answer if the pipeline knew them. One that is 0 or empty asks for nothing …
REFUSED = """
    functions function_call repeat_penalty best_of suffix modalities audio prediction
    web_search_options min_tokens images stop_token_ids use_beam_search""".split()
HARMLESS: dict[str, Sequence[Any]] = {  # … and so do these values
    "function_call": ("none", "auto"),
    **dict.fromkeys(("repeat_penalty", "best_of"), (1,)),
    "modalities": (["text"],)}


class Refused(Exception):
    """A request that is not answered: the sentence, the field, and the status of HTTP."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400,
                 retry: int = 0) -> None:
        super().__init__(message)
        self.message, self.param, self.code = plain(message), param, code
        self.status, self.retry = status, retry  # seconds after which to ask again; 0: asking again changes nothing

    @property
    def body(self) -> Facts:
        """As OpenAI sends errors."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Choice(NamedTuple):
    """What the pipeline is asked for one choice of an answer: a prompt, its template, and options.

    `field` is where the prompt stood, `variables` are what the template reads beside the messages, and `echo` says
    whether the answer begins with the prompt. `guide` is the grammar of the answer, and `guided_by` where that stood.
    `dialect` is the form of calls in the answer, where there may be any.
    """

    prompt: Prompt
    template: str
    options: Mapping[str, Any] = {}
    field: str = "prompt"
    variables: Mapping[str, Any] = {}
    echo: bool = False
    guide: Guide | None = None
    guided_by: str = ""
    dialect: Dialect | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.options.get("logprobs") is not None


class Strict(BaseModel):
    """Fields of their own types; others are ignored, and one that is null is left out."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Strict):
    include_usage: bool = False  # whether a stream ends with its usage


class Part(Strict):
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
        """As templates read it: with the arguments as an object, if they are one."""
        facts = self.model_dump()
        with suppress(ValueError):
            facts["function"]["arguments"] = parse_object(self.function.arguments.encode(), "arguments")
        return facts


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str = ""
    name: str = ""

    def shown(self, place: str, own: bool) -> Facts:
        """As templates read it; `own`: as one of the tokenizer's own does, which may know of tools."""
        if self.tool_calls and not own:
            raise Refused(f"{place}.tool_calls is not supported by this model's template: leave it out",
                          f"{place}.tool_calls", "unsupported_parameter")
        facts = {"role": ROLES.get(self.role, self.role), "content": self._text(f"{place}.content")}
        calls = [call.shown for call in self.tool_calls or ()]
        beside = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return {**facts, **{key: value for key, value in beside.items() if value and own}}

    def _text(self, place: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type != "text":
                name = f"{place}.{index}.type"
                raise Refused(f"{name} is {shown(part.type)}, which is not supported: send text only", name,
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

    @property
    def guide(self) -> Guide | None:
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is None:
            raise Refused("response_format.json_schema is missing: give it with a schema", "response_format")
        return Guide.json_schema(self.json_schema.schema_ if self.json_schema else None)


GUIDES: dict[str, Callable[[Any], Guide | None]] = {  # fields that name a grammar of the answer
    "response_format": lambda form: form.guide,
    "guided_json": lambda given: Guide("json_schema", given) if isinstance(given, str) else Guide.json_schema(given),
    "guided_regex": partial(Guide, "regex"),
    "guided_choice": lambda texts: Guide("choice", json.dumps(texts)),
    "guided_grammar": partial(Guide, "grammar")}


class Body(Strict):
    """What chats and completions share. What is left out is as the server was started."""

    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, BeforeValidator(lambda top: 0 if top == ALL else top)] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    n: int = 1
    stop: Annotated[Items[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")
    guided_json: Facts | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    user: str = ""
    flowspec_tree: bool = False  # of our own: a stream also has events `tree`, which show the guesses under way

    @property
    def reported(self) -> Facts:
        """The keys of an answer that say which log-probabilities are wanted."""
        raise NotImplementedError

    def options(self, config: RunConfig) -> list[Facts]:
        """The keys of each of `n` answers; one after the other has the next seed."""
        given = {key: getattr(self, key) for key in CHOOSING}
        given["logit_bias"] = ",".join(f"{token}:{value:.6f}" for token, value in self.logit_bias.items()) or None
        given["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
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
        if self.guided_choice == []:
            raise Refused("guided_choice is empty: give the texts among which to choose", "guided_choice")
        given = {name: getattr(self, name) for name in GUIDES}
        found = {name: GUIDES[name](value) for name, value in given.items() if value is not None}
        return {name: guide for name, guide in found.items() if guide}

    def choices(self, config: RunConfig) -> list[Choice]:
        """What the pipeline is asked, choice by choice."""
        found = []
        for choice in self.asked(config):
            for field, guide in self.guides.items():
                choice = choice._replace(guide=guide, guided_by=field)
            found += [choice._replace(options=options) for options in self.options(config)]
        return found

    def asked(self, config: RunConfig) -> list[Choice]:
        """A choice for each prompt, as yet without its options."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse numbers out of their range, and too many stop texts."""
        for name, allowed in NUMBERS.items():
            value = getattr(self, name, None)
            if value is not None and not allowed.holds(value):
                raise Refused(f"{name}={shown(value)} is not possible: give {allowed.advice}", name)
        if self.seed is not None and not -SEEDS < self.seed < SEEDS:
            raise Refused(f"seed={shown(self.seed)} is not possible: give a number below 2 to the power of 64", "seed")
        self._check_biases()
        if len(self.guides) > 1:
            raise Refused(f"{' and '.join(self.guides)} are both given: give one of them", [*self.guides][-1])
        stops = self.stop or []
        if len(stops) > MOST_STOPS:
            raise Refused(f"stop has {len(stops)} texts: give {MOST_STOPS} at most", "stop")
        if any(map(HALF.search, stops)):
            raise Refused("stop has half a character: give whole ones", "stop")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MOST_BIASES:
            raise Refused(f"logit_bias has {len(self.logit_bias)} tokens: give {MOST_BIASES} at most", "logit_bias")
        for token, value in self.logit_bias.items():
            if not TOKEN.fullmatch(token) or not abs(value) <= MOST_BIAS:
                raise Refused(f"logit_bias.{plain(token)}={shown(value)} is not possible: give token ids, and numbers "
                              f"from {-MOST_BIAS:g} to {MOST_BIAS:g}", "logit_bias")


class Chat(Body):
    """A body of /v1/chat/completions."""

    messages: Items[ChatMessage]
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # whether calls that must come may be several
    chat_template_kwargs: Facts = {}  # what a tokenizer's own template reads beside the messages
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def reported(self) -> Facts:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs: add logprobs=true, or leave it out", "top_logprobs")
        if self.tools and self.logprobs:
            raise Refused("logprobs beside tools is not supported: leave one of them out", "logprobs")
        if self.must_call and not self.called:
            raise Refused("tool_choice names no tool that is given: add it to tools, or leave it out", "tool_choice")
        if self.must_call and self.guides:
            raise Refused(f"{next(iter(self.guides))} and tool_choice ask for different answers: leave one of them out",
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

    def _dialect(self, config: RunConfig) -> Dialect | None:
        """The form of the calls that the answer may have, if any."""
        if not self.called:
            return None
        dialect = _dialect_of(config.first_folder, config.chat_template) if config.uses_jinja else None
        if dialect is None:
            raise Refused("tools is not supported, since the template of this model has no place for them: leave it "
                          "out, or serve with template=FILE, a template that has one", "tools",
                          "unsupported_parameter")
        return dialect

    def asked(self, config: RunConfig) -> list[Choice]:
        own = config.uses_jinja
        messages = [message.shown(f"messages.{number}", own) for number, message in enumerate(self.messages)]
        if not messages:
            raise Refused("messages is empty: say what to ask in one of the role user", "messages")
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
        """Refuse what the template does not read."""
        field = "chat_template_kwargs"
        if not self.chat_template_kwargs:
            return
        if not config.uses_jinja:
            raise Refused(f"{field} is not supported, since template={config.template} reads nothing but the messages: "
                          "leave it out, or start the server with template=own", field, "unsupported_parameter")
        for name in sorted(taken_variables().intersection(self.chat_template_kwargs)):
            raise Refused(f"{field}.{plain(name)} is not for the template alone: leave it out", f"{field}.{name}",
                          "unsupported_parameter")


class Completion(Body):
    """A body of /v1/completions: prompts are continued as they are, without a template."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: bool = False
    logprobs: int | None = None  # of how many likeliest tokens to hear

    @property
    def reported(self) -> Facts:
        return {} if self.logprobs is None else {"logprobs": self.logprobs, "prompt_logprobs": self.echo}

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, one after the other; a list of numbers is one prompt."""
        one = isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt)
        return cast("list[Prompt]", [self.prompt] if one else self.prompt)

    def asked(self, config: RunConfig) -> list[Choice]:
        if len(self.prompts) * self.n > MOST_CHOICES:
            raise Refused(f"{len(self.prompts)} prompts with n={self.n} ask for too many answers: ask for "
                          f"{MOST_CHOICES} at most", "prompt")
        if not all(self.prompts):
            raise Refused("prompt is empty: give a text, or a list of token ids", "prompt")
        return [Choice(prompt, "none", echo=self.echo) for prompt in self.prompts]


class ToTokenize(Chat):
    """A body of /tokenize: a text as it is, or a chat in its template."""

    messages: Items[ChatMessage] = []
    prompt: str | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == ("messages" not in self.model_fields_set):
            raise Refused("give either prompt or messages", "prompt")

    def asked(self, config: RunConfig) -> list[Choice]:
        return super().asked(config) if self.prompt is None else [Choice(self.prompt, "none")]


@lru_cache(maxsize=8)
def _dialect_of(folder: Path, chat_template: str) -> Dialect | None:
    return dialect_of(own_template(folder, chat_template))


def read_body(data: bytes, kind: type[Any], renamed: Renamed = dict) -> Any:
    """The body as `kind`, whose fields are `renamed` before; raises Refused with the first one that is wrong.

    On the thread of the event loop alone. A million small lists would wake the collector, for which nothing is there.
    """
    gc.disable()
    try:
        found = parse_object(data, "the body", "send one JSON object")
        given = renamed({name: value for name, value in found.items() if value is not None})
        for name in REFUSED:
            if given.get(name) and given[name] not in HARMLESS.get(name, ()):
                raise Refused(f"{name} is not supported: leave it out", name, "unsupported_parameter")
        body = kind.model_validate(given)
        body.check()
        return body
    except ValidationError as error:
        place, wrong = _first(error)
        raise Refused(f"{place}: {wrong}", place) from None
    except ValueError as error:
        raise Refused(str(error), code="invalid_json") from None
    finally:
        gc.enable()


def _first(error: ValidationError) -> tuple[str, str]:
    """Where a field stands that is wrong, and what is wrong with it.

    Of a field that may have several types, pydantic says what is wrong with it as each of them, in a place that goes on
    behind the name of the type: the type that fits the furthest is the one that was meant.
    """
    errors = error.errors(include_url=False, include_context=False)
    furthest = max(errors, key=lambda one: len(one["loc"]))
    words = [str(word) for word in furthest["loc"] if word not in TYPES]
    place = ".".join(word for word in words if word.isidentifier() or word.isdigit())
    return place or "body", furthest["msg"]
