"""Units and services on the simulated hypervisor: written, served, proven by a token, diagnosed, put back."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from tests.agent.requests import (
    NODE_0,
    NODE_1,
    ROOTFS,
    SERVICE,
    UNIT,
    UNIT_PATH,
    bind_request,
    container_request,
    serve_request,
    unit_request,
)

if TYPE_CHECKING:
    from tests.agent.conftest import Hypervisor

pytestmark = pytest.mark.simulator

ALL = NODE_0 + NODE_1


def state(host: Hypervisor) -> tuple[str, bool]:
    """The service's activity, and whether it is enabled."""
    service = host.facts(services=[SERVICE])["services"][0]
    return service["active"], service["enabled"]


def shrink(host: Hypervisor) -> None:
    """Give the container four cards only."""
    host.done("bind", bind_request("confidential", NODE_1, "vfio-pci", others=NODE_0))
    host.done("container", container_request(NODE_0))


def starts(host: Hypervisor) -> int:
    """How often the service was started."""
    return [event.subject for event in host.simulator.events("service.start")].count(UNIT)  # type: ignore[arg-type]


def test_a_unit_with_the_wanted_bytes_is_left_alone(kpro6: Hypervisor) -> None:
    """Nothing is written, reloaded or enabled."""
    before = kpro6.host_state()
    assert not kpro6.done("unit", unit_request(kpro6.unit_text()))["changed"]
    assert kpro6.host_state() == before


def test_a_unit_is_written_exactly_and_loaded(kpro6: Hypervisor) -> None:
    """The new bytes are there with mode 0644, systemd knows them, and the service is not restarted."""
    text = kpro6.unit_text().replace("--tp 8", "--tp 4") + "# ünit, no newline"
    before = starts(kpro6)
    assert kpro6.done("unit", unit_request(text))["changed"]
    place = kpro6.root / ROOTFS / UNIT_PATH.lstrip("/")
    assert (place.read_text(), place.stat().st_mode & 0o777) == (text, 0o644)
    assert [name.name for name in place.parent.iterdir() if name.name.startswith(".")] == []
    service = kpro6.facts(services=[SERVICE])["services"][0]
    assert (service["text"], service["need_reload"]) == (text, False)
    assert starts(kpro6) == before
    assert not kpro6.done("unit", unit_request(text))["changed"]


def test_a_unit_that_changed_behind_systemd_is_loaded(kpro6: Hypervisor) -> None:
    """Right bytes that systemd has not read yet need a reload."""
    text = kpro6.unit_text() + "# more\n"
    (kpro6.root / ROOTFS / UNIT_PATH.lstrip("/")).write_text(text)
    assert kpro6.done("unit", unit_request(text))["changed"]
    assert not kpro6.facts(services=[SERVICE])["services"][0]["need_reload"]


def test_a_unit_is_enabled_as_wanted(kpro6: Hypervisor) -> None:
    """Enabling and disabling change nothing else."""
    text = kpro6.unit_text()
    assert kpro6.done("unit", unit_request(text, enabled=False))["changed"]
    assert state(kpro6) == ("active", False)
    assert kpro6.done("unit", unit_request(text, enabled=True))["changed"]
    assert state(kpro6) == ("active", True)


def test_a_unit_that_a_container_s_restart_disabled_counts_as_found_enabled(kpro6: Hypervisor) -> None:
    """A split without an adoption before: what is given back in the end is an enabled unit."""
    shrink(kpro6)
    assert not state(kpro6)[1]
    kpro6.done("unit", unit_request(kpro6.unit_text().replace("--tp 8", "--tp 4")))
    assert kpro6.ledger()["quieted"] == []
    kpro6.done("unit-release", {**SERVICE})
    assert state(kpro6)[1]
    assert "--tp 8" in kpro6.unit_text()


