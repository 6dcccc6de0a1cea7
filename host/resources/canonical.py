"""The workstation's copy of a unit file, kept equal to the deployed one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from pulumi.dynamic import CreateResult, DiffResult, ReadResult, ResourceProvider, UpdateResult

from host.errors import HostError
from host.resources.agent_resource import OBSERVED, ObservedResource
from host.resources.session import Properties, readable

AS_WANTED = "adopted"
"""The revision that a plan gives a copy which already equals the unit."""


class CanonicalUnitProvider(ResourceProvider):
    """Writes the copy atomically; a destroy leaves it, since it is the person's own file."""

    serialize_as_secret_always = False

    def diff(self, _id: str, olds: Properties, news: Properties) -> DiffResult:
        """Another text, another place, or a copy that drifted: by a refresh, or as the plan saw the file itself."""
        changed = any(olds.get(name) != news.get(name) for name in ("path", "text"))
        drifted = olds.get(OBSERVED) != news.get("text") or news.get("revision") != AS_WANTED
        return DiffResult(changes=changed or drifted)

    @readable
    def create(self, props: Properties) -> CreateResult:
        """Write the copy."""
        return CreateResult(str(props["path"]), _write(props))

    @readable
    def update(self, _id: str, _olds: Properties, news: Properties) -> UpdateResult:
        """Write the copy again."""
        return UpdateResult(_write(news))

    @readable
    def read(self, id_: str, props: Properties) -> ReadResult:
        """Look at the copy."""
        text = read_copy(str(props["path"]))
        return ReadResult("", {}) if text is None else ReadResult(id_, {**props, OBSERVED: text})


class CanonicalUnit(ObservedResource, module="gpu-topology", name="CanonicalUnit"):
    """The copy in the state."""

    provider_type = CanonicalUnitProvider


def read_copy(path: str, base: Path | None = None) -> str | None:
    """The copy's text; None where there is no file. A relative path starts from `base`, else where this process is.

    Raises:
        HostError: the file is there and cannot be read.
    """
    try:
        return ((base or Path()) / Path(path).expanduser()).read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"canonicalUnit: {path!r} cannot be read ({error}). Fix: make it a readable file") from error


def _write(props: Properties) -> Properties:
    path, text = Path(str(props["path"])).expanduser(), str(props["text"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise HostError(
            f"canonicalUnit: {str(path)!r} cannot be written ({error}). Fix: name a writable path"
        ) from error
    return {**props, OBSERVED: text}
