"""The capabilities that a platform may declare for its devices and that core checks. Torch-free.

The vocabulary is closed: a misspelt capability would silently switch an argument off, so a name that is
not listed here is refused when the plugin loads. A new capability is added together with its first reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "paged_kv": "the KV pool is addressed through page tables, with a page size that the user may choose",
        "prefix_cache": "attention reads pages that another request wrote, so prefixes can be shared",
        "chunked_prefill": "attention extends a context that is already partly in the KV pool",
        "host_memory": "the device computes in host memory, which it shares with every other process",
        "overlap": "the host may plan the next step while the device computes the current one",
        "communicator": "several ranks on one machine compute each layer together: Platform.communicator",
        "reduce_scatter": "a sum over ranks of which each gets its part: Communicator.reduce_scatter",
        "all_to_all": "each rank has rows for each other: Communicator.all_to_all, all_to_all_uneven",
        "broadcast": "one rank's tensor goes to the others: Communicator.broadcast",
        "send_recv": "two ranks of a group exchange a tensor: Communicator.send, recv",
        "memory_use": "what this process has allocated on the device is known: Platform.memory_use",
        "profiler_ranges": "named ranges for the profiler of the device's vendor: Platform.profiler_range",
        "graphs": "a captured step can be replayed with new KV lengths from the host",
        "piecewise_graphs": "a forward pass can be captured in pieces, between which others run: Platform.graph_piece",
        "torch_compile": "torch.compile can trace the ops of a model: they are made of torch's operators",
        "w8a8": "int8 weights times activations quantized to int8: ops linear_w8a8, linear_w8a8_static",
        "int8_weights": "int8 weights times activations that are not quantized: op linear_int8",
        "fp8_weights": "FP8 (e4m3) weights with scales of outputs or blocks, times activations: op linear_fp8",
        "gguf_blocks": "weights that stay in GGUF's quantized blocks: ops linear_gguf, rows_gguf (embedding lookup)",
        "gguf_codebooks": "the ops of GGUF blocks also for types of 1 to 3 bits: IQ1, IQ2, IQ3 and TQ",
        "int8_kv": "an int8 KV pool with space for its scales, and attention that reads it: see KVLayout",
        "fp8_kv": "a KV pool of 8-bit floats, and attention that applies the scales of layers: see KVLayout",
        "batch_invariant": "weight products, and ops that declare it, give a row the same bits with any other rows",
        "float32": "weights, activations and KV pool in float32",
        "float16": "weights, activations and KV pool in float16",
        "bfloat16": "weights, activations and KV pool in bfloat16",
    }
)

OPS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "w8a8": ("linear_w8a8", "linear_w8a8_static"),
        "int8_weights": ("linear_int8",),
        "fp8_weights": ("linear_fp8",),
        "gguf_blocks": ("linear_gguf", "rows_gguf"),
    }
)
"""The op contracts that a platform implements if it declares a capability."""

COLLECTIVES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "communicator": ("all_reduce", "all_gather", "barrier", "abort"),
        "reduce_scatter": ("reduce_scatter",),
        "all_to_all": ("all_to_all", "all_to_all_uneven"),
        "broadcast": ("broadcast",),
        "send_recv": ("send", "recv"),
    }
)
"""The members that a communicator has if its platform declares a capability; the others need "communicator" too."""

SINCE: Mapping[str, tuple[int, int]] = MappingProxyType({})
"""What was added after `OLDEST_API`, with its contract version: "graphs" is a capability, and a member of `Platform` if
that has one of this name; "BackendSpec.lengths" is a field. A plugin of an older version that has it is refused."""


def missing_capability(ops: Iterable[str], capabilities: Collection[str]) -> str | None:
    """The first capability that a platform lacks for layers that need these ops.

    An op that no capability covers is checked when the layer is built, which binds it.
    """
    needed = (capability for op in ops for capability, covered in OPS_OF.items() if op in covered)
    return next((capability for capability in needed if capability not in capabilities), None)
