"""Command lines that vendors publish: what refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from srv_matrix.recipes import Recipe, Recipes, read_recipes, recipes_page, refused_by, without_later
from srv_matrix.repository import MatrixError

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "support_matrix" / "published"


def recipes(*flags: str) -> Recipes:
    rows = tuple(Recipe(f"line-{index}", "Any", "W8A8", "a2", 1, "mixed", flag) for index, flag in enumerate(flags))
    return Recipes("small", "Small", "sglang", "npu", {"a2": 8}, rows)


def test_the_published_lines_are_all_there() -> None:
    (ascend,) = read_recipes(PUBLISHED)
    assert len(ascend.rows) == len({row.name for row in ascend.rows}) == 38
    assert {row.variant for row in ascend.rows} == {"a2", "a3"}


def test_a_line_is_accepted_or_refused_by_what_a_launch_refuses() -> None:
    table = recipes(
        "--device npu --max-running-requests 8", "--device npu --tp-size 0", "--device npu --no-such-flag 1"
    )
    accepted, invalid, unknown = (refused_by(table, row) for row in table.rows)
    assert accepted == {}
    assert list(invalid) == ["tp_size"]
    assert list(unknown) == ["--no-such-flag"]


def test_the_page_judges_lines_without_drafts_and_separate_servers_too() -> None:
    page = recipes_page(
        recipes(
            "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --device npu",
            "--device npu --disaggregation-mode prefill --tp-size 0",
            "--device npu",
        )
    )
    assert "1 are accepted as they are printed, and\n2 without their flags" in page
    assert "| mixed | accepted | drafts of a model |" in page
    assert "| mixed | `tp_size` | separate prefill and decode |" in page
    assert "| mixed | accepted | - |" in page


def test_flags_are_left_out_with_their_values() -> None:
    line = "--a 1 2 --speculative-x 3 --b --disaggregation-y z 4 --c 'd e' --speculative-z=5 f"
    assert without_later(line) == "--a 1 2 --b --c 'd e'"


def test_a_line_has_the_devices_of_one_machine() -> None:
    table = recipes("--device npu --tp-size 8", "--device npu --tp-size 16")
    fitting, larger = (refused_by(table, row) for row in table.rows)
    assert fitting == {}
    assert larger == {"tp_size": "each rank needs a device of its own, but there are 8 devices"}


def test_the_page_counts_lines_by_what_refuses_them() -> None:
    page = recipes_page(
        recipes("--device npu", "--device npu --tp-size 0", "--device npu --tp-size 0 --no-such-flag 1")
    )
    assert "3 lines, one per role of a server: 1 are accepted" in page
    assert "\n1 without their flags" in page
    assert "| `tp_size` | 2 |" in page
    assert "| line-0 | Any | W8A8 | a2 | 1 | mixed | accepted | - |" in page
    assert "| line-2 | Any | W8A8 | a2 | 1 | mixed | `--no-such-flag`, `tp_size` | - |" in page


@pytest.mark.parametrize(
    "lines",
    ["id,model\na,b\n", "id,model,weights,variant,cards,role,flags\na,b,c,d,many,f,g\n"],
    ids=["columns", "number"],
)
def test_a_table_that_is_none_is_refused_with_its_columns(lines: str, tmp_path: Path) -> None:
    (tmp_path / "index.toml").write_text(
        '[[recipes]]\nname = "a"\nfile = "a.csv"\ndialect = "sglang"\nplatform = "npu"\ntitle = "A"\n'
        "devices = { a2 = 8 }\n"
    )
    (tmp_path / "a.csv").write_text(lines)
    with pytest.raises(MatrixError, match=r"a\.csv cannot be read.*with the columns id, model"):
        read_recipes(tmp_path)
