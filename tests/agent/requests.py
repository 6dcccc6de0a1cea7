"""kpro6's cards, container, VM and service, and the requests that the workstation sends for them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

NODE_0 = ["0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0"]
NODE_1 = ["0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0"]
UNIT = "sglang-qwen.service"
SERVICE = {"name": "qwen", "unit": UNIT, "container": 129}
MANAGED = {"services": [SERVICE], "vms": [200], "containers": [129]}
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
ROOTFS = "var/lib/lxc/129/rootfs"
CONTAINER_CONFIG = "etc/pve/lxc/129.conf"


def bind_request(pool: str, devices: list[str], driver: str, others: list[str] | None = None, **more: Any) -> Json:
    """A request of drain or bind."""
    return {
        "pool": pool,
        "devices": devices,
        "driver": driver,
        "others": others or [],
        "managed": {"services": [SERVICE], "vms": [200]},
        "revision": "r",
        "unbind_timeout_s": 5,
        "passing_s": 0,
        **more,
    }


def container_request(devices: list[str], style: str = "raw", **more: Any) -> Json:
    """A request of container."""
    return {"vmid": 129, "devices": devices, "style": style, "units": [UNIT], "revision": "r", "start": True, **more}


def vm_request(devices: list[str], **more: Any) -> Json:
    """A request of vm."""
    return {
        "vmid": 200,
        "mapping": "gpu-confidential",
        "count": len(devices),
        "pcie": True,
        "rombar": False,
        "start": True,
        "pool": "confidential",
        "devices": devices,
        "revision": "r",
        **more,
    }


def unit_request(text: str, **more: Any) -> Json:
    """A request of unit."""
    return {**SERVICE, "path": UNIT_PATH, "text": text, "enabled": True, "revision": "r", **more}


def serve_request(devices: list[str], **more: Any) -> Json:
    """A request of serve."""
    return {
        **SERVICE,
        "port": 30000,
        "tp": len(devices),
        "gpus": len(devices),
        "devices": devices,
        "environment": {"NCCL_P2P_DISABLE": "1"},
        "enabled": True,
        "deadline_s": 20,
        "token_timeout_s": 3,
        "translated_iommu": True,
        "model": "qwen3.5-397b",
        "revision": "r",
        **more,
    }
