"""Weights of layers in host memory, which are copied to buffers on the device before they are needed.

    copies      │ 0 │ 1 │       │ 2 │      │ 3 │     ...   the next layers, while one computes
    computing       │ layer 0 │ layer 1 │ layer 2 │
    buffers     A: 0, 2, ...    B: 1, 3, ...                a copy begins when the layer before it in the buffer is done

Each layer has one buffer for good (`srv.planning.offload`), and its matrices and their scales are views of it, so that
no kernel sees that they move. A step that is captured would not run these copies, so that steps are not captured. Must
not know what the layers compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from srv.args.config import Config
from srv.errors import InternalError
from srv.models.layers.op_layer import OpLayer, op_layers
from srv.planning.offload import ALIGNMENT, HostLayers, host_layers
from srv.platform.streams import Event, Streams
from srv.platform.transfers import Staging
from srv.specs import ModelFacts

logger = logging.getLogger(__name__)
_GIB = 2**30


class _Layer(NamedTuple):
    """`stored`: uint8 [bytes], the matrices in host memory. `offsets`: of each of their tensors, with itself."""

    stored: Tensor
    offsets: tuple[tuple[int, Tensor], ...]
    layers: tuple[OpLayer, ...]


class HostWeights:
    """The layers of one rank that `chosen` names, if any. `staging`: `Platform.staging`, page-locked host memory.

    place(index, layer) while the model is built ──► loaders fill host memory ──► move() ──► fetch_for_kernels()
    """

    def __init__(self, chosen: HostLayers | None, staging: Staging, device: torch.device, streams: Streams) -> None:
        self._chosen = chosen = chosen or HostLayers((), 0, ())
        self._staging, self._device, self._streams = staging, device, streams
        self._layers: list[_Layer] = []
        self._buffers: list[Tensor] = []
        self._held: list[int | None] = [None] * len(chosen.buffers)  # the layer whose weights are in each buffer
        self._copied: list[Event | None] = [None] * len(chosen.buffers)
        self._read: list[Event | None] = [None] * len(chosen.buffers)  # behind the last use of each buffer
        self._current: int | None = None

    @classmethod
    def of(cls, config: Config, model: ModelFacts, staging: Staging, device: torch.device, streams: Streams) -> Self:
        """Those of the layers that the arguments move, which may be none. Raises Refusal."""
        return cls(host_layers(config, model), staging, device, streams)

    def place(self, index: int, layer: nn.Module) -> None:
        """Give a layer of the model matrices in host memory, before they are loaded, if it is a chosen one."""
        if index not in self._chosen.indices:
            return
        layers = tuple(each for each in op_layers(layer) if not each.role)
        offsets: list[tuple[int, Tensor]] = []
        size = 0
        for tensor in (tensor for each in layers for tensor in each.weight_tensors()):
            offsets.append((size, tensor))
            size = -(-(size + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            stored = self._staging((size,), torch.uint8)
            _views(stored, offsets)
        for each in layers:
            each.offloaded = True
        self._layers.append(_Layer(stored, tuple(offsets), layers))

    @property
    def host_bytes(self) -> int:
        """Bytes of the tensors in host memory."""
        return sum(tensor.nbytes for layer in self._layers for _, tensor in layer.offsets)

    @property
    def saved(self) -> int:
        """Bytes of device memory that the layers do not take, beside their buffers."""
        return self.host_bytes - sum(buffer.nbytes for buffer in self._buffers)

    def move(self) -> None:
        """Allocate the buffers, and make the matrices views of them; call it once, after loading.

        Raises InternalError if the layers are not those that were counted.
        """
        if self.host_bytes != self._chosen.bytes or len(self._layers) != len(self._chosen.indices):
            reason = f"{len(self._layers)} layers with {self.host_bytes} bytes are in host memory, not {self._chosen}"
            raise InternalError(reason)
        if not self._layers:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._chosen.buffers]
            for place, layer in enumerate(self._layers):
                _views(self._buffers[self._slot(place)], layer.offsets)
        logger.info(
            "%d layers (%.1f GiB) are in host memory; %d buffers (%.1f GiB) on the device are filled from there",
            len(self._layers),
            self.host_bytes / _GIB,
            len(self._buffers),
            (self.host_bytes - self.saved) / _GIB,
        )

    def fetch_for_kernels(self) -> None:
        """Let every kernel of these layers begin with the copy of its weights; call it when kernels are chosen."""
        for place, layer in enumerate(self._layers):
            for each in layer.layers:
                each.kernel = self._fetching(each.kernel, place)

    def _fetching(self, kernel: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        def fetching(*args: Any, **kwargs: Any) -> Tensor:
            if self._current != place:
                self._enter(place)
            return kernel(*args, **kwargs)

        return fetching

    def _enter(self, place: int) -> None:
        """The weights of a layer are needed, from what is enqueued next on, and those of the last one no longer."""
        if self._current is not None:
            self._read[self._slot(self._current)] = self._streams.compute.record()
        self._current = None  # if a copy fails, the next step begins anew
        self._fetch(place)
        copied = self._copied[self._slot(place)]
        assert copied is not None
        self._streams.compute.wait(copied)
        self._current = place
        taken = {self._slot(place)}
        for ahead in range(1, len(self._buffers)):
            after = (place + ahead) % len(self._layers)
            if self._slot(after) in taken:  # around the end, a layer may have the buffer of one that comes before it
                break
            taken.add(self._slot(after))
            self._fetch(after)

    def _fetch(self, place: int) -> None:
        """Enqueue the copy of a layer, unless its weights are in its buffer, or on their way."""
        slot = self._slot(place)
        if self._held[slot] == place:
            return
        self._held[slot] = None
        stored, copies = self._layers[place].stored, self._streams.copy_in
        if (read := self._read[slot]) is not None:
            copies.wait(read)
        with copies.use(), torch.no_grad():
            self._buffers[slot][: len(stored)].copy_(stored, non_blocking=True)
            self._copied[slot] = copies.record()
        self._held[slot] = place

    def _slot(self, place: int) -> int:
        return place % len(self._chosen.buffers)


def _views(memory: Tensor, offsets: Sequence[tuple[int, Tensor]]) -> None:
    """Make each tensor a view of `memory`, uint8, at its offset, whatever its device was. The objects stay the same."""
    for offset, tensor in offsets:
        view = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
        torch.utils.swap_tensors(tensor, view)  # type: ignore[no-untyped-call]
