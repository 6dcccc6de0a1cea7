"""Inputs checked against the plugin's own Pulumi schema, so that a program learns of a mistake at preview."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from testbed.engine.plugins._wire import ARCHIVE, ASSET, has_secret, is_unknown, secret, signature, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from testbed.engine.plugins._wire import Props, Value

# A Pulumi schema's specification of a property or a type: JSON as published, hence not typed any further.
Spec = dict[str, Any]

# What the engine writes into a provider's configuration for itself: a plugin sees it, and no schema has it.
_FROM_THE_ENGINE = ("version", "pluginDownloadURL")


@dataclass(frozen=True)
class Failure:
    """One input that cannot be accepted: which property, and why."""

    path: str
    reason: str


class Schema:
    """A plugin's schema: what its resources, functions and configuration accept."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._json: Spec = json.loads(text)
        self.name: str = self._json["name"]
        self.version: str = self._json["version"]

    @classmethod
    def shipped(cls, name: str) -> Schema:
        """The trimmed copy of the public plugin's schema that is shipped beside this module."""
        return cls(resources.files(__package__).joinpath("schemas", f"{name}.json").read_text())

    def inputs(self, token: str) -> Spec:
        """The input properties of a resource."""
        found: Spec = self._json["resources"][token]["inputProperties"]
        return found

    def check(self, token: str, props: Props) -> list[Failure]:
        """Failures of a resource's inputs: unknown or missing property, wrong type, value outside an enumeration."""
        resource = self._json["resources"][token]
        return list(self._object(resource["inputProperties"], resource.get("requiredInputs", []), props, ""))

    def check_arguments(self, token: str, props: Props) -> list[Failure]:
        """As `check`, for a function's arguments."""
        inputs = self._json["functions"][token].get("inputs", {})
        return list(self._object(inputs.get("properties", {}), inputs.get("required", []), props, ""))

    def check_config(self, props: Props) -> list[Failure]:
        """As `check`, for the provider's own configuration; every value may also be its JSON text."""
        variables = self._json["provider"].get("inputProperties", {})
        given = {key: value for key, value in self.parse_config(props).items() if key not in _FROM_THE_ENGINE}
        return list(self._object(variables, [], given, ""))

    def parse_config(self, props: Props) -> Props:
        """The configuration with the JSON texts of numbers, booleans and objects read; the engine sends only texts."""
        variables = self._json["provider"].get("inputProperties", {})
        return {key: _from_text(variables.get(key, {}), value) for key, value in props.items()}

    def with_defaults(self, token: str, props: Props) -> Props:
        """The inputs with absent values filled in where the schema has a default, at any depth."""
        return self._fill(self.inputs(token), props)

    def with_secrets(self, token: str, props: Props, inputs: Props) -> Props:
        """The properties with those marked secret that the schema calls secret or whose input holds a secret."""
        always = {key for key, spec in self._json["resources"][token]["properties"].items() if spec.get("secret")}
        return {k: secret(v) if k in always or has_secret(inputs.get(k)) else v for k, v in props.items()}

    def config_with_secrets(self, props: Props) -> Props:
        """The configuration with those values marked secret that the schema calls secret."""
        variables = self._json["provider"].get("inputProperties", {})
        return {k: secret(v) if variables.get(k, {}).get("secret") else v for k, v in props.items()}

    def replaces(self, token: str, name: str) -> bool:
        """Whether a change of this input property replaces the resource."""
        spec = self.inputs(token).get(name, {})
        return bool(spec.get("replaceOnChanges") or spec.get("willReplaceOnChanges"))

    def type_of(self, spec: Spec) -> Spec:
        """The named type that a specification refers to, or the specification itself."""
        ref = spec.get("$ref", "")
        found: Spec = self._json["types"][ref.removeprefix("#/types/")] if ref.startswith("#/types/") else spec
        return found

    def _fill(self, specs: Mapping[str, Spec], props: Props) -> Props:
        filled = {key: self._fill_value(specs.get(key, {}), value) for key, value in props.items() if value is not None}
        return {key: spec["default"] for key, spec in specs.items() if "default" in spec} | filled

    def _fill_value(self, spec: Spec, value: Value) -> Value:
        bare = unwrap(value)
        properties = self.type_of(spec).get("properties")
        if properties is None or not isinstance(bare, dict):
            return value
        filled: Value = self._fill(properties, bare)
        return filled if bare is value else secret(filled)

    def _object(self, specs: Mapping[str, Spec], required: list[str], props: Props, at: str) -> Iterator[Failure]:
        for name in required:
            if props.get(name) is None:
                yield Failure(f"{at}{name}", f"missing required property '{name}'")
        for name, value in props.items():
            spec = specs.get(name)
            if spec is not None:
                yield from self._value(spec, value, f"{at}{name}")
            elif not name.startswith("__"):  # the engine's own bookkeeping
                near = difflib.get_close_matches(name, specs, n=1)
                yield Failure(
                    f"{at}{name}", f"unknown property '{name}'" + (f"; is '{near[0]}' meant?" if near else "")
                )

    def _value(self, spec: Spec, value: Value, at: str) -> Iterator[Failure]:
        bare = unwrap(value)
        kind = self.type_of(spec)
        if bare is None or is_unknown(bare) or kind.get("$ref", "").endswith("/Any"):
            return
        if kind.get("$ref", "").startswith("pulumi.json#/"):
            if signature(bare) not in {ASSET, ARCHIVE}:
                yield Failure(at, f"must be an asset or an archive, not {_name(bare)}")
        elif "properties" in kind:
            if isinstance(bare, dict):
                yield from self._object(kind["properties"], kind.get("required", []), bare, f"{at}.")
            else:
                yield Failure(at, f"must be an object, not {_name(bare)}")
        elif kind["type"] == "array" and isinstance(bare, list):
            for index, item in enumerate(bare):
                yield from self._value(kind["items"], item, f"{at}[{index}]")
        elif kind["type"] == "object" and isinstance(bare, dict):
            for key, item in bare.items():
                yield from self._value(kind["additionalProperties"], item, f"{at}.{key}")
        else:
            yield from _scalar(kind, bare, at, shown="a secret" if bare is not value else f"'{bare}'")


_SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def _scalar(kind: Spec, value: Value, at: str, shown: str) -> Iterator[Failure]:
    allowed = _SCALARS.get(kind["type"], ())
    # bool is an int in Python, never in a schema.
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        article = "an" if kind["type"][0] in "aio" else "a"
        yield Failure(at, f"must be {article} {kind['type']}, not {_name(value)}")
    elif "enum" in kind and value not in (values := [entry["value"] for entry in kind["enum"]]):
        yield Failure(at, f"must be one of {', '.join(map(str, values))}, not {shown}")


def _name(value: Value) -> str:
    """What kind of value this is, in the schema's words; never the value, which may be a secret."""
    match value:
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _from_text(spec: Spec, value: Value) -> Value:
    bare = unwrap(value)
    if spec.get("type") == "string" or not isinstance(bare, str) or is_unknown(bare):
        return value
    try:
        parsed: Value = json.loads(bare)
    except json.JSONDecodeError:
        return value
    return parsed if bare is value else secret(parsed)
