"""Teacher-forced logits of a model on a platform, without an engine: its layers, its ops, its attention, its pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from srv.models.base import CausalLM, ForwardContext, ModelInputs, torch_dtype
from srv.models.build import build
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.platform.facts import DeviceFacts
from srv.platform.interface import BackendContext, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.platform.transfers import Transfers
from srv.specs import KVLayout, ModelFacts
from srv.worker.attention import StepAttention
from srv_cpu.attention import TorchNativeAttention
from srv_cpu.ops import OPS as CPU_OPS
from srv_cpu.platform import create as create_cpu
from srv_npu.attention import AscendAttention
from srv_npu.limits import KV_ORDER, PAGE


@dataclass(frozen=True)
class Forced:
    """A model, ready to compute the logits of tokens that it is given."""

    model: CausalLM
    context: BackendContext
    attention: AscendAttention | TorchNativeAttention

    def logits(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab] on the host; computed in chunks of these lengths, over pages 1, 2, ..."""
        device, position, parts = self.context.device, 0, []
        assert sum(chunks) == len(tokens)
        with torch.inference_mode():
            for chunk in chunks:
                table = torch.arange(1, 1 + -(-(position + chunk) // PAGE), dtype=torch.int32)[None].to(device)
                attend = StepAttention([self.attention], [chunk], [position + chunk], [table])
                ids = torch.tensor(tokens[position : position + chunk]).to(device)
                inputs = ModelInputs(ids, torch.arange(position, position + chunk).to(device))
                parts.append(self.model.logits(self.model(inputs, ForwardContext(attend))).float().cpu())
                position += chunk
        return torch.cat(parts)


def on_npu(path: Path, dtype: str, platform: Platform) -> Forced:
    facts = read_facts(path)
    model = _build(facts, dtype, platform, Ops("npu", platform.ops))
    platform.post_load(model)
    context = _context(facts, dtype, platform, KV_ORDER)
    return Forced(model, context, AscendAttention(context))


def on_cpu(path: Path, dtype: str) -> Forced:
    """Plain torch operators, which round where transformers does."""
    facts = read_facts(path)
    platform = create_cpu(EngineContext(DeviceFacts("avx2", 8 << 30, 1), 0))
    plain = [impl for impl in CPU_OPS if "reference" in impl.name or "torch_ops" in impl.name]
    context = _context(facts, dtype, platform, "page_token_head")
    return Forced(_build(facts, dtype, platform, Ops("cpu", plain)), context, TorchNativeAttention(context))


def _build(facts: ModelFacts, dtype: str, platform: Platform, ops: Ops) -> CausalLM:
    return build(facts, LayerOptions("srv"), BuildContext(platform.device(0), torch_dtype(dtype), ops))


def _context(facts: ModelFacts, dtype: str, platform: Platform, order: str) -> BackendContext:
    (group,) = facts.cache_groups
    kv = platform.kv_buffers(KVLayout(group, PAGE, dtype, order), pages=8)
    return BackendContext(platform, platform.device(0), kv, 4, Transfers(platform, platform.device(0)))
