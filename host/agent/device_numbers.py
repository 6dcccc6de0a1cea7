"""Device numbers change with boots: which ones a container's lines may have, and what they are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import lxc_config
from .facts_devices import majors
from .ledger import numbers_by_name
from .lxc_config import NVIDIA_MAJOR
from .pci import Address, Pci

if TYPE_CHECKING:
    from .ledger import KnownMajors
    from .lxc_config import Config
    from .request import Request
    from .root import Root
    from .system import System


def all_majors(root: Root, known: KnownMajors | None = None) -> frozenset[int]:
    """Every character major of the nvidia drivers; with `known`, also those of earlier boots."""
    return frozenset({NVIDIA_MAJOR, *majors(root).values()}).union(*(known or {}).values())


def dynamic_majors(root: Root) -> dict[str, int]:
    """The majors that this boot gave out, by driver."""
    return {name: number for name, number in majors(root).items() if number != NVIDIA_MAJOR}


def majors_in_lines(root: Root, known: KnownMajors, *, rewritten: bool) -> KnownMajors:
    """The dynamic majors that a container's lines have once they are rewritten, or may have while they are."""
    now = {name: frozenset({number}) for name, number in dynamic_majors(root).items()}
    if rewritten:
        return {**known, **now}
    return {name: known.get(name, frozenset()) | now.get(name, frozenset()) for name in {*known, *now}}


def moved_majors(root: Root, known: KnownMajors) -> dict[int, int]:
    """Majors of earlier boots that are none of nvidia's now, and what their drivers have instead."""
    now, present = dynamic_majors(root), all_majors(root)
    return {old: now[name] for name, numbers in known.items() if name in now for old in numbers - present}


def found_lines(system: System, found: Request) -> Config:
    """A configuration as it was found, its GPU lines in the numbers of this boot."""
    known = numbers_by_name(found.object("majors"))
    config = lxc_config.parse(found.text("config"), all_majors(system.root, known))
    then, now = found.object("minors"), Pci(system.root).minors()
    cards = {minor: Address(then.text(str(minor))) for minor in config.minors if then.has(str(minor))}
    # Of a card that was or is on another driver nobody knows the minor: then these stay as they were.
    known_all = len(cards) == len(config.minors) and all(card in now for card in cards.values())
    minors = {minor: now[card] for minor, card in cards.items()} if known_all else {}
    return lxc_config.renumbered(config, moved_majors(system.root, known), minors)