def test_a_unit_on_a_full_disk_is_left_as_it_was(kpro6: Hypervisor) -> None:
    """No room means no change."""
    before = kpro6.unit_text()
    kpro6.simulator.faults.disk_full()
    answer = kpro6.agent("unit", unit_request(before + "# more\n"))
    kpro6.simulator.faults.clear()
    assert answer.code == 4
    assert kpro6.unit_text() == before


def test_a_unit_in_a_container_that_does_not_exist_is_refused(kpro6: Hypervisor) -> None:
    """The message names the container and the service."""
    answer = kpro6.agent("unit", unit_request("x", container=999))
    assert answer.code == 3
    assert "container 999 of service qwen does not exist" in answer["message"]


def test_release_gives_the_found_unit_back(kpro6: Hypervisor) -> None:
    """The found text comes back and is enabled as found; a second release changes nothing."""
    before = kpro6.unit_text()
    kpro6.done("unit", unit_request(before.replace("--tp 8", "--tp 4"), enabled=False))
    assert kpro6.done("unit-release", {**SERVICE})["changed"]
    assert kpro6.unit_text() == before
    assert state(kpro6)[1]
    assert not kpro6.done("unit-release", {**SERVICE})["changed"]


def test_release_removes_a_unit_that_was_not_there(kpro6: Hypervisor) -> None:
    """A unit that we brought goes away whole."""
    new = {"name": "new", "unit": "new.service", "container": 129}
    request = {
        **new,
        "text": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n",
        "enabled": True,
    }
    kpro6.done("unit", request)
    assert not kpro6.done("unit", request)["changed"]
    kpro6.done("unit-release", new)
    assert not kpro6.facts(services=[new])["services"][0]["exists"]
    folder = kpro6.root / ROOTFS / "etc/systemd/system"
    assert not list(folder.rglob("*new.service"))


def test_a_unit_of_the_host_itself(kpro6: Hypervisor) -> None:
    """A service need not be in a container."""
    new = {"name": "new", "unit": "new.service", "container": None}
    text = "[Service]\nExecStart=/bin/true\n"
    kpro6.done("unit", {**new, "text": text})
    assert (kpro6.root / "etc/systemd/system/new.service").read_text() == text
    kpro6.done("unit-release", new)
    assert not (kpro6.root / "etc/systemd/system/new.service").exists()


def test_a_running_service_as_wanted_is_not_restarted(kpro6: Hypervisor) -> None:
    """The process's own arguments and environment count; a token is asked for all the same."""
    before = starts(kpro6)
    result = kpro6.done("serve", serve_request(ALL))
    assert (result["changed"], result["restarted"], result["tp"]) == (False, False, 8)
    assert starts(kpro6) == before
    assert kpro6.simulator.events("service.token")  # type: ignore[arg-type]


def test_a_service_whose_process_lacks_the_environment_is_restarted(kpro6: Hypervisor) -> None:
    """What counts is what the process really has, any variable of it, not what the unit file says by now."""
    text = kpro6.unit_text().replace("[Service]\n", "[Service]\nEnvironment=NCCL_DEBUG=WARN HF_HOME=/models\n", 1)
    place = kpro6.root / ROOTFS / UNIT_PATH.lstrip("/")
    place.write_text(text)
    asyncio.run(kpro6.run("pct exec 129 -- systemctl daemon-reload"))
    request = serve_request(ALL, environment={"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN", "HF_HOME": "/models"})
    before = starts(kpro6)
    result = kpro6.done("serve", request)
    assert (result["changed"], result["restarted"]) == (True, True)
    assert "HF_HOME is not set in its process, not /models" in result["steps"][0]
    assert starts(kpro6) == before + 1
    assert not kpro6.done("serve", request)["changed"]
    assert starts(kpro6) == before + 1


