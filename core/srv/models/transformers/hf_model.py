"""Causal models without native layers: the class of transformers with our paged attention.

Owns the wrapper and how it comes to be: `hf_class` finds the class, `hf_weights` loads it. Must not be imported unless
such a model is served, because importing transformers takes seconds.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from srv.dist.agreement import StepShape
from srv.errors import ModelError, SrvError
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.checkpoints.dummy import load_dummy
from srv.models.checkpoints.filling import Progress
from srv.models.checkpoints.gguf_loader import load_gguf
from srv.models.checkpoints.reading import MAPPED, Reading
from srv.models.checkpoints.safetensors_header import forget_headers
from srv.models.checkpoints.safetensors_loader import load_safetensors
from srv.models.choice import LayerChoice
from srv.models.facts.gguf_rules import gguf_rules
from srv.models.families.registry import gguf_layout
from srv.models.layers.context import BuildContext
from srv.models.transformers.hf_attention import (
    IMPLEMENTATION,
    STEP,
    AttendsAgain,
    FoundLayers,
    HFForwardPass,
    Passes,
    TrialPass,
    register,
    unsupported,
)
from srv.models.transformers.hf_check import DenseCache, largest_difference
from srv.models.transformers.hf_claims import NO_BACKENDS, check_claims, masked_windows, pool_heads
from srv.models.transformers.hf_class import build_errors, check_known, config_of, drop_quantization, make_model
from srv.models.transformers.hf_output import ClassHead, body_of, first_position
from srv.models.transformers.hf_quantized import (
    QuantizedModules,
    check_dequantized,
    find_quantized,
    quantized_modules,
    replace_quantized,
    without_data,
)
from srv.models.transformers.hf_rope import fix_long_rope
from srv.models.transformers.hf_weights import from_folder, from_quantized, text_name
from srv.quantization.load_method import make_storage
from srv.specs import AttentionLayer, ModelFacts

log = logging.getLogger(__name__)

PREFIX_LM = "%s is a prefix LM: its prompts are computed causally, as in transformers without token_type_ids"


class HFModel(CausalLM):
    """Wraps a `...ForCausalLM` of transformers.

    Such a class may scale and cap its logits after the output layer; `logits` does the same.
    """

    def __init__(self, model: Any, facts: ModelFacts, device: torch.device, by_call: bool = False) -> None:
        """by_call: as in `FoundLayers`, if a skeleton has shown it."""
        super().__init__()
        self.model = model.to(device).eval()
        self.what = f"{facts.architecture} ({facts.name})"
        self._found = FoundLayers(by_call)
        self._passes, self._by_module = Passes(self.model), True
        self._shift = first_position(self.model)
        self._head: ClassHead | None = None
        config = model.config.get_text_config()
        self._soft_cap = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def by_call(self) -> bool:
        """Whether its attention layers are numbered by the calls of a pass, because a module attends more than once."""
        return self._found.by_call

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Those with a cache of their own; a layer that reads the cache of another is equal to it."""
        found = self._found
        return tuple(fitted.layer for index, fitted in sorted(found.fitted.items()) if index not in found.sources)

    def loaded_bytes(self) -> int:
        """Those of quantized layers are what a loader fills, of which not all are parameters."""
        modules = list(quantized_modules(self))
        held = {id(each) for module in modules for each in module.parameters()}
        floats = sum(each.nbytes for each in self.parameters() if id(each) not in held)
        return floats + sum(view.nbytes for module in modules for view in module.layer.weight_views().values())

    def marked_modules(self) -> dict[str, nn.Module]:
        """By the names that the class of transformers gives them."""
        return {name: module for name, module in self.model.named_modules() if name}

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self._pass(inputs, HFForwardPass(self.what, context, self._found))

    def _pass(self, inputs: ModelInputs, step: HFForwardPass) -> Tensor:
        positions = inputs.positions + self._shift if self._shift else inputs.positions
        if self._by_module:
            self._passes.current = step
        output = body_of(self.model)(
            input_ids=inputs.tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{STEP: step},
        )
        if self._by_module:
            self._passes.current = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, shape: StepShape | None = None) -> Tensor:
        if self._head is not None:
            return self._head(hidden)
        scores: Tensor = self.model.get_output_embeddings()(hidden)
        if self._scale != 1.0:
            scores = scores * self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        return scores

    def _trial(self, facts: ModelFacts) -> TrialPass:
        return TrialPass(pool_heads(facts), masked_windows(self.model))

    @torch.no_grad()
    def find_layers(self, facts: ModelFacts) -> None:
        """Find the attention layers in a pass without data, over weights on the device "meta"."""
        inputs = torch.zeros(1, dtype=torch.int64, device="meta")
        context, trial = ForwardContext(lambda layer, q, k, v: q), self._trial(facts)
        try:
            self._pass(ModelInputs(inputs, inputs), HFForwardPass(self.what, context, self._found, trial))
        except AttendsAgain:
            self._found = FoundLayers(by_call=True)
            self._pass(ModelInputs(inputs, inputs), HFForwardPass(self.what, context, self._found, trial))

    @torch.no_grad()
    def learn(
        self, facts: ModelFacts, device: torch.device, dtype: torch.dtype, places: Mapping[int, tuple[int, int]]
    ) -> None:
        """Find the attention layers by running a few tokens, and refuse a model whose results differ.

        places: as `BuildContext.cache_places`.
        """

        def own(tokens: Tensor) -> Tensor:
            self.model.set_attn_implementation("eager")
            scores: Tensor = self.model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
            self.model.set_attn_implementation(IMPLEMENTATION)
            return scores

        def ours(tokens: Tensor, positions: Tensor, cache: DenseCache) -> Tensor:
            step = HFForwardPass(self.what, ForwardContext(cache.attend), self._found, self._trial(facts))
            return self.logits(self._pass(ModelInputs(tokens, positions), step))

        limit = 1e-3 if dtype == torch.float32 else 0.1
        try:
            difference = largest_difference(facts.vocab_size, device, own, ours)
            if not difference <= limit:  # it may compute more between the last norm and its logits
                self._head = ClassHead.of(self.model)
                if self._head is not None:
                    difference = largest_difference(facts.vocab_size, device, own, ours)
        except SrvError:
            raise
        except Exception as error:  # the class may raise anything: it is not supported
            if not self._found.fitted:
                raise unsupported(self.what, NO_BACKENDS) from error
            raise unsupported(self.what, f"a trial pass failed ({type(error).__name__}: {error})") from error
        if not self._found.fitted:  # it has computed with its own attention
            raise unsupported(self.what, NO_BACKENDS)
        if not difference <= limit:
            reason = f"with paged attention its logits have a relative error of {difference:.2g} (limit {limit:g})"
            raise unsupported(self.what, reason)
        self.check_layers(facts)
        self._by_module = self._passes.asked
        for index, (group, place) in places.items():
            fitted = self._found.fitted[index]
            placed = replace(fitted.layer, index=place, group=group)
            self._found.fitted[index] = fitted._replace(layer=placed)
        for index, source in self._found.sources.items() if places else ():
            self._found.fitted[index] = self._found.fitted[source]

    def check_layers(self, facts: ModelFacts) -> None:
        """Raises ModelError if its attention layers are not those of the facts."""
        check_claims(self.what, self.attention_layers, facts)


