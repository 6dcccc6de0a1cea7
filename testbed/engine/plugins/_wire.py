"""Property values as the engine sends them: plain JSON, with secrets, unknowns and assets as marked objects.

The signatures and unknown markers are those of the Pulumi protocol (sdk/go/common/resource and plugin).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.struct_pb2 import Struct  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
Props: TypeAlias = dict[str, Value]

SIGNATURE = "4dabf18193072939515e22adb298388d"
SECRET = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105 - a marker, not a secret
ASSET = "c44067f5952c0a294b673a41bacd8c17"
ARCHIVE = "0def7320c3a5731c473e5ecbe6d01bc7"

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
_UNKNOWNS = frozenset(
    {
        UNKNOWN,
        "1c4a061d-8072-4f0a-a4cb-0ff528b18fe7",  # boolean
        "3eeb2bf0-c639-47a8-9e75-3b44932eb421",  # number
        "6a19a0b0-7e62-4c92-b797-7f8e31da9cc2",  # array
        "030794c1-ac77-496b-92df-f27374a8bd58",  # asset
        "e48ece36-62e2-4504-bad9-02848725956a",  # archive
        "dd056dcd-154b-4c76-9bd3-c8f88648b5ff",  # object
    }
)


def decode(struct: Struct) -> Props:
    """The properties of a protobuf struct; whole numbers become int, since protobuf knows only doubles."""
    return {key: _decode(value) for key, value in struct.fields.items()}


def _decode(value: Any) -> Value:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return decode(value.struct_value)
    if kind == "list_value":
        return [_decode(item) for item in value.list_value.values]
    if kind == "number_value":
        number = float(value.number_value)
        return int(number) if number.is_integer() else number
    if kind == "string_value":
        return str(value.string_value)
    return bool(value.bool_value) if kind == "bool_value" else None


def encode(props: Mapping[str, Any]) -> Struct:
    """The properties as a protobuf struct."""
    struct = Struct()
    struct.update(props)
    return struct


def signature(value: Value) -> str | None:
    """The signature of a marked object, None for a plain value."""
    found = value.get(SIGNATURE) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def secret(value: Value) -> Value:
    """The value marked secret (once)."""
    return value if signature(value) == SECRET else {SIGNATURE: SECRET, "value": value}


def is_unknown(value: Value) -> bool:
    """Whether the value itself, secret or not, is known only after the deployment."""
    bare = unwrap(value)
    return isinstance(bare, str) and bare in _UNKNOWNS


def unwrap(value: Value) -> Value:
    """The value without its own secret mark; marks further inside stay."""
    while isinstance(value, dict) and signature(value) == SECRET:
        value = value.get("value")
    return value


def reveal(value: Value) -> Value:
    """The value with every secret mark removed, at any depth."""
    bare = unwrap(value)
    if isinstance(bare, dict):
        return {key: reveal(item) for key, item in bare.items()}
    if isinstance(bare, list):
        return [reveal(item) for item in bare]
    return bare


def reveal_props(props: Props) -> Props:
    """`reveal` of every property."""
    return {key: reveal(value) for key, value in props.items()}


def _anywhere(value: Value, test: Callable[[Value], bool]) -> bool:
    if test(value):
        return True
    if isinstance(value, dict):
        return any(_anywhere(item, test) for item in value.values())
    if isinstance(value, list):
        return any(_anywhere(item, test) for item in value)
    return False


def has_secret(value: Value) -> bool:
    """Whether a secret is anywhere in the value."""
    return _anywhere(value, lambda item: signature(item) == SECRET)


def has_unknown(value: Value) -> bool:
    """Whether an unknown is anywhere in the value."""
    return _anywhere(value, is_unknown)


def content_hash(asset: Props) -> str:
    """What an asset or archive contains, as one string: the hash that the engine sends along, else its own text."""
    return str(asset.get("hash") or asset.get("text") or asset.get("path"))
