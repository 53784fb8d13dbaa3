"""The committed table of compilations is that of the sources, and the tool that keeps it notices what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'srv-kernels[triton]'")

from child_pytest import ROOT
from tiers import head

from srv_kernels.triton import compile as ahead
from srv_kernels.triton.targets import FLOAT8_DOTS, TARGETS

Table = dict[str, Any]


@pytest.fixture(scope="module")
def listing() -> Table:
    """The current variants, from a process that does not interpret."""
    return ahead._listing()


def test_the_table_is_of_the_current_sources(listing: Table) -> None:
    table = json.loads(ahead.TABLE.read_text(encoding="utf-8"))
    assert table["triton"] == listing["triton"], "Triton has changed: run python -m srv_kernels.triton.compile"
    stale = [job for job in ahead._jobs(listing) if ahead._recorded(table, listing, job) is None]
    assert list(ahead._differences(table, listing, stale, [], {})) == []


def test_every_kernel_is_compiled_for_every_target(listing: Table) -> None:
    names = {target.name for target in TARGETS}
    for kernel, entry in listing["kernels"].items():
        expected = FLOAT8_DOTS if kernel.startswith("fp8_products.") else names
        assert set().union(*entry["variants"].values()) == expected, kernel


@pytest.mark.slow
def test_the_check_notices_what_is_wrong(
    listing: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one variant and one target of two kernels, which are compiled here."""
    whole, small, table = json.loads(ahead.TABLE.read_text(encoding="utf-8")), {}, {}
    for kernel in ("activations._gated", "page_copies._copy_pages"):
        label = next(iter(whole["kernels"][kernel]["variants"]))
        small[kernel] = {**listing["kernels"][kernel], "variants": {label: ["sm90"]}}
        result = whole["kernels"][kernel]["variants"][label]["sm90"]
        table[kernel] = {**whole["kernels"][kernel], "variants": {label: {"sm90": result}}}
    monkeypatch.setattr(ahead, "_listing", lambda: {**listing, "kernels": small})
    path = tmp_path / "compiled.json"

    def check() -> tuple[int, str]:
        path.write_text(json.dumps({**whole, "kernels": table}), encoding="utf-8")
        return ahead.main(["--check", "--table", str(path), "--jobs", "1"]), capsys.readouterr().out

    assert check()[0] == 0
    next(iter(table["activations._gated"]["variants"].values()))["sm90"] = [1, 0, 0]
    table["page_copies._copy_pages"]["source"] = "0"
    table["page_copies._copy_pages"]["variants"]["f64"] = {"sm90": [1, 0, 0]}
    status, out = check()
    assert status == 1
    assert "activations._gated [fp32,fp32 GELU=False BLOCK=1024 warps=4 stages=3] for sm90: [" in out
    assert "but [1, 0, 0] in compiled.json" in out
    assert "has no results of the current source of page_copies._copy_pages: run python -m" in out
    assert "page_copies._copy_pages [f64] for sm90, which is not compiled any more" in out


@pytest.mark.slow
def test_older_gpus_refuse_e4m3() -> None:
    """Why `targets` lists no e4m3fn for sm80 and sm86; and a refusal is the result of its job."""
    table = json.loads(ahead.TABLE.read_text(encoding="utf-8"))
    label = next(label for label in table["kernels"]["kv_write._write_kv"]["variants"] if "fp8e4nv" in label)
    jobs = [ahead.Job("kv_write._write_kv", label, target) for target in ("sm80", "sm86", "sm89")]
    results = ahead._compile(jobs, 1)
    assert all("fp8e4nv not supported in this architecture" in str(results[job]) for job in jobs[:2])
    assert isinstance(results[jobs[2]], list)


_PTX = """
from srv_kernels.triton.compile_worker import compiled
from srv_kernels.triton.fp8_products import VARIANTS
from srv_kernels.triton.targets import BY_NAME
variant = next(each for each in VARIANTS if each.constants.get("GROUPED") is False)
print(compiled(variant, BY_NAME["sm90"]).asm["ptx"])
"""


@pytest.mark.slow
def test_hopper_adds_fp8_products_outside_of_its_matrix_units(tmp_path: Path) -> None:
    """A tile of 128 x 128 sums in 256 threads, of which each adds 64 after every 128 inputs."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", _PTX]
    text = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert ".f32.e4m3.e4m3" in text
    assert len(re.findall(r"\b(?:add|fma)(?:\.rn)?\.f32", text)) >= 64


@pytest.mark.slow
def test_a_sample_compiles_as_the_table_says() -> None:
    """Another one for each commit."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # which must not reach the compiler
    command = [sys.executable, "-m", "srv_kernels.triton.compile", "--check", "--sample", "30", "--seed", head(ROOT)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "30 sampled" in process.stdout
