"""The agent as one file: a zipapp whose bytes depend on its source alone, so that unchanged source is no change."""

from __future__ import annotations

import io
import os
import zipfile
from functools import cache
from pathlib import Path

AGENT_PATH = "usr/local/lib/gpu-topology-agent.pyz"
"""Where the agent is installed, below the host's root folder."""

_SOURCE = Path(__file__).parent / "agent"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = "from agent.main import main\n\nmain()\n"


@cache
def agent_bundle() -> bytes:
    """The zipapp's bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN)
        for path in sorted(_SOURCE.rglob("*.py")):
            _add(archive, f"agent/{path.relative_to(_SOURCE).as_posix()}", path.read_text())
    return buffer.getvalue()


def write_bundle(folder: Path) -> Path:
    """Write the zipapp into `folder`, untouched if it already is what it must be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(AGENT_PATH).name
    if not path.exists() or path.read_bytes() != agent_bundle():
        # By a rename: runs of several stacks share the folder, and none may copy half a file to its host.
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(agent_bundle())
        partial.replace(path)
    return path


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    # A fixed time, mode and system: without them the same source would give other bytes on another machine.
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, text)
