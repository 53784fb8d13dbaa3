"""Records of the support matrix: their contents and sources, and that `srv plan` agrees with them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
from every import every
from matrix_world import CAPABLE, VARIANTS, evidence, manifest, matrix, row, table

from srv.args.config import ARGUMENTS
from srv.args.defaults import CONSTRAINTS, DEVICE_CONSTRAINTS
from srv.args.prerequisites import PREREQUISITES, with_prerequisite
from srv.args.spec import Argument
from srv.cli import main as cli
from srv.errors import PlatformUnavailable
from srv.models.families.registry import built_in_native_names, find
from srv.platform.facts import Requires, ResolutionContext, Support, Unfit
from srv.platform.manifest import EngineContext
from srv.platform.placeholder import PlatformPlaceholder
from srv.platform.registry import find_platforms
from srv_kernels.contracts import CONTRACTS
from srv_matrix.feature_pages import feature_pages
from srv_matrix.features import OTHERS
from srv_matrix.inventory import Inventory, Op, observe, without_code
from srv_matrix.inventory import read as read_inventory
from srv_matrix.judge import BACKEND_IGNORES, TOO_FEW_DEVICES, verdict
from srv_matrix.marks import mark
from srv_matrix.matrix import Matrix, make_matrix
from srv_matrix.pairs import pairs
from srv_matrix.records import Level, Record, Status, by_key, lower, split_versions
from srv_matrix.repository import MatrixError
from srv_matrix.sample import sample_models
from srv_matrix.sweep import values_of
from srv_matrix.variant_context import make_variant_context

ROOT = Path(__file__).resolve().parents[2]
PLANNED = next(name for name, argument in ARGUMENTS.items() if argument.arg.planned and argument.kind.base is bool)


@pytest.fixture(scope="module")
def undeclared() -> Matrix:
    """The imagined platform without support declarations."""
    return matrix()


def cell(of: Matrix, feature: str, variant: str = "mk1") -> Record:
    record = of.cell(feature, "imagined", variant)
    assert record is not None, feature
    return record


def test_every_argument_has_a_record_on_every_variant(undeclared: Matrix) -> None:
    assert all(cell(undeclared, name, variant) for name in ARGUMENTS for variant in VARIANTS)


def test_a_cell_prints_the_lower_of_its_two_facts() -> None:
    assert lower(Status.SUPPORTED, Status.PLANNED) is Status.PLANNED
    assert lower(Status.UNSUPPORTED, Status.PLANNED) is Status.UNSUPPORTED
    assert lower(Status.UNKNOWN, Status.PLANNED) is Status.PLANNED
    assert lower(Status.SUPPORTED, Status.LIMITED) is Status.LIMITED


def test_planned_and_unsupported_are_distinguished() -> None:
    shown = matrix(Support(PLANNED, "unsupported", "the device cannot", variants=("mk2",)))
    one, two = cell(shown, PLANNED), cell(shown, PLANNED, "mk2")
    assert (one.status, one.declared, one.core, one.reason_code) == (
        Status.PLANNED,
        Status.UNKNOWN,
        Status.PLANNED,
        "planned",
    )
    assert (two.status, two.declared, two.core) == (Status.UNSUPPORTED, Status.UNSUPPORTED, Status.PLANNED)
    assert (two.reason_code, two.reason, two.declared_by) == ("unsupported", "the device cannot", "platform imagined")


def test_value_that_a_backend_refuses_has_its_own_cell(undeclared: Matrix) -> None:
    assert cell(undeclared, "page_size=32").status is Status.SUPPORTED
    refused = cell(undeclared, "page_size=1")
    assert (refused.status, refused.core, refused.reason_code) == (
        Status.UNSUPPORTED,
        Status.SUPPORTED,
        "no_backend_fits",
    )
    assert "requires page_size 32" in refused.reason
    assert cell(undeclared, "page_size").status is Status.LIMITED


def test_missing_capability_is_a_fact_of_the_platform() -> None:
    less = make_matrix([manifest(capabilities=CAPABLE - {"overlap"})], methods=False)
    refused = less.cell("disable_overlap_schedule=false", "imagined", "mk1")
    assert refused is not None
    assert (refused.status, refused.reason_code) == (Status.UNSUPPORTED, "capability_missing")


def test_the_simulator_of_a_device_is_not_among_its_versions() -> None:
    versions = {"torch": "2.13.0", "srv-npu-simulator": "0.1.0", "flashinfer-python": "0.6"}
    others = {"flashinfer-python": "0.6", "torch": "2.13.0"}
    assert split_versions(versions, "srv 0.1.0", simulated=True) == (others, "srv-npu-simulator 0.1.0")
    assert split_versions(others, "srv-toy-device 0.1.0", simulated=True) == (others, "srv-toy-device 0.1.0")
    assert split_versions(others, "srv 0.1.0", simulated=False) == (others, "")


def test_nothing_is_verified_without_evidence(undeclared: Matrix) -> None:
    assert not any(record.verified for record in undeclared.records.values())
    assert {record.level for record in undeclared.records.values() if record.status.works} == {Level.E1}


def test_evidence_raises_only_the_cells_that_it_covers() -> None:
    shown = matrix(evidence=[evidence("schedule_policy=lpm")])
    assert cell(shown, "schedule_policy=lpm").verified
    assert not cell(shown, "schedule_policy=lpm", "mk2").verified
    assert not cell(shown, "schedule_policy=fcfs").verified


def test_level_of_an_argument_is_the_lowest_of_its_values() -> None:
    both = [evidence("disable_radix_cache=true"), evidence("disable_radix_cache=false", level=Level.E3)]
    assert cell(matrix(evidence=both[:1]), "disable_radix_cache").level is Level.E1  # its default was not run
    assert cell(matrix(evidence=both), "disable_radix_cache").level is Level.E3
    whole = matrix(evidence=[evidence("log_level=debug", "log_level=warning", "log_level=info")])
    assert cell(whole, "log_level").level is Level.E1  # error was not run
    named = matrix(evidence=[evidence("log_level")])
    assert cell(named, "log_level").level is Level.E1  # none of its values was run


def test_no_argument_has_a_higher_level_than_its_values() -> None:
    """For all arguments, with evidence for half of all values."""
    cells = [record.feature for record in matrix().records.values() if record.kind == "value" and record.status.works]
    shown = matrix(evidence=[evidence(*dict.fromkeys(cells[::2]))])
    assert any(record.verified for record in shown.records.values() if record.kind == "value")
    for (name, platform, variant), values in shown.values.items():
        argument = shown.cell(name, platform, variant)
        assert argument is not None
        levels = [value.level for value in values if value.status.works]
        assert not argument.verified or all(level is not None and level >= Level.E4 for level in levels), name


def test_number_that_a_test_covers_has_its_own_cell() -> None:
    shown = matrix(evidence=[evidence("max_running_requests=37", "port=many")])
    assert cell(shown, "max_running_requests=37").verified
    assert shown.cell("max_running_requests=37", "imagined", "mk2") is None
    assert shown.cell("port=many", "imagined", "mk1") is None  # not a number


def test_failed_test_raises_no_level() -> None:
    failed = matrix(evidence=[evidence("schedule_policy=lpm", outcome="failed")])
    assert cell(failed, "schedule_policy=lpm").level is Level.E1
    assert cell(failed, "schedule_policy=lpm").failed


def test_cell_that_only_the_vendor_publishes_is_e0() -> None:
    published = matrix(tables=[table(row(ARGUMENTS[PLANNED].flag, True, True))])
    assert cell(published, PLANNED).level is Level.E0
    assert cell(matrix(), PLANNED).level is None


def test_two_records_of_one_cell_are_a_fault(undeclared: Matrix) -> None:
    record = cell(undeclared, "page_size")
    with pytest.raises(ValueError, match="two records for the cell page_size imagined mk1"):
        by_key([record, record])


@every("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_sweep_tries_valid_values_beyond_the_default(argument: Argument) -> None:
    values = values_of(argument, ("wide",) if argument.arg.family else ())
    assert all(argument.validation_error(value) is None for value in values)
    assert any(value != argument.default for value in values)
    if argument.kind.base is bool:
        assert set(values) == {True, False}
    if argument.choices and not argument.kind.many:
        assert set(values) >= set(argument.choices)


def test_sweep_tries_the_boundaries() -> None:
    assert {1, 65535} <= set(values_of(ARGUMENTS["port"]))
    assert {1, -1} <= set(values_of(ARGUMENTS["chunked_prefill_size"]))


# ---- features that are not arguments


INVENTORY = Inventory(
    ("POST /generate",),
    (Op("rms_norm", "(x)", ("float32", "float16")), Op("rotary", "(q)", ("float32",))),
    {"imagined:mk1": {"rms_norm": ("float32",)}},
    {},
)


@pytest.mark.slow
def test_op_needs_an_implementation_and_its_dtype() -> None:
    shown = matrix(inventory=INVENTORY)
    assert cell(shown, "op:rms_norm/float32").status is Status.SUPPORTED
    lacking = {op: cell(shown, op).reason_code for op in ("op:rms_norm/float16", "op:rotary/float32")}
    assert lacking == {"op:rms_norm/float16": "dtype_missing", "op:rotary/float32": "no_implementation"}
    unbuilt = matrix(inventory=replace(INVENTORY, unbuilt={"imagined": "it is not built yet"}))
    planned = cell(unbuilt, "op:rms_norm/float32")
    assert (planned.status, planned.reason, planned.level) == (Status.PLANNED, "it is not built yet", None)


def test_endpoint_is_supported_on_every_variant() -> None:
    shown = matrix(inventory=INVENTORY, evidence=[evidence("endpoint:POST /generate")])
    one, two = (cell(shown, "endpoint:POST /generate", variant) for variant in VARIANTS)
    assert (one.status, two.status, one.declared_by) == (Status.SUPPORTED, Status.SUPPORTED, "")
    assert (one.verified, two.verified, two.level) == (True, False, None)  # no plugin declares it
    assert (mark(one), mark(two)) == ("✅ yes (E4)", "not run (none)")


def test_without_device_code_no_model_and_no_endpoint_is_declared() -> None:
    unbuilt = replace(INVENTORY, unbuilt={"imagined": "it is not built yet"})
    shown = matrix(Support("model_impl", "unsupported", "it has none", values=("transformers",)), inventory=unbuilt)
    features = ("model:LlamaForCausalLM/safetensors", "endpoint:POST /generate", "op:rms_norm/float32")
    for feature in (*features, "port", "log_level=debug"):
        planned = cell(shown, feature)
        assert (planned.status, planned.reason_code, planned.level) == (Status.PLANNED, "not_implemented", None)
        assert planned.reason == "it is not built yet"
    assert (
        cell(shown, f"model:{OTHERS}/safetensors").reason_code == "unsupported"
    )  # an unsupported feature is not planned


def test_models_are_the_native_ones_and_those_of_transformers() -> None:
    shown = matrix(Support("model_impl", "unsupported", "it has none", variants=("mk2",), values=("transformers",)))
    names = {feature.removeprefix("model:") for feature in shown.of_kind("model")}
    assert {name.partition("/")[0] for name in names} == {*built_in_native_names(), OTHERS}
    assert {name.partition("/")[0] for name in names if name.endswith("/gguf")} == {
        name
        for name in built_in_native_names()
        if (architecture := find(name)) is not None and architecture.gguf is not None
    }
    assert cell(shown, "model:LlamaForCausalLM/gguf").status is Status.SUPPORTED
    others = [cell(shown, f"model:{OTHERS}/safetensors", variant) for variant in VARIANTS]
    assert [other.status for other in others] == [Status.LIMITED, Status.UNSUPPORTED]


def test_pair_describes_its_dependency() -> None:
    shown = matrix()
    attention = cell(shown, "pair:attention_backend+page_size")
    assert (attention.status, attention.reason) == (Status.LIMITED, "attention_backend wide requires page_size 32")


def test_constraints_of_two_arguments_are_one_pair() -> None:
    dependencies = {
        frozenset((constraint.argument, other))
        for constraint in (*CONSTRAINTS, *DEVICE_CONSTRAINTS, *PREREQUISITES)
        for other in constraint.reads
        if other in ARGUMENTS
    }
    names = [frozenset(name.removeprefix("pair:").split("+")) for name in matrix().of_kind("pair")]
    assert dependencies
    assert dependencies <= set(names)
    assert len(names) == len(set(names))
    both = cell(matrix(), "pair:enable_lora+lora_paths").reason
    assert both.count("; not ") == 1  # two constraints, one for each argument


Check = Callable[[ResolutionContext], Requires | Unfit]


def reasons_of_pairs(platform: str, variant: str, *rules: Check) -> dict[frozenset[str], str]:
    """`rules`: in place of those of the platform's first attention backends."""
    manifest = find_platforms()[platform].loaded
    specs = manifest.facts.backends["attention"]
    ruled = tuple(replace(spec, check=rule) for spec, rule in zip(specs, rules, strict=False))
    backends = {**manifest.facts.backends, "attention": (*ruled, *specs[len(rules) :])}
    manifest = replace(manifest, facts=replace(manifest.facts, backends=backends))
    records = pairs(make_variant_context(manifest, variant, sample_models()[0]), {})
    return {frozenset(record.feature.removeprefix("pair:").split("+")): record.reason for record in records}


