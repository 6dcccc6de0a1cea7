import importlib.util
import sys
from types import ModuleType


def skip_the_sdk() -> None:
    """Let `pulumi.runtime.proto` be imported without the rest of the Pulumi SDK.

    `import pulumi` loads the whole SDK, about 0.3 s; the engine starts every plugin on every preview, and a plugin
    needs only the protobuf modules. Call before the first import of anything from `pulumi`, and only in a process
    that never needs the SDK itself.
    """
    spec = importlib.util.find_spec("pulumi")
    if spec is None or spec.submodule_search_locations is None or "pulumi" in sys.modules:
        return
    root = next(iter(spec.submodule_search_locations))
    for name, folder in (("pulumi", root), ("pulumi.runtime", f"{root}/runtime")):
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
