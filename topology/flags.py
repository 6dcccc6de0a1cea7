"""SGLang's command-line flags as a map, so that two command lines compare by meaning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Flags = dict[str, tuple[str, ...]]
"""Canonical flag name without dashes -> its value's words; no word for a bare flag."""

_ALIASES: Mapping[str, str] = {
    "model": "model-path",
    "tensor-parallel-size": "tp",
    "tp-size": "tp",
    "pipeline-parallel-size": "pp",
    "pp-size": "pp",
    "data-parallel-size": "dp",
    "dp-size": "dp",
    "expert-parallel-size": "ep",
    "ep-size": "ep",
    "attention-context-parallel-size": "attn-cp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "nccl-init-addr": "dist-init-addr",
    "speculative-draft-model": "speculative-draft-model-path",
}
"""Source: sgl-project/sglang docs/advanced_features/server_arguments.md; `--tp` and the like are argparse prefixes."""

MASKED = "***"
"""What the agent reports in place of a secret argument's value."""


def canonical_flag(name: str) -> str:
    """The one name for a flag and its aliases: `--tensor-parallel-size`, `tp-size` and `--tp` are all `tp`."""
    bare = name.removeprefix("--")
    return _ALIASES.get(bare, bare)


def split_command(words: Sequence[str]) -> tuple[tuple[str, ...], Flags]:
    """Split a command line into what is run and its flags; a flag given twice has its last value, as in argparse.

    A word that begins with one dash is a value: SGLang has no such flags, but `--chunked-prefill-size -1` exists.
    """
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    flags: Flags = {}
    current = ""
    for word in words[first:]:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            current = canonical_flag(name)
            flags[current] = (value,) if equals else ()
        else:
            flags[current] = (*flags[current], word)
    return tuple(words[:first]), flags


def same_value(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two flag values mean the same: 0.90 is 0.9, JSON compares as JSON, a masked secret as any value."""
    return len(one) == len(other) and all(map(_same_word, one, other))


def _same_word(one: str, other: str) -> bool:
    if one == other or MASKED in {one, other}:
        return True
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
