"""systemd and the stub SGLang server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from testbed.simulator.events import EventKind
from testbed.simulator.fixtures import run, wait_until
from testbed.simulator.unitfile import parse_unit
from tests.simulator.host import UNIT, UNIT_FILE, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.simulator import Simulator

INSIDE = "pct exec 129 -- systemctl"
DROP_IN = f"{UNIT_FILE}.d/p2p.conf"


def ask(simulator: Simulator, path: str, body: dict[str, object] | None = None, key: str = "") -> tuple[int, object]:
    """Ask the service as a client in its network namespace would; gives status and answer."""
    port = simulator.service_port(129, 30000)
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def change(simulator: Simulator, *changes: tuple[str, str]) -> None:
    """Change the unit's text, reload and restart it."""
    path = simulator.root / UNIT_FILE
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    output(simulator, f"{INSIDE} daemon-reload")
    run(simulator, f"{INSIDE} restart {UNIT}")


def state(simulator: Simulator) -> str:
    """The unit's active state."""
    return run(simulator, f"{INSIDE} is-active {UNIT}").stdout.strip()


def journal(simulator: Simulator) -> str:
    """The unit's journal."""
    return output(simulator, f"pct exec 129 -- journalctl -u {UNIT} -n 60 --no-pager -o cat")


def test_found_service_answers_at_once(simulator: Simulator) -> None:
    """kpro6 is found serving: a token is generated, and /server_info tells tp 8; both are in the log first."""
    status, answer = ask(simulator, "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}})
    assert (status, answer) == (200, answer)
    assert isinstance(answer, dict)
    assert answer["meta_info"]["completion_tokens"] == 1
    status, info = ask(simulator, "/server_info")
    assert isinstance(info, dict)
    assert info["tp_size"] == 8
    kinds = [e.kind for e in simulator.events(EventKind.SERVICE_TOKEN, EventKind.SERVER_INFO)]
    assert kinds == [EventKind.SERVICE_TOKEN, EventKind.SERVER_INFO]


def test_other_endpoints_answer_as_sglang(simulator: Simulator) -> None:
    """Health, models, completions and model info answer; others are 404, bad JSON is 400."""
    assert ask(simulator, "/health") == (200, None)
    assert ask(simulator, "/v1/models")[1] == {"object": "list", "data": [{"id": "qwen3.5-397b", "object": "model"}]}
    assert ask(simulator, "/v1/completions", {"prompt": "x"})[0] == 200
    assert ask(simulator, "/get_model_info")[0] == 200
    assert ask(simulator, "/nothing")[0] == 404


def test_service_loads_slowly(simulator: Simulator) -> None:
    """After a restart the port answers 503 until the model is loaded."""
    simulator.faults.slow(3)
    output(simulator, f"{INSIDE} restart {UNIT}")
    wait_until(lambda: simulator.service_port(129, 30000))
    assert ask(simulator, "/health")[0] == 503
    assert ask(simulator, "/generate", {"text": "hi"})[0] == 503
    wait_until(lambda: len(simulator.events(EventKind.SERVICE_READY)) == 2)
    assert ask(simulator, "/health")[0] == 200


def test_probe_reaches_the_service_through_its_namespace(simulator: Simulator) -> None:
    """The container's port is reached from its network namespace, not from the host's; nothing beyond loopback is."""
    script = 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:30000/health").status)'
    enter = "nsenter --net=./proc/$(lxc-info -n 129 -p -H)/ns/net --"
    assert output(simulator, f"{enter} python3 -c '{script}'") == "200\n"
    assert "Connection refused" in run(simulator, f"python3 -c '{script}'").stderr
    outside = script.replace("127.0.0.1:30000", "192.0.2.1")
    assert "Network is unreachable" in run(simulator, f"python3 -c '{outside}'").stderr


def test_too_many_ranks_are_refused(simulator: Simulator) -> None:
    """A --tp above the visible GPUs ends with CUDA's message, and systemd gives up after its restarts."""
    change(simulator, ("--tp 8", "--tp 16"))
    wait_until(lambda: state(simulator) == "failed")
    assert "invalid device ordinal" in journal(simulator)
    assert output(simulator, f"{INSIDE} show {UNIT} -p Result,NRestarts") == "Result=start-limit-hit\nNRestarts=5\n"
    assert simulator.events(EventKind.SERVICE_EXIT)[0].detail == {"container": 129, "status": 1}


def test_other_early_ends(simulator: Simulator) -> None:
    """A missing model, too little memory and an unknown program end the unit with a message in its journal."""
    change(simulator, ("/models/Qwen3.5-397B-A17B-NVFP4", "/models/none"), ("Restart=on-failure", "Restart=no"))
    wait_until(lambda: state(simulator) == "failed")
    assert "/models/none is not a local folder" in journal(simulator)
    change(simulator, ("/models/none", "/models/Qwen3.5-397B-A17B-NVFP4"), ("--tp 8", "--tp 2"))
    wait_until(lambda: "CUDA out of memory" in journal(simulator))
    change(simulator, ("/opt/sglang/venv/bin/python -m sglang.launch_server", "/usr/bin/vllm serve"))
    assert "the simulator runs SGLang" in journal(simulator)


def test_port_taken_by_another_unit(simulator: Simulator) -> None:
    """A second server on the same port cannot bind it."""
    path = simulator.root / UNIT_FILE
    path.with_name("second.service").write_text(path.read_text().replace("--tp 8", "--tp 1"))
    output(simulator, f"{INSIDE} start second.service")
    wait_until(lambda: "address already in use" in output(simulator, "pct exec 129 -- journalctl -u second -n 40"))


@pytest.mark.parametrize("fix", ["unit", "drop-in", "nccl.conf", "none"])
def test_p2p_under_a_translated_iommu_hangs(simulate: Callable[[str], Simulator], fix: str) -> None:
    """Without NCCL_P2P_DISABLE=1 in what the process gets, it hangs at 100 %; each way of setting it helps."""
    host = simulate("kpro6-p2p-missing")
    load = "nvidia-smi --query-gpu=utilization.gpu,power.draw --format=csv,noheader,nounits"
    assert output(host, load).splitlines() == ["100, 131.00"] * 8
    assert ask(host, "/health")[0] == 503
    folder = host.root / "var/lib/lxc/129/rootfs/etc"
    if fix == "drop-in":
        (host.root / DROP_IN).parent.mkdir()
        (host.root / DROP_IN).write_text("[Service]\nEnvironment=NCCL_P2P_DISABLE=1\n")
    elif fix == "nccl.conf":
        (folder / "nccl.conf").write_text("# no P2P\nNCCL_P2P_DISABLE=1\n")
    unit = [("Type=simple", "Type=simple\nEnvironment=NCCL_P2P_DISABLE=1")] if fix == "unit" else []
    change(host, *unit)
    wait_until(lambda: output(host, load) != "0, 15.00\n" * 8)
    wait_until(lambda: output(host, load).startswith("100" if fix == "none" else "0, 82"))
    assert ask(host, "/health")[0] == (503 if fix == "none" else 200)


def test_p2p_is_fine_where_dma_passes_through(simulate: Callable[[str], Simulator]) -> None:
    """With iommu=pt the same unit serves without the setting."""
    host = simulate("kpro6-iommu-pt")
    change(host, ('"NCCL_P2P_DISABLE=1" ', ""))
    wait_until(lambda: len(host.events(EventKind.SERVICE_READY)) == 2)
    assert ask(host, "/health")[0] == 200


def test_api_key_is_needed_where_one_is_set(simulator: Simulator) -> None:
    """With --api-key, requests without it get 401."""
    change(
        simulator,
        ("--trust-remote-code", "--trust-remote-code --api-key ${KEY}"),
        ("Type=simple", "Type=simple\nEnvironmentFile=/etc/key"),
    )
    assert state(simulator) == "failed"
    (simulator.root / "var/lib/lxc/129/rootfs/etc/key").write_text("KEY=hush\n")
    output(simulator, f"{INSIDE} reset-failed {UNIT}; {INSIDE} start {UNIT}")
    wait_until(lambda: len(simulator.events(EventKind.SERVICE_READY)) == 2)
    assert ask(simulator, "/server_info")[0] == 401
    assert ask(simulator, "/server_info", key="hush")[0] == 200


def test_process_is_seen_with_its_ranks(simulator: Simulator) -> None:
    """/proc shows main process and ranks in the unit's cgroup: environment, PID namespaces, held nodes."""
    held = set()
    for folder in (simulator.root / "proc").glob("[0-9]*"):
        if folder.joinpath("cgroup").read_text() == f"0::/lxc/129/ns/system.slice/{UNIT}\n":
            held |= {p.readlink().as_posix() for p in (folder / "fd").iterdir()}
    assert {f"/dev/nvidia{n}" for n in range(8)} | {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= held
    inner = output(simulator, f"{INSIDE} show {UNIT} -p MainPID --value").strip()
    main = next(p.parent for p in (simulator.root / "proc").glob("*/status") if f"\t{inner}\n" in p.read_text())
    assert main.name != inner
    assert "NCCL_P2P_DISABLE=1" in (main / "environ").read_text().split("\0")
    assert (main / "cmdline").read_text().split("\0")[1:3] == ["-m", "sglang.launch_server"]


def test_changed_file_needs_a_reload(simulator: Simulator) -> None:
    """Systemd runs what it loaded until daemon-reload, and says so, also for a new drop-in."""
    path = simulator.root / UNIT_FILE
    show = f"{INSIDE} show {UNIT} -p NeedDaemonReload --value"
    assert output(simulator, show) == "no\n"
    path.write_text(path.read_text().replace("--tp 8", "--tp 4"))
    assert output(simulator, show) == "yes\n"
    output(simulator, f"{INSIDE} restart {UNIT}")
    assert simulator.events(EventKind.SERVICE_START)[-1].detail["tp"] == 8
    output(simulator, f"{INSIDE} daemon-reload; {INSIDE} restart {UNIT}")
    assert simulator.events(EventKind.SERVICE_START)[-1].detail["tp"] == 4
    (simulator.root / DROP_IN).parent.mkdir()
    (simulator.root / DROP_IN).write_text("[Service]\nEnvironment=X=1\n")
    assert output(simulator, show) == "yes\n"


def test_enablement_decides_what_a_boot_starts(simulator: Simulator) -> None:
    """A disabled unit stays down when its container starts; enabling it brings it back."""
    assert output(simulator, f"{INSIDE} is-enabled {UNIT}") == "enabled\n"
    output(simulator, f"{INSIDE} disable {UNIT}; pct reboot 129")
    assert (state(simulator), run(simulator, f"{INSIDE} is-enabled {UNIT}").code) == ("inactive", 1)
    output(simulator, f"{INSIDE} enable {UNIT}; pct reboot 129")
    assert state(simulator) == "active"


def test_service_ends_cleanly(simulator: Simulator) -> None:
    """A stop ends the real process, empties the GPUs, and every GPU's holders are gone after it."""
    output(simulator, "systemctl stop nvidia-persistenced")
    output(simulator, f"{INSIDE} stop {UNIT}")
    events = simulator.events(EventKind.SERVICE_STOP, EventKind.HOLDER_GONE)[1:]
    assert [e.kind for e in events] == [EventKind.SERVICE_STOP, *[EventKind.HOLDER_GONE] * 8]
    assert simulator.service_port(129, 30000) is None
    assert output(simulator, "nvidia-smi --query-gpu=memory.used --format=csv,noheader").splitlines() == ["4 MiB"] * 8


def test_host_units_work_alike(simulator: Simulator) -> None:
    """The host's systemd runs services too: SGLang on the host sees every GPU."""
    text = (simulator.root / UNIT_FILE).read_text().replace("/models/Qwen3.5-397B-A17B-NVFP4", "org/model")
    (simulator.root / "etc/systemd/system/on-host.service").write_text(text)
    output(simulator, f"{INSIDE} stop {UNIT}; systemctl start on-host")
    wait_until(lambda: simulator.events(EventKind.SERVICE_READY)[-1].subject == "on-host.service")
    script = 'import urllib.request as u; print(u.urlopen("http://localhost:30000/health").status)'
    assert output(simulator, f"python3 -c '{script}'") == "200\n"


def test_systemctl_answers_for_units_that_are_not_there(simulator: Simulator) -> None:
    """An unknown unit is not found, and unknown properties and verbs are the simulator's limit."""
    assert output(simulator, "systemctl show none.service -p LoadState,ActiveState") == (
        "LoadState=not-found\nActiveState=inactive\n"
    )
    assert run(simulator, "systemctl start none.service").code == 5
    assert run(simulator, "systemctl is-active none.service").code == 3
    assert run(simulator, "systemctl show none.service -p Fancy").code == 2
    assert run(simulator, "systemctl isolate rescue.target").code == 2


def test_a_units_escapes_are_systemds() -> None:
    """`%%` and `$$` are one sign each, a backslash before n is a newline, an escaped backslash is itself."""
    unit = parse_unit(['[Service]\nEnvironment="A=50%%" "B=x\\ny" "C=\\\\n"\nExecStart=/x "$$HOME 1%%" ${A}\n'])
    environment = unit.environment(lambda _path: None)
    assert environment == {"A": "50%", "B": "x\ny", "C": "\\n"}
    assert [c.argv[1:] for c in unit.commands(environment)] == [["$HOME 1%", "50%"]]
