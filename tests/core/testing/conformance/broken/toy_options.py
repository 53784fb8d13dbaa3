"""The toy's plugin with a fault that depends on an argument: the model is wrong for some of its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toy_variant import create, manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import Platform
    from srv.platform.manifest import EngineContext, Manifest
    from srv_toy_device.platform import ToyPlatform


def spoiled_where(name: str, argument: str, wrong: Callable[[object], bool]) -> Manifest:
    """A plugin that rounds the weights to three mantissa bits if `wrong(value)` is true for the argument's value."""

    def start(context: EngineContext) -> Platform:
        spoil = wrong(context.options[argument])
        return create(name, rounding(lambda model: spoil))(context)

    return manifest(name, options=(argument,), create=start)


def rounding(wrong: Callable[[torch.nn.Module], bool]) -> Callable[[type[ToyPlatform]], type[ToyPlatform]]:
    """The toy platform, which rounds the weights of whole models for which `wrong(model)` is true.

    The experts that `experts.loaded` prepares by themselves are no such models.
    """

    def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
        class Rounding(toy):  # type: ignore[valid-type, misc]
            def post_load(self, model: torch.nn.Module) -> None:
                if hasattr(model, "lm_head") and wrong(model):
                    for weight in model.parameters():
                        weight.data.copy_((weight.data * 8).round() / 8)

        return Rounding

    return platform
