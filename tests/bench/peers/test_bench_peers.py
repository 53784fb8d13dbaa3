"""The logic of the peer benchmark, with fake engines: client, thin server, turns, perplexity, floors, page."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from every import every

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import catalogue
import floors
import install
import perplexity
import race
import race_figures
import race_plot
import raced
import report
import step_profile
import stream_client
import thin_server
from bench_loads import WORKLOADS, Prompts, Workload
from machine import Ceilings, machine_kind, unquantized_dtype
from serving import ServerFailed
from stream_client import Load
from thin_server import Request, Send, Update

from srv_kernels.cpu import library

HERE = Path(__file__).resolve().parent
FAKE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from thin_server import ENGINES, Update, main

class Fake:
    def __init__(self, options):
        pass

    def run(self, requests, send):
        while True:
            request = requests.get()
            if request.score:
                send({{request.number: Update(finished=True, logprobs=[-1.0] * len(request.ids))}})
            for made in range(1, request.output + 1):
                send({{request.number: Update([7], made == request.output)}})

ENGINES["transformers"] = Fake
main()
"""


class Scripted:
    """An engine of the thin server that answers each request with the same updates."""

    def __init__(self, answer: Callable[[Request], list[Update]]) -> None:
        self._answer = answer

    def run(self, requests: Any, send: Send) -> None:
        while True:
            request = requests.get()
            for update in self._answer(request):
                send({request.number: update})


def with_server(engine: Any, use: Callable[[int], Coroutine[Any, Any, Any]]) -> Any:
    async def both() -> Any:
        server = await asyncio.start_server(thin_server.Service(engine).connect, "127.0.0.1", 0)
        async with server:
            return await use(server.sockets[0].getsockname()[1])

    return asyncio.run(both())


def tokens(request: Request) -> list[Update]:
    return [Update([1], number == request.output) for number in range(1, request.output + 1)]


# ---- client and thin server


def test_an_answer_has_both_times_and_the_servers_own_count() -> None:
    answer = with_server(Scripted(tokens), lambda port: stream_client.ask(port, [5, 6], 9))
    assert answer.tokens == 9
    assert 0 < answer.first_s <= answer.last_s


def test_a_request_is_greedy_unless_it_says_how_tokens_are_chosen() -> None:
    plain = stream_client.body([5], 4, None)
    assert plain["temperature"] == 0
    sampled = stream_client.body([5], 4, None, {"temperature": 1, "top_k": 50})
    assert sampled == plain | {"temperature": 1, "top_k": 50}


def test_an_answer_of_another_length_is_an_error() -> None:
    short = Scripted(lambda request: [Update([1], finished=True)])
    with pytest.raises(RuntimeError, match="4 tokens were asked for, 1 came"):
        with_server(short, lambda port: stream_client.ask(port, [5], 4))


def test_what_an_engine_raises_reaches_the_client() -> None:
    def fail(request: Request) -> list[Update]:
        raise ValueError("out of memory")

    with pytest.raises(RuntimeError, match="ValueError: out of memory"):
        with_server(Scripted(fail), lambda port: stream_client.ask(port, [5], 4))


def test_a_status_that_is_no_stream_is_an_error() -> None:
    async def refuse(port: int) -> None:
        request = stream_client.http_request(port, "/v2/else", {})
        _, exchange = await asyncio.get_running_loop().create_connection(
            lambda: stream_client._Exchange(request), "127.0.0.1", port
        )
        await exchange.answer

    with pytest.raises(RuntimeError, match="no such path: /v2/else"):
        with_server(Scripted(tokens), refuse)


def test_a_shared_prefix_is_sent_before_the_load() -> None:
    seen: list[Request] = []

    def record(request: Request) -> list[Update]:
        seen.append(request)
        return tokens(request)

    workload = Workload("two over a prefix", 2, 30, 3, shared=20)
    load = with_server(Scripted(record), lambda port: stream_client._load(port, workload, Prompts(1000, 1), None))
    first, *others = seen
    assert len(first.ids) == 20
    assert first.output == 1
    assert [request.ids[:20] for request in others] == [first.ids] * 2
    assert others[0].ids[20:] != others[1].ids[20:]
    assert len(load.firsts) == 2


