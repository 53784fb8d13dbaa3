"""Causal models without native layers: the class of transformers with our paged attention.

Owns the wrapper and the loading of the weights. Must not be imported unless such a model is served, because importing
transformers takes seconds.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from srv.errors import ModelError, SrvError
from srv.models.architectures.registry import gguf_layout
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.formats.dummy import load_dummy
from srv.models.formats.filling import OTHER_CHECKPOINT, Meter, Progress, listed
from srv.models.formats.gguf_loader import load_gguf
from srv.models.transformers.hf_attention import IMPLEMENTATION, STEP, HFForwardPass, build_error, register, unsupported
from srv.models.transformers.hf_check import DenseCache, largest_difference
from srv.specs import AttentionLayer, AttentionSpec, ModelFacts, spec_name

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 300  # of an error of transformers, in our errors
NO_BACKENDS = "its class in transformers does not support attention backends"


class HFModel(CausalLM):
    """Wraps a `...ForCausalLM` of transformers.

    Such a class may scale and cap its logits after the output layer; `logits` does the same.
    """

    def __init__(self, model: Any, facts: ModelFacts, device: torch.device) -> None:
        super().__init__()
        self.model = model.to(device).eval()
        self.what = f"{facts.architecture} ({facts.name})"
        self._layers: dict[int, AttentionLayer] = {}
        config = model.config.get_text_config()
        self._soft_cap = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale /= float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer for _, layer in sorted(self._layers.items()))

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        return self._pass(inputs, HFForwardPass(self.what, context, self._layers))

    def _pass(self, inputs: ModelInputs, step: HFForwardPass) -> Tensor:
        output = self.model.base_model(
            input_ids=inputs.tokens.unsqueeze(0),
            position_ids=inputs.positions.unsqueeze(0),
            use_cache=False,
            **{STEP: step},
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.model.get_output_embeddings()(hidden)
        if self._scale != 1.0:
            scores = scores * self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        return scores

    @torch.no_grad()
    def find_layers(self) -> None:
        """Find the attention layers in a pass without data, over weights on the device "meta"."""
        inputs = torch.zeros(1, dtype=torch.int64, device="meta")
        context = ForwardContext(lambda layer, q, k, v: q)
        self._pass(ModelInputs(inputs, inputs), HFForwardPass(self.what, context, self._layers, learn=True))

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
            step = HFForwardPass(self.what, ForwardContext(cache.attend), self._layers, learn=True)
            return self.logits(self._pass(ModelInputs(tokens, positions), step))

        try:
            difference = largest_difference(facts.vocab_size, device, own, ours)
        except SrvError:
            raise
        except Exception as error:  # the class may raise anything: it is not supported
            raise unsupported(self.what, f"a trial pass failed ({type(error).__name__}: {error})") from error
        limit = 1e-3 if dtype == torch.float32 else 0.1
        if not difference <= limit:
            reason = f"with paged attention its logits have a relative error of {difference:.2g} (limit {limit:g})"
            raise unsupported(self.what, reason)
        self._check_layers(facts)
        for index, (group, place) in places.items():
            self._layers[index] = replace(self._layers[index], index=place, group=group)

    def _check_layers(self, facts: ModelFacts) -> None:
        """The layout of the KV pool follows from the facts, so every layer must match them."""
        if sorted(self._layers) != list(range(facts.layers)):
            raise unsupported(self.what, f"only layers {listed([str(i) for i in sorted(self._layers)])} use attention")
        windows: dict[int, int | None] = {}
        for group in facts.cache_groups:
            if not isinstance(group, AttentionSpec):
                raise unsupported(self.what, f"layers {group.layers} need a {spec_name(group)} cache group")
            windows.update(dict.fromkeys(group.layers, group.window))
        for layer in self._layers.values():
            if windows[layer.index] not in (None, layer.window):
                reason = f"layer {layer.index} has a window of {layer.window} tokens, not {windows[layer.index]}"
                raise unsupported(self.what, reason)
            if (layer.kv_heads, layer.head_dim) != (facts.kv_heads, facts.head_dim):
                found = f"{layer.kv_heads} key heads of {layer.head_dim}"
                reason = f"layer {layer.index} has {found}, not {facts.kv_heads} of {facts.head_dim}"
                raise unsupported(self.what, reason)


def build_hf(
    facts: ModelFacts,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Progress | None,
    places: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    check_layers: Callable[[Sequence[AttentionLayer]], None] = lambda layers: None,
) -> HFModel:
    """The model of `facts` through transformers. Raises ModelError: unsupported_architecture and loaders' codes.

    places: as `BuildContext.cache_places`. check_layers: as in `srv.models.build.build`.
    """
    register()
    _check_known(facts)
    try:
        config = _config(facts)
        skeleton = _skeleton_layers(facts, config)
        if skeleton:
            check_layers(skeleton)
        if load_format == "safetensors":
            model = _from_folder(facts, config, dtype, progress)
        else:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    except (ValueError, KeyError, ImportError, OSError, TypeError, RuntimeError) as error:
        # Some classes look up the implementation in their own table, and fail.
        unknown = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        if unknown:
            raise unsupported(facts.architecture, NO_BACKENDS) from error
        raise build_error(facts.architecture, f"{type(error).__name__}: {_first_line(error)}") from error
    if not type(model).is_backend_compatible():
        raise unsupported(facts.architecture, NO_BACKENDS)
    wrapped = HFModel(model, facts, device)
    targets = {name: parameter.data for name, parameter in wrapped.model.named_parameters()}
    if load_format == "dummy":
        load_dummy(targets, seed, progress)
    elif load_format == "gguf":
        load_gguf(facts, gguf_layout(facts.architecture), targets, progress)
    wrapped.learn(facts, device, dtype, places)
    if not skeleton:
        check_layers(wrapped.attention_layers)
    return wrapped


def _skeleton_layers(facts: ModelFacts, config: Any) -> tuple[AttentionLayer, ...]:
    """The attention layers of the model without its weights; () if they only show in a pass with weights.

    Some classes choose what they compute by values of tensors, which a pass without data does not have.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=IMPLEMENTATION)
        skeleton = HFModel(model, facts, torch.device("meta"))
        skeleton.find_layers()
    except Exception as error:  # noqa: BLE001 - loading and the trial pass report what is wrong with the class
        log.debug("%s: its attention layers are not known before its weights are loaded: %r", facts.name, error)
        return ()
    return skeleton.attention_layers


