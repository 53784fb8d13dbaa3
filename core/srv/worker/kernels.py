"""What a rank has bound: the names that a kernel plan gives (`srv.planning.kernels`), read off the live objects.

Must not know the plan: what is reported here is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from srv.args.config import Config
from srv.models.base import CausalLM, NativeModel
from srv.models.layers.embedding import Embedding
from srv.models.layers.experts import Experts, ExpertWeights
from srv.models.layers.linear import Linear
from srv.models.layers.op_layer import op_layers
from srv.planning.kernel import (
    ATTENTION_SLOTS,
    DEQUANTIZED,
    LAYERS,
    SAMPLING,
    SAMPLING_SLOT,
    WEIGHTS,
    attention_key,
    layers_name,
    logits_key,
    write_key,
)
from srv.planning.kernel_steps import DECODE_STEPS, PROMPT_STEPS, decode_name, prompt_name
from srv.platform.interface import AttentionBackend, NamesWriter
from srv.platform.op_choice import op_key
from srv.platform.ops import Ops
from srv.quantization.registry import chosen as chosen_method
from srv.specs import ModelFacts
from srv.worker.attention import SplitAttention
from srv.worker.compiled import CompiledSteps
from srv.worker.graphs import CapturedSteps
from srv.worker.pieces import PiecewiseSteps

_OF_WEIGHTS = ("linear", "rows_", "embedding", "experts")  # ops of layers that a platform may give another kernel


def method_name(config: Config, model: ModelFacts) -> str | None:
    """The quantization method of the checkpoint, or by which it is quantized at load; None for unquantized weights."""
    weights = config.weights
    method = chosen_method(model, weights.quantization, weights.torchao_config, dequantize=False)
    return None if method is None else method.name


def model_kernels(model: CausalLM, ops: Ops, method: str | None) -> Iterator[tuple[str, str]]:
    """(key, name) of the layers, of their weights and of each op that they call.

    `method`: see `method_name`.
    """
    yield LAYERS, layers_name(native=isinstance(model, NativeModel))
    if method is not None:
        layers = op_layers(model, offloaded=True)
        quantized = any(not isinstance(layer, (Linear, Embedding, Experts)) for layer in layers)
        yield WEIGHTS, method if quantized else DEQUANTIZED
    yield from ((key, name) for key, name in ops.bound.items() if not key.startswith(_OF_WEIGHTS))
    found: dict[str, set[str]] = {}
    for layer in op_layers(model, offloaded=True):
        if layer.delegates:
            continue
        dtype, sizes, kind = str(layer.dtype).removeprefix("torch."), {"inputs": layer.inputs}, type(layer).__name__
        if isinstance(layer, ExpertWeights):
            sizes = layer.sizes.op_sizes
        op = layer.role or layer.op or kind
        key = logits_key(dtype, sizes) if layer.float32_results and not layer.role else op_key(op, dtype, sizes)
        found.setdefault(key, set()).add(layer.implementation or kind)
    yield from ((key, ", ".join(sorted(names))) for key, names in found.items())


def attention_kernels(
    chosen: Mapping[str, tuple[str, str]],
    live: Sequence[tuple[AttentionBackend, AttentionBackend]],
    latent: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str, str]]:
    """Of each cache group, and of what writes its keys and values.

    `live`: of each group, the backend of all steps and that of decode-only steps. `chosen`: names and targets, by slot.
    `latent`: the targets of latent attention.
    """
    for group, (every, decode) in enumerate(live):
        prompts = every.extend if isinstance(every, SplitAttention) else every
        for slot, backend in zip(ATTENTION_SLOTS, (prompts, decode), strict=True):
            name = backend_name(backend, chosen[slot], latent.get(slot, ""))
            yield attention_key(group, slot), name
            yield write_key(slot), backend.kv_writer if isinstance(backend, NamesWriter) else name


def sampling_kernels(chosen: Mapping[str, tuple[str, str]], live: object) -> Iterator[tuple[str, str]]:
    yield SAMPLING, backend_name(live, chosen[SAMPLING_SLOT])


def step_kernels(
    captured: CapturedSteps | None, compiled: CompiledSteps | None, pieces: PiecewiseSteps | None
) -> Iterator[tuple[str, str]]:
    yield DECODE_STEPS, decode_name(compiled.rows if compiled else 0, captured.rows if captured else ())
    yield PROMPT_STEPS, prompt_name(pieces.counts if pieces else ())


def backend_name(live: object, chosen: tuple[str, str], latent: str = "") -> str:
    """The name of a chosen backend, or the class of an object that neither of its targets names."""
    name, target = chosen
    path = f"{type(live).__module__}:{type(live).__qualname__}"
    return name if path in (target, latent) else path
