"""The methods with FP8 weights, as data. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from srv.dtypes import FLOATS
from srv.quantization.formats import fp8, fp8_configs, online
from srv.quantization.method import QuantMethod
from srv.quantization.schemes import SCALE, Fp8

if TYPE_CHECKING:
    from srv.specs import ModelFacts

ONLINE = "fp8wo"
_SHARDING = "weights quantized to FP8 cannot be sharded yet"


def accepts(model: ModelFacts) -> str | None:
    """Why the weights of a checkpoint that names no method are neither FP8, nor can be quantized at load."""
    others = sorted(model.stored_types.keys() - FLOATS - {fp8.DTYPE})
    return f"some of its weights are stored as {others[0]}" if others else None


def _at_load(model: ModelFacts) -> str | None:
    return None if fp8.DTYPE in model.stored_types else ONLINE


def _of_form(name: str, model: ModelFacts) -> QuantMethod:
    """With what the configuration says of inputs."""
    method, scheme = _METHODS[name], fp8_configs.scheme_or_reason(Path(model.path), model.config)
    return method if isinstance(scheme, str) else method._replace(fp8_inputs=scheme.inputs)


METHOD = QuantMethod(
    name=fp8_configs.FP8,
    storage="srv.quantization.formats.fp8_storage:Fp8StorageFormat",
    ops=("linear_fp8",),
    detect=partial(fp8_configs.detect, fp8_configs.FP8),
    accepts=accepts,
    sharding=_SHARDING,
    schemes=fp8.schemes,
    stored=fp8_configs.stored,
    row_tensors=("weight", SCALE),
    row_block=fp8.row_block,
    up_projections=True,
    fused_experts=True,
    at_load=_at_load,
    of_form=partial(_of_form, fp8_configs.FP8),
    note=fp8.NOTE,
)
FBGEMM_METHOD, MODELOPT_METHOD = (
    METHOD._replace(
        name=name,
        detect=partial(fp8_configs.detect, name),
        accepts=None,
        at_load=None,
        stored=None,
        of_form=partial(_of_form, name),
    )
    for name in (fp8_configs.FBGEMM, fp8_configs.MODELOPT)
)
_METHODS: Mapping[str, QuantMethod] = MappingProxyType(
    {each.name: each for each in (METHOD, FBGEMM_METHOD, MODELOPT_METHOD)}
)
FP8WO = QuantMethod(
    name=ONLINE,
    storage="srv.quantization.formats.online_storage:OnlineFp8StorageFormat",
    ops=("linear_fp8",),
    sharding=_SHARDING,
    online=True,
    schemes=partial(online.schemes, Fp8()),
)
