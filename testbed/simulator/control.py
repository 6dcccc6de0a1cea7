"""The socket by which shims, simulated kernels writes and stub servers reach the simulator."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from testbed.simulator.commands.call import Call
from testbed.simulator.commands.dispatch import run_command

if TYPE_CHECKING:
    from testbed.simulator.machine import HostMachine
    from testbed.simulator.waiting import HeldPipes

_NAMESPACE = re.compile(r"/proc/(\d+)/ns/net$")
HOST = "host"
LIMIT = 1 << 20

Reply = dict[str, object]


class Control:
    """Serves one request, a line of JSON, per connection, on a socket that leaves no file behind."""

    def __init__(self, machine: HostMachine, held: HeldPipes) -> None:
        self._machine, self._held = machine, held
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, path=f"\0{self._machine.socket}", limit=LIMIT)

    async def stop(self) -> None:
        """Listen no more, and drop requests that wait for something."""
        if self._server:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            request = json.loads(await reader.readline())
            reply = await self._answer(request)
            self._machine.watch.look()
            writer.write(json.dumps(reply).encode())
            await writer.drain()
        except ConnectionError:
            pass  # the command was killed while it waited; what it asked for is done all the same
        finally:
            # Also for a request that is cancelled because the host ends while an unbind hangs.
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> Reply:
        match request["op"]:
            case "command":
                name, *args = request["argv"]
                answer = await run_command(Call(self._machine, name, tuple(args), request["cwd"]))
                return {"stdout": answer.stdout, "stderr": answer.stderr, "code": answer.code}
            case "write":
                with self._held.by_sleeper(request["pipes"]):
                    return {"errno": await self._machine.kernel.write(request["path"], request["data"])}
            case "namespace":
                return self._namespace(request["path"], request["cwd"])
            case "port":
                container = None if request["namespace"] == HOST else int(request["namespace"])
                return {"port": self._machine.launcher.port(container, int(request["port"]))}
            case "stub":
                server = self._machine.server(request["service"])
                if server:
                    server.told(request["event"], dict(request))
                return {}
        return {"error": "unknown request"}

    def _namespace(self, path: str, cwd: str) -> Reply:
        found = _NAMESPACE.search(str(self._machine.tree.resolve(path, cwd)))
        process = self._machine.processes.get(int(found[1])) if found else None
        if process is None:
            return {"error": f"cannot open {path}: No such file or directory"}
        return {"namespace": HOST if process.container is None else str(process.container)}
