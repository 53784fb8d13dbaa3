"""Imagined inputs for tests of arguments: a platform, its device, a model, and a user's statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.args.resolve import resolve
from srv.args.statement import Origin, Resolved, UserInput, UserStatement
from srv.platform import API_VERSION
from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv.platform.manifest import EngineContext, Manifest, ProbeContext, ProbeResult
from srv.specs import FullAttention, ModelFacts

GIB = 2**30
CAPABLE = frozenset(
    {
        "paged_kv",
        "prefix_cache",
        "chunked_prefill",
        "overlap",
        "graphs",
        "gguf_blocks",
        "gguf_codebooks",
        "communicator",
        "float32",
        "float16",
        "bfloat16",
    },
)
SOURCES = {
    Origin.COMMAND_LINE: "command line",
    Origin.ENVIRONMENT: "environment SRV_X",
    Origin.CONFIG_FILE: "config file serve.yaml line 1",
}

# config.json of a model that every platform supports.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def user(origin: Origin = Origin.COMMAND_LINE, /, **values: Any) -> UserInput:
    """A user's values from one origin."""
    return UserInput(tuple(UserStatement(name, value, origin, SOURCES[origin]) for name, value in values.items()))


def both(*inputs: UserInput) -> UserInput:
    """The inputs of several origins together."""
    return UserInput(tuple(statement for user_input in inputs for statement in user_input.statements))


def device(memory_bytes: int = 16 * GIB) -> DeviceFacts:
    return DeviceFacts("mk1", memory_bytes, 1, name="Imagined One")


def model(**changes: Any) -> ModelFacts:
    """A model of 100 M parameters: 10 layers, 4 KV heads of 64, context 1000."""
    facts = ModelFacts(
        name="tiny",
        path="/models/tiny",
        format="safetensors",
        architecture="LlamaForCausalLM",
        config={},
        dtype="bfloat16",
        quantization=None,
        vocab_size=1000,
        hidden_size=512,
        layers=10,
        heads=8,
        kv_heads=4,
        head_dim=64,
        context_length=1000,
        parameters=100_000_000,
        weight_bytes=200_000_000,
        cache_groups=(FullAttention(tuple(range(10)), 4, 64, 64),),
    )
    return described(facts, changes)


def described(facts: ModelFacts, changes: Mapping[str, Any]) -> ModelFacts:
    """The facts with these changes, and a configuration of them that native layers support.

    `config` of the changes adds to it.
    """
    changed = replace(facts, **{**changes, "config": {}})
    config = {
        "hidden_size": changed.hidden_size,
        "intermediate_size": 4 * changed.hidden_size,
        "num_hidden_layers": changed.layers,
        "num_attention_heads": changed.heads,
        "num_key_value_heads": changed.kv_heads,
        "head_dim": changed.head_dim,
        "vocab_size": changed.vocab_size,
        "max_position_embeddings": changed.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    return replace(changed, config={**config, **changes.get("config", {})})


def fits(requires: dict[str, tuple[Any, ...]] | None = None) -> Any:
    """A backend's check that always fits, requiring these values."""
    return lambda context: Requires(requires or {})


def unfit(*reasons: str) -> Any:
    return lambda context: Unfit(reasons)


def backend(name: str, priority: int = 10, check: Any = None, kv_order: str = "page_token_head") -> BackendSpec:
    return BackendSpec(name, priority, check or fits(), f"imagined.{name}:Backend", kv_order, graphs=True)


def manifest(*attention: BackendSpec, capabilities: frozenset[str] = CAPABLE, **facts: Any) -> Manifest:
    """A platform called "imagined" with these attention backends (by default one that fits)."""

    def create(context: EngineContext) -> Any:
        raise AssertionError("arguments are resolved without a live platform")

    def probe(context: ProbeContext) -> ProbeResult:
        raise AssertionError("arguments are resolved without a probe")

    facts.setdefault("backends", {"attention": attention or (backend("plain"),), "sampling": (backend("dice"),)})
    return Manifest(
        name="imagined",
        api=API_VERSION,
        core=">=0.1",
        variants=("mk1",),
        priority=1,
        summary="exists in tests only",
        facts=PlatformFacts(lambda _: capabilities, {"mk1": device()}, **facts),
        probe=probe,
        create=create,
    )


def resolved(user_input: UserInput | None = None, on: Manifest | None = None, **arguments: Any) -> Resolved:
    """Resolve on the imagined platform, with the tiny model unless `model` is given."""
    arguments.setdefault("device", device())
    arguments.setdefault("model", model())
    return resolve(user_input or UserInput(), manifest=on or manifest(), **arguments)


def reader(*names: str) -> Any:
    """A compute function that reads these arguments and returns the value of the last one."""

    def compute(context: ResolutionContext) -> Any:
        return [context[name] for name in names][-1]

    return compute
