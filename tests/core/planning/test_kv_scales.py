"""Which scales a pool of 8-bit floats has, and what is refused about files and checkpoints."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from args_world import CAPABLE, CONFIG, manifest, model, resolved, user
from every import every

from srv.args.config import make_config
from srv.dtypes import KVScales
from srv.errors import ModelError, Refusal
from srv.planning.kv_scales import NO_SCALES, calculated_scales, configured_scales, missing_scales, unused_scheme
from srv.planning.launchable import LaunchCheck, check_launch
from srv.planning.plan import make_plan
from srv.planning.pools import bytes_per_page
from srv.planning.resolution import resolve_launch
from srv.planning.target import Target
from srv.specs import FullAttention, ModelFacts

NAN, INF = float("nan"), float("inf")
ATTENTION = "model.layers.{}.self_attn."


def config(**values: object):  # type: ignore[no-untyped-def]
    return make_config({"dtype": "bfloat16", "context_length": 100, "kv_cache_dtype": "fp8_e4m3", **values})


def facts(folder: Path, **changes: Any) -> ModelFacts:
    groups = (FullAttention((0, 1), 2, 16, 16),)
    values: dict[str, Any] = {"path": str(folder), "layers": 2, "cache_groups": groups, "config": CONFIG, **changes}
    return model(**values)


def write_tensors(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file by hand."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)


def floats(*values: float) -> tuple[str, list[int], bytes]:
    return "F32", [len(values)], struct.pack(f"<{len(values)}f", *values)


def scales_of(*names: str) -> dict[str, tuple[str, list[int], bytes]]:
    """Of both layers, 1, 2, ... times 2 ** -layer: in the order of the names."""
    return {
        ATTENTION.format(layer) + name: floats((number + 1) * 2.0**-layer)
        for layer in range(2)
        for number, name in enumerate(names)
    }


def write_file(folder: Path, **changes: Any) -> Path:
    """A file of scales, with changes: `factors`, `dtype`, `model_type`, `ranks`, or the whole `text`."""
    factors = changes.get("factors", {"0": 0.5, "1": 0.25})
    ranks = changes.get("ranks", {"0": factors})
    content = {
        "model_type": changes.get("model_type", "llama"),
        "kv_cache": {"dtype": changes.get("dtype", "float8_e4m3fn"), "scaling_factor": ranks},
    }
    path = folder / "scales.json"
    path.write_text(changes.get("text", json.dumps(content)))
    return path


@every(
    ("names", "expected"),
    [
        (("k_scale", "v_scale"), ((1.0, 2.0), (0.5, 1.0))),
        (("k_proj.k_scale", "v_proj.v_scale"), ((1.0, 2.0), (0.5, 1.0))),
        (("k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale"), ((1.0, 2.0), (0.5, 1.0))),
        (("qkv_proj.k_scale", "qkv_proj.v_scale", "q_scale", "prob_output_scale"), ((1.0, 2.0), (0.5, 1.0))),
        (("kv_scale",), ((1.0, 1.0), (0.5, 0.5))),
        (("v_scale",), ((1.0, 1.0), (0.5, 0.5))),
    ],
)
def test_scales_of_a_checkpoint_by_any_name(
    tmp_path: Path, names: tuple[str, ...], expected: tuple[tuple[float, float], ...]
) -> None:
    write_tensors(tmp_path, scales_of(*names))
    assert configured_scales(config(), facts(tmp_path)).of((0, 1)) == tuple(KVScales(*pair) for pair in expected)


def test_dtypes_of_stored_scales(tmp_path: Path) -> None:
    stored = {"k_scale": ("BF16", [], b"\x20\x3e"), "v_scale": ("F16", [1, 1], struct.pack("<e", 0.3125))}
    write_tensors(
        tmp_path, {ATTENTION.format(layer) + name: tensor for layer in range(2) for name, tensor in stored.items()}
    )
    assert configured_scales(config(), facts(tmp_path)).of((1,)) == (KVScales(0.15625, 0.3125),)


@every(
    ("tensors", "reason"),
    [
        ({ATTENTION.format(0) + "k_scale": floats(NAN)}, "layers.0.self_attn.k_scale is nan; it must be a finite"),
        ({ATTENTION.format(0) + "v_scale": floats(INF)}, "v_scale is inf"),
        ({ATTENTION.format(0) + "kv_scale": floats(0.0)}, "kv_scale is 0.0"),
        ({ATTENTION.format(0) + "k_scale": floats(-1.0)}, "k_scale is -1.0"),
        ({ATTENTION.format(0) + "k_scale": floats(1.0)}, "layer 1 has no such scale; 1 layers have one, of 2"),
        (
            {**scales_of("k_scale"), ATTENTION.format(7) + "k_scale": floats(1.0)},
            "layer 7 has a scale of keys or values",
        ),
        (scales_of("k_scale", "kv_scale"), "layer 0 has more than one scale of keys, the last of them"),
        ({ATTENTION.format(0) + "k_scale": floats(1.0, 2.0)}, "has the shape [2], but keys and values have one scale"),
        ({ATTENTION.format(0) + "k_scale": ("I32", [1], b"\1\0\0\0")}, "is stored as int32, but the scale"),
    ],
)
def test_stored_scales_that_are_refused(tmp_path: Path, tensors: dict[str, Any], reason: str) -> None:
    write_tensors(tmp_path, tensors)
    with pytest.raises(ModelError) as refused:
        configured_scales(config(), facts(tmp_path))
    assert reason in str(refused.value)
    assert configured_scales(config(kv_cache_dtype="auto"), facts(tmp_path)).by_layer == {}


@every(
    ("quant_config", "reason"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "a kv_cache_scheme with type int, not float"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
            "with strategy attn_head, not tensor",
        ),
        ({"kv_cache_quant_algo": "NVFP4"}, "a kv_cache_quant_algo NVFP4, which is not FP8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}, None),
        ({"kv_cache_quant_algo": "FP8"}, None),
    ],
)
def test_scales_for_other_formats_are_refused(tmp_path: Path, quant_config: dict[str, Any], reason: str | None) -> None:
    write_tensors(tmp_path, scales_of("k_scale", "v_scale"))
    described = facts(tmp_path, config={**CONFIG, "quantization_config": quant_config})
    if reason is None:
        assert configured_scales(config(), described).of((0,)) == (KVScales(1.0, 2.0),)
        return
    with pytest.raises(ModelError, match=reason):
        configured_scales(config(), described)


def test_a_file_overrides_the_checkpoint_and_has_scales_per_rank(tmp_path: Path) -> None:
    write_tensors(tmp_path, scales_of("k_scale", "v_scale"))
    path = write_file(tmp_path, ranks={"0": {"0": 1, "1": 2}, "1": {"0": 3, "1": 4.5}})
    chosen = config(quantization_param_path=path, tp_size=2)
    assert configured_scales(chosen, facts(tmp_path), rank=1).of((0, 1)) == (KVScales(3, 3), KVScales(4.5, 4.5))


@every(
    ("changes", "reason"),
    [
        ({"text": "{"}, "it is not JSON"),
        ({"text": "[]"}, "it is [], where a JSON object is expected"),
        ({"text": "{}"}, "kv_cache is missing"),
        ({"dtype": "float8_e5m2"}, "kv_cache.dtype is float8_e5m2, and that of the pool float8_e4m3fn"),
        ({"model_type": "qwen2"}, "it is for the model_type qwen2, and tiny has llama"),
        ({"ranks": {"0": {}, "1": {}}}, "has the ranks 0, 1, and tp_size is 1"),
        ({"factors": {"0": 0.5}}, "of rank 0 lacks layer 1; it has 1 of 2 layers"),
        ({"factors": {"0": 0.5, "1": 0.5, "2": 0.5}}, "has layer 2, and tiny has the layers 0 to 1"),
        ({"factors": {"0": 0.5, "1": NAN}}, "is nan for layer 1; it must be a finite number above 0"),
        ({"factors": {"0": INF, "1": 1}}, "is inf for layer 0"),
        ({"factors": {"0": 0, "1": 1}}, "is 0 for layer 0"),
        ({"factors": {"0": 1e-60, "1": 1}}, "is 1e-60 for layer 0"),
        (
            {"factors": {"0": 10**400, "1": 1}},
            "for layer 0; it must be a finite number above 0, in the range of float32",
        ),
        ({"factors": {"0": "1", "1": 1}}, "is '1' for layer 0"),
        ({"factors": {"0": True, "1": 1}}, "is True for layer 0"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write_file(tmp_path, **changes)
    with pytest.raises(ModelError) as refused:
        configured_scales(config(quantization_param_path=path), facts(tmp_path))
    assert reason in refused.value.reason


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer would never end, and the memory of this process has no first byte."""
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (("pipe", "no regular file"), (".", "no regular file"), ("/proc/self/mem", "cannot be read")):
        with pytest.raises(ModelError, match=reason) as refused:
            configured_scales(config(quantization_param_path=tmp_path / path), facts(tmp_path))
        assert refused.value.code == "not_found"


