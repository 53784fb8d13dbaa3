"""Who races: how each server is started, what it computes in, and what it reads a step.

Owns the command lines. Must not know the loads. Two threads each, the same room for keys and values (`POOL_TOKENS`),
and otherwise the settings that each project recommends for serving.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import install
from machine import cores, machine_kind, plain_type

from srv.specs import SCALE_BYTES

THREADS = 2
SEQUENCES = 16
ROOM = 1280  # tokens of one sequence: the longest request has 1,096
POOL_TOKENS = SEQUENCES * ROOM
HEAD = 64  # columns of a head of the model's
HERE = Path(__file__).resolve().parent
# Peers that choose no type themselves get the one that this machine is fastest in; OpenVINO chooses the same.
PLAIN = plain_type()
# Of this server's blocks: with AVX2 alone the output layer, of 8-bit numbers, takes activations of 16 bits.
ROUNDED = "activations of 8 bits" + (", 16 in the output layer" if machine_kind() == "avx2" else "")
PLAIN_ARITHMETIC, PLAIN_BYTES = {"bfloat16": ("bf16", 2), "float32": ("f32", 4)}[PLAIN]


@dataclass(frozen=True)
class Peer:
    """One server in the race.

    `weights` is the file whose tensors it reads, `packed` whether it multiplies them as they are packed there,
    `item_bytes` what a weight takes otherwise, `arithmetic` the type of its products ("f32", "bf16" or "int8"),
    `kv_item_bytes` what one number takes in its pool of keys and values, scales included; 0 if it has no pool.
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
        """What to run for it to serve on a loopback port."""
        return [word.replace("{port}", str(port)) for word in self.arguments]


def _srv(name: str, precision: str, arithmetic: str, packed: bool, *more: str, kv_item_bytes: float = 2.0) -> Peer:
    launch = (sys.executable, "-m", "srv", "launch", "--port", "{port}", "--log-level", "warning")
    room = ("--max-total-tokens", str(POOL_TOKENS))
    arguments = (*launch, *room, *more)
    return Peer(name, "srv", precision, arithmetic, packed, "Q4_1", arguments, kv_item_bytes=kv_item_bytes)


def _llama(kind: str, arithmetic: str) -> Peer:
    program = install.HOME / "llama_cpp" / "build" / "bin" / "llama-server"
    serve = (str(program), "--host", "127.0.0.1", "--port", "{port}", "--model", str(install.model_file(kind)))
    threads = ("--threads", str(THREADS), "--threads-batch", str(THREADS))
    room = ("--parallel", str(SEQUENCES), "--ctx-size", str(POOL_TOKENS))
    precision = f"{kind}, activations of {'16 bits' if kind == 'BF16' else '8 bits'}, KV float16"
    arguments = (*serve, *threads, *room)
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
    # Its pool's own size, as its metrics tell it: 13,680 bytes a token of this model.
    kept = 2 * 13_680 / 23_040
    name = f"OpenVINO GenAI {kind}"
    return Peer(name, "openvino", precision, arithmetic, arithmetic == "int8", kind, arguments, kv_item_bytes=kept)


def _transformers() -> Peer:
    return Peer(
        "transformers",
        "transformers",
        PLAIN,
        PLAIN_ARITHMETIC,
        False,
        "Q4_1",
        _thin("transformers", "Q4_1", Path(sys.executable), "--dtype", PLAIN),
        kv_item_bytes=0.0,
        item_bytes=PLAIN_BYTES,
    )


def _vllm() -> Peer:
    python = str(install.HOME / "vllm" / "bin" / "python")
    serve = (python, "-m", "vllm.entrypoints.cli.main", "serve", str(install.folder_model()))
    place = ("--host", "127.0.0.1", "--port", "{port}", "--dtype", PLAIN, "--served-model-name", "model")
    block = 128
    room = ("--max-model-len", str(ROOM), "--max-num-seqs", str(SEQUENCES), "--block-size", str(block))
    pool = ("--num-gpu-blocks-override", str(POOL_TOKENS // block), "--no-enable-log-requests")
    environment = {  # it binds its threads itself, and warns of OMP_NUM_THREADS
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(THREADS))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(install.HOME / "vllm_cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = (*serve, *place, *room, *pool)
    return Peer(
        "vLLM",
        "vllm",
        PLAIN,
        PLAIN_ARITHMETIC,
        False,
        "Q4_1",
        arguments,
        environment,
        model="model",
        kv_item_bytes=PLAIN_BYTES,
        item_bytes=PLAIN_BYTES,
    )


PEERS: tuple[Peer, ...] = (
    _srv("srv", f"Q4_1, {ROUNDED}, KV bfloat16", "int8", True),
    _srv(
        "srv KV int8",
        f"Q4_1, {ROUNDED}, KV 8 bits",
        "int8",
        True,
        *("--kv-cache-dtype", "int8"),
        kv_item_bytes=1 + SCALE_BYTES / HEAD,
    ),
    _srv("srv bfloat16", "bfloat16", "bf16", False, "--dequantize-weights"),
    _llama("Q4_0", "int8"),
    _llama("Q8_0", "int8"),
    _llama("BF16", "bf16"),
    _openvino("Q4_1", "Q4_1 as 4-bit integers, KV 8 bits", "int8"),
    _openvino("F16", f"{PLAIN} from float16, KV 8 bits", PLAIN_ARITHMETIC),
    _vllm(),
    _transformers(),
)