def build_hf(
    facts: ModelFacts,
    choice: LayerChoice,
    context: BuildContext,
    seed: int,
    progress: Progress | None,
    check_layers: Callable[[Sequence[AttentionLayer]], None] = lambda layers: None,
    context_length: int | None = None,
    reading: Reading = MAPPED,
) -> HFModel:
    """The model of `facts` through transformers. Raises ModelError: unsupported_architecture and loaders' codes.

    `choice`: how its weights are held. check_layers, context_length, reading: as in `srv.models.build.build`.
    """
    config, skeleton, modules = check_without_weights(facts, choice)
    fix_long_rope(config, context_length or facts.context_length)
    if skeleton is not None:
        check_layers(skeleton.attention_layers)
    if getattr(config, "prefix_lm", False):
        log.warning(PREFIX_LM, facts.name)
    dtype, device = context.dtype, context.device
    with build_errors(facts):
        if choice.load_format != "safetensors":
            model = make_model(facts, config, dtype=dtype)
        elif choice.method is None and choice.dequantized is None:
            model = from_folder(facts, config, dtype, progress)
        else:
            model = from_quantized(facts, config, dtype, choice, modules, reading)
    views = replace_quantized(model, modules, context)
    if modules:
        log.info("%s: %s", facts.name, modules)
    # Some classes call the interface without declaring it (`is_backend_compatible`); the trial passes show which do.
    wrapped = HFModel(model, facts, device, by_call=skeleton is not None and skeleton.by_call)
    _fill(facts, choice, wrapped, views, modules, seed, progress, reading)
    wrapped.learn(facts, device, dtype, context.cache_places)
    if skeleton is None:
        check_layers(wrapped.attention_layers)
    return wrapped


