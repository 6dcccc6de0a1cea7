"""Rules that the stack file alone decides, each firing and not firing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.topology.specs import Case, stack
from topology.rules import check_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from topology.problem import Problem


def judged(edit: Callable[[dict[str, Any]], object] = dict) -> tuple[Problem, ...]:
    """The problems of the stack file after an edit."""
    return check_config(stack(edit))


def _at(*path: str, value: Any) -> Callable[[], tuple[Problem, ...]]:
    def edit(raw: dict[str, Any]) -> None:
        here = raw
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return lambda: judged(edit)


def _service(**changes: Any) -> Callable[[], tuple[Problem, ...]]:
    return lambda: judged(lambda raw: raw["services"]["sglang-qwen"].update(changes))


def _second_service(**changes: Any) -> Callable[[], tuple[Problem, ...]]:
    def edit(raw: dict[str, Any]) -> None:
        first = raw["services"]["sglang-qwen"]
        own = {"unit": "second.service", "port": 30001, "canonicalUnit": "units/second.service"}
        raw["services"]["second"] = first | own | changes

    return lambda: judged(edit)


def _on_host(raw: dict[str, Any]) -> None:
    del raw["services"]["sglang-qwen"]["container"]


def _only_on_host(raw: dict[str, Any]) -> None:
    _on_host(raw)
    raw["containers"] = {}


def _host_on_vfio(raw: dict[str, Any]) -> None:
    _only_on_host(raw)
    raw["vms"] = {}
    raw["services"]["sglang-qwen"]["pool"] = "confidential"


def _large_pool(raw: dict[str, Any], size: int) -> None:
    raw["pools"]["confidential"]["devices"] = [f"{bus:02x}:00.0" for bus in range(0x80, 0x80 + size)]


def _no_proxmox(raw: dict[str, Any]) -> None:
    del raw["proxmox"]


def _without_vms(raw: dict[str, Any]) -> None:
    del raw["proxmox"]
    raw["vms"] = {}


CASES = (
    Case(
        "one-device-one-owner",
        {
            "pools serving and confidential: both have 0000:71:00": _at(
                "pools", "confidential", "devices", value=["71:00.0", "81:00.0"]
            ),
            "has 0000:81:00 twice": _at("pools", "confidential", "devices", value=["81:00.0", "81:00.1"]),
        },
        (judged,),
    ),
    Case(
        "one-pool-one-owner",
        {
            "container 129 and VM 200": _at("vms", "200", "pool", value="serving"),
            "the host (service sglang-qwen)": lambda: judged(_on_host),
        },
        (judged, lambda: judged(_only_on_host)),
    ),
    Case(
        "pool-exists",
        {
            "did you mean serving": _at("containers", "129", "pool", value="servin"),
            "VM 200": _at("vms", "200", "pool", value="x"),
            "service sglang-qwen": _service(pool="x"),
        },
        (judged,),
    ),
    Case(
        "container-on-nvidia",
        {"devices on driver vfio-pci to container 129": _at("pools", "serving", "driver", value="vfio-pci")},
        (judged,),
    ),
    Case(
        "vm-on-vfio",
        {"devices on driver nvidia to VM 200": _at("pools", "confidential", "driver", value="nvidia")},
        (judged,),
    ),
    Case(
        "service-on-nvidia",
        {
            "to service sglang-qwen": _at("pools", "serving", "driver", value="vfio-pci"),
            "driver vfio-pci": lambda: judged(_host_on_vfio),
        },
        (judged, lambda: judged(_only_on_host)),
    ),
    Case(
        "service-in-its-container",
        {
            "is not among containers": _service(container=130),
            "has pool serving": _service(pool="confidential"),
        },
        (judged, lambda: judged(_only_on_host)),
    ),
    Case(
        "names-unique",
        {
            "the same unit, sglang-qwen.service on container 129": _second_service(unit="sglang-qwen.service"),
            "the same port, 30000 on container 129": _second_service(port=30000),
            "the same canonicalUnit": _second_service(canonicalUnit="units/sglang-qwen.service"),
            "the same mapping": _at(
                "vms",
                value={
                    "200": {"pool": "confidential", "mapping": "gpus"},
                    "201": {"pool": "confidential", "mapping": "gpus"},
                },
            ),
        },
        (_second_service(), _second_service(port=30000, container=None)),
    ),
    Case(
        "proxmox-endpoint",
        {"https://192.0.2.6:8006/": lambda: judged(_no_proxmox)},
        (judged, lambda: judged(_without_vms)),
    ),
    Case(
        "hostpci-count",
        {"has 17 devices": lambda: judged(lambda raw: _large_pool(raw, 17))},
        (lambda: judged(lambda raw: _large_pool(raw, 16)),),
    ),
    Case(
        "tp-whole",
        {"4 GPUs / (pipeline 3 x data 1)": _service(parallelism={"pipeline": 3})},
        (_service(parallelism={"pipeline": 2, "data": 2}),),
    ),
    Case(
        "preset",
        {
            "pools.serving.gpu": _at("pools", "serving", "gpu", value="rtx-pro-6000"),
            "services.sglang-qwen.model.preset": _service(model={"path": "x", "preset": "qwen"}),
        },
        (judged, _service(model={"path": "x", "config": "config.json", "weightsGb": 1})),
    ),
    Case(
        "argument-computed",
        {
            "--tp among": _service(arguments={"tp": 8}),
            "--tensor-parallel-size": _service(arguments={"tensor-parallel-size": 8}),
            "--tensor-par": _service(arguments={"tensor-par": 8}),
            "--tp_size": _service(arguments={"--tp_size": 8}),
            "parallelism.pipeline": _service(arguments={"pp-size": 2}),
            "parallelism.data": _service(arguments={"dp": 2}),
            "model.path": _service(arguments={"model": "x"}),
            "--port": _service(arguments={"port": 1}),
            "has --tp among its": _service(command=["python3", "-m", "sglang.launch_server", "--tp-size", "8"]),
        },
        (judged, _service(arguments={"served-models": "x", "data": "x", "tokenizer-path": "x"})),
    ),
    Case(
        "no-secret-in-clear",
        {
            "--api-key": _service(arguments={"api-key": "hunter2"}),
            "SGLANG_ADMIN_API_KEY": _service(arguments={"admin-api-key": "hunter2"}),
            "HF_TOKEN": _service(environment={"HF_TOKEN": "hunter2"}),
            "value for HF_TOKEN": _service(command=["/usr/bin/env", "HF_TOKEN=hunter2", "python3"]),
            "AWS_SECRET_ACCESS_KEY": _service(environment={"AWS_SECRET_ACCESS_KEY": "hunter2"}),
        },
        (
            _service(arguments={"api-key": "${SGLANG_API_KEY}", "max-total-tokens": 1}),
            _service(environment={"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/x", "HF_TOKEN": ""}),
        ),
    ),
)


def test_the_stack_file_of_kpro6_is_sound() -> None:
    """The split as it is meant breaks no rule."""
    assert judged() == ()


@pytest.mark.parametrize("secret", [{"arguments": {"api-key": "hunter2"}}, {"environment": {"HF_TOKEN": "hunter2"}}])
def test_a_secret_is_never_repeated(secret: dict[str, Any]) -> None:
    """The message about a secret does not spread it further."""
    found = _service(**secret)()
    assert found
    assert "hunter2" not in "".join(map(str, found))
