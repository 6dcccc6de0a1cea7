"""Dependencies point downward only, as the architecture says."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"cli", "components", "host", "policies", "testbed", "tests", "topology"}
ALLOWED = {
    "topology": {"topology"},
    "host": {"host", "topology"},
    "components": {"components", "host", "topology"},
    "policies": {"policies", "topology"},
    "cli": {"cli", "components", "host", "topology"},
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_itself_and_what_is_below(layer: str) -> None:
    """A module imports nothing of ours from a layer above its own."""
    modules = [path for path in _modules(layer) if "agent" not in path.relative_to(ROOT).parts]
    assert modules
    wrong = {str(p.relative_to(ROOT)): found for p in modules if (found := _imports(p) & OURS - ALLOWED[layer])}
    assert not wrong


def test_topology_is_pure() -> None:
    """The topology imports neither Pulumi nor anything that talks to a host."""
    forbidden = {"pulumi", "pulumi_command", "pulumi_proxmoxve", "pulumi_policy", "asyncssh", "httpx", "subprocess"}
    wrong = {p.name: found for p in _modules("topology") if (found := _imports(p) & forbidden)}
    assert not wrong


def test_the_agent_needs_nothing_but_the_standard_library() -> None:
    """The agent runs on a bare hypervisor: standard library and relative imports only."""
    modules = _modules("host/agent")
    assert len(modules) > 1
    wrong = {p.name: found for p in modules if (found := _imports(p) - set(sys.stdlib_module_names) - {"__future__"})}
    assert not wrong


def test_nothing_of_the_program_knows_the_testbed() -> None:
    """Only testbed and tests name the simulator, the lab or fakepve."""
    program = [path for layer in ALLOWED for path in _modules(layer)] + [ROOT / "__main__.py"]
    wrong = [str(p.relative_to(ROOT)) for p in program if _imports(p) & {"testbed", "fakepve", "tests"}]
    assert not wrong
