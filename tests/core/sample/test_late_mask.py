"""Masks that come while the forward pass runs: only the bits decide, on all rows or some of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.sample.late_mask import LateMasks
from srv.sample.processors import SampleRow
from srv.sched.late import LateInputs


@pytest.mark.parametrize("vocab", [1, 7, 32, 33, 1000])
@pytest.mark.parametrize("masked", [(0, 1, 2), (2, 0), (1,), ()])
def test_forbidden_tokens_get_minus_infinity_and_others_keep_their_logits(vocab: int, masked: tuple[int, ...]) -> None:
    slots, random = (4, 9, 2), np.random.default_rng(vocab)
    words = random.integers(0, 2**32, (len(slots), (vocab + 31) // 32), dtype=np.uint32)  # also beyond the vocabulary
    logits = torch.from_numpy(random.standard_normal((len(slots), vocab), dtype=np.float32))
    logits[0, 0] = -torch.inf  # another processor has forbidden it
    late = LateMasks(vocab, HOST_TRANSFERS)
    late.set(LateInputs(tuple((slots[row], words[row].tobytes()) for row in masked)))
    expected = logits.clone()
    for row in masked:
        for token in range(vocab):
            if not words[row, token // 32] >> np.uint32(token % 32) & np.uint32(1):
                expected[row, token] = -torch.inf

    prepared = late.prepare([SampleRow(slot, 5) for slot in slots])
    assert (prepared is None) == (not masked)
    if prepared is not None:
        late.apply(logits, prepared)
    assert logits.tolist() == expected.tolist()
    late.clear()
    assert late.prepare([SampleRow(slot, 6) for slot in slots]) is None
