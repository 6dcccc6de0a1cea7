from __future__ import annotations

from typing import Any

import pytest

from topology.facts import ServiceFacts
from topology.nccl import effective_environment, required_environment, too_small

SET = "[Service]\nEnvironment=NCCL_P2P_DISABLE=1\nExecStart=/usr/bin/python3 -m sglang.launch_server\n"
FILE = {"/etc/q.env": {"NCCL_P2P_DISABLE": "0"}}
UNSET = "[Service]\nExecStart=/usr/bin/python3 -m sglang.launch_server\n"


def _found(**changes: Any) -> ServiceFacts:
    return ServiceFacts.model_validate({"name": "q", "unit": "q.service", "container": 129, "exists": True} | changes)


def test_a_translated_iommu_requires_p2p_off_and_companions() -> None:
    """The switch alone would be right but slow."""
    required = required_environment(translated_iommu=True, gpus=4)
    assert required["NCCL_P2P_DISABLE"] == "1"
    assert too_small(required) == {}
    assert len(required) == 5


@pytest.mark.parametrize(("translated", "gpus"), [(False, 8), (None, 8), (True, 1)])
def test_elsewhere_nothing_is_required(translated: bool | None, gpus: int) -> None:
    """P2P is fast where it works, and one GPU has no peer."""
    assert required_environment(translated_iommu=translated, gpus=gpus) == {}


def test_larger_values_than_the_least_are_kept() -> None:
    """A tuned service has more channels; only less, nothing and nonsense is too small."""
    tuned = required_environment(translated_iommu=True, gpus=2) | {"NCCL_MIN_NCHANNELS": "32"}
    assert too_small(tuned) == {}
    assert too_small(tuned | {"NCCL_BUFFSIZE": "4096", "NCCL_MAX_NCHANNELS": "many"}) == {
        "NCCL_BUFFSIZE": "4096",
        "NCCL_MAX_NCHANNELS": "many",
    }


@pytest.mark.parametrize(
    ("text", "found", "value"),
    [
        (SET, None, "1"),
        (UNSET, None, None),
        (SET, _found(), "1"),
        (SET, _found(drop_ins={"/etc/x.d/a.conf": "[Service]\nEnvironment=NCCL_P2P_DISABLE=0\n"}), "0"),
        (SET, _found(drop_ins={"/etc/x.d/a.conf": "[Service]\nEnvironment=\n"}), None),
        (UNSET, _found(nccl_conf={"NCCL_P2P_DISABLE": "1"}), "1"),
        (SET, _found(nccl_conf={"NCCL_P2P_DISABLE": "0"}), "1"),
        (
            SET + "EnvironmentFile=/etc/q.env\n",
            _found(environment_files={"/etc/q.env": {"NCCL_P2P_DISABLE": "0"}}),
            "0",
        ),
        (SET, _found(environment_files={"/etc/q.env": {"NCCL_P2P_DISABLE": "0"}}), "1"),
        (UNSET.replace("/usr/bin/python3", "/usr/bin/env NCCL_P2P_DISABLE=1 python3"), _found(), "1"),
        (SET + "UnsetEnvironment=NCCL_P2P_DISABLE\n", _found(), None),
        ("", _found(), None),
    ],
    ids=[
        "unit alone",
        "nothing",
        "unit on a host",
        "a drop-in wins",
        "a drop-in resets",
        "nccl.conf counts",
        "the environment beats nccl.conf",
        "an environment file wins",
        "a file that the unit does not read",
        "env in the command",
        "unset",
        "empty unit",
    ],
)
def test_what_a_process_really_gets(text: str, found: ServiceFacts | None, value: str | None) -> None:
    """Drop-ins, environment files, the command itself and /etc/nccl.conf count, in systemd's and NCCL's order."""
    assert effective_environment(found, text).get("NCCL_P2P_DISABLE") == value
