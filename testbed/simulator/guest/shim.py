"""A command of the simulated host: passes its call to the simulator and prints the answer.

It is copied beside `simulator.json`, linked under every command's name, and runs in a bare interpreter.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

GONE = 255


def ask(**request: object) -> dict[str, Any]:
    """Ask the simulator over its socket."""
    told = json.loads(Path(__file__).with_name("simulator.json").read_text("utf-8"))
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + told["socket"])
        line.sendall(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(b"".join(iter(lambda: line.recv(65536), b"")))
        return answer


def nsenter(args: list[str]) -> int:
    """Run a command in a container's network namespace; `--net=…/proc/PID/ns/net` says which."""
    split = args.index("--") if "--" in args else len(args)
    names = [a.partition("=")[2] for a in args[:split] if a.startswith("--net=")]
    if len(names) != 1 or len(args[:split]) != 1 or split + 1 >= len(args):
        sys.stderr.write("nsenter: simulator: only `nsenter --net=FILE -- COMMAND` is known\n")
        return 2
    answer = ask(op="namespace", path=names[0], cwd=str(Path.cwd()))
    if "error" in answer:
        sys.stderr.write(f"nsenter: {answer['error']}\n")
        return 1
    os.environ["GPU_TOPOLOGY_NETNS"] = answer["namespace"]
    return os.execvp(args[split + 1], args[split + 1 :])  # noqa: S606  nsenter runs what it is given


def main() -> int:
    """Run the command this file is called as."""
    name = Path(sys.argv[0]).name
    if name == "nsenter":
        return nsenter(sys.argv[1:])
    try:
        answer = ask(op="command", argv=[name, *sys.argv[1:]], cwd=str(Path.cwd()))
    except (OSError, ValueError):
        sys.stderr.write(f"{name}: the simulated host is gone\n")
        return GONE
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    return int(answer["code"])


if __name__ == "__main__":
    sys.exit(main())
