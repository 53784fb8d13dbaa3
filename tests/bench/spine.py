"""Compare this server over HTTP with transformers' `generate`: one run, one machine, one model, one dtype.

    python tests/bench/spine.py [--rounds 3] [--dtype bfloat16] [--out docs/benchmarks]

Both run in turns, so that a machine whose speed changes affects both; the table shows medians. The server answers
streamed HTTP requests with token ids; transformers runs in this process while the server is idle. Every prompt is
random and new, so that the prefix cache does not help, except in the load with a shared prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import httpx
import torch
from bench_loads import WORKLOADS, Prompts, Workload
from rich.console import Console
from rich.table import Table

START_TIMEOUT_S = 180


async def _one(client: httpx.AsyncClient, ids: list[int], output: int) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": output, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    started = time.perf_counter()
    first = 0.0
    count = 0
    async with client.stream("POST", "/generate", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"/generate answered {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                count = json.loads(line[6:])["meta_info"]["completion_tokens"]
    return first, count


async def serve_workload(base: str, workload: Workload, prompts: Prompts) -> tuple[float, float]:
    """(seconds, median seconds to the first token) of one load over HTTP."""
    async with httpx.AsyncClient(base_url=base, timeout=600) as client:
        if workload.shared:
            await _one(client, prompts.prefix(workload), 1)
        drawn = prompts.draw(workload)
        started = time.perf_counter()
        answers = await asyncio.gather(*(_one(client, ids, workload.output) for ids in drawn))
        seconds = time.perf_counter() - started
    if any(count != workload.output for _, count in answers):
        raise RuntimeError(f"{workload.name}: the server sent {[count for _, count in answers]} tokens")
    return seconds, statistics.median(first for first, _ in answers)


class Peer:
    """transformers' `generate` on the same file, in this process."""

    def __init__(self, gguf: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig

        # Dense weights, like ours: transformers would dequantize quantized weights in every step.
        self._model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        ).eval()

    def run(self, workload: Workload, prompts: Prompts) -> float:
        ids = torch.tensor(prompts.draw(workload))
        started = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=workload.output,
                min_new_tokens=workload.output,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        if out.shape[1] != workload.prompt + workload.output:
            raise RuntimeError(f"{workload.name}: transformers returned shape {tuple(out.shape)}")
        return seconds


class Server:
    """`srv launch` on a free loopback port; it is stopped when the context exits."""

    def __init__(self, dtype: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "srv",
            "launch",
            "--port",
            str(port),
            "--dequantize-weights",  # as in the peer
            "--dtype",
            dtype,
            "--log-level",
            "warning",
        ]
        self.command = " ".join(["srv", *command[3:]])
        self._process = subprocess.Popen(command)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                if httpx.get(f"{self.base}/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError("the server did not become healthy")

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)


def measure(rounds: int, dtype: str) -> tuple[list[dict[str, object]], str]:
    from srv.models.locate import locate
    from srv.models.read import read_facts

    gguf = locate(None)
    prompts = Prompts(read_facts(gguf).vocab_size, seed=1)
    peer = Peer(gguf, getattr(torch, dtype))
    with Server(dtype) as server:
        asyncio.run(serve_workload(server.base, Workload("warm-up", 2, 32, 8), prompts))
        peer.run(Workload("warm-up", 1, 32, 8), prompts)
        rows = [_compare(workload, rounds, server.base, prompts, peer) for workload in WORKLOADS]
    return rows, server.command


def _compare(workload: Workload, rounds: int, base: str, prompts: Prompts, peer: Peer) -> dict[str, object]:
    ours: list[float] = []
    firsts: list[float] = []
    theirs: list[float] = []

    def us() -> None:
        seconds, first = asyncio.run(serve_workload(base, workload, prompts))
        ours.append(seconds)
        firsts.append(first)

    def them() -> None:
        theirs.append(peer.run(workload, prompts))

    for turn in range(rounds):
        for run in (us, them) if turn % 2 == 0 else (them, us):
            run()
    mine, other = workload.counted / statistics.median(ours), workload.counted / statistics.median(theirs)
    return {
        **asdict(workload),
        "unit": workload.unit,
        "srv": round(mine, 1),
        "transformers": round(other, 1),
        "ratio": round(mine / other, 2),
        "srv_first_token_s": round(statistics.median(firsts), 3),
        "srv_seconds": [round(s, 3) for s in ours],
        "transformers_seconds": [round(s, 3) for s in theirs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, default=None, help="folder for spine.json")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows, command = measure(options.rounds, options.dtype)
    table = Table("load", "unit", "srv", "transformers", "ratio", "srv first token")
    for row in rows:
        table.add_row(
            str(row["name"]),
            str(row["unit"]),
            f"{row['srv']}",
            f"{row['transformers']}",
            f"{row['ratio']}",
            f"{row['srv_first_token_s']} s",
        )
    Console(width=140).print(table)
    report = {
        "model": "SmolLM2-135M-Instruct (GGUF Q4_1, dequantised)",
        "dtype": options.dtype,
        "rounds": options.rounds,
        "command": command,
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "points": rows,
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "spine.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
