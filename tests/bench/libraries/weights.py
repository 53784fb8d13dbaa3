"""Writes what libraries that make quantized checkpoints store of one weight, and what they dequantize it to.

    PYTHONPATH=FOLDER_OF_THE_LIBRARY python tests/bench/libraries/weights.py LIBRARY

Writes the cases of that library into tests/core/quantization/library_weights.json, from which tests load checkpoints
without the library. Each library quantizes with its own code a weight of the seed 0, [outputs, 64] in bfloat16
(float16: AWQ and GPTQ), the down-projection of a Llama, and writes its configuration. None of them is a dependency:
install one with `pip install --no-deps --target FOLDER`, or unpack its source code there.

    compressed_tensors  compressed-tensors 0.20.0; 0.14.0 for inputs in the order of their activations, which later
                        versions do not write. Needs loguru
    torchao             torchao 0.18.0. Weights of 4 bits need the packing of MSLK, formerly FBGEMM: the Python files of
                        fbgemm-gpu-genai 1.9.0
    gptqmodel           gptqmodel 7.7.0 (its source code). Needs logbar, tokenicer, device-smi, defuser, pypcre, pillow
                        and threadpoolctl
    awq                 autoawq 0.2.9 (its source code)

Scales of weights with zero points are small integers times a power of two: a product of scale and zero point is then
exact in float16, as which blocks of type Q4_1 hold it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from case import Case
from torch import Tensor

FILE = Path(__file__).parents[2] / "core" / "quantization" / "library_weights.json"
LIBRARIES = ("compressed_tensors", "torchao", "gptqmodel", "awq")


def float_bytes(weight: Tensor) -> bytes:
    """Those of float32, with one zero."""
    return (weight.detach().float() + 0.0).contiguous().numpy().tobytes()


def encoded(case: Case) -> dict[str, Any]:
    tensors = {}
    for name, tensor in case.tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        fields = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        tensors[name] = {**fields, "data": base64.b64encode(zlib.compress(data)).decode()}
    digests = {layer: hashlib.sha256(float_bytes(weight)).hexdigest() for layer, weight in case.weights.items()}
    return {"library": case.library, "config": case.config, "tensors": tensors, "sha256": digests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    options = parser.parse_args()
    cases = json.loads(FILE.read_text()) if FILE.is_file() else {}
    package, module = options.library.replace("_", "-"), f"of_{options.library}"
    cases |= {f"{package}: {name}": encoded(case) for name, case in importlib.import_module(module).cases()}
    lines = [
        f"{json.dumps(name)}: {json.dumps(case, sort_keys=True, separators=(',', ':'))}"
        for name, case in sorted(cases.items())
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
