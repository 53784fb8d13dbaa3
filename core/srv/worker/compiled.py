"""Compiled steps: the forward pass of small batches, compiled by `torch.compile` while the engine starts.

A step whose rows all compute one token (or a token and its drafts), and score and return nothing else, runs the
compiled function if it has few enough tokens:

    tokens, positions ──copied──► buffers ──► norms, rotary embeddings, activations, residuals: compiled ──► logits
                                                 │ opaque operators, called as in any other step:
                                                 └ attention, and the kernels of layers that the platform repacked

The whole pass is one graph, because a break would split every layer. Shapes are compiled twice: for one token, which
the compiler treats as a constant, and for any other number. All other steps run as they do without compilation. This
module must not know any device: what cannot be traced is hidden behind operators of torch's dispatcher.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from srv.args.config import Config
from srv.dist.agreement import StepShape
from srv.errors import ModelError
from srv.models.base import Attend, CausalLM, ForwardContext, ModelInputs
from srv.models.layers.embedding import TokenEmbedding
from srv.models.layers.experts import ExpertWeights
from srv.models.layers.linear import Projection
from srv.models.layers.op_layer import OpLayer, op_layers
from srv.planning.steps import rows_to_compile
from srv.platform.interface import AttentionBackend
from srv.platform.transfers import Transfers
from srv.sched.plan import SlowReason, Way
from srv.specs import AttentionLayer
from srv.worker.attention import StepAttention
from srv.worker.batch import Inputs
from srv.worker.capture import StartReport
from srv.worker.ways import Computed, ForwardStep, selected, step_attention

logger = logging.getLogger(__name__)

NAMESPACE = "srv"
Forward: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # tokens, positions -> logits
_SIGNATURES = {
    "attend": "(Tensor q, Tensor k, Tensor v, int group, int index) -> Tensor",
    "kernel": "(Tensor x, int layer) -> Tensor",
    "kernel_float32": "(Tensor x, int layer) -> Tensor",  # the compiler's cache knows results by the operator's name
    "experts": "(Tensor x, Tensor ids, Tensor weights, int layer) -> Tensor",
}


class OpaqueCalls:
    """What the opaque operators of one model call. `attend` is that of the step that runs."""

    def __init__(self, attention: Sequence[AttentionLayer], layers: Sequence[OpLayer]) -> None:
        self.attend: Attend | None = None
        self._attention = {(layer.group, layer.index): layer for layer in attention}
        self._layers = [(layer, layer.kernel) for layer in layers]

    def run_attention(self, q: Tensor, k: Tensor, v: Tensor, group: int, index: int) -> Tensor:
        assert self.attend is not None
        return self.attend(self._attention[group, index], q, k, v).contiguous()

    def attention_result(self, q: Tensor, k: Tensor, v: Tensor, group: int, index: int) -> Tensor:
        """An uninitialized tensor like the result of attention."""
        return q.new_empty((*q.shape[:2], self._attention[group, index].result_dim(v.shape[-1])))

    def run_kernel(self, x: Tensor, layer: int) -> Tensor:
        found, kernel = self._layers[layer]
        result = kernel(x)
        return (result.float() if found.float32_results else result).contiguous()

    def run_experts(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        return self._layers[layer][1](x, ids, weights).contiguous()

    def kernel_result(self, x: Tensor, layer: int) -> Tensor:
        """An uninitialized tensor like the result of a layer's kernel."""
        found = self._layers[layer][0]
        if isinstance(found, TokenEmbedding):
            return x.new_empty((*x.shape, found.inputs), dtype=found.dtype)
        assert isinstance(found, Projection)
        dtype = torch.float32 if found.float32_results else found.dtype
        return x.new_empty((*x.shape[:-1], sum(found.output_sizes.values())), dtype=dtype)


