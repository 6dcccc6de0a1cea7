"""Run one Pulumi Python program: what the language host starts in the program's own interpreter.

The arguments and the exit codes are those of the official `pulumi-language-python-exec`. Nothing of this project is
imported: the program's virtual environment may hold Pulumi alone.
"""

import argparse
import asyncio
import logging
import os
import runpy
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

ALREADY_SHOWN = 32  # the host then ends the run without a message of its own


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("monitor", "engine", "project", "stack", "organization", "pwd", "root_directory", "dry_run"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _configure(arguments: argparse.Namespace) -> None:
    from pulumi import runtime  # noqa: PLC0415 - main() says what is wrong when Pulumi is not installed

    runtime.set_all_config(runtime.get_config_env(), runtime.get_config_secret_keys_env())
    runtime.configure(
        runtime.Settings(
            monitor=arguments.monitor,
            engine=arguments.engine,
            project=arguments.project,
            stack=arguments.stack,
            parallel=arguments.parallel,
            dry_run=arguments.dry_run == "true",
            organization=arguments.organization or "organization",
            root_directory=arguments.root_directory or None,
        )
    )


def _run(program: str, parallel: int) -> int:
    import grpc  # noqa: PLC0415
    import pulumi  # noqa: PLC0415

    # A failed program leaves tasks unobserved by design; asyncio's complaints about them would bury its error.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    # Each registration waits in a thread; asyncio's default pool would hold `--parallel` down to the cores' number.
    loop.set_default_executor(ThreadPoolExecutor(max_workers=max(parallel, 1) * 4))
    try:
        loop.run_until_complete(pulumi.runtime.run_in_stack(lambda: runpy.run_path(program, run_name="__main__")))
    except pulumi.RunError as error:
        pulumi.log.error(str(error))
        return ALREADY_SHOWN
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:  # the engine ended first, and has said why
            pulumi.log.error(f"the engine refused a request: {error.details()}")
        return ALREADY_SHOWN
    except Exception:  # noqa: BLE001 - whatever a program raises is the program's failure, shown through the engine
        pulumi.log.error("Program failed with an unhandled exception:\n" + traceback.format_exc())
        return ALREADY_SHOWN
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> int:
    """Run the program that the arguments name; the answer is the process's exit code."""
    arguments = _arguments()
    try:
        _configure(arguments)
    except ImportError as error:
        print(f"Pulumi's SDK cannot be imported from {sys.executable} ({error}): run `make setup`", file=sys.stderr)  # noqa: T201
        return 1
    sys.argv = [arguments.program, *arguments.arguments]
    if arguments.pwd:
        os.chdir(arguments.pwd)
    return _run(arguments.program, arguments.parallel)


if __name__ == "__main__":
    sys.exit(main())
