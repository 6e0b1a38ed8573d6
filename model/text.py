"""Text for a language model: encode prompts, decode streams of token ids, and spell single tokens.

It knows nothing about tensors or pipelines. `transformers` and `fschat` are imported when they are first needed,
because a rank that only computes never needs them.
"""
from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256
from importlib import import_module
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, TypeVar, Union

from config.files import SURROGATE
from config.run_config import is_template_file
from config.schema.untrusted import BYTE_ORDER_MARK, WHOLE_FOLDER, Name, one_line, read_bytes, read_json, reason
from model.markup import HARMONY, HARMONY_END, AnswerPart, CallReader, Thought, shown_marks
from model.sandbox import Sandbox
from model.tokenizer import BYTE_OF_LETTER, TEMPLATE_FILE, file_tokenizer, in_words_of_4, rendered

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", CONFIG_FILE, "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer needs one of them
SETTINGS = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.json",
            "generation_config.json", "config.json")
CONVERSATIONS = {"vicuna": "vicuna_v1.1", "llama-2": "llama-2"}  # our name -> fschat's
AUTO, OWN, DEFAULT_TEMPLATE = "auto", "own", "vicuna"
TEMPLATES = (*CONVERSATIONS, OWN, "none")
FAST_CLASS = "PreTrainedTokenizerFast"  # the class that AutoTokenizer would find, too, after importing all families
TEMPLATE_SETTINGS = (CONFIG_FILE, "chat_template.json")  # files that may have it as `chat_template`
# The system prompt with which LLaMA-2-Chat was trained; the original FlowSpec uses it, too.
LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe.  "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something "
    "not correct. If you don't know the answer to a question, please don't share false information.")
ROLES = ("system", "user", "assistant", "tool")  # of a message
TURN_ENDS = (  # names of tokens that end an answer in every model that has them, whether or not its files list them
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>",
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>")
PART_END = "<|end|>"  # where a format has channels, it only ends one of several messages
SHOWN_THOUGHTS = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)  # as an answer in channels is shown
ANSWER = "answer"  # a text in place of an answer, to find the token with which a template closes it
BROKEN = "\ufffd"  # the decoded text of an incomplete character
CONTEXT_TEXT = "a"  # decoded before a single token, since the first token of a text may lose its space
SAME_TEXT = "\U0010fffd"  # at the end of a token's name, so that it differs from a later token's with the same text
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte as sentencepiece writes it
MAX_PENDING_TOKENS = 8  # a character has at most 4 bytes, so a longer broken text stays broken
MAX_CONTEXT_TOKENS = 64  # of spaces that are kept as context
MAX_GROWTH = 256  # characters into which the rules of a tokenizer may turn a single one
PATIENCE = 10.0  # seconds of processor time for one text of a tokenizer's own template, which needs a millisecond
OTHER_TEMPLATES = "use template=vicuna, template=llama-2 or template=none"
MARKER = "2718281828459045"  # a text to find in what a template writes, whatever it does to letters
TRIED_ARGUMENTS = {"a": MARKER}
SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # of a call, as Mistral's templates demand it
NO_VARIABLES: Mapping[str, Any] = {}  # of a template
LOOP_LENGTHS = range(16, 400)  # characters of a text that an answer in a loop repeats
NUM_REPETITIONS = 3  # of it, in succession
_IMPORTING = Lock()
MessageDict = Mapping[str, Any]  # with `role`, one of ROLES, `content`, a text, and other keys for an own template
Stops = Union[str, Sequence[str]]  # one or several texts that end an answer
Content = Union[str, List[Dict[str, str]]]  # of a message: a text, or parts
Result = TypeVar("Result")


def conversation_of(template: str) -> Any:
    """Return fschat's empty conversation for a template, with its system prompt; "raw" for an unknown template."""
    from fastchat.conversation import get_conv_template

    conversation = get_conv_template(CONVERSATIONS.get(template, "raw"))
    if template == "llama-2":
        conversation.set_system_message(LLAMA2_SYSTEM)
    return conversation


def _of_transformers(name: str) -> Any:
    """Return a class of transformers, imported by one thread at a time, since its module replaces itself."""
    with _IMPORTING:
        return getattr(import_module("transformers"), name)


def shown(error: BaseException) -> str:
    """Return an error's type and message in one line, escaped for a terminal, since its text may be untrusted."""
    return f"{type(error).__name__}: {one_line(reason(error)[:200])}"


