from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest
from google.protobuf.empty_pb2 import Empty  # type: ignore[import-untyped]
from pulumi.runtime.proto import provider_pb2, provider_pb2_grpc

from testbed.engine.cache import REPOSITORY

PLUGINS = [("command", "CommandPlugin", "1.2.1"), ("proxmoxve", "ProxmoxPlugin", "8.6.0")]


@pytest.mark.parametrize(("name", "_class", "version"), PLUGINS)
def test_a_plugin_prints_its_port_serves_and_ends_on_a_signal(name: str, _class: str, version: str) -> None:
    """Started as the engine does, a plugin answers on the port that it prints, and SIGTERM ends it well."""
    command = [sys.executable, "-m", f"testbed.engine.plugins.{name}", "127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        async def main() -> None:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = provider_pb2_grpc.ResourceProviderStub(channel)
                assert (await stub.GetPluginInfo(Empty())).version == version
                assert f'"name": "{name}"' in (await stub.GetSchema(provider_pb2.GetSchemaRequest())).schema
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Construct(provider_pb2.ConstructRequest())
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

        asyncio.run(main())
        process.terminate()
        assert process.wait() == 0


def test_a_plugin_ends_when_the_engine_is_gone() -> None:
    """A killed engine leaves no plugin behind."""
    command = f"{sys.executable} -m testbed.engine.plugins.command & wait"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as shell:
        assert shell.stdout is not None
        assert int(shell.stdout.readline()) > 0
        shell.kill()
        assert shell.stdout.read() == ""  # the end of the file comes when the plugin has closed its side


@pytest.mark.parametrize(("name", "plugin", "_version"), PLUGINS)
def test_a_plugin_starts_without_what_only_operations_need(name: str, plugin: str, _version: str) -> None:
    """Neither the Pulumi SDK nor the SSH and HTTP libraries are loaded before something is done."""
    code = (
        "import sys; from testbed.engine.plugins._lean import skip_the_sdk; skip_the_sdk(); "
        f"from testbed.engine.plugins.{name}.plugin import {plugin}; {plugin}(None); "
        "print(*sorted({'asyncssh', 'httpx', 'pulumi.resource', 'pulumi.automation'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
