"""Benchmark this server and its peers: one machine, one run, one model, one load client, in turns.

    python tests/bench/peers/race.py [--rounds 3] [--peers srv llama_cpp ...] [--points 1 4 16 prefill prefix]

A round starts one server after the other (forwards, then backwards, and so on), alone on the machine, warms it up, runs
every load and stops it. The machine's ceilings are measured before each turn. A figure is the median over the rounds;
in a round, a short load is repeated and its median is used. In the last round, memory and the perplexity of one text
are measured too. At the end a step of this server is profiled (`step_profile.py`). A peer that cannot be installed or
started, or that fails, is reported with the reason, and the others continue. Writes `docs/benchmarks/peers-KIND.json`,
where KIND names the instruction set (avx512, avx2, ...), and the page that `report.py` generates from all such files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import SubprocessError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import install
import machine
import perplexity
import psutil
import race_figures
import raced
import report
from bench_loads import WORKLOADS, Prompts, Workload
from catalogue import MAX_SEQUENCE_TOKENS, PEERS, POOL_TOKENS, SEQUENCES, THREADS, Peer
from machine import Ceilings
from rich.console import Console
from serving import ServerFailed, Serving, environment_of, free_port
from stream_client import Load, run_load

KEYS = dict(zip(("1", "4", "16", "prefill", "prefix"), WORKLOADS, strict=True))
WARM_UP = (Workload("warm-up", 2, 32, 8), Workload("warm-up", 16, 128, 4), Workload("warm-up", 1, 512, 1))
FIRST = Workload("first token", 1, 16, 1)
FILL = Workload("filling the KV pool", SEQUENCES, MAX_SEQUENCE_TOKENS - 40, 1)
PROFILE_S = 600.0
ROUNDS = 3
REPEAT_S, REPEATS = 3.0, 5  # a load is repeated until it has run for this time, or this often
LOGS = install.HOME / "logs"
PARTIAL = install.HOME / "partial"  # for the results of runs with fewer rounds, servers or loads
# Errors of a server, its answers or its client, after which the benchmark continues.
FAULTS = (ServerFailed, RuntimeError, OSError, ValueError, LookupError, TypeError, SubprocessError, psutil.Error)
CONSOLE = Console(soft_wrap=True)


@dataclass
class Score:
    """The measurements of one peer.

    `loads` has one list per round for each workload. `starts_s`, `first_tokens_s` (from the start of the process to an
    answer of one token) and `machine` (the ceilings before each turn) have one entry per round.
    """

    peer: Peer
    version: str
    missing: str | None = None
    loads: dict[str, list[list[Load]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    starts_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    machine: list[Ceilings] = field(default_factory=list)
    pss_mb: float | None = None
    perplexity: float | None = None
    perplexity_missing: str | None = None
    profile: dict[str, object] | None = None


@dataclass(frozen=True)
class Plan:
    """The rounds, loads and text of one run."""

    rounds: int
    workloads: Sequence[Workload]
    tokens: Sequence[int]  # of the text for perplexity; empty: it is not measured


def repeated(seconds: Sequence[float]) -> bool:
    """Whether a load that took these times has been run often enough for one round."""
    return len(seconds) >= REPEATS or sum(seconds) >= REPEAT_S


def order(count: int, number: int) -> list[int]:
    """The order of turns in a round: forwards in even rounds, backwards in odd ones."""
    return list(range(count)) if number % 2 == 0 else list(reversed(range(count)))


def turn(score: Score, plan: Plan, prompts: Prompts, last: bool) -> None:
    """One server's part of one round."""
    peer = score.peer
    log = LOGS / f"{peer.name.replace(' ', '_')}.log"
    with Serving(peer, log) as serving:
        score.starts_s.append(serving.start_s)
        run_load(serving.port, FIRST, prompts, peer.model)
        score.first_tokens_s.append(serving.age_s())
        for workload in WARM_UP:
            run_load(serving.port, workload, prompts, peer.model)
        for workload in plan.workloads:
            if workload.name not in score.failed:
                _run_workload(score, workload, serving, prompts)
        if last:
            _measure_memory(score, serving, prompts)
        if last and plan.tokens:
            _measure_perplexity(score, serving.port, plan.tokens)


def _run_workload(score: Score, workload: Workload, serving: Serving, prompts: Prompts) -> None:
    loads: list[Load] = []
    try:
        while not repeated([load.seconds for load in loads]):
            loads.append(run_load(serving.port, workload, prompts, score.peer.model))
    except FAULTS as error:
        score.failed[workload.name] = f"{type(error).__name__}: {error}"[:300]
        CONSOLE.print(f"    {workload.name}: {score.failed[workload.name]}", style="red", markup=False)
        return
    score.loads.setdefault(workload.name, []).append(loads)
    seconds = statistics.median(load.seconds for load in loads)
    CONSOLE.print(
        f"    {workload.name}: {workload.counted / seconds:.1f} {workload.unit} ({len(loads)} times)", markup=False
    )


