"""The request's JSON, read into typed values; what doesn't fit is a bad request that names the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from .pci import Address, parse_address
from .result import BadRequestError, Json

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """A systemd service that this program manages, in a container or (None) on the host itself."""

    name: str
    unit: str
    container: int | None


@dataclass(frozen=True)
class Managed:
    """What this program may stop: its services and its virtual machines."""

    services: tuple[Service, ...] = ()
    vms: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One JSON object's fields, checked as they are read."""

    fields: dict[str, Json]
    where: str = ""

    @classmethod
    def of(cls, value: Json, where: str = "") -> Request:
        """Wrap a JSON value that must be an object."""
        if not isinstance(value, dict):
            raise BadRequestError(f"{where or 'the request'} is {value!r}: it must be a JSON object")
        return cls(value, where)

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.fields.get(name) is not None

    def _get(self, name: str, kind: type[T] | tuple[type[T], ...], word: str) -> T:
        value = self.fields.get(name)
        fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
        if not fits:
            raise BadRequestError(f"field {self.where}{name} is {value!r}: it must be {word}")
        return cast("T", value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string field."""
        return default if default is not None and not self.has(name) else self._get(name, str, "a string")

    def text_or_none(self, name: str) -> str | None:
        """A string field that may be null."""
        return self._get(name, str, "a string or null") if self.has(name) else None

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return default if default is not None and not self.has(name) else self._get(name, int, "a whole number")

    def number_or_none(self, name: str) -> int | None:
        """A whole number that may be null."""
        return self._get(name, int, "a whole number or null") if self.has(name) else None

    def seconds(self, name: str, default: float) -> float:
        """A time limit in seconds, at the top or in `timeouts`."""
        inner = self.fields.get("timeouts")
        source = self if self.has(name) or not isinstance(inner, dict) else Request(inner, "timeouts.")
        if not source.has(name):
            return default
        return float(source._get(name, (int, float), "a number of seconds"))  # noqa: SLF001 (another of our own)

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean."""
        return self._get(name, bool, "true or false") if self.has(name) else default

    def items(self, name: str, read: Callable[[Json, str], T]) -> tuple[T, ...]:
        """A list, each item read by `read(value, where)`; a missing field is an empty one."""
        if not self.has(name):
            return ()
        values = cast("list[Json]", self._get(name, list, "a list"))
        return tuple(read(value, f"{self.where}{name}[{index}]") for index, value in enumerate(values))

    def addresses(self, name: str) -> tuple[Address, ...]:
        """PCI addresses."""
        return self.items(name, _address)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Whole numbers."""
        return self.items(name, _number)

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings."""
        return self.items(name, _text)

    def objects(self, name: str) -> tuple[Request, ...]:
        """Objects."""
        return self.items(name, lambda value, where: Request.of(value, where + "."))

    def object(self, name: str) -> Request:
        """An object; a missing field is an empty one."""
        return Request.of(self.fields.get(name) or {}, f"{self.where}{name}.")

    def environment(self, name: str) -> dict[str, str]:
        """Names and values, both strings."""
        inner = self.object(name)
        return {key: inner.text(key) for key in inner.fields}

    def service(self) -> Service:
        """This object as a service's name, unit and container."""
        unit = self.text("unit")
        return Service(self.text("name", unit), unit, self.number_or_none("container"))

    def managed(self) -> Managed:
        """What the field `managed` lets this program stop."""
        inner = self.object("managed")
        return Managed(tuple(one.service() for one in inner.objects("services")), inner.numbers("vms"))


def _address(value: Json, where: str) -> Address:
    if not isinstance(value, str):
        raise BadRequestError(f'{where} is {value!r}: a PCI address is a string such as "0000:81:00.0"')
    return parse_address(value)


def _number(value: Json, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequestError(f"{where} is {value!r}: it must be a whole number")
    return value


def _text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise BadRequestError(f"{where} is {value!r}: it must be a string")
    return value
