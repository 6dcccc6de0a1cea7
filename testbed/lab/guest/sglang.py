"""`python -m sglang.launch_server` in the lab's container: the simulator's stub server, on devices that it opens."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

from testbed.simulator.sglang_stub import Handler, LoopbackServer, Server, Told, parse_arguments

FIGURES = Path("/etc/testbed-sglang.json")
"""How the stub behaves: seconds to load, GB of weights by model path."""
TRANSLATING = ("DMA", "DMA-FQ")


class Found(Told):
    """What the stub finds out by itself here, where the simulator has to tell it."""

    def __init__(self, visible: int, held: list[int], model: str) -> None:
        figures = json.loads(FIGURES.read_text())
        told = {
            "socket": "",
            "service": "",
            "visible": visible,
            "translated": _translated(),
            "load_s": figures["load_s"],
            "stop_s": figures["stop_s"],
            "model_exists": Path(model).is_dir(),
            "weights_gb": figures["weights_gb"].get(model, 0),
            "memory_mib": figures["memory_mib"],
            "taken_ports": [],
            "nccl_conf": _nccl_conf(),
        }
        super().__init__(json.dumps(told))
        self._held = held

    def tell(self, event: str, **_detail: object) -> None:
        """Spin on every card while NCCL hangs, where nvidia-smi sees it; there is nobody else to tell."""
        if event == "hang":
            for card in self._held:
                os.write(card, b"100")


def main() -> None:
    """Open as many cards as there are ranks, listen where asked, serve until SIGTERM."""
    arguments = parse_arguments(sys.argv[1:])
    ranks = arguments.tp * arguments.pp * arguments.dp
    cards = _open_cards()
    for card in cards[ranks:]:
        os.close(card)
    told = Found(len(cards), cards[:ranks], arguments.model_path)
    state = Server(told, arguments)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Handler.server_state = state
    try:
        server = LoopbackServer((arguments.host, arguments.port), Handler)
    except OSError as error:
        state.fail(
            f"[Errno {error.errno}] error while attempting to bind on address "
            f"('{arguments.host}', {arguments.port}): address already in use"
        )
        raise
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.load()
    threading.Event().wait()


def _open_cards() -> list[int]:
    """Every card that this container may open, held open, as CUDA holds them."""
    held = []
    for node in sorted(Path("/dev").glob("nvidia*")):
        if re.fullmatch(r"nvidia\d+", node.name):
            try:
                held.append(os.open(node, os.O_RDWR))
            except OSError:
                continue
    for control in ("/dev/nvidiactl", "/dev/nvidia-uvm"):
        os.open(control, os.O_RDWR)
    return held


def _translated() -> bool:
    types = {path.read_text().strip() for path in Path("/sys/kernel/iommu_groups").glob("*/type")}
    return bool(types & set(TRANSLATING))


def _nccl_conf() -> dict[str, str]:
    path = Path("/etc/nccl.conf")
    lines = path.read_text().splitlines() if path.is_file() else []
    return dict(line.split("=", 1) for line in lines if "=" in line)