def check(about: ModelFacts, **values: Any) -> LaunchCheck:
    platform = manifest(capabilities=CAPABLE | {"fp8_kv"})
    resolution = resolved(user(kv_cache_dtype="fp8_e4m3", **values), platform, model=about)
    target = Target(platform, platform.facts.profiles["mk1"], "the test selects it", {})
    return check_launch(target, about, resolution, None)


def test_plan_and_launch_refuse_scales_by_what_has_them(tmp_path: Path) -> None:
    path = write_file(tmp_path, factors={})
    (refused,) = check(facts(tmp_path), quantization_param_path=path).refusals
    assert (refused.code, refused.what, refused.who) == ("kv_scales", "quantization_param_path", "command line")
    assert "lacks layer 0" in refused.reason
    write_tensors(tmp_path, {ATTENTION.format(0) + "k_scale": floats(NAN)})
    (refused,) = check(facts(tmp_path)).refusals
    assert (refused.code, refused.what) == ("kv_scales", "model_path")
    assert "k_scale is nan" in refused.reason


def test_missing_scales_are_a_warning(tmp_path: Path) -> None:
    result = check(facts(tmp_path))
    assert result.refusals == ()
    (note,) = result.notes
    for part in ("tiny has no scales", "larger magnitudes than 448", "--quantization-param-path"):
        assert part in note
    without_pool = facts(tmp_path, cache_groups=(FullAttention((), 2, 16, 16),), generates=False, pooling="mean")
    assert missing_scales(config(), without_pool, configured_scales(config(), without_pool)) == ()
    write_tensors(tmp_path, scales_of("kv_scale"))
    assert check(facts(tmp_path)).notes == ()


