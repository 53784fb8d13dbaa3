"""The walls of the house: who may import whom, and no device's name anywhere in core.

The ban reads every token of every file under `core/`. Comments and docstrings are prose and may give
examples; identifiers and all other strings may not name a device. `cpu` is torch's word for host memory:
it may be where a tensor is sent or made, and nothing else.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

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
HOST_NAMES = frozenset({"cpu_count", "cpu_percent"})  # of os and psutil: processors, not a device


def violations(source: str) -> list[str]:
    """What a file says that core must not, as "line: text"."""
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
    return HOST in words and token.start not in allowed and token.string not in HOST_NAMES


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Where strings stand that are statements of their own: documentation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.lineno, node.value.col_offset


def _host_memory(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Where "cpu" is the target of a copy or the place of a new tensor."""
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


def test_there_is_a_core_to_look_at() -> None:
    assert len(FILES) > 30


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_core_names_no_device(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
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
def test_the_ban_sees_what_is_planted(planted: str) -> None:
    assert violations(planted)


@pytest.mark.parametrize(
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
def test_the_ban_leaves_prose_and_host_memory_alone(harmless: str) -> None:
    assert violations(harmless) == []


def test_imports_respect_the_walls() -> None:
    """The contracts of import-linter in pyproject.toml."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_manifests_import_neither_torch_nor_a_vendor() -> None:
    """In a process of its own, with every platform that is installed."""
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
