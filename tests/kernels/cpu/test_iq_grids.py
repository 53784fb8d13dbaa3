"""The codebooks of the native library are those of the gguf library."""

from __future__ import annotations

from srv_kernels.cpu.iq_grids import HEADER, header


def test_the_header_in_the_repository_is_what_the_generator_writes() -> None:
    assert HEADER.read_text(encoding="utf-8") == header(), "run python -m srv_kernels.cpu.iq_grids"