NAMES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def only_graphless(context: ResolutionContext) -> Requires | Unfit:
    """Requirements of several arguments, one of latent attention only, and a refusal of one value."""
    if context["kv_cache_dtype"] == "fp8_e5m2":
        return Unfit(("it reads no fp8_e5m2",))
    latent = context.model is not None and "kv_lora_rank" in context.model.config
    pages = (64, 32) if latent else (128,)
    return Requires({"enable_mixed_chunk": (False,), "disable_graphs": (True,), "page_size": pages})


@every("name", NAMES)
@every(
    ("other", "requirement"),
    [
        ("page_size", "triton requires page_size 128"),
        ("page_size", "triton requires page_size 64, 32 for latent attention"),
        ("enable_mixed_chunk", "triton requires enable_mixed_chunk false"),
        ("disable_graphs", "triton requires disable_graphs true"),
        ("kv_cache_dtype", "triton does not fit kv_cache_dtype fp8_e5m2: it reads no fp8_e5m2"),
    ],
)
def test_requirement_of_a_backend_is_a_pair_with_each_argument_that_selects_it(
    name: str, other: str, requirement: str
) -> None:
    assert f"{name} {requirement}" in pairs_of_graphless()[frozenset((name, other))]


@cache
def pairs_of_graphless() -> dict[frozenset[str], str]:
    return reasons_of_pairs("cuda", "sm90", only_graphless)


