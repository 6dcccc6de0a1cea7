"""A pool's devices on the pool's driver, now and after the next boot."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from host.resources.agent_resource import AgentResourceProvider, ObservedResource

if TYPE_CHECKING:
    from host.resources.session import Properties
    from topology.facts import DeviceFacts, Facts


class DriverBindingProvider(AgentResourceProvider):
    """Binds by driver_override per address, persists with driverctl, hands back what left the pool."""

    apply_operation: ClassVar[str] = "bind"
    release_operation: ClassVar[str] = "release"
    compared: ClassVar[tuple[str, ...]] = ("devices", "driver", "revision")

    def identity(self, inputs: Properties) -> str:
        """The pool's name."""
        return str(inputs["pool"])

    def request(self, inputs: Properties) -> Properties:
        """Devices, driver, what other pools own, and which holders may be stopped."""
        return {name: inputs[name] for name in ("pool", "devices", "driver", "others", "managed", "revision")}

    def release_request(self, inputs: Properties) -> Properties:
        """The host's book, not the state, says which devices are still this pool's."""
        return {"pool": inputs["pool"], "managed": inputs["managed"]}

    def facts_request(self, inputs: Properties) -> Properties:
        """The pool's devices."""
        return {"addresses": inputs["devices"]}

    def observe(self, facts: Facts, inputs: Properties) -> object | None:
        """Address to driver, with the persisted driver beside it where the next boot would bring another."""
        devices = {str(device.address): device for device in facts.devices}
        return {address: _seen(devices.get(address), str(inputs["driver"])) for address in _texts(inputs["devices"])}

    def wanted(self, inputs: Properties) -> object:
        """Every device on the pool's driver."""
        return dict.fromkeys(_texts(inputs["devices"]), inputs["driver"])


class DriverBinding(ObservedResource, module="gpu-topology", name="DriverBinding"):
    """The binding in the state: `devices`, `driver` and what was `observed`."""

    provider_type = DriverBindingProvider


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _seen(device: DeviceFacts | None, wanted: str) -> str:
    if device is None:
        return "not on the host"
    live = device.driver or "no driver"
    persisted_wrong = device.persisted != wanted if wanted == "vfio-pci" else device.persisted not in {None, wanted}
    return f"{live}, after a boot {device.persisted or 'the default driver'}" if persisted_wrong else live
