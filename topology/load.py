"""From the stack file's raw object to a checked `Topology`, or every problem in it at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from topology.config import Topology
from topology.problem import Problem, TopologyError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KEY = "gpu-topology:topology"
_PLACEHOLDER = re.compile(r"^\s*<\s*fill in\b\s*:?\s*(?P<what>.*?)\s*>?\s*$", re.IGNORECASE | re.DOTALL)
_LONGEST_VALUE = 80

Path = tuple[str | int, ...]


def load_topology(raw: object) -> Topology:
    """Check the value of `gpu-topology:topology` as YAML gave it.

    Raises:
        TopologyError: with every placeholder left in, unknown key and wrong value, each by its path.
    """
    if not isinstance(raw, Mapping):
        raise TopologyError((_no_topology(raw),))
    problems = [_unfilled(path, text) for path, text in _placeholders(raw)]
    try:
        topology = Topology.model_validate(raw)
    except ValidationError as error:
        problems += _problems(error, raw)
    if problems:
        raise TopologyError(tuple(problems))
    return topology


def nearest(word: str, known: Sequence[str]) -> str:
    """Say `did you mean …` for a word nearly among the known ones, and list those."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    listed = ", ".join(sorted(known)) or "none"
    return f"did you mean {close[0]}? Known here: {listed}" if close else f"use one of: {listed}"


def _no_topology(raw: object) -> Problem:
    return Problem(
        rule="topology",
        subject=KEY,
        value="is missing" if raw is None else f"is a {type(raw).__name__}",
        why="the stack file says under this key what the hypervisor must look like",
        fix="write a mapping with version, host and pools; Pulumi.sim.yaml is an example",
    )


