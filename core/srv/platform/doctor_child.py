"""The child process of `srv doctor`: creates one platform, computes a little, runs the plugin's own diagnosis.

Started by `srv.platform.doctor`, as `python -m srv.platform.doctor_child FILE`, with the request on standard
input. The start of every stage and every finding are reported immediately, so the parent knows everything that came
before a crash or hang. Imports torch; must not know any platform by name.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from srv.errors import PlatformUnavailable, PluginError
from srv.platform.finding import NOT_NEEDED, STAGES, Finding, FindingLine, FindingRequest, Status

SIZE = 64  # of the test matrices; integers up to 64 are exact in every floating-point dtype


def main() -> int:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=FindingRequest)
    sys.path.extend(entry for entry in request.path if entry not in sys.path)
    with open(sys.argv[1], "ab", buffering=0) as answer:
        _examine(request, answer)
    return 0


def _examine(request: FindingRequest, answer: BinaryIO) -> None:
    """Run the stages in order. A failure is a finding; only a failure of the first stage ends the examination."""
    stages: dict[str, Callable[[], Iterator[Finding]]] = {}
    for stage in STAGES:
        answer.write(msgspec.json.encode(FindingLine(stage)) + b"\n")
        try:
            stages = stages or _stages(request)
            for finding in stages[stage]():
                answer.write(msgspec.json.encode(FindingLine(stage, finding)) + b"\n")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; it is reported
            answer.write(msgspec.json.encode(FindingLine(stage, _failed(stage, error))) + b"\n")
            if stage == STAGES[0]:
                return


def _stages(request: FindingRequest) -> dict[str, Callable[[], Iterator[Finding]]]:
    """Create the platform and initialize it as a worker would; raises what the plugin raises."""
    from srv.platform.contract import create_platform
    from srv.platform.manifest import EngineContext
    from srv.platform.registry import find_platforms

    context = EngineContext(device=request.device, local_rank=0, options=request.options)
    live = Examination(create_platform(find_platforms()[request.name], context), request)
    return {stage: getattr(live, stage) for stage in STAGES}


class Examination:
    """The stages of the examination of one live platform (`srv.platform.interface.Platform`)."""

    def __init__(self, platform: object, request: FindingRequest) -> None:
        from typing import cast

        from srv.platform.interface import Platform

        self._platform = cast(Platform, platform)
        self._request = request
        self._platform.init_worker(0)
        self._device = self._platform.device(0)

    def start(self) -> Iterator[Finding]:
        import torch

        yield Finding("start", "ok", f"created with torch {torch.__version__}; its device is {self._device}")

    def memory(self) -> Iterator[Finding]:
        memory = self._platform.memory(self._device)
        detail = f"{memory.free / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
        if memory.free > 0:
            yield Finding("memory", "ok", detail)
        else:
            yield Finding("memory", "error", detail, "Stop other processes that use the device's memory.")

    def computation(self) -> Iterator[Finding]:
        """Multiply two matrices of zeros and ones on the device; the result must equal the host's exactly."""
        import torch

        from srv.platform.registry import find_platforms

        capabilities = find_platforms()[self._request.name].loaded.facts.capabilities(self._request.device)
        name = next((dtype for dtype in ("float32", "bfloat16", "float16") if dtype in capabilities), "float32")
        numbers = torch.arange(SIZE * SIZE).view(SIZE, SIZE)
        left, right = ((numbers % divisor == 0).to(torch.float32) for divisor in (2, 3))
        on_device = [operand.to(self._device, getattr(torch, name)) for operand in (left, right)]
        product = on_device[0] @ on_device[1]
        self._platform.streams(self._device).compute.record().synchronize()
        what = f"a {SIZE} x {SIZE} matrix product in {name}"
        if torch.equal(product.to("cpu", torch.float32), left @ right):
            yield Finding("computation", "ok", f"{what} is correct")
        else:
            remedy = "Do not serve on this device: test its memory and driver, and reinstall its toolkit."
            yield Finding("computation", "error", f"{what} is wrong", remedy)

    def diagnosis(self) -> Iterator[Finding]:
        """The plugin's own checks. A failed one is a warning: a server may still be able to start."""
        from srv.platform.interface import Check

        for check in self._platform.diagnose():
            if not isinstance(check, Check):
                raise TypeError(f"diagnose() returned a {type(check).__name__}, not a srv.platform.interface.Check")
            remedy = "" if check.ok else check.remedy
            yield Finding(str(check.name), "ok" if check.ok else "warning", str(check.detail), remedy)

    def sensors(self) -> Iterator[Finding]:
        """What the devices report of themselves, if the platform can read it."""
        from srv.platform.registry import find_platforms

        readings = find_platforms()[self._request.name].loaded.sensors(self._request.device)
        for reading in readings.devices:
            yield Finding("sensors", "ok", str(reading))
        if readings.missing:
            status: Status = "warning" if readings.remedy else "ok"
            yield Finding("sensors", status, f"not read: {readings.missing}", readings.remedy)


def _failed(stage: str, error: BaseException) -> Finding:
    status: Status = "warning" if stage in NOT_NEEDED else "error"
    if isinstance(error, PlatformUnavailable):
        return Finding(stage, status, f"{error.reason} [{error.code}]", error.remedy)
    if isinstance(error, PluginError):
        return Finding(stage, status, f"{error.member}: {error.reason}", error.remedy)
    remedy = "A server would fail in the same way: fix what it names, or report it to the plugin's maintainer."
    if stage in NOT_NEEDED:
        remedy = "These are the plugin's own checks: report it to its maintainer."
    return Finding(stage, status, f"{type(error).__name__}: {error}{_location(error)}", remedy)


def _location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


if __name__ == "__main__":
    sys.exit(main())