def test_a_batch_streams_each_row_until_its_own_end() -> None:
    import torch

    sent: list[dict[int, Update]] = []
    batch = [Request(1, [5], 1, score=False), Request(2, [6], 2, score=False)]
    streamer = thin_server._Streamer(batch, lambda updates: sent.append(dict(updates)))
    for value in (torch.tensor([[5], [6]]), torch.tensor([10, 20]), torch.tensor([11, 21])):
        streamer.put(value)
    assert [{number: (u.tokens, u.finished) for number, u in updates.items()} for updates in sent] == [
        {1: ([10], True), 2: ([20], False)},
        {2: ([21], True)},
    ]


# ---- perplexity


def test_only_the_second_half_of_a_window_is_scored() -> None:
    logprobs = [None, *range(1, perplexity.WINDOW)]
    positions = perplexity.scored(logprobs)
    assert positions == list(range(257, 512))


def test_perplexity_of_an_even_choice_is_the_number_of_choices() -> None:
    even = Scripted(lambda request: [Update(finished=True, logprobs=[math.log(1 / 50)] * len(request.ids))])
    ids = list(range(2 * perplexity.WINDOW + 5))
    value = with_server(even, lambda port: asyncio.to_thread(perplexity.over_http, port, ids, None))
    assert value == pytest.approx(50)


def test_the_committed_text_is_long_enough() -> None:
    ids = raced.text_tokens()
    assert len(perplexity.windows(ids)) * perplexity.WINDOW >= 16_000


# ---- turns


def fake_peer(name: str, script: Path) -> catalogue.Peer:
    serve = (sys.executable, str(script), "transformers", "--model", "none", "--port", "{port}")
    more = ("--threads", "1", "--dtype", "float32")
    return catalogue.Peer(name, name, "none", "bf16", False, "Q4_1", (*serve, *more))


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_reported_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "LOGS", tmp_path)
    (tmp_path / "works.py").write_text(FAKE)
    (tmp_path / "broken.py").write_text("raise SystemExit('no such instruction')")
    scores = [race.Score(fake_peer(name, tmp_path / f"{name}.py"), "1") for name in ("broken", "works")]
    workloads = [Workload("tiny", 2, 8, 3)]
    race.race(scores, race.Plan(2, workloads, list(range(perplexity.WINDOW))), Prompts(1000, 1))
    broken, works = scores
    assert broken.missing is not None
    assert "no such instruction" in broken.missing
    assert works.missing is None
    assert works.perplexity == pytest.approx(math.e)
    assert [len(loads) for loads in works.loads["tiny"]] == [race.REPEATS] * 2
    assert (works.pss_mb or 0) > 1
    assert len(works.starts_s) == len(works.first_tokens_s) == 2
    assert all(first > healthy > 0 for healthy, first in zip(works.starts_s, works.first_tokens_s, strict=True))


def test_rounds_take_turns_forwards_and_backwards() -> None:
    assert [race.order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]


@every(("seconds", "enough"), [([], False), ([0.1, 0.1], False), ([0.1] * race.REPEATS, True), ([race.REPEAT_S], True)])
def test_a_short_load_is_repeated_and_a_long_one_is_not(seconds: list[float], enough: bool) -> None:
    assert race.repeated(seconds) is enough


def test_a_figure_is_the_median_of_rounds_and_a_rounds_figure_the_median_of_its_loads() -> None:
    score = race.Score(catalogue.PEERS[0], "1")
    score.loads["p"] = [[Load(1.0, [0.1]), Load(3.0, [0.3]), Load(2.0, [0.2])], [Load(4.0, [0.5])], [Load(9.0, [0.9])]]
    raced_figures = race.results(score, [Workload("p", 2, 8, 10)])["p"]
    assert isinstance(raced_figures, dict)
    assert raced_figures["tokens_s"] == 5.0
    assert raced_figures["first_token_ms"] == 500.0
    assert raced_figures["rounds_s"] == [2.0, 4.0, 9.0]


def test_a_point_that_failed_once_has_no_figure() -> None:
    score = race.Score(catalogue.PEERS[0], "1", loads={"p": [[Load(1.0, [0.1])]]}, failed={"p": "it hung"})
    assert race.results(score, [Workload("p", 1, 8, 8)]) == {}


def test_a_server_that_died_has_no_figures_of_the_rounds_before() -> None:
    loads = {"p": [[Load(1.0, [0.1])]]}
    for missing, count in ((None, 1), ("it died", 0)):
        score = race.Score(catalogue.PEERS[0], "1", loads=loads, missing=missing)
        assert len(race.results(score, [Workload("p", 1, 8, 8)])) == count


