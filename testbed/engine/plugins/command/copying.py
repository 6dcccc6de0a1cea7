from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, ClassVar

from testbed.engine.plugins._diff import changes
from testbed.engine.plugins._resource import ProviderError, Resource
from testbed.engine.plugins._schema import Failure
from testbed.engine.plugins._wire import ARCHIVE, content_hash, signature, unwrap

if TYPE_CHECKING:
    from testbed.engine.plugins._diff import Change
    from testbed.engine.plugins._resource import Job
    from testbed.engine.plugins._schema import Schema
    from testbed.engine.plugins._wire import Props


class CopyToRemote(Resource):
    """`remote.CopyToRemote`: files put on a host by SFTP; never read back, never removed, not atomic."""

    token: ClassVar[str] = "command:remote:CopyToRemote"  # noqa: S105 - a type token

    def __init__(self, schema: Schema) -> None:
        self._inputs = schema.inputs(self.token)

    def faults(self, inputs: Props) -> list[Failure]:
        """Take files, folders and text; nothing that would have to be put together or fetched first."""
        source = unwrap(inputs["source"])
        if not isinstance(source, dict) or "path" in source:
            return []
        if signature(source) == ARCHIVE:
            return [Failure("source", "archive must be a path to a file or directory")]
        return [] if "text" in source else [Failure("source", "asset must be a path-based file asset or a text asset")]

    def diff(self, olds: Props, news: Props) -> dict[str, Change]:
        """Every changed input counts; assets and archives are compared by content."""
        return changes({name: olds.get(name) for name in self._inputs}, news)

    def preview(self, olds: Props | None, inputs: Props) -> Props:  # noqa: ARG002 - the outputs are the inputs
        """The inputs."""
        return inputs

    async def create(self, job: Job, inputs: Props) -> tuple[str, Props]:
        """Copy the source."""
        await _copy(job, inputs)
        return secrets.token_hex(4), inputs

    async def update(self, job: Job, identifier: str, olds: Props, news: Props) -> Props:  # noqa: ARG002
        """Copy again if the content or the destination changed, not for another connection."""
        moved = olds.get("remotePath") != news.get("remotePath")
        if moved or content_hash(_source(olds)) != content_hash(_source(news)):
            await _copy(job, news)
        return news

    async def delete(self, job: Job, identifier: str, olds: Props) -> None:
        """Leave on the host what was copied, as the real plugin does."""


def _source(inputs: Props) -> Props:
    source = inputs["source"]
    return source if isinstance(source, dict) else {}


async def _copy(job: Job, inputs: Props) -> None:
    # As for commands: asyncssh is loaded only when something is done.
    from testbed.engine.plugins.command import connection, sftp  # noqa: PLC0415

    source, target = _source(inputs), str(inputs["remotePath"])
    client = await connection.dial(connection.Endpoint.parse(inputs["connection"]), job.status)
    try:
        if "text" in source:
            await sftp.copy_text(client, str(source["text"]), target)
        else:
            await sftp.copy_path(client, str(source["path"]), target)
    except OSError as error:
        raise ProviderError(f"open {source.get('path')}: {str(error.strerror).lower()}") from error
    finally:
        client.close()
        await client.wait_closed()
