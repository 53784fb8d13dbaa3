"""The worker of one rank: it owns the rank's platform, device, model, KV pool, backends and runner.

It is made from the engine's `EngineSpec` and prepared in three steps (load, measure, allocate), so that the engine can
compute one memory budget from the measurements of all ranks in between. It must not know the scheduler, nor in which
process it runs. What is quick to fail comes first: the platform, then the weights, then the KV pool.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from srv.args.config import Config
from srv.commands import Answer, Command
from srv.dist.group import RankGroup
from srv.executor.protocol import Allocation, Launched, RankMemory
from srv.executor.spec import EngineSpec
from srv.models.base import CausalLM, torch_dtype
from srv.models.build import build as build_model
from srv.planning.budget import Budget
from srv.planning.pools import cache_specs, kv_dtype
from srv.planning.steps import draft_count
from srv.platform import registry
from srv.platform.contract import check_attention, create_platform, join
from srv.platform.interface import AttentionBackend, BackendContext, Communicator, KVBuffers, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.platform.pools import allocate_pool
from srv.platform.transfers import Transfers
from srv.sample.late_mask import LateMasks
from srv.sample.sampler import Sampler
from srv.sample.state import SamplerState
from srv.sched.late import LateInputs
from srv.sched.plan import Plan
from srv.specs import AttentionLayer, KVLayout, cache_places
from srv.speculative.algorithm import DraftSizes
from srv.worker.attention import SplitAttention
from srv.worker.build_drafting import drafting, step_seconds
from srv.worker.capture import capture_steps
from srv.worker.layer_check import LayerCheck
from srv.worker.profiler import RankProfiler
from srv.worker.progress import LoadProgress
from srv.worker.runner import Runner
from srv.worker.slots import Slots

ATTENTION_SLOTS = ("prefill_attention_backend", "decode_attention_backend")

logger = logging.getLogger(__name__)


class RankWorker:
    """One rank of the engine that `spec` describes. Implements `srv.executor.protocol.Worker`.

    `group`: the ranks that the model is sharded over, of which this is one. The members without a leading underscore
    exist once `load` (platform, device, model) and `allocate` (runner) have returned.
    """

    platform: Platform
    device: torch.device
    model: CausalLM
    runner: Runner

    def __init__(self, spec: EngineSpec, group: RankGroup = RankGroup()) -> None:  # noqa: B008 - immutable
        self._spec, self._group = spec, group
        self._config = Config.from_json(spec.config)
        self._communicator: Communicator | None = None
        self._cache_specs = cache_specs(self._config, spec.model)
        self._weight_bytes = 0
        self._profiler = RankProfiler(group.rank)

    def load(self) -> None:
        spec, group = self._spec, self._group
        found = registry.find_platforms()[spec.platform]  # the API process has found it before
        context = EngineContext(spec.device, local_rank=group.rank, options=spec.options, local_ranks=group.size)
        self.platform = create_platform(found, context)
        self.platform.init_worker(group.rank)
        self.device = self.platform.device(group.rank)
        self._transfers = Transfers(self.platform, self.device)
        if group.size > 1:
            self._communicator = join(self.platform, group)
        self.model = self._load_model()
        self._weight_bytes = self.model.loaded_bytes()
        self.platform.post_load(self.model)
        for slot, (name, target) in spec.backends.items():
            logger.info("%s: %s (%s)", slot, name, target)

    def _load_model(self) -> CausalLM:
        spec, model, weights = self._spec, self._config.model, self._config.weights
        with LoadProgress(spec.model.name, bar=self._group.rank == 0) as progress:
            return build_model(
                spec.model,
                ops=Ops(spec.platform, self.platform.ops),
                device=self.device,
                dtype=torch_dtype(model.dtype),
                model_impl=model.model_impl,
                load_format=model.load_format,
                dequantize=weights.dequantize_weights,
                quantization=weights.quantization,
                online_quantization=weights.torchao_config,
                seed=model.random_seed or 0,
                progress=progress,
                group=self._group,
                communicator=self._communicator,
                cache_places=cache_places(self._cache_specs),
                check_layers=self._check_layers,
            )

    def _check_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Refuse a model with a layer that a chosen backend cannot compute. The backends get pools of one page."""
        page, rows = self._config.memory.page_size, self._config.schedule.max_running_requests
        pools = [allocate_pool(self.platform, layout, 1) for layout in self._layouts([page] * len(self._cache_specs))]
        check = LayerCheck(self._spec.platform, self._spec.model)
        contexts = [BackendContext(self.platform, self.device, kv, rows, self._transfers) for kv in pools]
        chosen = {self._spec.backends[slot]: slot for slot in ATTENTION_SLOTS}
        for (name, _), slot in chosen.items():
            argument = slot if len(chosen) > 1 else "attention_backend"
            check.require(layers, argument, name, [self._attention_backend(slot, context) for context in contexts])

    def measure(self) -> RankMemory:
        memory = self.platform.memory(self.device)
        return RankMemory(str(self.device), memory.free, memory.total, self._weight_bytes)

    def allocate(self, budget: Budget) -> Allocation:
        config, model, rows = self._config, self._spec.model, self._config.schedule.max_running_requests
        transfers = self._transfers
        layouts = self._layouts([group.page_size for group in budget.groups])
        pools = [
            allocate_pool(self.platform, layout, group.pages)
            for layout, group in zip(layouts, budget.groups, strict=True)
        ]
        context = BackendContext(self.platform, self.device, None, rows, transfers)
        sampling = replace(context, max_rows=rows * (1 + draft_count(config)))
        max_pages = [group.pages_for(budget.max_request_tokens) for group in budget.groups]
        late = LateMasks(model.vocab_size, transfers) if self._spec.late_inputs else None
        end_tokens = frozenset(model.end_tokens)
        state = SamplerState(rows, model.vocab_size, end_tokens, transfers, extra=(late,) if late else ())
        attention = [self._attention(replace(context, kv=kv)) for kv in pools]
        if self._communicator is not None:
            self._communicator.barrier()  # capturing runs steps, and the ranks have to begin together
        captured, report = capture_steps(
            config,
            self.platform,
            self.model,
            [decode for _, decode in attention],
            pages=max_pages,
            vocab_size=model.vocab_size,
            transfers=transfers,
        )
        self.runner = Runner(
            model=self.model,
            attention=[backend for backend, _ in attention],
            sampler=Sampler(self._backend("sampling_backend", sampling), state),
            slots=Slots(rows, max_pages, transfers),
            transfers=transfers,
            captured=captured,
            late=late,
            drafting=drafting(config, DraftSizes(rows, budget.max_request_tokens, model.vocab_size), transfers),
        )
        return Allocation(sum(map(_bytes, pools)), report, step_seconds(self.runner.seconds, draft_count(config), rows))

    def _layouts(self, page_sizes: Sequence[int]) -> list[KVLayout]:
        """The layout of each cache group, whose pages have these sizes."""
        dtype, order = kv_dtype(self._config), self._spec.kv_order
        return [KVLayout(group, size, dtype, order) for group, size in zip(self._cache_specs, page_sizes, strict=True)]

    def _attention(self, context: BackendContext) -> tuple[AttentionBackend, AttentionBackend]:
        """A cache group's backends of all steps and of decode-only steps; the same one unless two are chosen."""
        prefill, decode = ATTENTION_SLOTS
        backend = self._attention_backend(prefill, context)
        if self._spec.backends[prefill] == self._spec.backends[decode]:
            return backend, backend
        decoding = self._attention_backend(decode, context)
        return SplitAttention(backend, decoding, context.transfers), decoding

    def _attention_backend(self, slot: str, context: BackendContext) -> AttentionBackend:
        return check_attention(self._backend(slot, context), self._spec.backends[slot][1])

    def _backend(self, slot: str, context: BackendContext) -> Any:
        """Import and construct the backend that was chosen for this backend slot."""
        return pkgutil.resolve_name(self._spec.backends[slot][1])(context)

    def launch(self, plan: Plan) -> Launched | None:
        return self.runner.launch(plan)

    def sample(self, step: int, late: LateInputs) -> Launched:
        return self.runner.sample(step, late)

    def control(self, command: Command) -> Answer:
        return self._profiler.run(command)

    def close(self) -> None:
        """Leave the group. Only ranks in processes of their own need it."""
        if self._communicator is not None:
            self._communicator.abort()


def _bytes(kv: KVBuffers) -> int:
    return sum(tensor.nbytes for tensor in kv.all())
