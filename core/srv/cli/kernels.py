"""The text of a kernel plan, for `srv plan --kernels`. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from srv.planning.kernel import Kernel

_WIDTH = 80
_TITLES = {
    "layers": "layers and weights",
    "attention": "attention, per kind of layer",
    "op": "ops",
    "sampling": "sampling",
    "steps": "steps",
}


def kernels_text(kernels: Sequence[Kernel]) -> str:
    """All lines have at most 80 columns, unless a single word has more."""
    lines: list[str] = []
    for part, members in groupby(kernels, key=lambda kernel: kernel.part):
        lines += ["", f"[{_TITLES.get(part, part)}]"]
        for kernel, whats in _alike(list(members)):
            lines += _lines(kernel, whats)
    return "\n".join(lines[1:])


def _alike(kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, list[str]]]:
    """Consecutive kernels that differ in nothing but what they compute, together."""
    for _, group in groupby(kernels, key=lambda kernel: (kernel.name, kernel.because, kernel.rejected, kernel.slower)):
        members = list(group)
        yield members[0], [member.what for member in members]


def _lines(kernel: Kernel, whats: Sequence[str]) -> Iterator[str]:
    name = kernel.name or "unknown"
    for what in whats:
        yield from _wrapped(what, "")
    yield from _wrapped(f"= {name}, because {kernel.because}", "    ")
    for other, reason in kernel.rejected:
        yield from _wrapped(f"not {other}: {reason}", "    ")
    if kernel.slower:
        yield from _wrapped(f"SLOWER PATH: {kernel.slower}", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    hanging = indent + "    "
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
