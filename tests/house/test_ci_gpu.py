"""The parts of `ci/gpu`: floors, time limits, the table, the list of packages; and a small run on a simulated GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from every import every

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "ci" / "gpu"
sys.path.insert(0, str(GPU))

import checkpoint  # noqa: E402 - scripts in ci/, which is not a package
import environment  # noqa: E402
import limits  # noqa: E402
import outcomes  # noqa: E402
import pack  # noqa: E402
import proof  # noqa: E402
import speed  # noqa: E402
import speed_floors  # noqa: E402
import speed_report  # noqa: E402
import stages  # noqa: E402
import tokens  # noqa: E402
import unpack  # noqa: E402
from engine_speed import Measured  # noqa: E402

CEILINGS = speed_report.Ceilings(bytes_per_s=1e12, operations_per_s=1e15, memory_bytes=80 * 10**9)


class TestFloors:
    def test_of_llama_3_8b(self) -> None:
        """The published model has 8,030,261,248 weights; 128 KiB of keys and values per token in 16-bit floats."""
        shape = speed_floors.LLAMA_3_8B
        assert shape.checkpoint_bytes == 2 * 8_030_261_248
        assert shape.step_bytes == 2 * (8_030_261_248 - 128256 * 4096)
        assert shape.kv_bytes == 128 * 1024
        read = shape.step_bytes + 16 * 1000 * shape.kv_bytes
        assert shape.decode_floor_s(16, 1000, 2e12) == read / 2e12

    def test_of_a_prefill_counts_what_a_causal_mask_leaves(self) -> None:
        shape = replace(speed_floors.TINY, layers=1, hidden=2, intermediate=3, heads=1, kv_heads=1, head_dim=2, vocab=5)
        products = 2 * 4 * (4 * 2 * 2 + 3 * 2 * 3) + 2 * 2 * 5
        attention = 2 * 2 * 2 * (1 + 2 + 3 + 4)
        assert shape.prefill_floor_s(4, 1.0) == products + attention

    def test_of_a_checkpoint_are_the_bytes_that_are_written(self, tmp_path: Path) -> None:
        checkpoint.write_checkpoint(tmp_path, speed_floors.TINY)
        file = (tmp_path / "model.safetensors").read_bytes()
        header = int.from_bytes(file[:8], "little")
        assert len(file) - 8 - header == speed_floors.TINY.checkpoint_bytes

    def test_aims_are_met_from_their_share_on(self) -> None:
        assert speed_floors.verdict("decode 1", 0.85) == "met (aim 85%)"
        assert speed_floors.verdict("prefill", 0.59) == "not met (aim 60%)"
        assert speed_floors.verdict("decode 16", 0.01) == ""


class TestSpeed:
    def _speed(self, ceilings: speed_report.Ceilings | None, seconds: float | None) -> speed_report.Speed:
        measured = Measured("triton", True, "decode", 1, 1000.0, True, seconds)
        return speed_report.Speed(speed_floors.LLAMA_3_8B, ceilings, [measured], {"flashinfer, graphs": "no nvcc"})

    def test_rows_have_time_floor_share_and_aim(self) -> None:
        floor = speed_floors.LLAMA_3_8B.decode_floor_s(1, 1000.0, 1e12)
        figures = self._speed(CEILINGS, floor / 0.8)
        times = f"{floor / 0.8 * 1e3:.2f} | {floor * 1e3:.2f} | 80% |"
        assert f"| decode, batch 1, context 1,000 | triton | replayed | {times}" in speed_report.markdown(figures)
        assert "not met (aim 85%) |" in speed_report.markdown(figures)
        assert "- flashinfer, graphs: no nvcc" in speed_report.markdown(figures)
        assert speed_report.summary(figures) == "decode 1 80% (triton), not met (aim 85%)"

    def test_a_simulated_device_has_no_speed(self) -> None:
        figures = self._speed(None, None)
        text = speed_report.markdown(figures)
        assert "| triton | replayed | simulated | simulated | simulated | simulated |" in text
        assert "tokens/s | aim" in text
        assert "Ceilings" not in text
        assert json.loads(json.dumps(figures.as_json()))["measured"][0]["share"] is None

    def test_batches_that_do_not_fit_are_left_out(self) -> None:
        assert speed.sizes(CEILINGS)[1] == (1, 16, 64, 256)
        assert speed.sizes(replace(CEILINGS, memory_bytes=24 * 10**9))[1] == (1, 16)
        with pytest.raises(RuntimeError, match="do not fit"):
            speed.sizes(replace(CEILINGS, memory_bytes=16 * 10**9))

    def test_every_platform_compares_the_same_backends_where_it_can(self) -> None:
        for device, vendor in (("cuda", "flashinfer"), ("rocm", "aiter")):
            compared = speed.configurations(device, (1, 16, 64, 256), 8192)
            assert [configuration.name for configuration in compared] == [
                "triton, graphs",
                f"{vendor}, graphs",
                "triton, eager",
                "torch_native, eager",
            ]
            assert compared[2].batches == (1, 64)
        assert [configuration.eager for configuration in speed.configurations("xpu", (1,), 0)] == [True, True]


class TestLimits:
    @pytest.fixture
    def child_file(self, tmp_path: Path) -> Iterator[Path]:
        file = tmp_path / "child"
        yield file
        if file.exists() and psutil.pid_exists(pid := int(file.read_text())):
            os.kill(pid, signal.SIGKILL)

    def test_a_command_out_of_time_ends_with_its_children(self, child_file: Path, tmp_path: Path) -> None:
        script = f"sleep 300 & echo $! > {child_file}.new; mv {child_file}.new {child_file}; echo begun; wait"
        with (tmp_path / "log").open("w+", encoding="utf-8") as log:
            ended = limits.run_limited(["bash", "-c", script], log, 2.0)
            log.seek(0)
            assert log.read() == "begun\n"
        assert ended.status is None
        assert outcomes.outcome_of(ended.status) == "TIMED OUT"
        pid, deadline = int(child_file.read_text()), time.monotonic() + 10
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the child of a stopped command is still there"
            time.sleep(0.05)

    @every(("status", "outcome"), [(0, "passed"), (3, "passed over"), (1, "FAILED"), (2, "FAILED")])
    def test_status_and_environment_of_a_command_arrive(self, status: int, outcome: str, tmp_path: Path) -> None:
        with (tmp_path / "log").open("w+", encoding="utf-8") as log:
            command = ["bash", "-c", f"echo $MINE; exit {status}"]
            ended = limits.run_limited(command, log, 60.0, environment={"MINE": "here"})
            log.seek(0)
            assert (ended.status, log.read()) == (status, "here\n")
        assert outcomes.outcome_of(ended.status) == outcome


class TestTable:
    @every(
        ("stage", "text", "figure"),
        [
            ("tokens", "a\n8 of 8 prompts equal\nnanobind: leaked 1\n", "8 of 8 prompts equal"),
            ("kernels", "...\n==== 3 failed, 90 passed in 12.3s ====\nlater", "3 failed, 90 passed in 12.3s"),
            ("conformance", "L0 ok\n\ncuda (torch 2): 80 passed, 1 failed\nreport: x", "80 passed, 1 failed"),
            ("sweep", "it crashed", "it crashed"),
            ("speed", "\n== speed: python speed.py\n", ""),
        ],
    )
    def test_figure_of_a_stage(self, stage: str, text: str, figure: str) -> None:
        assert outcomes.figure_of(stage, text) == figure

    def test_simulated_is_said_in_every_row(self) -> None:
        result = outcomes.Result("speed", "a shape", "passed", 1.6, "x | y", True)
        assert outcomes.markdown([result]).splitlines()[2] == "| speed: a shape | passed | 2 | simulated; x / y |"
        real = outcomes.markdown([replace(result, simulated=False)])
        assert "simulated" not in real

    def test_a_difference_of_tokens_is_located(self) -> None:
        assert tokens.differences([[1, 2], [1, 2]], [[1, 2], [1, 3]]) == [
            "prompt 1: token 1 of 2 is the first that differs"
        ]
        assert tokens.differences([[1, 2]], [[1]]) == ["prompt 0: token 1 of 2 is the first that differs"]


class TestStages:
    def test_only_a_clean_tree_on_a_real_device_writes_into_the_support_matrix(self, tmp_path: Path) -> None:
        for can_commit in (True, False):
            options = stages.Options("cuda", tmp_path, can_commit=can_commit)
            command = {stage.name: stage.command for stage in stages.stages(options)}["evidence"]
            target = command[command.index("--srv-evidence") + 1]
            assert target == ("support_matrix/evidence" if can_commit else str(tmp_path / "evidence.jsonl"))
            assert ("--srv-evidence-any-tree" in command) is not can_commit

    def test_their_files_and_tests_exist(self, tmp_path: Path) -> None:
        for simulated in (True, False):
            for stage in stages.stages(stages.Options("rocm", tmp_path, simulated)):
                for part in stage.command:
                    assert not part.endswith(".py") or (ROOT / part).exists(), part

    def test_speeds_are_measured_alone_and_last(self, tmp_path: Path) -> None:
        """On a machine with many cores; on others, stages run one at a time, in order of value."""
        selected = stages.stages(stages.Options("cuda", tmp_path))
        names = [[stage.name for stage in group] for group in proof.groups(selected, 8)]
        beside = ["conformance", "ops", "attention", "engine", "kernels", "tokens", "sweep", "evidence"]
        assert names == [["environment"], beside, ["speed"]]
        assert proof.groups(selected, 1) == [[stage] for stage in selected]
        assert proof.groups(selected[-1:], 8) == [selected[-1:]]
        assert proof.groups([], 8) == []

    def test_a_simulator_without_the_flag_is_refused(self, tmp_path: Path) -> None:
        variables = {**os.environ, "SRV_GPU_SIMULATOR": "sm90"}
        command = [sys.executable, str(GPU / "proof.py"), "--out", str(tmp_path)]
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        assert process.returncode == 2
        assert "--simulated and SRV_GPU_SIMULATOR go together" in process.stderr

    def test_the_doctor_says_what_is_passed_over(self) -> None:
        rejected = {"fa3": ["this version of srv does not call it"], "triton": ["fits, but its priority is lower"]}
        doctor = {"platforms": [{"backends": {"decode_attention_backend": {"rejected": rejected}}}]}
        assert environment.passed_over(doctor) == {"fa3": "this version of srv does not call it"}


class TestPack:
    def test_everything_that_srv_requires_is_there_or_packed_in_its_pinned_version(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        requirements = pack.needed(project, constraints, pack.requires, "3.11")
        names = {pack.canonicalize_name(pack.Requirement(requirement).name) for requirement in requirements}
        of_project = {
            pack.canonicalize_name(pack.Requirement(requirement).name) for requirement in project["dependencies"]
        }
        assert of_project - names - pack.PRESENT == {"srv-kernels"}
        assert not names & pack.PRESENT
        assert {"flashinfer-python", "ninja", "pydantic-core", "starlette"} <= names
        unpinned = {requirement for requirement in requirements if "==" not in requirement}
        assert unpinned <= set(pack.FLASHINFER)

    def test_requirements_of_what_is_there_and_of_other_pythons_are_left_out(self) -> None:
        graph = {"mine": ["torch", "old; python_version < '3.12'", "more; extra == 'all'"], "torch": ["large"]}
        lookup = lambda name: graph.get(name, [])  # noqa: E731
        assert pack.closure(["mine>=1"], lookup, "3.11") == {"mine", "old"}
        assert pack.closure(["mine>=1"], lookup, "3.12") == {"mine"}

    def test_a_large_wheel_is_split_and_joined_again(self, tmp_path: Path) -> None:
        out, joined = tmp_path / "pack", tmp_path / "joined"
        out.mkdir()
        joined.mkdir()
        whole = out / "model-1-py3-none-any.whl"
        with pack.zipfile.ZipFile(whole, "w") as archive:
            archive.writestr("model.gguf", bytes(range(256)) * 40)
        content = whole.read_bytes()
        pieces = pack.split(whole, 4000, out, 2)
        assert [piece.parent.name for piece in pieces] == ["2", "3", "4"]
        assert max(pack.size(piece.parent) for piece in pieces) <= 4000
        (wheel,) = unpack.gather(out, joined)
        assert wheel.read_bytes() == content
        pieces[-1].unlink()
        assert unpack.gather(out, joined) == []


@pytest.mark.proof(minutes=0.3)
@pytest.mark.timeout(300)
def test_a_run_on_a_simulated_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")
    paths = (str(ROOT / "plugins" / "gpu_simulator"), os.environ.get("PYTHONPATH"))
    variables = {
        **os.environ,
        "PYTHON": sys.executable,
        "PACK": str(tmp_path / "none"),
        "SRV_GPU_SIMULATOR": "sm90",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [str(GPU / "run.sh"), "--simulated", "--smallest", "--stages", "environment", "kernels", "speed"]
    process = subprocess.run(
        [*command, "--out", str(tmp_path)], env=variables, capture_output=True, text=True, timeout=280, check=False
    )
    log = "".join(file.read_text(encoding="utf-8") for file in sorted(tmp_path.glob("log-*.txt")))
    assert process.returncode == 0, process.stdout + process.stderr + log[-4000:]
    rows = [line for line in process.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row.split(":")[0] for row in rows] == ["| environment", "| kernels", "| speed"]
    assert all("| passed |" in row and "| simulated; " in row for row in rows), rows
    measured = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))["measured"]
    assert [(line["kind"], line["seconds"]) for line in measured] == [("decode", None), ("prefill", None)]
