"""Causal models without native layers: the class of transformers with our paged attention.

Owns the wrapper and the loading of the weights. Must not be imported unless such a model is served, because importing
transformers takes seconds.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as hf_logging

from srv.errors import InternalError, ModelError, SrvError, listed
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.checkpoints.converted_tensors import converted_tensors
from srv.models.checkpoints.dummy import load_dummy
from srv.models.checkpoints.filling import OTHER_CHECKPOINT, Meter, Progress
from srv.models.checkpoints.gguf_loader import load_gguf
from srv.models.checkpoints.reading import MAPPED, Reading
from srv.models.checkpoints.safetensors_header import forget_headers, read_checkpoint
from srv.models.checkpoints.safetensors_loader import load_safetensors
from srv.models.checkpoints.text_names import ROTARY, TEXT_PREFIXES, text_weight_name
from srv.models.choice import LayerChoice
from srv.models.facts.checkpoint_tensors import text_tensors
from srv.models.facts.gguf_rules import gguf_rules
from srv.models.families.registry import encoder_names, gguf_layout, is_native
from srv.models.families.trees import native_tree_of_model
from srv.models.layers.context import BuildContext
from srv.models.options import UNTIED, merged
from srv.models.remote_code import LAYERS, OPTION, check_layer_code, code_files, code_of, may_run
from srv.models.transformers.hf_attention import (
    IMPLEMENTATION,
    STEP,
    AttendsAgain,
    FoundLayers,
    HFForwardPass,
    Passes,
    Trial,
    build_error,
    register,
    unsupported,
)
from srv.models.transformers.hf_check import DenseCache, largest_difference
from srv.models.transformers.hf_claims import NO_BACKENDS, check_claims, masked_windows, pool_heads
from srv.models.transformers.hf_names import ClassNames
from srv.models.transformers.hf_output import ClassHead, body_of, first_position
from srv.models.transformers.hf_quantized import (
    QuantizedModules,
    check_dequantized,
    find_quantized,
    placeholders,
    quantized_modules,
    replace_quantized,
    without_data,
)
from srv.models.transformers.hf_rope import fix_long_rope
from srv.quantization.load_method import make_storage
from srv.specs import AttentionLayer, ModelFacts

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARACTERS = 300  # of an error of transformers, in our errors
# From the names in a vision model to those of its language model, as regular expressions.
_TEXT_NAMES = {f"^{re.escape(stored)}": own for stored, own in TEXT_PREFIXES}
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

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head is not None:
            return self._head(hidden)
        scores: Tensor = self.model.get_output_embeddings()(hidden)
        if self._scale != 1.0:
            scores = scores * self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        return scores

    def _trial(self, facts: ModelFacts) -> Trial:
        return Trial(pool_heads(facts), masked_windows(self.model))

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
    with _build_errors(facts):
        if choice.load_format != "safetensors":
            model = _make(facts, config, dtype=dtype)
        elif choice.method is None and choice.dequantized is None:
            model = _from_folder(facts, config, dtype, progress)
        else:
            model = _from_quantized(facts, config, dtype, choice, modules, reading)
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
        rename = partial(_text_name, facts, modules.held_name)
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
    _check_known(facts)
    with _build_errors(facts):
        config = _config(facts)
    _drop_quantization(config)
    modules = QuantizedModules()
    try:
        with torch.device("meta"):
            model = _make(facts, copy.deepcopy(config))
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


@contextmanager
def _build_errors(facts: ModelFacts) -> Iterator[None]:
    """Turn what transformers raises while it builds a model into a ModelError."""
    try:
        yield
    except (ValueError, KeyError, ImportError, OSError, TypeError, RuntimeError, StrictDataclassError) as error:
        # Some classes look up the implementation in their own table, and fail.
        unknown = isinstance(error, KeyError) and error.args == (IMPLEMENTATION,)
        if unknown:
            raise unsupported(facts.architecture, NO_BACKENDS) from error
        raise build_error(facts.architecture, f"{type(error).__name__}: {_first_line(error)}") from error


def _check_known(facts: ModelFacts) -> None:
    """Refuse an architecture that transformers does not have either; its own message would be very long."""
    model_type = facts.config.get("model_type")
    if may_run(facts):
        log.warning("Python code of the model is run: %s in %s", code_files(facts), facts.path)
        return
    if LAYERS in code_of(facts) and model_type not in CONFIG_MAPPING:
        check_layer_code(facts)
        reason = f"its layers are Python code in its folder ({code_files(facts)}), which is not run"
        remedy = f"Read the code; {OPTION} runs it, with all that this user may do"
        raise ModelError("remote_code", f"{facts.architecture} ({facts.path})", reason, remedy)
    if model_type in CONFIG_MAPPING and (
        CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING or _class_of(facts) is not AutoModelForCausalLM
    ):
        return
    known, release = model_type in CONFIG_MAPPING, f"transformers {transformers.__version__}"
    native = native_tree_of_model(facts) if is_native(facts.architecture) else None
    if known and isinstance(native, str):
        reason, remedy = f"its native layers do not compute it: {native}", "Use another checkpoint of the model"
        reason += f"; {release} has no causal model of that type (model_type {model_type!r}) that could be used instead"
    elif known:
        reason = f"{release} has no causal model of that type (model_type {model_type!r}), and srv has no native layers"
        reason += " for it, by which alone encoders are computed"
        remedy = f"Serve an encoder of a class that has them ({', '.join(encoder_names())}), or a causal model"
    else:
        reason = f"srv has no such architecture, and {release} does not know that type (model_type {model_type!r})"
        remedy = (
            "Serve a Llama, Mistral or Qwen model or a causal one that transformers knows, or install a newer release"
        )
    raise ModelError("unsupported_architecture", f"{facts.architecture} ({facts.path})", reason, remedy)


def _class_of(facts: ModelFacts) -> Any:
    """The class that the configuration names if it generates from configurations of this type, else that of its type.

    The causal classes of some models belong to the type of a part, for which transformers lists none.
    """
    if facts.config["model_type"] not in CONFIG_MAPPING:
        return AutoModelForCausalLM  # which finds the code in the folder
    named, config = getattr(transformers, facts.architecture, None), CONFIG_MAPPING[facts.config["model_type"]]
    listed_one = config in MODEL_FOR_CAUSAL_LM_MAPPING
    fits = isinstance(named, type) and getattr(named, "config_class", None) is config and hasattr(named, "generate")
    return named if fits and not listed_one else AutoModelForCausalLM


def _make(facts: ModelFacts, config: Any, **options: Any) -> Any:
    """The model without loaded weights."""
    made = _class_of(facts)
    if made is not AutoModelForCausalLM:
        return made._from_config(config, attn_implementation=IMPLEMENTATION, **options)
    options["trust_remote_code"] = may_run(facts)
    return made.from_config(config, attn_implementation=IMPLEMENTATION, **options)


def _first_line(error: Exception) -> str:
    """The first line of an error message, limited in length."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + "..."