def _measure_memory(score: Score, serving: Serving, prompts: Prompts) -> None:
    """Memory when the whole KV pool has been written, because some servers touch its memory only as it fills."""
    try:
        run_load(serving.port, FILL, prompts, score.peer.model)
        score.pss_mb = serving.pss_bytes() / 1e6
    except FAULTS as error:
        score.failed[FILL.name] = f"{type(error).__name__}: {error}"[:300]
        return
    CONSOLE.print(f"    memory: {score.pss_mb:.0f} MB", markup=False)


def _measure_perplexity(score: Score, port: int, ids: Sequence[int]) -> None:
    try:
        if score.peer.scores == "http":
            score.perplexity = perplexity.over_http(port, ids, score.peer.model)
        elif not perplexity.same_tokens(port, ids):
            score.perplexity_missing = "it tokenizes the text in another way"
        else:
            program = install.HOME / "llama_cpp" / "build" / "bin" / "llama-perplexity"
            score.perplexity = perplexity.by_llama(program, install.model_file(score.peer.weights), THREADS)
    except FAULTS as error:
        score.perplexity_missing = f"{type(error).__name__}: {error}"[:300]
    CONSOLE.print(f"    perplexity: {score.perplexity or score.perplexity_missing}", markup=False)


def race(scores: Sequence[Score], plan: Plan, prompts: Prompts) -> None:
    """Run all rounds. A peer that does not start, or ends between loads, is skipped from then on and has no figures."""
    for number in range(plan.rounds):
        for index in order(len(scores), number):
            score = scores[index]
            if score.missing is not None:
                continue
            CONSOLE.print(f"round {number + 1} of {plan.rounds}: {score.peer.name}", markup=False)
            if (ceilings := machine.measure(THREADS)) is not None:
                score.machine.append(ceilings)
                CONSOLE.print(f"    the machine reads {ceilings.read:.1f} GB/s", markup=False)
            try:
                turn(score, plan, prompts, last=number == plan.rounds - 1)
            except FAULTS as error:
                score.missing = str(error) or type(error).__name__
                CONSOLE.print(f"    {score.missing}", style="red", markup=False)


def profile(peer: Peer, workloads: Sequence[Workload], vocab: int) -> dict[str, object] | None:
    """The result of `step_profile.py` for this server, on as many cores as in the benchmark; None if it failed."""
    script = Path(__file__).with_name("step_profile.py")
    command_line = peer.command(free_port())
    arguments = ["--vocab", str(vocab), "--points", *(str(WORKLOADS.index(workload)) for workload in workloads)]
    command = [sys.executable, str(script), *arguments, "--", *command_line[command_line.index("launch") + 1 :]]
    CONSOLE.print(f"where a step's time goes: {peer.name}", markup=False)
    process = subprocess.Popen(command, env=environment_of(peer), stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, machine.cores(THREADS))
        output, _ = process.communicate(timeout=PROFILE_S)
        if process.returncode == 0:
            parts: dict[str, object] = json.loads(output)
            return parts
        CONSOLE.print(f"    it ended with status {process.returncode}", style="red")
    except FAULTS as error:
        CONSOLE.print(f"    {type(error).__name__}: {error}", style="red", markup=False)
    finally:
        process.kill()
        process.wait()
    return None


# ---- results


def results(score: Score, workloads: Sequence[Workload]) -> dict[str, object]:
    """A peer's figures by workload, without those that failed in any round; empty for a peer that failed."""
    figures: dict[str, object] = {}
    for workload in workloads:
        rounds = score.loads.get(workload.name)
        if not rounds or workload.name in score.failed or score.missing is not None:
            continue
        seconds = [statistics.median(load.seconds for load in loads) for loads in rounds]
        firsts = [statistics.median(first for load in loads for first in load.firsts) for loads in rounds]
        figures[workload.name] = {
            "tokens_s": round(workload.counted / statistics.median(seconds), 1),
            "first_token_ms": round(1e3 * statistics.median(firsts), 1),
            "rounds_s": [round(second, 4) for second in seconds],
            "rounds_first_ms": [round(1e3 * first, 1) for first in firsts],
        }
    return figures


