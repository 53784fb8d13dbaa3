"""Which layers keep their weights in host memory, and what that leaves on the device. Torch-free.

    layers    0   1   2   3   4   5        offload_group_size 3, offload_num_in_group 1: layers 2 and 5
                      │           │
              host memory: their matrices ──copied before they are needed──► buffers on the device

`srv plan`, the memory ledger and the worker (`srv.worker.offload`) ask the same function. Must not know how weights are
copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.errors import Refusal, Rejection
from srv.kept import kept_per_object
from srv.models.families.trees import native_tree_of_model
from srv.planning.weights import layer_tensors, quantization_method, types_are_known
from srv.quantization.method import QuantMethod
from srv.quantization.registry import find
from srv.specs import ModelFacts

ALIGNMENT = 256  # bytes, of each tensor in a buffer
_GIB = 2**30


class HostLayers(NamedTuple):
    """`indices`: of the layers whose matrices are in host memory, ascending. `bytes`: of their tensors, with scales.

    `buffers`: the size in bytes of each buffer on the device; the n-th such layer uses buffer n modulo their number.
    """

    indices: tuple[int, ...]
    bytes: int
    buffers: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Bytes of device memory that the layers do not take."""
        return self.bytes - sum(self.buffers)


def moves_weights(config: Config) -> bool:
    """Whether the arguments ask for layers in host memory."""
    return config.weights.host_offload_gb > 0 or config.weights.offload_group_size > 0


def host_layers(config: Config, model: ModelFacts) -> HostLayers | None:
    """The layers that the arguments move to host memory; None if they move none.

    Raises Refusal if the sizes of the layers are not known, or if nothing would be saved; ModelError for damaged files.
    """
    weights = config.weights
    if not moves_weights(config):
        return None
    argument, value = "host_offload_gb", weights.host_offload_gb
    if weights.host_offload_gb <= 0:
        argument, value = "offload_group_size", weights.offload_group_size
    sizes = _layer_sizes(config, model)
    if isinstance(sizes, str):
        reason = f"weights stay on the device: {sizes}"
        raise Refusal([_rejection("cannot_offload", argument, value, reason, "Leave it out.")])
    if argument == "offload_group_size":
        first = weights.offload_group_size - weights.offload_num_in_group
        chosen = [index for index in range(len(sizes)) if index % weights.offload_group_size >= first]
    else:
        chosen = _within(sizes, value * _GIB)
    if not chosen:
        reason = f"no group of {value} layers is complete: {model.name} has {_layers(len(sizes))}"
        if argument == "host_offload_gb":
            smallest = amount_text(min(map(sum, sizes), default=0), "bytes")
            reason = f"no layer of {model.name} fits into {value} GiB: the smallest has {smallest}"
        raise Refusal([_rejection("cannot_offload", argument, value, reason, "Choose other values, or leave it out.")])
    count = weights.offload_prefetch_step + 1
    if len(chosen) <= count:
        reason = (
            f"{_layers(len(chosen))} would be moved, and {count} are on the device at a time "
            f"(offload_prefetch_step {weights.offload_prefetch_step}), so that no memory is saved"
        )
        remedy = "Move more layers, lower --offload-prefetch-step, or leave it out."
        raise Refusal([_rejection("inert", argument, value, reason, remedy)])
    moved = [sizes[index] for index in chosen]
    buffers = tuple(max(map(aligned, moved[slot::count])) for slot in range(count))
    return HostLayers(tuple(chosen), sum(map(sum, moved)), buffers)


def aligned(tensors: Sequence[int]) -> int:
    """The bytes of tensors of these sizes, one after the other, each at a multiple of `ALIGNMENT`."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in tensors)


def _within(sizes: Sequence[Sequence[int]], limit: int) -> list[int]:
    """As many layers as fit into `limit` bytes, evenly spread, so that there is time to copy each of them."""
    layers = len(sizes)
    for count in range(layers, 0, -1):
        chosen = [(place + 1) * layers // count - 1 for place in range(count)]
        if sum(sum(sizes[index]) for index in chosen) <= limit:
            return chosen
    return []


def _layer_sizes(config: Config, model: ModelFacts) -> tuple[tuple[int, ...], ...] | str:
    """The bytes of each tensor of each layer, without routers; or why they are not known. Raises ModelError."""
    if not model.generates or config.model.model_impl == "transformers":
        return "only native layers of models that generate text can be moved"
    native = native_tree_of_model(model)
    if isinstance(native, str):
        return f"{model.architecture} has no native layers: {native}"
    method = quantization_method(config, model)
    if method is None and model.quantization is not None and find(model.quantization) is None:
        return f"srv has no layers for those quantized with {model.quantization}"
    return _sizes(model, method, config.model.dtype)


@kept_per_object
def _sizes(model: ModelFacts, method: QuantMethod | None, dtype: str) -> tuple[tuple[int, ...], ...] | str:
    native = native_tree_of_model(model)
    assert not isinstance(native, str)
    if method is not None and not types_are_known(model):
        return "the types of its matrices are in a file that is not on this machine: download it first"
    return layer_tensors(model, native, method, dtype)


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _rejection(code: str, argument: str, value: float, reason: str, remedy: str) -> Rejection:
    return Rejection(code, argument, str(value), "offloading", reason, remedy)
