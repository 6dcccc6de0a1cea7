"""What the program does, in order, and how a person's mistake ends it: one message for each, no traceback."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pulumi

from components.settings import secret_setting, topology_setting
from host.errors import HostError
from host.facts import gather_facts
from host.target import target
from topology.problem import TopologyError

_ALREADY_SHOWN = 32
"""The exit status that Pulumi's language host takes for "said what was wrong": it adds no message of its own.

A RunError would be followed by `Program exited with non-zero exit code: 1`.
"""


def run() -> None:
    """Load, look, plan, build, export; a mistake is shown, every problem by itself, and ends the program."""
    try:
        _build()
    except TopologyError as error:
        _end(*map(str, error.problems))
    except HostError as error:
        _end(str(error))


def _end(*messages: str) -> None:
    for message in messages:
        pulumi.log.error(message)
    sys.exit(_ALREADY_SHOWN)


def _build() -> None:
    base = Path.cwd()
    topology = topology_setting()
    where = target(topology.host, private_key=secret_setting("sshPrivateKey"), base=base)
    recorded = base / "facts" / f"{pulumi.get_stack()}.json"
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(gather_facts, topology, where, recorded=recorded)
        from components.carry_out import carry_out  # noqa: PLC0415  loads while the host answers

        facts = asked.result()
    carry_out(topology, facts, where, base)
