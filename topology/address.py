"""PCI addresses, parsed once at the edge and compared as values ever after."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue

ADDRESS_PATTERN = r"^(?:[0-9a-fA-F]{4}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$"
_ADDRESS = re.compile(ADDRESS_PATTERN)
_DEFAULT_DOMAIN = "0000"
_MAX_SLOT = 0x1F


@dataclass(frozen=True, order=True, slots=True)
class PciAddress:
    """A PCI function's address in canonical form, `0000:81:00.0`; ordered as the bus is.

    Raises:
        ValueError: the text is no PCI address.
    """

    text: str

    def __post_init__(self) -> None:
        if not _ADDRESS.match(self.text):
            raise ValueError(
                f"{self.text!r} is not a PCI address: write domain:bus:slot.function in hexadecimal, for example "
                '"0000:81:00.0" or "81:00.0"; `lspci -D -d ::0302` on the host lists them',
            )
        full = self.text.lower() if self.text.count(":") == 2 else f"{_DEFAULT_DOMAIN}:{self.text.lower()}"
        slot = int(full[8:10], 16)
        if slot > _MAX_SLOT:
            raise ValueError(f"{self.text!r} is not a PCI address: a bus has slots 00 to 1f, not {slot:02x}")
        object.__setattr__(self, "text", full)

    @classmethod
    def parse(cls, value: object) -> PciAddress:
        """Parse what a YAML file holds; a number there is an address that lost its quotes."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise ValueError(  # noqa: TRY004  pydantic turns a ValueError, not a TypeError, into a located message
                f"{value!r} is not a PCI address but a {type(value).__name__}: YAML reads an unquoted 61:00.0 as a "
                'number, so write it in quotes, "61:00.0"',
            )
        return cls(value)

    @property
    def slot(self) -> str:
        """The slot without the function, as a PCI mapping's path and all functions of a card share it."""
        return self.text.rsplit(".", 1)[0]

    @property
    def function(self) -> int:
        """The function's number, 0 to 7."""
        return int(self.text[-1])

    @property
    def short(self) -> str:
        """The address without domain 0000, as people write it."""
        return self.text.removeprefix(f"{_DEFAULT_DOMAIN}:")

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.to_string_ser_schema(),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls,
        schema: core_schema.CoreSchema,
        handler: GetJsonSchemaHandler,
    ) -> JsonSchemaValue:
        return {
            "type": "string",
            "pattern": ADDRESS_PATTERN,
            "description": 'PCI address, quoted: "81:00.0" or "0000:81:00.0"',
        }
