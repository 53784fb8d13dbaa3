"""A simulator of torch_npu and one Ascend NPU, for development only: it runs, slowly, on the CPU.

    sdk = srv_npu_simulator.load("a2")     # or "a2-32g", "a3"
    x = torch.randn(4, 64, dtype=torch.float16).to("npu:0")
    y, rstd = sdk.npu_rms_norm(x, torch.ones(64, dtype=torch.float16).to("npu:0"), 1e-5)

Importing this package does nothing. `load` registers the device with PyTorch permanently, for the whole process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srv_npu_simulator.sdk import Sdk

__all__ = ["load"]


def load(soc: str, *, memory: int | None = None, asynchronous: bool | None = None, count: int | None = None) -> Sdk:
    """Simulate one card in this process, and return the equivalent of the module torch_npu as an object.

    soc: "a2" (Ascend 910B, 64 GiB), "a2-32g" or "a3". memory: bytes, if other than the real card's.
    asynchronous: operators run only when the host waits (`srv.testing.simulated_device.deferral`); if it is left out,
    SRV_NPU_SIMULATOR_ASYNCHRONOUS=1 says so. count: how many such cards the host has, of which this process uses the
    one that it selects first; SRV_NPU_SIMULATOR_COUNT, or 1. Later calls with the same arguments return that device.
    Raises RuntimeError if a real torch_npu can be imported, if there is another PrivateUse1 backend, and for a second
    card; ValueError for an unknown card.
    """
    from srv_npu_simulator.socs import find_soc

    card = find_soc(soc)
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError(
            "the NPU simulator refuses to load: a real torch_npu is installed here, and a simulated NPU must never be "
            "mistaken for a card. Use the real one (unset SRV_NPU_SIMULATOR), or uninstall torch_npu."
        )
    import torch

    from srv_npu_simulator.device import install
    from srv_npu_simulator.operators.kernel import register_operators
    from srv_npu_simulator.sdk import Sdk

    if asynchronous is None:
        asynchronous = os.environ.get("SRV_NPU_SIMULATOR_ASYNCHRONOUS", "0") == "1"
    if count is None:
        text = os.environ.get("SRV_NPU_SIMULATOR_COUNT") or "1"
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise RuntimeError(
                f"SRV_NPU_SIMULATOR_COUNT={text} is not a number of cards: set it to 1 or more, or unset it"
            )
        count = int(text)
    accelerator = install(card, memory if memory is not None else card.memory, asynchronous, count)
    if not torch._C._dispatch_has_kernel("npu::npu_rms_norm"):
        register_operators(accelerator)
    return Sdk(accelerator)