def test_backend_of_one_slot_has_pairs_of_that_slot_only() -> None:
    rule = Requires({"page_size": (64, 32, 16)}, (NAMES[2],))
    reasons = reasons_of_pairs("cuda", "sm90", lambda context: rule)
    assert "triton requires" in reasons[frozenset(("decode_attention_backend", "page_size"))]
    assert "triton" not in reasons.get(frozenset(("prefill_attention_backend", "page_size")), "")


def test_two_slots_that_cannot_share_a_pool_are_a_pair() -> None:
    axes = reasons_of_pairs("cpu", "avx512")
    one, other = Requires({"page_size": (64, 32)}), Requires({"page_size": (128,)})
    sizes = reasons_of_pairs("cuda", "sm100", lambda context: one, lambda context: other)
    for two in itertools.combinations(NAMES, 2):
        assert "one pool cannot have both axis orders" in axes[frozenset(two)]
        assert "one requires page_size 64, 32, the other requires page_size 128" in sizes[frozenset(two)]
    assert frozenset(NAMES[1:]) not in reasons_of_pairs("npu", "a3")  # there is only one backend


@every("place", ["cpu:avx512", "cuda:sm90", "cuda:sm100", "rocm:gfx942", "npu:a2", "xpu:bmg"])
def test_every_pair_has_a_specific_reason(place: str) -> None:
    reasons = reasons_of_pairs(*place.split(":")).values()
    assert [reason for reason in reasons if "and other arguments" in reason] == []


