"""The speed of a model in Llama-3-8B's shape with random bfloat16 weights, as shares of what the device can do.

    python speed.py --device cuda --out FOLDER --seconds 150 [--passed-over flashinfer="..."] [--simulated]

Ceilings are measured first, in the same run (`ceilings`); then each configuration runs in a process of its own
(`engine_speed`), in order of value. What one has measured is in FOLDER/speed.jsonl, whatever happens to the next. At
the end FOLDER/speed.json and FOLDER/speed.md have everything. The last line on standard output is the summary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from checkpoint import write_checkpoint
from engine_speed import PAGE, Measured, output_tokens
from limits import run_limited
from outcomes import STATUS_PASSED_OVER
from speed_floors import LLAMA_3_8B, TINY, Shape
from speed_report import Ceilings, Speed, markdown, summary

HERE = Path(__file__).resolve().parent
CEILING_SECONDS = 45.0
LEAST_SECONDS = 10.0  # an engine that has less is not started
USABLE = 0.85  # share of the device's memory that weights and keys may take


@dataclass(frozen=True, slots=True)
class Configuration:
    """One engine: a backend of attention, with or without graphs, and what is measured with it."""

    attention: str
    eager: bool
    batches: tuple[int, ...]
    prefill: int

    @property
    def name(self) -> str:
        return f"{self.attention}, {'eager' if self.eager else 'graphs'}"


def configurations(device: str, batches: tuple[int, ...], prefill: int) -> list[Configuration]:
    """What is measured on a platform, the most valuable first."""
    smaller_batches = tuple(sorted({batches[0], batches[len(batches) // 2]}))
    native = Configuration("torch_native", True, batches[:1], prefill)
    if device == "xpu":  # it captures no steps
        return [Configuration("triton", True, batches, prefill), native]
    vendor = {"cuda": "flashinfer", "rocm": "aiter"}[device]
    return [
        Configuration("triton", False, batches, prefill),
        Configuration(vendor, False, batches, prefill),
        Configuration("triton", True, smaller_batches, 0),
        native,
    ]


@dataclass
class Run:
    """One run of this module. known: backends that cannot work here, with reasons; passed_over: configurations."""

    device: str
    out: Path
    deadline: float
    simulated: bool
    known: dict[str, str]
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - monotonic()

    def ceilings(self) -> Ceilings | None:
        """None on a simulated device, whose speed means nothing. Raises RuntimeError if they cannot be measured."""
        if self.simulated:
            return None
        command = [sys.executable, str(HERE / "ceilings.py"), self.device]
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=min(CEILING_SECONDS, self.left), check=False
        )
        if process.returncode != 0:
            raise RuntimeError(f"the ceilings could not be measured: {process.stderr[-2000:]}")
        return Ceilings(**json.loads(process.stdout.splitlines()[-1]))

    def measure(self, configuration: Configuration, model: Path, prompt: int) -> None:
        """Run one configuration; what it measured is in speed.jsonl."""
        reason = self.known.get(configuration.attention, "")
        if not reason and self.left < LEAST_SECONDS:
            reason = "no time was left for it"
        if reason:
            self.passed_over[configuration.name] = reason
            return
        print(f"-- {configuration.name}: batches {configuration.batches}, prefill {configuration.prefill}", flush=True)
        command = [
            *(sys.executable, str(HERE / "engine_speed.py"), "--device", self.device, "--model", str(model)),
            *("--attention", configuration.attention, "--prompt", str(prompt), "--prefill", str(configuration.prefill)),
            *("--batches", *map(str, configuration.batches), "--out", str(self.out / "speed.jsonl")),
            *("--seconds", f"{self.left:.0f}", *(["--eager"] if configuration.eager else [])),
            *(["--simulated"] if self.simulated else []),
        ]
        ended = run_limited(command, sys.stdout, self.left, leads=False)
        if ended.status is None:
            self.passed_over[configuration.name] = f"stopped when its time was over, after {ended.seconds:.0f} s"
        elif ended.status == STATUS_PASSED_OVER:
            self.passed_over[configuration.name] = self._lines()[-1]["refused"]
        elif ended.status != 0:
            self.passed_over[configuration.name] = f"failed with status {ended.status}: see the log"

    def measured(self) -> list[Measured]:
        return [Measured(**line) for line in self._lines() if "refused" not in line]

    def _lines(self) -> list[dict[str, Any]]:
        file = self.out / "speed.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


@contextmanager
def model_folder(shape: Shape) -> Iterator[Path]:
    """A checkpoint of this shape in memory if the host has room for it, else in the folder for temporary files."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 1.2 * shape.checkpoint_bytes
    with tempfile.TemporaryDirectory(prefix="srv-proof-", dir=memory if fits else None) as folder:
        started = monotonic()
        write_checkpoint(Path(folder), shape)
        print(f"-- wrote {shape.checkpoint_bytes / 1e9:.1f} GB of weights in {monotonic() - started:.0f} s", flush=True)
        yield Path(folder)


def sizes(ceilings: Ceilings | None) -> tuple[Shape, tuple[int, ...], int, int]:
    """(shape, batches, tokens of context, tokens of the prefill); without ceilings the smallest that run at all."""
    if ceilings is None:
        return TINY, (1, 2), 20, 40
    shape, prompt = LLAMA_3_8B, 1024
    free = int(ceilings.memory_bytes * USABLE) - shape.checkpoint_bytes
    batches = (1, 16, 64, 256)
    tokens = {batch: batch * (prompt + output_tokens(batch, prompt) + PAGE) for batch in batches}
    fitting = tuple(batch for batch in batches if tokens[batch] * shape.kv_bytes <= free)
    if not fitting:
        raise RuntimeError(f"{shape.checkpoint_bytes / 1e9:.0f} GB of weights do not fit into the device's memory")
    return shape, fitting, prompt, 8192


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "rocm", "xpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--passed-over", action="append", default=[], metavar="BACKEND=REASON")
    parser.add_argument("--only", nargs="+", metavar="BACKEND", help="measure only these backends of attention")
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args(arguments)
    passed_over = dict(text.split("=", 1) for text in options.passed_over)
    run = Run(options.device, options.out, monotonic() + options.seconds, options.simulated, passed_over)
    (run.out / "speed.jsonl").unlink(missing_ok=True)
    ceilings = run.ceilings()
    shape, batches, prompt, prefill = sizes(ceilings)
    with model_folder(shape) as model:
        for configuration in configurations(run.device, batches, prefill):
            if options.only is None or configuration.attention in options.only:
                run.measure(configuration, model, prompt)
    speed = Speed(shape, ceilings, tuple(run.measured()), run.passed_over)
    (run.out / "speed.json").write_text(json.dumps(speed.as_json(), indent=1) + "\n", encoding="utf-8")
    (run.out / "speed.md").write_text(markdown(speed), encoding="utf-8")
    print(markdown(speed))
    print(summary(speed))
    failed = any(reason.startswith("failed") for reason in run.passed_over.values())
    return 1 if failed or not speed.measured else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
