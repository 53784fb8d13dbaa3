"""How many pages fit: computes a page count per cache group from a device's memory, with a breakdown.

Torch-free arithmetic. The engine calls `compute` with the memory it measured after loading; `srv plan` calls
`estimate` with the sizes from the facts. Neither allocates anything.

    total ├─ others ─┼─ own weights ─┼── KV pool ──┼──── free for activations ────┤
                     └─ at most mem_fraction_static * (total - others) ┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.dist.mesh import Mesh, all_ranks, mesh_of
from srv.dtypes import item_size
from srv.errors import Refusal, Rejection
from srv.limits import SMALLEST_REQUEST
from srv.memory.groups import PageGroup, max_tokens
from srv.models import derive
from srv.models.facts.sharding import divisions, rank_share
from srv.planning.offload import host_layers
from srv.planning.pools import divide_pool, group_lines, most_unconfirmed_tokens
from srv.planning.states import divide_states
from srv.planning.weights import (
    WeightBytes,
    as_stored,
    class_bytes,
    native_of,
    quantization_method,
    unknown_size,
    weight_sizes,
)
from srv.platform.facts import DeviceFacts
from srv.quantization.registry import find, method_of
from srv.specs import ModelFacts

_CLASS = "transformers"  # the value of --model-impl for its classes


@dataclass(frozen=True, slots=True)
class Budget:
    """`groups`: the usable pages of each cache group that has pages. `state_slots`: usable slots for recurrent states.

    `breakdown`: pairs (quantity, explanation) in the order of computation.
    `max_request_tokens`: a request of more tokens, prompt and output, can never run.
    """

    groups: tuple[PageGroup, ...]
    max_request_tokens: int
    breakdown: tuple[tuple[str, str], ...]
    state_slots: int = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """Usable pages of each cache group."""
        return tuple(group.pages for group in self.groups)

    @property
    def page_size(self) -> int:
        """Tokens per page; the same in all groups so far."""
        return self.groups[0].page_size


def compute(
    config: Config,
    model: ModelFacts,
    *,
    free_bytes: int,
    total_bytes: int,
    own_bytes: int | None = None,
    reserved_bytes: int = 0,
    source: str = "measured after loading",
    smaller_part: str = "",
) -> Budget:
    """The budget of a device with `free_bytes` of `total_bytes` left once the weights are loaded.

    `own_bytes`: of the memory in use, those of this process's weights (None: all of it). The fraction is of what this
    process can have, so that memory of other processes, and of the runtime, does not count.
    `reserved_bytes` stay free whatever `mem_fraction_static` says (activations, sampling, runtime).
    `source` says where the two figures come from. `smaller_part`: what a remedy adds if the weights alone do not fit.
    Refusal if not even the smallest request fits.
    """
    used = total_bytes - free_bytes
    own_weights = used if own_bytes is None else min(own_bytes, used)
    fraction = config.memory.mem_fraction_static
    static = int(fraction * (free_bytes + own_weights))
    pool = min(static - own_weights, free_bytes - reserved_bytes)
    breakdown = [
        (
            "memory",
            f"{_bytes(max(free_bytes, 0))} of {_bytes(total_bytes)} are free after the weights are loaded, {source}",
        ),
        ("weights", f"{_bytes(own_weights)} are this process's own weights"),
        ("others", f"{_bytes(used - own_weights)} are used by others, or by the runtime"),
        (
            "static",
            f"{_bytes(static)} for weights and KV pool: mem_fraction_static {fraction} of the"
            f" {_bytes(free_bytes + own_weights)} that are free or its own",
        ),
        ("reserved", f"{_bytes(reserved_bytes)} stay free (reserved_memory)"),
    ]
    states = divide_states(config, model, pool)
    groups, lines = divide_pool(config, model, pool - states.bytes)
    breakdown += [*states.lines, *lines]
    unconfirmed = most_unconfirmed_tokens(config, model)
    tokens = max_tokens(groups, unconfirmed)
    if tokens is not None and tokens < SMALLEST_REQUEST:
        raise Refusal(
            [_too_small(config, breakdown, _remedy(own_weights, static, free_bytes, reserved_bytes, smaller_part))]
        )
    breakdown += group_lines(config, model, groups)
    context = config.model.context_length or model.context_length
    max_request_tokens = context if tokens is None else min(tokens, context)
    breakdown.append(("max_request_tokens", f"{max_request_tokens}, the smaller of the pool and the context length"))
    return Budget(groups, max_request_tokens, tuple(breakdown), states.slots)


def estimate(
    config: Config, model: ModelFacts, device: DeviceFacts, reserved_bytes: int = 0, *, shared: bool = False
) -> Budget:
    """The budget estimated from facts, for a device that need not be present. Raises Refusal like `compute`.

    `shared`: all ranks share the memory of one device, which is that of the host.
    """
    weights, ranks = weight_bytes(config, model), all_ranks(config.get)
    total = device.memory_bytes // (ranks if shared else 1)
    return compute(
        config,
        model,
        free_bytes=total - weights,
        total_bytes=total,
        reserved_bytes=reserved_bytes,
        source=f"estimated with {_bytes(weights)} of weights {_held(config, model)}{_beside(config, model)} and nothing"
        " else running" + (f", on each of {ranks} ranks" if ranks > 1 else ""),
        smaller_part="" if shared else _on_more_devices(config, model, weights, total, reserved_bytes),
    )


def _held(config: Config, model: ModelFacts) -> str:
    """How the weights are held, as a clause."""
    method = quantization_method(config, model)
    if method is not None:
        return f"quantized with {method.name}"
    unknown = model.quantization is not None and find(model.quantization) is None
    return f"quantized with {model.quantization}" if unknown else f"in {config.model.dtype}"


def _beside(config: Config, model: ModelFacts) -> str:
    """The weights that are not on the device, as a clause; "" if all are."""
    moved = host_layers(config, model)
    if moved is None:
        return ""
    buffers = f"{len(moved.buffers)} buffers for {len(moved.indices)} layers"
    return f" (with {buffers}, whose {_bytes(moved.bytes)} are in host memory)"


def _on_more_devices(config: Config, model: ModelFacts, weights: int, total: int, reserved: int) -> str:
    """The fewest devices on which each rank's part of the weights fits; "" if the model cannot be sharded.

    weights: bytes of one rank's. total, reserved: bytes of one device, and those of them that stay free.
    """
    sizes = divisions(model, in_blocks=not config.weights.dequantize_weights)
    if isinstance(sizes, str):
        return ""
    room = min(total - reserved, int(config.memory.mem_fraction_static * total))
    whole = weights / rank_share(model, mesh_of(config.get))
    enough = (ranks for ranks in sizes.legal_ranks() if whole * rank_share(model, Mesh(ranks)) < room)
    ranks = next(enough, None)
    return "" if ranks is None else f"divide them among {ranks} such devices (--tp-size {ranks}), "


def weight_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights of one rank on its device, at most: after a platform has repacked them.

    Of layers in host memory, the buffers on the device count. Dense layers after pooling are on each rank. Raises
    Refusal if the configuration alone does not determine the sizes.
    """
    return _of_rank(config, model, _whole_bytes(config, model).prepared)