def test_value_that_fits_no_common_model_is_limited() -> None:
    shown = matrix()
    tight = cell(shown, "mem_fraction_static=0.01")
    assert (tight.status, tight.core, tight.reason_code) == (Status.LIMITED, Status.SUPPORTED, "pool_too_small")
    assert cell(shown, "mem_fraction_static=0.99").status is Status.SUPPORTED
    assert cell(shown, "mem_fraction_static").reason.startswith(
        "0.01: accepted if weights and the smallest KV pool fit"
    )


@every(
    ("platform", "argument", "value", "reason"),
    [
        ("cpu:avx2", "nsa_prefill_backend", "torch_native", ""),
        ("cpu:avx2", "nsa_prefill_backend", "native", "keys chosen by an indexer"),
        ("cuda:sm80", "moe_runner_backend", "flashinfer_cutlass", "not sm80"),
    ],
)
def test_a_value_without_effect_on_common_models_is_judged_by_those_with_other_layers(
    platform: str, argument: str, value: str, reason: str
) -> None:
    """Not by what the common ones lack, nor by a fault of one of them."""
    name, _, variant = platform.partition(":")
    manifest = find_platforms()[name].loaded
    judged = verdict(argument, value, sample_models(), (manifest, manifest.facts.profiles[variant]))
    assert (judged.code, reason in judged.reason) == ("backend_unfit" if reason else "", True), judged


