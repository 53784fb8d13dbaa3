"""zentorch and intel-extension-for-pytorch: when they are used, and their contracts where they are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from every import every

from srv.platform.interface import OpArgs
from srv_cpu.extensions import IPEX, ZENTORCH, Extension, ZentorchLinear
from srv_cpu.ops import OPS
from srv_kernels.contracts import CONTRACTS, violations

ARGS = OpArgs(torch.bfloat16, {"dim": 64})


@every(
    ("extension", "installed", "reason"),
    [
        (ZENTORCH, {"torch": "2.13.0+cpu"}, "zentorch is not installed"),
        (ZENTORCH, {"torch": "2.13.0+cpu", "zentorch": "2.13.0.2"}, None),
        (
            ZENTORCH,
            {"torch": "2.13.0+cpu", "zentorch": "2.14.0.1"},
            "zentorch 2.14.0.1 is for torch 2.14, and this is torch 2.13.0+cpu",
        ),
        (IPEX, {"torch": "2.8.0", "intel-extension-for-pytorch": "2.8.0"}, None),
        (
            IPEX,
            {"torch": "2.13.0", "intel-extension-for-pytorch": "2.8.0"},
            "intel-extension-for-pytorch 2.8.0 is for torch 2.8, and this is torch 2.13.0",
        ),
    ],
)
def test_an_extension_is_for_one_minor_version_of_torch(
    extension: Extension, installed: dict[str, str], reason: str | None
) -> None:
    assert extension.mismatch(installed) == reason


def test_native_kernels_come_first_and_torch_s_last() -> None:
    for op in ("rms_norm", "add_rms_norm"):
        names = [impl.name for impl in OPS if impl.op == op]
        assert names == ["native", "zentorch", "ipex", "torch (cpu.torch_ops)"]
    (zentorch,) = [impl for impl in OPS if (impl.op, impl.name) == ("rms_norm", "zentorch")]
    half = OpArgs(torch.float16, {"dim": 64})
    assert zentorch.supports_args(half) == "float16 is not one of float32, bfloat16"


@pytest.mark.parametrize(
    ("version", "module", "words"),
    [
        ("99.0", "raise SystemExit(127)", "is for torch 99.0, and this is torch"),
        (None, "raise OSError('libzen.so: missing')", "zentorch cannot be loaded: OSError: libzen.so: missing"),
        (None, "", "has no operator zentorch::zentorch_linear_unary"),
    ],
    ids=["other-torch", "broken", "other-api"],
)
def test_a_package_that_does_not_fit_is_named_by_the_doctor_and_never_breaks_a_worker(
    tmp_path: Path, version: str | None, module: str, words: str
) -> None:
    """In a process of its own, whose path has a distribution of this kind first."""
    version = version or torch.__version__.partition("+")[0]
    (tmp_path / "zentorch.py").write_text(module)
    info = tmp_path / f"zentorch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zentorch\nVersion: {version}\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch
from srv_cpu.extensions import ZENTORCH
check = ZENTORCH.check()
from srv.platform.interface import OpArgs
from srv_cpu.ops import OPS
(norm,) = [impl for impl in OPS if (impl.op, impl.name) == ("rms_norm", "zentorch")]
reason = norm.supports_args(OpArgs(torch.float32, {{"dim": 64}}))
print(check.ok, bool(check.remedy), check.detail, ZENTORCH.unusable() == reason and reason in check.detail)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.startswith("False True not used: ")
    assert words in process.stdout
    assert process.stdout.endswith(" True\n")


@pytest.fixture
def zentorch() -> None:
    pytest.importorskip("zentorch", reason="its kernels are tested where it is installed: pip install zentorch")


@pytest.mark.usefixtures("zentorch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_zentorch_keeps_the_contracts(op: str, dtype: torch.dtype) -> None:
    import pkgutil

    (impl,) = [impl for impl in OPS if (impl.op, impl.name) == (op, "zentorch")]
    assert impl.supports_args(OpArgs(dtype, {"dim": 576})) is None
    assert isinstance(impl.target, str)
    with torch.inference_mode():
        assert violations(CONTRACTS[op], pkgutil.resolve_name(impl.target), dtype) == []


@pytest.mark.usefixtures("zentorch")
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_zentorch_multiplies_by_a_packed_copy_and_leaves_the_weight_as_it_is(
    dtype: torch.dtype, relative: float
) -> None:
    assert ZENTORCH.unusable() is None
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((256, 128), (576, 1536), (64, 17), (40, 2048)):
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        original, bias = weight.clone(), torch.randn(outputs, generator=generator).to(dtype)
        for added in (None, bias):
            linear = ZentorchLinear(original, added)
            for rows in (1, 3, 16, 1):
                x = torch.randn(rows, inputs, generator=generator).to(dtype)
                exact = torch.nn.functional.linear(
                    x.double(), weight.double(), None if added is None else added.double()
                )
                with torch.inference_mode():
                    product = linear(x)
                assert product.dtype == dtype
                assert (product.double() - exact).abs().max() <= relative * exact.abs().max()
        assert torch.equal(original, weight)
