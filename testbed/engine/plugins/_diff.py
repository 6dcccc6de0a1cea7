"""What changed between two sets of properties, as the engine's detailed diff names it."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import TYPE_CHECKING

from testbed.engine.plugins._wire import ARCHIVE, ASSET, content_hash, is_unknown, signature, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.engine.plugins._wire import Props, Value

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Change(StrEnum):
    """What happened to one property."""

    ADD = "add"
    DELETE = "delete"
    UPDATE = "update"


def changes(old: Props, new: Props) -> dict[str, Change]:
    """The changed leaves by property path (`connection.host`, `triggers[0]`); an unknown counts as a change."""
    return dict(_objects(old, new, ""))


def _objects(old: Props, new: Props, at: str) -> Iterator[tuple[str, Change]]:
    for key in old | new:
        yield from _values(old.get(key), new.get(key), _join(at, key))


def _values(old: Value, new: Value, at: str) -> Iterator[tuple[str, Change]]:
    old, new = unwrap(old), unwrap(new)
    if is_unknown(new):
        yield at, Change.ADD if old is None else Change.UPDATE
    elif isinstance(old, dict) and isinstance(new, dict):
        if signature(new) in {ASSET, ARCHIVE} or signature(old) in {ASSET, ARCHIVE}:
            if content_hash(old) != content_hash(new):
                yield at, Change.UPDATE
        else:
            yield from _objects(old, new, at)
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            before = old[index] if index < len(old) else None
            after = new[index] if index < len(new) else None
            yield from _values(before, after, f"{at}[{index}]")
    elif old is None and new is not None:
        yield at, Change.ADD
    elif old is not None and new is None:
        yield at, Change.DELETE
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        yield at, Change.UPDATE


def _join(at: str, key: str) -> str:
    if not _PLAIN_KEY.fullmatch(key):
        return f"{at}[{json.dumps(key)}]"
    return f"{at}.{key}" if at else key


def root(path: str) -> str:
    """The top-level property of a path."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]