def test_refused_default_limits_the_argument() -> None:
    reason = "not 1, 2: no attention backend of platform imagined can use it: wide requires page_size 32"
    assert cell(matrix(), "page_size").reason.startswith(reason)


def test_each_reason_of_refused_values_is_listed() -> None:
    less = make_matrix([manifest(capabilities=CAPABLE - {"float16"})], methods=False)
    reason = cell(less, "kv_cache_dtype").reason
    first, second, third = reason.split(". ")
    assert first.startswith("not float16: the platform does not support float16 on this device")
    assert second.startswith("Not int8: ")
    assert second.endswith("(capability int8_kv)")
    assert third.startswith("Not fp8_e4m3, fp8_e5m2: ")
    assert third.endswith("(capability fp8_kv)")


def test_pages_of_features_have_a_row_for_each() -> None:
    shown = matrix(inventory=INVENTORY, evidence=[evidence("endpoint:POST /generate")])
    generated = feature_pages(shown)
    assert "`POST /generate` | ✓ e1 | ○\n" in generated["endpoints.md"]
    pairs = generated["pairs.md"]
    assert "Pair | imagined: mk1, mk2\n" in pairs
    assert re.search(r"^`--attention-backend` with `--page-size`\[\^\d+\] \| ◐$", pairs, re.MULTILINE)
    for kind in ("endpoint", "pair"):
        rows = [line for line in generated[f"{kind}s.md"].splitlines() if line.startswith("`")]
        assert len(rows) == len(shown.of_kind(kind))
    for kind in ("model", "op"):  # formats and dtypes that agree are one row
        names = {feature.partition(":")[2].rpartition("/")[0] for feature in shown.of_kind(kind)}
        rows = [line.split("`")[1] for line in generated[f"{kind}s.md"].splitlines() if line.startswith("`")]
        assert set(rows) == names


