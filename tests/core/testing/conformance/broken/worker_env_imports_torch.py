"""worker_env imports torch when it is called, to ask how many threads there are.

Caught by manifest.call_purity at L0, naming "worker_env imports torch".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import DeviceFacts


def worker_env(device: DeviceFacts, rank: int) -> dict[str, str]:
    import torch  # the fault

    return {"TOY_THREADS": str(torch.get_num_threads())}


MANIFEST = manifest("worker_env_imports_torch", worker_env=worker_env)
