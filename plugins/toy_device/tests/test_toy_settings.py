"""The device has the memory that it was given, and says how to give it more."""

from __future__ import annotations

import pytest
import torch

from srv_toy_device.device import Accelerator
from srv_toy_device.settings import device_memory


def test_exhausting_the_memory_says_what_to_set(toy: Accelerator) -> None:
    free, _ = toy.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=r"toy:0 is out of memory.*SRV_TOY_MEMORY"):
        torch.empty(free + 1, dtype=torch.uint8, device="toy")
    assert toy.mem_get_info()[0] == free


@pytest.mark.parametrize(
    ("text", "size"), [(None, 2 << 30), ("1048576", 1 << 20), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29)]
)
def test_the_size_is_read_from_the_environment(text: str | None, size: int) -> None:
    assert device_memory({} if text is None else {"SRV_TOY_MEMORY": text}) == size


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "4GB", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SRV_TOY_MEMORY"):
        device_memory({"SRV_TOY_MEMORY": text})
