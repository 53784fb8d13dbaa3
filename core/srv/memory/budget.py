"""How many pages fit: from a device's memory to a page count for each cache group, with its story.

Torch-free arithmetic. The engine calls `compute` with what it measured after loading; `srv plan` calls
`estimate` with what the facts promise. Neither allocates anything.

    total ├──── weights and whatever else is in use ────┼── KV pool ──┼──── free for activations ────┤
          └────────────── at most mem_fraction_static * total ────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from srv.args.config import Config
from srv.args.rules.reserve import item_size
from srv.args.statement import amount_text
from srv.errors import Refusal, Rejected
from srv.memory.layout import KVLayout
from srv.models.decoder_config import decoder_config
from srv.models.facts import ModelFacts
from srv.models.rope_config import UnsupportedConfig
from srv.platform.facts import DeviceFacts

SMALLEST_REQUEST = 2  # tokens: one of prompt, one of output


@dataclass(frozen=True, slots=True)
class Budget:
    """`pages[group]` usable pages of `page_size` tokens. `story`: (quantity, sentence) in order of reckoning.

    `max_request_tokens`: a request of more tokens, prompt and output, can never run.
    """

    pages: tuple[int, ...]
    page_size: int
    max_request_tokens: int
    story: tuple[tuple[str, str], ...]


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
    page_size = config.memory.page_size
    page_bytes = bytes_per_page(config, model)
    used = total_bytes - free_bytes
    static = int(config.memory.mem_fraction_static * total_bytes)
    pool = min(static - used, free_bytes - reserved_bytes)
    pages = max(pool, 0) // page_bytes - 1  # page 0 takes the writes of padded rows
    story = [
        (
            "memory",
            f"{_bytes(max(free_bytes, 0))} of {_bytes(total_bytes)} are free once the weights are there, {source}",
        ),
        (
            "static",
            f"{_bytes(static)} for weights and KV pool, mem_fraction_static {config.memory.mem_fraction_static}",
        ),
        ("reserved", f"{_bytes(reserved_bytes)} stay free beside them (reserved_memory)"),
        ("page", f"{_bytes(page_bytes)} hold {page_size} tokens of {_layers(model)} layers in {kv_dtype(config)}"),
        (
            "memory_pages",
            f"{max(pages, 0)} pages of that size fit into the {_bytes(max(pool, 0))} left for the KV pool",
        ),
    ]
    limit = config.memory.max_total_tokens
    if limit is not None:
        pages = min(pages, limit // page_size)
        story.append(("limit", f"max_total_tokens {limit} allows {limit // page_size} pages"))
    if pages * page_size < SMALLEST_REQUEST:
        raise Refusal([_too_small(config, story)])
    tokens = pages * page_size
    most = min(tokens, config.model.context_length or model.context_length)
    story.append(("pages", f"{pages} pages, {tokens} tokens, {_bytes((pages + 1) * page_bytes)}"))
    story.append(("max_request_tokens", f"{most}, the smaller of the pool and the context length"))
    return Budget(tuple(pages for _ in model.cache_groups), page_size, most, tuple(story))


def estimate(config: Config, model: ModelFacts, device: DeviceFacts, reserved_bytes: int = 0) -> Budget:
    """The budget that facts promise, for a device that need not be there. Refusal as `compute`."""
    weights = weight_bytes(config, model)
    return compute(
        config,
        model,
        free_bytes=device.memory_bytes - weights,
        total_bytes=device.memory_bytes,
        reserved_bytes=reserved_bytes,
        source=f"estimated with {_bytes(weights)} of weights in {config.model.dtype} and nothing else running",
    )


def weight_bytes(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights on the device, at most.

    Blocks of a GGUF file that stay as they are count as a byte a number and a 16-bit scale for each 16 of them, which
    no platform's packing is above; 8-bit integers as a byte; all else as plain numbers of the model's dtype.
    """
    kept = 0 if config.weights.dequantize_weights or config.model.model_impl == "transformers" else model.in_blocks
    if config.model.load_format == "dummy":
        kept = 0
    integers = _rounded(model) if config.weights.torchao_config else model.in_integers
    return (model.parameters - kept - integers) * item_size(config.model.dtype) + kept * 9 // 8 + integers


def _rounded(model: ModelFacts) -> int:
    """Numbers that become 8-bit integers as they are loaded: the weights of all projections."""
    try:
        return decoder_config(model.architecture, model.config).projections
    except (UnsupportedConfig, KeyError, TypeError, ValueError):  # refused when it is built
        return 0


def bytes_per_page(config: Config, model: ModelFacts) -> int:
    """Bytes of one page in all cache groups together: each group gets the same number of pages."""
    dtype = kv_dtype(config)
    layouts = [KVLayout(group, config.memory.page_size, dtype) for group in model.cache_groups]
    return sum(layout.bytes_per_page() for layout in layouts)


def kv_dtype(config: Config) -> str:
    """The torch dtype name of the KV pool; "auto" is that of the activations."""
    chosen: str = config.platform.kv_cache_dtype
    return config.model.dtype if chosen == "auto" else chosen


def _layers(model: ModelFacts) -> int:
    return sum(len(group.layers) for group in model.cache_groups)


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")


def _too_small(config: Config, story: list[tuple[str, str]]) -> Rejected:
    told = "; ".join(sentence for _, sentence in story)
    return Rejected(
        "pool_too_small",
        "KV pool",
        None,
        "memory budget",
        f"it cannot hold one request of {SMALLEST_REQUEST} tokens in pages of {config.memory.page_size}: {told}",
        "Free memory on the device, raise --mem-fraction-static or --max-total-tokens, take a smaller --page-size, "
        "fewer --max-running-requests or a smaller --chunked-prefill-size.",
    )
