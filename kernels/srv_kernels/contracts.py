"""Contracts that every implementation of an op must satisfy.

There is one `OpContract` per op: its signature, the sizes it is bound with, its dtypes, tolerances by dtype, the
float64 oracle, and a generator of ordinary and adversarial cases (`srv_kernels.cases`). Contracts do not depend on a
device; `violations` runs an implementation on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from srv_kernels import expert_oracles, oracles, recurrent_oracles, sizes
from srv_kernels.cases import (
    Case,
    add_rms_norm_cases,
    gelu_tanh_and_mul_cases,
    linear_float32_cases,
    linear_fp8_cases,
    linear_gguf_cases,
    linear_w8a8_static_cases,
    rms_norm_cases,
    rotary_cases,
    rows_gguf_cases,
    scaled_linear_cases,
    silu_and_mul_cases,
)
from srv_kernels.expert_cases import (
    experts_cases,
    experts_fp8_cases,
    experts_gguf_cases,
    experts_int8_cases,
    route_experts_cases,
)
from srv_kernels.recurrent_cases import (
    causal_conv1d_cases,
    gated_delta_rule_cases,
    gated_linear_recurrence_cases,
    selective_scan_cases,
    state_space_scan_cases,
)
from srv_kernels.tolerances import (
    DTYPES,
    FLOAT16_SCALES,
    FLOAT32_SUMS,
    QUANTIZED_INPUTS,
    QUANTIZED_ROWS,
    RECURRENT_SUMS,
    TWO_PRODUCTS,
    TWO_QUANTIZED_PRODUCTS,
    TWO_ROUNDINGS,
    Tolerance,
)


@dataclass(frozen=True)
class OpContract:
    """The contract of an op.

    signature: shapes and dtypes, for documentation. sizes: names of the sizes that an implementation is selected by.
    measure: the sizes of a call, in this order, from its arguments (`srv_kernels.sizes`). oracle: float64 results.
    cases: dtype and seed -> calls. reference: "module:function" of the plain-torch implementation. result: the dtype of
    the results, or of each of them, by default the model's; if it is a wider one, results must not have been rounded to
    the model's. Integers must be equal. Implementations do not modify their arguments, and accept rows that are views
    into wider matrices.
    """

    name: str
    signature: str
    sizes: tuple[str, ...]
    measure: Callable[..., tuple[int, ...]]
    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    cases: Callable[[torch.dtype, int], Iterator[Case]]
    tolerances: Mapping[torch.dtype, Tolerance]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    reference: str = field(default="")
    result: torch.dtype | tuple[torch.dtype, ...] | None = None

    def sizes_of(self, case: Case) -> dict[str, int]:
        """The sizes of a call, by name."""
        return dict(zip(self.sizes, self.measure(*case.args), strict=True))


_EXPERT_SIZES = ("hidden", "intermediate", "experts", "top_k")


def _contract(
    oracle: Callable[..., Tensor | tuple[Tensor, ...]],
    cases: Callable[[torch.dtype, int], Iterator[Case]],
    signature: str,
    sizes: tuple[str, ...],
    measure: Callable[..., tuple[int, ...]],
    tolerances: Mapping[torch.dtype, Tolerance],
    result: torch.dtype | tuple[torch.dtype, ...] | None = None,
    module: str = "reference",
) -> OpContract:
    """The contract of an op, which has the same name as its oracle and its reference implementation (in `module`)."""
    name = oracle.__name__
    reference = f"srv_kernels.{module}:{name}"
    return OpContract(name, signature, sizes, measure, oracle, cases, tolerances, reference=reference, result=result)


CONTRACTS: Mapping[str, OpContract] = {
    contract.name: contract
    for contract in (
        _contract(
            oracles.rms_norm,
            rms_norm_cases,
            signature="(x [..., D], weight [D], eps: float) -> [..., D]; all of the model's dtype",
            sizes=("dim",),
            measure=sizes.last_axis,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.add_rms_norm,
            add_rms_norm_cases,
            signature="(x [..., D], residual [..., D], weight [D], eps: float) -> (norm of residual + x, residual + x)",
            sizes=("dim",),
            measure=sizes.last_axis,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.rotary,
            rotary_cases,
            signature="(q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T]) -> (q', k'); "
            "cos_sin has R/2 cosines, then R/2 sines; pairs are (i, i + R/2); elements from R on are unchanged",
            sizes=("head_dim", "rotary_dim"),
            measure=sizes.rotary,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.silu_and_mul,
            silu_and_mul_cases,
            signature="(x [..., 2 I]) -> [..., I]: silu of the first half times the second",
            sizes=("dim",),
            measure=sizes.half_of_last_axis,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.gelu_tanh_and_mul,
            gelu_tanh_and_mul_cases,
            signature="(x [..., 2 I]) -> [..., I]: gelu (its tanh approximation) of the first half times the second",
            sizes=("dim",),
            measure=sizes.half_of_last_axis,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.linear_w8a8,
            scaled_linear_cases,
            signature="(x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] as x | None) -> [T, N]; "
            "each row of x is quantized to int8, its largest magnitude to 127",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=QUANTIZED_ROWS,
        ),
        _contract(
            oracles.linear_w8a8_static,
            linear_w8a8_static_cases,
            signature="(x [T, K], weight int8 [N, K], input_scale float32 [1], input_offset float32 [1], "
            "quant_bias int32 [N], deq_scale float32 [N]) -> [T, N]; x / input_scale + input_offset is rounded to int8",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=QUANTIZED_ROWS,
        ),
        _contract(
            oracles.linear_int8,
            scaled_linear_cases,
            signature="(x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] as x | None) -> [T, N]; "
            "x is not quantized",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.linear_fp8,
            linear_fp8_cases,
            signature="(x [T, K], weight float8_e4m3fn [N, K], scale float32 [ceil(N / block_outputs), "
            "ceil(K / block_inputs)], bias [N] as x | None, block_outputs: int, block_inputs: int) -> [T, N]; x is not "
            "quantized, unless it has more than 256 rows and the checkpoint or the user asks for an implementation that"
            " rounds it to float8_e4m3fn; weights are finite; block_inputs is a multiple of 32, or at least K",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=TWO_ROUNDINGS,
        ),
        _contract(
            oracles.linear_gguf,
            linear_gguf_cases,
            signature="(x [T, K], rows uint8 [N, bytes per row], quant_type: str) -> [T, N]; rows are those of a GGUF "
            "file quantized as `quant_type`; x may be quantized to 8 bits; NF4 and FP4 are types of bitsandbytes, in "
            "blocks of 64 (`oracles.TABLES`)",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=QUANTIZED_INPUTS,
        ),
        _contract(
            oracles.linear_float32,
            linear_float32_cases,
            signature="(x [T, K], weight [N, K] as x) -> float32 [T, N]: the sums, for logits",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=FLOAT32_SUMS,
            result=torch.float32,
        ),
        _contract(
            oracles.linear_gguf_float32,
            linear_gguf_cases,
            signature="as linear_gguf -> float32 [T, N]: the sums, for logits",
            sizes=("inputs", "outputs"),
            measure=sizes.linear,
            tolerances=QUANTIZED_INPUTS,
            result=torch.float32,
        ),
        _contract(
            recurrent_oracles.causal_conv1d,
            causal_conv1d_cases,
            signature="(x [T, C], weight [C, W], bias [C] | None, states [S, C, W], slots int64 [R], lens: R integers,"
            " activation: str = silu) -> (activation of the convolution [T, C], new states [R, C, W]): row i has"
            " lens[i] >= 1 tokens of x, and states[slots[i]] the W inputs before them, the oldest first; the states are"
            " not changed; `activation` is silu or none",
            sizes=("channels", "width"),
            measure=sizes.causal_conv1d,
            tolerances=TWO_ROUNDINGS,
            module="recurrent_reference",
        ),
        _contract(
            recurrent_oracles.gated_delta_rule,
            gated_delta_rule_cases,
            signature="(q [T, H, K], k [T, H, K], v [T, HV, V], decay float32 [T, HV], beta float32 [T, HV], states"
            " [S, HV, K, V], slots int64 [R], lens: R integers) -> (float32 [T, HV, V], new states float32"
            " [R, HV, K, V]): row i has lens[i] >= 1 tokens and begins with states[slots[i]], which is not changed;"
            " decay, at most 0, is the logarithm of the factor of the state at each token; q and k are divided"
            " by sqrt(their squared norm + 1e-6), and q by sqrt(K); head h of q and k is that of the HV / H heads of v"
            " from h HV / H on",
            sizes=("key_heads", "value_heads", "key_dim", "value_dim"),
            measure=sizes.gated_delta_rule,
            tolerances=RECURRENT_SUMS,
            result=torch.float32,
            module="recurrent_reference",
        ),
        _contract(
            recurrent_oracles.state_space_scan,
            state_space_scan_cases,
            signature="(x [T, H, P], b [T, G, N], c [T, G, N], decay float32 [T, H], step float32 [T, H] | None, states"
            " [S, H, P, N], slots int64 [R], lens: R integers) -> (float32 [T, H, P], new states float32 [R, H, P, N]):"
            " row i has lens[i] >= 1 tokens and begins with states[slots[i]], which is not changed; at each token, the"
            " state is multiplied by exp(decay), of which decay is at most 0, and x times step (or x, without steps)"
            " times b is added; the result is the product of the state and c; group g of b and c is that of the H / G"
            " heads from g H / G on",
            sizes=("heads", "groups", "head_dim", "state_size"),
            measure=sizes.state_space_scan,
            tolerances=RECURRENT_SUMS,
            result=torch.float32,
            module="recurrent_reference",
        ),
        _contract(
            recurrent_oracles.gated_linear_recurrence,
            gated_linear_recurrence_cases,
            signature="(x [T, C], decay float32 [T, C], states [S, C], slots int64 [R], lens: R integers) -> (float32"
            " [T, C], new states float32 [R, C]): row i has lens[i] >= 1 tokens and begins with states[slots[i]], which"
            " is not changed; at each token, the state is exp(decay) times itself, plus x, and the result is the state;"
            " decay is at most 0",
            sizes=("channels",),
            measure=sizes.last_axis,
            tolerances=RECURRENT_SUMS,
            result=torch.float32,
            module="recurrent_reference",
        ),
        _contract(
            recurrent_oracles.selective_scan,
            selective_scan_cases,
            signature="(x [T, C], b [T, N], c [T, N], rates float32 [C, N], step float32 [T, C], states [S, C, N],"
            " slots int64 [R], lens: R integers) -> (float32 [T, C], new states float32 [R, C, N]): row i has"
            " lens[i] >= 1 tokens and begins with states[slots[i]], which is not changed; at each token, the state of a"
            " channel is multiplied by exp(step rates), of which rates are at most 0, and step x b is added; the result"
            " is the product of the state and c",
            sizes=("channels", "state_size"),
            measure=sizes.selective_scan,
            tolerances=RECURRENT_SUMS,
            result=torch.float32,
            module="recurrent_reference",
        ),
        _contract(
            oracles.rows_gguf,
            rows_gguf_cases,
            signature="(rows uint8 [N, bytes per row], quant_type: str, indices int64 [T], dtype) -> [T, K] of dtype; "
            "the embedding lookup in the rows of a GGUF file quantized as `quant_type`",
            sizes=("inputs",),
            measure=sizes.rows_gguf,
            tolerances=FLOAT16_SCALES,
        ),
        _contract(
            expert_oracles.route_experts,
            route_experts_cases,
            signature="(logits float32 [T, E], bias float32 [E] | None, top_k: int, scoring: str, renormalize: bool, "
            "groups: int, top_groups: int, scale: float) -> (ids int64 [T, K], weights float32 [T, K]); `scoring` is "
            "softmax, sigmoid or softmax_of_top_k; the bias is added for the choice only; the order is that of "
            "descending choice scores, the lower id first of equal ones",
            sizes=("experts", "top_k"),
            measure=sizes.route_experts,
            tolerances=FLOAT32_SUMS,
            result=(torch.int64, torch.float32),
            module="expert_reference",
        ),
        _contract(
            expert_oracles.experts,
            experts_cases,
            signature="(x [T, H], ids int64 [T, K], weights float32 [T, K], gate_up [E, 2 I, H], down [E, H, I], "
            "gate_up_bias [E, 2 I] | None, down_bias [E, H] | None, activation: str) -> [T, H]; `activation` is silu, "
            "gelu_tanh, swiglu_clamped, silu_clamped or relu2, which has no gate: gate_up and its bias then have the "
            "I rows of `up` alone; ids outside [0, E) contribute nothing; the results of a token's experts are added "
            "in float32, in the order of its ids",
            sizes=_EXPERT_SIZES,
            measure=sizes.experts,
            tolerances=TWO_PRODUCTS,
            module="expert_reference",
        ),
        _contract(
            expert_oracles.experts_int8,
            experts_int8_cases,
            signature="(x [T, H], ids int64 [T, K], weights float32 [T, K], gate_up int8 [E, 2 I, H], gate_up_scale "
            "float32 [E, 2 I], down int8 [E, H, I], down_scale float32 [E, H], activation: str) -> [T, H]; as experts; "
            "the inputs of both products may be quantized to int8, with a scale per row",
            sizes=_EXPERT_SIZES,
            measure=sizes.experts,
            tolerances=TWO_QUANTIZED_PRODUCTS,
            module="expert_reference",
        ),
        _contract(
            expert_oracles.experts_fp8,
            experts_fp8_cases,
            signature="(x [T, H], ids int64 [T, K], weights float32 [T, K], gate_up float8_e4m3fn [E, 2 I, H], "
            "gate_up_scale float32 [E, 2 ceil(I / block_outputs), ceil(H / block_inputs)], down float8_e4m3fn [E, H, "
            "I], down_scale float32 [E, ceil(H / block_outputs), ceil(I / block_inputs)], block_outputs: int, "
            "block_inputs: int, activation: str, gate_up_bias [E, 2 I] as x | None = None, down_bias [E, H] as x | "
            "None = None) -> [T, H]; as experts, with blocks and scales as linear_fp8",
            sizes=_EXPERT_SIZES,
            measure=sizes.experts,
            tolerances=TWO_PRODUCTS,
            module="expert_reference",
        ),
        _contract(
            expert_oracles.experts_gguf,
            experts_gguf_cases,
            signature="(x [T, H], ids int64 [T, K], weights float32 [T, K], gate_up uint8 [E, 2 I, bytes per row], "
            "gate_up_type: str, down uint8 [E, H, bytes per row], down_type: str, activation: str, gate_up_bias "
            "[E, 2 I] as x | None = None, down_bias [E, H] as x | None = None) -> [T, H]; as experts; rows are those "
            "of a GGUF file; the inputs of both products may be quantized to 8 bits",
            sizes=_EXPERT_SIZES,
            measure=sizes.experts,
            tolerances=TWO_QUANTIZED_PRODUCTS,
            module="expert_reference",
        ),
    )
}


def violations(
    contract: OpContract,
    implementation: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    capabilities: Collection[str] = (),
    large: bool = False,
    supports: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
) -> list[str]:
    """All violations of the contract by an implementation on its cases; empty if there are none.

    `capabilities`: of the platform; cases that need another one are left out. `large`: also the large cases.
    `supports(sizes)`: whether the implementation takes calls of these sizes; the others are left out.
    """
    problems: list[str] = []
    for case in contract.cases(dtype, seed):
        if (case.needs and case.needs not in capabilities) or (case.large and not large):
            continue
        if not supports(contract.sizes_of(case)):
            continue
        args = tuple(_to_device(arg, device) for arg in case.args)
        expected, actual = _results(contract.oracle(*case.args)), _results(implementation(*args))
        problems.extend(
            f"{contract.name}, {case.label}: argument {index} was changed" for index in _changed(case, args)
        )
        if len(expected) != len(actual):
            problems.append(f"{contract.name}, {case.label}: {len(actual)} results, not {len(expected)}")
            continue
        for index, (want, actual_result) in enumerate(zip(expected, actual, strict=True)):
            result_dtype = contract.result[index] if isinstance(contract.result, tuple) else contract.result
            reason = _difference(want, actual_result, result_dtype or dtype, contract.tolerances[dtype])
            reason = reason or _rounded(want, actual_result, dtype)
            if reason is not None:
                problems.append(f"{contract.name}, {case.label}, result {index}: {reason}")
    return problems


def _to_device(arg: Any, device: torch.device | str) -> Any:
    """A copy on the device, with the strides of the original."""
    if not isinstance(arg, Tensor):
        return arg
    copy = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
    copy.copy_(arg)
    return copy


def _changed(case: Case, args: tuple[Any, ...]) -> list[int]:
    pairs = enumerate(zip(case.args, args, strict=True))
    return [index for index, (old, new) in pairs if isinstance(old, Tensor) and not torch.equal(old, new.to("cpu"))]


def _results(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _rounded(want: Tensor, actual: Tensor, dtype: torch.dtype) -> str | None:
    """A clause if results of a wider dtype than the model's have its precision only, as few results may by chance."""
    few = 16
    if actual.dtype == dtype or not actual.is_floating_point() or int(actual.count_nonzero()) < few:
        return None
    if torch.equal(want.to(dtype).double(), want) or not torch.equal(actual.to(dtype).to(actual.dtype), actual):
        return None
    return f"it is {actual.dtype}, but its values were rounded to {dtype}"