def _fill(
    facts: ModelFacts,
    choice: LayerChoice,
    wrapped: HFModel,
    views: Mapping[str, Tensor],
    modules: QuantizedModules,
    seed: int,
    progress: Progress | None,
    reading: Reading,
) -> None:
    """Load what transformers has not. `views`: of the quantized layers."""
    held = {id(each) for module in quantized_modules(wrapped.model) for each in module.parameters()}
    floats = {name: each.data for name, each in wrapped.model.named_parameters() if id(each) not in held}
    if choice.load_format == "dummy":
        load_dummy({**floats, **views}, seed, progress)
    elif choice.load_format == "gguf":
        load_gguf(facts, gguf_layout(facts.architecture), gguf_rules(facts), floats, progress)
    elif modules.method is not None and modules.stored is not None:
        storage = make_storage(modules.method, modules.stored)
        rename = partial(text_name, facts, modules.held_name)
        load_safetensors(Path(facts.path), views, progress, storage, rename=rename, reading=reading)
        forget_headers()
    invalid = (module.layer.validate_loaded() for module in quantized_modules(wrapped.model))
    if (reason := next((each for each in invalid if each is not None), None)) is not None:
        raise ModelError("unsupported_quantization", facts.path, reason, "Quantize the model again")


def check_without_weights(
    facts: ModelFacts, choice: LayerChoice | None = None
) -> tuple[Any, HFModel | None, QuantizedModules]:
    """The configuration of transformers, the model without weights, which knows its attention layers, and which of its
    modules hold quantized weights. `choice`: how the weights are held; None for unquantized ones.

    The model is None if these only show in a pass with weights: some classes choose what they compute by values of
    tensors, which a pass without data does not have. Raises ModelError: unsupported_architecture, unsupported_config,
    unsupported_quantization.
    """
    register()
    check_known(facts)
    with build_errors(facts):
        config = config_of(facts)
    drop_quantization(config)
    modules = QuantizedModules()
    model = _without_data(facts, config)
    if model is None:
        return config, None, modules
    try:
        if choice is not None and choice.method is not None:
            modules = find_quantized(model, facts, choice.method)
            without_data(model, modules, facts.path)
        elif choice is not None and choice.dequantized is not None:
            check_dequantized(model, facts, choice.dequantized)
        skeleton = HFModel(model, facts, torch.device("meta"))
        skeleton.find_layers(facts)
        skeleton.check_layers(facts)
    except SrvError:
        raise
    except Exception as error:  # noqa: BLE001 - loading and the trial pass report what is wrong with the class
        log.debug("%s: its attention layers are not known before its weights are loaded: %r", facts.name, error)
        return config, None, modules
    return config, skeleton, modules


def _without_data(facts: ModelFacts, config: Any) -> Any | None:
    """The class of transformers on the device "meta"; None if building it reads values of tensors, which are not there.

    Raises ModelError for whatever else keeps transformers from building it, with weights as well.
    """
    with build_errors(facts):
        try:
            with torch.device("meta"):
                return make_model(facts, copy.deepcopy(config))
        except Exception as error:
            if "meta" not in str(error).lower():
                raise
            log.debug("%s cannot be built without its weights: %r", facts.name, error)
            return None
