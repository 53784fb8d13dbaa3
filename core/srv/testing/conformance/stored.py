"""Keys and values in pools of plain layouts, read and written on the host, without the plugin's writer.

Of the device it needs only copies of whole tensors to and from the host. Must not know what a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from srv.platform.interface import KVBuffers
from srv.specs import PLAIN_ORDERS, KVLayout


def is_plain(layout: KVLayout) -> bool:
    """Whether `KVLayout` defines where the pool of an attention group has the key and the value of a token."""
    return layout.order in PLAIN_ORDERS and layout.dtype != "int8" and bool(layout.group.layers)


def slots(pages: Sequence[int], page_size: int, tokens: int) -> Tensor:
    """int64 [tokens]: the slots of a row's tokens in its pages, where page p has those from p * page_size."""
    first = torch.tensor(pages, dtype=torch.int64) * page_size
    return (first[:, None] + torch.arange(page_size)).flatten()[:tokens]


def on_host(kv: KVBuffers, index: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer, copied to the host: [slots, kv_heads, dim], in the dtype of the pool."""
    keys, values = (by_slots(kv, name, kv.tensors[name][index].to("cpu", copy=True)) for name in ("key", "value"))
    return keys, values


def read(kv: KVBuffers, index: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [slots, kv_heads, dim]: the keys and values of a layer in the chosen slots, multiplied by its scales."""
    keys, values = (part[chosen].double() for part in on_host(kv, index))
    return keys * kv.scales(index).key, values * kv.scales(index).value


def write(kv: KVBuffers, index: int, chosen: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys and values [slots, kv_heads, dim] in the chosen slots of a layer, divided by its scales."""
    scales = kv.scales(index)
    for name, part, scale in (("key", keys, scales.key), ("value", values, scales.value)):
        tensor = kv.tensors[name][index]
        content = tensor.to("cpu", copy=True)
        by_slots(kv, name, content)[chosen] = (part / scale).to(content.dtype)
        tensor.copy_(content)


def by_slots(kv: KVBuffers, name: str, tensor: Tensor) -> Tensor:
    """[slots, kv_heads, dim]: a view of a tensor of the pool with this name, or of its copy."""
    shapes = replace(kv.layout, order=PLAIN_ORDERS[0]).plain_tensors(len(tensor) - 1)
    return tensor.view(shapes[name].shape).flatten(0, 1)
