"""The environment for workers has a number instead of a string.

Caught by manifest.worker_env at L0, naming "TOY_THREADS".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toy_variant import manifest

from srv.platform.facts import DeviceFacts


def worker_env(device: DeviceFacts, rank: int) -> Mapping[str, Any]:
    return {"TOY_THREADS": 1}  # the fault


MANIFEST = manifest("worker_env_of_numbers", worker_env=worker_env)
