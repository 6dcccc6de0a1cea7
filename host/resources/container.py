"""The GPU lines of an LXC container's configuration: exactly its pool's GPUs, no line of anybody else's touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from host.resources.agent_resource import AgentResourceProvider, ObservedResource

if TYPE_CHECKING:
    from host.resources.session import Properties
    from topology.facts import Facts


class ContainerGpusProvider(AgentResourceProvider):
    """Rewrites only GPU lines, restarts the container only if they changed in meaning."""

    apply_operation: ClassVar[str] = "container"
    release_operation: ClassVar[str] = "container-release"
    compared: ClassVar[tuple[str, ...]] = ("devices", "style", "revision")
    placed: ClassVar[tuple[str, ...]] = ("vmid",)

    def identity(self, inputs: Properties) -> str:
        """`lxc/VMID`."""
        return f"lxc/{inputs['vmid']}"

    def request(self, inputs: Properties) -> Properties:
        """The GPUs by PCI address; the host resolves device minors when it applies."""
        return {name: inputs[name] for name in ("vmid", "devices", "style", "units", "revision")} | {"start": True}

    def release_request(self, inputs: Properties) -> Properties:
        """The container alone: what was found is in the host's book."""
        return {"vmid": inputs["vmid"]}

    def facts_request(self, inputs: Properties) -> Properties:
        """The container and its GPUs."""
        return {"containers": [inputs["vmid"]], "addresses": inputs["devices"]}

    def observe(self, facts: Facts, inputs: Properties) -> object | None:
        """The PCI addresses of the GPUs it is given, in the bus's order."""
        from topology.lxc import passed_devices  # noqa: PLC0415  as in `client`

        container = facts.container(int(str(inputs["vmid"])))
        return None if container is None else sorted(str(address) for address in passed_devices(container, facts))

    def wanted(self, inputs: Properties) -> object:
        """The pool's devices."""
        devices = inputs["devices"]
        return sorted(str(device) for device in devices) if isinstance(devices, list | tuple) else []


class ContainerGpus(ObservedResource, module="gpu-topology", name="ContainerGpus"):
    """The container's GPUs in the state."""

    provider_type = ContainerGpusProvider
