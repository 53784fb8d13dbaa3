"""The process that compiles kernels: lists all variants, or compiles those named on its standard input.

    python -m srv_kernels.triton.compile_worker list                 a JSON object
    python -m srv_kernels.triton.compile_worker compile < jobs.json  a JSON object per line and job

`srv_kernels.triton.compile` starts it, without TRITON_INTERPRET. A crash of a compiler ends only this process.
"""

# mypy: ignore-errors
from __future__ import annotations

import ast
import hashlib
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from srv_kernels import triton as kernels
from srv_kernels.triton.targets import BY_NAME, TARGETS, Target
from srv_kernels.triton.variants import Variant

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def variants() -> dict[tuple[str, str], Variant]:
    """All variants, by the name of the kernel ("norms._rms_norm") and the label. ValueError for a repeated label."""
    by_key: dict[tuple[str, str], Variant] = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for variant in getattr(module, "VARIANTS", ()):
            key = f"{info.name}.{variant.kernel.__name__}", variant.label
            if key in by_key:
                raise ValueError(f"{key[0]} has two variants with the label {key[1]}")
            by_key[key] = variant
    return by_key


def source_digest(kernel: JITFunction) -> str:
    """SHA-256 of the source of a kernel, of the functions and constants that it reaches, and of its types.

    Unlike `JITFunction.cache_key`, it does not depend on line numbers or on the version of Python.
    """
    total, pending, seen = hashlib.sha256(), [kernel], set()
    while pending:
        function = pending.pop()
        if function.__name__ in seen:
            continue
        seen.add(function.__name__)
        total.update(function.src.encode())
        for name in sorted({node.id for node in ast.walk(ast.parse(function.src)) if isinstance(node, ast.Name)}):
            value = function.fn.__globals__.get(name)
            if isinstance(value, JITFunction):
                pending.append(value)
            elif isinstance(value, triton.language.constexpr):
                total.update(f"{name}={value.value}".encode())
    return total.hexdigest()[:16]


def listing() -> dict[str, Any]:
    """The version of Triton; for each kernel its digest and, for each variant, the names of its targets."""
    kernels: dict[str, Any] = {}
    for (name, label), variant in variants().items():
        entry = kernels.setdefault(name, {"source": source_digest(variant.kernel), "variants": {}})
        entry["variants"][label] = [
            target.name
            for target in TARGETS
            if variant.float8() <= target.float8 and target.name in (variant.targets or BY_NAME)
        ]
    return {"triton": triton.__version__, "kernels": kernels}


def compile_variant(variant: Variant, target: Target) -> tuple[int, int, int]:
    """(registers per thread, spills, bytes of shared memory) of the compiled kernel.

    Spills are bytes of stack per thread on NVIDIA, and vector registers on AMD. Raises RuntimeError for more shared
    memory than the target has.
    """
    kernel = compiled(variant, target)
    shared = kernel.metadata.shared
    if shared > target.shared:
        raise RuntimeError(f"needs {shared} bytes of shared memory; {target.name} has {target.shared}")
    registers, spills = _of_cubin(kernel.asm["cubin"]) if "cubin" in kernel.asm else _of_amdgcn(kernel.asm)
    return registers, spills, shared


def compiled(variant: Variant, target: Target) -> Any:
    """Triton's `CompiledKernel`."""
    names = variant.kernel.arg_names
    if unknown := [name for name in (*variant.types, *variant.constants, *variant.aligned) if name not in names]:
        raise ValueError(f"the kernel has no arguments {unknown}")
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = (index for index, name in enumerate(names) if signature[name][0] == "*" or name in variant.aligned)
    source = ASTSource(
        variant.kernel,
        signature,
        constexprs=dict(variant.constants),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, **variant.options}
    if target.backend == "hip":
        options["num_stages"] = min(variant.stages, 2)
    return triton.compile(source, target=target.gpu(), options=options)


def _of_cubin(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def _of_amdgcn(asm: dict[str, str]) -> tuple[int, int]:
    text = asm["amdgcn"]
    registers, spills = (int(re.search(rf"\.{key}: +(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
    return registers, spills


def main() -> None:
    if sys.argv[1] == "list":
        print(json.dumps(listing()))
        return
    by_key = variants()
    for kernel, label, target in json.load(sys.stdin):
        try:
            result = compile_variant(by_key[kernel, label], BY_NAME[target])
        except Exception as error:  # noqa: BLE001  a refusal by any pass of the compiler is a result
            result = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        print(json.dumps([kernel, label, target, result]), flush=True)


if __name__ == "__main__":
    main()
