"""A picture of a topology for the terminal: NUMA nodes, their GPUs with driver and owner, services with their TP."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from topology.address import PciAddress
from topology.compare import vm_devices
from topology.flags import Flags, split_command
from topology.lxc import passed_devices
from topology.unit import parse_unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from topology.facts import Facts, ServiceFacts
    from topology.spec import TopologySpec

WIDTH = 100
_NARROW = 80
_LONGEST_NAME = 24
_NVIDIA_VENDOR = "10de"
_DISPLAY = "03"
_STYLES = {"nvidia": "green", "vfio-pci": "magenta"}
_CHANGED = "bold yellow"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuView:
    """One GPU; `numa_node` -1 is unknown, `owner` is empty if no guest is given it."""

    address: PciAddress
    numa_node: int
    driver: str
    owner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceView:
    """One service: where it runs, its tensor parallelism, port and GPUs."""

    name: str
    place: str
    tp: str
    port: str
    gpus: tuple[PciAddress, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a picture shows."""

    title: str
    gpus: tuple[GpuView, ...]
    services: tuple[ServiceView, ...]


def seen(facts: Facts) -> View:
    """The host as it was found."""
    owners = _found_owners(facts)
    gpus = tuple(
        GpuView(
            address=device.address,
            numa_node=device.numa_node,
            driver=device.driver or "no driver",
            owner=" and ".join(owners.get(device.address, ())),
        )
        for device in facts.devices
        if device.pci_class.startswith(_DISPLAY) and device.vendor == _NVIDIA_VENDOR
    )
    services = tuple(_found_service(s, facts) for s in facts.services if s.exists)
    return View(title=_title(facts, facts.host.hostname, gpus), gpus=gpus, services=services)


def planned(facts: Facts, spec: TopologySpec) -> View:
    """The host as the plan has it; GPUs of no pool stay as they were found."""
    pools = {PciAddress(address): pool for pool in spec.pools for address in pool.addresses}
    gpus = tuple(
        GpuView(
            address=gpu.address,
            numa_node=gpu.numa_node,
            driver=pools[gpu.address].driver,
            owner=" and ".join(owner.replace("/", " ") for owner in pools[gpu.address].owners),
        )
        if gpu.address in pools
        else gpu
        for gpu in seen(facts).gpus
    )
    services = tuple(
        ServiceView(
            name=service.name,
            place=_place(service.container),
            tp=str(service.tp),
            port=str(service.port),
            gpus=tuple(map(PciAddress, service.devices)),
        )
        for service in spec.services
    )
    return View(title=_title(facts, spec.host.node, gpus), gpus=gpus, services=services)


def picture(view: View, before: View | None = None) -> RenderableType:
    """Draw a view; what differs from `before` is marked with `>`, and by colour where there is any."""
    old = {gpu.address: gpu for gpu in before.gpus} if before else {}
    nodes = sorted({gpu.numa_node for gpu in view.gpus})
    panels = [
        Panel(
            _gpu_table([gpu for gpu in view.gpus if gpu.numa_node == node], old, view.services),
            title=f"NUMA node {node}" if node >= 0 else "NUMA node unknown",
            title_align="left",
        )
        for node in nodes
    ]
    return Group(Text(view.title, style="bold"), _Columns(panels), _service_table(view, before))


def before_after(facts: Facts, spec: TopologySpec) -> RenderableType:
    """The host as found above the host as planned; one picture where both are the same."""
    before, after = seen(facts), planned(facts, spec)
    if before == after:
        return Group(Rule("as it is, and as it must be", align="left"), picture(after))
    parts = [Rule("before", align="left"), picture(before), Rule("after", align="left"), picture(after, before)]
    return Group(*parts)


