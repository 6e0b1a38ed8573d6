"""Build the tokenizer of a GGUF file from the lists in its metadata, with the library `tokenizers`.

A byte-level file holds tokens and merges, but only a name for the way in which it splits a text before it merges. The
patterns of each name are a table here, as the model's authors published them. A file with another name is refused:
other pieces would be other tokens, without an error.
"""
from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from config.schema.untrusted import short_repr
from model.text import SAME_TEXT, TURN_ENDS

Metadata = Callable[..., Any]  # `metadata(key, default)` returns a value of the tokenizer's metadata

# --- the patterns -----------------------------------------------------------------------------------------------------

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT, TRIPLE = r"\p{N}", r"\p{N}{1,3}"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
LLAMA_3, QWEN_2 = f"{ENDINGS}|{WORD % TRIPLE}", f"{ENDINGS}|{WORD % DIGIT}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|%s"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES)
ENDING = f"{ENDINGS}?"
GPT_4O = CASED % (ENDING, ENDING, TRIPLE)
HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = r"[\p{Han}]+|" + (CASED % (ENDING, ENDING, TRIPLE)).replace(UPPER, HAN_UPPER).replace(LOWER, HAN_LOWER).replace(
    "[\\r\\n/]*", "[\\r\\n]*")
SYMBOLS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_3 = SYMBOLS + r"[\r\n]*|" + SPACES
# All letters with a case in the scripts and the Unicode version that DeepSeek's first tokenizer lists
DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^"
    "\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68\U00010570-\U000105bc"
    "\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a]]")
ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DIGITS_FROM_BEHIND = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


