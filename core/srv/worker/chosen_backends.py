"""The backends that were chosen for the slots of an engine, constructed for one rank, and its ops.

Must not know how they were chosen, nor the steps that they compute.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from srv.args.config import Config
from srv.args.named_ops import named_implementations
from srv.errors import InternalError
from srv.executor.spec import EngineSpec
from srv.models.base import CausalLM
from srv.planning.kernel import ATTENTION_SLOTS
from srv.platform.contract import check_attention, check_latent
from srv.platform.experts import MOE_FAMILY, MOE_SLOT, with_added
from srv.platform.interface import AttentionBackend, BackendContext, OpImpl
from srv.platform.latent import LatentAttentionBackend
from srv.platform.op_choice import FULL_PRECISION
from srv.platform.ops import Ops, implementations
from srv.platform.registry import find_backends
from srv.specs import Latent
from srv.worker.attention import SplitAttention


class ChosenBackends:
    """Imports and constructs the backends of `spec`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec

    def construct(self, slot: str, context: BackendContext, target: str = "") -> Any:
        """The backend of a slot, or another `target` ("module:name") that belongs to it."""
        values = self._spec.backend_arguments.get(slot, {})
        return pkgutil.resolve_name(target or self._spec.backends[slot][1])(replace(context, arguments=values))

    def attention(self, context: BackendContext) -> tuple[AttentionBackend, AttentionBackend]:
        """A cache group's backends of all steps and of decode-only steps; the same one unless two are chosen."""
        prefill, decode = ATTENTION_SLOTS
        backend = self.attention_of(prefill, context)
        if self._spec.backends[prefill] == self._spec.backends[decode]:
            return backend, backend
        decoding = self.attention_of(decode, context)
        return SplitAttention(backend, decoding, context.transfers), decoding

    def attention_of(self, slot: str, context: BackendContext) -> AttentionBackend:
        """The backend of one of `ATTENTION_SLOTS` for the cache group of the context's pool."""
        if context.kv is not None and isinstance(context.kv.layout.group, Latent):
            target = self._spec.latent_backends.get(slot)
            if target is None:  # resolution passes such a backend over
                raise InternalError(f"{self._spec.backends[slot][0]} computes no latent attention")
            return check_latent(self.construct(slot, context, target), target)
        return check_attention(self.construct(slot, context), self._spec.backends[slot][1])


def chosen_ops(spec: EngineSpec, config: Config, impls: Sequence[OpImpl]) -> Ops:
    """The implementations that a configuration allows of those of a platform, and of an added backend of experts."""
    invariant, (experts, _) = config.schedule.enable_deterministic_inference, spec.backends.get(MOE_SLOT, ("", ""))
    chosen = (
        [backend for backend in find_backends(spec.platform, MOE_FAMILY) if backend.name == experts] if experts else []
    )
    added = implementations(with_added((), chosen), spec.device)
    named = named_implementations(config)
    full = config.platform.activation_precision == FULL_PRECISION
    return Ops(spec.platform, (*added, *impls), batch_invariant=invariant, experts=experts, named=named, full=full)


def prepare_latent(model: CausalLM, attention: Sequence[tuple[AttentionBackend, AttentionBackend]]) -> None:
    """Give the backends of latent attention the up-projections of their layers."""
    for layer, up in model.up_projections():
        backend, _ = attention[layer.group]  # of two, the first one has both
        assert isinstance(backend, LatentAttentionBackend)
        backend.prepare(layer, up)
