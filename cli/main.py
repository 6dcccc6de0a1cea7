"""gpu-topology: what a person asks outside of a Pulumi run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cli.stack import load_stack
from host.client import AgentClient
from host.errors import HostError
from host.facts import facts_request, gather_facts
from host.resources.canonical import read_copy
from host.resources.unit import secret_in_clear
from topology.diagram import before_after
from topology.plan import make_plan
from topology.presets import gpu_presets, model_presets
from topology.problem import TopologyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

StackName = Annotated[str, typer.Option("--stack", "-s", help="the stack: NAME of Pulumi.NAME.yaml")]


@contextmanager
def _readable(console: Console) -> Iterator[None]:
    """End a person's mistake with its message and exit status 1."""
    try:
        yield
    except (HostError, TopologyError) as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


@app.command()
def presets() -> None:
    """List the GPU and model presets that a stack file can name."""
    table = Table("kind", "preset")
    for kind, names in (("gpu", gpu_presets()), ("model", model_presets())):
        for name in names:
            table.add_row(kind, name)
    Console().print(table)


@app.command()
def diagram(stack: StackName) -> None:
    """Show the host as it is and as the stack file wants it."""
    console = Console()
    with _readable(Console(stderr=True)):
        loaded = load_stack(stack, Path.cwd())
        facts = gather_facts(
            loaded.topology,
            loaded.target(),
            recorded=_recording(loaded.base, stack),
        )
        plan = make_plan(loaded.topology, facts, base=loaded.base, read_local=_reader(loaded.base))
        console.print(before_after(facts, plan.spec))
        for change in plan.changes:
            console.print(str(change), markup=False)


@app.command()
def record(stack: StackName) -> None:
    """Record the live host's facts into facts/NAME.json, for previews where no host can be reached.

    The stack's `host.facts: recorded` uses the file; `pulumi up` checks on the host that it still holds.
    """
    errors = Console(stderr=True)
    with _readable(errors):
        loaded = load_stack(stack, Path.cwd())
        with errors.status(f"asking {loaded.topology.host.address}"), AgentClient(loaded.target()) as client:
            facts = client.facts(facts_request(loaded.topology))
        if held := next((place for place, text in _texts(facts) if secret_in_clear(text)), None):
            raise HostError(
                f"the host's {held} holds an API key, a token or a password in clear, which must not be recorded. "
                "Rule: no secret in a project file. Fix: move it into an EnvironmentFile that only root can read; a "
                "flag then has the value ${NAME}",
            )
        path = _recording(loaded.base, stack)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
    Console().print(f"recorded {path}", highlight=False, markup=False, soft_wrap=True)


def _texts(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """Every text among facts, with where it stands: `services.0.text`."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{place}.{index}")


def _recording(base: Path, stack: str) -> Path:
    return base / "facts" / f"{stack}.json"


def _reader(base: Path) -> Callable[[str], str | None]:
    return lambda path: read_copy(path, base)
