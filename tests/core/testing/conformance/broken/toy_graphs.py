"""The toy platform with other captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srv_toy_device.device import Accelerator
    from srv_toy_device.graphs import ToyGraphs
    from srv_toy_device.platform import ToyPlatform

Alter = Callable[[type["ToyPlatform"]], type["ToyPlatform"]]


def with_graphs(make: Callable[[type[ToyGraphs]], Callable[[Accelerator], Any]]) -> Alter:
    """A platform whose graphs are created by `make(toy's class)(accelerator)`."""

    def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
        from srv_toy_device.graphs import ToyGraphs

        class Altered(toy):  # type: ignore[valid-type, misc]
            def __init__(self, accelerator: Accelerator) -> None:
                super().__init__(accelerator)
                self._graphs = make(ToyGraphs)(accelerator)

        return Altered

    return platform
