"""SGLang's flags compare by meaning."""

from __future__ import annotations

import pytest

from topology.flags import same_value, split_command


@pytest.mark.parametrize(
    "words",
    [
        ("--tp", "8"),
        ("--tp=8",),
        ("--tp-size", "8"),
        ("--tensor-parallel-size=8",),
        ("--tp", "4", "--tp-size", "8"),
    ],
)
def test_every_spelling_of_tensor_parallelism_is_one_flag(words: tuple[str, ...]) -> None:
    """Aliases, `=` and repetition all come to the flag `tp` with its last value."""
    command = ("/usr/bin/python3", "-m", "sglang.launch_server")
    assert split_command((*command, *words)) == (command, {"tp": ("8",)})


def test_bare_flags_lists_and_negative_numbers_are_told_apart() -> None:
    """A bare flag has no value, a list flag several, and -1 is a value."""
    _, flags = split_command(
        ("x", "--trust-remote-code", "--cuda-graph-bs", "1", "2", "--chunked-prefill-size", "-1"),
    )
    assert flags == {"trust-remote-code": (), "cuda-graph-bs": ("1", "2"), "chunked-prefill-size": ("-1",)}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("0.90",), ("0.9",), True),
        (('{"a":1}',), ('{ "a": 1 }',), True),
        (("***",), ("key",), True),
        (("fp8",), ("fp4",), False),
        ((), ("1",), False),
        (("1", "2"), ("2", "1"), False),
    ],
)
def test_values_compare_by_meaning(one: tuple[str, ...], other: tuple[str, ...], same: bool) -> None:
    """Numbers and JSON compare as such, a masked secret with anything, other text as it stands."""
    assert same_value(one, other) is same
