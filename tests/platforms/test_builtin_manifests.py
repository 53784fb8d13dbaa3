"""The built-in platforms: found by entry points, following the contract, and refusing features that are not built."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from every import every
from rules_world import device, fit, model

from srv.args.config import ARGUMENTS
from srv.args.support import by_argument
from srv.errors import PlatformUnavailable
from srv.platform.choose import choose, device_for_plan, parse_device
from srv.platform.contract import create_platform
from srv.platform.facts import DeviceFacts, Requires
from srv.platform.manifest import EngineContext, ProbeResult
from srv.platform.registry import find_platforms
from srv.testing.conformance.arguments import asks_a_platform, needs_file

VARIANTS = {
    "cpu": ("avx2", "avx512", "amx", "neon"),
    "cuda": ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
    "rocm": ("gfx942", "gfx950", "gfx1100"),
    "npu": ("a2", "a3"),
    "xpu": ("pvc", "bmg"),
}
GPUS = ("cuda", "rocm", "xpu")
FOUND = find_platforms()


class ResolutionContext(SimpleNamespace):
    """The context of a rule if the user set nothing."""

    def __getitem__(self, argument: str) -> None:
        return None


def context(platform: str, profile: str, **model: Any) -> Any:
    """The context of a rule for a profile and a model."""
    facts = FOUND[platform].loaded.facts
    device = facts.profiles[profile]
    return ResolutionContext(device=device, model=SimpleNamespace(**model) if model else None)


def backend(platform: str, family: str, name: str) -> Any:
    specs = FOUND[platform].loaded.facts.backends[family]
    return next(spec for spec in specs if spec.name == name)


@every("name", VARIANTS)
def test_a_built_in_platform_keeps_the_contract(name: str) -> None:
    platform = FOUND[name]
    assert platform.error is None
    assert platform.distribution == "srv"
    assert platform.loaded.variants == VARIANTS[name]


def test_automatic_choice_prefers_any_accelerator_to_the_cpu() -> None:
    priorities = {name: FOUND[name].loaded.priority for name in VARIANTS}
    assert priorities.pop("cpu") == 0
    assert min(priorities.values()) > 0
    assert len(set(priorities.values())) == len(priorities)


@every("name", GPUS)
def test_a_gpu_platform_refuses_a_torch_that_was_built_without_it(name: str) -> None:
    device = next(iter(FOUND[name].loaded.facts.profiles.values()))
    with pytest.raises(PlatformUnavailable) as raised:
        create_platform(FOUND[name], EngineContext(device, 0))
    assert (raised.value.platform, raised.value.code) == (name, f"torch_without_{name}")
    assert "pytorch.org" in raised.value.remedy


@every("name", GPUS)
def test_every_backend_of_a_gpu_platform_can_be_imported(name: str) -> None:
    """Those of experts are the ops of their name."""
    facts = FOUND[name].loaded.facts
    specs = [spec for family, offered in facts.backends.items() for spec in offered if family != "moe"]
    assert specs
    for spec in specs:
        if "triton" not in spec.target:  # which may not be installed
            assert isinstance(pkgutil.resolve_name(spec.target), type)
    named = {spec.name for spec in facts.ops if spec.op == "experts"}
    assert named == {spec.name for spec in facts.backends["moe"]}


@every(
    ("text", "variant", "gibibytes", "count"),
    [
        ("npu:a3", "a3", 64, 1),
        ("npu:a2-32gb", "a2", 32, 1),
        ("npu:a2,memory=64GiB,count=8", "a2", 64, 8),
        ("cuda:sm90", "sm90", 80, 1),
        ("rocm:gfx950", "gfx950", 288, 1),
        ("xpu:bmg", "bmg", 12, 1),
        ("cpu:avx512", "avx512", 128, 1),
    ],
)
def test_a_plan_needs_no_hardware(text: str, variant: str, gibibytes: int, count: int) -> None:
    device = device_for_plan(parse_device(text), FOUND)
    assert (device.variant, device.memory_bytes, device.count) == (variant, gibibytes << 30, count)


def test_ascend_attention_reads_pages_of_128_tokens() -> None:
    check = backend("npu", "attention", "ascend").check
    assert check(context("npu", "a3")) == Requires({"page_size": (128,)})


@every(("profile", "chunk"), [("a2-32gb", 4096), ("a2", 8192), ("a3", 8192)])
def test_npu_prefill_chunk_by_the_card_s_memory(profile: str, chunk: int) -> None:
    defaults = FOUND["npu"].loaded.facts.defaults
    (default,) = (candidate for candidate in defaults if candidate.argument == "chunked_prefill_size")
    assert default.compute(context("npu", profile)) == chunk


def test_the_cpu_has_a_small_prefill_chunk() -> None:
    defaults = FOUND["cpu"].loaded.facts.defaults
    (default,) = (candidate for candidate in defaults if candidate.argument == "chunked_prefill_size")
    assert default.compute(context("cpu", "avx512")) == 256


def test_flashinfer_is_chosen_if_installed_and_for_supported_heads() -> None:
    on = device("cuda", "sm90")
    assert fit(on, "cuda", "attention", "flashinfer", model(head_dim=128)) == {}
    assert "head_dim 80" in fit(on, "cuda", "attention", "flashinfer", model(head_dim=80))
    bare = device("cuda", "sm90", torch="2.13")
    assert fit(bare, "cuda", "attention", "flashinfer", None) == "the package flashinfer-python is not installed"


def test_old_gpus_do_not_support_bfloat16() -> None:
    facts = FOUND["cuda"].loaded.facts
    assert "bfloat16" in facts.capabilities(facts.profiles["sm80"])
    assert "bfloat16" not in facts.capabilities(replace(facts.profiles["sm80"], variant="sm75"))


def cpu_dtype(features: tuple[str, ...], variant: str, dtype: str, fmt: str) -> object:
    default = next(candidate for candidate in FOUND["cpu"].loaded.facts.defaults if candidate.argument == "dtype")
    device = SimpleNamespace(variant=variant, features=features)
    return default.compute(SimpleNamespace(device=device, model=SimpleNamespace(dtype=dtype, format=fmt)))  # type: ignore[arg-type]


@every(
    ("features", "variant", "dtype", "fmt", "expected"),
    [
        (("avx512_bf16",), "avx512", "float16", "gguf", "bfloat16"),
        (("avx512_bf16",), "avx512", "float32", "safetensors", None),
        (("amx_bf16",), "amx", "bfloat16", "safetensors", "bfloat16"),
        (("native_kernels",), "avx2", "float16", "gguf", "bfloat16"),
        (("native_kernels",), "avx2", "float32", "safetensors", None),
        ((), "avx2", "float16", "gguf", "float32"),
        ((), "avx512", "float16", "safetensors", "float32"),
        ((), "avx2", "bfloat16", "safetensors", None),
    ],
)
def test_default_dtype_of_the_cpu(
    features: tuple[str, ...], variant: str, dtype: str, fmt: str, expected: str | None
) -> None:
    assert cpu_dtype(features, variant, dtype, fmt) == expected


def test_selecting_absent_hardware_fails_with_a_reason() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        choose("npu", FOUND)
    assert raised.value.code in ("torch_npu_missing", "driver_missing", "toolkit_missing")
    assert "torch_npu" in raised.value.reason
    assert raised.value.remedy


def test_the_host_can_always_be_chosen() -> None:
    chosen = choose("cpu", FOUND)
    assert chosen.device.variant in VARIANTS["cpu"]
    assert chosen.device.memory_bytes > 1 << 28
    assert chosen.device.count == 1
    assert "torch" in chosen.device.versions


def test_srv_platforms_lists_them_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from srv.cli import platforms

    parser = argparse.ArgumentParser()
    platforms.add(parser.add_subparsers())
    assert platforms.run(parser.parse_args(["platforms", "--json"])) == 0
    rows = {row["platform"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(VARIANTS) <= set(rows)
    assert rows["cpu"]["available"] is True
    monkeypatch.setenv("COLUMNS", "80")
    assert platforms.run(parser.parse_args(["platforms"])) == 0
    shown = capsys.readouterr().out
    for row in rows.values():
        assert row["platform"] in shown
        assert row["distribution"] in shown
        assert row["available"] or row["code"] in shown, "the line of a terminal breaks no code"


def test_the_table_of_platforms_fits_into_80_columns_with_the_longest_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from srv.cli.platforms import table

    platforms = {name: FOUND[name] for name in ("cpu", "npu")}
    device = DeviceFacts("avx512", 1 << 34, 1, "An accelerator (simulated)")
    results = {
        "cpu": ProbeResult(True, device=device),
        "npu": ProbeResult(False, "reason", "remedy", "torch_without_cuda"),
    }
    Console(width=80).print(table(platforms, results))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("torch_without_cuda", "accelerator", "(simulated)", "avx512"))
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_npus_have_a_word_for_each_argument_that_concerns_them() -> None:
    """As `arguments.undeclared` of the kit says after minutes; a new argument of core needs it on the same day."""
    declared = by_argument(FOUND["npu"].loaded.facts.support)
    switches = [
        argument for argument in ARGUMENTS.values() if argument.status == "implemented" and argument.kind.base is bool
    ]
    missing = {switch.name for switch in switches if asks_a_platform(switch) and not needs_file(switch)} - set(declared)
    assert missing <= {"calculate_kv_scales"}  # of 8-bit keys and values, which they refuse
