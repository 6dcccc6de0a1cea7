from __future__ import annotations

import asyncio
import itertools

import pytest

from testbed.engine.plugins.command.connection import Endpoint, delays
from testbed.engine.plugins.command.output import Output, failure, quoted


def test_dials_wait_longer_each_time_up_to_five_seconds() -> None:
    """Ten retries wait about eleven seconds altogether."""
    waits = list(itertools.islice(delays(), 12))
    assert waits[:3] == pytest.approx([0.1, 0.15, 0.225])
    assert waits[10:] == [5.0, 5.0]
    assert sum(waits[:10]) == pytest.approx(11.33, abs=0.01)


def test_an_endpoint_has_the_plugin_s_defaults() -> None:
    """Port 22, root, ten retries, fifteen seconds per dial."""
    endpoint = Endpoint.parse({"host": "h", "proxy": {"host": "p"}})
    assert (endpoint.port, endpoint.user, endpoint.dial_error_limit, endpoint.per_dial_timeout) == (22, "root", 10, 15)
    assert endpoint.proxy is not None
    assert (endpoint.proxy.host, endpoint.proxy.proxy) == ("p", None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", '"plain"'),
        ('say "hi"\n', '"say \\"hi\\"\\n"'),
        ("back\\slash", '"back\\\\slash"'),
        ("Grüße", '"Grüße"'),
        ("\x1b[0m\x7f", '"\\x1b[0m\\x7f"'),
        ("literal \\u0041", '"literal \\\\u0041"'),
    ],
)
def test_command_text_is_quoted_as_go_does(text: str, expected: str) -> None:
    """The error shows a command on one line, unambiguously."""
    assert quoted(text) == expected


def test_output_is_cut_into_lines_however_it_arrives() -> None:
    """Lines are whole whatever the chunks, carriage returns go, and the last one needs no newline."""

    async def main() -> list[str]:
        output = Output(log_stdout=True, log_stderr=False)
        for chunk in (b"fir", b"st\r\nsecond\n\nth"):
            output.add(chunk, is_stderr=False)
        output.add(b"hidden\n", is_stderr=True)
        output.add(b"ird", is_stderr=False)
        output.end()
        lines: list[str] = []

        async def log(line: str) -> None:
            lines.append(line)

        await output.follow(log)
        assert output.result() == ("first\r\nsecond\n\nthird", "hidden")
        return lines

    assert asyncio.run(main()) == ["first", "second", "", "third"]


def test_a_failure_carries_both_streams_in_order() -> None:
    """Standard output and standard error are shown as they came, bytes that are not UTF-8 replaced."""
    output = Output(log_stdout=False, log_stderr=False)
    output.add(b"one\n", is_stderr=False)
    output.add(b"two \xff\n", is_stderr=True)
    assert str(failure("exit status 1", "run", output)) == 'exit status 1: running "run":\none\ntwo \ufffd\n'