def test_models_and_variants_refused_for_the_same_reason_share_a_footnote() -> None:
    """Which names its reasons leave out; those of other models and variants remain."""
    refused = [
        Record(
            f"model:{model}/safetensors",
            "model",
            "imagined",
            variant,
            Status.UNSUPPORTED,
            Status.SUPPORTED,
            "no_backend_fits",
            f"wide: {model} has no windows as OtherModel; tall: its kernels are for mk10, not {variant}",
        )
        for model in ("OneModel", "TwoModel")
        for variant in ("mk1", "mk2")
    ]
    page = feature_pages(replace(matrix(), records=by_key(refused)))["models.md"]
    assert [line for line in page.splitlines() if line.startswith(("`", "[^"))] == [
        "`OneModel` safetensors[^1] | ✕",
        "`TwoModel` safetensors[^1] | ✕",
        "[^1]: `no_backend_fits`: wide: the model has no windows as OtherModel; tall: its kernels are for mk10.",
    ]


def test_the_inventory_lists_the_ops_and_endpoints_of_this_process() -> None:
    """Whether the committed one is up to date is a step of CI (`make pages`)."""
    observed, core = observe(), observe("cpuu")
    assert {"POST /v1/chat/completions", "POST /generate"} <= set(observed.endpoints)
    assert {op.name for op in observed.ops} == set(observed.implemented["cpu:avx2"]) == set(CONTRACTS)
    assert set(observed.implemented["cpu:avx2"]["rms_norm"]) == {"float32", "bfloat16", "float16"}
    assert (core.endpoints, core.ops, core.implemented) == (observed.endpoints, observed.ops, {})


def test_only_a_platform_without_code_is_unbuilt() -> None:
    """One that cannot start on this machine has code all the same."""

    def refuse(context: EngineContext) -> NoReturn:
        raise PlatformUnavailable("imagined", "this torch is for other devices", "Install another", "torch_without_it")

    described = PlatformPlaceholder("imagined", "Imagined Mk 1", "imagined.platform:create")
    platform = find_platforms()["cuda"].loaded
    assert without_code(replace(platform, create=refuse)) is None
    assert without_code(replace(platform, create=described.create)) == described.reason


def test_damaged_inventory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    assert read_inventory(path) == Inventory()
    path.write_text('{"ops": 1}')
    with pytest.raises(MatrixError, match="Run `make matrix`"):
        read_inventory(path)


# ---- `srv plan` agrees with the records


