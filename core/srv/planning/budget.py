"""How many pages fit: computes a page count per cache group from a device's memory, with a breakdown.

Torch-free arithmetic. The engine calls `compute` with the memory it measured after loading; `srv plan` calls
`estimate` with the sizes from the facts. Neither allocates anything.

    total ├──── weights and whatever else is in use ────┼── KV pool ──┼──── free for activations ────┤
          └────────────── at most mem_fraction_static * total ────────┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.dtypes import item_size
from srv.errors import Refusal, Rejection
from srv.memory.groups import PageGroup, max_tokens
from srv.models.architectures.registry import native_config
from srv.models.architectures.sharding import rank_share
from srv.models.layers.rope_config import UnsupportedConfig
from srv.planning.pools import divide_pool, group_lines, most_unconfirmed_tokens
from srv.platform.facts import DeviceFacts
from srv.quantization.method import stored_bytes
from srv.quantization.registry import chosen
from srv.specs import ModelFacts

SMALLEST_REQUEST = 2  # one prompt token and one output token


@dataclass(frozen=True, slots=True)
class Budget:
    """`groups`: the usable pages of each cache group.

    `breakdown`: pairs (quantity, explanation) in the order of computation.
    `max_request_tokens`: a request of more tokens, prompt and output, can never run.
    """

    groups: tuple[PageGroup, ...]
    max_request_tokens: int
    breakdown: tuple[tuple[str, str], ...]

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
    reserved_bytes: int = 0,
    source: str = "measured after loading",
) -> Budget:
    """The budget of a device with `free_bytes` of `total_bytes` left once the weights are loaded.

    `reserved_bytes` stay free whatever `mem_fraction_static` says (activations, sampling, runtime).
    `source` says where the two figures come from. Refusal if not even the smallest request fits.
    """
    used = total_bytes - free_bytes
    static = int(config.memory.mem_fraction_static * total_bytes)
    pool = min(static - used, free_bytes - reserved_bytes)
    breakdown = [
        (
            "memory",
            f"{_bytes(max(free_bytes, 0))} of {_bytes(total_bytes)} are free after the weights are loaded, {source}",
        ),
        (
            "static",
            f"{_bytes(static)} for weights and KV pool, mem_fraction_static {config.memory.mem_fraction_static}",
        ),
        ("reserved", f"{_bytes(reserved_bytes)} stay free (reserved_memory)"),
    ]
    groups, lines = divide_pool(config, model, pool)
    breakdown += lines
    unconfirmed = most_unconfirmed_tokens(config, model)
    tokens = max_tokens(groups, unconfirmed)
    if tokens is not None and tokens < SMALLEST_REQUEST:
        raise Refusal([_too_small(config, breakdown)])
    breakdown += group_lines(config, model, groups)
    context = config.model.context_length or model.context_length
    max_request_tokens = context if tokens is None else min(tokens, context)
    breakdown.append(("max_request_tokens", f"{max_request_tokens}, the smaller of the pool and the context length"))
    return Budget(groups, max_request_tokens, tuple(breakdown))


def estimate(
    config: Config, model: ModelFacts, device: DeviceFacts, reserved_bytes: int = 0, *, shared: bool = False
) -> Budget:
    """The budget estimated from facts, for a device that need not be present. Raises Refusal like `compute`.

    `shared`: all ranks share the memory of one device, which is that of the host.
    """
    weights, ranks = weight_bytes(config, model), config.parallel.tp_size
    total = device.memory_bytes // (ranks if shared else 1)
    return compute(
        config,
        model,
        free_bytes=total - weights,
        total_bytes=total,
        reserved_bytes=reserved_bytes,
        source=f"estimated with {_bytes(weights)} of weights in {config.model.dtype} and nothing else running"
        + (f", on each of {ranks} ranks" if ranks > 1 else ""),
    )


def weight_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights of one rank on its device, at most.

    The method by which weights are quantized determines how they count.
    """
    weights = config.weights
    dequantize = weights.dequantize_weights or config.model.model_impl == "transformers"
    dequantize = dequantize or config.model.load_format == "dummy"
    method = chosen(model, weights.quantization, weights.torchao_config, dequantize=dequantize)
    item = item_size(config.model.dtype)
    whole = stored_bytes(model, item) if method is None else method.weight_bytes(model, item, _projection_params(model))
    return math.ceil(whole * rank_share(model, config.parallel.tp_size))


def _projection_params(model: ModelFacts) -> int:
    """The weights of all projections; 0 if native layers do not support the model."""
    try:
        return native_config(model.architecture, model.config).projection_params
    except (UnsupportedConfig, KeyError, TypeError, ValueError):  # refused when it is built
        return 0


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")


def _too_small(config: Config, breakdown: list[tuple[str, str]]) -> Rejection:
    explanation = "; ".join(sentence for _, sentence in breakdown)
    return Rejection(
        "pool_too_small",
        "KV pool",
        None,
        "memory budget",
        f"it cannot hold one request of {SMALLEST_REQUEST} tokens in pages of {config.memory.page_size}: {explanation}",
        "Free memory on the device, raise --mem-fraction-static or --max-total-tokens, use a smaller --page-size, "
        "fewer --max-running-requests or a smaller --chunked-prefill-size.",
    )
