"""What each way to store weights costs: perplexity and greedy choices of the demo model, and its speed.

    PYTHONPATH=tests/helpers python tests/bench/weight_methods.py [--windows 16] [--tokens 64] [--only fbgemm_fp8 ...]

Every checkpoint is made here, by plain rounding, from the demo model in bfloat16; the reference is that one computed in
float32. Programs that calibrate (AWQ, GPTQ) lose less; what is measured is that the server computes what is stored, and
how fast. Each method is beside the GGUF type with as many bits; the aim is a ratio of at most 1.1.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import bitsandbytes_weights
import fp8_weights
import mixed_weights
import mxfp4_weights
import packed_weights
import torch
from gguf import GGMLQuantizationType as Kind
from models_small import edit_config, write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

from srv.models.locate import demo_model
from srv.models.read import read_facts
from srv.server.text.tokenizer import load_text_processor
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams

TEXT = Path(__file__).parent / "peers" / "perplexity.txt"
WINDOW = 512
REFERENCE = "float32"
FP8_LARGEST, INT8_LARGEST = 448, 127
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Quantize: TypeAlias = Callable[[str, Tensor], dict[str, Tensor]]


class Method(NamedTuple):
    """quantize: the tensors of a projection, from its name and weights; None: those of the plain checkpoint.

    peer: the method that it is compared with.
    """

    peer: str
    quantize: Quantize | None = None
    config: dict[str, Any] | None = None
    flags: tuple[str, ...] = ()
    kind: Kind | None = None


def _packed(form: packed_weights.Form, peer: str) -> Method:
    return Method(peer, lambda name, weight: packed_weights.packed(name, weight, form)[0], form.config)


def _bitsandbytes(kind: str, peer: str) -> Method:
    form = bitsandbytes_weights.Form(kind)
    return Method(peer, lambda name, weight: bitsandbytes_weights.packed(name, weight, form)[0], form.config)


def _fp8(form: fp8_weights.Form) -> Method:
    """One scale per output, or one per matrix, whatever the form's further tensors are."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        largest = weight.abs().amax(1, keepdim=True) if form.block == fp8_weights.ROW else weight.abs().max().view(1, 1)
        scale = (largest / FP8_LARGEST).to(form.dtype)
        stored = (weight / scale.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        further = {f"{name}.{suffix}": torch.tensor(value) for suffix, value in form.extra.items()}
        return {f"{name}.{form.weight}": stored, f"{name}.{form.suffix}": form.shape(scale), **further}

    return Method("Q8_0", quantize, form.config)


def _int8(config: dict[str, Any], prefix: str, data: str = "", zeros: str = "") -> Method:
    """One scale per output, and zeros of 0 if the format stores them. prefix, data, zeros: what names end with."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / INT8_LARGEST
        stored = {prefix + data: (weight / scale).round().to(torch.int8), f"{prefix}_scale": scale}
        if zeros:
            stored[prefix + zeros] = torch.zeros_like(scale, dtype=torch.int8)
        return {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}

    return Method("Q8_0", quantize, config)


def _mxfp4() -> Method:
    """Blocks of 32 share a power of two, that of the largest value (OCP Microscaling Formats, version 1.0, 6.3)."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.unflatten(1, (-1, 32))
        exponent = blocks.abs().amax(-1).clamp(min=2.0**-120).log2().floor() - 2
        scaled = blocks / torch.exp2(exponent)[..., None]
        codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) | (scaled < 0).long() << 3
        pairs = codes.flatten(1).unflatten(1, (-1, 2))
        stored = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        return {f"{name}.weight_packed": stored, f"{name}.weight_scale": (exponent + 127).to(torch.uint8)}

    return Method("Q4_0", quantize, mxfp4_weights.compressed())


def _compressed_int8() -> dict[str, Any]:
    args = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**args, "strategy": "channel", "dynamic": False},
        "input_activations": {**args, "strategy": "token", "dynamic": True},
    }
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"]}


def _fp8_blocks() -> Method:
    form = fp8_weights.FORMS["fp8, blocks with the other name"]

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        stored, scale, _ = fp8_weights.quantized(weight, form)
        return {f"{name}.weight": stored, f"{name}.{form.suffix}": scale}

    return Method("Q8_0", quantize, form.config)