class PreTokenizer(NamedTuple):
    """The way in which a byte-level tokenizer splits a text before it merges."""

    patterns: Sequence[str]  # each splits the pieces of the one before
    keeps_tokens: bool = False  # a piece that is a token is not merged from its bytes
    adds_bos: bool = False  # unless the file specifies it
    is_composed: bool = False  # letters and their accents become single characters (NFC)


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: form for names, form in {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano":
        PreTokenizer((LLAMA_3,), keeps_tokens=True, adds_bos=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((LLAMA_3,)),
    "minicpm5": PreTokenizer((TRIPLE, f"{ENDINGS}|{WORD % (DIGIT + '+')}"), keeps_tokens=True),
    "jais-2": PreTokenizer((LLAMA_3.replace(r"\s+(?!\S)|\s+", "|".join(
        [*(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"])),)),
    "qwen2 deepseek-r1-qwen": PreTokenizer((QWEN_2,), is_composed=True),
    "stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2": PreTokenizer((QWEN_2,)),
    "qwen35": PreTokenizer((
        QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),), is_composed=True),
    "ufakzeka": PreTokenizer((WORD % DIGIT,)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN_2)),
    "seed-coder": PreTokenizer((QWEN_2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((
        "'(?i:[sdmt]|ll|ve|re)|" + (WORD % DIGIT).replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
    "exaone-moe": PreTokenizer((
        ENDINGS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert gigachat "
    "a.x-4.0 mellum exaone4 jais trillion granite-docling": PreTokenizer((GPT_2,)),
    "mpt olmo": PreTokenizer((GPT_2,), is_composed=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer((DIGIT, GPT_2)),
    "command-r": PreTokenizer((DIGIT, GPT_2), is_composed=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]")),
    "chameleon": PreTokenizer(("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGIT,
                               r"[\p{P}!-/:-@\[-`{-~]", GPT_2), adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((GPT_4O,)),
    "granite-embed-multi-97m": PreTokenizer((GPT_4O,), keeps_tokens=True),
    "tekken": PreTokenizer((CASED % ("", "", DIGIT),), keeps_tokens=True, adds_bos=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT_4O)),
    "kimi-k2": PreTokenizer((KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "deepseek-llm": PreTokenizer(("[\r\n]", rf"\s?{DEEPSEEK_LETTERS}+",
                                  "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", ASIAN,
                                  DIGIT)),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((TRIPLE, CHINESE, DEEPSEEK_3)),
    "spark2_5": PreTokenizer((TRIPLE, CHINESE, SYMBOLS + r"|[\r\n]|\s+(?!\S)|\s+", DIGIT)),
    "youtu": PreTokenizer((
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{CHINESE}", CASED % (ENDING, ENDING, DIGIT)), keeps_tokens=True),
    "afmoe": PreTokenizer((
        DIGITS_FROM_BEHIND,
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
        "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", DEEPSEEK_3)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((SENTENCE,)),
    "viking": PreTokenizer((SENTENCE, DIGIT)),
}.items() for name in names.split()}

# --- the tokens -------------------------------------------------------------------------------------------------------

BYTES, PIECES = "gpt2", "llama"  # kinds of tokenizers: byte-level, and SentencePiece's
USUAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPACE = "\u2581"  # of SentencePiece
NO_TOKEN = (1 << 32) - 1  # -1, as some files write it
END_ROLES = ("eos", "eot", "eom")  # of the tokens that end a text, a turn and a message
NAMED_ROLES = ("bos", "eos", "unk", "pad")  # of those that transformers knows
WEAK_ROLES = ("unk", "pad")  # some files give them to ordinary tokens, which have to be printed
ROLES = {**{role: f"{role}_token_id" for role in ("bos", *END_ROLES)},
         "unk": "unknown_token_id", "pad": "padding_token_id"}
PIECES_IDS = {"bos": 1, "eos": 2, "unk": 0}  # of files with pieces that do not list them
KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens that do not take the spaces after them


class Vocabulary:
    """The tokens of a GGUF file, and the ids with a role. Raises ValueError for ids that the tokens lack."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.kind: str = metadata("model")
        self.tokens: list[str] = list(metadata("tokens"))
        self.token_types: list[int] = metadata("token_type") or [USUAL] * len(self.tokens)
        for key in ("token_type", "scores"):
            entries = metadata(key)
            if entries and len(entries) != len(self.tokens):
                raise ValueError(f"it has {len(self.tokens)} tokens, but {len(entries)} entries in its {key}")
        if self.kind == PIECES:
            self._write_spaces()
        self._tell_apart()
        self.ids = dict(PIECES_IDS) if self.kind == PIECES else {}

        for role, key in ROLES.items():
            token_id = metadata(key)
            if token_id is None:
                continue
            self.ids.pop(role, None)
            is_token = 0 <= token_id < len(self.tokens)
            if not is_token and token_id not in (-1, NO_TOKEN) and role != "pad":  # nothing is padded here
                raise ValueError(f"its {key} is {token_id}, but it has only {len(self.tokens)} tokens")
            if is_token and (role not in WEAK_ROLES or self.token_types[token_id] in (UNKNOWN, CONTROL)):
                self.ids[role] = token_id

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer, as the file lists them."""
        return list(dict.fromkeys(self.ids[role] for role in END_ROLES if role in self.ids))

    def tokenizer(self, strips_spaces: bool) -> Any:
        """Build the tokenizer; with `strips_spaces`, special tokens take the spaces after them, as Phi-3's do.

        Raises ValueError for a kind that is not supported.
        """
        from tokenizers import processors
        from transformers import PreTrainedTokenizerFast

        builders = {BYTES: self._byte_tokenizer, PIECES: self._piece_tokenizer}
        if self.kind not in builders:
            raise ValueError(f"its tokenizer is of the kind {short_repr(self.kind)}, which is not supported, only "
                             f"{' and '.join(builders)}")
        tokenizer, adds_bos = builders[self.kind]()
        tokenizer.add_tokens(list(self._added_tokens(strips_spaces and self.kind == PIECES)))

        named_tokens = {f"{role}_token": self.tokens[self.ids[role]] for role in NAMED_ROLES if role in self.ids}
        if self._metadata("add_bos_token", adds_bos) and "bos" in self.ids:
            first_token = named_tokens["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                f"{first_token} $A", special_tokens=[(first_token, self.ids["bos"])])

        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named_tokens)

    def _added_tokens(self, strips_spaces: bool) -> Iterator[Any]:
        """Yield the tokens that are recognized before a text is split: the special ones, and those of users."""
        from tokenizers import AddedToken

        ids_with_role = set(self.ids.values())
        for token_id, (token, token_type) in enumerate(zip(self.tokens, self.token_types)):
            is_special = token_type in (UNKNOWN, CONTROL) or token_id in ids_with_role or token in TURN_ENDS
            if is_special or token_type == USER_DEFINED:
                rstrip = strips_spaces and token not in KEEP_SPACES
                yield AddedToken(token, rstrip=rstrip, normalized=False, special=is_special)

    def _write_spaces(self) -> None:
        """Write the spaces of users' tokens as a text has them: older files have SPACE there, as in pieces."""
        for token_id, (token, token_type) in enumerate(zip(self.tokens, self.token_types)):
            if token_type == USER_DEFINED:
                self.tokens[token_id] = token.replace(SPACE, " ")

    def _tell_apart(self) -> None:
        """Mark all but the last of the tokens with one text: a tokenizer has one of each name, and drops the others."""
        num_later: Counter[str] = Counter()
        for token_id in reversed(range(len(self.tokens))):
            token = self.tokens[token_id]
            self.tokens[token_id] = token + SAME_TEXT * num_later[token]
            num_later[token] += 1

    def _ids_by_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def _byte_tokenizer(self) -> tuple[Any, bool]:
        """Build a byte-level tokenizer, which merges pairs in the order of the file; it may add a first token."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        name = self._metadata("pre")
        if not name:
            raise ValueError("it is too old: it lacks tokenizer.ggml.pre, the way in which texts are split")
        if name not in PRE_TOKENIZERS:
            raise ValueError(f"its tokenizer splits texts in the way {short_repr(name)}, which is not supported")
        way_to_split = PRE_TOKENIZERS[name]

        # merge
        merges = [tuple(pair.split(" ")) for pair in self._metadata("merges")]
        tokenizer = Tokenizer(models.BPE(self._ids_by_token(), merges, ignore_merges=way_to_split.keeps_tokens))

        # compose, split, and write the bytes as letters
        if way_to_split.is_composed:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in way_to_split.patterns]
        to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_letters])
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SAME_TEXT, ""), decoders.ByteLevel()])
        return tokenizer, way_to_split.adds_bos

    def _piece_tokenizer(self) -> tuple[Any, bool]:
        """Build SentencePiece's tokenizer: of all pairs that form a token, that of the highest score is merged."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        # merge by scores
        scores = dict(zip(self.tokens, self._metadata("scores")))
        usual_tokens = [token for token, kind in zip(self.tokens, self.token_types) if kind == USUAL]
        cuts = ((token, token[:end], token[end:])
                for token in usual_tokens for end in range(1, len(token)))
        known_cuts = [cut for cut in cuts if cut[1] in scores and cut[2] in scores]
        known_cuts.sort(key=lambda cut: -scores[cut[0]])
        merges = [(left, right) for _, left, right in known_cuts]
        unknown_token = self.tokens[self.ids.get("unk", 0)]
        tokenizer = Tokenizer(models.BPE(
            self._ids_by_token(), merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))

        # write spaces as a letter
        adds_space = self._metadata("add_space_prefix", True)
        prefix = [normalizers.Prepend(SPACE)] if adds_space else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace(SAME_TEXT, ""), decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
            *strip])
        return tokenizer, True
