"""The dialect tables: complete, well-formed, and consistent with the arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from dialects_reference import RTP_LLM_PAGE, SGLANG_FLAGS
from every import every

from srv.args.config import ARGUMENTS, find_argument_or_deprecated
from srv.args.dialects import DIALECTS, DialectRow, read_dialect
from srv.args.dialects.conversions import CONVERSIONS
from srv.args.dialects.table import STATUSES, normalize_flag
from srv.errors import Refusal

ROWS = [(name, row) for name in DIALECTS for row in read_dialect(name).rows]
IDS = [f"{name}{row.name}" for name, row in ROWS]


def inner_rows(row: DialectRow) -> Iterator[DialectRow]:
    """A row, and the rows of its JSON keys."""
    yield row
    for field in row.fields.values():
        yield from inner_rows(field)


def test_every_row_of_the_page_of_rtp_llm_has_a_row_here() -> None:
    rows = read_dialect("rtp-llm").by_flag
    assert len(RTP_LLM_PAGE) == 94
    assert [flag for flag, _ in RTP_LLM_PAGE if normalize_flag(flag) not in rows] == []
    listed = [flag for flag, _ in RTP_LLM_PAGE]
    for row in read_dialect("rtp-llm").rows:
        assert row.page_rows == listed.count(row.name), row.name


def test_the_counts_of_rtp_llm_add_up_to_its_page() -> None:
    counts = read_dialect("rtp-llm").counts()
    assert dict(counts) == {"mapped": 14, "converted": 45, "refused": 35}
    assert sum(counts.values()) == len(RTP_LLM_PAGE)


def test_vllm_covers_the_most_used_flags() -> None:
    assert len(read_dialect("vllm").rows) >= 60


@every("flag", SGLANG_FLAGS)
def test_every_flag_of_sglang_is_known(flag: str) -> None:
    is_known = (
        flag == "--config"
        or find_argument_or_deprecated(flag) is not None
        or normalize_flag(flag) in read_dialect("sglang").by_flag
    )
    assert is_known, f"{flag} is neither an argument of srv nor in a row"


@every(("name", "row"), ROWS)
def test_conversions_and_arguments_of_a_row_exist(name: str, row: DialectRow) -> None:
    for inner_row in inner_rows(row):
        assert inner_row.conversion in CONVERSIONS
        assert [target for target in inner_row.targets if target not in ARGUMENTS] == []


@every(("name", "row"), ROWS)
def test_row_has_the_inputs_of_its_conversion(name: str, row: DialectRow) -> None:
    dialect = read_dialect(name)
    own_flags = {f"--{argument.replace('_', '-')}" for argument in ARGUMENTS} if dialect.ours else set()
    known_flags = dialect.by_flag.keys() | own_flags
    for inner_row in inner_rows(row):
        if inner_row.refused:
            assert inner_row.remedy
            assert inner_row.conversion == "same"
        elif inner_row.conversion in ("choice", "kv_role"):
            assert inner_row.values
        elif inner_row.conversion == "json_fields":
            assert inner_row.fields
        else:
            assert inner_row.to
        partners = [partner.partition("=")[0] for partner in (*inner_row.partners, inner_row.yields_to) if partner]
        assert all(partner in (known_flags if partner.startswith("--") else row.fields) for partner in partners)


@every(("name", "row"), ROWS)
def test_reasons_are_clauses_and_remedies_are_sentences(name: str, row: DialectRow) -> None:
    for inner_row in inner_rows(row):
        assert not inner_row.refused.endswith(".")
        assert inner_row.remedy == "" or inner_row.remedy.endswith((".", ".)"))
        for flag in (word.strip("(),.;:`") for word in f"{inner_row.remedy} {inner_row.note}".split()):
            if flag.startswith("--"):
                assert find_argument_or_deprecated(flag) or normalize_flag(flag) in read_dialect(name).by_flag, flag


def test_conversions_are_all_used() -> None:
    used = {inner_row.conversion for _, row in ROWS for inner_row in inner_rows(row)}
    assert CONVERSIONS.keys() == used


def test_a_status_is_one_of_three() -> None:
    assert {row.status for _, row in ROWS} == set(STATUSES)


def test_spellings_are_unique_within_a_dialect() -> None:
    for name in DIALECTS:
        flags = list(itertools.chain.from_iterable(row.flags for row in read_dialect(name).rows))
        assert len({normalize_flag(flag) for flag in flags}) == len(flags)


def test_unknown_dialect_is_refused_with_the_available_ones() -> None:
    with pytest.raises(Refusal, match="Available dialects: rtp-llm, vllm, sglang") as refused:
        read_dialect("tgi")
    assert refused.value.rejections[0].code == "unknown_dialect"


@every(("name", "row"), ROWS)
def test_settings_in_a_table_are_valid(name: str, row: DialectRow) -> None:
    for inner_row in inner_rows(row):
        pairs = [pair for settings in (*inner_row.values.values(), inner_row.also) for pair in settings.items()]
        for argument, text in pairs:
            if "{}" not in text:
                assert ARGUMENTS[argument].validation_error(ARGUMENTS[argument].parse(text)) is None, (argument, text)
