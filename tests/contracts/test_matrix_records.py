"""Records of the support matrix: what they hold, where they come from, and that a launch judges as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix_world import CAPABLE, VARIANTS, evidence, manifest, matrix, row, table

from srv.args.config import ARGUMENTS
from srv.args.spec import Argument
from srv.cli import main as cli
from srv.platform.facts import Support
from srv.platform.registry import find_platforms
from srv_matrix.matrix import Matrix, make_matrix
from srv_matrix.records import Level, Record, Status, by_key, lower
from srv_matrix.sweep import values_of

PLANNED = next(name for name, argument in ARGUMENTS.items() if argument.arg.planned and argument.kind.base is bool)


@pytest.fixture(scope="module")
def silent() -> Matrix:
    """The imagined platform without a declaration."""
    return matrix()


def cell(of: Matrix, feature: str, variant: str = "mk1") -> Record:
    found = of.cell(feature, "imagined", variant)
    assert found is not None, feature
    return found


def test_every_argument_has_a_record_on_every_variant(silent: Matrix) -> None:
    assert all(cell(silent, name, variant) for name in ARGUMENTS for variant in VARIANTS)


def test_a_cell_prints_the_lower_of_its_two_facts() -> None:
    assert lower(Status.SUPPORTED, Status.PLANNED) is Status.PLANNED
    assert lower(Status.UNSUPPORTED, Status.PLANNED) is Status.UNSUPPORTED
    assert lower(Status.UNKNOWN, Status.PLANNED) is Status.PLANNED
    assert lower(Status.SUPPORTED, Status.LIMITED) is Status.LIMITED


def test_planned_and_unsupported_are_told_apart() -> None:
    said = matrix(Support(PLANNED, "unsupported", "the device cannot", variants=("mk2",)))
    one, two = cell(said, PLANNED), cell(said, PLANNED, "mk2")
    assert (one.status, one.declared, one.core, one.reason_code) == (
        Status.PLANNED,
        Status.UNKNOWN,
        Status.PLANNED,
        "planned",
    )
    assert (two.status, two.declared, two.core) == (Status.UNSUPPORTED, Status.UNSUPPORTED, Status.PLANNED)
    assert (two.reason_code, two.reason, two.declared_by) == ("unsupported", "the device cannot", "platform imagined")


def test_a_value_that_a_backend_cannot_take_is_a_cell_of_its_own(silent: Matrix) -> None:
    assert cell(silent, "page_size=32").status is Status.SUPPORTED
    refused = cell(silent, "page_size=1")
    assert (refused.status, refused.core, refused.reason_code) == (
        Status.UNSUPPORTED,
        Status.SUPPORTED,
        "no_backend_fits",
    )
    assert "requires page_size 32" in refused.reason
    assert cell(silent, "page_size").status is Status.LIMITED


def test_a_missing_capability_is_the_platform_s_fact() -> None:
    less = make_matrix([manifest(capabilities=CAPABLE - {"overlap"})])
    refused = less.cell("disable_overlap_schedule=false", "imagined", "mk1")
    assert refused is not None
    assert (refused.status, refused.reason_code) == (Status.UNSUPPORTED, "capability_missing")


def test_nothing_is_verified_without_a_run(silent: Matrix) -> None:
    assert not any(record.verified for record in silent.records.values())
    assert {record.level for record in silent.records.values() if record.status.works} == {Level.E1}


def test_evidence_lifts_the_cell_it_covers_and_no_other() -> None:
    shown = matrix(evidence=[evidence("schedule_policy=lpm")])
    assert cell(shown, "schedule_policy=lpm").verified
    assert not cell(shown, "schedule_policy=lpm", "mk2").verified
    assert not cell(shown, "schedule_policy=fcfs").verified


def test_an_argument_is_verified_when_all_its_values_are() -> None:
    half = matrix(evidence=[evidence("disable_radix_cache=true", level=Level.E3)])
    assert cell(half, "disable_radix_cache").level is Level.E3  # its other value is the default
    whole = matrix(evidence=[evidence("log_level=debug", "log_level=warning")])
    assert cell(whole, "log_level").level is Level.E1  # error has not been shown


def test_a_failed_test_lifts_nothing() -> None:
    failed = matrix(evidence=[evidence("schedule_policy=lpm", outcome="failed")])
    assert cell(failed, "schedule_policy=lpm").level is Level.E1
    assert cell(failed, "schedule_policy=lpm").failed


def test_a_cell_of_which_the_vendor_alone_speaks_is_e0() -> None:
    published = matrix(tables=[table(row(ARGUMENTS[PLANNED].flag, True, True))])
    assert cell(published, PLANNED).level is Level.E0
    assert cell(matrix(), PLANNED).level is None


def test_two_records_of_one_cell_are_a_fault(silent: Matrix) -> None:
    record = cell(silent, "page_size")
    with pytest.raises(ValueError, match="two records of the cell page_size imagined mk1"):
        by_key([record, record])


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_the_sweep_tries_what_the_declaration_allows_and_more_than_the_default(argument: Argument) -> None:
    values = values_of(argument, ("wide",))
    assert all(argument.against(value) is None for value in values)
    assert any(value != argument.default for value in values)
    if argument.kind.base is bool:
        assert set(values) == {True, False}
    if argument.choices and not argument.kind.many:
        assert set(values) >= set(argument.choices)


def test_the_sweep_stands_on_the_boundaries() -> None:
    assert {1, 65535} <= set(values_of(ARGUMENTS["port"]))
    assert {1, -1} <= set(values_of(ARGUMENTS["chunked_prefill_size"]))


OWN_MEANING = ("device", "model_path", "load_format", "context_length", "config")  # a plan reads files for these


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model, otherwise like the one that cells are judged with."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("place", ["npu:a2", pytest.param("cpu:avx2", marks=pytest.mark.slow)])
def test_srv_plan_judges_as_the_records_say(
    place: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round, through the command line: a cell that works is planned, another refused with its code."""
    for argument in ARGUMENTS.values():
        monkeypatch.delenv(argument.variable, raising=False)
    platform, _, variant = place.partition(":")
    told = make_matrix([find_platforms()[platform].loaded])
    base = ["plan", "--json", f"--device={place}", f"--model-path={folder}", "--load-format=dummy"]
    wrong: list[str] = []
    for record in told.records.values():
        if (record.kind, record.variant) != ("value", variant) or record.argument in OWN_MEANING:
            continue
        if ARGUMENTS[record.argument].arg.planned:
            continue  # all alike: core refuses them before a platform is asked
        value = record.feature.partition("=")[2]
        with monkeypatch.context() as said:
            said.setenv(ARGUMENTS[record.argument].variable, value)
            status = cli.main(base)
        printed = capsys.readouterr()
        assert printed.out, printed.err
        answer = json.loads(printed.out)
        codes = [refusal["code"] for refusal in answer.get("refusals", ())]
        if codes == ["pool_too_small"]:
            continue  # judged on this model and this much memory, not on the argument
        # what neither has, core is the first to refuse
        expected = {record.reason_code, "planned"} if record.core is Status.PLANNED else {record.reason_code}
        if (status == 0) != record.status.works or (codes and expected.isdisjoint(codes)):
            wrong.append(f"{record.feature}: {record.status.value} [{record.reason_code}], but plan says {codes}")
    assert wrong == []
