"""EngineSpec: the complete description of an engine, made from a resolved launch. Imports no torch, opens no device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from srv.args.config import Config
from srv.args.statement import Layer
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.plan import reserved_parts
from srv.planning.replicas import of_replica
from srv.planning.resolution import LaunchContext
from srv.platform.facts import DeviceFacts
from srv.specs import ModelFacts

Spec = TypeVar("Spec", bound=msgspec.Struct)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine process needs to start; sent as JSON over its standard input.

    `config` is the resolved configuration, with its secrets. `backends` maps a backend argument
    ("sampling_backend") to the name and the import target of the chosen backend, `latent_backends` to the import target
    of its class for latent attention, if it has one, and `backend_arguments` to the values of the arguments that it
    reads. `kv_order` is the axis order of the KV pool that the attention backends require;
    `kv_lengths` says whether all of them take KV lengths from the "device", or one needs them on the "host".
    `reserved_parts`: bytes of device memory that stay free for activations and others, by what needs them.
    `options` are the values of the arguments that the platform's manifest declares. `to_engine` and `from_engine` are
    socket addresses. `late_inputs`: plans may have rows that wait for late inputs. `replica`: the number of this engine
    among all replicas. `meeting`: the private directory in which replicas meet that compute each step together.
    `user_set`: the arguments that the user has set. `parent` is the process id of the API process; the engine exits
    when that process has exited.
    """

    platform: str
    device: DeviceFacts
    model: ModelFacts
    config: Config
    backends: Mapping[str, tuple[str, str]]
    latent_backends: Mapping[str, str] = {}
    backend_arguments: Mapping[str, Mapping[str, str | int | float | bool | None]] = {}
    kv_order: str
    kv_lengths: str
    reserved_parts: Mapping[str, float]
    options: Mapping[str, str | int | float | bool | None]
    to_engine: str
    from_engine: str
    late_inputs: bool = False
    replica: int = 0
    meeting: str = ""
    user_set: list[str] = []
    log_level: str
    parent: int


def engine_spec(context: LaunchContext, to_engine: str, from_engine: str) -> EngineSpec:
    """The EngineSpec of a resolved launch; `to_engine` and `from_engine` are the addresses of the two sockets."""
    resolved = context.resolved
    attention = [resolved.backends[slot] for slot in ATTENTION_SLOTS]
    return EngineSpec(
        platform=context.platform,
        device=context.device,
        model=context.model,
        config=of_replica(resolved.config),
        backends={slot: (choice.spec.name, choice.spec.target) for slot, choice in resolved.backends.items()},
        latent_backends={slot: choice.spec.latent for slot, choice in resolved.backends.items() if choice.spec.latent},
        backend_arguments={
            slot: {name: resolved.config.get(name) for name in choice.spec.arguments}
            for slot, choice in resolved.backends.items()
        },
        kv_order=resolved.backends["prefill_attention_backend"].spec.kv_order,
        kv_lengths="device" if all(choice.spec.lengths == "device" for choice in attention) else "host",
        reserved_parts=reserved_parts(resolved),
        options={name: resolved.config.get(name) for name in context.manifest.options},
        to_engine=to_engine,
        from_engine=from_engine,
        user_set=[name for name, each in resolved.provenance.items() if each.layer is Layer.USER],
        log_level=resolved.config.server.log_level,
        parent=os.getpid(),
    )


def encode(spec: msgspec.Struct) -> bytes:
    """An EngineSpec, or a struct that holds one, as JSON with Infinity and NaN, which configurations of models have."""
    plain = msgspec.to_builtins(
        spec, str_keys=True, enc_hook=lambda value: dict(value) if isinstance(value, Mapping) else str(value)
    )
    return json.dumps(plain).encode()


def decode(data: bytes, kind: type[Spec]) -> Spec:
    """The inverse of `encode` for structs of this type. Raises msgspec.ValidationError for any other data."""
    try:
        plain = json.loads(data)
    except ValueError as error:
        raise msgspec.ValidationError(f"it is not JSON: {error}") from error
    return msgspec.convert(plain, kind, str_keys=True, dec_hook=lambda path, text: path(text))
