"""Loads one rank: platform and device first, which are quick to fail, then the communicator and the model.

Owns the order of a rank's start up to its weights. Must not know the memory budget, which follows from what all ranks
have measured then (`srv.worker.allocate`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from srv.args.rules.loading import reading_of
from srv.dist.group import RankGroup
from srv.dist.mesh import AXES, Axis, Mesh, all_ranks, mesh_of, rank_on_host
from srv.dist.placing import device_index, node_of
from srv.executor.spec import EngineSpec
from srv.io.phases import read_seconds
from srv.models.base import CausalLM, torch_dtype
from srv.models.build import build
from srv.models.checkpoints.safetensors_header import weight_files
from srv.models.facts.sharding import rank_share
from srv.models.layers.context import BuildContext, JoinedGroup
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.layer_options import layer_options
from srv.planning.ledger import PREPARED, RUNTIME, WEIGHTS
from srv.platform import numa, registry
from srv.platform.contract import create_platform, join
from srv.platform.interface import BackendContext, Communicator, Platform
from srv.platform.manifest import EngineContext
from srv.platform.pools import allocate_pool
from srv.platform.transfers import Transfers
from srv.specs import AttentionLayer, cache_places
from srv.worker.chosen_backends import ChosenBackends, chosen_ops
from srv.worker.kernels import method_name, model_kernels
from srv.worker.layer_check import LayerCheck
from srv.worker.markers import mark_modules
from srv.worker.offload import HostWeights
from srv.worker.pool_layouts import PoolLayouts
from srv.worker.pooled import DenseLayers
from srv.worker.progress import LoadProgress
from srv.worker.start import RankStart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank whose weights are on its device.

    `context`: what backends are made from, without a pool. `groups`: those that this rank has joined; none of a single
    rank. `dense`: of an embedding model. `weight_bytes`: on the device. `kernels`: of the model, as those of
    `Allocation`.
    """

    spec: EngineSpec
    group: RankGroup
    context: BackendContext
    groups: Mapping[Axis, JoinedGroup]
    backends: ChosenBackends
    layouts: PoolLayouts
    model: CausalLM
    dense: DenseLayers | None
    weight_bytes: int
    kernels: tuple[tuple[str, str], ...]

    @property
    def platform(self) -> Platform:
        return self.context.platform

    @property
    def communicator(self) -> Communicator | None:
        """That of all ranks; None for one rank."""
        return self.groups["tensor"].communicator if self.groups else None

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def transfers(self) -> Transfers:
        return self.context.transfers


def load(spec: EngineSpec, group: RankGroup, start: RankStart) -> LoadedRank:
    """Open the device and load this rank's part of the weights.

    Raises ModelError, PluginError, PlatformUnavailable and OutOfMemory.
    """
    config, made_from = spec.config, _engine_context(spec, group)
    if made_from.numa_node is not None:
        numa.bind_process(made_from.numa_node)  # before torch and the platform start their threads
    plugin = registry.find_platforms()[spec.platform]  # the API process has found it before
    capabilities = plugin.loaded.facts.capabilities(spec.device)
    layouts = PoolLayouts.of(spec, mesh_of(config.get).group("heads", group).rank)
    with start.phase("device", RUNTIME, does="loading libraries"):
        platform = create_platform(plugin, made_from)
        platform.init_worker(made_from.local_rank)
        device = platform.device(made_from.device_index)
        transfers = Transfers(platform, device)
    joined: dict[Axis, JoinedGroup] = {}
    try:
        if group.size > 1:
            with start.phase("ranks", RUNTIME):
                join_groups(platform, capabilities, mesh_of(config.get), group, joined)
        communicator = joined["tensor"].communicator if joined else None
        start.attach(platform, device, capabilities)
        context = BackendContext(platform, device, None, config.schedule.max_running_requests, transfers)
        before, backends, ops = start.use(), ChosenBackends(spec), chosen_ops(spec, config, platform.ops)
        with start.phase("weights", WEIGHTS, _read_seconds(spec, group), "converting weights and building layers"):
            host = HostWeights.of(config, spec.model, platform.staging, device, transfers.streams)
            dtype, paged, states = torch_dtype(config.model.dtype), *map(cache_places, (layouts.groups, layouts.states))
            made = BuildContext(device, dtype, ops, group, communicator, paged, states, host.place, joined)
            model = load_model(spec, made, partial(_check_layers, spec, backends, layouts, context))
            host.move()
            invariant = config.schedule.enable_deterministic_inference
            dense = DenseLayers(spec.model, device, invariant) if config.model.is_embedding else None
        weight_bytes = model.loaded_bytes() - host.saved + (dense.bytes if dense else 0)
        start.ledger.measure(WEIGHTS, weight_bytes)
        with start.phase("prepare", PREPARED, does="repacking weights"):
            platform.post_load(model)
            host.fetch_for_kernels()
        start.measure_growth(PREPARED, before)
        kernels = tuple(model_kernels(model, ops, method_name(config, spec.model)))
        if config.observe.enable_layer_markers:
            _mark_layers(platform, model, "profiler_ranges" in capabilities)
        for slot, (name, target) in spec.backends.items():
            logger.debug("%s: %s (%s)", slot, name, target or "ops of the platform")
        return LoadedRank(spec, group, context, joined, backends, layouts, model, dense, weight_bytes, kernels)
    except BaseException:
        leave_groups(joined)
        raise