STATED: dict[str, dict[str, Any]] = {
    "kv_cache_scheme": {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    "kv_cache_quant_algo": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}


@every("field", STATED)
def test_a_checkpoint_with_a_scheme_that_is_not_used_has_a_note(field: str, tmp_path: Path) -> None:
    """Which says what the pool has, why, and what to set. A value of the user's needs none."""
    (tmp_path / field).mkdir()
    about = facts(tmp_path / field, config={**CONFIG, "quantization_config": STATED[field]})
    for supported, remedy in ((True, "set --kv-cache-dtype fp8_e4m3"), (False, "no pool of 8-bit floats")):
        (note,) = unused_scheme(config(kv_cache_dtype="auto"), about, supported=supported)
        for part in (f"8-bit floats ({field})", "the KV pool has bfloat16 all the same", remedy):
            assert part in note, note
    assert unused_scheme(config(), about, supported=True) == ()
    assert unused_scheme(config(kv_cache_dtype="auto"), facts(tmp_path), supported=True) == ()


def test_a_plan_and_a_launch_note_a_scheme_of_keys_and_values(tmp_path: Path) -> None:
    scheme = {**STATED["kv_cache_scheme"], "quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": scheme}))
    write_tensors(tmp_path, {"model.norm.weight": floats(*[1.0] * 64)})
    values = {"device": "cpu", "model_path": str(tmp_path), "skip_tokenizer_init": True}
    for further, count in (({}, 1), ({"kv_cache_dtype": "bfloat16"}, 0)):
        notes = make_plan(user(**values, **further)).notes
        assert sum("states keys and values in 8-bit floats" in note for note in notes) == count, notes


def test_a_plan_and_a_launch_read_the_scales_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    values = {"device": "cpu", "model_path": str(tmp_path), "skip_tokenizer_init": True, "kv_cache_dtype": "fp8_e4m3"}
    write_tensors(tmp_path, {"model.norm.weight": floats(*[1.0] * 64)})
    for notes in (make_plan(user(**values)).notes, resolve_launch(user(**values)).notes):
        assert [note for note in notes if "has no scales of keys and values" in note]
    write_tensors(tmp_path, {ATTENTION.format(0) + "k_scale": floats(NAN)})
    with pytest.raises(Refusal) as caught:
        resolve_launch(user(**values))
    for (refused,) in (make_plan(user(**values)).refusals, caught.value.rejections):
        assert (refused.code, refused.what, refused.who) == ("kv_scales", "model_path", "command line")
        assert "k_scale is nan" in refused.reason


def test_an_element_takes_one_byte() -> None:
    (floats_,), (halves,) = (bytes_per_page(config(kv_cache_dtype=dtype), model()) for dtype in ("fp8_e5m2", "float16"))
    assert floats_ * 2 == halves


def test_calculated_scales_are_powers_of_two_with_headroom(tmp_path: Path) -> None:
    """Twice the largest magnitude fits, and half the scale would not do."""
    for dtype, limit in (("fp8_e4m3", 448), ("fp8_e5m2", 57_344)):
        chosen = config(kv_cache_dtype=dtype, calculate_kv_scales=True)
        scales = calculated_scales(chosen, facts(tmp_path), {1: (3.0, limit / 2), 0: (0.0, 1e-44)}).of((0, 1))
        assert scales[0] == KVScales(1.0, 2.0**-126)
        assert scales[1].value == 1.0
        assert limit * scales[1].key / 2 < 2 * 3.0 <= limit * scales[1].key
        for wrong, shown in ((NAN, "nan"), (INF, "inf")):
            with pytest.raises(ModelError, match=f"values of layer 1 are {shown}") as caught:
                calculated_scales(chosen, facts(tmp_path), {0: (1.0, 1.0), 1: (1.0, wrong)})
            assert caught.value.code == "kv_scales"


def test_calculated_scales_override_those_of_the_checkpoint_in_plan_and_launch(tmp_path: Path) -> None:
    """Damaged ones are not read, and no warning says that there are none."""
    write_tensors(tmp_path, {ATTENTION.format(0) + "k_scale": floats(NAN)})
    result = check(facts(tmp_path), calculate_kv_scales=True)
    assert (result.refusals, result.notes) == ((), ())
    assert configured_scales(config(calculate_kv_scales=True), facts(tmp_path)) == NO_SCALES
