"""L1: the pools of every cache spec: named tensors that share no memory, in the sizes that the memory budget assumes.

The sizes are random, odd where the plugin's own layout does not decide, and the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from srv.errors import PlatformUnavailable
from srv.platform.interface import KVBuffers
from srv.specs import (
    PLAIN_ORDERS,
    FullAttention,
    KVLayout,
    Latent,
    Recurrent,
    SlidingWindow,
    StateTensor,
    spec_name,
)
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.pool import check_finite, check_placement, check_tensors
from srv.testing.conformance.setups import AttentionSetup, allocate_pool, declared_dtypes, select_setups

_MOST_LAYERS = 12  # tensors that layers share by their number modulo 11 or less are found
_OVERHEAD = 2  # a pool takes at most this many times the bytes that the budget assumes


def cache_specs(kit: Kit) -> str:
    """Each cache spec has its named tensors, one per layer, which share no memory and hold what is written to them.

    A spec other than full attention may be refused by the platform.
    """
    rng = random.Random(0)
    by_kind: dict[str, int] = {}
    refused: dict[str, str] = {}
    for setup in select_setups(kit, max_page_sizes=1):
        for layout in layouts(kit, setup, rng):
            kind = spec_name(layout.group)
            try:
                _check_layout(kit, layout, rng)
            except PlatformUnavailable as error:
                if isinstance(layout.group, FullAttention):
                    raise Fault(f"pools for full attention are refused: {error.reason}") from error
                refused[kind] = error.reason
                continue
            by_kind[kind] = by_kind.get(kind, 0) + 1
    counts = ", ".join(f"{count} of {kind}" for kind, count in by_kind.items())
    return "; ".join((f"layouts: {counts}", *(f"{kind} is refused: {reason}" for kind, reason in refused.items())))


def layouts(kit: Kit, setup: AttentionSetup, rng: random.Random) -> Iterator[KVLayout]:
    """Each spec with the largest number of layers, and with another one, in the layout of this backend.

    Values are as long as keys in the first of the two, because a platform may treat equal shapes in its own way.
    """
    dtypes = declared_dtypes(kit)
    for count in (_MOST_LAYERS, rng.randint(1, _MOST_LAYERS - 1)):
        layers = tuple(sorted(rng.sample(range(2 * _MOST_LAYERS), count)))
        key_dim = _odd(rng, 40)
        heads = _odd(rng, 4), key_dim, key_dim if count == _MOST_LAYERS else key_dim + 4
        if setup.layout.order not in PLAIN_ORDERS:  # its shapes may need the sizes that the backend has accepted
            heads = setup.shape.kv_heads, setup.shape.head_dim, setup.shape.head_dim
        yield replace(setup.layout, group=FullAttention(layers, *heads))
        yield replace(setup.layout, group=SlidingWindow(layers, *heads, _odd(rng, 64)))
        latent = Latent(layers, _odd(rng, 60), _odd(rng, 20))
        indexed = msgspec.structs.replace(latent, index_dim=_odd(rng, 40), indexed=layers[::2])
        for group in (latent, indexed):
            yield replace(setup.layout, group=group, dtype=rng.choice(dtypes))
        yield replace(setup.layout, group=Recurrent(layers, _states(dtypes, rng)))


def _states(dtypes: Sequence[str], rng: random.Random) -> tuple[StateTensor, ...]:
    """States with dtypes of their own, two of them of the same shape and dtype."""
    convolution = (_odd(rng, 12), 3), rng.choice(dtypes)
    return (
        StateTensor("key_convolution", *convolution),
        StateTensor("recurrence", (_odd(rng, 4), _odd(rng, 8), _odd(rng, 8)), rng.choice(dtypes)),
        StateTensor("value_convolution", *convolution),
    )


def _odd(rng: random.Random, most: int) -> int:
    """A random odd number up to `most` + 1."""
    return 2 * rng.randint(0, most // 2) + 1


def _check_layout(kit: Kit, layout: KVLayout, rng: random.Random) -> None:
    count = rng.randint(2, 5)
    where = f"{spec_name(layout.group)} cache group of {len(layout.group.layers)} layers, {layout.order}"
    kv = allocate_pool(kit, layout, count)
    check_tensors(layout, kv, count, where)
    check_placement(kit, kv, where)
    _check_bytes(layout, kv, count, where)
    check_finite(layout, kit, count, where)
    _check_memory(kit, kv, rng, where)


def _check_bytes(layout: KVLayout, kv: KVBuffers, count: int, where: str) -> None:
    group = layout.group
    unit_bytes = group.bytes_per_slot() if isinstance(group, Recurrent) else layout.bytes_per_page()
    needed, held_bytes = (count + 1) * unit_bytes, sum(tensor.nbytes for tensor in kv.all())
    if not needed <= held_bytes <= _OVERHEAD * needed:
        unit = "slot" if isinstance(group, Recurrent) else "page"
        raise Fault(
            f"{where}: {count} {unit}s and {unit} 0 of {unit_bytes} bytes take {held_bytes} bytes, not {needed}"
        )


def _check_memory(kit: Kit, kv: KVBuffers, rng: random.Random, where: str) -> None:
    """Write to one tensor after the other, page by page or slot by slot; each then holds its own content only."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    written: dict[tuple[str, int], Tensor] = {}
    tensors = {
        (name, index): tensor
        for name, layer_tensors in kv.tensors.items()
        for index, tensor in enumerate(layer_tensors)
    }
    for (name, index), tensor in tensors.items():
        content = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for place in torch.randperm(len(tensor), generator=generator).tolist():
            tensor[place].copy_(content[place].to(kit.device))
        for place in range(len(tensor)):
            if not torch.equal(tensor[place].to("cpu"), content[place]):
                raise Fault(f"{where}: {name} of layer {index} does not hold what was written to page or slot {place}")
        for (other, layer), before in written.items():
            if not torch.equal(tensors[other, layer].to("cpu"), before):
                raise Fault(
                    f"{where}: {name} of layer {index} and {other} of layer {layer} share memory",
                    "Allocate a tensor of its own for each name and layer.",
                )
        written[name, index] = content
