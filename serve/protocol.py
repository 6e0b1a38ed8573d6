"""OpenAI's protocol: the fields of a body, and the pipeline's input for them.

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
from operator import attrgetter
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
from model.markup import CallFormat, dialect_of
from model.schema_ranges import values_in, without_nulls
from model.text import own_template
from model.tokenizer import TAKEN_VARIABLES
from serve.fields import unsupported_field
from serve.tools import calls_of, with_system_tools

MAX_CHOICES = 16  # of one request: prompts times n
MAX_STOP_TEXTS, MAX_STOP_CHARACTERS = 64, 4096  # the characters of all together
MAX_VALUES = 50_000  # of a body besides its prompt, and of what a template reads: lists, objects, texts, numbers ...
NUM_SEEDS = 1 << 64
ALL_TOKENS = -1  # some clients send this for top_k=0
TOKEN_ID = re.compile("[0-9]{1,9}")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of parts of a content
TEMPLATE_ROLES = {"developer": "system"}  # role of a message -> its name in templates, if different
TYPE_NAMES = ("str", "NamedTool")  # pydantic's names in the path of an error, for fields with several types
JsonObject = Dict[str, Any]  # of JSON
Item = TypeVar("Item")
Translate = Callable[[JsonObject], JsonObject]
Items = Annotated[list[Item], Field(fail_fast=True)]  # validated up to the first error: there may be thousands
SAMPLING_FIELDS = tuple(name for name in SAMPLING if name != "logit_bias")  # all numbers
MAX_BIASES, MAX_BIAS = 1024, 100.0  # tokens of a logit_bias, and the largest value
UNLIMITED = -1  # as a number of tokens: as many as fit
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")  # the first of them in a body counts
RUN_RANGES = allowed_values(RunConfig)
FIELD_RANGES = {  # field -> its range
    **{name: RUN_RANGES[name] for name in SAMPLING_FIELDS},
    **dict.fromkeys(TOKEN_LIMITS, RUN_RANGES["max_new_tokens"]),
    "n": Range(1, MAX_CHOICES), "top_logprobs": Range(0, 20), "logprobs": Range(0, 5)}


class Refused(Exception):
    """A request that is not answered: the message, the field, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400,
                 retry: int = 0) -> None:
        super().__init__(message)
        self.message, self.param, self.code = one_line(message), param, code
        self.status, self.retry = status, retry  # seconds until the client may retry; 0: a retry changes nothing

    @property
    def body(self) -> JsonObject:
        """The error in OpenAI's format."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


class Choice(NamedTuple):
    """The input of the pipeline for one choice of an answer: a prompt, its template, and options.

    `field` is the field of the prompt, `variables` are those of the template in addition to the messages, and `echo` is
    whether the answer begins with the prompt. `guide` is the grammar of the answer, and `guided_by` the field of that.
    `dialect` is the format of thoughts and tool calls in the answer, None if it cannot have any, and `tools` are the
    schemas of the tools that it may call. A `prompt_only` answer ends with the prompt.
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
    tools: Mapping[str, JsonObject] = {}
    prompt_only: bool = False

    @property
    def wants_logprobs(self) -> bool:
        return self.options.get("logprobs") is not None


class Strict(BaseModel):
    """A body with strictly typed fields; unknown fields are ignored, and null counts as missing."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, facts: Any) -> Any:
        if not isinstance(facts, dict) or None not in facts.values():
            return facts
        return {name: value for name, value in facts.items() if value is not None}


def _whole(number: Any) -> Any:
    """Return 8.0 as 8, since some clients know one type of numbers only."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _listed(content: Any) -> Any:
    """Return a content that is no text as a list of parts: of a single one, or with texts as parts."""
    entries = [content] if isinstance(content, dict) else content
    if not isinstance(entries, list):
        return entries
    return [{"type": "text", "text": entry} if isinstance(entry, str) else entry for entry in entries]


def _unless_empty(text: Any) -> Any:
    """Return None for an empty text, with which clients of llama.cpp leave a grammar out."""
    return None if text == "" else text


WholeNumber = Annotated[int, BeforeValidator(_whole)]
GrammarText = Annotated[str | None, BeforeValidator(_unless_empty)]


class StreamOptions(Strict):
    include_usage: bool = False  # whether a stream ends with its usage


class ContentPart(Strict):
    type: str
    text: str = ""
    refusal: str = ""  # the text of a part that says no


class CalledFunction(Strict):
    name: str
    arguments: str = "{}"  # JSON


