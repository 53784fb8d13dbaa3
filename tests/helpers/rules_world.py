"""Call the rules of platforms directly, because users cannot set planned arguments yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from args_world import described

from srv.args.config import ARGUMENTS
from srv.models.facts.attention_layers import attention_layers
from srv.platform.facts import Constraint, Contribution, Default, DeviceFacts, PlatformFacts, Requires, Unfit
from srv.platform.layers import layer_kinds, missing_traits, unsupported_layers
from srv.platform.registry import find_platforms
from srv.specs import FullAttention, ModelFacts

GIB = 1 << 30
FACTS: dict[str, PlatformFacts] = {name: platform.loaded.facts for name, platform in find_platforms().items()}


def model(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelFacts:
    """A model with heads that every backend supports."""
    facts = ModelFacts(
        name="imagined",
        path="/models/imagined",
        format="safetensors",
        architecture=architecture,
        config={},
        dtype="bfloat16",
        quantization=None,
        vocab_size=1000,
        hidden_size=1024,
        layers=4,
        heads=16,
        kv_heads=8,
        head_dim=64,
        context_length=65536,
        parameters=10**8,
        weight_bytes=2 * 10**8,
        cache_groups=(FullAttention((0, 1, 2, 3), 8, 64, 64),),
    )
    return described(facts, changes)


LATENT = model("DeepseekV3ForCausalLM", config={"kv_lora_rank": 512}, heads=128)
GPT_OSS = model("GptOssForCausalLM")
LLAMA4 = model("Llama4ForConditionalGeneration", config={"attention_chunk_size": 8192})


@dataclass
class FakeContext:
    """The context of a rule. `reads`: the arguments that it may read (None: any, as for a backend's check)."""

    device: DeviceFacts
    model: ModelFacts | None
    values: dict[str, Any]
    reads: set[str] | None = None
    capabilities: frozenset[str] = field(default_factory=frozenset)

    def __getitem__(self, argument: str) -> Any:
        assert argument in ARGUMENTS
        assert self.reads is None or argument in self.reads, f"it reads {argument} without declaring it"
        return self.values.get(argument)


def device(platform: str, profile: str, **versions: str) -> DeviceFacts:
    return replace(FACTS[platform].profiles[profile], versions=versions)


def fit(on: DeviceFacts, platform: str, family: str, name: str, about: ModelFacts | None, **user: Any) -> Any:
    """What a backend requires, or the reasons why it does not fit as one text. `user`: the values that the user set."""
    (spec,) = (spec for spec in FACTS[platform].backends[family] if spec.name == name)
    answer = spec.check(FakeContext(on, about, user))
    if isinstance(answer, Unfit):
        assert answer.reasons
        return "; ".join(answer.reasons)
    if about is not None and family == "attention":
        kinds, why = layer_kinds(attention_layers(about), about), partial(missing_traits, spec.layer_traits)
        if missing := unsupported_layers(kinds, why):
            return "; ".join(missing)
    assert isinstance(answer, Requires)
    return dict(answer.values)


def decided(reads: tuple[str, ...], on: DeviceFacts, about: ModelFacts | None, values: dict[str, Any]) -> FakeContext:
    """A context with resolved arguments: the declared defaults, replaced by `values`."""
    everything = {name: argument.default for name, argument in ARGUMENTS.items()} | values
    return FakeContext(on, about, everything, set(reads))


def default_of(platform: str, argument: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> Any:
    """The platform's default for an argument; None if it has none."""
    defaults: list[Default] = [candidate for candidate in FACTS[platform].defaults if candidate.argument == argument]
    values_found = [candidate.compute(decided(candidate.reads, on, about, values)) for candidate in defaults]
    actual = [value for value in values_found if value is not None]
    assert len(actual) <= 1
    return actual[0] if actual else None


def violations(platform: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> dict[str, str]:
    """Codes of the platform's constraints that these values violate, by the constrained argument."""
    constraints: tuple[Constraint, ...] = FACTS[platform].constraints
    return {
        constraint.argument: constraint.code
        for constraint in constraints
        if constraint.check(decided((constraint.argument, *constraint.reads), on, about, values)) is not None
    }


def contribution(platform: str, name: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> float:
    """The result of one of the platform's memory contributions: bytes, or a fraction of the rest."""
    (part,) = (candidate for candidate in FACTS[platform].contributions if candidate.name == name)
    assert isinstance(part, Contribution)
    return part.compute(decided(part.reads, on, about, values))
