"""A stand-in for the SGLang server, run as a real process with the unit's own environment.

It loads slowly, refuses more ranks than it sees GPUs, and hangs as NCCL does when peer-to-peer is on under a
translated IOMMU. Standard library only, and nothing of ours: it starts in a bare interpreter.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB_PER_GB = 953.67  # 1e9 / 2**20: weights are told in decimal GB, GPU memory in MiB


def say(line: str) -> None:
    """Print a line at once: it goes to the journal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Told:
    """What the simulator knows and a real process would find out from its hardware."""

    def __init__(self, text: str) -> None:
        data: dict[str, Any] = json.loads(text)
        self.socket: str = data["socket"]
        self.service: str = data["service"]
        self.visible: int = data["visible"]
        self.translated: bool = data["translated"]
        self.load_s: float = data["load_s"]
        self.stop_s: float = data["stop_s"]
        self.model_exists: bool = data["model_exists"]
        self.weights_gb: float = data["weights_gb"]
        self.memory_mib: int = data["memory_mib"]
        self.taken_ports: list[int] = data["taken_ports"]
        self.nccl_conf: dict[str, str] = data["nccl_conf"]

    def tell(self, event: str, **detail: object) -> None:
        """Tell the simulator, and wait until it has taken note: its log must be ahead of our answers."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect("\0" + self.socket)
            request = {"op": "stub", "service": self.service, "event": event, **detail}
            line.sendall(json.dumps(request).encode() + b"\n")
            line.recv(4096)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the arguments of sglang.launch_server that matter here; others are accepted and ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp", "--tp-size", "--tensor-parallel-size", dest="tp", type=int, default=1)
    parser.add_argument("--pp-size", "--pipeline-parallel-size", dest="pp", type=int, default=1)
    parser.add_argument("--dp-size", "--data-parallel-size", dest="dp", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--quantization")
    parser.add_argument("--api-key")
    return parser.parse_known_args(argv)[0]


class Server:
    """The server's state: what it was asked for and whether it answers tokens yet."""

    def __init__(self, told: Told, arguments: argparse.Namespace) -> None:
        self.told = told
        self.arguments = arguments
        self.ranks = arguments.tp * arguments.pp * arguments.dp
        self.ready = threading.Event()
        self.hung = False

    def fail(self, *lines: str) -> None:
        """Print what the real server prints, and end."""
        for line in lines:
            say(line)
        os._exit(1)

    def load(self) -> None:
        """Go through what a start goes through: model, ranks, NCCL, weights."""
        arguments, told = self.arguments, self.told
        say(f"server_args=ServerArgs(model_path='{arguments.model_path}', tp_size={arguments.tp})")
        if arguments.port in told.taken_ports:
            self.fail(
                f"[Errno 98] error while attempting to bind on address ('{arguments.host}', {arguments.port}): "
                "address already in use"
            )
        if not told.model_exists:
            self.fail(f"OSError: {arguments.model_path} is not a local folder and is not a valid model identifier")
        if self.ranks > told.visible:
            self.fail(
                f"[TP{told.visible}] Scheduler hit an exception: Traceback (most recent call last):",
                "torch.AcceleratorError: CUDA error: invalid device ordinal",
                f"GPU device may be out of range: {self.ranks} ranks, {told.visible} visible devices",
            )
        for rank in range(self.ranks):
            say(f"[TP{rank}] Init torch distributed begin.")
        if self.nccl_hangs():
            self.hung = True
            told.tell("hang")
            return
        share = told.weights_gb * MIB_PER_GB / (arguments.tp * arguments.pp)
        time.sleep(told.load_s / 2)
        if share > told.memory_mib * 0.95:
            self.fail(
                f"torch.OutOfMemoryError: CUDA out of memory. GPU 0 has a total capacity of "
                f"{told.memory_mib / 1024:.2f} GiB; weights need {share / 1024:.2f} GiB per GPU"
            )
        say("Load weight end.")
        time.sleep(told.load_s / 2)
        say("The server is fired up and ready to roll!")
        # Before it is told, so that whoever was waiting for the word is answered.
        self.ready.set()
        told.tell("ready")

    def nccl_hangs(self) -> bool:
        """Whether NCCL would copy between peers while the IOMMU translates, which never ends."""
        setting = os.environ.get("NCCL_P2P_DISABLE", self.told.nccl_conf.get("NCCL_P2P_DISABLE", "0"))
        return self.ranks > 1 and self.told.translated and setting != "1"

    def info(self) -> dict[str, object]:
        """What /server_info answers."""
        a = self.arguments
        return {
            "model_path": a.model_path,
            "served_model_name": a.served_model_name or a.model_path,
            "host": a.host,
            "port": a.port,
            "tp_size": a.tp,
            "pp_size": a.pp,
            "dp_size": a.dp,
            "context_length": a.context_length,
            "quantization": a.quantization,
            "status": "ready",
            "version": "0.5.5",
            "internal_states": [{"memory_usage": {}}],
        }