def _experts_result(x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
    return x.new_empty(x.shape)


def _is_opaque(layer: OpLayer) -> bool:
    """Whether the compiler does not look into a kernel: those of experts may read results of the device on the host."""
    return isinstance(layer, ExpertWeights) or getattr(layer.kernel, "__self__", None) is not layer


class _OpaqueKernel:
    """A layer's kernel, which the compiler sees as one operator."""

    __slots__ = ("_kernel", "_layer", "_operator")

    def __init__(self, kernel: Callable[..., Tensor], operator: Callable[..., Tensor], layer: int):
        self._kernel, self._operator, self._layer = kernel, operator, layer

    def __call__(self, *x: Tensor) -> Tensor:
        return self._operator(*x, self._layer) if torch.compiler.is_compiling() else self._kernel(*x)


class CompiledSteps:
    """A way of steps: the compiled forward pass and output layer of one model, for at most `rows` tokens.

    `attention`: the backend of each cache group. `debug`: a folder for the compiled graphs, their guards, and how far
    logits are from uncompiled ones; or None. `ran_uncompiled`: of the last step, that it did not fit what was compiled.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: Sequence[AttentionBackend],
        rows: int,
        transfers: Transfers,
        debug: Path | None = None,
    ) -> None:
        self.rows, self.graphs = rows, 0
        self.ran_uncompiled = False
        self._model, self._attention, self._transfers = model, attention, transfers
        self._debug, self._serving = debug, False
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=transfers.device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=transfers.device)
        self._define(model)
        context = self._context

        def forward(tokens: Tensor, positions: Tensor) -> Tensor:
            return model.logits(model(ModelInputs(tokens, positions), context))

        self._one, self._several = self._compile(forward, "one"), self._compile(forward, "several")

    def _compile(self, forward: Forward, name: str) -> Forward:
        """A function that is compiled when it is called first.

        The compiler keeps what it has compiled with the code object, so each function of each model has its own one.
        """
        given = cast(FunctionType, forward)
        code = given.__code__.replace(co_name=f"{name}_{id(self):x}")
        own = FunctionType(code, given.__globals__, name, given.__defaults__, given.__closure__)
        options: dict[str, Any] = {"guard_filter_fn": self._kept_guards}
        compiled: Forward = torch.compile(own, fullgraph=True, backend=self._backend, options=options)
        return compiled

    def _define(self, model: CausalLM) -> None:
        """Define the operators of this model, and let the layers call them while they are traced."""
        repacked = [layer for layer in op_layers(model) if _is_opaque(layer)]
        self._calls = OpaqueCalls(model.attention_layers, repacked)
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        attend = self._operator("attend", self._calls.run_attention, self._calls.attention_result)
        kernel = self._operator("kernel", self._calls.run_kernel, self._calls.kernel_result)
        float32 = self._operator("kernel_float32", self._calls.run_kernel, self._calls.kernel_result)
        experts = self._operator("experts", self._calls.run_experts, _experts_result)
        for number, layer in enumerate(repacked):
            operator = float32 if layer.float32_results else kernel
            operator = experts if isinstance(layer, ExpertWeights) else operator
            layer.kernel = _OpaqueKernel(layer.kernel, operator, number)
        self._context = ForwardContext(lambda layer, q, k, v: attend(q, k, v, layer.group, layer.index))

    def _operator(self, kind: str, run: Callable[..., Tensor], result: Callable[..., Tensor]) -> Any:
        """A new operator. Its number is the first free one: equal at every start, so that the compiler's cache hits."""
        for number in itertools.count():
            name = f"{kind}_{number}"
            try:
                self._library.define(name + _SIGNATURES[kind])  # type: ignore[no-untyped-call]
            except RuntimeError:  # another engine in this process has it
                continue
            self._library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
            torch.library.register_fake(f"{NAMESPACE}::{name}", result, lib=self._library)
            return getattr(getattr(torch.ops, NAMESPACE), name).default
        raise AssertionError

    def compile(self) -> float:
        """Compile by running steps of padding on page 0; returns the seconds it took.

        Raises ModelError if the model cannot be traced or compiled.
        """
        started = time.monotonic()
        with torch.inference_mode():
            for rows in sorted({1, self.rows}):
                try:
                    logits = self._first(rows)
                except Exception as error:  # the compiler may raise anything
                    raise _not_compiled(self._model, error) from error
                if self._debug is not None:
                    self._compare(rows, logits)
        self._serving = True
        return time.monotonic() - started

    def _first(self, rows: int) -> Tensor:
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        if rows > 2:
            for each in (tokens, positions):
                torch._dynamo.mark_dynamic(each, 0, min=2, max=rows)
        return self._run(tokens, positions, self._padding(rows))

    def _padding(self, rows: int) -> StepAttention:
        page = torch.zeros((rows, 1), dtype=torch.int32, device=self._tokens.device)
        return StepAttention(self._attention, [1] * rows, [1] * rows, [page] * len(self._attention))

    def _compare(self, rows: int, logits: Tensor) -> None:
        inputs = ModelInputs(self._tokens[:rows], self._positions[:rows])
        expected = self._model.logits(self._model(inputs, ForwardContext(self._padding(rows))))
        difference = float((logits.float() - expected.float()).abs().max())
        self._write(f"difference of {rows} rows", f"logits differ from those of the model by at most {difference:.3g}")

    def covers(self, inputs: Inputs, shape: StepShape | None = None) -> bool:
        return inputs.model.tokens.numel() <= self.rows and inputs.decodes_only

    def run(self, step: ForwardStep) -> Computed:
        given = step.inputs.model
        rows = given.tokens.numel()
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        tokens.copy_(given.tokens)
        positions.copy_(given.positions)
        logits = self._run(tokens, positions, step_attention(self._attention, step, self._transfers))
        way: Way = "eager" if self.ran_uncompiled else "compiled"
        outputs = step.inputs.outputs
        return Computed(None, logits if outputs is None else selected(logits, outputs), way)

    def why_not(self, inputs: Inputs) -> SlowReason:
        if self.covers(inputs):
            return "not_compiled_for"
        return "more_rows_than_compiled" if inputs.decodes_only else ""

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        self._calls.attend, self.ran_uncompiled = attend, False
        compiled = self._one if len(tokens) == 1 else self._several
        return compiled(tokens, positions)

    def _backend(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        """torch's compiler, but only at start-up: a request must not wait for it."""
        from torch._inductor.compile_fx import compile_fx

        if self._serving:
            logger.warning("torch.compile: a step does not fit what was compiled at start-up, and runs uncompiled")
            return self._uncompiled(graph.forward)
        self.graphs += 1
        self._write(f"graph {self.graphs}", graph.print_readable(print_output=False))
        return cast(Callable[..., Any], compile_fx(graph, examples, config_patches={"compile_threads": 1}))

    def _uncompiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ran_uncompiled = True
            return forward(*args)

        return run

    def _kept_guards(self, guards: Sequence[Any]) -> list[bool]:
        """A step checks shapes, dtypes and devices of its inputs, but not the model, which does not change any more."""
        kept: list[bool] = torch.compiler.keep_tensor_guards_unsafe(guards)  # type: ignore[no-untyped-call]
        lines = [
            f"{'checked' if keep else 'dropped'}: {guard.guard_type} {guard.name}"
            for guard, keep in zip(guards, kept, strict=True)
        ]
        self._write(f"guards {self.graphs}", "\n".join(lines))
        return kept

    def _write(self, name: str, text: str) -> None:
        """Write a file for debugging, if there is a folder for it."""
        if self._debug is not None:
            (self._debug / f"{name.replace(' ', '-')}.txt").write_text(text + "\n")


def _not_compiled(model: CausalLM, error: Exception) -> ModelError:
    first = next(iter(str(error).strip().splitlines()), "")
    return ModelError(
        "not_compiled",
        type(model).__name__,
        f"torch.compile cannot compile it: {type(error).__name__}: {first}",
        "Start without --enable-torch-compile",
    )


def compile_steps(
    config: Config, model: CausalLM, attention: Sequence[AttentionBackend], transfers: Transfers
) -> tuple[CompiledSteps | None, StartReport]:
    """Compile the steps that the configuration says, and report what was compiled; (None, ()) if none is.

    attention: the backend of each cache group. Raises ModelError if the model cannot be compiled.
    """
    rows, folder = rows_to_compile(config), None
    if not rows:
        return None, ()
    if config.graphs.enable_torch_compile_debug_mode:
        folder = Path(tempfile.mkdtemp(prefix="srv-torch-compile-"))
        logger.info("torch.compile: graphs, guards and differences are written to %s", folder)
    compiled = CompiledSteps(model, attention, rows, transfers, folder)
    seconds = compiled.compile()
    text = f"steps of up to {rows} tokens compiled in {seconds:.1f} s, as {compiled.graphs} graphs"
    if folder is not None:
        text += f", written to {folder}"
    return compiled, (("compiled", text),)
