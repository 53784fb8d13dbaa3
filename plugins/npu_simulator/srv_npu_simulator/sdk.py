"""The simulated module `torch_npu`: its operators by name, and `.npu`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.deep_ep import buffer_class
from srv_npu_simulator.device import Accelerator
from srv_npu_simulator.device.graph import host_integers
from srv_npu_simulator.hccl import process_group_class
from srv_npu_simulator.operators.checks import Rules, check_placement, refuse
from srv_npu_simulator.operators.schemas import LIBRARY, OPERATORS

ND, FRACTAL_NZ = 2, 29

_ATTENTION = "npu_fused_infer_attention_score"
_LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")

# FRACTAL_NZ requires the last two dimensions to be multiples of these.
_ALIGNMENT = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (16, 32)}


class Attention:
    """`npu_fused_infer_attention_score` or its workspace function, with lengths of any host type."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._packet = getattr(getattr(torch.ops, LIBRARY), name)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return self._packet(query, key, value, **with_host_lengths(self._name, options))

    def out(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Sequence[Tensor],
        workspace: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write to `out` = [attention_out, softmax_lse], with a workspace from `_..._get_max_workspace` if given."""
        name = f"{self._name}.out"
        if not isinstance(out, (list, tuple)) or len(out) != 2:
            refuse(name, "out", repr(type(out).__name__), "must be [attention_out, softmax_lse]")
        return self._packet.out(  # type: ignore[no-any-return]
            query,
            key,
            value,
            workspace=workspace,
            attention_out=out[0],
            softmax_lse=out[1],
            **with_host_lengths(name, options),
        )


def with_host_lengths(operator: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with lengths as lists; refuses lengths on the device, and a missing scale."""
    if "scale" not in options:
        refuse(operator, "scale", "not given", "and its default of 1.0 is wrong for nearly every model: pass 1/sqrt(D)")
    lengths = {name: host_integers(operator, name, options[name]) for name in _LENGTHS if name in options}
    return options | lengths


class Sdk:
    """The simulated part of the module torch_npu. Created by `srv_npu_simulator.load`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.npu = accelerator
        groups = SimpleNamespace(ProcessGroupHCCL=process_group_class(accelerator))
        self._C = SimpleNamespace(_distributed_c10d=groups)
        self.deep_ep = SimpleNamespace(Buffer=buffer_class(accelerator))  # on real cards, a module of its own
        self.__version__ = f"{torch.__version__.partition('+')[0]}+simulated"
        for operator in OPERATORS:
            name = operator.name
            if "." not in name:
                setattr(self, name, getattr(getattr(torch.ops, LIBRARY), name))
        self.npu_fused_infer_attention_score = Attention(_ATTENTION)
        self._npu_fused_infer_attention_score_get_max_workspace = Attention(f"_{_ATTENTION}_get_max_workspace")

    def npu_format_cast(self, input: Tensor, acl_format: int) -> Tensor:
        """A copy of `input` in another layout: 2 (ND) or 29 (FRACTAL_NZ). Its values do not change.

        As on the card, it only warns unless `npu.config.allow_internal_format` is set.
        """
        rules = Rules("npu_format_cast")
        check_placement("npu_format_cast", ("self",), (input,), {})
        rules.require(acl_format in (ND, FRACTAL_NZ), "acl_format", acl_format, "must be 2 (ND) or 29 (FRACTAL_NZ)")
        if acl_format == FRACTAL_NZ:
            self._check_fractal(rules, input)
            if not self.npu.config.allow_internal_format:
                warnings.warn(
                    "npu_format_cast: npu.config.allow_internal_format is False, so the tensor stays in ND",
                    stacklevel=2,
                )
                acl_format = ND
        result = input.clone()
        result.untyped_storage().acl_format = acl_format  # type: ignore[attr-defined]
        return result

    def get_npu_format(self, input: Tensor) -> int:
        """The layout of a device tensor: 2 (ND) or 29 (FRACTAL_NZ)."""
        check_placement("get_npu_format", ("self",), (input,), {})
        return getattr(input.untyped_storage(), "acl_format", ND)

    def _check_fractal(self, rules: Rules, input: Tensor) -> None:
        rules.dtype("self", input, tuple(_ALIGNMENT))
        described = f"of shape {tuple(input.shape)}"
        rules.require(input.dim() >= 2, "self", described, "must have at least 2 dimensions for FRACTAL_NZ")
        rows, columns = _ALIGNMENT[input.dtype]
        aligned = input.shape[-2] % rows == 0 and input.shape[-1] % columns == 0
        rule = f"FRACTAL_NZ needs its last dimensions to be multiples of {rows} and {columns} for {input.dtype}"
        rules.require(aligned, "self", described, rule)
