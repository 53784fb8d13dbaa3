"""`system_fingerprint` is the same at every start, and another one for other weights or another configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from args_world import CAPABLE, manifest, model, resolved, user

from srv.server.protocols.openai.fingerprint import system_fingerprint


def test_it_changes_with_weights_and_configuration_only(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    content = bytearray(300_000)
    weights.write_bytes(content)
    facts = dataclasses.replace(model(), path=str(tmp_path), format="safetensors")
    first = system_fingerprint(facts, resolved())
    assert first.startswith("fp_")
    assert system_fingerprint(facts, resolved()) == first
    assert system_fingerprint(facts, resolved(user(port=1234))) == first
    other_config = {**facts.config, "rms_norm_eps": 0.5}
    fingerprints = {
        first,
        system_fingerprint(dataclasses.replace(facts, config=other_config), resolved()),
        system_fingerprint(facts, resolved(user(dtype="float32"))),
    }
    for at in (0, len(content) - 1):
        content[at] ^= 1
        weights.write_bytes(content)
        fingerprints.add(system_fingerprint(facts, resolved()))
    weights.write_bytes(content + b"\0")
    fingerprints.add(system_fingerprint(facts, resolved()))
    assert len(fingerprints) == 6


def test_it_changes_with_the_method_by_which_weights_are_quantized_at_load(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    facts = dataclasses.replace(model(), path=str(tmp_path))
    chosen = [
        {},
        {"quantization": "fp8"},
        {"torchao_config": "fp8wo"},  # the same method by another argument
        {"quantization": "w8a8_int8"},
        {"torchao_config": "int8wo"},
    ]
    on = manifest(capabilities=CAPABLE | {"fp8_weights", "w8a8", "int8_weights"})
    fingerprints = [system_fingerprint(facts, resolved(user(**values), on)) for values in chosen]
    assert fingerprints[1] == fingerprints[2]
    assert len(set(fingerprints)) == 4
