"""JSON Schema of a whole `Pulumi.<stack>.yaml`, which an editor binds by a comment in the file.

`python -m topology.schema` writes schema/stack.schema.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topology.config import Topology
from topology.load import KEY

FILE = Path(__file__).parent.parent / "schema" / "stack.schema.json"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VMID = "^[1-9][0-9]{2,8}$"
_SECRETS = {
    "gpu-topology:sshPrivateKey": "private key for root on the host: `pulumi config set --secret`",
    "gpu-topology:proxmoxApiToken": "API token USER@REALM!NAME=SECRET: `pulumi config set --secret`",
    "gpu-topology:proxmoxPassword": "password of proxmox.username: `pulumi config set --secret`",
    "gpu-topology:serviceApiKeys": "JSON object of API keys by service: `pulumi config set --secret`",
}


def stack_schema() -> dict[str, Any]:
    """Make the schema: the topology under its key, other keys of Pulumi's and of other programs allowed."""
    topology = Topology.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
    definitions = topology.pop("$defs")
    for named in ("pools", "services"):
        # pydantic writes the names' pattern but lets other names through.
        topology["properties"][named]["additionalProperties"] = False
    for numbered in ("containers", "vms"):
        topology["properties"][numbered]["propertyNames"] = {"pattern": _VMID}
    return {
        "$schema": _DIALECT,
        "title": "Stack file of gpu-topology",
        "type": "object",
        "properties": {
            "config": {
                "type": "object",
                "properties": {
                    KEY: {"$ref": "#/$defs/Topology"},
                    **{name: _secret(description) for name, description in _SECRETS.items()},
                },
                "required": [KEY],
            },
            "encryptionsalt": {"type": "string"},
        },
        "required": ["config"],
        "$defs": {"Topology": topology, **definitions},
    }


def _secret(description: str) -> dict[str, Any]:
    """A secret as `pulumi config set --secret` leaves it, never plain text."""
    return {
        "description": description,
        "type": "object",
        "properties": {"secure": {"type": "string"}},
        "required": ["secure"],
        "additionalProperties": False,
    }


def schema_text() -> str:
    """The schema as its file holds it."""
    return json.dumps(stack_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
