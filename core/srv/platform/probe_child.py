"""The child process of a probe: loads one manifest, runs its probe, answers with one line of JSON.

Before it runs the probe it writes the line IMPORTED, so that its parent can tell a slow import from a slow probe.

It is started by `srv.platform.probe` as `python -m srv.platform.probe_child FD`, with the request on standard input. It
imports little, because it starts for every platform. Nothing else has been imported in this process, so a manifest that
imports torch is detected here.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Callable

import msgspec

from srv.platform.import_wall import ImportWall
from srv.platform.manifest import Manifest, ProbeContext, ProbeResult

IMPORTED = b"imported\n"


class ProbeRequest(msgspec.Struct, frozen=True):
    """The child's input, as JSON on its standard input. `path` is its parent's `sys.path`."""

    name: str
    distribution: str
    target: str
    timeout_s: float
    path: tuple[str, ...]


def main() -> int:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    sys.path.extend(entry for entry in request.path if entry not in sys.path)
    with os.fdopen(descriptor, "wb", buffering=0) as pipe:
        line = msgspec.json.encode(answer(request, lambda: pipe.write(IMPORTED))) + b"\n"
        pipe.write(line)
    return 0


def answer(request: ProbeRequest, imported: Callable[[], object]) -> ProbeResult:
    """The plugin's own result, or one that says what is wrong with the plugin. Calls `imported` before the probe."""
    report = f"Report this to the maintainer of {request.distribution}, or uninstall it"
    try:
        with ImportWall() as wall:
            manifest = pkgutil.resolve_name(request.target)
        if wall.attempted:
            return ProbeResult(False, f"its manifest imports {wall.attempted[0]}", report, "manifest_impure")
        imported()
        result = manifest.probe(ProbeContext(timeout_s=request.timeout_s))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; it becomes the answer
        if wall.attempted:
            return ProbeResult(False, f"its manifest imports {wall.attempted[0]}", report, "manifest_impure")
        return ProbeResult(False, f"its probe raised {_raised(error)}", report, "probe_raised")
    fault = _fault(manifest, result)
    return result if fault is None else ProbeResult(False, f"its probe {fault}", report, "probe_garbage")


def _fault(manifest: Manifest, result: object) -> str | None:
    """What is wrong with a result: its type, the types of its fields, or a field that is missing."""
    if not isinstance(result, ProbeResult):
        return f"returned a {type(result).__name__}, not a ProbeResult"
    try:
        msgspec.convert(msgspec.to_builtins(result), ProbeResult)
    except (msgspec.ValidationError, TypeError, NotImplementedError) as error:
        return f"returned a result with a field of a wrong type: {error}"
    if not result.available:
        return None if result.reason and result.remedy and result.code else "refused without reason, remedy and code"
    device = result.device
    if device is None or not device.variant or device.memory_bytes <= 0 or device.count <= 0:
        return f"says that {manifest.name} is available but describes no device"
    return None


def _raised(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{location}"


if __name__ == "__main__":
    sys.exit(main())