def join_groups(
    platform: Platform,
    capabilities: Collection[str],
    mesh: Mesh,
    group: RankGroup,
    joined: dict[Axis, JoinedGroup],
) -> None:
    """Meet the other ranks of the group of all ranks, and those of this rank along each axis that divides layers.

    All ranks meet in the same order. Groups of the same ranks share a communicator. `joined` gets each group as soon
    as it has met, so that those which have can be left if another one fails.
    """
    made: dict[tuple[int, ...], Communicator | None] = {}
    for axis in AXES:
        members, own = mesh.members(axis, group.rank), mesh.group(axis, group)
        if members not in made:
            made[members] = join(platform, own, capabilities) if len(members) > 1 else None
        joined[axis] = JoinedGroup(own, made[members])


def leave_groups(joined: Mapping[Axis, JoinedGroup]) -> None:
    """Groups of the same ranks share a communicator, which is aborted once."""
    for communicator in {id(group.communicator): group.communicator for group in joined.values()}.values():
        if communicator is not None:
            communicator.abort()


def _engine_context(spec: EngineSpec, group: RankGroup) -> EngineContext:
    """What the platform is created from. The process has been bound to a NUMA node before, if it is to be."""
    platform = spec.config.platform
    rank, ranks = rank_on_host(spec.config.get, spec.replica, group), all_ranks(spec.config.get)
    node = node_of(platform.numa_node, rank)
    return EngineContext(
        spec.device,
        local_rank=rank,
        options=spec.options,
        local_ranks=ranks,
        device_index=device_index(platform.base_device_id, platform.device_id_step, rank),
        numa_node=node,
        node_ranks=ranks if platform.numa_node is None else platform.numa_node.count(node),
    )


def load_model(spec: EngineSpec, context: BuildContext, check: Callable[[Sequence[AttentionLayer]], None]) -> CausalLM:
    config = spec.config
    with LoadProgress(spec.model.name, bar=context.group.rank == 0) as progress:
        return build(
            spec.model,
            layer_options(config),
            context,
            seed=config.model.random_seed or 0,
            progress=progress,
            check_layers=check,
            reading=reading_of(config.weights),
            context_length=config.model.context_length,
        )


def _read_seconds(spec: EngineSpec, group: RankGroup) -> tuple[float, str] | None:
    """How long the weights of this rank take to be read; None if they are random, or not read from files."""
    model, path = spec.model, Path(spec.model.path)
    if spec.config.model.load_format == "dummy" or spec.config.weights.custom_weight_loader:
        return None
    files = [path]
    if not path.is_file():
        files = [path / name for name in weight_files(path, [each.name for each in path.glob("*.safetensors")])]
    return read_seconds(files, int(model.weight_bytes * rank_share(model, mesh_of(spec.config.get))))


def _check_layers(
    spec: EngineSpec,
    backends: ChosenBackends,
    layouts: PoolLayouts,
    context: BackendContext,
    layers: Sequence[AttentionLayer],
) -> None:
    """Refuse a model with a layer that a chosen backend cannot compute. The backends get pools of one page."""
    paged = layouts.paged([spec.config.memory.page_size] * len(layouts.groups))
    contexts = [replace(context, kv=allocate_pool(context.platform, layout, 1)) for layout in paged]
    check, chosen = LayerCheck(spec.platform, spec.model), {spec.backends[slot]: slot for slot in ATTENTION_SLOTS}
    for (name, _), slot in chosen.items():
        argument = slot if len(chosen) > 1 else "attention_backend"
        check.require(layers, argument, name, [backends.attention_of(slot, each) for each in contexts])


def _mark_layers(platform: Platform, model: CausalLM, on_device: bool) -> None:
    count = mark_modules(model, platform.profiler_range if on_device else None)
    where = "traces of this server and for the device's profiler" if on_device else "traces of this server"
    logger.info("%d modules are marked in %s", count, where)
