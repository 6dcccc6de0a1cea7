"""A service's command line, from its arguments and from its unit, as the rules need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topology.flags import Flags, canonical_flag, split_command
from topology.unit import parse_unit

if TYPE_CHECKING:
    from topology.spec import ServiceSpec


def arguments(service: ServiceSpec) -> dict[str, str]:
    """What a person wrote: canonical flag -> value; a flag that is `false` is not given."""
    return {canonical_flag(name): value for name, value in service.arguments if value.lower() != "false"}


def unit_flags(service: ServiceSpec) -> Flags | None:
    """The flags of the unit's command as systemd would run it; None if it runs nothing."""
    unit = parse_unit(service.text)
    files = {file.path: service.effective_environment for file in unit.environment_files}
    commands = unit.commands(files)
    return split_command(commands[-1])[1] if commands else None


def given_flags(service: ServiceSpec) -> set[str]:
    """Every flag the process is started with."""
    return set(arguments(service)) | set(unit_flags(service) or {})
