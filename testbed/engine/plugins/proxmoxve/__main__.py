from __future__ import annotations

import asyncio
import sys

from testbed.engine.plugins._lean import skip_the_sdk


def main(address: str | None) -> None:
    """Serve the stand-in of pulumi-resource-proxmoxve; `address` is the engine's, if it gave one."""
    skip_the_sdk()
    from testbed.engine.plugins._serve import serve  # noqa: PLC0415 - after skip_the_sdk
    from testbed.engine.plugins.proxmoxve.plugin import ProxmoxPlugin  # noqa: PLC0415

    asyncio.run(serve(ProxmoxPlugin(address)))


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
