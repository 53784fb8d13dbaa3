"""Imports the drafter of an algorithm, and with it torch. Checks what drafters of other distributions propose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from srv.speculative.algorithm import DraftAlgorithm
from srv.speculative.drafter import Drafter, DrafterContext
from srv.speculative.registry import BUILT_IN
from srv.speculative.third_party import ALGORITHMS, fault


def make_drafter(algorithm: DraftAlgorithm, context: DrafterContext) -> Drafter:
    """The drafter of an algorithm. Raises PluginError if that of a third party is faulty."""
    name, built_in = algorithm.name, algorithm.name in BUILT_IN
    protocol: type[Any] = Drafter  # mypy takes no protocol for a `type[Drafter]`
    make: Callable[[DrafterContext], Drafter] = ALGORITHMS.import_class(
        name, "drafter", algorithm.drafter, protocol, built_in=built_in
    )
    if built_in:
        return make(context)
    return _Checked(name, ALGORITHMS.call(name, "drafter", make, context), context.sizes.vocab_size)


class _Checked:
    """A third party's drafter. Its faults name the distribution, and no draft is beyond the vocabulary.

    An id beyond it would make the model read outside its embeddings, so ids are clamped, which needs no host.
    """

    def __init__(self, name: str, drafter: Drafter, vocab_size: int) -> None:
        self._name, self._drafter, self._last = name, drafter, vocab_size - 1

    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
        """See `Drafter`. Raises PluginError."""
        drafts = ALGORITHMS.call(self._name, "drafter.propose", self._drafter.propose, tokens, lengths, count)
        expected = torch.int64, (len(tokens), count), tokens.device
        result = (drafts.dtype, tuple(drafts.shape), drafts.device) if isinstance(drafts, torch.Tensor) else drafts
        if result != expected:
            raise fault(self._name, "drafter.propose", f"returned {result}, not {expected}")
        return drafts.clamp(0, self._last)
