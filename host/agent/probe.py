"""Ask a model server for one token: runs on its own, in the network namespace of the service's container.

One JSON object on stdin (host, port, api_key, timeout_s), one on stdout: `state` is `closed` (nobody listens),
`loading`, `silent` (no answer in time), `denied` (a wrong API key) or `token`; `tp` is the server's own.
"""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any

QUICK = 5.0
OK = 200
DENIED = (401, 403)

Object = dict[str, Any]


def probe(request: Object) -> Object:
    """One answer; never raises for what a server may do."""
    try:
        status, body = _ask(request, "POST", "/generate", request["timeout_s"])
    except ConnectionRefusedError:
        return {"state": "closed"}
    except TimeoutError:
        return {"state": "silent"}
    except (OSError, http.client.HTTPException) as error:
        return {"state": "loading", "detail": type(error).__name__}
    if status in DENIED:
        return {"state": "denied"}
    if status != OK or not _has_token(body):
        return {"state": "loading", "detail": f"HTTP {status}"}
    return {"state": "token", "tp": _tp(request)}


def _ask(request: Object, method: str, path: str, timeout: float) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(request["host"], request["port"], timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if request.get("api_key"):
        headers["Authorization"] = f"Bearer {request['api_key']}"
    question = {"text": "1 2 3", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        connection.request(method, path, json.dumps(question) if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, _json(answer.read())
    finally:
        connection.close()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body or b"null")
    except ValueError:
        return None


def _has_token(body: Any) -> bool:
    """SGLang counts completion_tokens; a text may be empty, since a token may be half a character."""
    one = body[0] if isinstance(body, list) and body else body
    if not isinstance(one, dict):
        return False
    return (one.get("meta_info") or {}).get("completion_tokens", 0) >= 1 or bool(one.get("text"))


def _tp(request: Object) -> Any:
    """The live tensor parallelism: /server_info, or its older name."""
    for path in ("/server_info", "/get_server_info"):
        try:
            status, body = _ask(request, "GET", path, QUICK)
        except (OSError, http.client.HTTPException):
            continue
        if status == OK and isinstance(body, dict):
            return body.get("tp_size", (body.get("server_args") or {}).get("tp_size"))
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(json.load(sys.stdin))))
