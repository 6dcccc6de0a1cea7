"""The Pulumi engine on any machine: found, fetched or built into one cache folder."""

import sys

# Said here, before any module that needs 3.11 is read: an older Python would answer with a traceback instead.
if sys.version_info < (3, 11):  # noqa: UP036 - the set-up runs on the system's own Python, whatever its age
    raise SystemExit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 setup")
