"""Rules on a service's SGLang arguments and environment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from topology.flags import canonical_flag
from topology.rules.catalogue import broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from topology.problem import Problem

_COMPUTED = {
    "tp": "the pool's device list",
    "pp": "parallelism.pipeline",
    "dp": "parallelism.data",
    "host": "address",
    "port": "port",
    "model-path": "model.path",
    "served-model-name": "model.servedName",
}
_LONG_NAMES = {
    "tensor-parallel-size": "tp",
    "pipeline-parallel-size": "pp",
    "data-parallel-size": "dp",
    "served-model-name": "served-model-name",
}
_SHORTEST_PREFIX = 5

_SECRET_FLAG = re.compile(r"(^|-)(api-key|password|secret|(access|auth|hf)-token)$")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|(ACCESS|SECRET|PRIVATE)_KEY)$", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


def argument_problems(
    subject: str,
    arguments: Iterable[tuple[str, str]],
    environment: Mapping[str, str],
) -> tuple[Problem, ...]:
    """Judge what a person wrote under `arguments` and `environment`; a secret's value is never repeated."""
    return tuple(_arguments(subject, arguments)) + tuple(_environment(subject, environment))


def _arguments(subject: str, arguments: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    for name, value in arguments:
        flag = _meant(name)
        if flag in _COMPUTED:
            yield broken(
                "argument-computed",
                subject,
                f"has --{name.lstrip('-')} among its arguments",
                "the program computes it from the topology, so that the two cannot disagree",
                f"remove it; what decides it is {_COMPUTED[flag]}",
            )
        elif _SECRET_FLAG.search(flag) and not _REFERENCE.fullmatch(value):
            yield broken(
                "no-secret-in-clear",
                subject,
                f"has a literal value for --{flag}",
                "it would stand readable in the unit file, in `ps` and in the state",
                f"write {_variable(flag)}=… into a file that only root can read where the service runs, list the file "
                f"in environmentFiles, and give the argument the value ${{{_variable(flag)}}}",
            )


def _meant(name: str) -> str:
    """The flag argparse would take this for: an unambiguous beginning of a long name is enough for it."""
    bare = name.lstrip("-").replace("_", "-").lower()
    if len(bare) >= _SHORTEST_PREFIX:
        return next((short for long, short in _LONG_NAMES.items() if long.startswith(bare)), canonical_flag(bare))
    return canonical_flag(bare)


def _variable(flag: str) -> str:
    return f"SGLANG_{flag.replace('-', '_').upper()}"


def _environment(subject: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    for name, value in environment.items():
        if value and _SECRET_NAME.search(name):
            yield broken(
                "no-secret-in-clear",
                subject,
                f"has a literal value for {name} in its environment",
                "it would stand readable in the unit file, in `systemctl show` and in the state",
                "write it into a file that only root can read where the service runs, and list that file in "
                "environmentFiles",
            )