def _difference(want: Tensor, actual: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> str | None:
    if actual.dtype != dtype:
        return f"its dtype is {actual.dtype}, not {dtype}"
    if actual.shape != want.shape:
        return f"its shape is {tuple(actual.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return None
    if not dtype.is_floating_point:
        differs = (actual.to("cpu") != want).flatten()
        worst = int(differs.int().argmax())
        values = f"{_place(worst, want)} is {actual.flatten()[worst].item()}, not {want.flatten()[worst].item()}"
        return values if bool(differs.any()) else None
    error = (actual.to("cpu").double() - want).abs()
    limits = torch.finfo(dtype)
    two_subnormals = 2 * limits.smallest_normal * limits.eps
    allowed = tolerance.relative * want.abs() + tolerance.scaled * want.abs().max() + two_subnormals
    if bool((error <= allowed).all()):
        return None
    worst = int((error - allowed).nan_to_num(torch.inf).argmax())
    many = int((~(error <= allowed)).sum())
    others = f"; {many} of {want.numel()} elements are wrong" if many > 1 else ""
    return f"{_place(worst, want)} is {actual.flatten()[worst].item():g}, not {want.flatten()[worst].item():g}{others}"


def _place(index: int, tensor: Tensor) -> str:
    """The element with this index of the flattened tensor, by its indices: "element [16, 81] of [17, 192]"."""
    at = [int(position) for position in torch.unravel_index(torch.tensor(index), tensor.shape)]
    return f"element {at} of {list(tensor.shape)}"
