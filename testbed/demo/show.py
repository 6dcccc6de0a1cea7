"""How the demo tells its story in a terminal, and how it notices that something is not as told."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table

from host.facts import gather_facts
from host.target import target
from testbed.checks import check_host
from testbed.engine.cache import REPOSITORY
from testbed.simulator import EventKind
from topology.diagram import View, picture, seen
from topology.load import load_topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from rich.console import Console

    from testbed.checks import Host
    from testbed.simulator import Simulator
    from testbed.workspace import Workspace

_RESTARTS = (EventKind.SERVICE_START, EventKind.CONTAINER_START, EventKind.VM_START, EventKind.UNBIND, EventKind.BIND)


class DemoError(Exception):
    """A step of the demo did not end as it must."""


class Narrator:
    """Shows chapters, runs and checks on one console."""

    policies = str(REPOSITORY / "policies")

    def __init__(self, console: Console) -> None:
        self._console = console

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._console.print()
        self._console.print(Rule(style="dim"), f"[bold]{title}", sep="\n")

    def run(self, workspace: Workspace, verb: str, *arguments: str) -> None:
        """Run `pulumi VERB` and show it as it comes."""
        shown = " ".join(part.removeprefix(f"{REPOSITORY}/") for part in arguments)
        self._console.print(f"\n[bold cyan]$ pulumi {verb} {shown}".rstrip())
        began = time.monotonic()
        run = getattr(workspace, verb)(*arguments, "--suppress-outputs", echo=sys.stdout)
        self._console.print(f"[dim]exit {run.status}, {time.monotonic() - began:.1f} s")
        if run.status != 0:
            raise DemoError(f"`pulumi {verb}` ended with {run.status}")

    def look(self, workspace: Workspace) -> View:
        """The host as it is now."""
        topology = load_topology(workspace.topology)
        where = target(topology.host, private_key=None, base=workspace.folder)
        return seen(gather_facts(topology, where, recorded=workspace.folder / "facts.json"))

    def picture(self, before: View, after: View) -> None:
        """Show two views of the host."""
        for title, drawing in (("before", picture(before)), ("after", picture(after, before))):
            self._console.print(Rule(title, align="left"), drawing, sep="\n")

    def restarts(self, simulator: Simulator) -> int:
        """How many times anything was bound, unbound, started or restarted so far."""
        return len(simulator.events(*_RESTARTS))

    def unchanged(self, found: Mapping[str, str], now: Mapping[str, str], started: int, restarted: int) -> None:
        """Check that the host is byte for byte as it was found, and that nothing was restarted."""
        different = sorted(name for name in found.keys() | now.keys() if found.get(name) != now.get(name))
        self._table([("host files and states changed", 0, len(different)), ("starts, binds", 0, restarted - started)])
        if different or restarted != started:
            raise DemoError(f"adopting changed the host: {', '.join(different) or 'something was restarted'}")

    def check(self, host: Host, workspace: Workspace, *, split: bool) -> None:
        """Check the simulated host itself."""
        checks = check_host(host, workspace, split=split)
        self._table([(check.what, check.wanted, check.seen) for check in checks])
        wrong = [check.what for check in checks if not check.ok]
        if wrong:
            raise DemoError(f"the simulated host is not as it must be: {', '.join(wrong)}")

    def state_difference(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Show how the exported topology differs between two `pulumi stack export`s."""
        table = Table("in the state", "before", "after", title="what the state records", title_justify="left")
        old, new = dict(_leaves(_topology(before))), dict(_leaves(_topology(after)))
        for path in sorted(old.keys() | new.keys()):
            if old.get(path) != new.get(path) and ("tp" in path or "devices" in path):
                table.add_row(path, old.get(path, ""), new.get(path, ""))
        self._console.print(table)
        if not table.row_count:
            raise DemoError("the state does not record the change")

    def failed(self, failure: DemoError) -> None:
        """Say what went wrong."""
        self._console.print(f"\n[bold red]demo failed: {failure}")

    def done(self, seconds: float, folder: Path) -> None:
        """Say that all is well, and where to go on."""
        self._console.print(
            Panel(
                f"Every check held; {seconds:.0f} s. The stack is in {os.path.relpath(folder, REPOSITORY)}.\n"
                "`make simulator` starts a simulated host to try things on by hand; README.md leads to your own.",
                style="green",
            ),
        )

    def _table(self, rows: list[tuple[str, object, object]]) -> None:
        table = Table("on the simulated host", "must be", "is", "")
        for what, wanted, found in rows:
            table.add_row(what, _brief(wanted), _brief(found), "[green]ok" if wanted == found else "[bold red]NO")
        self._console.print(table)


def _topology(export: dict[str, Any]) -> Any:
    resources = export["deployment"]["resources"]
    return next(r["outputs"]["topology"] for r in resources if r["type"] == "pulumi:pulumi:Stack")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        yield path, "\n".join(map(str, value))
    else:
        yield path, str(value)


def _brief(value: object) -> str:
    match value:
        case dict():
            by_value: dict[str, list[str]] = {}
            for key, item in value.items():
                by_value.setdefault(str(item), []).append(_short(key))
            return "\n".join(f"{item}: {' '.join(keys)}" for item, keys in by_value.items())
        case tuple():
            return " ".join(map(_short, value)) or "none"
        case list():
            lines = (" ".join(map(_short, item)) if isinstance(item, tuple) else _short(item) for item in value)
            return "\n".join(lines) or "none"
        case True | False:
            return "yes" if value else "no"
        case str() if "\n" in value:
            return f"{len(value.splitlines())} lines"
        case _:
            return str(value)


def _short(value: object) -> str:
    return str(value).removeprefix("0000:").removesuffix(":00.0")
