"""Read-only comparisons of the live host with a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import lxc_config
from .container_live import Container, visible_gpus
from .device_numbers import all_majors
from .guests import container_config, status
from .pci import VFIO, Address, Pci, parse_address
from .readiness import Server, ask
from .rebind import Binding, read_binding
from .request import Request
from .result import AgentError, Json, RefusedError
from .unit import show
from .vm import need_vm
from .vm_config import hostpci, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from .system import System


def check_pool(system: System, request: Request) -> dict[str, Json]:
    """Refuse a pool whose devices aren't what the plan saw."""
    pci = Pci(system.root)
    devices = request.objects("devices")
    wrong = [line for one in devices for line in _device_differences(system, pci, one)]
    if wrong:
        raise RefusedError(
            f"pool {request.text('pool')}: {'; '.join(wrong)}. The host is not what the plan saw: refresh the recorded "
            "facts, or correct the stack file, and preview again",
            {"differences": [*wrong]},
        )
    addresses = [parse_address(one.text("address")) for one in devices]
    return {"devices": [{"address": one, "driver": pci.driver(one), "group": pci.group(one)} for one in addresses]}


def verify(system: System, request: Request) -> dict[str, Json]:
    """Refuse with every difference between the live host and the plan."""
    differences: list[str] = []
    sections: list[tuple[Request, Callable[[System, Request], list[str]]]] = []
    if request.has("service"):
        key: dict[str, Json] = {"api_key": request.fields.get("api_key")}
        sections.append((Request.of({**key, **request.object("service").fields}, "service."), _service))
    sections += [(one, _pool) for one in request.objects("pools")]
    sections += [(one, _container) for one in request.objects("containers")]
    sections += [(one, _vm) for one in request.objects("vms")]
    for section, look in sections:
        try:
            differences += look(system, section)
        except AgentError as error:
            differences.append(error.message)
    if differences:
        raise RefusedError(
            f"the host differs from the plan: {'; '.join(differences)}. Run `pulumi up` with a refresh to repair it",
            {"differences": [*differences]},
        )
    return {"checked": len(sections)}


def _device_differences(system: System, pci: Pci, expected: Request) -> list[str]:
    address = parse_address(expected.text("address"))
    if not pci.exists(address):
        return [f"{address} does not exist on this host"]
    if not system.read_apart({"alive": lambda: pci.alive(address)}, 3.0).get("alive"):
        return [f"{address} does not answer (its configuration space reads ffffffff): the card fell off the bus"]
    numa, group = pci.number(address, "numa_node"), pci.group(address)
    pairs: list[tuple[str, object, object]] = [
        ("vendor", expected.text_or_none("vendor"), pci.identity(address, "vendor")),
        ("device id", expected.text_or_none("device"), pci.identity(address, "device")),
        ("NUMA node", expected.number_or_none("numa_node"), -1 if numa is None else numa),
        ("IOMMU group", expected.number_or_none("iommu_group"), group),
    ]
    return [
        f"{address} has {name} {now}, not {wanted}"
        for name, wanted, now in pairs
        if wanted is not None and wanted != now
    ]


def _pool(system: System, section: Request) -> list[str]:
    driver = section.text("driver")
    found = []
    for address in section.addresses("devices"):
        if not Pci(system.root).exists(address):
            found.append(f"{address} does not exist on this host")
            continue
        now = read_binding(system, address)
        found += _binding_differences(address, now, driver)
    return found


def _binding_differences(address: Address, now: Binding, driver: str) -> list[str]:
    found = []
    if now.driver != driver:
        found.append(f"{address} is on {now.driver or 'no driver'}, not {driver}")
    accepted = (driver,) if driver == VFIO else (None, driver)
    if now.persisted not in accepted:
        found.append(f"{address} will be on {now.persisted or 'its default driver'} after the next boot, not {driver}")
    return found


def _container(system: System, section: Request) -> list[str]:
    vmid = section.number("vmid")
    text = container_config(system, vmid)
    if text is None:
        return [f"container {vmid} does not exist on this node"]
    target = Container.of(system, vmid, section)
    wanted = frozenset(
        minor for one in section.addresses("devices") if (minor := Pci(system.root).minor(one)) is not None
    )
    configured = lxc_config.parse(text, all_majors(system.root)).minors
    found = []
    if configured != wanted:
        found.append(f"container {vmid} passes GPUs {sorted(configured)}, not {sorted(wanted)}")
    if not target.running:
        found.append(f"container {vmid} does not run")
    elif (live := target.live_minors()) != wanted:
        found.append(f"container {vmid} has GPU nodes {sorted(live)}, not {sorted(wanted)}")
    return found


def _vm(system: System, section: Request) -> list[str]:
    vmid, mapping = section.number("vmid"), section.text("mapping")
    devices = section.addresses("devices")
    entries = [one for one in hostpci(need_vm(system, vmid)).values() if options(one).get("mapping") == mapping]
    found = []
    if len(entries) != len(devices):
        found.append(f"VM {vmid} has {len(entries)} entries of mapping {mapping}, not {len(devices)}")
    runs = status(system, "qm", vmid) == "running"
    if section.flag("running", default=False) and not runs:
        found.append(f"VM {vmid} does not run")
    return found


def _service(system: System, section: Request) -> list[str]:
    server = Server.of(section)
    service = server.service
    shown = show(system, service)
    if shown.get("ActiveState") != "active":
        return [f"{service.unit} is {shown.get('ActiveState')}"]
    found = []
    answer = ask(system, server, min(server.token_timeout, 60.0))
    if answer["state"] != "token":
        found.append(f"{service.unit} generates no token ({answer['state']})")
    elif answer.get("tp") != server.tp:
        found.append(f"{service.unit} serves with tp {answer.get('tp')}, not {server.tp}")
    visible = visible_gpus(system, service.container) if service.container is not None else None
    if visible is not None and visible != server.gpus:
        found.append(f"{visible} GPUs are visible to {service.unit}, not {server.gpus}")
    return found
