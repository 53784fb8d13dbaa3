"""Some tier runs every test that evidence rests on."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What runs the tests of a platform's own folder, in child processes.
RUNNERS = {
    "platforms/npu/tests": "tests/platforms/npu/test_simulated.py",
    "platforms/gpu/tests": "tests/platforms/gpu/test_simulated.py",
}


def test_every_file_with_evidence_is_run_by_a_tier() -> None:
    lines = [line for path in ROOT.glob("support_matrix/evidence/*.jsonl") for line in path.read_text().splitlines()]
    files = {json.loads(line)["test"].partition("::")[0] for line in lines}
    assert len(files) > len(RUNNERS)
    for file in sorted(file for file in files if not file.startswith("tests/")):
        runner = (ROOT / RUNNERS[str(Path(file).parent)]).read_text()
        name = Path(file).stem.removeprefix("test_npu_")
        assert "recorded(device)" in runner or f"test_npu_{name}" in runner or f'"{name}"' in runner, file
