"""The backends of mixtures of experts on GPUs, and the ops of which they consist. Torch-free.

aiter                AMD's kernels: gfx942 and gfx950, 16-bit weights, SiLU, no biases
triton               any GPU for which Triton is installed: bfloat16, float16 and float32, int8, FP8, GGUF blocks
flashinfer_cutlass   FlashInfer's CUTLASS kernels: NVIDIA GPUs from sm89 on, 16-bit weights
torch_native         PyTorch's operators, one expert after the other (`srv.platform.experts`)
"""

from __future__ import annotations

from collections.abc import Callable

from srv.dist.mesh import mesh_of
from srv.models.facts.special_layers import mixture
from srv.platform.experts import EXPERT_OPS, EXPERTS, MXFP4_PRECISION, ROUTE
from srv.platform.facts import BackendSpec, DeviceFacts, OpCall, OpSpec, Requires, ResolutionContext, Unfit
from srv_gpu.facts import HALVES, MISSING_TRITON, TRITON, float_reason, has_package
from srv_gpu.tools import missing_aiter, missing_flashinfer

FLASHINFER_CUTLASS, AITER_MOE = "flashinfer_cutlass", "aiter"
MAX_ROUTED = 4096  # experts whose scores one program of Triton's holds
FLASHINFER_VARIANTS = ("sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
AITER_VARIANTS = ("gfx942", "gfx950")
VECTOR = 8  # 16-bit elements of 128 bits, by which FlashInfer's kernels read rows
BLOCK = 32  # by which aiter's kernels read columns; rows are read by 16, or 8 pairs of a gate and its `up`

Reason = Callable[[DeviceFacts, OpCall], str | None]


def _triton(device: DeviceFacts, call: OpCall) -> str | None:
    if not has_package(device, TRITON):
        return MISSING_TRITON
    experts = call.sizes.get("experts", 0)
    if experts > MAX_ROUTED:
        return f"{experts} experts are more than the {MAX_ROUTED} whose scores a program holds"
    return float_reason(device, call)


def flashinfer_reason(device: DeviceFacts, call: OpCall) -> str | None:
    """Why FlashInfer's kernels cannot compute such experts."""
    reasons = missing_flashinfer(device)
    if device.variant not in FLASHINFER_VARIANTS:
        reasons.append(f"its kernels are for {', '.join(FLASHINFER_VARIANTS)}, not {device.variant}")
    return "; ".join([*reasons, *_unaligned(call, VECTOR)]) or None


def aiter_reason(device: DeviceFacts, call: OpCall) -> str | None:
    """Why aiter's kernels cannot compute such experts."""
    reasons = missing_aiter(device)
    if device.variant not in AITER_VARIANTS:
        reasons.append(f"its kernels are for {', '.join(AITER_VARIANTS)}, not {device.variant}")
    return "; ".join([*reasons, *_unaligned(call, BLOCK)]) or None


def _unaligned(call: OpCall, multiple: int) -> list[str]:
    sizes = {name: call.sizes.get(name, 0) for name in ("hidden", "intermediate")}
    odd = [f"{name} {size} is not a multiple of {multiple}" for name, size in sizes.items() if size % multiple]
    return odd if call.dtype in HALVES else [f"{call.dtype} is not one of {', '.join(HALVES)}", *odd]


def _triton_backend(context: ResolutionContext) -> Requires | Unfit:
    return Requires() if has_package(context.device, TRITON) else Unfit((MISSING_TRITON,))


def _library_backend(
    name: str, reason: Reason, activations: tuple[str, ...], *, biases: bool
) -> Callable[[ResolutionContext], Requires | Unfit]:
    """A check for a library's kernels, which know these activations, and perhaps biases, of unquantized experts."""

    def check(context: ResolutionContext) -> Requires | Unfit:
        moe = None if context.model is None else mixture(context.model, {})
        dtype = context["dtype"]
        if dtype in (None, "auto"):
            dtype = context.model.dtype if context.model is not None else None
        sizes: dict[str, int] = {}
        reasons: list[str] = []
        if moe is not None and context.model is not None:
            hidden = int(context.model.config.get("hidden_size", 0))
            sizes = {
                "hidden": hidden,
                "intermediate": moe.experts.inner // mesh_of(context.__getitem__).width("slices"),
            }
            if moe.experts.activation not in activations:
                reasons.append(f"{name} does not compute the activation {moe.experts.activation}")
            if moe.experts.bias and not biases:
                reasons.append(f"{name} adds no biases of experts")
        clause = reason(context.device, OpCall(dtype or HALVES[0], sizes))
        reasons = [*([clause] if clause else []), *reasons]
        return Unfit(tuple(reasons)) if reasons else Requires()

    return check


OPS = tuple(OpSpec(op, TRITON, _triton, f"srv_gpu.triton_ops:{op}") for op in (ROUTE, *EXPERT_OPS))
# The platform gives these their callables, which need the library: `srv_gpu.vendor_experts`.
FLASHINFER = OpSpec(EXPERTS, FLASHINFER_CUTLASS, flashinfer_reason)
AITER = OpSpec(EXPERTS, AITER_MOE, aiter_reason)

TRITON_EXPERTS = BackendSpec(TRITON, 10, _triton_backend, "", arguments=(MXFP4_PRECISION,), graphs=True)
# After Triton, whose order SGLang's automatic choice has too; no GPU has measured either here.
FLASHINFER_EXPERTS = BackendSpec(
    FLASHINFER_CUTLASS,
    5,
    _library_backend("cutlass_fused_moe", flashinfer_reason, ("silu", "swiglu_clamped"), biases=True),
    "",
    graphs=True,
)
AITER_EXPERTS = BackendSpec(
    AITER_MOE, 20, _library_backend("fused_moe", aiter_reason, ("silu",), biases=False), "", graphs=True
)
