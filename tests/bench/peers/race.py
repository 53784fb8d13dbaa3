"""This server against its peers: one machine, one run, one model, one load client, turn by turn.

    python tests/bench/peers/race.py [--rounds 3] [--peers srv llama_cpp ...] [--points 1 4 16 prefill prefix]

A round starts every server in turn (forwards, then backwards, and so on), alone on the machine, warms it up, puts every
load on it and stops it; before each turn the machine's own ceilings are measured. A figure is the median over rounds;
within a round a short load is repeated and its median taken. In the last round each is also weighed, and tells the
perplexity of one text. At the end a step of this server is taken apart (`step_profile.py`). What does not install,
start or answer is reported with its reason, and the rest goes on. Writes `docs/benchmarks/peers-KIND.json`, where KIND
names what the processor has (avx512, avx2, ...), and what `report.py` makes of it and of the races on other machines.
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
from bench_loads import POINTS, Point, Prompts
from catalogue import PEERS, POOL_TOKENS, ROOM, SEQUENCES, THREADS, Peer
from machine import Ceilings
from rich.console import Console
from serving import ServerFailed, Serving, environment_of, free_port
from stream_client import Load, run_load

KEYS = dict(zip(("1", "4", "16", "prefill", "prefix"), POINTS, strict=True))
WARM_UP = (Point("warm-up", 2, 32, 8), Point("warm-up", 16, 128, 4), Point("warm-up", 1, 512, 1))
FIRST = Point("first token", 1, 16, 1)
FILL = Point("filling the room for keys and values", SEQUENCES, ROOM - 40, 1)
PROFILE_S = 600.0
ROUNDS = 3
REPEAT_S, REPEATS = 3.0, 5  # a load is repeated until it filled so many seconds, or so many times
LOGS = install.HOME / "logs"
PART = install.HOME / "part"  # where races of fewer rounds, servers or loads are written
# What a server, its answers and its client may go wrong with; the race goes on.
FAULTS = (ServerFailed, RuntimeError, OSError, ValueError, LookupError, TypeError, SubprocessError, psutil.Error)
SAY = Console(soft_wrap=True)


@dataclass
class Score:
    """What was found of one peer.

    `loads` has one list a round for each point; `starts_s`, `first_tokens_s` (from the process's start to an answer of
    one token) and `machine` (what the machine could do before a turn) have one entry a round.
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
    unmeasured: str | None = None
    profile: dict[str, object] | None = None


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    rounds: int
    points: Sequence[Point]
    tokens: Sequence[int]  # of the text for perplexity; empty to leave it out


def repeated(seconds: Sequence[float]) -> bool:
    """Whether a load that took so long, time after time, ran often enough for one round."""
    return len(seconds) >= REPEATS or sum(seconds) >= REPEAT_S


def order(count: int, number: int) -> list[int]:
    """Whose turn it is in a round: forwards in even rounds, backwards in odd ones."""
    return list(range(count)) if number % 2 == 0 else list(reversed(range(count)))


def turn(score: Score, plan: Plan, prompts: Prompts, last: bool) -> None:
    """One server's part of one round."""
    peer = score.peer
    log = LOGS / f"{peer.name.replace(' ', '_')}.log"
    with Serving(peer, log) as serving:
        score.starts_s.append(serving.start_s)
        run_load(serving.port, FIRST, prompts, peer.model)
        score.first_tokens_s.append(serving.age_s())
        for point in WARM_UP:
            run_load(serving.port, point, prompts, peer.model)
        for point in plan.points:
            if point.name not in score.failed:
                _put(score, point, serving, prompts)
        if last:
            _weigh(score, serving, prompts)
        if last and plan.tokens:
            _tell_perplexity(score, serving.port, plan.tokens)


def _put(score: Score, point: Point, serving: Serving, prompts: Prompts) -> None:
    loads: list[Load] = []
    try:
        while not repeated([load.seconds for load in loads]):
            loads.append(run_load(serving.port, point, prompts, score.peer.model))
    except FAULTS as error:
        score.failed[point.name] = f"{type(error).__name__}: {error}"[:300]
        SAY.print(f"    {point.name}: {score.failed[point.name]}", style="red", markup=False)
        return
    score.loads.setdefault(point.name, []).append(loads)
    seconds = statistics.median(load.seconds for load in loads)
    SAY.print(f"    {point.name}: {point.counted / seconds:.1f} {point.unit} ({len(loads)} times)", markup=False)