def loaded_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights of one rank as they are loaded, likewise."""
    return _of_rank(config, model, _whole_bytes(config, model).loaded)


def _of_rank(config: Config, model: ModelFacts, whole: int) -> int:
    total = math.ceil(whole * rank_share(model, mesh_of(config.get))) + head_bytes(config, model)
    return total - saved_bytes(config, model)


def _whole_bytes(config: Config, model: ModelFacts) -> WeightBytes:
    """Those of the whole model: as the schemes of its matrices say, or unquantized in the dtype of the arguments.

    Those of a method that `srv` does not have count as they are stored.
    """
    if model.parameters is None:
        raise Refusal([unknown_size(model)])
    method = quantization_method(config, model)
    if method is not None:
        return weight_sizes(config, model, method)
    if model.quantization is not None and find(model.quantization) is None:
        return as_stored(model)
    tree, stored = native_of(model), method_of(model)
    if stored is not None and model.format == "safetensors" and (tree is None or config.model.model_impl == _CLASS):
        return class_bytes(model, stored, config.model.dtype, dequantize=True)
    if tree is not None and stored is not None and model.format != "gguf":
        floats = derive.parameters(tree) * item_size(config.model.dtype)  # what its method stores is dequantized
        return WeightBytes(floats, floats)
    integers = model.stored_types.get("int8", 0)  # which layers keep
    plain = (model.counted_parameters() - integers) * item_size(config.model.dtype) + integers
    return WeightBytes(plain, plain)


def saved_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of weights that are not on the device, because they are in host memory. Raises Refusal."""
    moved = host_layers(config, model)
    return 0 if moved is None else moved.saved


def head_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of the dense layers after pooling, which each rank has if anything is pooled."""
    return model.head.dense_bytes if config.model.is_embedding else 0


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")


def _remedy(weights: int, static: int, free: int, reserved: int, smaller_part: str) -> str:
    """What would help: no setting of the pool does where the weights alone do not fit."""
    others = "use a device with more memory, or smaller or quantized weights"
    if free <= 0:
        return f"The weights alone do not fit: {smaller_part}{others}."
    if free <= reserved:
        less = "use a smaller --chunked-prefill-size, raise --mem-fraction-static"
        return f"What is reserved beside the weights leaves no room: {less}, {smaller_part}{others}."
    if weights >= static:
        return "The weights alone take what --mem-fraction-static allows: raise it."
    return (
        "Free memory on the device, raise --mem-fraction-static or --max-total-tokens, use a smaller --page-size, "
        "fewer --max-running-requests or a smaller --chunked-prefill-size."
    )


def _too_small(config: Config, breakdown: list[tuple[str, str]], remedy: str) -> Rejection:
    explanation = "; ".join(sentence for _, sentence in breakdown)
    return Rejection(
        "pool_too_small",
        "KV pool",
        None,
        "memory budget",
        f"it cannot hold one request of {SMALLEST_REQUEST} tokens in pages of {config.memory.page_size}: {explanation}",
        remedy,
    )
