"""Where evidence can be recorded: the devices of this machine, and those that it can simulate, with their tests.

This module must not know how a test is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srv.platform.probe import probe_all
from srv.platform.registry import find_platforms
from srv_matrix.ages import covered_code
from srv_matrix.matrix import BUILT_IN
from srv_matrix.repository import MatrixError, Repository

CPU = "cpu"
_ARGUMENTS = "tests/e2e/test_e2e_arguments.py"
_ANY_DEVICE = ("tests/e2e/test_e2e_openai.py", _ARGUMENTS)
_INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
# Requests of 100,000 tokens end too late in Triton's interpreter.
_TOO_LONG = ("context_length", "graceful_shutdown")
_INTERPRETED_GPUS = ("cuda:sm90", "rocm:gfx942", "xpu:bmg")
# For these, tests compile kernels ahead of time.
_COMPILED_GPUS = (
    *("cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm100", "cuda:sm120"),
    *("rocm:gfx950", "rocm:gfx1100"),
)


@dataclass(frozen=True)
class Place:
    """A device to record on. `settings`: the environment variables that select a simulated one.

    `tests`: the beginnings of the ids of its tests. `only`: what their names contain, and `never`: what they do not.
    """

    platform: str
    variant: str
    tests: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    never: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.platform}:{self.variant}"

    def runs(self, test: str, mark: Mapping[str, Any]) -> bool:
        """Whether a marked test is to be recorded here."""
        name = test.partition("::")[2]
        suits = test.startswith(self.tests) and self.only in name and not any(part in name for part in self.never)
        return suits and mark["platform"] in ("", self.platform)


def places(repository: Repository) -> list[Place]:
    """The devices that are here, then those that can be simulated."""
    platforms = {name: platform for name, platform in find_platforms().items() if platform.distribution == BUILT_IN}
    by_name: dict[str, Place] = {}
    for name, result in probe_all(platforms).items():
        if result.available and result.device is not None and not result.device.simulated:
            tests = ("tests/",) if name == CPU else (*_own_tests(name, repository), *_ANY_DEVICE)
            here = Place(name, result.device.variant, tests)
            by_name[here.name] = here
    for place in _simulated(repository):
        by_name.setdefault(place.name, place)
    return list(by_name.values())


def _simulated(repository: Repository) -> Iterable[Place]:
    for variant in ("a2", "a3"):
        settings = {"SRV_NPU_SIMULATOR": variant, "OMP_NUM_THREADS": "1"}
        yield Place("npu", variant, (*_own_tests("npu", repository), *_ANY_DEVICE), settings)
    for name in (*_INTERPRETED_GPUS, *_COMPILED_GPUS):
        platform, _, variant = name.partition(":")
        tests, settings = _own_tests(platform, repository), {"SRV_GPU_SIMULATOR": variant, **_INTERPRETED}
        if name in _COMPILED_GPUS:
            yield Place(platform, variant, tests, settings, only="compile")
        else:
            yield Place(platform, variant, (*tests, _ARGUMENTS), settings, never=_TOO_LONG)


def _own_tests(platform: str, repository: Repository) -> tuple[str, ...]:
    """The folders with the tests of a platform, and of those whose code it shares."""
    packages = [folder for folder in covered_code(platform, repository) if folder.startswith("platforms/")]
    return tuple(f"{package.rpartition('/')[0]}/tests/" for package in packages)


def selected(all_places: Sequence[Place], platform: str) -> list[Place]:
    """The places of a platform ("npu") or of a variant ("npu:a2"); MatrixError if there is none."""
    chosen = [place for place in all_places if platform in ("", place.platform, place.name)]
    if not chosen:
        names = ", ".join(place.name for place in all_places)
        raise MatrixError(f"--platform {platform}: this machine has no such device and simulates none. It has {names}")
    return chosen