def chosen(template: str, folder: Name) -> str:
    """Return the template to use: a file counts as `own`; for `auto` the tokenizer's, if it has one, else Vicuna's."""
    if template != AUTO:
        return OWN if is_template_file(template) else template
    return OWN if own_template(folder) else DEFAULT_TEMPLATE


def own_template(folder: Name, file: str = "") -> str:
    """Read the chat templates of a file or a tokenizer's folder, if any. Raises ValueError for an unreadable file."""
    if file:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"template={file} cannot be read ({shown(error)}): give the path of a template in "
                             "Jinja, in UTF-8") from None

    # in settings: one template, or a list of them with names
    templates = []
    for settings_path in filter(Path.is_file, (Path(folder) / name for name in TEMPLATE_SETTINGS)):
        setting = read_json(settings_path).get("chat_template")
        entries = setting if isinstance(setting, list) else [{"template": setting or ""}]
        templates += [str(entry.get("template")) for entry in entries if isinstance(entry, dict)]

    # in a file of its own
    template_path = Path(folder) / TEMPLATE_FILE
    if template_path.is_file():
        templates.append(template_path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(templates).strip()


def check_template_links(folder: Path) -> None:
    """Raise ValueError for a template that is a link out of a model's folder, since it may lead to a private file.

    The hub's own programs store files as links to `blobs`.
    """
    real_folder = folder.resolve()
    allowed_folders = [real_folder]
    if real_folder.parent.name == "snapshots":
        allowed_folders.append(real_folder.parent.parent / "blobs")

    for path in (folder / TEMPLATE_FILE, *folder.glob("additional_chat_templates/*")):
        target = path.resolve()
        is_inside = any(allowed in target.parents for allowed in allowed_folders)
        if path.is_symlink() and not is_inside:
            raise ValueError(f"{path} is a link to {target}, outside of its folder: copy the file itself there, or "
                             "delete the link")


def _in_own_template(tokenizer: Any, messages: Sequence[MessageDict], variables: Mapping[str, Any]) -> str:
    return rendered(tokenizer.chat_template, tokenizer.special_tokens_map, messages, variables)


class TemplateError(ValueError):
    """A failure of a tokenizer's own template; `why` is the template's message."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class LongText(ValueError):
    """A prompt of `num_characters`, which are too many in any tokenization."""

    def __init__(self, num_characters: int) -> None:
        super().__init__(f"the prompt has {num_characters} characters, too many for this model: shorten it")
        self.num_characters = num_characters


class CallForm(NamedTuple):
    """How a template reads a message with calls: null for an empty content, arguments as text, and ids of nine signs.
    """

    has_short_ids: bool = False
    has_null_content: bool = False
    has_text_arguments: bool = False

    def applied(self, message: MessageDict) -> MessageDict:
        """Return a message with its calls, or the id of the call that it answers, in this form."""
        template_message = dict(message)
        if message.get("tool_calls"):
            template_message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            template_message["content"] = message["content"] or (None if self.has_null_content else "")

        if self.has_short_ids and message["role"] == "tool":
            template_message["tool_call_id"] = _short_id(message.get("tool_call_id", ""))
        return template_message

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        template_call = dict(call)
        if self.has_text_arguments:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            template_call["function"] = {**call["function"], "arguments": arguments}

        if self.has_short_ids:
            template_call["id"] = _short_id(call.get("id", ""))
        return template_call


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, one and the same for equal ids."""
    return call_id if SHORT_ID.fullmatch(call_id) else sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


class Text:
    """The tokenizer and the conversation templates of one model.

    Prompts are messages, or `turns`: texts of the user and the assistant, alternately, of which the first and the last
    are the user's. A template wraps them, and the assistant's next answer continues its text. Raises ValueError, with
    the remedy, for messages that have no answer or do not fit the template.
    """

    def __init__(self, folder: str | Path, chat_template: str = "") -> None:
        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in VOCABULARIES):
            raise ValueError(f"{self.folder} has no tokenizer ({', '.join(VOCABULARIES)}); copy the model's tokenizer "
                             f"files there, or give token ids with prompt_ids=")
        check_template_links(self.folder)

        file_names = [name for name in SETTINGS if (self.folder / name).is_file()]
        self._settings = {name: read_json(self.folder / name) for name in file_names}  # by the name of their file
        settings = self._settings.get(CONFIG_FILE, {})
        self._settings[CONFIG_FILE] = in_words_of_4(settings)
        if settings.get("model_type") == "gpt2":  # only transformers writes this
            raise ValueError(f"the tokenizer in {self.folder} was read out of a GGUF file in a way that splits texts "
                             "wrongly: split the file again")

        self.tokenizer = self._open()
        if chat_template:  # a file that replaces the tokenizer's own template
            self.tokenizer.chat_template = own_template(folder, chat_template)
        elif not self.tokenizer.chat_template:
            self.tokenizer.chat_template = self._template_beside()
        if isinstance(self.tokenizer.chat_template, str):
            self.tokenizer.chat_template = self.tokenizer.chat_template.lstrip(BYTE_ORDER_MARK)
        self._sandbox = Sandbox(partial(_in_own_template, self.tokenizer))
        self._reads_parts: dict[str, bool] = {}  # by role, once it was tried

        config_names = ("generation_config.json", "config.json")
        self._configs = [self._settings[name] for name in config_names if name in self._settings]
        vocab_size = self._configs[-1].get("vocab_size") if self._configs else None
        self._num_model_tokens = vocab_size if isinstance(vocab_size, int) else len(self.tokenizer)
        added_names = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        self.has_channels = HARMONY_END in added_names

    @property
    def remark(self) -> str:
        """A sentence about a tokenizer with more tokens than the model knows, as some are published; else empty."""
        if len(self.tokenizer) <= self._num_model_tokens:
            return ""
        return (f"the tokenizer in {self.folder} has {len(self.tokenizer)} tokens, but the model knows only "
                f"{self._num_model_tokens}: a prompt with one of the others is refused")

    def _open(self) -> Any:
        try:
            with _readable(self.folder, self._settings) as folder:
                tokenizer = call_tokenizer(file_tokenizer, folder, self._settings) or self._read_by_transformers(folder)

            _check_growth(tokenizer)
            _end_training(tokenizer)
            return tokenizer

        except Exception as error:  # its errors for broken files are not documented
            if any("auto_map" in settings for settings in self._settings.values()):
                raise ValueError(f"the tokenizer in {self.folder} needs code of its own (auto_map), but code from a "
                                 "model's folder is never run (trust_remote_code=False); save it in the form of "
                                 "tokenizer.json, or give token ids with prompt_ids=") from None

            for name in VOCABULARIES:
                if name.endswith(".json") and (self.folder / name).is_file():
                    read_json(self.folder / name)  # for a better error message
            raise ValueError(f"the tokenizer in {self.folder} cannot be read ({shown(error)}); copy it again from the "
                             f"model, or give token ids with prompt_ids=") from error

    def _read_by_transformers(self, folder: Path) -> Any:
        class_name = self._settings[CONFIG_FILE].get("tokenizer_class")
        tokenizer_class = _of_transformers(FAST_CLASS if class_name == FAST_CLASS else "AutoTokenizer")
        tokenizer = call_tokenizer(tokenizer_class.from_pretrained, str(folder), local_files_only=True,
                                   trust_remote_code=False)
        if not isinstance(tokenizer, _of_transformers("PreTrainedTokenizerBase")):  # for an impossible tokenizer_class
            raise TypeError(f"its tokenizer_class is {type(tokenizer).__name__}, not a tokenizer")
        return tokenizer

    def _template_beside(self) -> Any:
        """Return the template in a file that transformers does not read: before 4.49 any, and a processor's one."""
        if (self.folder / TEMPLATE_FILE).is_file():
            return own_template(self.folder, str(self.folder / TEMPLATE_FILE))

        setting = self._settings.get("chat_template.json", {}).get("chat_template")
        return {entry["name"]: entry["template"] for entry in setting} if isinstance(setting, list) else setting

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """All tokens that end an answer, from every file of the model that lists them."""
        # listed in files
        entries = [config.get("eos_token_id") for config in self._configs]
        listed_ids: list[Any] = []
        for entry in [*entries, self.tokenizer.eos_token_id]:
            listed_ids += entry if isinstance(entry, list) else [entry]
        if not all(isinstance(end_id, (int, type(None))) for end_id in listed_ids):
            raise ValueError(f"{self.folder} has an eos_token_id that is not an id; write the number of a token as "
                             "eos_token_id into its generation_config.json and config.json")

        # known by their names
        names = {*TURN_ENDS, self._closing_token()}
        if self.has_channels:
            names.discard(PART_END)

        all_ids = {end_id for end_id in listed_ids if end_id is not None}
        for name in names:
            named_id = self.tokenizer.convert_tokens_to_ids(name)  # or that of unknown tokens
            if named_id is not None and self.tokenizer.convert_ids_to_tokens(named_id) == name:
                all_ids.add(named_id)
        end_ids = frozenset(end_id for end_id in all_ids if end_id < self._num_model_tokens)
        if not end_ids:
            raise ValueError(f"{self.folder} names no end token; add eos_token_id to its generation_config.json, "
                             f"or use ignore_eos=true")
        return end_ids

    def _closing_token(self) -> str:
        """Return the special token with which the tokenizer's own template closes an answer; empty if it has none."""
        if not self.tokenizer.chat_template:
            return ""

        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self._sandbox.call(PATIENCE, messages, {"add_generation_prompt": False})
        except Exception:  # untrusted code may raise anything; a prompt reports it
            return ""

        after_answer = text.rpartition(ANSWER)[2].lstrip()
        special_tokens = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        return max(filter(after_answer.startswith, special_tokens), key=len, default="")

    def end_sandbox(self) -> None:
        """End the process in which the chat template runs; the next prompt starts it again."""
        self._sandbox.end()

    def prompt_ids(self, turns: Sequence[str], template: str) -> list[int]:
        """Return the token ids of turns."""
        return self.chat_ids(as_messages(turns), template)

    def prompt_text(self, turns: Sequence[str], template: str) -> str:
        """Return the text of turns in a template."""
        messages = as_messages(turns)
        check_messages(messages)
        return self._chat_text(messages, template, NO_VARIABLES)

    def chat_ids(self, messages: Sequence[MessageDict], template: str, variables: Mapping[str, Any] = NO_VARIABLES,
                 max_tokens: float = math.inf) -> list[int]:
        """Return the token ids of messages; `variables` are further inputs of the tokenizer's own template.

        Raises LongText instead of tokenizing a text that has more than `max_tokens` in any tokenization.
        """
        check_messages(messages)
        max_characters = max_tokens if max_tokens == math.inf else max_tokens * self._max_token_length
        num_characters = sum(len(message["content"]) for message in messages)
        if num_characters <= max_characters:
            text = self._chat_text(messages, template, variables)
            num_characters = len(text)

        if num_characters > max_characters:
            raise LongText(num_characters)
        return next(self.spans([text], template, has_ends=False))[0]

    @cached_property
    def _max_token_length(self) -> int:
        """The length of the longest token, in characters."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _chat_text(self, messages: Sequence[MessageDict], template: str, variables: Mapping[str, Any]) -> str:
        """Return the text of checked messages in a template."""
        talk = [message for message in messages if message["role"] != "system"]  # some clients end with reminders
        last_role = (talk or messages)[-1]["role"]
        if last_role not in ("user", "tool"):
            raise ValueError(f"the last message has the role {last_role}, so there is nothing to answer; "
                             "end with a message of the role user")
        if any(SURROGATE.search(message["content"]) for message in messages):
            raise ValueError("the prompt has half a character, or bytes that are not UTF-8; write it in UTF-8")

        template = chosen(template, self.folder)
        if template == "none":
            return "".join(message["content"] for message in messages)
        if template == OWN:
            return self._own_text(messages, variables)
        return _in_conversation(messages, template)

    def _own_text(self, messages: Sequence[MessageDict], variables: Mapping[str, Any]) -> str:
        """Return the messages in the tokenizer's template, which is untrusted code."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {self.folder} has no chat template of its own; {OTHER_TEMPLATES}")
        has_later_system = any(message["role"] == "system" for message in messages[1:])
        try:
            if has_later_system and not self._reads_later_system:
                messages = _with_system_first(messages)
            template_messages = [self._in_content_form(message) for message in messages]
            return self._sandbox.call(PATIENCE, template_messages, dict(variables))
        except Exception as error:  # untrusted code may raise anything
            raise TemplateError(f"the chat template of the tokenizer in {self.folder} fails ({shown(error)}); "
                                f"{OTHER_TEMPLATES}, or mend it", one_line(reason(error)[:200])) from error

    def _in_content_form(self, message: MessageDict) -> MessageDict:
        """Return a message as the template reads it: with its content as a text or a list with one part, and calls."""
        role: str = message["role"]
        text: str = message["content"]
        if role not in self._reads_parts:
            self._reads_parts[role] = self._tries_parts(role)

        if role == "assistant" and self.has_channels:
            text = SHOWN_THOUGHTS.sub("", text)

        has_calls = bool(message.get("tool_calls"))
        reads_parts = self._reads_parts[role] and (text or not has_calls)
        template_message = {**message, "content": as_parts(text) if reads_parts else text}

        if self.has_channels and not text and message.get("reasoning_content"):
            template_message["thinking"] = message["reasoning_content"]  # its template's name for them
        return self._call_form.applied(template_message) if has_calls or role == "tool" else template_message

    @cached_property
    def _call_form(self) -> CallForm:
        """The first form in which the template writes a call, or else in which it works.

        A template that fails with all of them reports its own error when it is used.
        """
        working_forms = []
        for choices in product((False, True), (True, False), (False, True)):
            call_form = CallForm(*choices)
            shows_call = self._shows_call(call_form)
            if shows_call:
                return call_form
            if shows_call is not None:
                working_forms.append(call_form)

        return working_forms[0] if working_forms else CallForm()

    def _shows_call(self, call_form: CallForm) -> bool | None:
        """Return whether the template writes the arguments of a call in this form, but not as Python writes them.

        None: it fails, or writes a null.
        """
        function = {"name": "f", "arguments": TRIED_ARGUMENTS}
        call = {"id": "call_1", "type": "function", "function": function}
        messages = [self._in_content_form({"role": "user", "content": "?"}),
                    call_form.applied({"role": "assistant", "content": "", "tool_calls": [call]}),
                    call_form.applied({"role": "tool", "content": "?", "tool_call_id": "call_1", "name": "f"})]

        try:
            text = self._sandbox.call(PATIENCE, messages, {})
        except ValueError:
            return None

        if call_form.has_null_content and str(None) in text:
            return None
        return MARKER in text and str(TRIED_ARGUMENTS) not in text

    def _tries_parts(self, role: str) -> bool:
        """Return whether the template writes a marker of this role only as a part, or else as a text.

        Raises TimeoutError, and ValueError if it loses the words of the user.
        """
        shows_text = self._shows(role, MARKER)
        if shows_text:
            return False

        shows_part = self._shows(role, as_parts(MARKER))
        if role == "user" and shows_text is False and not shows_part:
            raise ValueError("it leaves out the words of the user")
        return bool(shows_part)  # a template that fails with both reports its own error when it is used

    def _shows(self, role: str, content: Content) -> bool | None:
        """Return whether the template writes the marker in a message of this role, or None if it fails."""
        messages: list[MessageDict] = [{"role": role, "content": content}]
        if role != "user":
            question = self._in_content_form({"role": "user", "content": "?"})
            messages.append(question)
            if role != "system":
                messages.insert(0, question)
        return self._writes_marker(messages)

    @cached_property
    def _reads_later_system(self) -> bool:
        """Whether the template writes a system message that is not the first message: some fail, or leave it out."""
        messages = [{"role": "user", "content": "?"}, {"role": "system", "content": MARKER}]
        return bool(self._writes_marker([self._in_content_form(message) for message in messages]))

    def _writes_marker(self, messages: Sequence[MessageDict]) -> bool | None:
        """Return whether the template writes the marker of these messages, or None if it fails."""
        try:
            return MARKER in self._sandbox.call(PATIENCE, messages, {})
        except ValueError:
            return None

    def spans(self, texts: Sequence[str], template: str, has_ends: bool = True
              ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the token ids of texts in a template, and if `has_ends` the end of each in characters, where known."""
        has_own_template = chosen(template, self.folder) == OWN
        has_ends = has_ends and self.tokenizer.is_fast

        try:
            first_ids = self._first_ids
            encoding = call_tokenizer(self.tokenizer, texts, add_special_tokens=False, verbose=False,
                                      return_offsets_mapping=has_ends, return_attention_mask=False)
        except Exception as error:  # an inconsistent tokenizer may fail only now
            raise ValueError(f"the tokenizer in {self.folder} fails ({shown(error)}); copy it again from the model, "
                             "or give token ids with prompt_ids=") from error

        for index, ids in enumerate(encoding["input_ids"]):
            if not ids:
                raise ValueError(f"the tokenizer in {self.folder} gives no tokens for this prompt and template; use "
                                 "another template=, or copy the tokenizer again from the model")

            # The tokenizer's own template already contains the first token, if there is one.
            has_first = has_own_template or ids[:1] == first_ids
            added_ids = [] if has_first else first_ids
            ends = [end for _, end in encoding["offset_mapping"][index]] if has_ends else []
            if ends:
                ends = [0] * len(added_ids) + ends
            yield [*added_ids, *ids], ends

    @cached_property
    def _first_ids(self) -> list[int]:
        """The token with which all texts begin, as a list, which is empty if there is none."""
        first_id = self.tokenizer.bos_token_id
        return [first_id] if first_id in call_tokenizer(self.tokenizer, "")["input_ids"] else []

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that a stream of these ids prints."""
        stream = Stream(self.tokenizer)
        return stream.add(ids) + stream.finish()


def call_tokenizer(function: Callable[..., Result], *inputs: Any, **options: Any) -> Result:
    """Call a function of a tokenizer, with a RuntimeError in place of what is raised if its library fails inside.

    That is no Exception, so the threads of a server would end of it: a tokenizer's patterns may be too costly for
    their library on some texts only.
    """
    try:
        return function(*inputs, **options)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:
        raise RuntimeError(reason(failure)) from failure


@contextmanager
def _readable(folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[Path]:
    """Yield a folder whose files transformers can read: this one, or a copy without byte order marks in JSON and with
    these `settings` of the tokenizer."""
    paths = [path for path in (folder / name for name in {*TOKENIZER_FILES, *SETTINGS}) if path.is_file()]
    mark = BYTE_ORDER_MARK.encode()
    json_paths = [path for path in paths if path.suffix == ".json"]
    has_marks = any(read_bytes(path, WHOLE_FOLDER).startswith(mark) for path in json_paths)
    config_path = folder / CONFIG_FILE
    is_as_read = not config_path.is_file() or read_json(config_path) == settings[CONFIG_FILE]
    if is_as_read and not has_marks:
        yield folder
        return

    # a copy
    with TemporaryDirectory() as copy:
        for path in paths:
            data = path.read_bytes()
            (Path(copy) / path.name).write_bytes(data[len(mark):] if data.startswith(mark) else data)
        if config_path.is_file():
            (Path(copy) / CONFIG_FILE).write_text(json.dumps(settings[CONFIG_FILE]), encoding="utf-8")
        yield Path(copy)


def _check_growth(tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer with rules that may write an endless text for a short one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for rules in (getattr(backend, "normalizer", None), getattr(backend, "decoder", None)):
        growth = _growth(json.loads(rules.__getstate__())) if rules else 1
        if growth > MAX_GROWTH:
            raise ValueError(f"its rules may write {growth} characters for one, more than {MAX_GROWTH}")


def _end_training(tokenizer: Any) -> None:
    """Let a text have the same tokens each time: training may have left merges out by chance."""
    model: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if hasattr(model, "dropout"):
        model.dropout = None


def _growth(rules: Mapping[str, Any]) -> int:
    """Return the number of characters that a normalizer or a decoder writes for one, at most."""
    parts = rules.get("normalizers") or rules.get("decoders") or ()

    replacement, pattern = "", ""
    if rules.get("type") == "Replace":
        replacement, pattern = rules["content"], rules["pattern"].get("String", "")

    if pattern:
        growth = math.ceil(len(replacement) / len(pattern))
    else:  # a pattern that matches nothing also matches between characters
        growth = 2 * len(replacement)
    return max(1, growth) * math.prod(map(_growth, parts))


def silent(tokenizer: Any) -> set[int]:
    """Return the special tokens, which print nothing, unless they mark calls or thoughts."""
    added_tokens = tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    special_ids.update(tokenizer.all_special_ids)
    marks = shown_marks([token.content for token in added_tokens.values()])
    return {token_id for token_id in special_ids if token_id not in added_tokens or
            added_tokens[token_id].content not in marks}


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the exact text of these tokens, none of which is silent."""
    text: str = call_tokenizer(tokenizer.decode, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


class Stream:
    """A decoder of a stream of ids, which never prints half a character; only the last few tokens are decoded again.

    A token is decoded together with the piece before it, because a sentencepiece tokenizer drops the space before the
    first word that it decodes. Special tokens print nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = len(tokenizer)
        self._silent_ids = silent(tokenizer)
        self._window_ids: list[int] = []
        self._num_printed = 0  # tokens of the window
        self._printed_text = ""  # of these tokens

    def add(self, ids: Iterable[int]) -> str:
        """Add ids to the stream, and return the text that can be printed now."""
        printed_ids = [token for token in ids if token not in self._silent_ids and token < self._vocab_size]
        return "".join(map(self._next, printed_ids))

    def _next(self, token: int) -> str:
        self._window_ids.append(token)
        text = decoded(self._tokenizer, self._window_ids)
        num_pending = len(self._window_ids) - self._num_printed
        if text.endswith(BROKEN) and num_pending < MAX_PENDING_TOKENS:
            return ""
        return self._print(text)

    def _print(self, text: str) -> str:
        """Return the new end of the window's text, and shorten the window to the tokens of this end."""
        piece = text[len(self._printed_text):]
        has_word = bool(piece.strip(" "))  # a context of only spaces would be dropped
        if has_word or len(self._window_ids) > MAX_CONTEXT_TOKENS:
            self._window_ids = self._window_ids[self._num_printed:]
            text = decoded(self._tokenizer, self._window_ids)
        self._printed_text, self._num_printed = text, len(self._window_ids)
        return piece

    def finish(self) -> str:
        """Return the text that was held back, even if it ends in half a character."""
        return self._print(decoded(self._tokenizer, self._window_ids))


def is_in_loop(text: str) -> bool:
    """Return whether a text ends with one sentence or phrase three times in succession."""
    repeated_texts = (text[-length:] for length in LOOP_LENGTHS if length * NUM_REPETITIONS <= len(text))
    return any(text.endswith(repeated * NUM_REPETITIONS) and any(map(str.isalpha, repeated))
               for repeated in repeated_texts)


class AnswerReader:
    """A reader of an answer's text up to the first stop text; a possible beginning of one is held back.

    An answer in channels is its last one, after its thoughts in <think> as other families write them; but with
    `shows_marks` it is as the model writes it.
    """

    def __init__(self, text: Text, stop: Stops = "", shows_marks: bool = False, stops_loops: bool = False) -> None:
        self._stops_loops = stops_loops
        self._stream = Stream(text.tokenizer)
        self._channels = CallReader(HARMONY, {}) if text.has_channels and not shows_marks else None
        self._in_thoughts = False  # whether thoughts are shown, and not ended yet
        stop_texts = [stop] if isinstance(stop, str) else stop
        self._stop_texts = [stop_text for stop_text in stop_texts if stop_text]
        self._pending = ""  # text that may begin a stop text
        self._shown_pieces: list[str] = []  # returned so far
        self.stopped = ""  # the stop text that was completed, if any

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return "".join(self._shown_pieces)

    def stops(self, token: int) -> bool:
        """Return whether a token completes a stop text, or a loop if they end an answer; call this for an answer's
        tokens in order."""
        self.read([token])
        return bool(self.stopped) or self._stops_loops and is_in_loop(self.text)

    def read(self, tokens: Iterable[int]) -> str:
        """Return the text that these tokens add, or nothing after a stop text."""
        return "" if self.stopped else self._shown(self._take(self._stream.add(tokens)))

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        piece = "" if self.stopped else self._take(self._stream.finish()) + self._pending
        self._pending = ""
        return self._shown(piece, completes=True)

    def _shown(self, piece: str, completes: bool = False) -> str:
        """Return the text to show for the next text of the model."""
        if self._channels:
            parts = [*self._channels.read(piece), *(self._channels.finish() if completes else ())]
            piece = "".join(map(self._shown_part, parts))
        self._shown_pieces.append(piece)
        return piece

    def _shown_part(self, answer_part: AnswerPart) -> str:
        if isinstance(answer_part, Thought):
            mark, text = "" if self._in_thoughts else "<think>", answer_part.text
        else:
            mark, text = "</think>\n\n" if self._in_thoughts else "", str(answer_part)
        self._in_thoughts = isinstance(answer_part, Thought)
        return mark + text

    def _take(self, piece: str) -> str:
        """Return the text that cannot belong to a stop text, up to the first stop text that is complete."""
        pending = self._pending + piece
        stops = [(pending.index(stop_text), stop_text) for stop_text in self._stop_texts if stop_text in pending]
        if stops:
            num_clear_chars, self.stopped = min(stops)
            self._pending = ""
        else:
            num_clear_chars = len(pending) - self._num_begun_chars(pending)
            self._pending = pending[num_clear_chars:]

        return pending[:num_clear_chars]

    def _num_begun_chars(self, text: str) -> int:
        """Return the number of characters at the end of a text that may begin a stop text."""
        counts = [0]
        for stop_text in self._stop_texts:
            max_count = min(len(text), len(stop_text) - 1)
            longer_counts = range(counts[-1] + 1, max_count + 1)
            counts += [count for count in longer_counts if text.endswith(stop_text[:count])]
        return max(counts)


def as_messages(turns: Sequence[str]) -> list[MessageDict]:
    """Convert turns to messages of user and assistant. Raises ValueError if the last one is not a question."""
    if not turns or not turns[-1].strip():
        raise ValueError("the prompt is empty; write a question, as in prompt='Why is the sky blue?'")
    if len(turns) % 2 == 0:
        raise ValueError(f"the conversation has {len(turns)} turns, so the assistant would answer itself; "
                         f"end it with a turn of the user")
    return [{"role": role, "content": turn} for role, turn in zip(cycle(("user", "assistant")), turns)]


def as_parts(content: str) -> Content:
    """Return a content in the form of templates that also read pictures."""
    return [{"type": "text", "text": content}]


def check_messages(messages: Sequence[Any]) -> None:
    """Raise ValueError for entries that are not messages, and if all messages are empty."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {number} has no text: write each as {{'role': 'user', 'content': 'a text'}}")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number} has the role {message.get('role')!a}: give one of {', '.join(ROLES)}")
    if not any(message["content"].strip() for message in messages):
        raise ValueError("the messages are empty: write a question in one of the role user")


def _in_conversation(messages: Sequence[MessageDict], template: str) -> str:
    """Return the messages in a template of fschat."""
    if template not in CONVERSATIONS:
        raise ValueError(f"template={template!r} is unknown; choose one of {', '.join(TEMPLATES)}")

    conversation = conversation_of(template)
    system_prompt, turns = _turns(messages, template)
    if system_prompt:
        conversation.set_system_message(system_prompt)
    for index, turn in enumerate([*turns, None]):  # None: the answer to generate
        conversation.append_message(conversation.roles[index % 2], turn)

    prompt: str = conversation.get_prompt()
    return prompt + " " if template == "llama-2" else prompt  # the space as in the original


def _turns(messages: Sequence[MessageDict], template: str) -> tuple[str, list[str]]:
    """Return the system prompt, and alternate turns of user and assistant. Raises ValueError for unsupported roles."""
    if any(message["role"] == "tool" for message in messages):
        raise ValueError(f"template={template} has no place for messages of the role tool; leave them out, or start "
                         "with template=own, if the tokenizer's template has one")

    turns: list[list[str]] = []  # each of one or several messages
    last_role = "assistant"
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            continue

        if role == last_role and turns:
            turns[-1].append(content)
        elif role == last_role:
            raise ValueError("the first message is the assistant's; begin with a message of the role user")
        else:
            turns.append([content])
        last_role = role
    return _system_text(messages), ["\n\n".join(turn_texts) for turn_texts in turns]


def _system_text(messages: Sequence[MessageDict]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["role"] == "system")


def _with_system_first(messages: Sequence[MessageDict]) -> list[MessageDict]:
    """Return messages with all system messages joined in the first one."""
    talk = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": _system_text(messages)}, *talk]


# --- single tokens ----------------------------------------------------------------------------------------------------

class TokenText(NamedTuple):
    """A token's printable name, and the bytes that it adds to a text (None if it prints nothing)."""

    name: str
    data: bytes | None

    @property
    def whole(self) -> bool:
        """Whether its bytes are whole characters."""
        return self.data is None or self.data == self.name.encode()


class TokenTexts:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent(tokenizer)
        self._context_ids: list[int] = call_tokenizer(tokenizer, CONTEXT_TEXT, add_special_tokens=False)["input_ids"]
        self._context_text = decoded(tokenizer, self._context_ids)
        self._spelled: dict[int, TokenText] = {}

    def __call__(self, token: int) -> TokenText:
        """Return the text of a token; an unknown token is named by its number."""
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def _spell(self, token: int) -> TokenText:
        if token >= len(self._tokenizer):
            return TokenText(f"<{token}>", None)
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._silent_ids:
            return TokenText(name, None)

        text = decoded(self._tokenizer, [*self._context_ids, token])
        if BROKEN not in text and text.startswith(self._context_text):
            text = text[len(self._context_text):]
            return TokenText(text, text.encode())

        data = _bytes(name)
        try:
            return TokenText(data.decode(), data)
        except UnicodeDecodeError:
            return TokenText("".join(f"\\x{byte:02x}" for byte in data), data)


def _bytes(name: str) -> bytes:
    """Return the bytes of a token that is not a text on its own, from its name in the vocabulary."""
    hex_byte = BYTE.fullmatch(name)
    if hex_byte:
        return bytes([int(hex_byte[1], 16)])

    if all(letter in BYTE_OF_LETTER for letter in name):
        return bytes(BYTE_OF_LETTER[letter] for letter in name)
    return name.encode()
