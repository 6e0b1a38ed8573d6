"""Read a tokenizer.json with the library `tokenizers`, and write chat templates with Jinja, as transformers does both.

Importing transformers takes a second of processor time, and most tokenizers need none of it.
"""
from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

Settings = Mapping[str, Any]  # of a tokenizer, as tokenizer_config.json has them

TEMPLATE_FILE = "chat_template.jinja"  # a template in a file of its own
TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_TOKENS = "additional_special_tokens"
TOKEN_FLAGS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
END_OF_TEXT = "<|endoftext|>"
ENDS = dict.fromkeys(("unk_token", "eos_token"), END_OF_TEXT)
LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
GEMMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
SPECIAL_TOKENS: Mapping[str, Mapping[str, str]] = {  # of the classes that are read here, by default
    "PreTrainedTokenizer": {}, "Qwen2Tokenizer": {**ENDS, "pad_token": END_OF_TEXT},
    "GPT2Tokenizer": {**ENDS, "bos_token": END_OF_TEXT}, "LlamaTokenizer": LLAMA_TOKENS, "GemmaTokenizer": GEMMA_TOKENS}
FRAMED_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")  # which add a first and a last token as their settings say
PLAIN_SETTINGS = {  # those that change nothing here, or that are read
    *TOKEN_ROLES, OTHER_TOKENS, "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder",
    "chat_template", "clean_up_tokenization_spaces", "errors", "legacy", "model_input_names", "model_max_length",
    "name_or_path", "padding_side", "sp_model_kwargs", "spaces_between_special_tokens", "tokenizer_class",
    "truncation_side", "use_default_system_prompt", "backend", "is_local", "local_files_only"}
# names of a template's variables that a request must not give: they are written here, or would have no effect
TAKEN_VARIABLES = {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
                   "tokenize"}
PRINTED_BYTES = (*range(ord("!"), ord("~") + 1), *range(0xa1, 0xad), *range(0xae, 0x100))
HIDDEN_BYTES = sorted({*range(0x100)}.difference(PRINTED_BYTES))
# bytes by the letters with which tokenizers of bytes write them (GPT-2)
BYTE_OF_LETTER = {**{chr(byte): byte for byte in PRINTED_BYTES},
                  **{chr(0x100 + index): byte for index, byte in enumerate(HIDDEN_BYTES)}}


class FileTokenizer:
    """The tokenizer of a tokenizer.json; its attributes are those of transformers' tokenizers."""

    is_fast = True

    def __init__(self, backend_tokenizer: Any, special_tokens_map: dict[str, Any], chat_template: Any) -> None:
        self.backend_tokenizer, self.special_tokens_map = backend_tokenizer, special_tokens_map
        self.chat_template = chat_template
        backend_tokenizer.no_truncation()
        self._size: int = backend_tokenizer.get_vocab_size()  # counted once, since that copies the vocabulary

    def __len__(self) -> int:
        return self._size

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The tokens that are recognized before a text is split, by their ids."""
        tokens: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return tokens

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the tokens with a role."""
        names = [*self.special_tokens_map.values()]
        other_names = names.pop() if OTHER_TOKENS in self.special_tokens_map else []
        return [self.convert_tokens_to_ids(name) for name in (*names, *other_names)]

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token with which a text begins."""
        return self._id_of_role("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token with which a text ends."""
        return self._id_of_role("eos_token")

    def _id_of_role(self, role: str) -> int | None:
        name = self.special_tokens_map.get(role)
        return None if name is None else self.convert_tokens_to_ids(name)

    def get_vocab(self) -> dict[str, int]:
        """Return all ids by the names of their tokens."""
        ids: dict[str, int] = self.backend_tokenizer.get_vocab()
        return ids

    def convert_tokens_to_ids(self, name: str) -> int:
        """Return the id of a token."""
        token_id: int = self.backend_tokenizer.token_to_id(name)
        return token_id

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the name of a token, or the list of those of several."""
        name_of = self.backend_tokenizer.id_to_token
        return name_of(ids) if isinstance(ids, int) else [name_of(token_id) for token_id in ids]

    def convert_tokens_to_string(self, names: Sequence[str]) -> str:
        """Return the text of tokens, given by their names."""
        text: str = self.backend_tokenizer.decoder.decode(names) if self.backend_tokenizer.decoder else " ".join(names)
        return text

    def __call__(self, texts: str | Sequence[str], add_special_tokens: bool = True, **unused_options: Any
                 ) -> dict[str, Any]:
        """Return the ids of a text or of several, and where each token lies in characters."""
        is_single = isinstance(texts, str)
        encodings = self.backend_tokenizer.encode_batch([texts] if is_single else list(texts),
                                                        add_special_tokens=add_special_tokens)
        ids, offsets = [encoding.ids for encoding in encodings], [encoding.offsets for encoding in encodings]
        return {"input_ids": ids[0] if is_single else ids, "offset_mapping": offsets[0] if is_single else offsets}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **unused_options: Any) -> str:
        """Return the text of tokens, with all its spaces."""
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def in_words_of_4(settings: Settings) -> dict[str, Any]:
    """Return a tokenizer's settings as transformers 4 reads them, if version 5 has written them."""
    old_settings = dict(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        old_settings["tokenizer_class"] = "PreTrainedTokenizerFast"

    extra_tokens = settings.get("extra_special_tokens")
    if isinstance(extra_tokens, list):  # in version 4 an object
        del old_settings["extra_special_tokens"]
        old_settings[OTHER_TOKENS] = [*(settings.get(OTHER_TOKENS) or ()), *extra_tokens]
    return old_settings


def file_tokenizer(folder: Path, files: Mapping[str, Settings]) -> FileTokenizer | None:
    """Read the tokenizer.json of a folder whose settings are given by their files.

    None if there is none, or if transformers might read it otherwise. Raises what `tokenizers` does for a broken file.
    """
    settings = files.get("tokenizer_config.json", {})
    class_name = str(settings.get("tokenizer_class")).replace("Fast", "")
    has_unread = any(settings[name] for name in settings.keys() - PLAIN_SETTINGS)
    is_readable = class_name in SPECIAL_TOKENS and not has_unread and "added_tokens.json" not in files
    if not is_readable or not (folder / "tokenizer.json").is_file() or (folder / "additional_chat_templates").exists():
        return None

    # tokens
    from tokenizers import Tokenizer  # an older version may lack it, whose boards have transformers

    backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if "added_tokens_decoder" not in settings:  # an older form, whose other file comes first
        map_settings = files.get("special_tokens_map.json", {})
        if OTHER_TOKENS in settings and OTHER_TOKENS in map_settings:
            return None
        settings = {**settings, **map_settings}
    special_tokens = _special_tokens({**SPECIAL_TOKENS[class_name], **settings})
    is_padded = backend_tokenizer.padding is not None  # with a token that transformers may add
    if special_tokens is None or is_padded or not _is_complete(backend_tokenizer, settings, special_tokens):
        return None

    # what is added to a text
    if class_name in FRAMED_CLASSES:
        if settings.get("add_prefix_space") is not None:
            return None
        _frame(backend_tokenizer, settings, special_tokens)
    elif not _has_spaces_as_set(backend_tokenizer, bool(settings.get("add_prefix_space", False))):
        return None
    has_template_file = (folder / TEMPLATE_FILE).is_file()  # it comes first, and Text reads it
    template = None if has_template_file else _template(settings.get("chat_template"))
    return FileTokenizer(backend_tokenizer, special_tokens, template)


def _special_tokens(settings: Settings) -> dict[str, Any] | None:
    """Return the names of tokens by their roles, or None if one is given in an unknown way."""
    names: dict[str, Any] = {role: _name(settings[role]) for role in TOKEN_ROLES if settings.get(role)}
    other_names = [_name(entry) for entry in settings.get(OTHER_TOKENS) or ()]
    if None in names.values() or None in other_names:
        return None
    return {**names, OTHER_TOKENS: other_names} if other_names else names


def _name(entry: Any) -> str | None:
    name = entry.get("content") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) else None


