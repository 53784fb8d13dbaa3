"""Detects the features of the host's processors, and the memory that this process may use. Imports no torch.

Reads /proc and the control groups on Linux; elsewhere only the architecture is known. The functions take the root
folder, so that tests can simulate other machines.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from srv.platform.facts import DeviceFacts
from srv.platform.host import versions
from srv.platform.manifest import ProbeContext, ProbeResult
from srv_cpu.facts import COMPILER, NATIVE_KERNELS
from srv_cpu.op_specs import DISTRIBUTIONS
from srv_kernels.cpu.library import load

ROOT = Path("/")

# Flags as in /proc/cpuinfo. The kernels of a variant may use the flags of its row and of the rows below.
_VARIANTS: tuple[tuple[str, frozenset[str]], ...] = (
    ("amx", frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("avx512", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
)
_FEATURES = (
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "bf16",
    "i8mm",
    "asimddp",
    "sve",
)
_NO_LIMIT = 1 << 60  # control groups report a number near 2**63 for "no limit"


def probe(context: ProbeContext) -> ProbeResult:
    """The processors of this host as one device."""
    loaded = load()
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # as torch.compile looks for it
    further = ((NATIVE_KERNELS, loaded.library), (COMPILER, compiler))
    return look(ROOT, platform.machine(), tuple(name for name, is_found in further if is_found), loaded.reason)


def look(root: Path, machine: str, further: tuple[str, ...] = (), note: str = "") -> ProbeResult:
    """The result for a machine of architecture `machine` whose /proc and /sys lie under `root`.

    `further` features and the note do not come from the processor.
    """
    fields = _cpuinfo(root)
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    variant, notes = _variant(flags, machine.lower())
    if variant is None:
        return ProbeResult(
            False,
            f"this processor ({fields.get('model name', machine)}) has neither AVX2 nor NEON",
            "Use a 64-bit x86 processor made since about 2015, or a 64-bit ARM processor",
            "unsupported_variant",
        )
    device = DeviceFacts(
        variant=variant,
        memory_bytes=memory_limit(root),
        count=1,
        name=fields.get("model name") or machine,
        versions=versions("torch", "srv-kernels", *DISTRIBUTIONS.values()),
        features=tuple(feature for feature in _FEATURES if feature in flags) + further,
    )
    return ProbeResult(available=True, device=device, notes=(*notes, note) if note else notes)


def memory_limit(root: Path = ROOT) -> int:
    """Bytes that this process may use: the machine's memory, or less if a control group limits it."""
    return min(_total_memory(root), *_group_limits(root), _NO_LIMIT)


def _variant(flags: frozenset[str], machine: str) -> tuple[str | None, tuple[str, ...]]:
    if machine in ("aarch64", "arm64"):
        return "neon", ()
    for variant, needed in _VARIANTS:
        if needed <= flags:
            return variant, ()
    if not flags and machine in ("x86_64", "amd64"):
        return "avx2", ("this system does not report processor flags: avx2 is assumed",)
    return None, ()


def _cpuinfo(root: Path) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    first = _read(root / "proc/cpuinfo").strip().partition("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _total_memory(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path) -> list[int]:
    """Limits of this process's control groups and their parents: version 2, then version 1.

    Inside a container, /proc/self/cgroup may contain the host's path while the mount has the container's own group as
    its root: walking up to the root of the mount covers both cases.
    """
    limits: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            limits += _limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return limits


def _limits(mount: Path, path: str, file: str) -> list[int]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    texts = (_read(group / file).strip() for group in groups)
    return [int(text) for text in texts if text.isdigit() and int(text) > 0]


def _read(path: Path) -> str:
    """The text of a file in /proc or /sys; empty if it does not exist or cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
