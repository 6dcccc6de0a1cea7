"""Proxmox's API, coupled with the host's files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import httpx
import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run
from tests.simulator.host import NODE_1, free, output, to_vfio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from testbed.simulator import Simulator

MAPPING = "/cluster/mapping/pci"
CONFIG = "/nodes/kpro6/qemu/200/config"
STATUS = "/nodes/kpro6/qemu/200/status"
GROUPS = (93, 82, 105, 66)
ENTRIES = [
    f"id=10de:2bb5,iommugroup={group},node=kpro6,path={address},subsystem-id=10de:204e"
    for group, address in zip(GROUPS, NODE_1, strict=True)
]


def client_of(simulator: Simulator) -> httpx.Client:
    """A client with the simulator's token, which checks its certificate."""
    context = ssl.create_default_context(cafile=str(simulator.api_certificate))
    headers = {"Authorization": f"PVEAPIToken={simulator.api_token}"}
    return httpx.Client(base_url=f"{simulator.api_url}/api2/json", verify=context, headers=headers, timeout=30)


@pytest.fixture
def api(simulator: Simulator) -> Iterator[httpx.Client]:
    """The API of kpro6."""
    with client_of(simulator) as client:
        yield client


def data(answer: httpx.Response) -> object:
    """An answer's data, which must be good."""
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def exit_status(api: httpx.Client, answer: httpx.Response) -> str:
    """How a task ended."""
    status = data(api.get(f"/nodes/kpro6/tasks/{data(answer)}/status"))
    assert isinstance(status, dict)
    return str(status["exitstatus"])


def test_devices_are_told_without_numa_and_driver(api: httpx.Client) -> None:
    """The device list has ids and IOMMU groups of the live hardware, bridges left out."""
    listed = data(api.get("/nodes/kpro6/hardware/pci"))
    assert isinstance(listed, list)
    found = {d["id"]: d for d in listed}
    assert len(found) == 9
    gpu = found[NODE_1[0]]
    assert (gpu["vendor"], gpu["device"], gpu["subsystem_device"]) == ("0x10de", "0x2bb5", "0x204e")
    assert (gpu["iommugroup"], gpu["class"]) == (93, "0x030200")
    assert "numa_node" not in gpu
    assert "driver" not in gpu


def test_mapping_lives_in_the_hosts_file(simulator: Simulator, api: httpx.Client) -> None:
    """A mapping that the API creates, changes or deletes is in pci.cfg, and what is in pci.cfg is in the API."""
    data(api.post(MAPPING, json={"id": "gpus", "map": ENTRIES, "description": "four cards"}))
    path = simulator.root / "etc/pve/mapping/pci.cfg"
    assert path.read_text().startswith(f"gpus\n\tdescription four cards\n\tmap {ENTRIES[0]}\n")
    data(api.put(f"{MAPPING}/gpus", json={"map": ENTRIES[:2], "delete": "description"}))
    assert path.read_text() == f"gpus\n\tmap {ENTRIES[0]}\n\tmap {ENTRIES[1]}\n"
    path.write_text(path.read_text() + f"\nother\n\tmap {ENTRIES[3]}\n")
    listed = data(api.get(MAPPING))
    assert isinstance(listed, list)
    assert [m["id"] for m in listed] == ["gpus", "other"]
    data(api.delete(f"{MAPPING}/gpus"))
    assert path.read_text() == f"other\n\tmap {ENTRIES[3]}\n"
    subjects = [(e.subject, e.detail["devices"]) for e in simulator.events(EventKind.MAPPING)]
    assert subjects == [
        ("gpus", ",".join(NODE_1)),
        ("gpus", ",".join(NODE_1[:2])),
        ("other", NODE_1[3]),
        ("gpus", None),
    ]


def test_mapping_errors_are_proxmoxs(api: httpx.Client) -> None:
    """A mapping twice, one that is not there, and a malformed entry are refused."""
    data(api.post(MAPPING, json={"id": "gpus", "map": ENTRIES}))
    assert "already defined" in api.post(MAPPING, json={"id": "gpus", "map": ENTRIES}).text
    assert "not found" in api.get(f"{MAPPING}/none").text
    assert api.put(f"{MAPPING}/none", json={"map": ENTRIES}).status_code == 500
    assert api.post(MAPPING, json={"id": "bad", "map": ["path=zz"]}).status_code == 400
    assert api.put(f"{MAPPING}/gpus", json={"map": ENTRIES, "digest": "0" * 40}).status_code == 500


def test_mapping_list_checks_the_node(simulator: Simulator, api: httpx.Client) -> None:
    """With check-node, entries that do not fit the live hardware are told."""
    data(api.post(MAPPING, json={"id": "gpus", "map": [ENTRIES[0], ENTRIES[1].replace("=82", "=83")]}))
    listed = data(api.get(MAPPING, params={"check-node": simulator.hostname}))
    assert isinstance(listed, list)
    assert [c["message"] for c in listed[0]["checks"]] == [
        "PCI device mapping invalid (hardware probably changed): 'iommugroup' does not match for 'gpus' (82 != 83)"
    ]


