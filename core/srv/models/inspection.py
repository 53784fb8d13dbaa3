"""What transformers says of a model without its weights: asked in a process of its own, because it imports torch.

`srv plan` asks for models without native layers, and a launch before it downloads one. Torch-free. Must not know what
follows from the answer.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from srv.specs import AttentionLayer, ModelFacts

MODULE = "srv.models.transformers.inspection_process"
TIMEOUT_S = 120.0  # building hundreds of layers without weights takes seconds


class ClassRefused(msgspec.Struct, frozen=True):
    """A ModelError of the other process."""

    code: str
    what: str
    reason: str
    remedy: str


class QuantizedOp(msgspec.Struct, frozen=True):
    """A call of an op on quantized weights, with the sizes by which its implementation is chosen."""

    op: str
    sizes: dict[str, int]


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """`refused`: why the class of transformers cannot be served. `layers`: its attention layers, () if they only show
    with weights. `quantized`: a clause that says how many of its modules hold quantized weights, "" if none does.
    `ops`: what they call, each once. `unknown`: why nothing is known of its attention, "" if it is."""

    refused: ClassRefused | None = None
    layers: tuple[AttentionLayer, ...] = ()
    quantized: str = ""
    ops: tuple[QuantizedOp, ...] = ()
    unknown: str = ""


class Question(msgspec.Struct, frozen=True):
    """`method`, `dequantized`: the names of those of a `srv.models.choice.LayerChoice`, "" for None."""

    facts: ModelFacts
    method: str = ""
    dequantized: str = ""


def inspect_model(
    facts: ModelFacts, method: str = "", dequantized: str = "", timeout_s: float = TIMEOUT_S
) -> Inspection:
    """Build the class that transformers has for a model, without weights, and find its attention layers.

    `method`, `dequantized`: as in `Question`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE],
            input=msgspec.json.encode(Question(facts, method, dequantized)),
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Inspection(unknown=f"transformers did not build it within {timeout_s:.0f} s")
    try:
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Inspection)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Inspection(unknown=f"transformers could not be asked ({last or f'exit status {done.returncode}'})")
