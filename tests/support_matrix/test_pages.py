"""The Markdown pages: their layout, sizes, signs, runs and footnotes, and how stale ones are found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from committed_matrix import committed_matrix
from matrix_world import evidence, manifest, matrix, row, table

from srv.args.config import ARGUMENTS
from srv.cli.main import main
from srv.platform.facts import Support
from srv_matrix import outputs
from srv_matrix.argument_page import argument_page
from srv_matrix.inventory import Inventory, to_json
from srv_matrix.marks import LEGEND, headline, look_of, mark
from srv_matrix.matrix import Matrix, make_matrix
from srv_matrix.page_notes import PageNotes
from srv_matrix.pages import pages
from srv_matrix.records import COMPILED, STARTS, Evidence, Level, Record, Status
from srv_matrix.repository import Repository
from srv_matrix.weight_formats import weight_formats

LIMIT = 40_000  # bytes of a page of arguments
PLANNED = next(argument for argument in ARGUMENTS.values() if argument.arg.planned and argument.kind.base is bool)


@pytest.fixture(scope="module")
def small() -> Matrix:
    return matrix()


@pytest.fixture(scope="module")
def committed() -> Mapping[str, str]:
    """The pages of this checkout, as they would be generated now."""
    return pages(committed_matrix())


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]


@pytest.mark.slow
def test_no_page_of_arguments_is_too_long(committed: Mapping[str, str]) -> None:
    names = [f"{manifest.name}.md" for manifest in committed_matrix().manifests]
    sizes = {name: len(committed[name].encode()) for name in (*names, "npu-further.md", "planned.md")}
    assert {name: size for name, size in sizes.items() if size >= LIMIT} == {}


@pytest.mark.slow
def test_every_page_explains_what_it_refers_to(committed: Mapping[str, str]) -> None:
    """Each run and each footnote of a page is at its end, and nothing else is; each link has its page."""
    for name, text in committed.items():
        body, _, end = text.partition("## Evidence")
        runs = set(re.findall(r"[✓◎] (e\d+)\b", body))
        assert runs == set(re.findall(r"^\| (e\d+) \|", end, re.MULTILINE)), name
        notes = re.findall(r"^(\[\^\d+\]): ", text, re.MULTILINE)
        assert len(notes) == len(set(notes)), name
        assert set(notes) == set(re.findall(r"\[\^\d+\](?!:)", text)), name
        links = {link.partition("#")[0] for link in re.findall(r"\]\(([\w-]+\.md)", text)}
        assert links <= committed.keys(), name


@pytest.mark.slow
def test_the_index_counts_what_was_run(committed: Mapping[str, str]) -> None:
    """Against the records: nothing that is only declared counts as run."""
    shown = committed_matrix()
    section = committed["index.md"].partition("## Arguments\n")[2].partition("\n## ")[0]
    rows = [cells_of(line) for line in section.splitlines() if ".md" in line]
    lines = {(name, variant): list(map(int, numbers)) for name, variant, *numbers in rows}
    for platform in shown.manifests:
        for variant in platform.variants:
            run, forced, simulated, accepted, refused, total = lines[f"[{platform.name}]({platform.name}.md)", variant]
            cells = [cell for name in ARGUMENTS if (cell := shown.cell(name, platform.name, variant)) is not None]
            assert total == len(cells) == run + forced + simulated + accepted + refused
            assert run + forced == sum(cell.verified for cell in cells)
            assert refused == sum(not cell.status.works for cell in cells)
            assert accepted == sum(cell.status.works and (cell.level or Level.E0) < Level.E3 for cell in cells)


@pytest.mark.slow
def test_page_of_a_published_platform_has_its_sections_and_columns(committed: Mapping[str, str]) -> None:
    (ascend,) = committed_matrix().tables
    lines = committed["npu.md"].splitlines()
    sections = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert sections == [*ascend.sections, "Evidence"]
    heads = {line for line in lines if line.startswith("Argument")}
    assert heads == {"Argument | Description | Defaults | Options | A2 Supported | A3 Supported"}
    rows = [line for line in lines if line.startswith("`--")]
    assert [line.split("`")[1] for line in rows] == [published.flag for published in ascend.rows]


@pytest.mark.slow
def test_every_argument_is_on_a_page_of_each_platform_or_planned(committed: Mapping[str, str]) -> None:
    planned = {argument.flag for argument in ARGUMENTS.values() if argument.arg.planned}
    assert planned == set(re.findall(r"^`(--[\w-]+)`", committed["planned.md"], re.MULTILINE))
    for platform in committed_matrix().manifests:
        text = committed[f"{platform.name}.md"] + committed.get(f"{platform.name}-further.md", "")
        rows = re.findall(r"^((?:`--[\w-]+`(?:<br>)?)+)", text, re.MULTILINE)
        flags = {flag for row_ in rows for flag in re.findall(r"`(--[\w-]+)`", row_)}
        assert {argument.flag for argument in ARGUMENTS.values()} - planned <= flags, platform.name


@pytest.mark.slow
def test_weight_formats_name_the_kernels_of_each_platform() -> None:
    """A method without kernels is refused, or its weights are dequantized."""
    table_lines = weight_formats(committed_matrix(), PageNotes(platforms=True))
    head, *lines = map(cells_of, "\n".join(table_lines).splitlines())
    rows = {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in lines}
    neon = next(name for name in head if name.startswith("cpu: ") and "neon" in name)
    cuda = next(name for name in head if name.startswith("cuda: ") and "sm80" in name)
    npu = next(name for name in head if name.startswith("npu: "))
    for method in ("--quantization awq", "--quantization fp8", "--quantization gguf", "--torchao-config int8wo"):
        cells = rows[f"`{method}`"]
        assert (cells[neon], cells[cuda]) == ("○ native", "○ triton"), cells
        assert cells[npu] == ("○ dequantized" if method.endswith("gguf") else "✕")
        experts = rows.get(f"`{method}`, experts", {})
        assert (not experts) == method.endswith("int8wo")  # int8 weights of experts go with int8 activations
        assert not experts or (experts[neon], experts[cuda]) == ("native", "triton"), experts
    assert "torch_npu (npu_dynamic_quant, npu_quant_matmul)" in rows["`--quantization modelslim`"][npu]
    assert rows["`--quantization modelslim`, experts"][npu] == "ascend"


def test_snapshot_of_a_page() -> None:
    """With all kinds of signs; a reason of all variants stands at the argument, that of one variant in its cell."""
    published = table(
        row("--page-size", True, True, "Type: int"),
        row(PLANNED.flag, True, False, section="Two"),
        row("--warp-factor", False, False, section="Two"),
    )
    shown = matrix(
        Support("page_size", "supported"),
        Support(PLANNED.name, "supported", variants=("mk1",)),
        Support(PLANNED.name, "unsupported", "the device cannot", variants=("mk2",)),
        tables=[published],
        evidence=[evidence("page_size=32", variant="mk2")],
    )
    key = " · ".join(f"{sign.look.glyph} {sign.short}" for sign in LEGEND)
    page = argument_page(shown, shown.manifests[0])
    body = page[page.index("The sections and") :]
    size = headline(ARGUMENTS["page_size"].arg.help, 56)
    flags = "<br>".join(f"`{flag}`" for flag in PLANNED.flags)
    assert body == (
        "The sections and their order are those of the published page (What the vendor says). "
        "[Another page](imagined-further.md) has the other arguments of srv.\n"
        "\n"
        f"{key}. [Index](index.md); why arguments are [planned](planned.md).\n"
        "\n"
        "## One\n"
        "\n"
        "Argument | Description | Defaults | Options | MK1 Supported | MK2 Supported\n"
        "--- | --- | --- | --- | :-: | :-:\n"
        f"`--page-size`[^1] | {size} | `32` | Type: int, at least 1 | ◐ | ◐✓ e1\n"
        "\n"
        "## Two\n"
        "\n"
        "Argument | Description | Defaults | Options | MK1 Supported | MK2 Supported\n"
        "--- | --- | --- | --- | :-: | :-:\n"
        f"{flags} | {headline(PLANNED.arg.help, 32)} | `{PLANNED.show(PLANNED.default)}` | - | "
        "…[^2] | ✕[^3]\n"
        "`--warp-factor` | - | - | - | not in srv | not in srv\n"
        "\n"
        "## Evidence\n"
        "\n"
        "| | Variant | How | Run | Date | Device | Versions |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| e1 | mk2 | run on the device | c0ffee | 2026-01-02 | Imagined One | imagined 1.0, torch 2.13.0 |\n"
        "\n"
        "[^1]: `no_backend_fits`: no attention backend of platform imagined can use it: wide requires page_size 32.\n"
        f"[^2]: `planned`: {PLANNED.arg.planned}.\n"
        "[^3]: `unsupported`: the device cannot.\n"
    )


def policies(**changes: str) -> list[Evidence]:
    """Evidence for all values that work of one argument."""
    return [evidence("schedule_policy=fcfs", "schedule_policy=lpm", **changes)]


def test_variants_that_agree_in_every_row_are_one_column(small: Matrix) -> None:
    assert "| MK1, MK2 Supported\n" in argument_page(small, small.manifests[0])
    apart = matrix(evidence=policies())
    assert "| MK1 Supported | MK2 Supported\n" in argument_page(apart, apart.manifests[0])


def test_a_forced_path_is_shown_as_run_with_a_note_and_counted_apart() -> None:
    """The note is omitted once the same cell was run on a device of that variant."""
    forced = policies(machine="mk2", note="forced path")
    shown = matrix(evidence=forced)
    assert mark(shown.cell("schedule_policy=lpm", "imagined", "mk1")) == "✅ yes (E4, forced path)"
    page = argument_page(shown, shown.manifests[0])
    assert ", 0 were run on the device, 1 on a newer device with its code path forced, 0 were simulated" in page
    assert "| e1 | mk1 | forced path | c0ffee |" in page
    real = matrix(evidence=[*forced, *policies(test="tests/test_it.py::test_other", commit="beef")])
    page = argument_page(real, real.manifests[0])
    assert ", 1 were run on the device, 0 were simulated" in page
    assert "| e1 | mk1 | run on the device | beef |" in page
    assert "forced path" not in page


def ran(*changes: tuple[Level, str, str], status: Status = Status.SUPPORTED) -> Record:
    lines = tuple(evidence("port=1", level=level, note=note, date=date) for level, note, date in changes)
    return Record("port=1", "value", "imagined", "mk1", status, status, base=Level.E1, evidence=lines)


def test_a_cell_shows_its_status_and_how_far_it_was_run() -> None:
    old, new = "2026-01-01", "2026-02-02"
    for record, cell, how in (
        (ran(), "○", ""),
        (ran((Level.E2, "", old)), "○ e1", f"| contract-tested | c0ffee | {old} |"),
        (ran((Level.E3, COMPILED, new), (Level.E3, STARTS, old)), "◎ e1", f"| {STARTS} | c0ffee | {old} |"),
        (ran((Level.E3, STARTS, new), (Level.E4, "", old)), "✓ e1", f"| run on the device | c0ffee | {old} |"),
        (ran((Level.E4, "", old), (Level.E4, "", new)), "✓ e1", f"| run on the device | c0ffee | {new} |"),
        (ran((Level.E3, "", old), status=Status.LIMITED), "◐◎ e1", f"| simulated | c0ffee | {old} |"),
        (ran((Level.E4, "", old), status=Status.EXPERIMENTAL), "△✓ e1", f"| run on the device | c0ffee | {old} |"),
        (ran((Level.E4, "", old), status=Status.UNSUPPORTED), "✕", ""),
        (ran(status=Status.UNKNOWN), "?", ""),
    ):
        notes = PageNotes()
        assert notes.cell(record) == cell, record
        assert how in "\n".join(notes.lines())


def test_only_what_was_run_on_the_device_is_green() -> None:
    for level in Level:
        record = ran((level, "", "2026-01-01"))
        assert (look_of(record).color == "verified") == (level >= Level.E4), level


def test_an_argument_shows_the_oldest_run_of_its_weakest_values() -> None:
    dates = {"fcfs": "2026-01-01", "lpm": "2026-02-02"}
    lines = [evidence(f"schedule_policy={value}", date=date) for value, date in dates.items()]
    record = matrix(evidence=lines).cell("schedule_policy", "imagined", "mk1")
    assert record is not None
    notes = PageNotes()
    assert notes.cell(record) == "◐✓ e1"
    assert "| 2026-01-01 |" in "\n".join(notes.lines())


def test_pages_are_deterministic(small: Matrix) -> None:
    assert pages(make_matrix([manifest()], methods=False)) == pages(small)


def test_stale_missing_and_extraneous_pages_are_found_and_mended(
    small: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a comparison of its own, which writes nothing and ends with the one command that mends it."""
    marker = tmp_path / "support_matrix" / "published" / "index.toml"
    marker.parent.mkdir(parents=True)
    marker.write_text("")
    monkeypatch.setattr(outputs, "read_matrix", lambda repository: small)
    monkeypatch.setattr(outputs.inventory, "observe_in_child", Inventory)
    repository = Repository(tmp_path)
    words = ["matrix", "generate", "--root", str(tmp_path)]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--compare"]) == 0
    assert capsys.readouterr().out == "the pages are up to date\n"

    page = repository.pages / "imagined.md"
    stale = page.read_text().replace("`--page-size`", "`--page-size`<br>`--pages`", 1)
    page.write_text(stale)
    (repository.pages / "index.md").unlink()
    (repository.pages / "other.md").write_text("x")
    repository.inventory.write_text(to_json(replace(Inventory(), endpoints=("GET /",))))
    assert main([*words, "--compare"]) == 2
    printed = capsys.readouterr().out
    assert "- support/imagined.md is stale\n" in printed
    assert "-`--page-size`" in printed
    assert "+`--page-size`" in printed
    assert "- support/index.md is missing\n" in printed
    assert "- support/other.md is not a page of the matrix\n" in printed
    assert "- support_matrix/inventory.json is stale\n" in printed
    assert printed.endswith(f"To mend this, run:\n{outputs.REMEDY}\n")
    assert page.read_text() == stale
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--compare"]) == 0
