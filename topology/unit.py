"""systemd unit files read by meaning, as systemd itself reads them (systemd.syntax(7), systemd.exec(5)).

What systemd ignores with a warning (a line without `=`, an assignment outside of a section, an unbalanced quote) is
ignored here too, so that reading never fails and never means more than the real thing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WHITESPACE = " \t\n\r"
_EXEC_PREFIXES = "@-:+!|"
_SIMPLE_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "s": " ",
    "\\": "\\",
    '"': '"',
    "'": "'",
}
_CODED_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|([0-7]{3})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A variable in a command's word; group 1 is its name."""
_DOLLAR = re.compile(rf"\$\$|{VARIABLE.pattern}")
_WHOLE_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One assignment, its value with continuation lines joined and otherwise as written."""

    section: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class EnvironmentFile:
    """A file of variables; an `optional` one may be missing."""

    path: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit file, drop-ins merged in."""

    settings: tuple[Setting, ...]

    def values(self, section: str, key: str) -> tuple[str, ...]:
        """Every value of a list setting since the last empty assignment, which resets the list."""
        found: list[str] = []
        for setting in self.settings:
            if (setting.section, setting.key) == (section, key):
                found = [*found, setting.value] if setting.value else []
        return tuple(found)

    def value(self, section: str, key: str) -> str | None:
        """The last value of a setting that takes one; None if it is not set, or was reset."""
        values = self.values(section, key)
        return values[-1] if values else None

    @property
    def environment(self) -> dict[str, str]:
        """What `Environment=` sets, the last assignment of a name winning; without files."""
        words = (word for value in self.values("Service", "Environment") for word in split_words(value))
        pairs = (_ASSIGNMENT.fullmatch(_percent(word)) for word in words)
        return {pair[1]: pair[2] for pair in pairs if pair}

    @property
    def environment_files(self) -> tuple[EnvironmentFile, ...]:
        """The files of `EnvironmentFile=`, in the order they are read."""
        values = self.values("Service", "EnvironmentFile")
        return tuple(EnvironmentFile(_percent(v.removeprefix("-")), v.startswith("-")) for v in values)

    def process_environment(self, files: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """What a process gets from this unit: `files` holds the variables of each environment file that exists.

        A file beats `Environment=`, a later file an earlier one, and `UnsetEnvironment=` takes out last.
        """
        environment = self.environment
        for file in self.environment_files:
            environment.update(files.get(file.path, {}))
        for word in (w for value in self.values("Service", "UnsetEnvironment") for w in split_words(value)):
            name, equals, value = word.partition("=")
            if not equals or environment.get(name) == value:
                environment.pop(name, None)
        return environment

    def commands(self, files: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, ...], ...]:
        """Each `ExecStart=` as the words the process gets: prefixes taken off, variables put in."""
        environment = self.process_environment(files)
        return tuple(_command(value, environment) for value in self.values("Service", "ExecStart"))


def parse_unit(text: str, drop_ins: Mapping[str, str] | None = None) -> Unit:
    """Read a unit file and its drop-ins (path -> text), which systemd applies in the order of their file names."""
    ordered = sorted((drop_ins or {}).items(), key=lambda item: PurePosixPath(item[0]).name)
    texts = [text, *(drop_in for _, drop_in in ordered)]
    return Unit(tuple(setting for one in texts for setting in _settings(one)))


def _settings(text: str) -> Iterator[Setting]:
    section = ""
    for line in _logical_lines(text):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            continue
        key, equals, value = line.partition("=")
        if section and equals and key.strip():
            yield Setting(section, key.strip(), value.strip())


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with continuations joined by a space; comment lines do not end a continuation (systemd.syntax)."""
    pending = ""
    for raw in text.split("\n"):
        line = raw.lstrip(_WHITESPACE)
        if line.startswith(("#", ";")):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1] + " "
            continue
        if joined := (pending + line).strip(_WHITESPACE):
            yield joined
        pending = ""
    if joined := pending.strip(_WHITESPACE):
        yield joined


def split_words(value: str) -> tuple[str, ...]:
    """Split a value as systemd does: quotes group, C escapes are undone, an unknown escape stays as written.

    From an unbalanced quote on the value is dropped, as systemd does.
    """
    words: list[str] = []
    rest = value.lstrip(_WHITESPACE)
    while rest:
        found = _first_word(rest)
        if found is None:
            break
        word, rest = found
        words.append(word)
    return tuple(words)


def _first_word(text: str) -> tuple[str, str] | None:
    out: list[str] = []
    quote = ""
    position = 0
    while position < len(text):
        char = text[position]
        if char == "\\":
            piece, length = _escape(text[position + 1 :])
            out.append(piece)
            position += 1 + length
            continue
        if quote:
            if char == quote:
                quote = ""
            else:
                out.append(char)
        elif char in "'\"":
            quote = char
        elif char in _WHITESPACE:
            break
        else:
            out.append(char)
        position += 1
    return None if quote else ("".join(out), text[position:].lstrip(_WHITESPACE))


def _escape(text: str) -> tuple[str, int]:
    """What follows a backslash: its meaning and how many characters that took."""
    if text[:1] in _SIMPLE_ESCAPES:
        return _SIMPLE_ESCAPES[text[0]], 1
    coded = _CODED_ESCAPE.match(text)
    if coded is None:
        return "\\", 0
    digits, base = (coded[2], 8) if coded[2] else (coded[1] or coded[3] or coded[4], 16)
    code = int(digits, base)
    return (chr(code) if code < 0x110000 else "\\" + coded[0]), coded.end()


def _percent(text: str) -> str:
    """`%%` is a percent sign; other specifiers are left alone, since they mean the same on both sides."""
    return text.replace("%%", "%")


def _command(value: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    bare = value.lstrip(_EXEC_PREFIXES)
    prefixes = value[: len(value) - len(bare)]
    words = split_words(bare)
    if "@" in prefixes:  # the second word is argv[0], a name to show
        words = (*words[:1], *words[2:])
    if ":" in prefixes:  # no variables are put in
        return tuple(_percent(word) for word in words)
    return tuple(part for word in words for part in _substitute(_percent(word), environment))


def _substitute(word: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """`$NAME` as a whole word becomes the value's words, `${NAME}` stays within its word.

    A variable that is not known here stays as written: its value may be a secret, which facts do not hold.
    """
    whole = _WHOLE_VARIABLE.fullmatch(word)
    if whole and whole[1] in environment:
        return tuple(environment[whole[1]].split())
    return (_DOLLAR.sub(lambda m: environment.get(m[1], m[0]) if m[1] else "$", word),)


def quote_word(word: str, *, command: bool = False) -> str:
    """Write a word so that systemd reads back exactly it; in a `command` line a dollar is doubled as well."""
    escaped = word.replace("%", "%%")
    if command:
        escaped = escaped.replace("$", "$$")
    if _PLAIN_WORD.fullmatch(escaped):
        return escaped
    for char, escape in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\t", r"\t"), ("\r", r"\r")):
        escaped = escaped.replace(char, escape)
    return f'"{escaped}"'
