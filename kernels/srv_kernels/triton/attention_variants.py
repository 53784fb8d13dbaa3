"""What paged attention is compiled as ahead of time: common head dims, groups and pools, with each target's blocks."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterator

import triton

from srv_kernels.triton import attention_kernels as kernels
from srv_kernels.triton.attention_plan import Heads, extend_blocks, plan_decode, tiles
from srv_kernels.triton.attention_reduce import reduce_kernel
from srv_kernels.triton.attention_tuning import Blocks
from srv_kernels.triton.targets import BY_NAME
from srv_kernels.triton.variants import Variant

_POINTERS = {
    "page_table": "*i32",
    "starts": "*i32",
    "lengths": "*i32",
    "partial": "*fp32",
    "logs": "*fp32",
    "sinks": "*fp32",
}
_SCALES = {"scale": "fp32", "cap": "fp32"}
_ALIGNED = tuple(f"{name}_{axis}" for name in ("q", "out") for axis in ("token", "head")) + tuple(
    f"{name}_{axis}" for name in ("key", "value") for axis in ("page", "token", "head")
)
_FLOAT8 = ("fp8e4nv", "fp8e5", "fp8e4b8")


def _types(kernel, kind: str, pool: str) -> dict[str, str]:
    scales = "*fp32" if pool in ("i8", "u8", *_FLOAT8) else f"*{kind}"
    pointers = {
        **{"q": f"*{kind}", "out": f"*{kind}", "keys": f"*{pool}", "values": f"*{pool}"},
        **{"key_scales": scales, "value_scales": scales},
    }
    types = {**_POINTERS, **_SCALES, **pointers}
    return {name: types.get(name, "i32") for name in kernel.arg_names if not name.isupper()}


def _constants(heads: Heads, pool: str, page: int, *traits: str) -> dict[str, int | bool]:
    scales = 2 if pool == "i8" else int(pool in ("u8", *_FLOAT8))
    return {
        **{"GROUP": heads.group, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim},
        **{"BLOCK_KEY": triton.next_power_of_2(heads.key_dim), "BLOCK_VALUE": triton.next_power_of_2(heads.value_dim)},
        **{"PAGE_SIZE": page, "KEY_SCALES": scales, "VALUE_SCALES": scales},
        **{f"HAS_{trait}": trait in traits for trait in ("WINDOW", "CHUNK", "CAP", "TEMPERATURE", "SINKS")},
    }


def _variant(kernel, kind: str, pool: str, constants: dict[str, int | bool], sizes: Blocks, targets) -> Variant:
    types = _types(kernel, kind, pool)
    constants = {**constants, "BLOCK_KEYS": sizes.keys}
    return Variant(
        kernel,
        types,
        {name: constants[name] for name in kernel.arg_names if name in constants},
        aligned=tuple(name for name in _ALIGNED if name in types),
        warps=sizes.warps,
        stages=sizes.stages,
        targets=frozenset(targets),
    )


def _with_blocks(choose) -> Iterator[tuple[Blocks, list[str]]]:
    """The block sizes of `choose(target)`, with the targets that have them."""
    by_blocks: dict[Blocks, list[str]] = {}
    for target in BY_NAME:
        by_blocks.setdefault(choose(target), []).append(target)
    yield from by_blocks.items()


# Heads, dtype, pool, page size, and what the layer has.
_LAYERS = (
    (Heads(4, 1, 64, 64, 2), "bf16", "bf16", 16),
    (Heads(4, 1, 128, 128, 2), "bf16", "bf16", 16),
    (Heads(8, 1, 128, 128, 2), "fp16", "fp16", 128, "WINDOW"),
    (Heads(2, 1, 256, 256, 2), "bf16", "bf16", 16, "WINDOW", "CAP"),
    (Heads(8, 1, 64, 64, 2), "bf16", "bf16", 16, "WINDOW", "SINKS"),
    (Heads(8, 1, 64, 64, 2), "bf16", "bf16", 16, "SINKS"),
    (Heads(5, 1, 128, 128, 2), "bf16", "bf16", 16, "CHUNK"),
    (Heads(8, 1, 128, 128, 2), "bf16", "bf16", 16, "CAP", "TEMPERATURE"),
    (Heads(1, 1, 80, 80, 2), "fp16", "fp16", 1),
    (Heads(4, 1, 128, 128, 4), "fp32", "fp32", 16),
    (Heads(4, 1, 128, 128, 2), "bf16", "i8", 16),
    *((Heads(4, 1, 128, 128, 2), "bf16", pool, 16) for pool in ("u8", *_FLOAT8)),
)


def _all() -> Iterator[Variant]:
    for heads, kind, pool, page, *traits in _LAYERS:
        constants = _constants(heads, pool, page, *traits)
        for sizes, targets in _with_blocks(lambda target, heads=heads: extend_blocks(heads, target)):
            yield _variant(kernels.extend_kernel, kind, pool, {**constants, "BLOCK_ROWS": sizes.rows}, sizes, targets)
        # A mixed or captured step, and for one layer a step with drafts, whose tiles are larger.
        for queries in (1, 8) if heads.key_dim == 128 and pool == kind else (1,):

            def choose(target: str, heads: Heads = heads, queries: int = queries) -> Blocks:
                return plan_decode(heads, 1, queries, 8192, target, 100).blocks

            for sizes, targets in _with_blocks(choose):
                count = tiles(queries, heads.group, sizes)
                named_constants = {**constants, "BLOCK_ROWS": sizes.rows, "TILES": count}
                yield _variant(kernels.decode_kernel, kind, pool, named_constants, sizes, targets)
    for group, dim in ((1, 80), (4, 128), (8, 64)):
        named_constants = {
            "GROUP": group,
            "VALUE_DIM": dim,
            "BLOCK_HEADS": group,
            "BLOCK_VALUE": triton.next_power_of_2(dim),
        }
        named_constants |= {"BLOCK_SPLITS": 16, "HAS_WINDOW": False, "HAS_CHUNK": False}
        yield _variant(reduce_kernel, "bf16", "bf16", named_constants, Blocks(16, 64, min(4, group), 3), ())


VARIANTS = tuple(_all())
