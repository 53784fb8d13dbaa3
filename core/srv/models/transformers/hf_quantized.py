"""Quantized weights in a class of transformers: which of its modules hold them, and what takes the place of these.

    nn.Linear                    QuantizedLinear: the layer of the scheme that the method has for its name
    experts in two parameters    QuantizedExperts, if they compute what the op of experts does

Everything else stays as the class made it. Must not know files, methods by name, nor attention.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import use_experts_implementation
from transformers.pytorch_utils import Conv1D

from srv.errors import ModelError
from srv.models.facts.checkpoint_tensors import quantized_layers, split_name, text_tensors
from srv.models.inspection import QuantizedOp
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.linear import Projection
from srv.models.layers.moe_config import DOWN, GATE, UP, ExpertActivation, expert_names
from srv.models.transformers.hf_names import ClassNames, ClassTensor, stacks_experts
from srv.platform.experts import EXPERT_OP_OF
from srv.quantization.load_method import make_factory
from srv.quantization.method import QuantMethod, StoredModel
from srv.quantization.schemes import Int8, LayerSchemes, Scheme
from srv.specs import ModelFacts

_GATE_UP = "gate_up_proj"  # the parameters of experts in transformers
_OPERANDS = ["self", "hidden_states", "top_k_index", "top_k_weights"]
_ACTIVATIONS: Mapping[type, ExpertActivation] = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERTS = re.compile(r"(.*\.experts)(\.|$)")
_OTHERS = "Use the checkpoint in full precision"


class QuantizedLinear(nn.Module):
    """In place of an nn.Linear: [..., in] -> [..., out]."""

    def __init__(self, layer: Projection) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.inputs, sum(layer.output_sizes.values())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        out: Tensor = self.layer.kernel(rows)
        return out.view(*x.shape[:-1], self.out_features)


class QuantizedExperts(nn.Module):
    """In place of the experts of a layer: [T, H], and the experts and their weights of each token -> [T, H]."""

    def __init__(self, layer: ExpertWeights) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out: Tensor = self.layer.kernel(hidden_states.contiguous(), top_k_index.long(), top_k_weights.float())
        return out


class _Shape(nn.Module):
    """Stands in for a quantized module in a pass without data. `outputs`: None for as many as inputs."""

    def __init__(self, name: str, path: str, outputs: int | None) -> None:
        super().__init__()
        self._name, self._path, self._outputs = name, path, outputs

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self._outputs or x.shape[-1])

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", _GATE_UP, DOWN):
            reason = f"{self._name} is quantized, and its class in transformers reads its {name} itself"
            raise ModelError("unsupported_quantization", self._path, reason, _OTHERS)
        return super().__getattr__(name)


class HeldLinear(NamedTuple):
    """`stored`: its name in the checkpoint."""

    stored: str
    outputs: int
    inputs: int
    scheme: Scheme


class HeldExperts(NamedTuple):
    sizes: ExpertSizes
    scheme: Scheme


class QuantizedModules(NamedTuple):
    """The modules of a class whose weights a checkpoint stores quantized.

    `method`: None if there are none. `stored`: the tensors of the checkpoint, by the names of layers. `layers`: the
    name of each stored layer that is quantized, by its name in the checkpoint. `linears`, `experts`: by the names of
    modules.
    """

    method: QuantMethod | None = None
    stored: StoredModel | None = None
    layers: Mapping[str, str] = MappingProxyType({})
    linears: Mapping[str, HeldLinear] = MappingProxyType({})
    experts: Mapping[str, HeldExperts] = MappingProxyType({})

    def __bool__(self) -> bool:
        return bool(self.linears or self.experts)

    def __str__(self) -> str:
        name = "" if self.method is None else self.method.name
        parts = [f"{len(self.linears)} linear layers"]
        parts += [f"the experts of {len(self.experts)} layers"] if self.experts else []
        return f"{' and '.join(parts)} hold weights of {name}"

    def ops(self) -> tuple[QuantizedOp, ...]:
        """What the modules call, each once."""
        linears = (QuantizedOp(each.scheme.op, _sizes_of(each)) for each in self.linears.values())
        experts = (
            QuantizedOp(EXPERT_OP_OF.get(each.scheme.op, ""), each.sizes.op_sizes) for each in self.experts.values()
        )
        found: list[QuantizedOp] = []
        for each in (*linears, *experts):
            if each not in found:
                found.append(each)
        return tuple(found)

    def held_name(self, stored: str) -> str | None:
        """The name that a tensor of the checkpoint has in the layers of these modules; None for all other tensors."""
        layer, suffix = split_name(stored)
        name = self.layers.get(layer, "")
        return f"{name}.{suffix}" if name in self.linears or _module_of(name) in self.experts else None

    def float_name(self, stored: str) -> str | None:
        """The name of a tensor of all other modules, which the class is given as floats; None for any other."""
        layer, suffix = split_name(stored)
        if layer not in self.layers:
            return None if self.held_name(stored) is not None else stored
        name = self.layers[layer]
        return f"{name}.{suffix}" if self.method is not None and self.method.makes_floats(name) else None


def _sizes_of(linear: HeldLinear) -> dict[str, int]:
    return {"inputs": linear.inputs, "outputs": linear.outputs}


def _module_of(expert: str) -> str:
    """The module of all experts, of the name of a projection of one."""
    return expert.rpartition(".")[0].rpartition(".")[0]


def find_quantized(model: Any, facts: ModelFacts, method: QuantMethod) -> QuantizedModules:
    """The modules that a method holds. `model`: of the class, with or without weights.

    Raises ModelError (unsupported_quantization) for quantized weights that no layers hold, by name.
    """
    return _Finder(model, facts, method).find()


def check_dequantized(model: Any, facts: ModelFacts, method: QuantMethod) -> None:
    """Refuse quantized weights that do not become those of the class when they are dequantized. Raises ModelError."""
    names, modules = ClassNames(model), dict(model.named_modules())
    clauses = (_no_floats(names, modules, layer) for layer in quantized_layers(text_tensors(facts)))
    if (clause := next((each for each in clauses if each is not None), None)) is not None:
        raise _refused(facts, f"its weights are quantized with {method.name}, and {clause}", _OTHERS)


def _no_floats(names: ClassNames, modules: Mapping[str, nn.Module], layer: str) -> str | None:
    """Why the dequantized weight of a stored layer cannot be given to the class; None if it can."""
    name = names.of(f"{layer}.weight").name
    if isinstance(modules.get(name.removesuffix(".weight")), Conv1D):
        return f"{layer} has its inputs as rows"
    experts = _EXPERTS.match(layer)
    if experts is not None and experts[1] in modules and name not in names:
        return f"its class in transformers has all experts of a layer in one tensor, and does not make it of {layer}"
    return None


def _refused(facts: ModelFacts, reason: str, remedy: str) -> ModelError:
    return ModelError("unsupported_quantization", facts.path, reason, remedy)


class _Finder:
    def __init__(self, model: Any, facts: ModelFacts, method: QuantMethod) -> None:
        self._facts, self._method = facts, method
        self._names, self._modules = ClassNames(model), dict(model.named_modules())
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
        self._linears = {
            name: module
            for name, module in self._modules.items()
            if type(module) is nn.Linear and not (tied and module is head)
        }
        self._text = text_tensors(facts)

    def find(self) -> QuantizedModules:
        quantized = quantized_layers(self._text)
        goals = {layer: self._names.of(f"{layer}.weight") for layer in quantized}
        layers = {layer: self._layer_name(layer, goal) for layer, goal in goals.items()}
        stored = self._renamed(layers)
        assert self._method.schemes is not None  # `choose_layers` has refused others
        schemes = self._method.schemes(stored)
        by_name = {name: layer for layer, name in layers.items()}
        linears: dict[str, HeldLinear] = {}
        for name, module in self._linears.items():
            if (stored.types and name not in by_name) or self._method.makes_floats(name):
                continue
            scheme = schemes((name,), module.in_features, False)
            if scheme is not None:
                sizes = module.out_features, module.in_features
                linears[name] = HeldLinear(by_name.get(name, name), *sizes, scheme)
        experts = dict(self._experts({_module_of(each) for each in layers.values()}, schemes, bool(stored.types)))
        found = QuantizedModules(self._method, stored, layers, linears, experts)
        for layer, goal in goals.items():
            held = found.held_name(f"{layer}.weight") is not None or self._method.makes_floats(layers[layer])
            if not held and (goal.name in self._names or goal.converter is not None):
                raise self._refused_layer(layer, goal)
        return found

    def _layer_name(self, layer: str, goal: ClassTensor) -> str:
        """The name that a quantized layer of the checkpoint has among the layers that are made."""
        name = goal.name.removesuffix(".weight")
        if goal.converter is None:
            return name if name in self._linears else layer
        module, _, parameter = goal.name.rpartition(".")
        number = _EXPERT.search(layer)
        if number is None or not stacks_experts(goal.converter):
            return layer
        part = (GATE, UP)[goal.source] if parameter == _GATE_UP else DOWN
        return f"{module}.{number[1]}.{part}"

    def _renamed(self, layers: Mapping[str, str]) -> StoredModel:
        names: dict[str, str] = {}
        for stored in self._text.types:
            layer, suffix = split_name(stored)
            names[f"{layers[layer]}.{suffix}" if layer in layers else stored] = stored
        types, shapes, files = self._text.types, self._text.shapes, self._text.stored_names
        return StoredModel(
            self._facts,
            {name: types[stored] for name, stored in names.items()},
            {name: shapes[stored] for name, stored in names.items()},
            {name: own for name, stored in names.items() if (own := files.get(stored, stored)) != name},
        )

    def _experts(self, quantized: set[str], schemes: LayerSchemes, known: bool) -> Iterator[tuple[str, HeldExperts]]:
        """The experts in modules of the class that the method holds; `quantized`: the modules, if they are `known`."""
        for name, module in self._modules.items():
            if not hasattr(module, "has_gate") or (known and name not in quantized):
                continue
            sizes = self._sizes(name, module)
            if isinstance(sizes, str):
                if known:
                    raise self._refused_experts(name, sizes)
                continue
            names, inputs = expert_names(name, sizes.experts, sizes.activation), (sizes.hidden, sizes.intermediate)
            first, down = (schemes(*each, False) for each in zip(names, inputs, strict=True))
            if first is None and down is None:
                continue
            refused = None if self._method.experts is None else self._method.experts(False)
            if refused is not None:
                raise self._refused_experts(name, refused[0])
            if first is None or down is None:
                raise self._refused_experts(name, "they are quantized in part")
            if Int8("static") in (first, down):
                raise self._refused_experts(name, "their activations have static scales")
            yield name, HeldExperts(sizes, first)

    def _sizes(self, name: str, module: Any) -> ExpertSizes | str:
        """The sizes of experts that compute what the op of experts does; a clause if they do not."""
        if not module.has_gate or module.has_bias or module.is_transposed or not module.is_concatenated:
            return "its class has them in another form than gate and up projection as halves, without biases"
        if type(module)._apply_gate.__module__ != use_experts_implementation.__module__ or module.has_post_expert_norm:
            return "its class computes more than an activation between their products"
        if list(inspect.signature(type(module).forward).parameters) != _OPERANDS:
            return "its class gives them other inputs than hidden states, experts and weights"
        activation = _ACTIVATIONS.get(type(module.act_fn))
        if activation is None:
            return f"their activation is {type(module.act_fn).__name__}, which no op of experts computes"
        parameters = dict(module.named_parameters())
        count = getattr(module.config, "num_experts_per_tok", None)
        if parameters.keys() != {_GATE_UP, DOWN} or not isinstance(count, int):
            return "its class has them in other parameters, or does not say how many a token has"
        experts, hidden, inner = parameters[DOWN].shape
        if parameters[_GATE_UP].shape != (experts, 2 * inner, hidden):
            return f"its class has them in parameters of other shapes than [{experts}, {2 * inner}, {hidden}]"
        return ExpertSizes(experts, count, hidden, inner, activation)

    def _refused_experts(self, name: str, why: str) -> ModelError:
        reason = f"the experts {name} are quantized with {self._method.name}, which no layers can hold here: {why}"
        return _refused(self._facts, reason, self._remedy)

    def _refused_layer(self, layer: str, goal: ClassTensor) -> ModelError:
        module = goal.name.rpartition(".")[0]
        kind = type(self._modules.get(module)).__name__
        how = f"is in {goal.name}, which its class makes of several weights" if goal.converter else f"is of {kind}"
        reason = f"{layer} is quantized with {self._method.name}, but in transformers it {how}, not a linear layer"
        return _refused(self._facts, reason, self._remedy)

    @property
    def _remedy(self) -> str:
        layers = quantized_layers(self._text)
        if not self._method.dequantizable or any(_no_floats(self._names, self._modules, each) for each in layers):
            return _OTHERS
        return "Set --dequantize-weights: the weights then take the model's dtype"


def without_data(model: Any, modules: QuantizedModules, path: str) -> None:
    """Put modules in place of the quantized ones that compute shapes alone. `model`: one without weights."""
    for name in modules.linears:
        model.set_submodule(name, _Shape(name, path, modules.linears[name].outputs))
    for name in modules.experts:
        model.set_submodule(name, _Shape(name, path, None))


def placeholders(model: Any, modules: QuantizedModules, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A tensor without memory for each parameter of the quantized modules, by a name for transformers to load.

    It has the shape of the parameter, and one element. Without it, transformers would allocate all of them.
    """
    element = torch.zeros((), dtype=dtype)
    named = {name: linear.stored for name, linear in modules.linears.items()}
    for name, stored in {**named, **{each: each for each in modules.experts}}.items():
        for parameter, tensor in model.get_submodule(name).named_parameters():
            yield f"{stored}.{parameter}", element.expand(tensor.shape)


def replace_quantized(model: Any, modules: QuantizedModules, context: BuildContext) -> dict[str, Tensor]:
    """Replace the quantized modules of a model. Returns what a loader fills, by the names of layers."""
    if modules.method is None or modules.stored is None:
        return {}
    factory, views = make_factory(modules.method, context, modules.stored), dict[str, Tensor]()
    for name, linear in modules.linears.items():
        bias = model.get_submodule(name).bias is not None
        layer = factory.linear({name: linear.outputs}, linear.inputs, bias)
        model.set_submodule(name, QuantizedLinear(layer))
        views |= layer.weight_views()
    for name, held in modules.experts.items():
        experts = factory.experts(name, held.sizes)
        model.set_submodule(name, QuantizedExperts(experts))
        views |= experts.weight_views()
    return views


def quantized_modules(model: nn.Module) -> Iterator[QuantizedLinear | QuantizedExperts]:
    return (each for each in model.modules() if isinstance(each, QuantizedLinear | QuantizedExperts))