def test_a_service_is_served_at_its_new_size(kpro6: Hypervisor) -> None:
    """After the split: unit, restart, token, and the server itself says 4."""
    shrink(kpro6)
    kpro6.done("unit", unit_request(kpro6.unit_text().replace("--tp 8", "--tp 4")))
    result = kpro6.done("serve", serve_request(NODE_0))
    assert (result["tp"], result["gpus"], result["restarted"]) == (4, 4, True)
    assert state(kpro6) == ("active", True)
    assert kpro6.done("verify", {"service": serve_request(NODE_0)})["checked"] == 1
    assert kpro6.ledger()["revisions"]["service:qwen"] == "r"
    assert {entry["kind"] for entry in kpro6.ledger()["drained"]} == set()


def test_the_nccl_hang_is_caught_diagnosed_and_put_back(kpro6: Hypervisor) -> None:
    """Without the P2P setting the deadline ends the wait, the cause is named, and the previous unit serves again."""
    text = kpro6.unit_text().replace('"NCCL_P2P_DISABLE=1" ', "")
    kpro6.done("unit", unit_request(text))
    answer = kpro6.agent("serve", serve_request(ALL, environment={"NCCL_P2P_DISABLE": "1"}, deadline_s=4))
    assert answer.code == 4, answer.stdout
    message = answer["message"]
    assert "no token within 4 s" in message
    assert "NCCL P2P under a translated IOMMU" in message
    assert "NCCL_P2P_DISABLE=1" in message
    assert answer["details"]["gpus"][0]["utilisation"] == 100
    assert len(answer["details"]["gpus"]) == 8
    assert "NCCL_P2P_DISABLE=1" in kpro6.unit_text()
    assert state(kpro6)[0] == "active"
    assert kpro6.done("serve", serve_request(ALL))["tp"] == 8


def test_a_service_that_ends_fails_at_once_and_stays_stopped_where_nothing_fits(kpro6: Hypervisor) -> None:
    """TP 8 on four cards ends early; the previous unit asks for eight as well, so the service is stopped."""
    shrink(kpro6)
    kpro6.done("unit", unit_request(kpro6.unit_text() + "# still eight\n"))
    answer = kpro6.agent("serve", serve_request(NODE_0) | {"deadline_s": 120})
    assert answer.code == 5, answer.stdout
    message = answer["message"]
    assert "ended after" in message
    assert "tensor parallelism 8 and only 4 GPUs are visible" in message
    assert "the service is stopped, since the previous unit asks for tp 8 and there are 4 GPUs" in message
    assert state(kpro6)[0] in ("inactive", "failed")


def test_no_secret_is_told(kpro6: Hypervisor) -> None:
    """An API key is in no output, no log and no ledger, whether the operation succeeds or fails."""
    key = "sk-very-secret"
    text = kpro6.unit_text().replace("--trust-remote-code", f"--trust-remote-code --api-key {key}")
    kpro6.done("unit", unit_request(text))
    good = kpro6.agent("serve", serve_request(ALL, api_key=key))
    assert good.code == 0, good.stdout
    section = {**SERVICE, "port": 30000, "tp": 8, "gpus": 8}
    assert kpro6.done("verify", {"service": section, "api_key": key})["checked"] == 1
    wrong = kpro6.agent("serve", serve_request(ALL, api_key="sk-also-secret"))
    assert wrong.code == 4
    assert "refuses the API key" in wrong["message"]
    facts = kpro6.agent("facts", {"services": [SERVICE]})
    argv = facts["services"][0]["process"]["argv"]
    assert argv[argv.index("--api-key") + 1] == "***"
    for told in (good, wrong):
        assert key not in told.stdout + told.stderr
        assert "sk-also-secret" not in told.stdout + told.stderr
    commands = [str(event.detail) + event.subject for event in kpro6.simulator.log]
    assert not [line for line in commands if key in line]


def test_a_unit_that_systemd_does_not_know_is_refused(kpro6: Hypervisor) -> None:
    """The unit file comes first."""
    answer = kpro6.agent("serve", serve_request(ALL, unit="none.service"))
    assert answer.code == 3
    assert "none.service is not known to systemd" in answer["message"]


