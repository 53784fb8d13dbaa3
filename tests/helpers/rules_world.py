"""Statements of platforms, asked directly: a user cannot set what is planned, and its rules must hold already."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from srv.args.config import ARGUMENTS
from srv.platform.facts import Constraint, Contribution, Default, DeviceFacts, PlatformFacts, Requires, Unfit
from srv.platform.registry import find_platforms
from srv.specs import CacheGroup, ModelFacts

GIB = 1 << 30
FACTS: dict[str, PlatformFacts] = {name: found.loaded.facts for name, found in find_platforms().items()}


def model(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelFacts:
    """A model of heads that every backend takes."""
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
        cache_groups=(CacheGroup("full", (0, 1, 2, 3), 8, 64, 64),),
    )
    return replace(facts, **changes)


LATENT = model("DeepseekV3ForCausalLM", config={"kv_lora_rank": 512}, heads=128)
GPT_OSS = model("GptOssForCausalLM")
LLAMA4 = model("Llama4ForConditionalGeneration")


@dataclass
class Asked:
    """What a statement sees. `reads`: what it may look at (None: anything, as a backend's check may)."""

    device: DeviceFacts
    model: ModelFacts | None
    values: dict[str, Any]
    reads: set[str] | None = None
    capabilities: frozenset[str] = field(default_factory=frozenset)

    def __getitem__(self, argument: str) -> Any:
        assert argument in ARGUMENTS
        assert self.reads is None or argument in self.reads, f"it reads {argument} without saying so"
        return self.values.get(argument)


def device(platform: str, profile: str, **versions: str) -> DeviceFacts:
    return replace(FACTS[platform].profiles[profile], versions=versions)


def fit(on: DeviceFacts, platform: str, family: str, name: str, about: ModelFacts | None, **user: Any) -> Any:
    """What a backend requires, or the reasons against it as one text. `user`: what the user set."""
    (spec,) = (spec for spec in FACTS[platform].backends[family] if spec.name == name)
    answer = spec.check(Asked(on, about, user))
    if isinstance(answer, Unfit):
        assert answer.reasons
        return "; ".join(answer.reasons)
    assert isinstance(answer, Requires)
    return dict(answer.values)


def decided(reads: tuple[str, ...], on: DeviceFacts, about: ModelFacts | None, values: dict[str, Any]) -> Asked:
    """A view of decided arguments: the declared defaults, and these."""
    everything = {name: argument.default for name, argument in ARGUMENTS.items()} | values
    return Asked(on, about, everything, set(reads))


def said(platform: str, argument: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> Any:
    """What a platform's defaults say of an argument; None if nothing."""
    defaults: list[Default] = [each for each in FACTS[platform].defaults if each.argument == argument]
    told = [each.compute(decided(each.reads, on, about, values)) for each in defaults]
    told = [each for each in told if each is not None]
    assert len(told) <= 1
    return told[0] if told else None


def broken(platform: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> dict[str, str]:
    """Codes of the platform's constraints that these values break, by the argument to blame."""
    own: tuple[Constraint, ...] = FACTS[platform].constraints
    return {
        each.argument: each.code
        for each in own
        if each.check(decided((each.argument, *each.reads), on, about, values)) is not None
    }


def part_of(platform: str, name: str, on: DeviceFacts, about: ModelFacts | None = None, **values: Any) -> float:
    """What one of the platform's contributions gives: bytes, or a share of the rest."""
    (part,) = (each for each in FACTS[platform].contributions if each.name == name)
    assert isinstance(part, Contribution)
    return part.compute(decided(part.reads, on, about, values))
