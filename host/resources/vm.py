"""The hostpci entries of a virtual machine that exists: one per GPU, all through one PCI resource mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from host.resources.agent_resource import AgentResourceProvider, ObservedResource

if TYPE_CHECKING:
    from host.resources.session import Properties
    from topology.facts import Facts


class VmGpusProvider(AgentResourceProvider):
    """Sets and removes hostpci entries that refer to GPUs; foreign ones stay."""

    apply_operation: ClassVar[str] = "vm"
    release_operation: ClassVar[str] = "vm-release"
    compared: ClassVar[tuple[str, ...]] = ("mapping", "devices", "start", "revision")
    placed: ClassVar[tuple[str, ...]] = ("vmid",)

    def identity(self, inputs: Properties) -> str:
        """`vm/VMID`."""
        return f"vm/{inputs['vmid']}"

    def request(self, inputs: Properties) -> Properties:
        """One entry per device: entries of one mapping are alternatives, and each takes the first device free."""
        names = ("vmid", "mapping", "count", "start", "pool", "devices", "revision")
        return {name: inputs[name] for name in names} | {"pcie": True, "rombar": False}

    def release_request(self, inputs: Properties) -> Properties:
        """The VM alone: what was found is in the host's book."""
        return {"vmid": inputs["vmid"]}

    def facts_request(self, inputs: Properties) -> Properties:
        """The VM."""
        return {"vms": [inputs["vmid"]]}

    def observe(self, facts: Facts, inputs: Properties) -> object | None:
        """How many GPUs it is given through the mapping, and whether it runs where it must."""
        from topology.compare import mapped_hostpci_count  # noqa: PLC0415  as in `client`

        vm = facts.vm(int(str(inputs["vmid"])))
        if vm is None:
            return None
        runs = vm.status == "running" if inputs["start"] else False
        return {"hostpci": mapped_hostpci_count(vm, str(inputs["mapping"])), "running": runs}

    def wanted(self, inputs: Properties) -> object:
        """As many entries as devices; running if the configuration says so."""
        return {"hostpci": inputs["count"], "running": bool(inputs["start"])}


class VmGpus(ObservedResource, module="gpu-topology", name="VmGpus"):
    """The VM's GPUs in the state."""

    provider_type = VmGpusProvider
