"""Import contracts between packages, and no device names in core.

The check reads every token of every file in `core/`. Comments and docstrings may contain examples; identifiers and all
other strings must not name a device. `cpu` is torch's name of host memory: it is allowed only as the target of a copy
or the device of a new tensor.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from every import every

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core"
DEVICES = ("cuda", "rocm", "hip", "npu", "xpu", "mps", "hpu", "tpu", "mlu", "musa", "gaudi")
VENDORS = ("nvidia", "amdgpu", "ascend", "huawei", "cann", "cudnn", "cublas", "flashinfer", "aiter")
COMMUNICATORS = ("nccl", "rccl", "hccl", "xccl")
BANNED = frozenset(DEVICES + VENDORS + COMMUNICATORS)
VARIANT = re.compile(r"(sm_?\d{2,3}|gfx\d+)[a-z]?", re.IGNORECASE)
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
HOST = "cpu"
HOST_KEYWORDS = frozenset({"device", "map_location"})
HOST_CALLS = frozenset({"device", "to"})
# Of os, psutil and torch's profiler: processors, not a device.
HOST_NAMES = frozenset({"cpu_count", "cpu_percent", "self_cpu_time_total"})


def violations(source: str) -> list[str]:
    """The tokens of a file that are not allowed in core, as "line: text"."""
    tree = ast.parse(source)
    prose = set(_docstrings(tree))
    allowed = set(_host_memory(tree))
    return [
        f"{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if _names_device(token, prose, allowed)
    ]


def _names_device(token: tokenize.TokenInfo, prose: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> bool:
    if token.type != tokenize.NAME and "STRING" not in tokenize.tok_name[token.type]:
        return False
    if token.start in prose:
        return False
    words = {word.lower() for word in WORDS.findall(token.string)}
    if words & BANNED or any(VARIANT.fullmatch(part) for part in re.split(r"\W+", token.string)):
        return True
    return HOST in words and token.start not in allowed and token.string.strip('"') not in HOST_NAMES


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The positions of docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.lineno, node.value.col_offset


def _host_memory(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """The positions where "cpu" is the target of a copy or the device of a new tensor."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        places = [keyword.value for keyword in node.keywords if keyword.arg in HOST_KEYWORDS]
        places += node.args[:1] if name in HOST_CALLS else []
        for place in places:
            if isinstance(place, ast.Constant) and place.value == HOST:
                yield place.lineno, place.col_offset
        if isinstance(node.func, ast.Attribute) and name == HOST and not node.args:
            assert node.func.end_lineno is not None
            assert node.func.end_col_offset is not None
            yield node.func.end_lineno, node.func.end_col_offset - len(HOST)


FILES = sorted(CORE.rglob("*.py"))


def test_core_has_files() -> None:
    assert len(FILES) > 30


@every("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_core_names_no_device(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8")) == []


@every(
    "planted",
    [
        "import torch\ntorch.cuda.synchronize()",
        "import torch\nfree = torch.npu.mem_get_info()",
        "torch.xpu.empty_cache()",
        "if torch.version.hip: pass",
        "ok = torch.backends.mps",
        "def is_cuda(tensor): ...",
        "disable_cuda_graph = False",
        "class NPUGraph: ...",
        "class CudaGraphRunner: ...",
        "import torch_npu",
        "device = 'cuda:0'",
        "name = f'npu:{rank}'",
        "kind = {'xpu': 1}",
        "backend = 'nccl'",
        "variant = 'sm90'",
        "target = 'gfx942'",
        "if device.type == 'cpu': pass",
        "text = 'falls back to the CPU'",
        "is_cpu = True",
        "torch.cpu.synchronize()",
        "frame(device)['cpu']",
    ],
)
def test_device_names_are_found(planted: str) -> None:
    assert violations(planted)


@every(
    "harmless",
    [
        '"""On an npu this is slow; on cuda:0 it is not."""',
        "def f():\n    '''Such as npu:a3.'''\n    return 1  # cuda would differ",
        "x = tensor.to('cpu', non_blocking=True)",
        "x = tensor.cpu()",
        "x = torch.zeros(3, device='cpu')",
        "x = torch.load(path, map_location='cpu')",
        "host = torch.device('cpu')",
        "import os\nn = os.cpu_count()",
        "descending = ascending = small_input = 'compute relationship'",
    ],
)
def test_prose_and_host_memory_are_allowed(harmless: str) -> None:
    assert violations(harmless) == []


def test_every_package_of_core_has_a_layer() -> None:
    """`make lint` checks the contracts of pyproject.toml; a package that they leave out would be checked by none."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "the layers of core")
    listed = {".".join(name.strip().split(".")[:2]) for line in layers for name in re.split(r"[|:]", line)}
    files = [path for path in (CORE / "srv").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert {f"srv.{path.stem}" for path in files} - {"srv.__init__"} - listed == set()


def test_manifests_import_neither_torch_nor_a_vendor() -> None:
    """In a separate process, with all installed platforms."""
    script = """
import sys
from srv.platform.registry import find_platforms
found = find_platforms()
assert {"cpu", "cuda", "rocm", "npu", "xpu"} <= set(found), found
for each in found.values():
    if each.error:
        print(each.error)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "torch_npu", "triton", "transformers")))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == "[]"