def test_stop_ends_the_service(kpro6: Hypervisor) -> None:
    """A deleted service is stopped and no longer ours; a second stop does nothing."""
    kpro6.done("serve", serve_request(ALL))
    assert kpro6.done("stop", serve_request(ALL))["changed"]
    assert state(kpro6)[0] == "inactive"
    assert kpro6.ledger()["managed"]["services"] == []
    assert not kpro6.done("stop", serve_request(ALL))["changed"]


def test_stop_of_a_service_whose_container_is_gone_does_nothing(kpro6: Hypervisor) -> None:
    """What isn't there is stopped already."""
    assert not kpro6.done("stop", serve_request(ALL, container=999))["changed"]


def test_verify_names_every_difference(kpro6: Hypervisor) -> None:
    """One refusal lists what differs: binding, container, VM, service; what agrees is not mentioned."""
    good = {
        "service": serve_request(ALL),
        "pools": [{"pool": "serving", "devices": ALL, "driver": "nvidia"}],
        "containers": [{"vmid": 129, "devices": ALL}],
    }
    assert kpro6.done("verify", good)["checked"] == 3
    answer = kpro6.agent(
        "verify",
        {
            "service": serve_request(NODE_0),
            "pools": [{"pool": "confidential", "devices": [NODE_1[0], "0000:99:00.0"], "driver": "vfio-pci"}],
            "containers": [{"vmid": 129, "devices": NODE_0}, {"vmid": 999, "devices": []}],
            "vms": [{"vmid": 200, "mapping": "gpu-confidential", "devices": NODE_1, "running": True}],
        },
    )
    assert answer.code == 3
    for words in (
        "serves with tp 8, not 4",
        f"{NODE_1[0]} is on nvidia, not vfio-pci",
        "0000:99:00.0 does not exist",
        r"container 129 passes GPUs [0, 1, 2, 3, 4, 5, 6, 7], not [0, 1, 2, 3]",
        "container 999 does not exist",
        "VM 200 has 0 entries of mapping gpu-confidential, not 4",
        "VM 200 does not run",
    ):
        assert re.search(re.escape(words), answer["message"]), words


def test_a_renamed_service_takes_the_cards_over(kpro6: Hypervisor) -> None:
    """The unit under the old name, deleted only later, is stopped first and not enabled again: both want the GPUs."""
    new = {"name": "renamed", "unit": "renamed.service"}
    kpro6.done("register", {"managed": {"services": [SERVICE], "vms": [], "containers": [129]}})
    kpro6.done("unit", unit_request(kpro6.unit_text()))
    kpro6.done("register", {"managed": {"services": [{**SERVICE, **new}], "vms": [], "containers": [129]}})
    path = "/etc/systemd/system/renamed.service"
    kpro6.done("unit", unit_request(kpro6.unit_text(), path=path, **new))
    kpro6.done("serve", serve_request(ALL, **new))
    kpro6.done("stop", {**SERVICE})
    kpro6.done("unit-release", {**SERVICE, "path": UNIT_PATH})
    assert state(kpro6) == ("inactive", False)
    assert kpro6.facts(services=[{**SERVICE, **new}])["services"][0]["active"] == "active"


def test_a_service_beside_another_one_leaves_it_alone(kpro6: Hypervisor) -> None:
    """Two configured services may share a container's cards: the start of the one does not stop the other."""
    new = {"name": "second", "unit": "second.service"}
    both = [SERVICE, {**SERVICE, **new}]
    kpro6.done("register", {"managed": {"services": both, "vms": [], "containers": [129]}})
    text = kpro6.unit_text().replace("--port 30000", "--port 30001")
    kpro6.done("unit", unit_request(text, path="/etc/systemd/system/second.service", **new))
    kpro6.done("serve", serve_request(ALL, port=30001, **new))
    assert state(kpro6)[0] == "active"