def row(score: Score, workloads: Sequence[Workload]) -> dict[str, object]:
    """A peer's part of the report."""
    peer = score.peer
    return {
        "name": peer.name,
        "engine": peer.engine,
        "version": score.version,
        "precision": peer.precision,
        "arithmetic": peer.arithmetic,
        "weight_bytes": raced.weight_bytes(peer),
        "missing": score.missing,
        "failed": score.failed,
        "perplexity": None if score.perplexity is None else round(score.perplexity, 3),
        "perplexity_missing": score.perplexity_missing,
        "start_s": _median(score.starts_s),
        "first_token_after_s": _median(score.first_tokens_s),
        "machine": [asdict(ceilings) for ceilings in score.machine],
        "pss_mb": None if score.pss_mb is None else round(score.pss_mb, 1),
        "kv_item_bytes": peer.kv_item_bytes,
        "command": portable(peer.command(0)),
        "points": results(score, workloads),
        "profile": score.profile,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def portable(command: Sequence[str]) -> str:
    """A command line without the folders of this machine."""
    short = {f"{install.ROOT}/": "", f"{sys.executable}": "python"}
    text = " ".join(command)
    for long, brief in short.items():
        text = text.replace(long, brief)
    return text.replace(f"{Path(sys.executable).resolve()}", "python")


def install_peers(names: Sequence[str] | None) -> list[Score]:
    """A score for every peer; `missing` is set for those that `names` does not select or that cannot be installed."""
    chosen = [peer for peer in PEERS if not names or {peer.name, peer.engine} & set(names)]
    engines = dict.fromkeys(peer.engine for peer in chosen if peer.engine != "srv")
    CONSOLE.print(f"installing peers: {', '.join(engines) or 'nothing'}")
    peers = install.install(engines)
    from srv import __version__

    scores = []
    for peer in PEERS:
        if peer not in chosen:
            scores.append(Score(peer, "", "not selected in this run"))
            continue
        got = peers.get(peer.engine, install.Installed(__version__))
        missing = got.missing
        if missing is None and not (install.model_file(peer.weights).exists() or peer.engine == "srv"):
            missing = f"its file {peer.weights} could not be made, as llama.cpp's quantizer is missing"
        scores.append(Score(peer, got.version, missing))
    return scores


def page_of(options: argparse.Namespace) -> Path:
    """The published page for a complete run of three rounds or more, or else one under `PARTIAL`, which is created."""
    complete = not options.peers and len(set(options.points)) == len(KEYS) and not options.no_perplexity
    if complete and options.rounds >= ROUNDS:
        return report.PAGE
    page = PARTIAL / report.PAGE.name
    if not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"# Partial results\n\n{report.BEGIN}\n{report.END}\n")
    return page


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="names or engines; all, if none are given")
    parser.add_argument("--points", nargs="+", choices=KEYS, default=list(KEYS))
    parser.add_argument("--no-perplexity", action="store_true")
    parser.add_argument(
        "--page",
        type=Path,
        help="figures and plot go to `benchmarks` next to it (default of a partial run: under build/peers)",
    )
    options = parser.parse_args()
    if options.page is None:
        options.page = page_of(options)
    peers = {name for peer in PEERS for name in (peer.name, peer.engine)}
    if unknown := set(options.peers or ()) - peers:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(sorted(peers))}")
    try:
        report.between(options.page.read_text(), "")  # before the run, which takes hours
    except (OSError, ValueError) as error:
        parser.error(f"--page {options.page}: {error}")
    return options


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running server is ended too
    options = parse()
    workloads = [KEYS[key] for key in options.points]
    commit, shape = raced.commit(), raced.model_shape()
    scores = install_peers(options.peers)
    ids = [] if options.no_perplexity else raced.text_tokens()
    race(scores, Plan(options.rounds, workloads, ids), Prompts(shape.vocab, seed=1))
    for score in scores:
        if score.peer.name == race_figures.OURS and score.missing is None:
            score.profile = profile(score.peer, workloads, shape.vocab)
    written: dict[str, object] = {
        "model": "SmolLM2-135M-Instruct, from the GGUF file (Q4_1 with a Q8_0 output layer)",
        "machine": machine.describe(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "threads": THREADS,
        "pool_tokens": POOL_TOKENS,
        "rounds": options.rounds,
        "ceilings": race_figures.best([asdict(ceilings) for score in scores for ceilings in score.machine]),
        "text": {"tokens": len(ids), "windows": len(perplexity.windows(ids)), "window": perplexity.WINDOW},
        "shape": asdict(shape),
        "points": [asdict(workload) for workload in workloads],
        "peers": [row(score, workloads) for score in scores],
    }
    figures = report.figures_of(options.page, machine.machine_kind())
    figures.parent.mkdir(exist_ok=True)
    figures.write_text(json.dumps(written, indent=1) + "\n")
    report.write(options.page)
    CONSOLE.print(f"written: {figures}, {options.page}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
