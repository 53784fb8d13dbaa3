"""The tuner, with a timer in place of a GPU: what it tries, what it leaves out, and the tables that it writes."""

from __future__ import annotations

import json
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every

pytest.importorskip("triton", reason="Triton is not installed: pip install 'srv-kernels[triton]'")

from srv_kernels.triton import tune, tune_workloads, tuning_data
from srv_kernels.triton.attention_tuning import blocks
from srv_kernels.triton.quantized_tuning import compiled_for
from srv_kernels.triton.registration import INTERPRETED
from srv_kernels.triton.targets import BY_NAME
from srv_kernels.triton.tune_candidates import Place, candidates, kernel_of, places, recorded, unfit

RECORD: dict[str, Any] = json.loads(tune.COMPILED.read_text(encoding="utf-8"))
TABLES = tuning_data.read()
SM90 = BY_NAME["sm90"]
DECODE = Place("attention", "decode 128")


def test_the_file_is_written_as_it_is_read() -> None:
    assert tuning_data.formatted(TABLES) == tuning_data.PATH.read_text(encoding="utf-8")
    assert blocks("sm90", "extend", 256, 2) == tuple(TABLES["attention"]["sm90"]["extend 256"])


@every("target", BY_NAME)
def test_every_place_has_present_sizes_and_other_candidates_that_fit(target: str) -> None:
    limits = tune.limits_of(BY_NAME[target])
    for place in places(TABLES, target):
        present = tune.present_sizes(TABLES, place, target)
        actual = candidates(place, present, limits)
        assert actual[0] == present
        assert len(set(actual)) == len(actual)
        assert any(unfit(place, sizes, limits, RECORD) is None for sizes in actual[1:]), place


def test_candidates_that_do_not_fit_are_left_out_with_a_reason() -> None:
    limits = tune.limits_of(BY_NAME["sm86"])
    assert "bytes of shared memory, more than the 101376 of sm86" in str(
        unfit(Place("attention", "extend 256"), (128, 128, 8, 7), limits, RECORD)
    )
    assert "registers per thread" in str(unfit(Place("int8_gemm", 2), (128, 128, 32, 2, 2), limits, RECORD))
    present = tune.present_sizes(TABLES, DECODE, "sm90")
    results = recorded(DECODE, present, "sm90", RECORD)
    assert results
    assert recorded(DECODE, (*present[:3], 99), "sm90", RECORD) == []
    spilling = json.loads(json.dumps(RECORD))
    for variants in spilling["kernels"]["attention_variants.decode_kernel"]["variants"].values():
        if "sm90" in variants:
            variants["sm90"][1] = 8
    assert unfit(DECODE, present, tune.limits_of(SM90), spilling) == "compiled, it spills 8"


def test_the_fastest_sizes_are_chosen_and_small_gains_are_not() -> None:
    """A timer that prefers 32 keys for one place, and gains 2 % elsewhere for sizes that are not the present ones."""

    def timer(place: Place, sizes: tuple[int, ...]) -> float:
        if place == DECODE:
            if sizes[1] == 16:
                raise RuntimeError("out of resources")
            return 1e-3 if sizes[1:] == (32, 4, 3) else 2e-3
        return 1.0 if sizes == tune.present_sizes(TABLES, place, "sm90") else 0.98

    said: list[str] = []
    tables, changes = tune.tune(TABLES, SM90, timer, RECORD, said.append)
    assert [change.place for change in changes] == [DECODE]
    assert str(changes[0]).startswith("attention decode 128: [64, 64, 4, 5] (2000.0 µs) -> [32, 32, 4, 3] (1000.0 µs)")
    assert tables["attention"]["sm90"] == {**TABLES["attention"]["sm90"], "decode 128": [32, 32, 4, 3]}
    assert {name: table for name, table in tables.items() if name != "attention"} == {
        name: table for name, table in TABLES.items() if name != "attention"
    }
    assert tuning_data.read() == TABLES
    assert all("RuntimeError: out of resources" in line for line in said)
    assert said


def test_a_row_of_a_target_is_written_beside_that_of_all(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(tuning_data.formatted(TABLES), encoding="utf-8")

    def timer(place: Place, sizes: tuple[int, ...]) -> float:
        return 0.5 if place in (Place("int8_gemm", 1), Place("gguf_gemv", 0)) and sizes[-1] == 8 else 1.0

    arguments = ["--target", "sm90"]
    assert tune.main(arguments, lambda target: timer, path) == 0
    assert tuning_data.read(path) == TABLES
    assert tune.main([*arguments, "--write"], lambda target: timer, path) == 0
    written = tuning_data.read(path)
    assert set(written["gguf_gemv"]) == {"gpu", "interpreter", "sm90"}
    assert written["gguf_gemv"]["sm90"][-1] == 8
    assert written["int8_gemm"]["gpu"] == TABLES["int8_gemm"]["gpu"]


def test_without_a_gpu_of_the_target_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    if not INTERPRETED and torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    before = tuning_data.PATH.read_bytes()
    assert tune.main(["--target", "sm90", "--write"]) == 1
    assert ("there is no GPU here" in (said := capsys.readouterr().err)) or "unset TRITON_INTERPRET" in said
    assert tuning_data.PATH.read_bytes() == before


def test_tiles_of_a_tuned_target_are_compiled_for_it_alone() -> None:
    tuned = {"gpu": (1, 2), "sm90": (1, 3)}
    actual = dict(compiled_for(tuned, lambda entry: entry))
    assert actual == {1: frozenset(), 2: frozenset(BY_NAME) - {"sm90"}, 3: frozenset({"sm90"})}


def _note(seen: list[Place], place: Place, *_: object, **__: object) -> None:
    seen.append(place)


@pytest.mark.skipif(not INTERPRETED, reason="launches of the size of an interpreter")
def test_every_workload_launches_its_kernel() -> None:
    """With few tokens and a narrow weight."""
    for place in places(TABLES, "sm90"):
        if str(place.key).endswith(("64", "256")):
            continue
        sizes = tune.present_sizes(TABLES, place, "sm90")
        if place.table != "attention" and place.key:
            continue  # the same launch with more rows
        name = kernel_of(place).replace("attention_variants", "attention_kernels")
        kernel = pkgutil.resolve_name(f"srv_kernels.triton.{name}")
        launches: list[Place] = []
        note = partial(_note, launches, place)
        kernel.add_pre_run_hook(note)
        try:
            launch = tune_workloads.launch(place, sizes, torch.device("cpu"), tokens=32, width=256)
            launches.clear()
            launch()
        finally:
            kernel.pre_run_hooks.remove(note)
        assert launches == [place]