class ToolCall(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> JsonObject:
        """The call with its arguments as an object, which is empty for a text that is none, such as one cut off."""
        facts = self.model_dump()
        facts["function"]["arguments"] = {}
        with suppress(ValueError):
            facts["function"]["arguments"] = parse_object(self.function.arguments.encode(), "arguments")
        return facts


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[ContentPart] | None, BeforeValidator(_listed)] = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""
    reasoning: str = ""  # vLLM's present name for it

    def for_template(self, field_path: str, has_own_template: bool) -> JsonObject:
        """Return the message as templates read it; only a tokenizer's own template may read calls and thoughts."""
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, name) and not has_own_template:
                raise Refused(f"{field_path}.{name} is not supported by this model's template: leave it out",
                              f"{field_path}.{name}", "unsupported_parameter")

        role = TEMPLATE_ROLES.get(self.role, self.role)
        facts: JsonObject = {"role": role, "content": self._text(f"{field_path}.content")}
        if has_own_template:
            tool_calls = [call.for_template for call in self.tool_calls or ()]
            more_facts = {"tool_calls": tool_calls, "tool_call_id": self.tool_call_id, "name": self.name,
                          "reasoning_content": self.reasoning_content or self.reasoning}
            facts.update({key: value for key, value in more_facts.items() if value})
        return facts

    def _text(self, field_path: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for index, part in enumerate(self.content):
            if part.type not in TEXT_PARTS:
                type_path = f"{field_path}.{index}.type"
                raise Refused(f"{type_path} is {short_repr(part.type)}, which is not supported: send text only",
                              type_path, "unsupported_parameter")
        return "".join(part.text or part.refusal for part in self.content)


class Function(Strict):
    name: str
    description: str = ""
    parameters: Annotated[JsonObject, BeforeValidator(without_nulls)] = {}


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: Function


class Tool(NamedTool):
    type: Literal["function"]


class Schema(Strict):
    name: str = ""
    schema_: JsonObject = Field({}, alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")  # llama.cpp's form

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

    json_: JsonObject | str | None = Field(default=None, alias="json")
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

        guided_fields = {"guided_json": self.json_, "guided_regex": self.regex, "guided_choice": self.choice,
                         "guided_grammar": self.grammar}
        guides = [GUIDES[name](value) for name, value in guided_fields.items() if value is not None]
        if self.json_object:
            guides.append(Guide.json_schema())
        if len(guides) > 1:
            raise Refused("structured_outputs has several grammars: give one of them", "structured_outputs")
        return guides[0] if guides else None


def _json_guide(schema: JsonObject | str) -> Guide:
    return Guide("json_schema", schema) if isinstance(schema, str) else Guide.json_schema(schema)


def _choice_guide(texts: list[str]) -> Guide:
    if not texts:
        raise Refused("the list of texts to choose from is empty: give some", "guided_choice")
    return Guide("choice", json.dumps(texts))


GUIDES: dict[str, Callable[[Any], Guide | None]] = {  # fields that name a grammar of the answer
    **dict.fromkeys(("response_format", "structured_outputs"), attrgetter("guide")),
    **dict.fromkeys(("guided_json", "json_schema"), _json_guide),
    "guided_choice": _choice_guide,
    **dict.fromkeys(("guided_regex", "regex"), partial(Guide, "regex")),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), partial(Guide, "grammar"))}