def test_vm_configuration_is_one_in_both_directions(simulator: Simulator, api: httpx.Client) -> None:
    """What the API sets is in the file, and what qm sets is in the API."""
    data(api.post(MAPPING, json={"id": "gpus", "map": ENTRIES}))
    data(api.put(CONFIG, json={"hostpci0": "mapping=gpus,pcie=1"}))
    assert "hostpci0: mapping=gpus,pcie=1\n" in (simulator.root / "etc/pve/qemu-server/200.conf").read_text()
    output(simulator, "qm set 200 --hostpci1 mapping=gpus -delete hostpci0")
    config = data(api.get(CONFIG))
    assert isinstance(config, dict)
    assert (config.get("hostpci0"), config["hostpci1"]) == (None, "mapping=gpus")


def test_vm_starts_and_stops_by_the_api(simulator: Simulator, api: httpx.Client) -> None:
    """A start by the API is the host's own, checks included: a device that is asked for twice fails as a task."""
    data(api.post(MAPPING, json={"id": "gpus", "map": ENTRIES[:1]}))
    free(simulator)
    to_vfio(simulator, NODE_1[0])
    data(api.put(CONFIG, json={"hostpci0": "mapping=gpus", "hostpci1": "mapping=gpus"}))
    assert "device '0000:81:00.0' assigned more than once" in exit_status(api, api.post(f"{STATUS}/start"))
    data(api.put(CONFIG, json={"delete": "hostpci1"}))
    assert exit_status(api, api.post(f"{STATUS}/start")) == "OK"
    assert output(simulator, "qm status 200") == "status: running\n"
    data(api.put(CONFIG, json={"delete": "hostpci0"}))
    assert "[PENDING]\ndelete: hostpci0\n" in (simulator.root / "etc/pve/qemu-server/200.conf").read_text()
    assert exit_status(api, api.post(f"{STATUS}/reboot")) == "OK"
    current = data(api.get(f"{STATUS}/current"))
    assert isinstance(current, dict)
    assert current["status"] == "running"
    assert simulator.events(EventKind.VM_START)[-1].detail["devices"] == ""
    assert exit_status(api, api.post(f"{STATUS}/shutdown")) == "OK"
    assert output(simulator, "qm status 200") == "status: stopped\n"
    assert api.post(f"{STATUS}/reset").status_code == 501


def test_vm_is_made_and_removed_by_the_api(simulator: Simulator, api: httpx.Client) -> None:
    """A VM that the API creates has a file on the host; its deletion, with bpg's slash at the end, removes it."""
    assert exit_status(api, api.post("/nodes/kpro6/qemu", json={"vmid": 201, "name": "new", "cores": 2})) == "OK"
    assert "name: new\n" in (simulator.root / "etc/pve/qemu-server/201.conf").read_text()
    assert output(simulator, "qm status 201") == "status: stopped\n"
    assert exit_status(api, api.delete("/nodes/kpro6/qemu/201/")) == "OK"
    assert run(simulator, "qm status 201").code == 2


def test_container_is_seen_as_it_is(simulator: Simulator, api: httpx.Client) -> None:
    """LXC 129 is listed as running, with its raw lines."""
    config = data(api.get("/nodes/kpro6/lxc/129/config"))
    assert isinstance(config, dict)
    assert ["lxc.mount.entry", "/dev/nvidia7 dev/nvidia7 none bind,optional,create=file"] in config["lxc"]
    output(simulator, "pct stop 129")
    status = data(api.get("/nodes/kpro6/lxc/129/status/current"))
    assert isinstance(status, dict)
    assert status["status"] == "stopped"


def test_wrong_token_is_refused(simulator: Simulator, api: httpx.Client) -> None:
    """Another token's secret gets 401."""
    assert api.get("/version", headers={"Authorization": "PVEAPIToken=root@pam!x=y"}).status_code == 401
    assert data(api.get("/version")) == {"version": "9.0.10", "release": "9.0", "repoid": "fakepve"}


def test_task_error_fault(simulator: Simulator, api: httpx.Client) -> None:
    """While the fault is on, tasks end with its message and mappings cannot be changed; then all is well."""
    simulator.faults.api_task_error("storage went away")
    assert exit_status(api, api.post(f"{STATUS}/start")) == "storage went away"
    assert "storage went away" in api.post(MAPPING, json={"id": "gpus", "map": ENTRIES}).text
    assert output(simulator, "qm status 200") == "status: stopped\n"
    simulator.faults.clear()
    assert exit_status(api, api.post(f"{STATUS}/start")) == "OK"
    data(api.post(MAPPING, json={"id": "gpus", "map": ENTRIES}))


def test_split_host_is_seen_split(simulate: Callable[[str], Simulator]) -> None:
    """A host that is split already shows its mapping and its running VM."""
    with client_of(simulate("kpro6-split")) as api:
        mapping = data(api.get(f"{MAPPING}/gpu-confidential"))
        assert isinstance(mapping, dict)
        assert mapping["map"] == ENTRIES
        current = data(api.get(f"{STATUS}/current"))
        assert isinstance(current, dict)
        assert current["status"] == "running"