def _placeholders(value: object, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        if _PLACEHOLDER.match(value):
            yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and _PLACEHOLDER.match(key):
                yield (*path, key), key
            yield from _placeholders(inner, (*path, key))
    elif isinstance(value, Sequence):
        for index, inner in enumerate(value):
            yield from _placeholders(inner, (*path, index))


def _unfilled(path: Path, text: str) -> Problem:
    match = _PLACEHOLDER.match(text)
    return Problem(
        rule="placeholder",
        subject=_dotted(path[:-1]) if path[-1] == text else _dotted(path),
        value="is still a placeholder",
        why="only the hypervisor's owner knows this value",
        fix=f"fill in {match['what'] if match else text}",
    )


def _dotted(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or KEY


def _problems(error: ValidationError, raw: Mapping[Any, Any]) -> list[Problem]:
    schema = Topology.model_json_schema(by_alias=True)
    found: dict[Path, Problem] = {}
    for detail in error.errors():
        path, tags = _follow(detail["loc"], raw, missing=detail["type"] == "missing")
        if _hidden_by_placeholder(path, raw) or (tags == ("str",) and _is_object(detail["input"], schema, path)):
            continue
        found.setdefault(path, _bad_key(detail, path) if "[key]" in tags else _problem(detail, path, schema))
    return list(found.values())


def _is_object(value: object, schema: dict[str, Any], path: Path) -> bool:
    """Tell a mapping where one is allowed beside text: then what is wrong is inside of it."""
    return isinstance(value, Mapping) and "properties" in _node(schema, path)


def _follow(loc: Path, raw: Mapping[Any, Any], *, missing: bool) -> tuple[Path, tuple[str | int, ...]]:
    """Split pydantic's location into the path in the file and the tags of unions, which stand in no file."""
    path: list[str | int] = []
    tags: list[str | int] = []
    here: Any = raw
    for position, part in enumerate(loc):
        step = _step(here, part)
        if step is not None:
            path.append(str(part) if isinstance(here, Mapping) else part)
            here = step[0]
        elif missing and position == len(loc) - 1:
            path.append(part)
        else:
            tags.append(part)
    return tuple(path), tuple(tags)


def _step(here: Any, part: str | int) -> tuple[Any] | None:
    if isinstance(here, Mapping):
        # A VMID is a number in YAML, text in JSON and a number again in pydantic's location.
        return next(((value,) for key, value in here.items() if str(key) == str(part)), None)
    if isinstance(here, Sequence) and not isinstance(here, str) and isinstance(part, int) and part < len(here):
        return (here[part],)
    return None


def _hidden_by_placeholder(path: Path, raw: Mapping[Any, Any]) -> bool:
    here: Any = raw
    for part in path:
        if isinstance(part, str) and _PLACEHOLDER.match(part):
            return True
        step = _step(here, part)
        if step is None:
            return False
        here = step[0]
    return isinstance(here, str) and bool(_PLACEHOLDER.match(here))


def _bad_key(detail: ErrorDetails, path: Path) -> Problem:
    return Problem(
        rule="configuration",
        subject=_dotted(path),
        value="is no name for an entry here",
        why=_lower(detail["msg"]),
        fix="rename the entry; containers and vms are named by their VMID, pools and services in small letters",
    )


def _problem(detail: ErrorDetails, path: Path, schema: dict[str, Any]) -> Problem:
    kind = detail["type"]
    parent = _node(schema, path[:-1])
    if kind == "extra_forbidden":
        return Problem(
            rule="unknown-key",
            subject=_dotted(path),
            value="is not known",
            why="a misspelt key would otherwise be ignored",
            fix=nearest(str(path[-1]), tuple(parent.get("properties", ()))),
        )
    described = _node(schema, path).get("description")
    if kind == "missing":
        return Problem(
            rule="missing-key",
            subject=_dotted(path),
            value="is missing",
            why="it has no default",
            fix=f"write {path[-1]}: {described}" if described else f"write {path[-1]}",
        )
    if kind == "value_error":
        why, _, fix = detail["msg"].removeprefix("Value error, ").partition(": ")
        return Problem(
            rule="pci-address" if "PCI address" in why else "configuration",
            subject=_dotted(path),
            value=_shown(detail["input"]),
            why=why,
            fix=fix or "see the reference in README.md",
        )
    return Problem(
        rule="configuration",
        subject=_dotted(path),
        value=_shown(detail["input"]),
        why=_WHYS.get(kind) or _lower(detail["msg"]),
        fix=_FIXES.get(kind, "write a value of that kind") + (f": {described}" if described else ""),
    )


_FIXES = {
    "string_type": "put the value in quotes",
    "bool_parsing": "write true or false",
    "int_parsing": "write a whole number",
    "enum": "write one of these",
    "literal_error": "write exactly that",
    "string_pattern_mismatch": "write a value that matches the pattern",
    "too_short": "list at least one, or take out what it belongs to",
}

_WHYS = {"too_short": "it holds at least one"}
"""Where pydantic speaks of Python's types."""


def _lower(message: str) -> str:
    return message[0].lower() + message[1:]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"has {', '.join(map(str, value)) or 'no keys'}"
    text = repr(value)
    return f"is {text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + '…'}"


def _node(schema: dict[str, Any], path: Path) -> dict[str, Any]:
    """Find the JSON Schema of what stands at a path; empty where the schema knows nothing of it."""
    node = schema
    for part in path:
        inner = _inner(_resolve(node, schema), part)
        if inner is None:
            return {}
        node = inner
    # The description of the place, never that of the class which stands there.
    return {**_resolve(node, schema), "description": node.get("description")}


def _resolve(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow `$ref`, and of alternatives take the one that has properties."""
    if "$ref" in node:
        return _resolve(schema["$defs"][node["$ref"].rsplit("/", 1)[-1]], schema)
    for choice in node.get("anyOf", ()):
        chosen = _resolve(choice, schema)
        if "properties" in chosen or "items" in chosen:
            return chosen
    return node


def _inner(node: dict[str, Any], part: str | int) -> dict[str, Any] | None:
    if isinstance(part, int) and "items" in node:
        found = node["items"]
    elif str(part) in node.get("properties", {}):
        found = node["properties"][str(part)]
    else:
        # A mapping with a pattern for its keys puts what it holds under patternProperties.
        found = next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties"))
    return found if isinstance(found, dict) else None
