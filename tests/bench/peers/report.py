"""Generate the benchmark page: one section per kind of machine in `docs/performance.md`, and plots next to the figures.

    python tests/bench/peers/report.py [--check]

Owns the text between the markers of the page, and the plots; both are generated only from `peers-KIND.json`. Must not
measure anything. `--check` fails if the page or a plot differs from what the figures yield.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import floors
from bench_loads import Workload
from machine import Ceilings
from race_figures import OURS, Report, Row, finished_servers, kind_of, ours_of, shape_of, share, value_of, workloads_of
from race_plot import plot

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- written by tests/bench/peers/race.py: begin -->"
END = "<!-- written by tests/bench/peers/race.py: end -->"
NO_FIGURES = "There are no figures yet: `make bench-peers` writes them."
NOISE = 0.2  # smaller relative differences are ties
TITLES = {
    "amx": "Cores with AMX",
    "avx512": "Cores with AVX-512",
    "avx2": "Cores with AVX2",
    "neon": "Cores with NEON",
    "plain": "Other cores",
}
# Goals for the ratio to the best peer, by the first words of a load's name.
AIMS = {"1 stream": 1.3, "16 streams": 2.0, "prefill": 1.3, "16 requests": 2.5}
FIRST_AIMS = {"16 streams": 0.5}
# The parts of a step, as `step_profile.py` names them.
PARTS = {
    "products": "products",
    "attention": "attention",
    "other_kernels": "norms, rotation, gates, embedding",
    "sampling": "sampling",
    "python": "Python and torch",
}


def figures_of(page: Path, kind: str) -> Path:
    """The file of the figures for a kind of machine; its plot is next to it."""
    return page.parent / "benchmarks" / f"peers-{kind}.json"


def render(report: Report) -> str:
    """The section of one report."""
    parts = (_about(report), _speed(report), _first(report), _facts(report), _floors(report), _missing(report))
    return "\n\n".join(part for part in parts if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _about(report: Report) -> str:
    machine, text = report["machine"], report["text"]
    ceilings = report["ceilings"]
    cores = f"{machine['cores']} cores ({', '.join(machine['instructions'])}), {machine['memory_gib']} GiB"
    terms = f"{report['threads']} threads and a KV pool of {report['pool_tokens']:,} tokens for each server"
    about = (
        f"## {TITLES[kind_of(report)]}\n\n"
        f"{report['model']}. {machine['processor']}, {cores}, {machine['system']}; {terms}. {_rounds(report)} "
        f"on {report['date']}{_commit(report)}."
    )
    if ceilings:
        sums = ", ".join(f"{ceilings[kind]:.0f} in {kind}" for kind in ("f32", "bf16", "int8") if ceilings[kind])
        about += f" Ceilings measured in the same run: {ceilings['read']:.1f} GB/s read from memory; {sums} Gop/s."
        about += _steadiness(report)
    if text["windows"]:
        about += (
            f" Perplexity: {text['windows']} windows of {text['window']} tokens of `tests/bench/peers/perplexity.txt`."
        )
    return about


def _rounds(report: Report) -> str:
    return "1 round" if report["rounds"] == 1 else f"{report['rounds']} rounds"


def _commit(report: Report) -> str:
    """The commit; older reports have none."""
    return f", commit {report['commit']}" if report.get("commit") else ""


def _steadiness(report: Report) -> str:
    """How much the machine's speed varied between turns; "" for older reports, which did not measure it."""
    reads = [ceilings["read"] for peer in report["peers"] for ceilings in peer.get("machine", ())]
    if not reads:
        return ""
    seen = f"between {min(reads):.1f} and {max(reads):.1f} GB/s, with a median of {statistics.median(reads):.1f}"
    return f" Before each of the {len(reads)} turns, memory was read at {seen}."


def _compared(
    report: Report,
    key: str,
    digits: int,
    ratio: Callable[[float, float], float],
    choose: Callable[[list[float]], float],
) -> list[list[str]]:
    """One row per server, with the ratio of this server to it in brackets, then the ratio of each of this server's
    precisions to the best peer."""
    workloads, ours, raced = workloads_of(report), ours_of(report), finished_servers(report)
    rows = []
    for peer in raced:
        cells = [f"**{peer['name']}**" if peer is ours else peer["name"]]
        for workload in workloads:
            value, mine = value_of(peer, workload, key), value_of(ours, workload, key)
            if value is None:
                cells.append("failed" if workload.name in peer["failed"] else "–")
            elif peer is ours or mine is None:
                cells.append(f"{value:.{digits}f}")
            else:
                cells.append(f"{value:.{digits}f} ({ratio(mine, value):.2f})")
        rows.append(cells)
    for our_peer in (peer for peer in raced if peer["engine"] == OURS):
        cells = [f"{our_peer['name']} ÷ best peer"]
        for workload in workloads:
            mine = value_of(our_peer, workload, key)
            others = [
                v for peer in raced if peer["engine"] != OURS and (v := value_of(peer, workload, key)) is not None
            ]
            cells.append(f"{ratio(mine, choose(others)):.2f}" if mine is not None and others else "–")
        rows.append(cells)
    return rows


