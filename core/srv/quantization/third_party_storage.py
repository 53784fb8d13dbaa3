"""The storage format of another distribution's method: its faults name the distribution and the tensor.

Must not know what it converts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from torch import Tensor

from srv.errors import SrvError
from srv.models.checkpoints.storage import StorageFormat
from srv.quantization.third_party import METHODS

Result = TypeVar("Result")


class GuardedStorage(StorageFormat):
    """`inner`, of the method `method`. It converts one tensor at a time, so that it need not be safe for threads.

    What it raises becomes a PluginError, except for errors of `srv`; so does what it does not announce in `shapes`.
    """

    def __init__(self, method: str, inner: StorageFormat) -> None:
        self._method, self._inner = method, inner
        self._announced: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def parts(self, name: str) -> tuple[str, ...]:
        return self._call(f"parts({name})", self._inner.parts, name)

    def is_read_whole(self, name: str) -> bool:
        return self._call(f"is_read_whole({name})", self._inner.is_read_whole, name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._call("unused", self._inner.unused, names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        self._announced = self._call("shapes", self._inner.shapes, stored)
        return self._announced

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        with self._lock:
            converted: object = self._call(f"convert({name})", self._inner.convert, name, stored)
        if not isinstance(converted, dict) or not all(isinstance(element, Tensor) for element in converted.values()):
            raise self._fault(name, f"returned {type(converted).__name__}, not tensors by their names")
        for target, tensor in converted.items():
            shape = self._announced.get(target)
            if shape is None or tuple(tensor.shape) != tuple(shape):
                expected = "no such tensor" if shape is None else list(shape)
                reason = f"returned {target} of the shape {list(tensor.shape)}, but `shapes` announced {expected}"
                raise self._fault(name, reason)
        return converted

    def _call(self, member: str, function: Callable[..., Result], *args: object) -> Result:
        return METHODS.call(self._method, f"storage.{member}", function, *args, expected=(SrvError,))

    def _fault(self, name: str, reason: str) -> SrvError:
        owner = METHODS.provider(self._method)
        return METHODS.error_in(owner, f"{self._method}.storage.convert({name})", reason)