def _torchao(kind: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {"version": 2, **fields}}}}


def _torchao_int4(group: int) -> Method:
    """weight = scale * code + zero, with a scale and a zero per group, for the least and the largest weight."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        groups = weight.unflatten(1, (-1, group))
        scale = ((groups.amax(2) - groups.amin(2)) / 15).bfloat16()
        zero = (groups.amin(2) + 8 * scale.float()).bfloat16()
        codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
        pairs = codes.flatten(1).to(torch.int16).unflatten(1, (-1, 2)) & 15
        stored = {"qdata": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), "scale": scale.t()}
        return {f"{name}._weight_{suffix}": tensor for suffix, tensor in {**stored, "zero_point": zero.t()}.items()}

    return Method("Q4_1", quantize, _torchao("Int4WeightOnlyConfig", group_size=group, int4_packing_format="plain"))


def _mixed() -> Method:
    """Attention in int8, and the MLP in integers of 4 bits."""
    attention, mlp = mixed_weights.of_int8(), mixed_weights.of_integers(bits=4, group=64)
    config = mixed_weights.config_of({("re:.*self_attn.*",): attention, ("re:.*mlp.*",): mlp})
    return Method("Q4_0", lambda name, weight: (mlp if ".mlp." in name else attention).stored(name, weight)[0], config)


AWQ = packed_weights.AWQ._replace(group=64, config={**packed_weights.AWQ.config, "group_size": 64})
METHODS = {
    REFERENCE: Method(REFERENCE, flags=("--dtype", "float32")),
    "bfloat16": Method(REFERENCE),
    "Q8_0": Method("Q8_0", kind=Kind.Q8_0),
    "--quantization fp8": Method("Q8_0", flags=("--quantization", "fp8")),
    "fp8, blocks of 128 x 128": _fp8_blocks(),
    "fbgemm_fp8": _fp8(fp8_weights.FORMS["fbgemm_fp8"]),
    "compressed-tensors fp8, per channel": _fp8(fp8_weights.FORMS["compressed-tensors, channel"]),
    "modelopt fp8, per tensor": _fp8(fp8_weights.FORMS["modelopt"]),
    "torchao fp8": _fp8(fp8_weights.FORMS["torchao"]),
    "compressed-tensors int8": _int8(_compressed_int8(), "weight"),
    "torchao int8": _int8(_torchao("Int8WeightOnlyConfig"), "_weight", "_qdata", "_zero_point"),
    "bitsandbytes int8": _bitsandbytes("int8", "Q8_0"),
    "--torchao-config int8wo": Method("Q8_0", flags=("--torchao-config", "int8wo")),
    "--torchao-config int8dq": Method("Q8_0", flags=("--torchao-config", "int8dq")),
    "gptq, 8 bits, groups of 64": _packed(packed_weights.gptq(8, 64), "Q8_0"),
    "compressed-tensors, 8 bits, groups of 64": _packed(packed_weights.compressed(8, 64), "Q8_0"),
    "Q4_0": Method("Q4_0", kind=Kind.Q4_0),
    "Q4_1": Method("Q4_1", kind=Kind.Q4_1),
    "awq, groups of 64": _packed(AWQ, "Q4_1"),
    "torchao int4, groups of 64": _torchao_int4(64),
    "gptq, groups of 32": _packed(packed_weights.gptq(4, 32), "Q4_0"),
    "compressed-tensors, groups of 64": _packed(packed_weights.compressed(4, 64), "Q4_0"),
    "gptq, groups of 32, in another order": _packed(packed_weights.gptq(4, 32, desc_act=True), "Q4_0"),
    "compressed-tensors, groups of 64, in another order": _packed(
        packed_weights.compressed(4, 64, actorder="group"), "Q4_0"
    ),
    "compressed-tensors mxfp4": _mxfp4(),
    "compressed-tensors, int8 and 4 bits in groups of 64": _mixed(),
    "bitsandbytes nf4": _bitsandbytes("nf4", "Q4_0"),
    "bitsandbytes fp4": _bitsandbytes("fp4", "Q4_0"),
}


class Scores(NamedTuple):
    """Of every token but the first of a window."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def write(folder: Path, plain: Path, method: Method) -> Path:
    """The checkpoint of a method, beside the files of the plain one."""
    if method.kind is not None:
        from transformers import AutoModelForCausalLM

        model, kind = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), method.kind
        write_gguf(folder / "model.gguf", model, "llama", kinds=lambda name: Kind.BF16 if "embed" in name else kind)
        return folder / "model.gguf"
    if method.quantize is None:
        return plain
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored |= method.quantize(name.removesuffix(".weight"), tensor.float())
        else:
            stored[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    shutil.copy(plain / "config.json", folder)
    edit_config(folder, quantization_config=method.config)
    return folder


def launched(path: Path, method: Method) -> CheckedEngine:
    dtype = () if "--dtype" in method.flags else ("--dtype", "bfloat16")
    return CheckedEngine.launch(["--device", "cpu", "--model-path", str(path), *dtype, *method.flags])


def read(windows: Sequence[list[int]], engine: CheckedEngine) -> Scores:
    scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    scores = Scores([], [])
    for number, window in enumerate(windows):
        (result,) = engine.generate([RequestSpec(id=str(number), tokens=tuple(window), params=scoring)])
        scores.logprobs.extend(entry.logprob for entry in result.prompt_logprobs)
        scores.best.extend(entry.top[0][0] for entry in result.prompt_logprobs)
    return scores


def least_times(
    windows: Sequence[list[int]], tokens: int, engines: Sequence[CheckedEngine]
) -> list[tuple[float, float]]:
    """Of each engine: seconds of the fastest prompt, and of a step of the fastest answer. They take turns.

    Prompts are windows in reverse, and others less than a page, so that none is cached.
    """
    least = [(math.inf, math.inf)] * len(engines)
    for turn, window in enumerate(windows):
        for place, engine in enumerate(engines):
            times: list[float] = []
            for part, count in ((window[::-1], 1), (window[:15], tokens)):
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                begin = time.perf_counter()
                engine.generate([RequestSpec(id=f"{turn} {count}", tokens=tuple(part), params=params)])
                times.append((time.perf_counter() - begin) / count)
            least[place] = min(least[place][0], times[0]), min(least[place][1], times[1])
    return least


def plain_checkpoint(folder: Path) -> Path:
    """The demo model as a folder with unquantized bfloat16 weights, without a tokenizer."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = demo_model()
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16, quantization_config=quantization
    )
    model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a request whose decode steps are timed")
    parser.add_argument("--only", nargs="+", default=[], help="beside float32 and the peers")
    options = parser.parse_args()
    ids = load_text_processor(read_facts(demo_model())).encode(TEXT.read_text())
    windows = [ids[start : start + WINDOW] for start in range(0, options.windows * WINDOW, WINDOW)]
    chosen = {name: candidate for name, candidate in METHODS.items() if not options.only or name in options.only}
    names = dict.fromkeys([REFERENCE, *(entry.peer for entry in chosen.values()), *chosen])
    scores_by_name: dict[str, Scores] = {}
    paths: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain = plain_checkpoint(Path(temporary) / "plain")
        for place, name in enumerate(names):
            method, folder = METHODS[name], Path(temporary) / str(place)
            folder.mkdir()
            paths[name] = write(folder, plain, method)
            peer = METHODS[method.peer]
            with launched(paths[name], method) as engine, launched(paths[method.peer], peer) as beside:
                scores_by_name[name] = scores = read(windows, engine)
                ours, theirs = least_times(windows, options.tokens, (engine, beside))
            exact = scores_by_name[REFERENCE]
            lost = scores.perplexity / exact.perplexity - 1
            same = sum(a == b for a, b in zip(exact.best, scores.best, strict=True)) / len(exact.best)
            row = {
                "method": name,
                "perplexity": round(scores.perplexity, 3),
                "lost": f"{lost:+.2%}",
                "equal choices": round(same, 4),
                "peer": method.peer,
                "prefill / peer": round(ours[0] / theirs[0], 3),
                "decode / peer": round(ours[1] / theirs[1], 3),
                "decode ms": round(ours[1] * 1e3, 2),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
