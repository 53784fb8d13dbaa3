"""A stand-in for torch_npu and one Ascend NPU. Development only: it simulates, slowly, on the host's processor.

    sdk = srv_npu_simulator.load("a2")     # or "a2-32g", "a3"
    x = torch.randn(4, 64, dtype=torch.float16).to("npu:0")
    y, rstd = sdk.npu_rms_norm(x, torch.ones(64, dtype=torch.float16).to("npu:0"), 1e-5)

Importing this package does nothing. `load` registers the device with PyTorch for the whole process, for good.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srv_npu_simulator.sdk import Sdk

__all__ = ["load"]


def load(soc: str, *, memory: int | None = None) -> Sdk:
    """Simulate one card in this process and give what `import torch_npu` would, as an object.

    soc: "a2" (Ascend 910B, 64 GiB), "a2-32g" or "a3". memory: bytes of the card, if other than the real one's.
    Calling it again with the same arguments gives the same device. RuntimeError where a real torch_npu could be
    imported, where another PrivateUse1 backend is at work, and for a second card; ValueError for an unknown one.
    """
    from srv_npu_simulator.socs import soc_named

    card = soc_named(soc)
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError(
            "the NPU simulator refuses to load: a real torch_npu is installed here, and a simulated NPU must never be "
            "mistaken for a card. Use the real one (unset SRV_NPU_SIMULATOR), or uninstall torch_npu."
        )
    import torch

    from srv_npu_simulator.device import install
    from srv_npu_simulator.operators.kernel import register_operators
    from srv_npu_simulator.sdk import Sdk

    accelerator = install(card, memory if memory is not None else card.memory)
    if not torch._C._dispatch_has_kernel("npu::npu_rms_norm"):
        register_operators(accelerator)
    return Sdk(accelerator)
