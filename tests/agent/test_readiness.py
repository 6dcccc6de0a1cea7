"""Whether a server generates, and the likely cause when it does not."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from host.agent.diagnose import NCCL_CAUSE, Diagnosis, Load, Suspect, without_secrets
from host.agent.pci import Address
from host.agent.probe import probe
from host.agent.request import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


CARD, OTHER = Address("0000:81:00.0"), Address("0000:91:00.0")


@contextmanager
def server(answer: Callable[[str], tuple[int, Any]], asked: list[tuple[str, str | None]]) -> Iterator[int]:
    """A model server on loopback; what it answers may block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            status, body = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield listening.server_port
    listening.shutdown()
    thread.join()
    listening.server_close()


TOKEN = {"text": "", "meta_info": {"completion_tokens": 1}}


def sglang(generate: tuple[int, Any], infos: dict[str, Any]) -> Callable[[str], tuple[int, Any]]:
    """A server with these answers."""
    return lambda path: generate if path == "/generate" else (200, infos[path]) if path in infos else (404, {})


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (sglang((200, TOKEN), {"/server_info": {"tp_size": 4}}), {"state": "token", "tp": 4}),
        (sglang((200, [TOKEN]), {"/get_server_info": {"server_args": {"tp_size": 8}}}), {"state": "token", "tp": 8}),
        (sglang((200, {"text": " 4"}), {}), {"state": "token", "tp": None}),
        (sglang((200, {"text": ""}), {}), {"state": "loading", "detail": "HTTP 200"}),
        (sglang((200, b"<html>"), {}), {"state": "loading", "detail": "HTTP 200"}),
        (sglang((503, {}), {}), {"state": "loading", "detail": "HTTP 503"}),
        (sglang((401, {}), {}), {"state": "denied"}),
    ],
)
def test_only_a_generated_token_counts(answer: Callable[[str], tuple[int, Any]], result: dict[str, Any]) -> None:
    """An open port, a status, an empty answer are none; the server's own size is told with the token."""
    asked: list[tuple[str, str | None]] = []
    with server(answer, asked) as port:
        assert probe({"host": "127.0.0.1", "port": port, "api_key": "k", "timeout_s": 5}) == result
    assert {key for _, key in asked} == {"Bearer k"}


def test_a_server_that_says_nothing_is_silent() -> None:
    """The probe's own limit ends the wait."""
    release = threading.Event()

    def answer(_path: str) -> tuple[int, Any]:
        release.wait(30)
        return 500, {}

    with server(answer, []) as port:
        started = time.monotonic()
        told = probe({"host": "127.0.0.1", "port": port, "timeout_s": 0.3})
        release.set()
        assert told == {"state": "silent"}
        assert time.monotonic() - started < 20


def test_a_port_where_nobody_listens_is_closed() -> None:
    """Nothing listens yet: the service loads."""
    with server(lambda _path: (200, {}), []) as port:
        pass
    assert probe({"host": "127.0.0.1", "port": port, "timeout_s": 1}) == {"state": "closed"}


SPINNING = [Load(CARD, 100, 130.0, 60000), Load(OTHER, 97, 128.0, 60000)]


@pytest.mark.parametrize(
    ("lines", "loads", "environment", "more", "words"),
    [
        ([], SPINNING, {}, {}, NCCL_CAUSE),
        ([], SPINNING, {"NCCL_P2P_DISABLE": "1"}, {}, "unknown"),
        ([], SPINNING, {}, {"translated": False}, "unknown"),
        ([], [SPINNING[0], Load(OTHER, 3, 80.0, 1)], {}, {}, "unknown"),
        ([], [], {}, {}, "unknown"),
        ([], SPINNING, {}, {"tp": 8}, "tensor parallelism 8 and only 2 GPUs are visible"),
        (["torch.OutOfMemoryError: CUDA out of memory."], [], {}, {}, "out of GPU memory"),
        (["OSError: [Errno 98] Address already in use"], [], {}, {}, "its port is taken"),
        (["OSError: /models/x does not appear to have a file named config.json"], [], {}, {}, "the model's path"),
        (["huggingface: Repo id must be in the form"], [], {}, {}, "the model's path"),
    ],
)
def test_the_likely_cause_is_named(
    lines: list[str], loads: list[Load], environment: dict[str, str], more: dict[str, Any], words: str
) -> None:
    """Each known failure by its signs, and nothing claimed without them."""
    suspect = Suspect(
        Service("q", "q.service", 129), (CARD, OTHER), **{"tp": 2, "visible": 2, "translated": True, **more}
    )
    assert words in Diagnosis(suspect, lines, loads, environment).cause


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model='m', api_key='sk-1234', port=1)",
        "ExecStart: sglang --api-key sk-1234 --port 1",
        "--admin-api-key=sk-1234",
        'got "api_key": "sk-1234"',
        "anything with the-known-secret in it",
    ],
)
def test_journal_lines_have_no_secret(line: str) -> None:
    """SGLang prints its arguments when it starts, keys included."""
    told = without_secrets(line, "the-known-secret")
    assert "sk-1234" not in told
    assert "the-known-secret" not in told
    assert "***" in told
