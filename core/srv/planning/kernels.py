"""The kernel plan: for each kind of layer and op, the implementation, why it, and why not the others. Torch-free.

`srv plan --kernels` makes it for hardware that need not be present. A launch makes the same and refuses what it
refuses; `/get_server_info` shows it with what the engine reports to have bound (docs/adr/0049-kernel-plan.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, assert_never

from srv.args.config import ARGUMENTS
from srv.args.context import call_plugin
from srv.args.named_ops import named_implementations
from srv.args.statement import BackendChoice, Layer, Resolved
from srv.dist.mesh import mesh_of
from srv.errors import Rejection, listed
from srv.models import derive
from srv.models.blueprint import Part
from srv.models.choice import LayerChoice
from srv.models.facts.weight_rules import layer_schemes
from srv.models.inspection import QuantizedOp
from srv.planning.kernel import (
    ATTENTION_SLOTS,
    DEQUANTIZED,
    LAYERS,
    SAMPLING,
    SAMPLING_SLOT,
    WEIGHTS,
    Kernel,
    attention_key,
    layers_name,
    write_key,
)
from srv.planning.kernel_ops import NOT_SERVED, OpTable, op_kernels, quantized_kernels
from srv.planning.kernel_steps import step_kernels
from srv.planning.pools import cache_specs
from srv.planning.target import Target
from srv.planning.weights import schemes_of_rank, types_are_known
from srv.platform.experts import EXPERT_OPS, EXPERTS, MOE_SLOT, MXFP4_PRECISION, of_backend, with_added
from srv.platform.facts import WRITE_KV, OpCall, OpSpec
from srv.platform.layers import layer_names
from srv.platform.op_choice import AUTO, FULL_PRECISION, NAMED_BY, PRECISION, argument_name, choose_op
from srv.quantization import registry as quantization_methods
from srv.quantization.method import QuantMethod
from srv.specs import FullAttention, Latent, ModelFacts, PagedSpec, SlidingWindow

STEPS = dict(zip(ATTENTION_SLOTS, ("prompts", "decode steps"), strict=True))


class KernelPlan(NamedTuple):
    """`kernels`: in the order of computation. `rejections`: why a launch with this plan is refused."""

    kernels: tuple[Kernel, ...]
    rejections: tuple[Rejection, ...] = ()

    @property
    def layers(self) -> str | None:
        """Whose layers compute the model; None if none can be built."""
        return next((kernel.name for kernel in self.kernels if kernel.key == LAYERS), None)

    def to_dicts(self, running: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """`running`: by key, what an engine reports to have bound."""
        if running is None:
            return [kernel.to_dict() for kernel in self.kernels]
        return [{**kernel.to_dict(), "running": running.get(kernel.key)} for kernel in self.kernels]

    def rounded(self) -> tuple[str, ...]:
        """A note for each way in which products round activations that the checkpoint leaves as they are."""
        ops: dict[tuple[str, str], list[str]] = {}
        for kernel in self.kernels:
            if kernel.rounds and kernel.name is not None:
                ops.setdefault((kernel.name, kernel.rounds), []).append(_op(kernel))
        return tuple(
            f"precision: {name} {rounds} in {listed(list(dict.fromkeys(of)))}; "
            f"{ARGUMENTS[PRECISION].flag} {FULL_PRECISION} chooses slower kernels that do not"
            for (name, rounds), of in ops.items()
        )

    def differences(self, running: Mapping[str, str]) -> dict[str, str]:
        """By key, a clause for each part that an engine computes otherwise than planned; {} if it reports nothing."""
        return {
            kernel.key: f"{kernel.name} was planned, and {running.get(kernel.key, 'nothing of the kind')} runs"
            for kernel in self.kernels
            if running and kernel.name is not None and running.get(kernel.key) != kernel.name
        }

    def slow_paths(self, running: Mapping[str, str]) -> dict[str, str]:
        """By key, why every step of an engine takes a slower path there."""
        return {kernel.key: kernel.slower for kernel in self.kernels if kernel.slower} | self.differences(running)


def plan_kernels(
    target: Target, model: ModelFacts | None, resolved: Resolved, choice: LayerChoice | None
) -> KernelPlan:
    """The plan of a resolved launch. Raises ModelError for damaged files.

    `choice`: what the model would be built of. Without a model or a choice, the plan has no layers and ops.
    """
    planner = _Planner(target, resolved)
    kernels = [] if model is None or choice is None else list(planner.of_model(model, choice))
    if SAMPLING_SLOT in resolved.backends:
        kernels.append(planner.of_backend("sampling", "sampling", SAMPLING, resolved.backends[SAMPLING_SLOT]))
    return KernelPlan((*kernels, *step_kernels(resolved)), tuple(planner.rejections))


def plan_quantized(target: Target, resolved: Resolved, method: QuantMethod, ops: Sequence[QuantizedOp]) -> KernelPlan:
    """The part of a plan about the quantized weights in a class of transformers, by what their layers call."""
    planner = _Planner(target, resolved)
    return KernelPlan(tuple(planner.of_quantized(method, ops)), tuple(planner.rejections))


class _Planner:
    """Makes the plan of one launch, and collects what refuses it."""

    def __init__(self, target: Target, resolved: Resolved) -> None:
        self._target, self._resolved, self._config = target, resolved, resolved.config
        self.rejections: list[Rejection] = []

    def of_model(self, model: ModelFacts, choice: LayerChoice) -> Iterator[Kernel]:
        tree, mesh = choice.tree, mesh_of(self._config.get)
        yield self._layers(choice)
        weights = self._weights(model, choice.method, native=tree is not None)
        if weights is not None:
            yield weights
        yield from self._attention(model, tree)
        if tree is not None:
            part = derive.of_rank(tree, mesh) if mesh.tensor > 1 and derive.divided(tree) is not None else tree
            yield from self._ops(model, tree, part, choice.method)

    def of_quantized(self, method: QuantMethod, ops: Sequence[QuantizedOp]) -> Iterator[Kernel]:
        if not self._target.manifest.facts.ops:
            return  # which `of_model` has said
        table = self._table(self._target.manifest.facts.ops)
        yield from (self._checked(kernel, method) for kernel in quantized_kernels(table, ops))

    def of_backend(self, part: str, what: str, key: str, choice: BackendChoice) -> Kernel:
        rejected, slower = _rejected(choice), self._slower(choice)
        return Kernel(part, what, key, choice.spec.name, choice.reason, rejected, slower)

    def _slower(self, choice: BackendChoice) -> str:
        """Why no faster backend fits, if the choice is a fallback that the user did not name."""
        if not choice.spec.fallback or self._named(choice):
            return ""
        fallbacks = {backend.name for backend in self._target.backends(choice.family) if backend.fallback}
        return "; ".join(f"{name}: {reason}" for name, reason in _rejected(choice) if name not in fallbacks)

    def _named(self, choice: BackendChoice) -> bool:
        """Whether the user chose this backend."""
        names = (choice.slot, f"{choice.family}_backend")
        return any(self._is_users(name) for name in names if name in ARGUMENTS)

    # ---- layers and weights

    def _layers(self, choice: LayerChoice) -> Kernel:
        what = "the layers of the model"
        if choice.tree is not None:
            name = layers_name(native=True)
            return Kernel("layers", what, LAYERS, name, "they implement everything in the model's configuration")
        why, chosen = choice.fallback, self._config.model.model_impl == "transformers"
        because = why if chosen else "srv has no native layers for it, and computes attention alone"
        rejected = ((layers_name(native=True), why),)
        name = layers_name(native=False)
        return Kernel("layers", what, LAYERS, name, because, rejected, "" if chosen else why)

    def _weights(self, model: ModelFacts, method: QuantMethod | None, *, native: bool) -> Kernel | None:
        """How quantized weights are held; None for a checkpoint that is not quantized, and stays so."""
        if method is not None:
            name = "torchao_config" if self._config.weights.torchao_config else "quantization"
            because = self._resolved.provenance[name].reason
            return Kernel("layers", "weights", WEIGHTS, method.name, because)
        stored = quantization_methods.method_of(model)
        if stored is None:
            return None
        provenance = self._resolved.provenance["dequantize_weights"]
        if provenance.value:
            why, chosen = provenance.reason, self._is_users("dequantize_weights")
        elif self._config.model.load_format == "dummy":
            why, chosen = "random weights are not quantized (load_format is dummy)", True
        else:
            why = "transformers computes with the dequantized weights of GGUF files only"
            chosen = self._is_users("model_impl")
        if not provenance.value and self._is_users("dequantize_weights"):
            shown = ARGUMENTS["dequantize_weights"].show(provenance.value)
            remedy = "Leave it out, or remove the cause."
            self.rejections.append(Rejection("slower_path", "dequantize_weights", shown, provenance.owner, why, remedy))
        return Kernel(
            "layers", "weights", WEIGHTS, DEQUANTIZED, why, ((stored.name, why),), "" if chosen or not native else why
        )

    # ---- attention

    def _attention(self, model: ModelFacts, tree: Part | None) -> Iterator[Kernel]:
        choices = {slot: self._resolved.backends.get(slot) for slot in STEPS}
        for number, spec in enumerate(cache_specs(self._config, model)):
            for slot, steps in STEPS.items():
                layers = layer_names(spec.layers or range(model.layers))
                kind = _kind(spec) if model.has_pool else "attention in both directions"
                what, key = f"{kind} of {layers}, {steps}", attention_key(number, slot)
                choice = choices[slot]
                if choice is not None:
                    kernel = self.of_backend("attention", what, key, choice)
                    yield kernel if slot != ATTENTION_SLOTS[0] else self._of_prompts(kernel, spec, choice, tree)
                else:
                    yield Kernel("attention", what, key, None, "no attention backend fits")
        for slot, steps in STEPS.items():
            if (choice := choices[slot]) is not None and model.has_pool:
                yield self._writer(slot, steps, choice)

    def _of_prompts(self, kernel: Kernel, spec: PagedSpec, choice: BackendChoice, tree: Part | None) -> Kernel:
        """With the form in which the backend computes prompts of latent attention, if it has several."""
        says = choice.spec.prompts
        if says is None or tree is None or not isinstance(spec, Latent):
            return kernel
        dims = next(layer.latent for layer in derive.attention_layers(tree) if layer.latent is not None)
        arguments = {name: self._config.get(name) for name in choice.spec.arguments}
        owner, member = f"platform {self._target.manifest.name}", f"attention backend {choice.spec.name}: prompts"
        return kernel._replace(because=f"{kernel.because}; {call_plugin(owner, member, says, dims, arguments)}")

    def _writer(self, slot: str, steps: str, choice: BackendChoice) -> Kernel:
        """What writes keys and values into pages: the attention backend, by an op of its platform's if it says so."""
        what, key = f"writing keys and values, {steps}", write_key(slot)
        op = choose_op(self._target.manifest.facts.ops, self._target.device, WRITE_KV, OpCall("", {}))
        if op.spec is None:
            because = "the attention backend writes them before it attends"
            return Kernel("attention", what, key, choice.spec.name, because)
        because = f"the attention backend {choice.spec.name} writes by it"
        return Kernel("attention", what, key, op.spec.name, because, op.rejected, op.slower)

    # ---- ops

    def _ops(self, model: ModelFacts, tree: Part, part: Part, method: QuantMethod | None) -> Iterator[Kernel]:
        """Of `part`, what a rank has of the model's `tree`."""
        dtype, specs, platform = self._config.model.dtype, self._target.manifest.facts.ops, self._target.manifest.name
        ops = derive.model_ops(part, dtype)
        if not divides(self._resolved):
            yield _unknown("tp_size does not divide the model")
            return
        if not specs:
            yield _unknown(f"platform {platform} does not declare its ops")
            return
        if method is not None and method.schemes is None:
            yield _unknown(f"the quantization method {method.name} does not say which layers it computes")
            return
        if method is not None and not types_are_known(model):
            yield _unknown("the types of the tensors are in the header of its file, which is not here")
            return
        experts = self._resolved.backends.get(MOE_SLOT)
        if experts is not None:
            specs = of_backend(with_added(specs, [experts.spec]), experts.spec.name)
        for kernel in op_kernels(self._table(specs), ops, schemes_of_rank(tree, layer_schemes(model, method))):
            self._checked(kernel, method)
            yield kernel if experts is None else self._of_experts(kernel, experts)

    def _table(self, specs: Sequence[OpSpec]) -> OpTable:
        invariant = self._config.schedule.enable_deterministic_inference
        implementations, full = (
            named_implementations(self._config),
            self._config.platform.activation_precision == FULL_PRECISION,
        )
        dtype, platform = self._config.model.dtype, self._target.manifest.name
        return OpTable(platform, specs, self._target.device, dtype, invariant, implementations, full)

    def _checked(self, kernel: Kernel, method: QuantMethod | None) -> Kernel:
        """A kernel, which is refused if there is none, or a slow one that the user did not ask for."""
        if kernel.name is None:
            self._refuse_op(kernel, method)
        elif method is not None and kernel.slower and _op(kernel) in method.ops:
            self._refuse_unasked(kernel, method)
        return kernel

    def _of_experts(self, kernel: Kernel, choice: BackendChoice) -> Kernel:
        """An op of experts with what the choice of their backend left out and why; any other op as it is."""
        op = _op(kernel)
        if kernel.name is None or op not in EXPERT_OPS:
            return kernel
        why = self._slower(choice)
        if why and op != EXPERTS and not self._is_users(MXFP4_PRECISION) and not self._is_users(PRECISION):
            self.rejections.append(_reference_unasked(kernel, choice, why))
        rejected = (*_rejected(choice), *kernel.rejected)
        because = f"{choice.reason}; it {kernel.rounds}" if kernel.rounds else choice.reason
        return kernel._replace(because=because, rejected=rejected, slower=kernel.slower or why)

    def _refuse_unasked(self, kernel: Kernel, method: QuantMethod) -> None:
        """Quantized matrices that only a fallback multiplies, unless the user named it or their method."""
        if self._is_users("quantization") or self._is_users("torchao_config"):
            return
        op, argument, name = _op(kernel), "quantization", method.name
        if op in NAMED_BY:  # the choice leaves `slower` empty where this argument names the fallback
            argument, name = NAMED_BY[op], argument_name(kernel.name or "")
        remedy = f"Set {ARGUMENTS[argument].flag} {name} to multiply them slowly, or remove the cause."
        reason = f"only {kernel.name} multiplies with these weights here ({kernel.slower})"
        self.rejections.append(Rejection("slower_path", kernel.what, None, "automatic choice", reason, remedy))

    def _refuse_op(self, kernel: Kernel, method: QuantMethod | None) -> None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in kernel.rejected)
        reason = f"{kernel.because}{f' ({reasons})' if reasons else ''}"
        op = _op(kernel)
        left_out = [ARGUMENTS[NAMED_BY[op]].flag] if named_implementations(self._config).get(op, AUTO) != AUTO else []
        if self._config.schedule.enable_deterministic_inference:
            left_out.append("--enable-deterministic-inference")
        first = f"Leave out {' and '.join(left_out)}, or choose" if left_out else "Choose"
        remedy = f"{first} another dtype or model, or another platform with --device."
        if method is not None and op in method.ops and not left_out:
            remedy = f"{_without_op(method)}, or choose another platform with --device."
        code, owner = "op_missing", f"platform {self._target.manifest.name}"
        if kernel.because in NOT_SERVED:
            code, owner = "unsupported_quantization", "the quantization method"
            remedy = "Choose another quantization method, or leave the weights unquantized."
        self.rejections.append(Rejection(code, kernel.what, None, owner, reason, remedy))

    def _is_users(self, argument: str) -> bool:
        return self._resolved.provenance[argument].layer is Layer.USER