def _speed(report: Report) -> str:
    workloads = workloads_of(report)
    rows = _compared(report, "tokens_s", 1, lambda mine, other: mine / other, max)
    head = ["server", *(f"{workload.name}, {workload.unit}" for workload in workloads)]
    note = f"In brackets: this server's figure divided by the peer's. Between {1 - NOISE:g} and {1 + NOISE:g} is a tie."
    drawn = f"![Tokens per second](benchmarks/peers-{kind_of(report)}.svg)"
    return f"### Tokens per second\n\n{note}\n\n{_table(head, [*rows, _aims(workloads, AIMS)])}\n\n{drawn}"


def _first(report: Report) -> str:
    rows = _compared(report, "first_token_ms", 0, lambda mine, other: mine / other, min)
    workloads = workloads_of(report)
    note = "Median over the requests of a load, in milliseconds. In brackets: this server's time divided by the peer's."
    table = _table(["server", *(workload.name for workload in workloads)], [*rows, _aims(workloads, FIRST_AIMS)])
    return f"### Time to the first token\n\n{note}\n\n{table}"


def _aims(workloads: Sequence[Workload], aims: Mapping[str, float]) -> list[str]:
    aim_values = (
        next((aim for start, aim in aims.items() if workload.name.startswith(start)), None) for workload in workloads
    )
    return ["aim", *("–" if aim is None else f"{aim:g}" for aim in aim_values)]


def _facts(report: Report) -> str:
    rows = []
    peers = finished_servers(report)
    has_first = any(peer.get("first_token_after_s") is not None for peer in peers)  # older reports have none
    for peer in peers:
        quality = "not measured" if peer["perplexity"] is None else f"{peer['perplexity']:.3f}"
        if peer["perplexity"] is None and peer["perplexity_missing"]:
            quality += f" ({peer['perplexity_missing']})"
        weights = "–" if peer["weight_bytes"] is None else f"{peer['weight_bytes'] / 1e6:.0f}"
        memory = _memory(report, peer)
        starts = [peer["start_s"], *([peer.get("first_token_after_s")] if has_first else [])]
        started = ("–" if start is None else f"{start:.1f}" for start in starts)
        rows.append([peer["name"], peer["version"], peer["precision"], quality, weights, *memory, *started])
    sizes = ["memory, MB: PSS of all processes", "its KV pool", "memory without the pool"]
    head = ["server", "version", "precision", "perplexity", "weights, MB per step", *sizes, "healthy after, s"]
    head += ["first token after, s"] if has_first else []
    return f"### Precision and memory\n\n{_table(head, rows)}"


def _memory(report: Report, peer: Row) -> list[str]:
    """A server's total memory, its KV pool, and the rest, in MB."""
    if peer["pss_mb"] is None:
        return ["–"] * 3
    shape = replace(floors.Shape(**report["shape"]), kv_item_bytes=peer["kv_item_bytes"])
    pool = shape.kv_token_bytes * report["pool_tokens"] / 1e6
    return [f"{peer['pss_mb']:.0f}", f"{pool:.0f}", f"{peer['pss_mb'] - pool:.0f}"]


def _floors(report: Report) -> str:
    ours = ours_of(report)
    if not report["ceilings"]:
        return "### Floors\n\nNot measured: there is no C compiler."
    parts = ["### Floors"]
    if ours is not None and ours["weight_bytes"]:
        parts += [_own_floor(report, ours), _profile(report, ours)]
    rows = []
    for peer in finished_servers(report):
        shares = (share(report, peer, workload) for workload in workloads_of(report))
        rows.append([peer["name"], peer["arithmetic"], *("–" if one is None else f"{one:.0%}" for one in shares)])
    parts.append("Share of the floor that each server reaches, at its own precision:")
    parts.append(_table(["server", "products in", *(workload.name for workload in workloads_of(report))], rows))
    return "\n\n".join(part for part in parts if part)


