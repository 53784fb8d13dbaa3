"""The worker of one rank: it owns the rank's platform, device, model, KV pool, backends and runner.

It is made from the engine's `EngineSpec` and prepared in three steps (load, measure, allocate), so that the engine can
compute one memory budget from the measurements of all ranks in between. It must not know the scheduler, nor in which
process it runs. What is quick to fail comes first: the platform, then the weights, then the KV pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from srv.args.config import Config
from srv.args.rules.loading import reading_of
from srv.commands import Answer, Command, ReadMemory, StartProfile, StopProfile
from srv.dist.group import RankGroup
from srv.dist.placing import device_index, node_of
from srv.executor.protocol import Allocation, Launched, RankMemory
from srv.executor.spec import EngineSpec
from srv.io.memory_lines import ACTIVATIONS
from srv.io.phases import read_seconds
from srv.models.base import CausalLM, torch_dtype
from srv.models.build import build as build_model
from srv.models.checkpoints.safetensors_header import weight_files
from srv.models.facts.sharding import rank_share
from srv.planning.budget import Budget
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.kernel_steps import PIECES
from srv.planning.kv_scales import ScaleSource, configured_scales
from srv.planning.ledger import (
    BUFFERS,
    CAPTURED_INPUTS,
    CAPTURED_LOGITS,
    GRAPHS,
    POOL,
    PREPARED,
    RUNTIME,
    STATES,
    WEIGHTS,
)
from srv.planning.pools import cache_specs, kv_dtype
from srv.planning.states import state_specs
from srv.planning.steps import draft_count, rows_to_capture
from srv.platform import numa, registry
from srv.platform.contract import create_platform, join
from srv.platform.interface import AttentionBackend, BackendContext, Communicator, KVBuffers, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.platform.pools import allocate_pool
from srv.platform.transfers import Transfers
from srv.sample.custom import CustomProcessors
from srv.sample.late_mask import LateMasks
from srv.sample.pooling import Pooler
from srv.sample.processors import LogitsProcessor
from srv.sample.sampler import Sampler
from srv.sample.state import SamplerState
from srv.sample.third_party import processors
from srv.sched.late import LateInputs
from srv.sched.plan import Plan
from srv.specs import AttentionLayer, KVLayout, cache_places
from srv.speculative.algorithm import DraftSizes
from srv.worker.build_drafting import drafting, step_seconds
from srv.worker.calculated_scales import ScaleSteps
from srv.worker.capture import StartReport, capture_pieces, capture_steps
from srv.worker.chosen_backends import ChosenBackends, chosen_ops, prepare_latent
from srv.worker.compiled import compile_steps
from srv.worker.expert_counts import make_recorder
from srv.worker.graphs import CapturedSteps
from srv.worker.kernels import attention_kernels, method_name, model_kernels, sampling_kernels, step_kernels
from srv.worker.layer_check import LayerCheck
from srv.worker.markers import mark_modules
from srv.worker.module_calls import module_calls
from srv.worker.offload import HostWeights
from srv.worker.pieces import PiecewiseSteps
from srv.worker.pooled import DenseLayers, finishes
from srv.worker.profiler import RankProfiler
from srv.worker.progress import LoadProgress
from srv.worker.runner import Runner
from srv.worker.slots import Slots
from srv.worker.start import RankStart
from srv.worker.states import RecurrentStates

NO_RECORDER = "the server was started without --expert-distribution-recorder-mode"
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
        self._state_specs = state_specs(self._config, spec.model)
        self._scales = configured_scales(self._config, spec.model, group.rank)
        self._backends = ChosenBackends(spec)
        self._weight_bytes = 0
        self._kernels: list[tuple[str, str]] = []  # as `Allocation.kernels`
        self.start = RankStart(spec, self._config)
        self._profiler = RankProfiler(group.rank)

    def load(self) -> None:
        spec, group = self._spec, self._group
        context = self._context()
        if context.numa_node is not None:
            numa.bind_process(context.numa_node)  # before torch and the platform start their threads
        found = registry.find_platforms()[spec.platform]  # the API process has found it before
        with self.start.phase("device", RUNTIME, does="loading libraries"):
            self.platform = create_platform(found, context)
            self.platform.init_worker(group.rank)
            self.device = self.platform.device(context.device_index)
            self._transfers = Transfers(self.platform, self.device)
        if group.size > 1:
            with self.start.phase("ranks", RUNTIME):
                self._communicator = join(self.platform, group)
        self.start.attach(self.platform, self.device, found.loaded.facts.capabilities(spec.device))
        before = self.start.use()
        invariant = self._config.schedule.enable_deterministic_inference
        ops = chosen_ops(spec, self._config, self.platform.ops)
        with self.start.phase("weights", WEIGHTS, self._read_seconds(), "converting weights and building layers"):
            streams = self._transfers.streams
            host = HostWeights.of(self._config, spec.model, self.platform.staging, self.device, streams)
            self.model = self._load_model(ops, host)
            host.move()
            pooled = self._config.model.is_embedding
            self._dense = DenseLayers(spec.model, self.device, invariant) if pooled else None
        self._weight_bytes = self.model.loaded_bytes() - host.saved + (self._dense.bytes if self._dense else 0)
        self.start.ledger.measure(WEIGHTS, self._weight_bytes)
        with self.start.phase("prepare", PREPARED, does="repacking weights"):
            self.platform.post_load(self.model)
            host.fetch_for_kernels()
        self.start.measure_growth(PREPARED, before)
        self._kernels = list(model_kernels(self.model, ops, method_name(self._config, spec.model)))
        if self._config.observe.enable_layer_markers:
            self._mark_layers()
        self._calls = module_calls(self._config.debug, self.model, group.rank)
        for slot, (name, target) in spec.backends.items():
            logger.debug("%s: %s (%s)", slot, name, target or "ops of the platform")

    def _context(self) -> EngineContext:
        """What the platform is created from. The process has been bound to a NUMA node before, if it is to be."""
        spec, rank, platform = self._spec, self._group.rank, self._config.platform
        node = node_of(platform.numa_node, rank)
        return EngineContext(
            spec.device,
            local_rank=rank,
            options=spec.options,
            local_ranks=self._group.size,
            device_index=device_index(platform.base_device_id, platform.device_id_step, rank),
            numa_node=node,
            node_ranks=self._group.size if platform.numa_node is None else platform.numa_node.count(node),
        )

    def _mark_layers(self) -> None:
        capabilities = registry.find_platforms()[self._spec.platform].loaded.facts.capabilities(self._spec.device)
        device_range = self.platform.profiler_range if "profiler_ranges" in capabilities else None
        count = mark_modules(self.model, device_range)
        where = "traces of this server and for the device's profiler" if device_range else "traces of this server"
        logger.info("%d modules are marked in %s", count, where)

    def _load_model(self, ops: Ops, host: HostWeights) -> CausalLM:
        spec, model, weights = self._spec, self._config.model, self._config.weights
        with LoadProgress(spec.model.name, bar=self._group.rank == 0) as progress:
            return build_model(
                spec.model,
                ops=ops,
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
                state_places=cache_places(self._state_specs),
                check_layers=self._check_layers,
                layer_made=host.place,
                reading=reading_of(weights),
                loaders=weights.custom_weight_loader,
                context_length=model.context_length,
            )

    def _read_seconds(self) -> tuple[float, str] | None:
        """How long the weights of this rank take to be read; None if they are random, or not read from files."""
        model, path = self._spec.model, Path(self._spec.model.path)
        if self._config.model.load_format == "dummy" or self._config.weights.custom_weight_loader:
            return None
        offered = [each.name for each in path.glob("*.safetensors")]
        files = [path] if path.is_file() else [path / name for name in weight_files(path, offered)]
        return read_seconds(files, int(model.weight_bytes * rank_share(model, self._group.size)))

    def _check_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Refuse a model with a layer that a chosen backend cannot compute. The backends get pools of one page."""
        page, rows = self._config.memory.page_size, self._config.schedule.max_running_requests
        pools = [allocate_pool(self.platform, layout, 1) for layout in self._layouts([page] * len(self._cache_specs))]
        check = LayerCheck(self._spec.platform, self._spec.model)
        contexts = [BackendContext(self.platform, self.device, kv, rows, self._transfers) for kv in pools]
        chosen = {self._spec.backends[slot]: slot for slot in ATTENTION_SLOTS}
        for (name, _), slot in chosen.items():
            argument = slot if len(chosen) > 1 else "attention_backend"
            check.require(layers, argument, name, [self._backends.attention_of(slot, context) for context in contexts])

    def measure(self) -> RankMemory:
        memory = self.platform.memory(self.device)
        return RankMemory(str(self.device), memory.free, memory.total, self._weight_bytes)

    def _sampler_state(self, late: LateMasks | None) -> SamplerState:
        rows, model = self._config.schedule.max_running_requests, self._spec.model
        extra: list[LogitsProcessor] = [*self._custom(), *([late] if late else [])]
        return SamplerState(rows, model.vocab_size, frozenset(model.end_tokens), self._transfers, extra=extra)

    def _custom(self) -> tuple[CustomProcessors, ...]:
        if not self._config.server.enable_custom_logit_processor:
            return ()
        return (CustomProcessors(processors(), self._spec.model.vocab_size, self.device),)

    def _pooler(self) -> Pooler:
        dtype = torch_dtype(self._config.model.dtype)
        own = finishes(self.model, self._dense, dtype) if self._dense else {}
        return Pooler(self._transfers, own)

    def allocate(self, budget: Budget) -> Allocation:
        config, model, rows = self._config, self._spec.model, self._config.schedule.max_running_requests
        transfers = self._transfers
        context = BackendContext(self.platform, self.device, None, rows, transfers)
        self.start.expect(budget)
        if config.weights.calculate_kv_scales:
            with self.start.phase("scales", ACTIVATIONS, does="running steps"):
                self._scales = self._calculated_scales(context, budget)
        with self.start.phase("pool", POOL):
            pools, state_pools = self._allocate_pools(budget)
        self._recorder = make_recorder(self.model, config.experts, self.device)
        captured_rows = max(rows_to_capture(config), default=0)
        states = RecurrentStates(state_pools, transfers, captured_rows) if state_pools else None
        self.start.ledger.measure(POOL, sum(map(_bytes, pools)))
        if states is not None:
            self.start.ledger.measure(STATES, sum(map(_bytes, state_pools)))
        max_pages = [group.pages_for(budget.max_request_tokens) for group in budget.groups]
        late = LateMasks(model.vocab_size, transfers) if self._spec.late_inputs else None
        with self.start.phase("backends", BUFFERS, does="loading kernels"), self.start.growth(BUFFERS):
            sampling = replace(context, max_rows=rows * (1 + draft_count(config)))
            state = self._sampler_state(late)
            chosen_sampler = self._backends.construct("sampling_backend", sampling)
            attention = [self._backends.attention(replace(context, kv=kv)) for kv in pools]
            prepare_latent(self.model, attention)
            slots = Slots(rows, max_pages, transfers)
        if self._communicator is not None:
            self._communicator.barrier()  # capturing runs steps, and the ranks have to begin together
        every_step = [backend for backend, _ in attention]
        with self.start.phase("compile", GRAPHS, does="compiling"):
            compiled, compile_report = compile_steps(config, self.model, every_step, transfers)
        decode = [backend for _, backend in attention]
        with self.start.phase("capture", GRAPHS, does="compiling kernels and recording steps"):
            pieces, piece_report, captured, capture_report = self._capture(decode, max_pages, states)
        self.runner = Runner(
            model=self.model,
            attention=every_step,
            sampler=Sampler(chosen_sampler, state),
            slots=slots,
            transfers=transfers,
            captured=captured,
            compiled=compiled,
            pieces=pieces,
            late=late,
            states=states,
            drafting=drafting(config, DraftSizes(rows, budget.max_request_tokens, model.vocab_size), transfers),
            pooler=self._pooler(),
            experts=self._recorder,
        )
        kernels = (
            *self._kernels,
            *attention_kernels(self._spec.backends, attention, self._spec.latent_backends),
            *sampling_kernels(self._spec.backends, chosen_sampler),
            *step_kernels(captured, compiled, pieces),
        )
        report = (*compile_report, *piece_report, *capture_report)
        with self.start.phase("step times", ACTIVATIONS, does="running steps"):
            seconds = self._step_seconds(captured.rows if captured and late and not compiled else ())
        if self._recorder is not None and config.experts.enable_expert_distribution_metrics:
            self._recorder.measure_load()
        self.start.complete()
        ledger, phases = self.start.ledger.lines, self.start.phases.done
        pool_bytes = sum(map(_bytes, (*pools, *state_pools)))
        return Allocation(pool_bytes, report, seconds, ledger, phases, kernels, self.start.counts_peak)

    def _calculated_scales(self, context: BackendContext, budget: Budget) -> ScaleSource:
        layouts = self._layouts([group.page_size for group in budget.groups])
        steps = ScaleSteps(self._config, self._spec.model, self.model, layouts, self._communicator)
        return steps.scales(context, self._backends, budget.max_request_tokens)

    def _step_seconds(self, captured: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """`Allocation.step_seconds`. `captured`: the row counts of captured steps, if grammars may force tokens."""
        drafts, rows = draft_count(self._config), self._config.schedule.max_running_requests
        if drafts:
            return step_seconds(self.runner.seconds, drafts, rows)
        return step_seconds(partial(self.runner.seconds, repeats=3), 0, rows, captured)

    def _allocate_pools(self, budget: Budget) -> tuple[list[KVBuffers], list[KVBuffers]]:
        """The pools of cache groups, and those of recurrent states."""
        layouts = self._layouts([group.page_size for group in budget.groups])
        paged = zip(layouts, budget.groups, strict=True)
        states = [KVLayout(group, 1, kv_dtype(self._config)) for group in self._state_specs]
        return (
            [allocate_pool(self.platform, layout, group.pages) for layout, group in paged],
            [allocate_pool(self.platform, layout, budget.state_slots) for layout in states],
        )

    def _capture(
        self, decode: Sequence[AttentionBackend], max_pages: Sequence[int], states: RecurrentStates | None
    ) -> tuple[PiecewiseSteps | None, StartReport, CapturedSteps | None, StartReport]:
        """Capture pieces and steps, as configured, with what they report."""
        config, platform, rank, ledger = self._config, self.platform, self._group.rank, self.start.ledger
        before = self.start.use()
        # Before the steps of few rows, which then reuse the memory of these.
        pieces, piece_report = capture_pieces(config, platform, self.model, self.device, rank)
        if pieces is not None:
            self.start.measure_growth(PIECES, before)
            before = self.start.use()
        captured, report = capture_steps(
            config,
            platform,
            self.model,
            decode,
            pages=max_pages,
            vocab_size=self._spec.model.vocab_size,
            transfers=self._transfers,
            rank=rank,
            states=states,
        )
        if captured is not None:
            logits, inputs = captured.buffer_bytes
            ledger.measure(CAPTURED_LOGITS, logits)
            ledger.measure(CAPTURED_INPUTS, inputs)
            self.start.measure_growth(GRAPHS, before, logits + inputs)
        return pieces, piece_report, captured, report

    def _layouts(self, page_sizes: Sequence[int]) -> list[KVLayout]:
        """The layout of each cache group, whose pages have these sizes."""
        dtype, order = kv_dtype(self._config), self._spec.kv_order
        scales = [self._scales.of(group.layers) for group in self._cache_specs]
        sizes = zip(self._cache_specs, page_sizes, scales, strict=True)
        return [KVLayout(group, size, dtype, order, each) for group, size, each in sizes]

    # A thread of its own may launch steps, and the current device is that of a thread: `use` selects it.

    def launch(self, plan: Plan) -> Launched | None:
        try:
            with self._transfers.streams.compute.use():
                if self._calls is None:
                    return self.runner.launch(plan)
                with self._calls.step(plan):
                    return self.runner.launch(plan)
        except Exception as error:
            self.start.explain(ACTIVATIONS, error)
            raise

    def sample(self, step: int, late: LateInputs) -> Launched:
        try:
            with self._transfers.streams.compute.use():
                return self.runner.sample(step, late)
        except Exception as error:
            self.start.explain(ACTIVATIONS, error)
            raise

    def control(self, command: Command) -> Answer:
        if isinstance(command, ReadMemory):
            return Answer(peak_bytes=self.start.peak_of_steps())
        if isinstance(command, StartProfile | StopProfile):
            return self._profiler.run(command)
        return Answer(error=NO_RECORDER) if self._recorder is None else self._recorder.run(command)

    def close(self) -> None:
        """Leave the group. Only ranks in processes of their own need it."""
        if self._communicator is not None:
            self._communicator.abort()


def _bytes(kv: KVBuffers) -> int:
    return sum(tensor.nbytes for tensor in kv.all())
