"""What the engine process is started with: a frozen, complete description. No torch, no device."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from srv.models.facts import ModelFacts
from srv.platform.facts import DeviceFacts


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Travels as JSON over the engine process's standard input.

    `config` is the resolved configuration as JSON (`Config.to_json`). `backends`: by the argument that chose
    it ("sampling_backend"), a backend's name and target. `kv_order` is the one its attention backends read.
    `reserved_bytes` of device memory stay free for activations. `options` are the values of the arguments
    that the platform's manifest asked for. `parent` is the process that the engine belongs to: it ends when that
    one is gone.
    """

    platform: str
    device: DeviceFacts
    model: ModelFacts
    config: str
    backends: Mapping[str, tuple[str, str]]
    kv_order: str
    reserved_bytes: float
    options: Mapping[str, str | int | float | bool | None]
    to_engine: str
    from_engine: str
    log_level: str
    parent: int


def encode(spec: EngineSpec) -> bytes:
    return msgspec.json.encode(spec)


def decode(data: bytes) -> EngineSpec:
    return msgspec.json.decode(data, type=EngineSpec)