def _is_complete(backend_tokenizer: Any, settings: Settings, special_tokens: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer has all tokens that the settings name, as they describe them."""
    tokens = backend_tokenizer.get_added_tokens_decoder()
    special_names = {token.content for token in tokens.values() if token.special}
    named = {name for role, name in special_tokens.items() if role != OTHER_TOKENS}.union(
        special_tokens.get(OTHER_TOKENS, ()))

    descriptions = settings.get("added_tokens_decoder", {})
    has_equal = all(int(token_id) in tokens and _flags(tokens[int(token_id)].__getstate__()) == _flags(description)
                    for token_id, description in descriptions.items())
    return has_equal and named <= special_names


def _flags(description: Settings) -> list[Any]:
    return [description.get(flag) for flag in TOKEN_FLAGS]


def _frame(backend_tokenizer: Any, settings: Settings, special_tokens: Mapping[str, str]) -> None:
    """Let a text begin and end with the tokens that the settings ask for."""
    from tokenizers import processors

    first, last = ([special_tokens[f"{role}_token"]] if settings.get(f"add_{role}_token", role == "bos") else []
                   for role in ("bos", "eos"))
    ids = [(name, backend_tokenizer.token_to_id(name)) for name in (*first, *last)]
    backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=None, special_tokens=ids)


def _has_spaces_as_set(backend_tokenizer: Any, adds_space: bool) -> bool:
    """Return whether the tokenizer adds a space before a text exactly if the settings say so."""
    pre_tokenizer = backend_tokenizer.pre_tokenizer
    if pre_tokenizer is None:
        return True
    adds: bool = json.loads(pre_tokenizer.__getstate__()).get("add_prefix_space", adds_space)
    return adds == adds_space


def _template(setting: Any) -> Any:
    """Return a template as transformers keeps it: several by their names."""
    return {entry["name"]: entry["template"] for entry in setting} if isinstance(setting, list) else setting


# --- chat templates ---------------------------------------------------------------------------------------------------

def rendered(template: Any, special_tokens: Settings, messages: Sequence[Settings], variables: Settings) -> str:
    """Return messages in a template, or in that of several which fits; `variables` replace the special tokens' names.

    Raises what the template raises.
    """
    if isinstance(template, dict):
        name = "tool_use" if variables.get("tools") is not None and "tool_use" in template else "default"
        if name not in template:
            raise ValueError(f"it has several templates, but none is named default: {', '.join(sorted(template))}")
        template = template[name]
    defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
    return _compiled(template)({**defaults, **special_tokens, **variables, "messages": messages})


@lru_cache(maxsize=4)
def _compiled(template: str) -> Callable[..., str]:
    """Return the function that writes a template, with the names that transformers gives to templates."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(ext.Extension):
        """{% generation %}, which marks an answer for training."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            marked_nodes = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(marked_nodes, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template).render
