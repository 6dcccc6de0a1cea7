"""The language host: a gRPC server, found as `pulumi-language-python`, that runs Python programs and plugins.

It stands in for the official host where only package registries answer; the script that it starts programs with is
the official one. The engine starts a host for every operation, so nothing is imported that it can do without.
Arguments: the path of that script, then what the engine passes.
"""

# ruff: noqa: ARG002, N802 - the service's definition names the methods and their arguments
from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import types
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import grpc  # type: ignore[import-untyped]
from google.protobuf import empty_pb2  # type: ignore[import-untyped]


def _skip_package_code(*names: str) -> None:
    """Make packages importable without running their `__init__`: Pulumi's imports the whole SDK, about 0.3 s."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"{name} is not installed for {sys.executable}")
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules[name] = package


if not TYPE_CHECKING:
    _skip_package_code("pulumi", "pulumi.runtime", "pulumi.runtime.proto")

from pulumi.runtime.proto import language_pb2 as language  # noqa: E402
from pulumi.runtime.proto import language_pb2_grpc, plugin_pb2  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALREADY_SHOWN = 32  # the script's exit code once the program's error has been shown: nothing is to be added
MESSAGE_LIMIT = 400 * 1024 * 1024  # the engine's own limit
GRACE = 3.0  # seconds between asking a child to end and ending it; the engine gives this host 5


class Children:
    """The processes under way, so that a cancelled or orphaned host leaves none behind."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def start(self, command: list[str], context: grpc.ServicerContext, **options: Any) -> subprocess.Popen[bytes]:
        """Start a child without input, which ends when the call that asked for it does."""
        with self._lock:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
            self._running.add(child)
        if not context.add_callback(child.terminate):
            child.terminate()
        return child

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for a child's exit code; negative is the signal that ended it."""
        code = child.wait()
        with self._lock:
            self._running.discard(child)
        return code

    def end(self) -> None:
        """Ask every child to end, and end those that do not."""
        with self._lock:
            running = list(self._running)
        for child in running:
            child.terminate()
        for child in running:
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.kill()


