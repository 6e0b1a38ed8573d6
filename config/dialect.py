"""The two ways to write an argument, `key=value` and `--key value`: every command understands both.

Commands of a model take keys, and tools options; each turns the other form into its own before it parses, so that its
errors name the form in which it documents itself.
"""
from __future__ import annotations

import argparse
import re
from typing import Any, Iterable, Iterator, Sequence

KEY = re.compile(r"[a-z][a-z0-9_-]*")
TEXTS = {"prompt"}  # keys whose values may have spaces
OTHER_NAMES = {"eagle_dir": "eagle", "base_dir": "model_dir", "output": "o"}  # keys -> options of tools


def is_question(word: str) -> bool:
    """Return whether a word has spaces before any `=`, so that it is neither a key nor a preset."""
    return len(word.partition("=")[0].split()) > 1


def as_keys(words: Sequence[str]) -> list[str]:
    """Return words with `--key value`, `--key=value` and `--flag` as `key=value`; the request for help stays."""
    key_words: list[str] = []
    words_left = list(words)
    while words_left:
        word = words_left.pop(0)
        option_name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or not KEY.fullmatch(option_name) or option_name == "help":
            key_words.append(word)
            continue

        key = option_name.replace("-", "_")
        if not equals:
            has_value = bool(words_left) and _is_value(words_left[0], key)
            value = words_left.pop(0) if has_value else "true"
        key_words.append(f"{key}={value}")

    return key_words


def _is_value(word: str, key: str) -> bool:
    """Whether a word after `--key` is its value, and not the next argument after a flag."""
    if word.startswith("--") or is_question(word) and key not in TEXTS:
        return False
    return not KEY.fullmatch(word.partition("=")[0]) or "=" not in word


class OptionParser(argparse.ArgumentParser):
    """A parser of options that understands `key=value`, too, for its options and its positional arguments."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = None if args is None else list(self._as_options(args))
        return super().parse_known_args(words, namespace)

    def _as_options(self, words: Iterable[str]) -> Iterator[str]:
        positional_names = {action.dest for action in self._actions if not action.option_strings}
        for word in words:
            key, equals, value = word.partition("=")
            other_name = OTHER_NAMES.get(key, key)
            option = self._option_of(other_name) if equals and KEY.fullmatch(key) else None

            if option is not None and option.nargs == 0:
                yield from [option.option_strings[0]] * (value != "false")
            elif option is not None:
                yield from (option.option_strings[0], value)
            elif equals and other_name in positional_names:
                yield value
            else:
                yield word

    def _option_of(self, key: str) -> argparse.Action | None:
        """Return the option that a key means, if there is one."""
        for option_string in (f"--{key}", f"--{key.replace('_', '-')}", f"-{key}"):
            if option_string in self._option_string_actions:
                return self._option_string_actions[option_string]
        return None
