"""Components' inputs as the engine hands them to a policy, rebuilt into the specs that the rules judge.

On the way through the engine tuples became lists and whole numbers floats; lists and mappings are proxies that raise
where a value is not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pulumi_policy.proxy import UnknownValueError
from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Spec = TypeVar("Spec")


class ViewError(ValueError):
    """A component's inputs cannot be judged; the text says which one and why."""


def view(spec: type[Spec], props: Mapping[str, Any], key: str) -> Spec:
    """Rebuild the spec that a component has as its input `key`.

    Raises:
        ViewError: the input is missing, not known in preview, or no such spec.
    """
    try:
        value = _plain(props[key])
    except KeyError:
        raise ViewError(f"input {key} is missing") from None
    except UnknownValueError as error:
        raise ViewError(f"input {'.'.join(error.props)} is not known yet") from None
    wanted: Any = spec
    try:
        found: Spec = _adapter(wanted).validate_python(value)
    except ValidationError as error:
        raise ViewError("; ".join(_described(key, detail) for detail in error.errors()[:3])) from None
    return found


@cache
def _adapter(spec: Any) -> TypeAdapter[Any]:
    """Make the reader of a spec once: that takes milliseconds, and every policy of a component asks for it."""
    return TypeAdapter(spec)


def _plain(value: Any) -> Any:
    """Read everything by key, since a proxy raises only then for a value that is not known."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(value[index]) for index in range(len(value))]
    return value


def _described(key: str, detail: ErrorDetails) -> str:
    path = ".".join(map(str, (key, *detail["loc"])))
    return f"input {path}: {detail['msg'].lower()}"
