"""The slots for recurrent states: how many of them there are, and the memory that they take.

    slots ├─ 0: padding ─┼─ one per running request ─┼─ snapshots, with which cached prefixes are continued ─┤

Requests always have theirs. Snapshots get what `mamba_full_memory_ratio` leaves of the pool's memory, or what
`max_mamba_cache_size` says. Torch-free.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from srv.args.backend_groups import unserved_states, why_not_native
from srv.args.config import Config
from srv.args.statement import amount_text
from srv.dist.mesh import mesh_of
from srv.errors import Rejection
from srv.models.facts.sharding import rank_facts
from srv.specs import ModelFacts, Recurrent, StateTensor

CONVOLUTION = "conv"  # the state that keeps inputs, in the dtype of the model
Lines = list[tuple[str, str]]  # (quantity, explanation)


class StateSlots(NamedTuple):
    """`slots`: usable ones, without slot 0. `bytes`: of all slots, slot 0 included."""

    slots: int
    bytes: int
    lines: Lines


def state_specs(config: Config, model: ModelFacts) -> tuple[Recurrent, ...]:
    """The recurrent cache groups of one rank, with the dtypes in which the server keeps their states."""
    dtypes = {CONVOLUTION: config.model.dtype}
    dtype = config.memory.mamba_ssm_dtype

    def kept(state: StateTensor) -> StateTensor:
        return msgspec.structs.replace(state, dtype=dtypes.get(state.name, dtype))

    own_groups = rank_facts(model, mesh_of(config.get).width("heads")).cache_groups
    groups = [group for group in own_groups if isinstance(group, Recurrent)]
    return tuple(msgspec.structs.replace(group, states=tuple(map(kept, group.states))) for group in groups)


def missing_native_layers(config: Config, model: ModelFacts) -> Rejection | None:
    """Why a model with recurrent layers or latent attention cannot be served; None if it can, or has neither.

    Only native layers read states from slots, and compressed vectors from pages.
    """
    if (refused := unserved_states(model, config.model.model_impl)) is not None:
        return refused
    why = why_not_native(model, config.model.model_impl) if model.latents else None
    return None if why is None else _latent_attention(config, why)


def _latent_attention(config: Config, why: str) -> Rejection:
    chosen = config.model.model_impl == "transformers"
    return Rejection(
        "native_layers_only",
        "model",
        None,
        "memory budget",
        f"its layers have latent attention, whose compressed vectors only native layers cache ({why})",
        "Leave --model-impl at auto." if chosen else "Choose a model whose configuration native layers compute.",
    )


def bytes_per_slot(config: Config, model: ModelFacts) -> int:
    """Bytes of the states of one request."""
    return sum(group.bytes_per_slot() for group in state_specs(config, model))


def divide_states(config: Config, model: ModelFacts, pool: int) -> StateSlots:
    """The slots of a pool of `pool` bytes, which the pages share. None, in a model without recurrent layers."""
    size = bytes_per_slot(config, model)
    if not size:
        return StateSlots(0, 0, [])
    running, memory = config.schedule.max_running_requests, config.memory
    lines: Lines = [("state", f"{_bytes(size)} hold the recurrent states of one request")]
    if memory.disable_radix_cache:
        snapshots, why = 0, "none for cached prefixes (disable_radix_cache is true)"
    elif memory.max_mamba_cache_size is not None:
        snapshots = max(0, memory.max_mamba_cache_size - running)
        why = f"{snapshots} for cached prefixes: max_mamba_cache_size is {memory.max_mamba_cache_size}"
    else:
        ratio = memory.mamba_full_memory_ratio
        share = int(pool * ratio / (1 + ratio))
        snapshots = min(max(0, share // size - 1 - running), most_snapshots(config, model))
        why = f"{snapshots} for cached prefixes: mamba_full_memory_ratio is {ratio}"
    slots = running + snapshots
    total = (slots + 1) * size
    lines.append(("state_slots", f"{slots} slots, {_bytes(total)}: {running} for running requests, and {why}"))
    return StateSlots(slots, total, lines)


def most_snapshots(config: Config, model: ModelFacts) -> int:
    """The most snapshots that prefixes can have: one at each end of a page of as many tokens as there may be."""
    tokens = config.memory.max_total_tokens
    if tokens is None:
        context = config.model.context_length or model.context_length
        tokens = config.schedule.max_running_requests * context
    return max(1, tokens // config.memory.page_size)


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")