# For these a plan reads files.
FILE_ARGUMENTS = (
    *("device", "model_path", "load_format", "quantization", "context_length", "config"),
    "delete_ckpt_after_loading",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model, otherwise like the sample model."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


# A backend may require that the KV pool has the dtype of the activations.
FURTHER_VALUES = {"kv_cache_dtype=float16": {"dtype": "float16"}}
# Such a value works on a machine with several devices, or with the backend that reads it: the condition of its cell.
MORE_DEVICES = {TOO_FEW_DEVICES: ",count=8"}
OF_BACKEND = re.compile(r"accepted with (?P<argument>\w+) (?P<backend>\w+); ")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("npu:a2", marks=pytest.mark.slow),
        pytest.param("cpu:avx2", marks=pytest.mark.proof(minutes=0.6)),
        pytest.param("cuda:sm90", marks=pytest.mark.proof(minutes=1)),
    ],
)
def test_srv_plan_agrees_with_the_records(
    place: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srv plan` accepts the value of a working cell, under its condition if it has one.

    It refuses all others with the code of the cell.
    """
    for argument in ARGUMENTS.values():
        monkeypatch.delenv(argument.variable, raising=False)
    platform, _, variant = place.partition(":")
    shown = make_matrix([find_platforms()[platform].loaded], methods=False)
    model = ["plan", "--json", f"--model-path={folder}", "--load-format=dummy"]
    wrong: list[str] = []
    for record in shown.records.values():
        if (record.kind, record.variant) != ("value", variant) or record.argument in FILE_ARGUMENTS:
            continue
        if ARGUMENTS[record.argument].arg.planned:
            continue  # core refuses all of them before a platform is involved
        value = record.feature.partition("=")[2]
        with monkeypatch.context() as patch:
            parsed = ARGUMENTS[record.argument].parse(value)
            for name, needed in with_prerequisite(record.argument, parsed).items():
                patch.setenv(ARGUMENTS[name].variable, ARGUMENTS[name].show(needed))
            for other, text in FURTHER_VALUES.get(record.feature, {}).items():
                patch.setenv(ARGUMENTS[other].variable, text)
            if record.reason_code == BACKEND_IGNORES and (read := OF_BACKEND.match(record.reason)):
                patch.setenv(ARGUMENTS[read["argument"]].variable, read["backend"])
            status = cli.main([*model, f"--device={place}{MORE_DEVICES.get(record.reason_code, '')}"])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        answer = json.loads(printed.out)
        codes = [refusal["code"] for refusal in answer.get("refusals", ())]
        if codes in (["pool_too_small"], ["inert"]):
            continue  # because of this model and memory size, not because of the argument
        # core refuses before the platform
        expected = {record.reason_code, "planned"} if record.core is Status.PLANNED else {record.reason_code}
        if (status == 0) != record.status.works or (codes and expected.isdisjoint(codes)):
            wrong.append(f"{record.feature}: {record.status.value} [{record.reason_code}], but plan says {codes}")
    assert wrong == []


def test_level_e3_says_whether_something_ran_or_only_compiled() -> None:
    feature = "op:rms_norm/float32"
    ran = evidence(feature, level=Level.E3, test="t.py::ran")
    compiled = evidence(feature, level=Level.E3, note="compiled", test="t.py::compiled")
    starts = evidence(feature, level=Level.E3, note="starts", test="t.py::starts")
    declared = cell(matrix(inventory=INVENTORY), feature)
    marks = [
        mark(replace(declared, evidence=lines))
        for lines in ((compiled,), (ran,), (ran, compiled), (starts,), (compiled, starts), (starts, ran))
    ]
    assert marks == [
        *("compiled (E3)", "simulated (E3)", "simulated (E3)"),
        *("starts (E3)", "starts (E3)", "simulated (E3)"),
    ]


def test_a_value_that_a_server_only_starts_with_is_not_verified() -> None:
    """Nor is its argument, as long as no test sees the difference that one of its values makes."""
    starts = [
        evidence(f"disable_radix_cache={value}", level=Level.E3, note="starts", test=f"starts {value}")
        for value in ("true", "false")
    ]
    shown = matrix(evidence=[*starts, evidence("disable_radix_cache=true", test="effect")])
    names = ("disable_radix_cache=true", "disable_radix_cache=false", "disable_radix_cache")
    assert [mark(cell(shown, name)) for name in names] == ["✅ yes (E4)", "starts (E3)", "starts (E3)"]


def test_an_argument_is_only_compiled_if_one_of_its_values_is() -> None:
    values = [evidence(f"disable_radix_cache={value}", level=Level.E3, test=value) for value in ("true", "false")]
    assert cell(matrix(evidence=values), "disable_radix_cache").word == "simulated"
    compiled = replace(values[0], note="compiled")
    assert cell(matrix(evidence=[compiled, values[1]]), "disable_radix_cache").word == "compiled"
    assert cell(matrix(evidence=values[:1]), "disable_radix_cache").word == "declared"
