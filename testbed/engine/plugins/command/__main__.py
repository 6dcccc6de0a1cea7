from __future__ import annotations

import asyncio
import logging
import sys

from testbed.engine.plugins._lean import skip_the_sdk


def main(address: str | None) -> None:
    """Serve the stand-in of pulumi-resource-command; `address` is the engine's, if it gave one."""
    skip_the_sdk()
    from testbed.engine.plugins._serve import serve  # noqa: PLC0415 - after skip_the_sdk
    from testbed.engine.plugins.command.plugin import CommandPlugin  # noqa: PLC0415

    # What asyncssh would print of a lost connection reaches the person as the operation's own error.
    logging.getLogger("asyncssh").setLevel(logging.CRITICAL)
    asyncio.run(serve(CommandPlugin(address)))


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
