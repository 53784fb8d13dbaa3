"""A bar chart of a benchmark as SVG: one panel per workload, each with its own scale. Reads only the report."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from bench_loads import Workload
from race_figures import OURS, Report, Row, finished_servers, value_of, workloads_of

WIDTH, LABELS, PANEL, GAP, BAR = 1040, 190, 150, 12, 22
INK, OWN, OTHER = "#1b1f24", "#0b6e4f", "#9aa5b1"


def plot(report: Report) -> str:
    """Tokens per second as bars, with one panel per workload."""
    peers, workloads = finished_servers(report), workloads_of(report)
    height = 60 + BAR * len(peers) + 10
    drawn = [_text(LABELS - 8, 66 + BAR * n, peer["name"], "end", peer["name"] == OURS) for n, peer in enumerate(peers)]
    for column, workload in enumerate(workloads):
        drawn += _panel(LABELS + column * (PANEL + GAP), workload, peers)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    frame = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">', frame, *drawn, "</svg>"]
    )


def _panel(left: int, workload: Workload, peers: Sequence[Row]) -> list[str]:
    values = [value_of(peer, workload, "tokens_s") for peer in peers]
    most = max((value for value in values if value is not None), default=1.0)
    name, _, more = workload.name.partition(", ")
    drawn = [_text(left, 20, name, "start", True), _text(left, 36, more or " ", "start", False, 10)]
    drawn.append(_text(left, 50, workload.unit, "start", False, 10))
    for number, (peer, value) in enumerate(zip(peers, values, strict=True)):
        top = 54 + BAR * number
        if value is None:
            drawn.append(_text(left, top + 12, "–", "start", False))
            continue
        width = max(1.0, (PANEL - 50) * value / most)
        colour = OWN if peer["name"] == OURS else OTHER
        drawn.append(f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BAR - 6}" fill="{colour}"/>')
        drawn.append(_text(left + width + 4, top + 12, f"{value:.0f}", "start", peer["name"] == OURS))
    return drawn


def _text(x: float, y: float, text: str, anchor: str, bold: bool, size: int = 12) -> str:
    weight = ' font-weight="bold"' if bold else ""
    position = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"'
    return f"<text {position}{weight}>{escape(text)}</text>"