def _weigh(score: Score, serving: Serving, prompts: Prompts) -> None:
    """Memory with the whole pool written: some servers write it when they start, others as it fills."""
    try:
        run_load(serving.port, FILL, prompts, score.peer.model)
        score.pss_mb = serving.pss_bytes() / 1e6
    except FAULTS as error:
        score.failed[FILL.name] = f"{type(error).__name__}: {error}"[:300]
        return
    SAY.print(f"    memory: {score.pss_mb:.0f} MB", markup=False)


def _tell_perplexity(score: Score, port: int, ids: Sequence[int]) -> None:
    try:
        if score.peer.scores == "http":
            score.perplexity = perplexity.over_http(port, ids, score.peer.model)
        elif not perplexity.same_tokens(port, ids):
            score.unmeasured = "it cuts the text into other tokens"
        else:
            program = install.HOME / "llama_cpp" / "build" / "bin" / "llama-perplexity"
            score.perplexity = perplexity.by_llama(program, install.model_file(score.peer.weights), THREADS)
    except FAULTS as error:
        score.unmeasured = f"{type(error).__name__}: {error}"[:300]
    SAY.print(f"    perplexity: {score.perplexity or score.unmeasured}", markup=False)


def race(scores: Sequence[Score], plan: Plan, prompts: Prompts) -> None:
    """All rounds. A peer that fails to start, or dies between loads, is out from then on, with all its figures."""
    for number in range(plan.rounds):
        for index in order(len(scores), number):
            score = scores[index]
            if score.missing is not None:
                continue
            SAY.print(f"round {number + 1} of {plan.rounds}: {score.peer.name}", markup=False)
            if (found := machine.measure(THREADS)) is not None:
                score.machine.append(found)
                SAY.print(f"    the machine reads {found.read:.1f} GB/s", markup=False)
            try:
                turn(score, plan, prompts, last=number == plan.rounds - 1)
            except FAULTS as error:
                score.missing = str(error) or type(error).__name__
                SAY.print(f"    {score.missing}", style="red", markup=False)


def profile(peer: Peer, points: Sequence[Point], vocab: int) -> dict[str, object] | None:
    """What `step_profile.py` finds of this server's steps, on as many cores as it had; None where it failed."""
    script = Path(__file__).with_name("step_profile.py")
    words = peer.command(free_port())
    own = ["--vocab", str(vocab), "--points", *(str(POINTS.index(point)) for point in points)]
    command = [sys.executable, str(script), *own, "--", *words[words.index("launch") + 1 :]]
    SAY.print(f"where a step's time goes: {peer.name}", markup=False)
    process = subprocess.Popen(command, env=environment_of(peer), stdout=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, machine.cores(THREADS))
        told, _ = process.communicate(timeout=PROFILE_S)
        if process.returncode == 0:
            found: dict[str, object] = json.loads(told)
            return found
        SAY.print(f"    it ended with status {process.returncode}", style="red")
    except FAULTS as error:
        SAY.print(f"    {type(error).__name__}: {error}", style="red", markup=False)
    finally:
        process.kill()
        process.wait()
    return None


# ---- what is written down


def results(score: Score, points: Sequence[Point]) -> dict[str, object]:
    """A peer's figures by point; none where a load failed in any round, nor of a peer that is out."""
    found: dict[str, object] = {}
    for point in points:
        rounds = score.loads.get(point.name)
        if not rounds or point.name in score.failed or score.missing is not None:
            continue
        seconds = [statistics.median(load.seconds for load in loads) for loads in rounds]
        firsts = [statistics.median(first for load in loads for first in load.firsts) for loads in rounds]
        found[point.name] = {
            "tokens_s": round(point.counted / statistics.median(seconds), 1),
            "first_token_ms": round(1e3 * statistics.median(firsts), 1),
            "rounds_s": [round(each, 4) for each in seconds],
            "rounds_first_ms": [round(1e3 * each, 1) for each in firsts],
        }
    return found


