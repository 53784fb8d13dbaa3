"""Builds an engine from an `EngineSpec`: platform, model, memory budget, KV pool, runner, scheduler.

A configuration that cannot be served raises a `SrvError` whose message tells the operator what to do. What is
quick to fail comes first: the platform, then the weights, then the KV pool.
"""

from __future__ import annotations

import logging
import pkgutil
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from srv.args.config import Config
from srv.engine.progress import LoadProgress
from srv.executor.in_process import InProcessExecutor
from srv.executor.spec import EngineSpec
from srv.io.messages import Ready
from srv.models.base import CausalLM, torch_dtype
from srv.models.build import build as build_model
from srv.planning import budget
from srv.planning.budget import Budget
from srv.platform import registry
from srv.platform.contract import create_platform
from srv.platform.interface import AttentionBackend, BackendContext, KVBuffers, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.sample.sampler import Sampler
from srv.sample.state import SamplerState
from srv.sched.limits import Limits
from srv.sched.scheduler import Scheduler
from srv.specs import KVLayout
from srv.worker.attention import SplitAttention
from srv.worker.build_drafting import draft_cost, draft_count, drafting
from srv.worker.capture import CaptureReport, capture_steps, rows_to_capture
from srv.worker.runner import Runner
from srv.worker.slots import Slots

logger = logging.getLogger(__name__)

OVERLAP_DEPTH = 2  # one step runs while the next one is planned and enqueued


@dataclass(frozen=True, slots=True)
class Engine:
    """What the engine loop drives, and the message that reports the engine as ready."""

    scheduler: Scheduler
    executor: InProcessExecutor
    depth: int
    ready: Ready


def build(spec: EngineSpec) -> Engine:
    started = time.monotonic()
    config = Config.from_json(spec.config)
    platform = _platform(spec)
    device = platform.device(0)
    ops = Ops(spec.platform, platform.ops)
    model = _model(spec, config, platform, ops, device)
    measured = _budget(spec, config, platform, device)
    depth = 1 if config.schedule.disable_overlap_schedule else OVERLAP_DEPTH
    limits = _limits(config, measured, depth, spec)
    kv = platform.kv_buffers(_layout(spec, config, measured), measured.pages[0])
    runner, captured = _runner(spec, config, platform, device, model, kv, measured)
    limits = replace(limits, draft_cost=draft_cost(runner.seconds, limits.drafts))
    end_tokens = frozenset(spec.model.end_tokens)
    return Engine(
        scheduler=Scheduler(limits, measured.pages, end_tokens),
        executor=InProcessExecutor(runner),
        depth=depth,
        ready=_ready(spec, config, measured, captured, device, time.monotonic() - started),
    )


def _platform(spec: EngineSpec) -> Platform:
    found = registry.find_platforms()[spec.platform]  # the API process has found it before
    context = EngineContext(device=spec.device, local_rank=0, options=spec.options)
    platform = create_platform(found, context)
    platform.init_worker(0)
    return platform


def _model(spec: EngineSpec, config: Config, platform: Platform, ops: Ops, device: torch.device) -> CausalLM:
    with LoadProgress(spec.model.name) as progress:
        model = build_model(
            spec.model,
            ops=ops,
            device=device,
            dtype=torch_dtype(config.model.dtype),
            model_impl=config.model.model_impl,
            load_format=config.model.load_format,
            dequantize=config.weights.dequantize_weights,
            quantization=config.weights.quantization,
            online_quantization=config.weights.torchao_config,
            seed=config.model.random_seed or 0,
            progress=progress,
        )
    platform.post_load(model)
    return model


def _budget(spec: EngineSpec, config: Config, platform: Platform, device: torch.device) -> Budget:
    memory = platform.memory(device)
    return budget.compute(
        config,
        spec.model,
        free_bytes=memory.free,
        total_bytes=memory.total,
        reserved_bytes=int(spec.reserved_bytes),
    )


def _layout(spec: EngineSpec, config: Config, measured: Budget) -> KVLayout:
    """This version supports one cache group; `srv.models.read` refuses models with several."""
    (group,) = spec.model.cache_groups
    return KVLayout(group, measured.page_size, budget.kv_dtype(config), spec.kv_order)


def _limits(config: Config, measured: Budget, depth: int, spec: EngineSpec) -> Limits:
    schedule = config.schedule
    return Limits(
        max_running_requests=schedule.max_running_requests,
        max_queued_requests=schedule.max_queued_requests,
        chunked_prefill_size=schedule.chunked_prefill_size,
        max_prefill_tokens=schedule.max_prefill_tokens,
        page_size=measured.page_size,
        context_length=measured.max_request_tokens,
        conservativeness=schedule.schedule_conservativeness,
        policy=schedule.schedule_policy,
        prefix_cache=not config.memory.disable_radix_cache,
        depth=depth,
        vocab_size=spec.model.vocab_size,
        drafts=draft_count(config),
        device_lengths=spec.kv_lengths == "device",
    )


def _runner(
    spec: EngineSpec,
    config: Config,
    platform: Platform,
    device: torch.device,
    model: CausalLM,
    kv: KVBuffers,
    measured: Budget,
) -> tuple[Runner, CaptureReport]:
    slots = config.schedule.max_running_requests
    context = BackendContext(
        platform=platform,
        device=device,
        kv=kv,
        max_rows=slots,
    )
    max_pages = -(-measured.max_request_tokens // measured.page_size)
    state = SamplerState(slots, spec.model.vocab_size, frozenset(spec.model.end_tokens), device)
    attention, decode = _attention(spec, context)
    captured, capture_report = capture_steps(
        config, platform, model, decode, pages=max_pages, vocab_size=spec.model.vocab_size, device=device
    )
    return Runner(
        model=model,
        attention=attention,
        sampler=Sampler(_backend(spec, "sampling_backend", context), state),
        slots=Slots(slots, [max_pages for _ in measured.pages], device),
        platform=platform,
        device=device,
        captured=captured,
        drafting=drafting(config, slots, measured.max_request_tokens, device),
    ), capture_report


def _attention(spec: EngineSpec, context: BackendContext) -> tuple[AttentionBackend, AttentionBackend]:
    """The attention backend of all steps, and that of decode-only steps; both are the same unless two are chosen."""
    prefill = spec.backends["prefill_attention_backend"]
    decode = spec.backends["decode_attention_backend"]
    backend: AttentionBackend = _backend(spec, "prefill_attention_backend", context)
    if prefill == decode:
        return backend, backend
    decode_backend: AttentionBackend = _backend(spec, "decode_attention_backend", context)
    return SplitAttention(extend=backend, decode=decode_backend), decode_backend


def _backend(spec: EngineSpec, slot: str, context: BackendContext) -> Any:
    """Import and construct the backend that was chosen for this backend slot."""
    name, target = spec.backends[slot]
    logger.info("%s: %s (%s)", slot, name, target)
    return pkgutil.resolve_name(target)(context)


def _ready(
    spec: EngineSpec, config: Config, measured: Budget, captured: CaptureReport, device: torch.device, seconds: float
) -> Ready:
    explanations = [*measured.breakdown, *captured]
    for quantity, explanation in explanations:
        logger.info("%s: %s", quantity, explanation)
    return Ready(
        device=str(device),
        model=spec.model.name,
        pages=list(measured.pages),
        page_size=measured.page_size,
        max_request_tokens=measured.max_request_tokens,
        budget=explanations,
        graph_rows=list(rows_to_capture(config)),
        load_seconds=seconds,
    )