class Handler(BaseHTTPRequestHandler):
    """SGLang's HTTP surface as far as a deployer uses it."""

    protocol_version = "HTTP/1.1"
    server_state: Server

    def do_GET(self) -> None:
        """Answer a GET."""
        state = self.server_state
        path = self.path.partition("?")[0]
        if path in {"/health", "/health_generate"}:
            self.answer(200 if state.ready.is_set() else 503, None)
        elif self.refused():
            return
        elif path in {"/server_info", "/get_server_info"}:
            state.told.tell("server_info", tp=state.arguments.tp)
            self.answer(200, state.info())
        elif path == "/get_model_info":
            self.answer(200, {"model_path": state.arguments.model_path, "is_generation": True})
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": state.info()["served_model_name"], "object": "model"}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Answer a POST; a generated token is told to the simulator first."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.refused():
            return
        state = self.server_state
        try:
            asked: dict[str, Any] = json.loads(body or b"{}")
        except ValueError:
            self.answer(400, {"error": {"message": "invalid JSON"}})
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        if self.path == "/generate":
            count = int((asked.get("sampling_params") or {}).get("max_new_tokens", 16))
            answer: dict[str, object] = {
                "text": " ok" * count,
                "output_ids": [562] * count,
                "meta_info": {**usage, "completion_tokens": count, "finish_reason": {"type": "length"}},
            }
        elif self.path == "/v1/completions":
            answer = {"object": "text_completion", "choices": [{"index": 0, "text": " ok"}], "usage": usage}
        elif self.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": "ok"}
            answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}
        else:
            self.answer(404, {"detail": "Not Found"})
            return
        state.told.tell("token", tp=state.arguments.tp)
        self.answer(200, answer)

    def refused(self) -> bool:
        """Answer a request that comes too early or without the key; gives whether it did."""
        state = self.server_state
        key = state.arguments.api_key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
            return True
        if not state.ready.is_set():
            self.answer(503, {"error": "the server is starting"})
            return True
        return False

    def answer(self, status: int, body: object) -> None:
        """Send a JSON answer, or an empty one."""
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Log requests as uvicorn does, into the journal."""
        say(f"INFO:     {self.client_address[0]} - {format % args}")


class LoopbackServer(ThreadingHTTPServer):
    """An HTTP server without the reverse lookup that the standard one does when it binds."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind the socket only."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "localhost", self.server_address[1]


def main() -> None:
    """Serve until SIGTERM; the first argument is the simulator's word, the rest the server's own."""
    told = Told(sys.argv[1])
    state = Server(told, parse_arguments(sys.argv[2:]))

    def stop(*_: object) -> None:
        time.sleep(told.stop_s)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    Handler.server_state = state
    # The port it was asked for is the container's: here every stub has its own loopback port.
    http = LoopbackServer(("127.0.0.1", 0), Handler)
    told.tell("listening", port=http.server_port, asked=state.arguments.port, tp=state.arguments.tp)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state.load()
    threading.Event().wait()


if __name__ == "__main__":
    main()
