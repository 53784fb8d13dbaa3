"""The servers in the benchmark: how each is started, its dtype of arithmetic, and the bytes that it reads per step.

Owns the command lines. Must not know the loads. Each server gets two threads, a KV pool of the same size
(`POOL_TOKENS`), and otherwise the settings that its project recommends for serving.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import install
from machine import cores, machine_kind, unquantized_dtype

from srv.specs import SCALE_BYTES

THREADS = 2
SEQUENCES = 16
MAX_SEQUENCE_TOKENS = 1280  # the longest request has 1,096
POOL_TOKENS = SEQUENCES * MAX_SEQUENCE_TOKENS
HEAD_DIM = 64
HERE = Path(__file__).resolve().parent
# The dtype for peers that do not choose one: the fastest one on this machine. OpenVINO chooses the same.
DTYPE = unquantized_dtype()
# How this server quantizes activations. With AVX2 only, the 8-bit weights of the output layer take 16-bit activations.
ACTIVATIONS = "activations of 8 bits" + (", 16 in the output layer" if machine_kind() == "avx2" else "")
DTYPE_ARITHMETIC, DTYPE_BYTES = {"bfloat16": ("bf16", 2), "float32": ("f32", 4)}[DTYPE]


@dataclass(frozen=True)
class Peer:
    """One server in the benchmark.

    `weights`: the file whose tensors it reads. `packed`: whether it multiplies them in their quantized form; otherwise
    a weight takes `item_bytes`. `arithmetic`: the dtype of its products ("f32", "bf16" or "int8"). `kv_item_bytes`:
    bytes per value of its KV pool, including scales; 0 if it has no pool.
    """

    name: str
    engine: str
    precision: str
    arithmetic: str
    packed: bool
    weights: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": str(THREADS)})
    model: str | None = None
    scores: str = "http"
    kv_item_bytes: float = 2.0
    item_bytes: int = 2

    def command(self, port: int) -> list[str]:
        """The command that serves on this loopback port."""
        return [argument.replace("{port}", str(port)) for argument in self.arguments]


def _srv(name: str, precision: str, arithmetic: str, packed: bool, *more: str, kv_item_bytes: float = 2.0) -> Peer:
    launch = (sys.executable, "-m", "srv", "launch", "--port", "{port}", "--log-level", "warning")
    limits = ("--max-total-tokens", str(POOL_TOKENS))
    arguments = (*launch, *limits, *more)
    return Peer(name, "srv", precision, arithmetic, packed, "Q4_1", arguments, kv_item_bytes=kv_item_bytes)


def _llama(kind: str, arithmetic: str) -> Peer:
    program = install.HOME / "llama_cpp" / "build" / "bin" / "llama-server"
    serve = (str(program), "--host", "127.0.0.1", "--port", "{port}", "--model", str(install.model_file(kind)))
    threads = ("--threads", str(THREADS), "--threads-batch", str(THREADS))
    limits = ("--parallel", str(SEQUENCES), "--ctx-size", str(POOL_TOKENS))
    precision = f"{kind}, activations of {'16 bits' if kind == 'BF16' else '8 bits'}, KV float16"
    arguments = (*serve, *threads, *limits)
    return Peer(
        f"llama.cpp {kind}",
        "llama_cpp",
        precision,
        arithmetic,
        kind != "BF16",
        kind,
        arguments,
        scores="llama-perplexity",
    )


def _thin(engine: str, kind: str, python: Path, *more: str) -> tuple[str, ...]:
    serve = (str(python), str(HERE / "thin_server.py"), engine, "--port", "{port}")
    return (*serve, "--model", str(install.model_file(kind)), "--threads", str(THREADS), *more)


def _openvino(kind: str, precision: str, arithmetic: str) -> Peer:
    python = install.HOME / "openvino" / "bin" / "python"
    arguments = _thin("openvino", kind, python, "--pool-tokens", str(POOL_TOKENS))
    # The size of its pool according to its metrics: 13,680 bytes per token of this model.
    kv_item_bytes = 2 * 13_680 / 23_040
    name = f"OpenVINO GenAI {kind}"
    return Peer(
        name,
        "openvino",
        precision,
        arithmetic,
        arithmetic == "int8",
        kind,
        arguments,
        kv_item_bytes=kv_item_bytes,
    )


def _transformers() -> Peer:
    return Peer(
        "transformers",
        "transformers",
        DTYPE,
        DTYPE_ARITHMETIC,
        False,
        "Q4_1",
        _thin("transformers", "Q4_1", Path(sys.executable), "--dtype", DTYPE),
        kv_item_bytes=0.0,
        item_bytes=DTYPE_BYTES,
    )


def _vllm() -> Peer:
    python = str(install.HOME / "vllm" / "bin" / "python")
    serve = (python, "-m", "vllm.entrypoints.cli.main", "serve", str(install.folder_model()))
    where = ("--host", "127.0.0.1", "--port", "{port}", "--dtype", DTYPE, "--served-model-name", "model")
    block = 128
    limits = ("--max-model-len", str(MAX_SEQUENCE_TOKENS), "--max-num-seqs", str(SEQUENCES), "--block-size", str(block))
    pool = ("--num-gpu-blocks-override", str(POOL_TOKENS // block), "--no-enable-log-requests")
    environment = {  # it binds its threads itself, and warns about OMP_NUM_THREADS
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(THREADS))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(install.HOME / "vllm_cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = (*serve, *where, *limits, *pool)
    return Peer(
        "vLLM",
        "vllm",
        DTYPE,
        DTYPE_ARITHMETIC,
        False,
        "Q4_1",
        arguments,
        environment,
        model="model",
        kv_item_bytes=DTYPE_BYTES,
        item_bytes=DTYPE_BYTES,
    )


PEERS: tuple[Peer, ...] = (
    _srv("srv", f"Q4_1, {ACTIVATIONS}, KV bfloat16", "int8", True),
    _srv(
        "srv KV int8",
        f"Q4_1, {ACTIVATIONS}, KV 8 bits",
        "int8",
        True,
        *("--kv-cache-dtype", "int8"),
        kv_item_bytes=1 + SCALE_BYTES / HEAD_DIM,
    ),
    _srv("srv bfloat16", "bfloat16", "bf16", False, "--dequantize-weights"),
    _llama("Q4_0", "int8"),
    _llama("Q8_0", "int8"),
    _llama("BF16", "bf16"),
    _openvino("Q4_1", "Q4_1 as 4-bit integers, KV 8 bits", "int8"),
    _openvino("F16", f"{DTYPE} from float16, KV 8 bits", DTYPE_ARITHMETIC),
    _vllm(),
    _transformers(),
)
