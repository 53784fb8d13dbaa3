"""Loading: the simulated cards, and when loading is refused. Each test uses its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]


def python(code: str, *paths: Path) -> str:
    """The output of the code; the last line is the text of its exception, if any."""
    setup = f"import sys; sys.path[:0] = {[str(path) for path in (*paths, PACKAGE)]}\n"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", setup + code]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return (process.stdout + process.stderr).strip()


@pytest.mark.parametrize(
    ("soc", "name", "soc_id", "gib"),
    [("a2-32g", "Ascend910B4 (simulated)", 224, 32), ("a3", "Ascend910_9391 (simulated)", 250, 64)],
)
def test_cards(soc: str, name: str, soc_id: int, gib: int) -> None:
    code = f"import srv_npu_simulator as s; npu = s.load({soc!r}).npu; "
    code += "print(npu.get_device_name(), npu.get_soc_version(), npu.mem_get_info()[1] >> 30)"
    assert python(code) == f"{name} {soc_id} {gib}"


def test_an_unknown_card_is_refused() -> None:
    assert python("import srv_npu_simulator as s; s.load('a5')").endswith(
        "ValueError: the NPU simulator knows no card 'a5'; it simulates a2, a2-32g, a3"
    )


@pytest.mark.parametrize("where", ["installed", "imported"])
def test_a_real_torch_npu_is_never_replaced(tmp_path: Path, where: str) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise OSError('libhccl.so is missing')\n")
    first = "import types; sys.modules['torch_npu'] = types.ModuleType('torch_npu'); " if where == "imported" else ""
    text = python(f"{first}import srv_npu_simulator as s; s.load('a2')", tmp_path)
    assert "RuntimeError: the NPU simulator refuses to load: a real torch_npu is installed here" in text
    assert "unset SRV_NPU_SIMULATOR" in text


def test_a_process_simulates_one_card_of_any_size() -> None:
    code = """
import torch, srv_npu_simulator as s
first, second = s.load("a2", memory=1 << 20), s.load("a2", memory=1 << 20)
print(first.npu is second.npu, first.npu.mem_get_info())
try:
    torch.empty(1 << 20, device="npu")
except torch.OutOfMemoryError as error:
    print(error)
s.load("a3")
"""
    text = python(code)
    assert text.startswith("True (1048576, 1048576)\nNPU out of memory. Tried to allocate 4194304 bytes")
    assert "RuntimeError: the NPU simulator was loaded as 'a2' with 1048576 bytes here, and cannot become" in text


def test_importing_it_does_nothing_and_another_backend_is_named() -> None:
    code = """
import srv_npu_simulator as s
print("torch" in sys.modules)
import torch
print(torch._C._get_privateuse1_backend_name(), hasattr(torch, "npu"))
torch.utils.rename_privateuse1_backend("other")
s.load("a2")
"""
    text = python(code)
    assert text.split()[:3] == ["False", "privateuseone", "False"]
    assert "RuntimeError: the NPU simulator cannot be loaded: PyTorch's one PrivateUse1 backend is 'other'" in text
