"""Captured facts of hosts, the topologies that belong to them, and what a host looks like after a plan was applied."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from topology.facts import Facts
from topology.flags import split_command
from topology.load import load_topology
from topology.managed import REGISTER, managed_by, managed_revision
from topology.plan import Plan, make_plan
from topology.unit import parse_unit

if TYPE_CHECKING:
    from topology.config import Topology

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
Raw = dict[str, Any]
COMMENT = "GPUs of one pool; written by gpu-topology"
"""What components write as the comment of a mapping that they make."""


def raw_facts(host: str, state: str) -> Raw:
    """The facts as the agent printed them."""
    value: Raw = json.loads((FOLDER / host / f"{state}.json").read_text())
    return value


def facts(host: str, state: str) -> Facts:
    """The facts, parsed."""
    return Facts.model_validate(raw_facts(host, state))


def raw_split() -> Raw:
    """kpro6's topology after the split, as the simulator's stack file has it."""
    stack = YAML(typ="safe").load((REPOSITORY / "Pulumi.sim.yaml").read_text())
    value: Raw = stack["config"]["gpu-topology:topology"]
    return value


def raw_whole() -> Raw:
    """kpro6's topology before the split: all eight in one pool, no VM."""
    value = raw_split()
    value["pools"]["serving"]["devices"] += value["pools"].pop("confidential")["devices"]
    value["pools"]["serving"]["spanNumaNodes"] = True
    del value["pools"]["serving"]["numaNode"]
    value["vms"] = {}
    return value


def split() -> Topology:
    """`raw_split`, loaded."""
    return load_topology(raw_split())


def whole() -> Topology:
    """`raw_whole`, loaded."""
    return load_topology(raw_whole())


def plan(topology: Topology, seen: Facts, copy_text: str | None = None) -> Plan:
    """Plan with one text for every canonical unit on the workstation, by default what the host has deployed."""
    deployed = {s.canonical_unit: (f.text if (f := seen.service(n)) else None) for n, s in topology.services.items()}
    return make_plan(topology, seen, base=REPOSITORY, read_local=lambda path: copy_text or deployed[path])


def applied(done: Plan, before: Raw) -> Raw:
    """The facts of a host after every operation of a plan succeeded."""
    after = copy.deepcopy(before)
    _bind(done, after)
    comments = {mapping["id"]: mapping["description"] for mapping in before["mappings"]}
    after["mappings"] = [
        {
            "id": m.name,
            "description": comments.get(m.name, COMMENT),
            "entries": [{"node": m.node, **_fields(e)} for e in m.entries],
        }
        for m in done.spec.mappings
    ]
    for vm in after["vms"]:
        vm["config"] = "".join(line for line in vm["config"].splitlines(keepends=True) if "hostpci" not in line)
        vm["status"] = "stopped"
    for vm in done.spec.vms:
        _give_vm(after, vm.vmid, vm.mapping, len(vm.devices), start=vm.start)
    for container in done.spec.containers:
        _give_container(after, container.vmid, container.devices)
    for service in done.spec.services:
        _serve(after, service.name, service.text, service.path, service.enabled)
    _record(done, after)
    return after


def _fields(entry: Any) -> Raw:
    return {name: getattr(entry, name) for name in ("path", "id", "subsystem_id", "iommu_group")}


def _bind(done: Plan, after: Raw) -> None:
    drivers = {address: b.driver for b in done.spec.bindings for address in b.devices}
    slots = {address.rsplit(".", 1)[0]: driver for address, driver in drivers.items()}
    for device in after["devices"]:
        driver = slots.get(device["address"].rsplit(".", 1)[0])
        follows = driver == "vfio-pci" or device["class"].startswith("03")
        if driver is None:
            if device["address"] in after["ledger"]["devices"]:
                device |= {"driver": "nvidia", "driver_override": None, "persisted": None}
        elif follows and device["driver"] != driver:
            device |= {"driver": driver, "driver_override": driver, "persisted": driver, "minor": None}
        elif follows and driver == "vfio-pci":
            device["persisted"] = driver
        elif not follows and device["driver"] == "vfio-pci":
            device |= {"driver": "snd_hda_intel", "driver_override": None, "persisted": None}
    _number(after["devices"])


def _number(devices: list[Raw]) -> None:
    """Give each GPU that came to nvidia the lowest free minor, as its driver does in probe order."""
    taken = {d["minor"] for d in devices if d["driver"] == "nvidia"}
    for device in devices:
        if device["driver"] == "nvidia" and device["minor"] is None and device["class"].startswith("03"):
            device["minor"] = next(n for n in range(len(devices)) if n not in taken)
            taken.add(device["minor"])


def _give_vm(after: Raw, vmid: int, mapping: str, count: int, *, start: bool) -> None:
    vm = next(v for v in after["vms"] if v["vmid"] == vmid)
    vm["config"] += "".join(f"hostpci{n}: mapping={mapping},pcie=1,rombar=0\n" for n in range(count))
    if start:
        vm["status"] = "running"


def _give_container(after: Raw, vmid: int, devices: tuple[str, ...]) -> None:
    container = next(c for c in after["containers"] if c["vmid"] == vmid)
    minors = sorted(d["minor"] for d in after["devices"] if d["address"] in devices)
    current, bracket, rest = container["config"].partition("\n[")
    kept = [line for line in current.splitlines() if "/dev/nvidia" not in line and " 195:" not in line]
    nodes = [*(f"nvidia{n}" for n in minors), "nvidiactl", "nvidia-uvm"]
    kept += [f"lxc.cgroup2.devices.allow: c 195:{n} rwm" for n in (*minors, 255)]
    kept += [f"lxc.mount.entry: /dev/{node} dev/{node} none bind,optional,create=file" for node in nodes]
    container |= {"config": "\n".join(kept) + "\n" + bracket + rest, "status": "running"}


def _serve(after: Raw, name: str, text: str, path: str, enabled: bool) -> None:
    service = next(s for s in after["services"] if s["name"] == name)
    unit = parse_unit(text, service["drop_ins"])
    environment = unit.process_environment(service["environment_files"])
    command, flags = split_command(unit.commands({})[0])
    words = [word for flag, values in flags.items() for word in (f"--{flag}", *values)]
    service |= {
        "exists": True,
        "text": text,
        "path": path,
        "enabled": enabled,
        "active": "active",
        "need_reload": False,
        "main_pid": 4242,
        "process": {"argv": [*command, *words], "environment": environment, "started": "2026-02-01T10:00:00+00:00"},
    }


def _record(done: Plan, after: Raw) -> None:
    ledger = after["ledger"]
    ledger["sequence"] += 1
    ledger["drained"] = []
    ledger["devices"] = {
        address: {"pool": b.pool, "driver": b.driver, "found": {}} for b in done.spec.bindings for address in b.devices
    }
    ledger["managed"] = managed_by(done.spec)
    ledger["revisions"] = {
        REGISTER: managed_revision(done.spec, done.facts),
        **{f"drain:{b.pool}": b.drain_revision for b in done.spec.bindings},
        **{f"binding:{b.pool}": b.revision for b in done.spec.bindings},
        **{f"container:{c.vmid}": c.revision for c in done.spec.containers},
        **{f"vm:{v.vmid}": v.revision for v in done.spec.vms},
        **{f"unit:{s.name}": s.unit_revision for s in done.spec.services},
        **{f"service:{s.name}": s.revision for s in done.spec.services},
    }