class Body(Strict):
    """The fields that chats and completions share. Missing options are those with which the server was started."""

    model: str = ""
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    n_predict: WholeNumber | None = None  # llama.cpp's name
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[WholeNumber | None, BeforeValidator(lambda top: 0 if top == ALL_TOKENS else top)] = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    seed: WholeNumber | None = None
    n: WholeNumber = 1
    stop: Annotated[Items[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: JsonObject | str | None = None  # of llama.cpp and SGLang, as the next
    regex: GrammarText = None
    ebnf: GrammarText = None
    grammar: GrammarText = None
    ignore_eos: bool | None = None
    user: str = ""
    flowspec_tree: bool = False  # FlowSpec's own: a stream also has `tree` events, which show the guesses

    @property
    def logprob_options(self) -> JsonObject:
        """The options of an answer that request log-probabilities."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """The largest number of tokens of the answer: UNLIMITED, 0 for the prompt alone, or None without a limit."""
        limits = [getattr(self, name) for name in TOKEN_LIMITS]
        return next((limit for limit in limits if limit is not None), None)

    @property
    def special_limits(self) -> tuple[int, ...]:
        """The values of a token limit that have a meaning of their own."""
        return (UNLIMITED,)

    def options(self, config: RunConfig) -> list[JsonObject]:
        """Return the options of each of `n` answers, with consecutive seeds."""
        option_values = {name: getattr(self, name) for name in (*SAMPLING_FIELDS, "ignore_eos", "stop")}
        options = {name: value for name, value in option_values.items() if value is not None}
        options.update(self.logprob_options)

        if self.logit_bias:
            options["logit_bias"] = ",".join(f"{token}:{value:.6f}" for token, value in self.logit_bias.items())
        token_limit = self.token_limit
        if token_limit is not None:
            options["max_new_tokens"] = config.max_length if token_limit == UNLIMITED else max(1, token_limit)

        # seeds
        is_sampled = options.get("temperature", config.temperature) > 0
        first_seed = self.seed
        if first_seed is None:
            first_seed = secrets.randbits(32) if is_sampled else config.seed
        return [{**options, "seed": (first_seed + number) % NUM_SEEDS} for number in range(self.n)]

    @property
    def guides(self) -> dict[str, Guide]:
        """The grammars that the answer has to follow, by the field that names each."""
        guides = {}
        for name, make_guide in GUIDES.items():
            value = getattr(self, name)
            guide = None if value is None else make_guide(value)
            if guide:
                guides[name] = guide
        return guides

    def choices(self, config: RunConfig) -> list[Choice]:
        """Return the input of the pipeline for each choice."""
        choices, guides = [], self.guides
        for choice in self.prompt_choices(config):
            for field, guide in guides.items():
                choice = choice._replace(guide=guide, guided_by=field)
            choices += [choice._replace(options=options) for options in self.options(config)]
        return choices

    def prompt_choices(self, config: RunConfig) -> list[Choice]:
        """Return a choice for each prompt, still without its options."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise Refused for numbers out of range, invalid biases or stop texts, and several grammars."""
        for name, allowed_range in FIELD_RANGES.items():
            value = getattr(self, name, None)
            is_special = name in TOKEN_LIMITS and value in self.special_limits
            if value is not None and not is_special and not allowed_range.holds(value):
                raise Refused(f"{name}={short_repr(value)} is not possible: give {allowed_range.advice}", name)

        if self.seed is not None and not -NUM_SEEDS < self.seed < NUM_SEEDS:
            raise Refused(f"seed={short_repr(self.seed)} is not possible: give a number below 2 ** 64", "seed")
        self._check_biases()

        guided_fields = [*self.guides]
        if len(guided_fields) > 1:
            raise Refused(f"{' and '.join(guided_fields)} are both given: give one of them", guided_fields[-1])

        stop_texts = self.stop or []
        num_stop_characters = sum(map(len, stop_texts))
        if len(stop_texts) > MAX_STOP_TEXTS or num_stop_characters > MAX_STOP_CHARACTERS:
            raise Refused(f"stop has {len(stop_texts)} texts with {num_stop_characters} characters: give at most "
                          f"{MAX_STOP_TEXTS} with {MAX_STOP_CHARACTERS}", "stop")
        if any(map(SURROGATE.search, stop_texts)):
            raise Refused("stop has half a character: give whole ones", "stop")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise Refused(f"logit_bias has {len(self.logit_bias)} tokens: give {MAX_BIASES} at most", "logit_bias")
        for token, value in self.logit_bias.items():
            if not TOKEN_ID.fullmatch(token) or not abs(value) <= MAX_BIAS:
                raise Refused(f"logit_bias.{one_line(token)}={short_repr(value)} is not possible: give token ids, and "
                              f"numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}", "logit_bias")


class Chat(Body):
    """A body of /v1/chat/completions."""

    messages: Items[ChatMessage]
    tools: Items[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # whether forced calls may be several
    chat_template_kwargs: JsonObject = {}  # variables of a tokenizer's own template
    reasoning_effort: str | None = None  # another one, for templates that read it
    provider_tools: Items[str] = []  # types of tools that were left out, since only their provider runs them
    echo: bool = False  # vLLM's, which is not supported
    logprobs: bool = False
    top_logprobs: WholeNumber | None = None

    @property
    def logprob_options(self) -> JsonObject:
        return {"logprobs": self.top_logprobs or 0} if self.logprobs else {}

    def check(self) -> None:
        super().check()
        if self.echo:
            raise Refused("echo is of /v1/completions: leave it out", "echo", "unsupported_parameter")

        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs: add logprobs=true, or leave it out", "top_logprobs")
        if self.tools and self.logprobs:
            raise Refused("logprobs with tools is not supported: leave one of them out", "logprobs")

        if self.must_call and not self.callable_schemas:
            raise Refused("tool_choice names no tool of this request: add it to tools, or leave it out", "tool_choice")
        if self.must_call and self.guides:
            raise Refused(f"{next(iter(self.guides))} and tool_choice exclude each other: leave one of them out",
                          "tool_choice")

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def callable_schemas(self) -> dict[str, JsonObject]:
        """The functions that may be called, with the schemas of their arguments."""
        schemas = {tool.function.name: tool.function.parameters for tool in self.tools}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return {name: schemas[name]} if name in schemas else {}
        return {} if self.tool_choice == "none" else schemas

    def _call_format(self, config: RunConfig) -> CallFormat | None:
        """Return the format of thoughts and tool calls in the answer, None if it cannot have any."""
        call_format = _call_format_of(_template_of(config))
        if self.callable_schemas and not (call_format and call_format.has_calls):
            raise Refused("tools is not supported, since this model's template does not support them: leave it out, "
                          "or serve with template=FILE, a template that does", "tools",
                          "unsupported_parameter")
        return call_format

    def prompt_choices(self, config: RunConfig) -> list[Choice]:
        messages = []
        for number, message in enumerate(self.messages):
            messages.append(message.for_template(f"messages.{number}", has_own_template=config.uses_jinja))
        if not messages:
            raise Refused("messages is empty: send one with the role user", "messages")
        _check_number(messages, "messages", "messages")  # with the arguments of calls as objects

        self._check_variables(config)
        call_format, variables = self._call_format(config), self.chat_template_kwargs
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        if self.callable_schemas:
            variables = {**variables, "tools": [tool.model_dump() for tool in self.tools]}
            if call_format and call_format.has_system_tools:
                messages = with_system_tools(messages, variables["tools"])
        choice = Choice(messages, config.template, field="messages", variables=variables, dialect=call_format,
                        tools=self.callable_schemas)

        if call_format and self.must_call:
            allows_several = self.parallel_tool_calls and self.tool_choice == "required"
            guide = calls_of(self.callable_schemas, call_format, allows_several)
            if guide is None:
                raise Refused("tool_choice cannot force a call in the format of this model, whose arguments are not "
                              "JSON: send auto", "tool_choice", "unsupported_parameter")
            choice = choice._replace(guide=guide, guided_by="tools")
        return [choice]

    def _check_variables(self, config: RunConfig) -> None:
        """Raise Refused for variables that the template does not read."""
        if self.reasoning_effort is not None and "reasoning_effort" not in _template_of(config):
            raise Refused("reasoning_effort (in a body of /v1/responses reasoning.effort) is not read by this model's "
                          "template: leave it out", "reasoning_effort", "unsupported_parameter")

        field = "chat_template_kwargs"
        if not self.chat_template_kwargs:
            return
        if not config.uses_jinja:
            raise Refused(f"{field} is not supported, since template={config.template} reads only the messages: "
                          "leave it out, or start the server with template=own", field, "unsupported_parameter")
        for name in sorted(TAKEN_VARIABLES.intersection(self.chat_template_kwargs)):
            raise Refused(f"{field}.{one_line(name)} is reserved: leave it out", f"{field}.{name}",
                          "unsupported_parameter")


class Completion(Body):
    """A body of /v1/completions: prompts are continued as they are, without a template."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: bool = False
    logprobs: WholeNumber | None = None  # number of likeliest tokens to report

    @property
    def logprob_options(self) -> JsonObject:
        return {} if self.logprobs is None else {"logprobs": self.logprobs, "prompt_logprobs": self.echo}

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in order; a list of numbers is one prompt."""
        is_single = isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt)
        return cast("list[Prompt]", [self.prompt] if is_single else self.prompt)

    def prompt_choices(self, config: RunConfig) -> list[Choice]:
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise Refused(f"{len(self.prompts)} prompts with n={self.n} are too many answers: request at "
                          f"most {MAX_CHOICES}", "prompt")
        _check_number(self.prompts, "prompt", "prompt", MAX_VALUES + MAX_CHOICES * config.max_length)
        if not all(self.prompts):
            raise Refused("prompt is empty: give a text, or a list of token ids", "prompt")
        prompt_only = self.token_limit == 0
        return [Choice(prompt, "none", echo=self.echo, prompt_only=prompt_only) for prompt in self.prompts]

    @property
    def special_limits(self) -> tuple[int, ...]:
        return (UNLIMITED, 0) if self.echo else (UNLIMITED,)


class ToTokenize(Chat):
    """A body of /tokenize: a text without a template, or a chat in its template."""

    messages: Items[ChatMessage] = []
    prompt: str | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == ("messages" not in self.model_fields_set):
            raise Refused("give either prompt or messages", "prompt")

    def prompt_choices(self, config: RunConfig) -> list[Choice]:
        return super().prompt_choices(config) if self.prompt is None else [Choice(self.prompt, "none")]


def _template_of(config: RunConfig) -> str:
    """Return the tokenizer's own template; empty if another one is used."""
    return _read_template(config.first_folder, config.chat_template) if config.uses_jinja else ""


@lru_cache(maxsize=8)
def _read_template(folder: Path, chat_template: str) -> str:
    return own_template(folder, chat_template)


@lru_cache(maxsize=8)
def _call_format_of(template: str) -> CallFormat | None:
    return dialect_of(template)


def read_body(data: bytes, body_class: type[Any], translate: Translate = dict) -> Any:
    """Return the body as `body_class`, after `translate` has renamed its fields; raise Refused for an invalid one.

    Only one thread of a process may call this, since many small lists would trigger useless garbage collections. The
    steps grow at most linearly with the body.
    """
    gc.disable()
    try:
        sent_fields = parse_object(data, "the body", "send one JSON object")
        counted_values = [value for name, value in sent_fields.items() if name != "prompt"]
        _check_number(counted_values, "the body")

        given_fields = {name: value for name, value in sent_fields.items() if value is not None}
        unsupported_name = unsupported_field(given_fields)
        if unsupported_name:
            raise Refused(f"{unsupported_name} is not supported: leave it out", unsupported_name,
                          "unsupported_parameter")

        body = body_class.model_validate(translate(given_fields))
        body.check()
        if has_half_character(data.decode(), [*sent_fields.values()]):
            name = next(name for name, value in sent_fields.items() if SURROGATE.search(_in_full(value)))
            raise Refused(f"{name} has half a character (a surrogate): write \\u escapes in pairs", name)
        return body

    except ValidationError as error:
        field_path, message = _first_error(error)
        raise Refused(f"{field_path}: {message}", field_path) from None
    except ValueError as error:
        raise Refused(str(error), code="invalid_json") from None
    finally:
        gc.enable()


def _check_number(content: Any, subject: str, field: str | None = None, max_values: int = MAX_VALUES) -> None:
    """Raise Refused for JSON with too many values, which would take long to copy from process to process."""
    num_values = sum(1 for _ in values_in(content))
    if num_values > max_values:
        raise Refused(f"{subject} has {num_values} values: send {max_values} at most", field)


def small_body(config: RunConfig, data: bytes, body_class: type[Any], translate: Translate) -> str:
    """Return only those fields of a body that have a meaning here, or why it is refused, as JSON for `body_of`."""
    try:
        body = read_body(data, body_class, translate)
        body.choices(config)
    except Refused as refused:
        return _in_full({"refusal": [refused.message, refused.param, refused.code, refused.status]})
    return _in_full({"fields": body.model_dump(by_alias=True, exclude_unset=True)})


def body_of(small_text: str, body_class: type[Any]) -> Any:
    """Return the body that `small_body` has read; raise Refused for one that it has refused."""
    content = json.loads(small_text)
    if "refusal" in content:
        raise Refused(*content["refusal"])
    return body_class.model_validate(content["fields"])


def _in_full(content: Any) -> str:
    """Return JSON without escapes of letters."""
    return json.dumps(content, ensure_ascii=False)


def _first_error(error: ValidationError) -> tuple[str, str]:
    """Return the path of an invalid field, and what is wrong with it.

    For a field with several types, pydantic reports an error for each type, with the type's name in the path. The
    longest path is taken, since it belongs to the type that fits best.
    """
    errors = error.errors(include_url=False, include_context=False)
    deepest_error = max(errors, key=lambda field_error: len(field_error["loc"]))
    words = [str(word) for word in deepest_error["loc"] if word not in TYPE_NAMES]
    field_path = ".".join(word for word in words if word.isidentifier() or word.isdigit())
    return field_path or "body", deepest_error["msg"]
