"""Rules that the stack file alone decides."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from topology.config import Driver
from topology.flags import split_command
from topology.load import nearest
from topology.presets import model_preset, resolve_gpu
from topology.problem import Problem, TopologyError
from topology.rules.arguments import argument_problems
from topology.rules.catalogue import broken
from topology.rules.pools import each_once, hostpci_count, shared_devices, wrong_driver
from topology.tensor_parallel import tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from topology.config import Service, Topology


def check_config(topology: Topology) -> tuple[Problem, ...]:
    """Judge a stack file by itself; no host is asked."""
    return (
        *_devices(topology),
        *_references(topology),
        *_owners(topology),
        *_presets(topology),
        *_vms(topology),
        *(problem for name, service in topology.services.items() for problem in _service(name, service, topology)),
        *_unique_names(topology),
    )


def _devices(topology: Topology) -> Iterator[Problem]:
    addresses = {name: tuple(map(str, pool.devices)) for name, pool in topology.pools.items()}
    for name, devices in addresses.items():
        yield from each_once(f"pool {name}", devices)
    yield from shared_devices(addresses.items())


def _users(topology: Topology) -> Iterator[tuple[str, str]]:
    """Everything that names a pool, with the pool it names."""
    yield from ((f"container {vmid}", container.pool) for vmid, container in topology.containers.items())
    yield from ((f"VM {vmid}", vm.pool) for vmid, vm in topology.vms.items())
    yield from ((f"service {name}", service.pool) for name, service in topology.services.items())


def _references(topology: Topology) -> Iterator[Problem]:
    for subject, pool in _users(topology):
        if pool not in topology.pools:
            why = "there is no pool of that name"
            yield broken("pool-exists", subject, f"names pool {pool!r}", why, nearest(pool, tuple(topology.pools)))


def _owners(topology: Topology) -> Iterator[Problem]:
    for name, pool in topology.pools.items():
        containers = [vmid for vmid, container in topology.containers.items() if container.pool == name]
        vms = [vmid for vmid, vm in topology.vms.items() if vm.pool == name]
        guests = [(f"container {vmid}", "container-on-nvidia") for vmid in containers]
        guests += [(f"VM {vmid}", "vm-on-vfio") for vmid in vms]
        on_host = [n for n, s in topology.services.items() if s.pool == name and s.container is None]
        owners = [guest for guest, _ in guests] + ([f"the host (service {', '.join(on_host)})"] if on_host else [])
        if len(owners) > 1:
            yield broken(
                "one-pool-one-owner",
                f"pool {name}",
                f"is given to {' and '.join(owners)}",
                "two owners would use the same GPUs",
                "split its devices into one pool per owner",
            )
        for guest, rule in guests:
            yield from wrong_driver(rule, f"pool {name}", guest, pool.driver)
        for service in on_host:
            yield from wrong_driver("service-on-nvidia", f"pool {name}", f"service {service}", pool.driver)


def _presets(topology: Topology) -> Iterator[Problem]:
    for name, pool in topology.pools.items():
        yield from _raised(f"pools.{name}.", partial(resolve_gpu, pool))
    for name, service in topology.services.items():
        if service.model.preset is not None:
            yield from _raised(f"services.{name}.", partial(model_preset, service.model.preset))


def _raised(where: str, resolve: Callable[[], object]) -> Iterator[Problem]:
    try:
        resolve()
    except TopologyError as error:
        yield from (broken(p.rule, where + p.subject, p.value, p.why, p.fix) for p in error.problems)


def _vms(topology: Topology) -> Iterator[Problem]:
    for vmid, vm in topology.vms.items():
        if vm.pool in topology.pools:
            yield from hostpci_count(f"VM {vmid}", len(topology.pools[vm.pool].devices))
    if topology.vms and topology.proxmox is None:
        yield broken(
            "proxmox-endpoint",
            f"VM {', '.join(map(str, topology.vms))}",
            "is given GPUs, and the stack file has no proxmox section",
            "the PCI mapping of a VM is made through Proxmox's API",
            f"add proxmox.endpoint, https://{topology.host.address}:8006/",
        )


def _service(name: str, service: Service, topology: Topology) -> Iterator[Problem]:
    subject = f"service {name}"
    pool = topology.pools.get(service.pool)
    if pool is not None:
        yield from _size(subject, service, len(pool.devices))
    if service.container is not None:
        yield from _container(subject, service, topology)
        if pool is not None and pool.driver is not Driver.NVIDIA:
            yield from wrong_driver("service-on-nvidia", f"pool {service.pool}", subject, pool.driver)
    # A command may carry flags and, after `env`, variables of its own.
    words, flags = split_command(service.command)
    arguments = [(flag, str(value)) for flag, value in service.arguments.items()]
    arguments += [(flag, " ".join(value)) for flag, value in flags.items()]
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    yield from argument_problems(subject, arguments, variables | service.environment)


def _size(subject: str, service: Service, devices: int) -> Iterator[Problem]:
    try:
        tensor_parallel(devices, service.parallelism)
    except TopologyError as error:
        yield from (broken(p.rule, subject, f"has {p.value}", p.why, p.fix) for p in error.problems)


def _container(subject: str, service: Service, topology: Topology) -> Iterator[Problem]:
    container = topology.containers.get(service.container) if service.container is not None else None
    if container is not None and container.pool == service.pool:
        return
    found = f"has pool {container.pool}" if container else "is not among containers"
    yield broken(
        "service-in-its-container",
        subject,
        f"runs in container {service.container} on pool {service.pool}, and that container {found}",
        "a service sees only the GPUs its container is given",
        f"write containers.{service.container}.pool: {service.pool}, or let the service name the container's pool",
    )


def _unique_names(topology: Topology) -> Iterator[Problem]:
    services = topology.services.items()
    yield from _twice("unit", ((_place(s, s.unit or f"{n}.service"), f"service {n}") for n, s in services))
    yield from _twice("port", ((_place(s, str(s.port)), f"service {n}") for n, s in services))
    yield from _twice("canonicalUnit", ((s.canonical_unit, f"service {n}") for n, s in services))
    yield from _twice("mapping", ((vm.mapping, f"VM {vmid}") for vmid, vm in topology.vms.items()))


def _place(service: Service, what: str) -> str:
    where = "the host" if service.container is None else f"container {service.container}"
    return f"{what} on {where}"


def _twice(key: str, used: Iterable[tuple[str, str]]) -> Iterator[Problem]:
    users: dict[str, list[str]] = {}
    for value, user in used:
        users.setdefault(value, []).append(user)
    for value, those in users.items():
        if len(those) > 1:
            yield broken(
                "names-unique",
                " and ".join(those),
                f"have the same {key}, {value}",
                "one would overwrite or block the other",
                f"give each its own {key}",
            )
