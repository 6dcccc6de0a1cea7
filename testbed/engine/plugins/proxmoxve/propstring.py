"""Proxmox's property strings, `first,key=value,key=value`, in which the API writes devices and drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from testbed.engine.plugins._wire import Value


def join(first: str | None, options: Mapping[str, Value]) -> str:
    """The string of a leading value and options; None leaves an option out, booleans are 1 and 0."""
    written = [f"{key}={text(value)}" for key, value in options.items() if value is not None]
    return ",".join([*([] if first is None else [first]), *written])


def split(value: str, default_key: str = "") -> dict[str, str]:
    """The options of a string; a leading value without a key is under `default_key`."""
    pairs = (part.partition("=") for part in value.split(",") if part)
    return {key if equals else default_key: item if equals else key for key, equals, item in pairs}


def text(value: Value) -> str:
    """A value as the API takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def flag(value: object, *, default: bool = False) -> bool:
    """A boolean as the API gives it: absent, 0 or 1 as a number or as text."""
    return default if value is None else str(value) in {"1", "yes", "on", "true"}