class LanguageHost(language_pb2_grpc.LanguageRuntimeServicer):
    """Run programs and plugins in the virtual environment that their project names."""

    def __init__(self, executor: str, engine: str) -> None:
        self.executor = executor
        self.engine = engine
        self.children = Children()

    def Handshake(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Take the engine's address, which an engine that attaches by port gives here alone."""
        self.engine = request.engine_address or self.engine
        return language.LanguageHandshakeResponse()

    def GetPluginInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Say no version: the host is this project's own."""
        return plugin_pb2.PluginInfo()

    def GetRequiredPackages(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Name none: with stand-ins nothing is downloaded ahead of the resource that asks for it."""
        return language.GetRequiredPackagesResponse()

    def GetRequiredPlugins(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Name none, as `GetRequiredPackages`."""
        return language.GetRequiredPluginsResponse()

    def RuntimeOptionsPrompts(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Ask nothing: this host knows one option, the virtual environment."""
        return language.RuntimeOptionsResponse()

    def About(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Name the interpreter and its version."""
        python, _ = interpreter(request.info, context)
        version = _ask(python, "import platform; print(platform.python_version())")
        return language.AboutResponse(executable=python, version=version)

    def GetProgramDependencies(self, request: Any, context: grpc.ServicerContext) -> Any:
        """List the packages that the program's interpreter has."""
        python, _ = interpreter(request.info, context)
        listing = "from importlib.metadata import distributions as d\nfor p in d(): print(p.name, p.version)"
        found = sorted({tuple(line.split()) for line in _ask(python, listing).splitlines()})
        named = [language.DependencyInfo(name=name, version=version) for name, version in found]
        return language.GetProgramDependenciesResponse(dependencies=named)

    def Run(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Run a program to its end, its output going where this host's goes."""
        python, environment = interpreter(request.info, context)
        environment["PULUMI_CONFIG"] = json.dumps(dict(request.config))
        environment["PULUMI_CONFIG_SECRET_KEYS"] = json.dumps(list(request.configSecretKeys))
        options = {
            "monitor": request.monitor_address,
            "engine": self.engine,
            "project": request.project,
            "stack": request.stack,
            "organization": request.organization,
            "pwd": request.pwd,
            "root_directory": request.info.root_directory,
            "dry_run": "true" if request.dryRun else "false",
            "parallel": str(request.parallel),
        }
        command = [python, "-u", self.executor]
        command += [f"--{name}={value}" for name, value in options.items() if value]
        command += [request.program or request.info.entry_point or ".", *request.args]
        child = self.children.start(command, context, env=environment)
        code = self.children.wait(child)
        if code in {0, ALREADY_SHOWN}:
            return language.RunResponse(bail=code != 0)
        if code < 0:
            return language.RunResponse(error=f"Program was ended by signal {-code}")
        return language.RunResponse(error=f"Program exited with non-zero exit code: {code}")

    def RunPlugin(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Run a plugin written in Python, its output streamed to the engine and its exit code last."""
        python, environment = interpreter(request.info, context, base=dict(pair.split("=", 1) for pair in request.env))
        program = request.info.program_directory
        if request.kind == "analyzer":
            command = [python, "-u", "-m", "pulumi.policy", *request.args, program]
        else:
            command = [python, "-u", program, *request.args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        child = self.children.start(command, context, env=environment, cwd=request.pwd, **pipes)
        yield from _output(child)
        yield language.RunPluginResponse(exitcode=self.children.wait(child))

    def Cancel(self, request: Any, context: grpc.ServicerContext) -> Any:
        """End what runs."""
        self.children.end()
        return empty_pb2.Empty()


def interpreter(
    info: Any, context: grpc.ServicerContext, *, base: Mapping[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """The Python of a project's virtual environment, this host's own where none is named, and its environment."""
    environment = dict(os.environ if base is None else base)
    named = dict(info.options).get("virtualenv", "")
    if not named:
        return sys.executable, environment
    folder = Path(info.root_directory, named)
    python = folder / "bin" / "python"
    if not python.exists():
        context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the virtualenv option names {named!r}, but {folder} is no virtual environment: run `make setup`",
        )
    environment["VIRTUAL_ENV"] = str(folder)
    environment["PATH"] = os.pathsep.join([str(folder / "bin"), environment.get("PATH", os.defpath)])
    environment.pop("PYTHONHOME", None)
    return str(python), environment


def _ask(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def _output(child: subprocess.Popen[bytes]) -> Iterator[Any]:
    """What a child writes, as it writes it, until both its streams end."""
    chunks: SimpleQueue[tuple[str, bytes]] = SimpleQueue()

    def read(name: str, stream: IO[bytes] | None) -> None:
        while stream and (data := os.read(stream.fileno(), 65536)):
            chunks.put((name, data))
        chunks.put((name, b""))

    streams = {"stdout": child.stdout, "stderr": child.stderr}
    for name, stream in streams.items():
        threading.Thread(target=read, args=(name, stream), daemon=True).start()
    ended = 0
    while ended < len(streams):
        name, data = chunks.get()
        if not data:
            ended += 1
        elif name == "stdout":
            yield language.RunPluginResponse(stdout=data)
        else:
            yield language.RunPluginResponse(stderr=data)


def main() -> None:
    """Serve until the engine ends this process, or is gone itself."""
    executor, *arguments = (argument for argument in sys.argv[1:] if not argument.startswith("-"))
    host = LanguageHost(executor, arguments[0] if arguments else "")
    limits = [("grpc.max_send_message_length", MESSAGE_LIMIT), ("grpc.max_receive_message_length", MESSAGE_LIMIT)]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=32), options=limits)
    language_pb2_grpc.add_LanguageRuntimeServicer_to_server(host, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)  # noqa: T201 - how the engine learns where to connect
    engine = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        # An engine that is killed says nothing; its program would go on changing the host unseen.
        while os.getppid() == engine and server.wait_for_termination(1.0):
            pass
    finally:
        host.children.end()


if __name__ == "__main__":
    main()