def _config(facts: ModelFacts) -> Any:
    fields = {name: value for name, value in facts.config.items() if name not in ("model_type", "torch_dtype")}
    if facts.text_part_of is not None:
        return AutoConfig.for_model(facts.config["model_type"], **fields)
    if facts.format != "gguf":
        return _of_folder(facts)
    rope = fields["rope_parameters"]
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]  # one of all layers, or of each kind
    if any(each["rope_type"] == "freq_factors" for each in kinds):
        raise unsupported(
            facts.architecture, "transformers does not support the RoPE frequency factors of this GGUF file"
        )
    if any("partial_rotary_factor" in each for each in kinds):
        raise unsupported(facts.architecture, "transformers ignores that this GGUF file rotates a part of each head")
    return AutoConfig.for_model(facts.config["model_type"], **fields)


def _drop_quantization(config: Any) -> None:
    """Remove what would make transformers read quantized weights itself."""
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)


def _of_folder(facts: ModelFacts) -> Any:
    """The configuration in a folder, with the user's other values, and tied only if the weights are."""
    config = AutoConfig.from_pretrained(facts.path, local_files_only=True, trust_remote_code=may_run(facts))
    overrides = {**facts.overrides, **(UNTIED if facts.untied else {})}
    if not overrides:
        return config
    stored, _ = PreTrainedConfig.get_config_dict(facts.path, local_files_only=True)
    fields = merged(stored, overrides)
    kind = CONFIG_MAPPING[fields["model_type"]] if "model_type" in facts.overrides else type(config)
    return kind.from_dict({**fields, "_name_or_path": facts.path})


