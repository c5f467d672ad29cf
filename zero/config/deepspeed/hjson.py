"""Reads the part of Hjson that configuration files use, which JSON is a part of.

Beyond JSON there may be comments (`#`, `//`, `/* */`), keys and texts without quotes or in single ones, no comma at the end of
a line, one after the last item, and no braces around the whole. As in Hjson, a text without quotes goes to the end of its line;
one that has quotes, braces or brackets in it is refused, as something was forgotten there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SEPARATOR = re.compile(r"(?:[^\S\n]|/\*.*?\*/)*", re.DOTALL)
_KEY = re.compile(r"[^\s,:{}\[\]\"'#]+")
_LINE = re.compile(r"[^\n]*")
# A number or a word that ends where a value may end; anything else without quotes is a text.
_PLAIN = re.compile(r"(true|false|null|NaN|-?Infinity|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[^\S\n]*(?:[,}\]\n#]|//|/\*|$))")

Pairs = Callable[[list[tuple[str, Any]]], Any]


class Hjson:
    """One text, and how far it was read. `pairs` makes a block; `decode` reads a value that is JSON."""

    def __init__(self, text: str, pairs: Pairs, decode: Callable[[str], Any]) -> None:
        self._text = text.replace("\r\n", "\n").replace("\r", "\n")
        self._at = 0
        self._pairs = pairs
        self._decode = decode

    def read(self) -> Any:
        """The whole text as one value. Raises json.JSONDecodeError where it breaks."""
        self._skip()
        if self._at == len(self._text):
            self._fail("nothing is written here")
        elif self._peek() in "{[":
            value = self._value()
        else:
            value = self._members(closing="")
        self._skip()
        if self._at < len(self._text):
            self._fail("something follows the end of the configuration")
        return value

    def _value(self) -> Any:
        first = self._peek()
        if not first or first in ",:}]":
            self._fail("a value is missing")
        if first == "{":
            self._at += 1
            return self._members(closing="}")
        if first == "[":
            self._at += 1
            return self._items()
        if first in "\"'":
            return self._quoted()
        plain = _PLAIN.match(self._text, self._at)
        if plain is not None:
            self._at = plain.end()
            return self._decode(plain[1])
        start = self._at
        text = self._take(_LINE).strip()
        if re.search(r"[\"{}\[\]]", text):
            self._at = start
            self._fail("a comma is missing in this line, or quotes around a text, which otherwise goes to the line's end")
        return text

    def _members(self, closing: str) -> Any:
        members = []
        while not self._closes(closing):
            key = self._quoted() if self._peek() in ("'", '"') else self._take(_KEY)
            if not key and self._text[self._at - 1 : self._at] not in ("'", '"'):
                self._fail("a key is missing")
            self._skip()
            if self._peek() != ":":
                self._fail(f"a colon is missing after the key {key[:40]!r}")
            self._at += 1
            self._skip()
            members.append((key, self._value()))
            self._separate(closing)
        return self._pairs(members)

    def _items(self) -> list[Any]:
        items = []
        while not self._closes("]"):
            items.append(self._value())
            self._separate("]")
        return items

    def _closes(self, closing: str) -> bool:
        """Whether a block ends here, which is read then."""
        self._skip()
        if self._at == len(self._text):
            return not closing or self._fail(f"{closing!r} is missing")
        if closing and self._peek() == closing:
            self._at += 1
            return True
        return False

    def _separate(self, closing: str) -> None:
        """Reads what lies between two items: a comma, the end of a line, or both."""
        self._take(_SEPARATOR)
        is_line_end = self._peek() in ("", "\n", "#") or self._text.startswith("//", self._at)
        self._skip()
        if self._peek() == ",":
            self._at += 1
        elif not is_line_end and self._peek() != closing:
            self._fail("a comma, or the end of the line, is missing")

    def _quoted(self) -> str:
        quote, start = self._peek(), self._at
        if self._text.startswith("'''", start):
            self._fail("texts of several lines are not read")
        end = start + 1
        while end < len(self._text) and self._text[end] not in (quote, "\n"):
            end += 2 if self._text[end] == "\\" else 1
        if self._text[end : end + 1] != quote:
            self._fail("the closing quote is missing")
        self._at = end + 1
        inner = self._text[start + 1 : end]
        if quote == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        try:
            return str(json.loads(f'"{inner}"'))
        except json.JSONDecodeError as error:
            self._at = start
            self._fail(f"this text is not one: {error.msg}")

    def _skip(self) -> None:
        self._take(_SPACE)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _fail(self, why: str) -> NoReturn:
        raise json.JSONDecodeError(why, self._text, self._at)
