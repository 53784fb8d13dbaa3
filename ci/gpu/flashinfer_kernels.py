"""Makes FlashInfer compile the kernels that the speed stage needs, with an engine of one layer in the same shape.

    python flashinfer_kernels.py cuda

FlashInfer keeps compiled kernels in its cache folder, where the processes of the speed stage find them.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoint import write_checkpoint
from speed_floors import LLAMA_3_8B

HERE = Path(__file__).resolve().parent


def main(device: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch), dataclasses.replace(LLAMA_3_8B, layers=1, vocab=1024))
        command = [sys.executable, str(HERE / "engine_speed.py"), "--device", device, "--model", str(model)]
        workload = ["--attention", "flashinfer", "--batches", "1", "16", "--prompt", "1024", "--prefill", "8192"]
        return subprocess.run([*command, *workload, "--out", str(Path(scratch) / "times")], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