@pytest.mark.parametrize(
    "fault",
    [
        ServerFailed("it ended"),
        TimeoutError(),
        json.JSONDecodeError("no JSON", "<html>", 0),
        IndexError(),
        psutil.NoSuchProcess(1),
        subprocess.CalledProcessError(1, "llama-perplexity"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_server_that_goes_wrong_is_out_and_the_race_goes_on(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def turn(score: race.Score, plan: race.Plan, prompts: Prompts, last: bool) -> None:
        seen.append(score.peer.name)
        if score.peer is catalogue.PEERS[1]:
            raise fault

    monkeypatch.setattr(race, "turn", turn)
    monkeypatch.setattr(race.machine, "measure", lambda threads: None)
    scores = [race.Score(peer, "1") for peer in catalogue.PEERS[:3]]
    race.race(scores, race.Plan(2, [], []), Prompts(1000, seed=1))
    assert seen == [catalogue.PEERS[index].name for index in (0, 1, 2, 2, 0)]
    assert [score.missing is None for score in scores] == [True, False, True]
    assert scores[1].missing


@pytest.mark.parametrize(
    ("arguments", "published"),
    [
        ((), True),
        (("--rounds", "5", "--points", "prefix", "prefill", "16", "4", "1"), True),
        (("--rounds", "1"), False),
        (("--peers", "srv"), False),
        (("--points", "1", "16"), False),
        (("--no-perplexity",), False),
    ],
)
def test_a_partial_run_does_not_change_the_published_page(
    arguments: tuple[str, ...], published: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(race, "PARTIAL", tmp_path / "partial")
    monkeypatch.setattr(sys, "argv", ["race.py", *arguments])
    page = race.parse().page
    assert page == (report.PAGE if published else tmp_path / "partial" / "performance.md")
    assert (tmp_path / "partial").exists() is not published


def test_a_race_knows_its_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *author, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert raced.commit(tmp_path) is None
    git("init")
    assert raced.commit(tmp_path) is None, "there is no commit yet"
    (tmp_path / "docs").mkdir()
    code, page = tmp_path / "code.py", tmp_path / "docs" / "page.md"
    for file in (code, page):
        file.write_text("old")
    git("add", ".")
    git("commit", "-m", "all")
    name = git("rev-parse", "--short", "HEAD")
    page.write_text("written by a race")
    (tmp_path / "untracked.py").write_text("new")
    assert raced.commit(tmp_path) == name
    code.write_text("new")
    assert raced.commit(tmp_path) == f"{name}+"


# ---- who races, and what is installed


def test_the_thin_server_understands_how_it_is_called() -> None:
    commands = [peer.command(4321) for peer in catalogue.PEERS]
    thin = [command[2:] for command in commands if command[1].endswith("thin_server.py")]
    options = [thin_server.parser().parse_args(arguments) for arguments in thin]
    assert [(option.engine, option.port, option.threads) for option in options] == [
        ("openvino", 4321, catalogue.THREADS),
        ("openvino", 4321, catalogue.THREADS),
        ("transformers", 4321, catalogue.THREADS),
    ]


def test_every_peer_has_a_name_of_its_own_and_serves_on_the_port_it_is_given() -> None:
    names = [peer.name for peer in catalogue.PEERS]
    assert len(set(names)) == len(names)
    assert all("4321" in peer.command(4321) for peer in catalogue.PEERS)
    assert catalogue.PEERS[0].name == race_figures.OURS


def test_the_longest_request_of_every_load_fits_the_context() -> None:
    assert max(workload.prompt + workload.output for workload in WORKLOADS) <= catalogue.MAX_SEQUENCE_TOKENS
    assert max(workload.requests for workload in WORKLOADS) <= catalogue.SEQUENCES


def test_a_peer_that_cannot_be_installed_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> str:
        install.run([sys.executable, "-c", "raise SystemExit('no wheel for this machine')"])
        return "1"

    monkeypatch.setattr(install, "HOME", tmp_path)
    monkeypatch.setitem(install.INSTALLERS, "vllm", fail)
    monkeypatch.setitem(install.INSTALLERS, "openvino", lambda: "2")
    peers = install.install(["vllm", "openvino"])
    assert "no wheel for this machine" in (peers["vllm"].missing or "")
    assert peers["openvino"] == install.Installed("2")


def test_only_the_given_version_counts_as_installed() -> None:
    python = Path(sys.executable)
    assert install._has(python, "pytest", pytest.__version__)
    assert not install._has(python, "pytest", "0.1")
    assert not install._has(python, "no-such-distribution", "0.1")


def test_constraints_of_this_project_do_not_reach_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    assert install.run([sys.executable, "-c", "import os; print('PIP_CONSTRAINT' in os.environ)"]).strip() == "False"


# ---- floors

SHAPE = floors.Shape(2, 8, 16, 4, 2, 2, 100, weight_bytes=1000)
CEILINGS = Ceilings(read=1.0, f32=1.0, bf16=2.0, int8=None)


def test_a_shape_counts_multiplied_elements_and_kv_bytes() -> None:
    assert SHAPE.layer_elements == 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert SHAPE.elements == SHAPE.layer_elements + 800
    assert SHAPE.kv_token_bytes == 2 * 2 * 2 * 2 * 2


def test_a_shared_prefix_is_read_once_and_computed_never() -> None:
    alone, shared = Workload("a", 4, 100, 10), Workload("s", 4, 100, 10, shared=80)
    saved = floors.step(SHAPE, alone).read - floors.step(SHAPE, shared).read
    assert saved == 3 * 80 * SHAPE.kv_token_bytes
    assert floors.step(SHAPE, alone).operations == floors.step(SHAPE, shared).operations
    assert floors.prefill(SHAPE, shared).operations < floors.prefill(SHAPE, alone).operations / 2


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    assert floors.Work(4e9, 1e9).seconds(CEILINGS, "bf16") == pytest.approx(4)
    assert floors.Work(4e9, 1e10).seconds(CEILINGS, "bf16") == pytest.approx(5)
    assert floors.Work(4e9, 1e10).bound(CEILINGS, "bf16") == "arithmetic"


def test_a_product_without_its_own_instruction_is_computed_in_float32() -> None:
    assert floors.Work(0, 3e9).seconds(CEILINGS, "int8") == pytest.approx(3)
    assert floors.Work(0, 3e9).seconds(replace(CEILINGS, f32=None), "int8") is None


# ---- the page


PARTS_MS = {"step": 8.0, "products": 4.0, "attention": 1.0, "other_kernels": 0.5, "sampling": 0.5, "python": 2.0}


def figures() -> dict[str, Any]:
    workload = Workload("1 stream, few", 1, 8, 10)

    def peer(name: str, tokens_s: float | None, **more: Any) -> dict[str, Any]:
        points = {} if tokens_s is None else {workload.name: {"tokens_s": tokens_s, "first_token_ms": 1e3 / tokens_s}}
        server = {
            "name": name,
            "engine": name.split()[0],
            "version": "1",
            "precision": "bfloat16",
            "arithmetic": "bf16",
            "weight_bytes": 1000,
        }
        rest: dict[str, Any] = {
            "missing": None,
            "failed": {},
            "perplexity": 20.0,
            "perplexity_missing": None,
            "start_s": 1.0,
        }
        return {**server, **rest, "pss_mb": 100.0, "kv_item_bytes": 2.0, "points": points, **more}

    machine = {"processor": "P", "cores": 2, "instructions": ["avx2"], "memory_gib": 4, "system": "L", "python": "3"}
    return {
        "model": "M",
        "machine": machine,
        "threads": 2,
        "pool_tokens": 1000,
        "rounds": 3,
        "date": "2026-11-22",
        "ceilings": {"read": 1.0, "f32": 1.0, "bf16": 2.0, "int8": None},
        "text": {"tokens": 600, "windows": 1, "window": 512},
        "shape": vars(SHAPE),
        "points": [vars(workload)],
        "peers": [
            peer("srv", 60.0, profile={workload.name: {"parts_ms": PARTS_MS, "load_s": 0.1}}),
            peer("srv otherwise", 120.0),
            peer("slow", 20.0),
            peer("quick", 50.0, perplexity=None, perplexity_missing="it returns none"),
            peer("absent", None, missing="no wheel"),
        ],
    }


def test_the_page_compares_with_each_peer_and_with_the_best() -> None:
    block = report.render(figures())
    assert "| **srv** | 60.0 |" in block
    assert "| slow | 20.0 (3.00) |" in block
    assert "| quick | 50.0 (1.20) |" in block
    assert "| srv ÷ best peer | 1.20 |\n| srv otherwise ÷ best peer | 2.40 |\n| aim | 1.3 |" in block


def test_the_page_says_how_steady_the_machine_was() -> None:
    changed = figures()
    assert "turns" not in report.render(changed).split("### ")[0]
    for peer, reads in zip(changed["peers"], ([20.0, 25.0], [24.0]), strict=False):
        peer["machine"] = [{**changed["ceilings"], "read": read} for read in reads]
    assert (
        "Before each of the 3 turns, memory was read at between 20.0 and 25.0 GB/s, with a median of 24.0."
        in report.render(changed)
    )


def test_the_page_names_the_commit_if_the_figures_do() -> None:
    assert "commit" not in report.render(figures())
    assert "3 rounds on 2026-11-22, commit abc1234+." in report.render(figures() | {"commit": "abc1234+"})
    assert " 1 round on 2026-11-22." in report.render(figures() | {"rounds": 1})


def test_the_page_has_the_time_to_the_first_token_if_the_figures_do() -> None:
    changed = figures()
    before = report.render(changed)
    assert "healthy after, s |\n" in before
    changed["peers"][0]["first_token_after_s"] = 2.53
    block = report.render(changed)
    assert "| healthy after, s | first token after, s |\n" in block
    assert "| 1.0 | 2.5 |\n" in block
    assert "| 1.0 | – |\n" in block
    assert len(block.splitlines()) == len(before.splitlines())


def test_a_ceiling_is_the_highest_that_was_measured() -> None:
    ceilings = [{"read": 1.0, "int8": None}, {"read": 3.0, "int8": None}, {"read": 2.0, "int8": None}]
    assert race_figures.best(ceilings) == {"read": 3.0, "int8": None}
    assert race_figures.best([]) is None


def test_bfloat16_is_no_slower_than_float32_which_it_can_be_widened_to() -> None:
    slow = Ceilings(read=1.0, f32=2.0, bf16=1.0, int8=None)
    assert (slow.operations("bf16"), slow.operations("f32"), slow.operations("int8")) == (2.0, 2.0, None)
    assert CEILINGS.operations("bf16") == 2.0


def test_a_time_to_the_first_token_is_compared_with_the_shortest() -> None:
    block = report.render(figures()).split("### Time to the first token")[1]
    assert "| srv ÷ best peer | 0.83 |" in block.split("### ")[0]


def test_the_page_says_what_is_missing_and_why() -> None:
    block = report.render(figures())
    assert "| absent | all | no wheel |" in block
    assert "not measured (it returns none)" in block


def test_memory_is_reported_with_and_without_the_pool() -> None:
    changed = figures()
    assert report._memory({**changed, "pool_tokens": 1_000_000}, changed["peers"][0]) == ["100", "32", "68"]
    assert report._memory(changed, {**changed["peers"][0], "pss_mb": None}) == ["–"] * 3


def test_the_share_of_the_floor_is_its_time_over_the_measured() -> None:
    changed = figures()
    shape, workload = floors.Shape(**changed["shape"]), Workload(**changed["points"][0])
    least = floors.seconds(shape, workload, CEILINGS, "bf16")
    assert least is not None
    assert race_figures.share(changed, changed["peers"][0], workload) == pytest.approx(least / (10 / 60))


def test_the_parts_of_a_step_are_shown_with_its_floor_and_the_overhead_of_http() -> None:
    changed = figures()
    shape, workload = floors.Shape(**changed["shape"]), Workload(**changed["points"][0])
    two_ms = floors.step(shape, workload).read * 1e-9 / 2e-3
    changed["ceilings"] = {**changed["ceilings"], "read": two_ms, "bf16": 1e6}
    beyond = 1e3 * (workload.counted / 60.0 - 0.1) / workload.output
    block = report.render(changed)
    cells = ["1 stream, few", "2.00", "8.00", "25%", "4.00", "1.00", "0.50", "0.50", "2.00", f"{beyond:.2f}"]
    assert "| " + " | ".join(cells) + " |" in block
    assert "| reading | 2.00 |" in block


def test_without_a_profile_the_page_has_no_parts() -> None:
    changed = figures()
    changed["peers"][0]["profile"] = None
    assert "Where a step's time goes" not in report.render(changed)
    assert "Where a step's time goes" in report.render(figures())


def test_a_profile_knows_every_product_of_the_library() -> None:
    assert set(step_profile.PRODUCTS) == {
        name for name in library._SIGNATURES if name.endswith("linear") or name == "srv_experts"
    }


@pytest.mark.slow
def test_most_of_a_step_is_found_in_its_parts() -> None:
    """Kernels that the profiler misses would count as Python."""
    command = [sys.executable, str(HERE / "step_profile.py"), "--vocab", "49152", "--points", "0", "3", "--"]
    arguments = ("--device", "cpu", "--max-total-tokens", "2048", "--log-level", "warning", "--graph-batch-sizes", "1")
    process = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert process.returncode == 0, process.stderr
    profiles = json.loads(process.stdout)
    assert list(profiles) == [WORKLOADS[0].name, WORKLOADS[3].name]
    for workload in (WORKLOADS[0], WORKLOADS[3]):
        parts, step_ms = profiles[workload.name]["parts_ms"], 1e3 * profiles[workload.name]["load_s"] / workload.output
        assert set(parts) == {"step", *report.PARTS}
        assert all(0 < parts[name] < parts["step"] for name in report.PARTS), parts
        assert parts["products"] == max(parts[name] for name in report.PARTS), parts
        assert parts["python"] < parts["step"] / 2, parts
        assert 1 / 3 < step_ms / parts["step"] < 3, "a step of the whole load takes about as long"


def test_the_plot_has_a_bar_for_each_figure() -> None:
    drawn = ElementTree.fromstring(race_plot.plot(figures()))
    bars = [element for element in drawn.iter() if element.tag.endswith("rect")]
    assert len(bars) == 1 + 4  # the background, and one per server that ran


def test_a_page_is_written_between_its_markers_and_then_no_longer_stale(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    (tmp_path / "benchmarks").mkdir()
    report.figures_of(page, "avx2").write_text(json.dumps(figures()))
    report.write(page)
    assert not report.stale(page)
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    page.write_text(written.replace("60.0", "61.0"))
    assert report.stale(page)
    report.write(page)
    report.figures_of(page, "avx2").with_suffix(".svg").write_text("another")
    assert report.stale(page)


def test_a_page_has_a_section_for_each_kind_of_machine(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"{report.BEGIN}{report.END}")
    (tmp_path / "benchmarks").mkdir()
    report.write(page)
    assert report.NO_FIGURES in page.read_text()
    newer = figures() | {"machine": figures()["machine"] | {"instructions": ["avx2", "avx512f"]}}
    for changed in (figures(), newer):
        name = machine_kind(changed["machine"]["instructions"])
        report.figures_of(page, name).write_text(json.dumps(changed))
    report.write(page)
    written = page.read_text()
    assert written.index("## Cores with AVX-512") < written.index("## Cores with AVX2")
    assert written.count("### Tokens per second") == 2
    assert {path.name for path in (tmp_path / "benchmarks").glob("*.svg")} == {"peers-avx512.svg", "peers-avx2.svg"}


def test_figures_in_a_file_for_another_kind_of_machine_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    (tmp_path / "benchmarks").mkdir()
    report.figures_of(page, "neon").write_text(json.dumps(figures()))
    with pytest.raises(ValueError, match=r"has the figures of avx2: move it to .*peers-avx2\.json"):
        report.reports_of(page)


def test_the_best_instruction_set_names_the_kind_of_a_machine() -> None:
    assert machine_kind(["avx2", "avx512f", "amx_tile"]) == "amx"
    assert machine_kind(["asimd", "bf16"]) == "neon"
    assert machine_kind([]) == "plain"
    assert machine_kind() in report.TITLES


def test_peers_multiply_in_bfloat16_only_where_the_processor_does() -> None:
    for units in (["avx2", "avx512f", "avx512_bf16"], ["avx2", "amx_tile", "amx_bf16"], ["asimd", "bf16"]):
        assert unquantized_dtype(units) == "bfloat16"
    assert (
        unquantized_dtype(["avx2"])
        == unquantized_dtype(["avx2", "avx512f", "avx512_vnni"])
        == unquantized_dtype([])
        == "float32"
    )
    both = {peer.name: (peer.precision, peer.arithmetic, peer.item_bytes) for peer in catalogue.PEERS[-2:]}
    assert set(both) == {"vLLM", "transformers"}
    assert set(both.values()) == {
        ("bfloat16", "bf16", 2) if unquantized_dtype() == "bfloat16" else ("float32", "f32", 4)
    }


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the figures"):
        report.between("nothing here", "figures")


def test_the_committed_page_is_generated_from_the_committed_figures() -> None:
    assert not report.stale()