def _without_op(method: QuantMethod) -> str:
    """What to do where nothing multiplies weights of a method."""
    if method.online:
        return "Leave the weights unquantized (leave out --torchao-config or --quantization)"
    if method.dequantizable:
        return "Set --dequantize-weights (the weights then take the model's dtype)"
    return "Use the checkpoint in full precision"


def _op(kernel: Kernel) -> str:
    return kernel.key.partition(" ")[0]


def _rejected(choice: BackendChoice) -> tuple[tuple[str, str], ...]:
    return tuple((name, "; ".join(reasons)) for name, reasons in choice.rejected)


def _reference_unasked(kernel: Kernel, choice: BackendChoice, why: str) -> Rejection:
    """Experts of quantized weights that only a fallback computes, which the user has not named."""
    name = choice.spec.name
    remedy = f"Set --moe-runner-backend {name} to compute them slowly, or remove the cause."
    reason = f"only {name} computes them here, one expert after the other ({why})"
    return Rejection("slower_path", kernel.what, None, "automatic choice", reason, remedy)


def divides(resolved: Resolved) -> bool:
    """Whether tp_size divides the model; a plan carries a value that does not."""
    return not any((refusal.what, refusal.code) == ("tp_size", "not_divisible") for refusal in resolved.refusals)


def _unknown(why: str) -> Kernel:
    return Kernel("op", "ops", "ops", None, f"not known before the layers are built: {why}")


def _kind(spec: PagedSpec) -> str:
    match spec:
        case FullAttention():
            return "full attention"
        case SlidingWindow():
            return f"attention within {spec.window} tokens"
        case Latent():
            return "latent attention"
        case _ as never:
            assert_never(never)
