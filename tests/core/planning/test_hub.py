"""Models on a hub: plans read headers by range requests, and a launch refuses before it downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG
from e2e_support import clean_environment
from gguf_cases import CASES, write_gguf
from local_hub import LocalHub, running_hub
from sparse_weights import write_shard

from srv.models.checkpoints.gguf_header import read_header
from srv.models.locate import demo_model
from srv.models.read import read_facts

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000, "num_hidden_layers": 24}
LLAMA = {**CONFIG, **SIZES, "num_attention_heads": 16, "num_key_value_heads": 4}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SCALE = {"model.layers.0.self_attn.k_scale": (1,)}
MIB = 1 << 20
# Of methods that describe the weights in a file of their own, with its name: forms that layers support or not.
QUANTIZED = {
    "llama-awq": ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ", "exclude_modules": ["lm_head"]}}),
    "llama-gptq": ("quantize_config.json", {"bits": 2, "group_size": 128}),
    "llama-w4a8": ("quant_model_description.json", {"model.layers.0.weight": "W4A8"}),
    "llama-w8a8": ("quant_model_description.json", {"model.layers.0.weight": "W8A8"}),
}


def write_checkpoint(folder: Path, **fields: Any) -> None:
    """A checkpoint of two shards of 512 MiB, beside a copy of its weights that the index does not name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    names = {shard: {f"model.layers.{number}.weight": (16384, 16384)} for number, shard in enumerate(SHARDS)}
    for shard, tensors in names.items():
        write_shard(folder / shard, tensors)
    write_shard(folder / "consolidated.safetensors", {"tok_embeddings.weight": (16384, 16384)})
    weight_map = {name: shard for shard, tensors in names.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    root = tmp_path_factory.mktemp("hub")
    write_checkpoint(root / "org" / "llama")
    write_checkpoint(root / "org" / "llama-scales")
    write_shard(root / "org" / "llama-scales" / SHARDS[1], SCALE | {"model.layers.1.weight": (16384, 16384)})
    write_checkpoint(root / "org" / "llama-quark", quantization_config={"quant_method": "quark"})
    for name, (file, described) in QUANTIZED.items():
        write_checkpoint(root / "org" / name)
        (root / "org" / name / file).write_text(json.dumps(described))
    packed = {"model.layers.0.mlp.down_proj.qweight": (1,)}
    write_shard(root / "org" / "llama-gptq" / SHARDS[1], packed | {"model.layers.1.weight": (16384, 16384)})
    (root / "org" / "demo").mkdir()
    (root / "org" / "demo" / "model.gguf").symlink_to(demo_model())
    (root / "org" / "demo" / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    with running_hub(root) as running:
        yield running


@pytest.fixture
def environment(hub: LocalHub, tmp_path: Path) -> dict[str, str]:
    hub.sent.clear()
    hub.ranges = True
    more = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    return {**clean_environment(), **more, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def srv(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "srv", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def downloaded(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.stat().st_size > MIB]


def test_a_plan_reads_the_config_and_the_headers_of_the_shards(
    hub: LocalHub, environment: dict[str, str], tmp_path: Path
) -> None:
    process = srv(environment, "plan", "--json", "--device", "cpu:avx512", "--model-path", "org/llama")
    plan = json.loads(process.stdout)
    assert (process.returncode, plan["accepted"], plan["model"]) == (0, True, "org/llama"), process.stderr
    assert "1.00 GiB of weights" in plan["budget"]["breakdown"][0][1]
    files = {name.rpartition("/")[2] for name in hub.sent}
    assert files == {"config.json", "model.safetensors.index.json", *SHARDS}
    whole = sum(
        (hub.root / "org/llama" / name).stat().st_size for name in ("config.json", "model.safetensors.index.json")
    )
    headers = sum(8 + int.from_bytes((hub.root / "org/llama" / name).open("rb").read(8), "little") for name in SHARDS)
    assert sum(hub.sent.values()) == whole + headers
    assert downloaded(tmp_path) == []


def test_a_plan_does_not_judge_the_scales_of_keys_and_values(hub: LocalHub, environment: dict[str, str]) -> None:
    """Their values follow the header, and are no part of what is read."""
    words = ("--kv-cache-dtype", "fp8_e4m3", "--model-path", "org/llama-scales")
    process = srv(environment, "plan", "--json", "--device", "cpu:avx512", *words)
    plan = json.loads(process.stdout)
    assert (process.returncode, plan["accepted"]) == (0, True), process.stderr
    assert "the scales of keys and values, which follow the headers in its files" in plan["unchecked"]
    assert not [note for note in plan["notes"] if "scales of keys and values" in note]


def test_a_plan_reads_the_header_of_a_gguf_file(hub: LocalHub, environment: dict[str, str], tmp_path: Path) -> None:
    process = srv(environment, "plan", "--json", "--device", "cpu:avx512", "--model-path", "org/demo/model.gguf")
    plan = json.loads(process.stdout)
    assert (process.returncode, plan["model"]) == (0, "model"), process.stderr
    local = read_facts(demo_model())
    assert plan["arguments"]["quantization"]["value"] == "gguf"
    assert plan["arguments"]["context_length"]["value"] == local.context_length
    begin_of_data = min(tensor.offset for tensor in read_header(demo_model()).tensors.values())
    assert 0 < hub.sent["org/demo/model.gguf"] < begin_of_data + 2 * MIB < local.weight_bytes / 10
    assert downloaded(tmp_path) == []


def test_a_plan_reads_the_headers_of_all_parts_of_a_gguf_model(hub: LocalHub, environment: dict[str, str]) -> None:
    folder = hub.root / "org" / "parts"
    CASES["phi3-long"].made().save_pretrained(folder)
    write_gguf("phi3-long", folder, folder / "tiny.gguf", tensors=9)
    process = srv(environment, "plan", "--json", "--model-path", "org/parts/tiny-00001-of-00002.gguf")
    plan = json.loads(process.stdout)
    assert plan["model"] == "tiny", process.stderr
    assert set(hub.sent) == {f"org/parts/tiny-{part:05}-of-00002.gguf" for part in (1, 2)}


def test_what_is_wrong_with_a_header_names_the_model(hub: LocalHub, environment: dict[str, str]) -> None:
    process = srv(environment, "plan", "--device", "cpu:avx512", "--model-path", "org/demo/damaged.gguf")
    assert process.returncode == 2
    assert "org/demo/damaged.gguf: " in process.stderr.replace("(set by command line): ", "")
    assert "srv-headers-" not in process.stderr


def test_a_launch_refuses_before_it_downloads(hub: LocalHub, environment: dict[str, str], tmp_path: Path) -> None:
    process = srv(environment, "launch", "--device", "cpu", "--model-path", "org/llama-quark")
    assert process.returncode == 2
    assert "model_path = org/llama-quark" in process.stderr
    assert "quantized with quark" in process.stderr
    assert "[unsupported_quantization]" in process.stderr
    assert sum(hub.sent.values()) < MIB
    assert downloaded(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "llama-awq",
            "org/llama-awq: its weights are quantized with modelopt, which srv does not load yet in this "
            "form: its quant_algo is W4A8_AWQ",
        ),
        ("llama-gptq", "quantized with gptq, which srv does not load yet in this form: its integers have 2 bits"),
        ("llama-w4a8", "quant_model_description.json: it contains weights of type W4A8"),
    ],
)
def test_a_launch_refuses_what_a_file_beside_the_config_describes(
    hub: LocalHub, environment: dict[str, str], tmp_path: Path, name: str, reason: str
) -> None:
    process = srv(environment, "launch", "--device", "cpu", "--model-path", f"org/{name}")
    assert (process.returncode, reason in process.stderr) == (2, True), process.stderr
    assert "srv-headers-" not in process.stderr
    assert "[unsupported_quantization]" in process.stderr
    assert sum(hub.sent.values()) < MIB
    assert downloaded(tmp_path) == []


def test_a_plan_recognises_what_a_file_beside_the_config_describes(environment: dict[str, str]) -> None:
    process = srv(environment, "plan", "--json", "--device", "npu:a2", "--model-path", "org/llama-w8a8")
    plan = json.loads(process.stdout)
    assert plan["arguments"]["quantization"]["value"] == "modelslim"
    assert plan["accepted"], process.stderr + process.stdout[:2000]


def test_a_server_without_ranges_sends_no_weights(hub: LocalHub, environment: dict[str, str]) -> None:
    hub.ranges = False
    process = srv(environment, "plan", "--device", "cpu:avx512", "--model-path", "org/llama")
    assert process.returncode == 2
    assert "the server sends whole files only" in process.stderr
    assert "[hub_failed]" in process.stderr
    assert all(hub.sent[f"org/llama/{name}"] < 64 * MIB for name in SHARDS)