def _check_known(facts: ModelFacts) -> None:
    """Refuse an architecture that transformers does not have either; its own message would be very long."""
    model_type = facts.config.get("model_type")
    if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    support = "has no causal model of that type" if model_type in CONFIG_MAPPING else "does not know that type"
    release = f"transformers {transformers.__version__}"
    reason = f"srv has no such architecture, and {release} {support} (model_type {model_type!r})"
    remedy = "Serve a Llama, Mistral or Qwen model or a causal one that transformers knows, or install a newer release"
    raise ModelError("unsupported_architecture", f"{facts.architecture} ({facts.path})", reason, remedy)


def _first_line(error: Exception) -> str:
    """The first line of an error message, limited in length."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + "..."


def _config(facts: ModelFacts) -> Any:
    if facts.format != "gguf":
        return AutoConfig.from_pretrained(facts.path, local_files_only=True, trust_remote_code=False)
    fields = {name: value for name, value in facts.config.items() if name != "model_type"}
    rope = fields["rope_parameters"]
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # one of all layers, or of each kind
    if any(each["rope_type"] == "freq_factors" for each in kinds):
        raise unsupported(
            facts.architecture, "transformers does not support the RoPE frequency factors of this GGUF file"
        )
    return AutoConfig.for_model(facts.config["model_type"], **fields)


def _from_folder(facts: ModelFacts, config: Any, dtype: torch.dtype, progress: Progress | None) -> Any:
    """Load with transformers, which renames and fuses the weights of some architectures."""
    meter = Meter(facts.weight_bytes, progress)
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # `progress` is shown instead
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            facts.path,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            output_loading_info=True,
        )
    finally:
        if bars:
            hf_logging.enable_progress_bar()
    missing, wrong = sorted(report["missing_keys"]), sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelError("missing_tensors", facts.path, f"it lacks {listed(missing)}", OTHER_CHECKPOINT)
    if wrong:
        raise ModelError("shape_mismatch", facts.path, f"shapes differ: {listed(wrong)}", OTHER_CHECKPOINT)
    meter.add(facts.weight_bytes, facts.name)
    return model
