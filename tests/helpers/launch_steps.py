"""What a launch refuses before it reads weights, by its own steps: none of them asks `srv.planning.launchable`.

A launch on absent hardware would always be refused, so the device's facts are injected, and its own steps run up to the
weights: resolution, the spec of the engine, the worker's cache groups, and `srv.models.build`, whose layers are made on
the device "meta" with the ops of the platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from srv.args.statement import UserInput
from srv.dist.group import RankGroup
from srv.errors import Refusal, startup_failure
from srv.executor.spec import EngineSpec, engine_spec
from srv.models.base import torch_dtype
from srv.models.build import build
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.layer_options import layer_options
from srv.planning.pools import cache_specs
from srv.planning.resolution import LaunchContext, resolve_arguments
from srv.planning.target import Target
from srv.platform.interface import OpImpl
from srv.platform.layers import missing_traits
from srv.platform.ops import Ops, implementations
from srv.platform.registry import find_platforms
from srv.specs import AttentionLayer, ModelFacts
from srv.worker.layer_check import LayerCheck


class ReachedWeightsError(Exception):
    """A launch that would now read weights."""


def launch_codes(user: UserInput, target: Target) -> set[str]:
    """The codes of the refusals of a launch's own steps, none of which asks `srv.planning.launchable`."""
    if user.rejections:
        return {rejection.code for rejection in user.rejections}
    try:
        facts = read_facts(Path(user.value("model_path")))
        resolved = resolve_arguments(user, target, facts)
        context = LaunchContext(target.manifest, target.device, facts, resolved, target.reason, ())
        spec = engine_spec(context, "", "")
        cache_specs(resolved.config, facts)
        build_up_to_weights(context, spec)
    except ReachedWeightsError:
        return set()
    except Refusal as refusal:
        return {rejection.code for rejection in refusal.rejections}
    except Exception as error:  # noqa: BLE001 - what an engine process reports
        lines, status = startup_failure(error)
        assert status == 2, lines
        return {line.rpartition("[")[2].rstrip("]") for line in lines}
    raise AssertionError("weights were read")


def build_up_to_weights(context: LaunchContext, spec: EngineSpec) -> None:
    config = context.resolved.config
    ranks = config.parallel.tp_size
    build_context = BuildContext(
        torch.device("meta"),
        torch_dtype(config.model.dtype),
        Ops(context.platform, ops_of(context.platform)),
        RankGroup(rank=ranks - 1, size=ranks, directory="/nowhere"),
    )
    build(context.model, layer_options(config), build_context, check_layers=partial(check_layers, context.model, spec))


def check_layers(facts: ModelFacts, spec: EngineSpec, layers: Sequence[AttentionLayer]) -> None:
    """The worker's question to its attention backends, which answer by what their specs declare."""
    offered = find_platforms()[spec.platform].loaded.facts.backends["attention"]
    for slot in ATTENTION_SLOTS:
        name = spec.backends[slot][0]
        traits = next(spec.layer_traits for spec in offered if spec.name == name)
        backend: Any = SimpleNamespace(supports=partial(missing_traits, traits))
        LayerCheck(spec.platform, facts).require(layers, slot, name, [backend] * len(facts.cache_groups))
    raise ReachedWeightsError


@cache
def ops_of(platform: str) -> tuple[OpImpl, ...]:
    """The ops that a platform has on its hardware, which it lists without it."""
    if platform == "cpu":
        from srv_cpu.ops import OPS

        return tuple(OPS)
    facts = find_platforms()[platform].loaded.facts
    device = next(iter(facts.profiles.values()))
    if platform == "npu":
        from srv_npu.ops import Operators
        from srv_npu.ops import implementations as npu_implementations

        return npu_implementations(Operators(_no_sdk), device)
    # A layer imports the functions that it binds; those of GPUs need Triton, which may not be installed.
    return tuple(replace(implementation, target=_no_sdk) for implementation in implementations(facts.ops, device))


def _no_sdk() -> Any:
    raise AssertionError("nothing is computed")
