"""The toy's plugin with one more backend, for some roles or some models only."""

from __future__ import annotations

from typing import Any

from toy_variant import manifest

from srv.platform.facts import BackendSpec, Requires, ResolutionContext, Unfit
from srv.platform.manifest import Manifest
from srv_toy_device.facts import FACTS, KV_ORDER
from srv_toy_device.limits import TRAITS

DECODE, PREFILL = "decode_attention_backend", "prefill_attention_backend"


def with_role(name: str, slot: str, target: str, **members: Any) -> Manifest:
    """Platform `name`: the function "module:function" `target` makes the attention backend of one slot."""

    def check(context: ResolutionContext) -> Requires:
        return Requires(slots=(slot,))

    spec = BackendSpec("one_role", 20, check, target, kv_order=KV_ORDER, graphs=True, traits=TRAITS)
    attention = (*FACTS.backends["attention"], spec)
    return manifest(name, facts={"backends": {**FACTS.backends, "attention": attention}}, **members)


def with_sampling_of_float16(name: str, target: str) -> Manifest:
    """Platform `name`: `target` makes a sampling backend that fits models in float16 only."""

    def check(context: ResolutionContext) -> Requires | Unfit:
        return Requires() if context["dtype"] == "float16" else Unfit(("it is for float16",))

    sampling = (*FACTS.backends["sampling"], BackendSpec("of_float16", 20, check, target))
    return manifest(name, facts={"backends": {**FACTS.backends, "sampling": sampling}})