def _is_of_text(facts: ModelFacts, stored: str) -> bool:
    """Whether a tensor is of the language model, and none that `srv.models.config.tensor_notes` has announced."""
    if stored.endswith(ROTARY) or (facts.text_part_of is not None and text_weight_name(stored) is None):
        return False
    checkpoint = read_checkpoint(Path(facts.path))
    return checkpoint is None or stored in checkpoint.tensors


def _from_folder(facts: ModelFacts, config: Any, dtype: torch.dtype, progress: Progress | None) -> Any:
    """Load with transformers, which renames and fuses the weights of some architectures."""
    meter = Meter(facts.weight_bytes, progress)
    mapping = {} if facts.text_part_of is None else {"key_mapping": _TEXT_NAMES}
    trusted = {"trust_remote_code": may_run(facts)}
    model = _loaded(facts, _class_of(facts), facts.path, config=config, dtype=dtype, **trusted, **mapping)
    meter.add(facts.weight_bytes, facts.name)
    return model


def _from_quantized(
    facts: ModelFacts,
    config: Any,
    dtype: torch.dtype,
    choice: LayerChoice,
    modules: QuantizedModules,
    reading: Reading,
) -> Any:
    """Give transformers what is no quantized module's: floats, which may have been dequantized as they are read."""
    with torch.device("meta"):
        model = _make(facts, copy.deepcopy(config))
    names, checkpoint = ClassNames(model), read_checkpoint(Path(facts.path))
    method, stored = choice.method, modules.stored
    if choice.dequantized is not None:
        method, stored = choice.dequantized, text_tensors(facts)._replace(dequantize=True)
    if checkpoint is None or method is None or stored is None:
        raise InternalError(f"{facts.name} has no quantized weights to load")
    rename = partial(_text_name, facts, modules.float_name)
    with converted_tensors(checkpoint, make_storage(method, stored), rename, names.__contains__, reading) as tensors:
        given = {**tensors, **dict(placeholders(model, modules, dtype))}
        return _loaded(facts, type(model), None, config=config, dtype=dtype, state_dict=given)


def _text_name(facts: ModelFacts, rename: Callable[[str], str | None], stored: str) -> str | None:
    """The name that a tensor of the language model has by `rename`; None for the parts for images and audio."""
    name = stored if facts.text_part_of is None else text_weight_name(stored)
    return None if name is None else rename(name)


def _loaded(facts: ModelFacts, made: Any, path: str | None, **options: Any) -> Any:
    """`made.from_pretrained`, without its messages. Raises ModelError for tensors that it lacks."""
    bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()  # `progress` is shown instead
    hf_logging.set_verbosity_error()  # its report on tensors lists every weight of the vision part
    try:
        model, report = made.from_pretrained(
            path, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True, **options
        )
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
    unused = sorted(each for each in report["unexpected_keys"] if _is_of_text(facts, each))
    if unused:
        log.warning("%s is served without %s: transformers has no such tensors", facts.name, listed(unused))
    missing, wrong = sorted(report["missing_keys"]), sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelError("missing_tensors", facts.path, f"it lacks {listed(missing)}", OTHER_CHECKPOINT)
    if wrong:
        raise ModelError("shape_mismatch", facts.path, f"shapes differ: {listed(wrong)}", OTHER_CHECKPOINT)
    return model
