"""The arguments that name the implementations of ops. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from srv.args.config import Config


def named_implementations(config: Config) -> Mapping[str, str]:
    """The names of implementations, or "auto", by op."""
    return {"linear_fp8": config.platform.fp8_gemm_backend}