def _own_floor(report: Report, ours: Row) -> str:
    shape, ceilings, arithmetic = shape_of(report, ours), Ceilings(**report["ceilings"]), ours["arithmetic"]
    rows = []
    for workload in workloads_of(report):
        one = floors.prefill(shape, workload) if workload.output == 1 else floors.step(shape, workload)
        tokens = workload.prompt if workload.output == 1 else workload.requests
        least = floors.seconds(shape, workload, ceilings, arithmetic)
        reached, measured = share(report, ours, workload), value_of(ours, workload, "tokens_s")
        one_s = one.seconds(ceilings, arithmetic)
        rows.append(
            [
                workload.name,
                f"{one.read / tokens / 1e6:.1f}",
                f"{one.operations / tokens / 1e6:.0f}",
                one.bound(ceilings, arithmetic),
                "–" if one_s is None else f"{1e3 * one_s:.2f}",
                "–" if least is None else f"{workload.counted / least:.0f}",
                "–" if measured is None else f"{measured:.1f}",
                "–" if reached is None else f"{reached:.0%}",
            ]
        )
    head = ["load", "MB per token", "Mop per token", "a step is bound by", "floor, ms per step", "floor, tokens/s"]
    head += ["measured over HTTP", "share"]
    return f"This server ({ours['precision']}); a prompt counts as one step:\n\n{_table(head, rows)}"


def _profile(report: Report, ours: Row) -> str:
    """Where a step's time goes: its parts in one process, and the additional time over HTTP."""
    profile = ours.get("profile")
    if not profile:
        return ""
    shape, ceilings = shape_of(report, ours), Ceilings(**report["ceilings"])
    rows = []
    for workload in workloads_of(report):
        one = floors.prefill(shape, workload) if workload.output == 1 else floors.step(shape, workload)
        parts, least = profile[workload.name]["parts_ms"], one.seconds(ceilings, ours["arithmetic"])
        tokens_s = value_of(ours, workload, "tokens_s")
        beyond = (
            None
            if tokens_s is None
            else (workload.counted / tokens_s - profile[workload.name]["load_s"]) / workload.output
        )
        rows.append(
            [
                workload.name,
                "–" if least is None else f"{1e3 * least:.2f}",
                f"{parts['step']:.2f}",
                "–" if least is None else f"{1e3 * least / parts['step']:.0%}",
                *(f"{parts[name]:.2f}" for name in PARTS),
                "–" if beyond is None else f"{1e3 * beyond:.2f}",
            ]
        )
    head = ["load", "floor", "step", "share", *PARTS.values(), "HTTP, API process, client"]
    note = (
        "Where a step's time goes, in ms. The step is from the middle of the load, in a single process without HTTP "
        "and without other load; its parts add up to it. The last column is the additional time per step when the "
        "load runs over HTTP."
    )
    return f"{note}\n\n{_table(head, rows)}"


def _missing(report: Report) -> str:
    rows = [[peer["name"], "all", peer["missing"]] for peer in report["peers"] if peer["missing"]]
    rows += [
        [peer["name"], workload, reason] for peer in report["peers"] for workload, reason in peer["failed"].items()
    ]
    return f"### What did not run\n\n{_table(['server', 'load', 'reason'], rows)}" if rows else ""


# ---- files


def between(page: str, block: str) -> str:
    """The page with `block` between its markers. Raises ValueError if it has no markers."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no place for the figures: it needs the lines {BEGIN!r} and {END!r}")
    head, rest = page.split(BEGIN, 1)
    return f"{head}{BEGIN}\n\n{block}\n\n{END}{rest.split(END, 1)[1]}"


def reports_of(page: Path) -> list[Report]:
    """All reports next to a page. Raises ValueError if one is of another kind of machine than its file name says."""
    reports = []
    for name in TITLES:
        if (path := figures_of(page, name)).exists():
            report: Report = json.loads(path.read_text())
            if kind_of(report) != name:
                raise ValueError(
                    f"{path} has the figures of {kind_of(report)}: move it to {figures_of(page, kind_of(report))}"
                )
            reports.append(report)
    return reports


def _files(page: Path) -> dict[Path, str]:
    """The texts of page and plots, generated from the figures."""
    reports = reports_of(page)
    block = "\n\n".join(render(report) for report in reports) or NO_FIGURES
    plots = {figures_of(page, kind_of(report)).with_suffix(".svg"): plot(report) + "\n" for report in reports}
    return {page: between(page.read_text(), block), **plots}


def write(page: Path = PAGE) -> None:
    """Write the page, and the plots next to the figures."""
    for path, text in _files(page).items():
        path.write_text(text)


def stale(page: Path = PAGE) -> bool:
    """Whether the page or a plot differs from what the figures yield."""
    return any(not path.exists() or path.read_text() != text for path, text in _files(page).items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        return int(stale())
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