def row(score: Score, points: Sequence[Point]) -> dict[str, object]:
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
        "perplexity_missing": score.unmeasured,
        "start_s": _median(score.starts_s),
        "first_token_after_s": _median(score.first_tokens_s),
        "machine": [asdict(found) for found in score.machine],
        "pss_mb": None if score.pss_mb is None else round(score.pss_mb, 1),
        "kv_item_bytes": peer.kv_item_bytes,
        "command": portable(peer.command(0)),
        "points": results(score, points),
        "profile": score.profile,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def portable(words: Sequence[str]) -> str:
    """A command line without this machine's folders."""
    short = {f"{install.ROOT}/": "", f"{sys.executable}": "python"}
    text = " ".join(words)
    for long, brief in short.items():
        text = text.replace(long, brief)
    return text.replace(f"{Path(sys.executable).resolve()}", "python")


def start_line(names: Sequence[str] | None) -> list[Score]:
    """A score for every peer; those not asked for, by name or engine, and those that cannot be installed say so."""
    chosen = [peer for peer in PEERS if not names or {peer.name, peer.engine} & set(names)]
    engines = dict.fromkeys(peer.engine for peer in chosen if peer.engine != "srv")
    SAY.print(f"installing what is not there: {', '.join(engines) or 'nothing'}")
    found = install.install(engines)
    from srv import __version__

    scores = []
    for peer in PEERS:
        if peer not in chosen:
            scores.append(Score(peer, "", "left out of this race"))
            continue
        got = found.get(peer.engine, install.Installed(__version__))
        missing = got.missing
        if missing is None and not (install.model_file(peer.weights).exists() or peer.engine == "srv"):
            missing = f"its file {peer.weights} could not be made, as llama.cpp's quantizer is missing"
        scores.append(Score(peer, got.version, missing))
    return scores


def page_of(options: argparse.Namespace) -> Path:
    """The published page for a whole race of three rounds or more; else one under `PART`, made if it is not there."""
    whole = not options.peers and len(set(options.points)) == len(KEYS) and not options.no_perplexity
    if whole and options.rounds >= ROUNDS:
        return report.PAGE
    page = PART / report.PAGE.name
    if not page.exists():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f"# A race in part\n\n{report.BEGIN}\n{report.END}\n")
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
        help="figures and plot go to `benchmarks` beside it; of a race in part, under build/peers",
    )
    options = parser.parse_args()
    if options.page is None:
        options.page = page_of(options)
    known = {name for peer in PEERS for name in (peer.name, peer.engine)}
    if unknown := set(options.peers or ()) - known:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    try:
        report.between(options.page.read_text(), "")  # before hours of racing, not after
    except (OSError, ValueError) as error:
        parser.error(f"--page {options.page}: {error}")
    return options


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server that runs is ended too
    options = parse()
    points = [KEYS[key] for key in options.points]
    commit, shape = raced.commit(), raced.model_shape()
    scores = start_line(options.peers)
    ids = [] if options.no_perplexity else raced.text_tokens()
    race(scores, Plan(options.rounds, points, ids), Prompts(shape.vocab, seed=1))
    for score in scores:
        if score.peer.name == race_figures.OURS and score.missing is None:
            score.profile = profile(score.peer, points, shape.vocab)
    written: dict[str, object] = {
        "model": "SmolLM2-135M-Instruct, from the GGUF file (Q4_1 with a Q8_0 output layer)",
        "machine": machine.describe(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "threads": THREADS,
        "pool_tokens": POOL_TOKENS,
        "rounds": options.rounds,
        "ceilings": race_figures.best([asdict(found) for score in scores for found in score.machine]),
        "text": {"tokens": len(ids), "windows": len(perplexity.windows(ids)), "window": perplexity.WINDOW},
        "shape": asdict(shape),
        "points": [asdict(point) for point in points],
        "peers": [row(score, points) for score in scores],
    }
    figures = report.figures_of(options.page, machine.machine_kind())
    figures.parent.mkdir(exist_ok=True)
    figures.write_text(json.dumps(written, indent=1) + "\n")
    report.write(options.page)
    SAY.print(f"written: {figures}, {options.page}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