def to_text(drawing: RenderableType, *, width: int = WIDTH, colour: bool = False) -> str:
    """The drawing as text, by default without colour, its lines without trailing blanks."""
    console = Console(file=StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    with console.capture() as capture:
        console.print(drawing)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def to_svg(drawing: RenderableType, *, title: str, width: int = WIDTH) -> str:
    """The drawing as an SVG picture of a terminal, the same text for the same drawing."""
    console = Console(file=StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor")
    console.print(drawing)
    return console.export_svg(title=title, unique_id="gpu-topology")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Panels side by side, two in a row; below each other where the terminal is narrow."""

    panels: list[Panel]

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        across = 1 if console.width < _NARROW else min(2, len(self.panels))
        grid = Table.grid(expand=True, padding=0)
        for _ in range(across):
            grid.add_column(ratio=1)
        for start in range(0, len(self.panels), across):
            grid.add_row(*self.panels[start : start + across])
        yield grid


def _gpu_table(gpus: Iterable[GpuView], old: dict[PciAddress, GpuView], services: Iterable[ServiceView]) -> Table:
    table = Table.grid(padding=(0, 1))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", max_width=_LONGEST_NAME)
    for gpu in gpus:
        was = old.get(gpu.address, gpu)
        changed = (was.driver, was.owner) != (gpu.driver, gpu.owner)
        table.add_row(
            Text(">" if changed else " ", style=_CHANGED),
            Text(gpu.address.short),
            Text(gpu.driver, style=_STYLES.get(gpu.driver, "red")),
            Text(gpu.owner or "no guest", style="" if gpu.owner else "dim"),
            Text(" ".join(service.name for service in services if gpu.address in service.gpus), "dim", no_wrap=True),
        )
    return table


def _service_table(view: View, before: View | None) -> RenderableType:
    if not view.services:
        return Panel(Text("none", style="dim"), title="services", title_align="left")
    old = {service.name: service.tp for service in before.services} if before else {}
    table = Table.grid(padding=(0, 2))
    for service in view.services:
        changed = old.get(service.name, service.tp) != service.tp
        table.add_row(
            Text(">" if changed else " ", style=_CHANGED),
            Text(service.name, style="bold"),
            Text(service.place),
            Text(f"tp {service.tp}", style=_CHANGED if changed else "cyan"),
            Text(f"on {len(service.gpus)} GPUs"),
            Text(f"port {service.port}"),
        )
    return Panel(table, title="services", title_align="left")


def _title(facts: Facts, node: str, gpus: tuple[GpuView, ...]) -> str:
    names = sorted({device.name for device in facts.devices if device.name})
    model = f" x {names[0]}" if len(names) == 1 else " GPUs"
    snp = {True: "SEV-SNP on", False: "SEV-SNP off", None: "SEV-SNP unknown"}[facts.snp]
    return f"{node}: {len(gpus)}{model}, {snp}"


def _found_owners(facts: Facts) -> dict[PciAddress, list[str]]:
    """Guests that are given a GPU by their configuration; only what the devices' drivers now allow can be used."""
    owners: dict[PciAddress, list[str]] = {}
    for container in facts.containers:
        for address in passed_devices(container, facts):
            owners.setdefault(address, []).append(f"lxc {container.vmid}")
    for vm in facts.vms:
        slots = vm_devices(vm, facts)
        for device in facts.devices:
            if device.address.slot in slots:
                owners.setdefault(device.address, []).append(f"vm {vm.vmid}")
    return owners


def _found_service(service: ServiceFacts, facts: Facts) -> ServiceView:
    flags = _found_flags(service)
    container = None if service.container is None else facts.container(service.container)
    gpus = passed_devices(container, facts) if container else [d.address for d in facts.devices if d.minor is not None]
    return ServiceView(
        name=service.name,
        place=_place(service.container),
        tp=" ".join(flags.get("tp", ("1",))),
        port=" ".join(flags.get("port", ("30000",))),
        gpus=tuple(gpus),
    )


def _found_flags(service: ServiceFacts) -> Flags:
    """The flags of the running process; of the unit where nothing runs."""
    if service.process is not None:
        return split_command(service.process.argv)[1]
    commands = parse_unit(service.text or "", service.drop_ins).commands(service.environment_files)
    return split_command(commands[-1])[1] if commands else {}


def _place(container: int | None) -> str:
    return "host" if container is None else f"lxc {container}"
