"""Whether a checkpoint has an output layer of its own, or a copy of its embedding. Torch-free.

Configurations tie the two layers, and fine-tuned checkpoints may nevertheless store an output layer that differs. Only
the bytes tell: both tensors are read up to the first difference, in pieces, and once per launch. A copy, which is not
loaded, so costs one additional read of its bytes: those of the embedding are still in the page cache when they are
loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from srv.models.checkpoints.safetensors_header import Checkpoint
from srv.models.checkpoints.text_names import HEAD

# The weight in any form, with its scales; not a bias, nor other layers of a larger head (RoBERTa).
_MATRIX = re.compile(r"lm_head\.(?!bias$)(weight\.)?[^.]+")
_PIECE = 1 << 18  # bytes compared at a time, which stay in the cache of a core


def has_head(names: Mapping[str, str]) -> bool:
    """Whether an output layer is stored. `names`: of the layers, by the stored names."""
    return any(map(_MATRIX.fullmatch, names.values()))


def has_separate_head(checkpoint: Checkpoint, names: Mapping[str, str]) -> bool:
    """Whether an output layer is stored that is no copy of another tensor; a quantized one is none.

    `names`: of the layers, by the stored names.
    """
    head = [stored for stored, name in names.items() if _MATRIX.fullmatch(name)]
    if [names[stored] for stored in head] != [HEAD]:
        return bool(head)
    (stored,) = head
    form = _form(checkpoint, stored)
    alike = [each for each in names if each != stored and _form(checkpoint, each) == form]
    return not any(_same_bytes(checkpoint, stored, each) for each in alike)


def _form(checkpoint: Checkpoint, name: str) -> tuple[tuple[int, ...], str]:
    tensor = checkpoint.tensors[name]
    return tensor.shape, tensor.dtype


def _same_bytes(checkpoint: Checkpoint, one: str, other: str) -> bool:
    rest = checkpoint.tensors[one].size
    own, copy = bytearray(_PIECE), bytearray(_PIECE)
    with _file(checkpoint, one).open("rb") as first, _file(checkpoint, other).open("rb") as second:
        first.seek(checkpoint.tensors[one].begin)
        second.seek(checkpoint.tensors[other].begin)
        while rest:
            del own[rest:], copy[rest:]
            if first.readinto(own) != len(own) or second.readinto(copy) != len(copy) or own != copy:
                return False
            rest -= len(own)
    return True


def _file(checkpoint: Checkpoint, name: str) -> Path:
    return next(path for path, names in checkpoint.files.items() if name in names)
