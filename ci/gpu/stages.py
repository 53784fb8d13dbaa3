"""The stages of a run, in order of value, each with its command and its time limit. Standard library only.

Owns what is run; `proof` runs it. A stage's command prints its figure as its last line, and ends with 0 (passed), 3
(passed over, for the reason that it prints), or another status (failed).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SIMULATOR = "SRV_GPU_SIMULATOR"
KERNEL_TESTS = ("attention", "ops", "quantized", "sampling", "numerics", "experts", "dense", "latent")
EVIDENCE_TESTS = (
    "platforms/gpu/tests/test_gpu_evidence.py",
    "tests/e2e/test_e2e_openai.py",
    "tests/e2e/test_e2e_arguments.py",
)
# It needs no device, and on a machine with another version of Triton it would compile the whole table.
AHEAD_OF_TIME = f"{EVIDENCE_TESTS[0]}::test_the_kernels_of_an_op_compile"
# Compiling FlashInfer for every dtype, head dim and feature that the kit tries takes many times as long as the run.
WITHOUT_FLASHINFER = {"FLASHINFER_DISABLE_JIT": "1"}
EVIDENCE = Path("support_matrix") / "evidence"
SIMULATED_CHECKS = ("op.rms_norm", "op.silu_and_mul")  # checks that run in seconds on a simulated device


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. seconds: its time limit. environment: in addition to the caller's variables."""

    name: str
    what: str
    seconds: float
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """device: "cuda", "rocm" or "xpu". out: the folder of results. smallest: one case per stage, for tests.

    can_commit: whether the tree is a clean checkout on a real device, so that evidence of it may be committed.
    """

    device: str
    out: Path
    simulated: bool = False
    smallest: bool = False
    can_commit: bool = False
    workers: int = 1


def stages(options: Options) -> list[Stage]:
    """All stages, the most valuable first: one that fails or takes too long loses only those behind it."""
    return [
        _environment(options),
        *_conformance(options),
        _kernels(options),
        _tokens(options),
        _speed(options),
        _sweep(options),
        _evidence(options),
    ]


def _environment(options: Options) -> Stage:
    command = [*_python("environment.py"), "--device", options.device, "--out", str(options.out)]
    return Stage("environment", "device, driver, versions, `srv doctor`", 60, command + _simulated_flag(options))


def _conformance(options: Options) -> list[Stage]:
    """The kit in parts, because compiling what it tries takes minutes. A simulated device runs a few checks."""
    if options.simulated:
        return [_kit(options, "conformance", "conformance kit, a few checks", "L2", SIMULATED_CHECKS)]
    return [
        _kit(options, "conformance", "conformance kit, L0 and L1", "L1"),
        _kit(options, "ops", "conformance kit, L2: operators and experts", "L2", ("op", "experts")),
        _kit(options, "attention", "conformance kit, L2: attention and graphs", "L2", ("attention", "graph")),
        _kit(options, "engine", "conformance kit, L3: the engine", "L3", ("engine",)),
    ]


def _kit(options: Options, name: str, what: str, level: str, only: Sequence[str] = (), seconds: float = 120) -> Stage:
    command = [*_srv("conformance", "run"), "--device", options.device, "--level", level]
    report = ["--report", str(options.out / f"{name}.jsonl")]
    return Stage(name, what, seconds, [*command, *report, *(["--only", *only] if only else [])], WITHOUT_FLASHINFER)


def _kernels(options: Options) -> Stage:
    """On the device; a simulated one runs the kernels in Triton's interpreter."""
    files = [f"tests/kernels/triton/test_triton_{name}.py" for name in KERNEL_TESTS]
    if options.simulated:
        selection = ["-k", "TestCopyPages or norm_rounds"] if options.smallest else []
        files = ["tests/kernels/triton/test_triton_ops.py", *selection]
    environment = {"SRV_KERNEL_DEVICE": options.device}
    workers = ["-n", str(options.workers)] if options.workers > 1 else []
    command = [*_pytest(*files), "--tier", "fast", *workers]
    return Stage("kernels", "Triton's kernels compared with float64", 110, command, environment)


def _tokens(options: Options) -> Stage:
    command = [*_python("tokens.py"), "--device", options.device]
    command += ["--prompts", "1", "--tokens", "2", "--eager"] if options.simulated else []
    seconds = 300 if options.simulated else 75
    return Stage("tokens", "SmolLM2 in float32, compared with the CPU", seconds, command)


def _speed(options: Options) -> Stage:
    """The caller appends `--seconds`, because only it knows how much time is left."""
    command = [*_python("speed.py"), "--device", options.device, "--out", str(options.out)]
    only = ["--only", "torch_native"] if options.smallest else []
    seconds = 300 if options.simulated else 170
    return Stage("speed", "Llama-3-8B's shape in bfloat16", seconds, command + _simulated_flag(options) + only)


def _sweep(options: Options) -> Stage:
    only = ("arguments.refused",) if options.simulated else ("server", "arguments")
    return _kit(options, "sweep", "conformance kit, L4: arguments on a server", "L4", only, 180)


def _evidence(options: Options) -> Stage:
    """Into the support matrix if it may be committed; else into the folder of results, marked as changed."""
    flags = [str(options.out / "evidence.jsonl"), "--srv-evidence-any-tree"]
    target = [str(EVIDENCE)] if options.can_commit else flags
    tests = [*EVIDENCE_TESTS, "--deselect", AHEAD_OF_TIME]
    if options.simulated:
        tests = [EVIDENCE_TESTS[-1], "-k", "test_host"]
    command = [*_pytest(*tests), "-m", "covers", "--srv-evidence-device", options.device, "--srv-evidence", *target]
    seconds = 300 if options.simulated else 90
    return Stage("evidence", "tests with evidence for the support matrix", seconds, command, WITHOUT_FLASHINFER)


def _simulated_flag(options: Options) -> list[str]:
    return ["--simulated"] if options.simulated else []


def _python(script: str) -> list[str]:
    return [sys.executable, str(HERE / script)]


def _srv(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "srv", *arguments]


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *arguments]
