"""Marks what each module of a model computes, for profilers (`--enable-layer-markers`).

    model.layers.3.self_attn    ├─────────────────┤
    model.layers.3.mlp                              ├──────────────┤
    model.layers.4.self_attn                                         ├──── …

What is marked is up to the model (`CausalLM.marked_modules`); ranges of modules within modules nest.

A range is a `torch.profiler.record_function`, which traces of `POST /start_profile` show, and a range of the platform's
own (`Platform.profiler_range`), if it has them, for the profiler of the device's vendor. Without the argument nothing
is wrapped, and nothing is paid. A captured step runs this module's code only while it is captured: a replay has no
ranges. This module must not know any profiler of a vendor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

from srv.models.base import CausalLM

Range = Callable[[str], AbstractContextManager[None]]


def mark_modules(model: CausalLM, device_range: Range | None) -> int:
    """Mark every call of the model's modules from now on; the number of modules.

    Native layers call `forward` of their modules, which skips the hooks of `nn.Module.__call__`; each module therefore
    gets a `forward` of its own. device_range: of the platform, if it has one.
    """
    modules = model.marked_modules()
    for name, module in modules.items():
        module.forward = _marked(module.forward, name, device_range)
    return len(modules)


def _marked(forward: Callable[..., Any], name: str, device_range: Range | None) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return forward(*args, **kwargs)

    def marked_on_device(*args: Any, **kwargs: Any) -> Any:
        with record_function(name), device_range(name):  # type: ignore[misc]
            return forward(*args, **kwargs)

    return marked if device_range is None else marked_on_device
