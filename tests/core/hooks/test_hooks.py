"""Hooks of installed plugins: called with the right values, refused by name, and harmless when they raise."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from every import every
from hook_plugins_small import example, write_hooks
from sched_driver import limits, message
from server_support import MODEL, listening, serving

from srv.args.cli import add_arguments
from srv.args.config import plugin_arguments
from srv.args.explain import explain, find
from srv.args.extra import start_hooks
from srv.args.parser import Parser
from srv.args.resolve import resolve
from srv.args.sources import gather
from srv.args.statement import UserInput
from srv.cli.main import main
from srv.engine.loop import EngineLoop
from srv.errors import PluginError, Refusal
from srv.io.channel import InProcessChannel
from srv.io.messages import GetStats, Stats
from srv.memory.groups import PageGroup
from srv.platform.hook_plugins import Hooks, hook_plugins
from srv.sched.scheduler import Scheduler
from srv.server.http.access import Access
from srv.testing.fake_executor import FakeExecutor

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution `srv-<name>` with hooks; what is installed already stays."""

    def write(source: str, name: str = "audit", attribute: str = "Audit") -> None:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_hooks(folder, source, name, attribute)
        monkeypatch.syspath_prepend(str(folder))

    return write


def plugin(*methods: str, imports: str = "") -> str:
    """The source of a plugin with these methods, each marked."""
    body = "".join(f"    @hookimpl\n    def {method}\n" for method in methods)
    return f"from srv.hooks import hookimpl\n{imports}\n\nclass Audit:\n{body}"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def given(*words: str, **environment: str) -> UserInput:
    parser = Parser(prog="srv")
    add_arguments(parser)
    namespace, unknown = parser.parse_known_args(list(words))
    return gather(argparse.Namespace(**vars(namespace), unknown=unknown), environment)


def audit_to(file: Path) -> Hooks:
    """The hooks of an API process that was launched with `--audit-file`."""
    return start_hooks("api", resolve(given("--audit-file", str(file))).config.extras)


# ---- requests, refusals and routes, over HTTP


@pytest.mark.anyio
async def test_requests_and_refusals_are_observed(install: Install, tmp_path: Path) -> None:
    install(example())
    seen = tmp_path / "seen"
    async with listening(hooks=audit_to(seen), access=Access(key="key")) as server:
        headers = {"authorization": "Bearer key"}
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "n": 2}
        assert (await server.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await server.http.post("/v1/embeddings", json={"model": MODEL, "input": [[5, 6]]}, headers=headers)
        await server.http.post("/v1/completions", json={**body, "top_p": 9}, headers=headers)
        await server.http.post("/v1/completions", json={**body, "top_p": 9, "stream": True}, headers=headers)
        await server.http.get("/nowhere", headers=headers)
        await server.http.get("/audit")
        assert (await server.http.get("/audit", headers=headers)).json() == {"finished": 3}
        document = (await server.http.get("/openapi.json", headers=headers)).json()
        assert document["paths"]["/audit"]["get"]["description"] == "How many requests have ended."
        (status,) = (await server.http.get("/get_server_info", headers=headers)).json()["hooks"]
        assert (status["distribution"], status["switched_off"]) == ("srv-audit", None)
        assert "srv_routes" in status["hooks"]
        reader, writer = await asyncio.open_connection(
            *server.http.base_url.raw_host.decode().split(","), server.http.base_url.port
        )
        writer.write(b"this is not HTTP\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
    events = lines(seen)
    started = [event for event in events if event["event"] == "started"]
    assert [(event["prompt_tokens"], event["max_tokens"]) for event in started] == [(3, 4), (3, 4), (2, 0)]
    assert {event["process"] for event in events} == {"api"}
    first = [event["id"] for event in events if event["event"] == "first_token"]
    assert sorted(first) == sorted(event["id"] for event in started[:2])
    finished = {event["id"]: event for event in events if event["event"] == "finished"}
    assert [(finished[event["id"]]["reason"], finished[event["id"]]["completion_tokens"]) for event in started] == [
        ("length", 4),
        ("length", 4),
        ("stop", 0),
    ]
    assert all(0 < event["seconds"] < 60 and event["prompt_tokens"] for event in finished.values())
    refused = [(event["status"], event["code"], event["what"]) for event in events if event["event"] == "refused"]
    assert [rejection[::2] for rejection in refused[:2]] == [(400, "top_p"), (400, "top_p")]
    assert [rejection[:2] for rejection in refused[2:]] == [
        (404, "unknown_path"),
        (401, "invalid_api_key"),
        (400, "invalid_http"),
    ]


@pytest.mark.anyio
async def test_an_observer_that_raises_harms_only_its_plugin(
    install: Install, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    install(example())
    install(plugin("srv_first_token(self, event): raise SystemExit('no disk')"), "broken")
    seen = tmp_path / "seen"
    async with serving(hooks=audit_to(seen)) as server:
        for _ in range(2):
            answer = await server.post("/v1/completions", model=MODEL, prompt=[5], max_tokens=2)
            assert answer.status_code == 200, answer.text
        statuses = (await server.http.get("/get_server_info")).json()["hooks"]
    assert {status["plugin"]: status["switched_off"] for status in statuses} == {
        "audit": None,
        "broken": "srv_first_token raised SystemExit: no disk",
    }
    assert [event["event"] for event in lines(seen)] == ["started", "first_token", "finished"] * 2
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "broken (srv-broken): srv_first_token raised SystemExit: no disk" in record.getMessage()
    assert record.exc_info is not None


ROUTES = "from starlette.routing import Mount, Route, WebSocketRoute\nfrom starlette.responses import Response\n"


@every(
    ("route", "reason"),
    [
        ("Route('/generate', Response('x'))", "path /generate: both claim this path. Uninstall srv-audit"),
        (
            "Route('/v1/models/mine', Response('x'))",
            "path /v1/models/mine, which overlaps with /v1/models/{model:path}",
        ),
        ("Route('/{rest:path}', Response('x'))", "path /{rest:path}, which overlaps with /"),
        ("Route('/{name}', Response('x'))", "path /{name}, which overlaps with /"),
        (
            "Route('/v1/{what}/mine', Response('x'))",
            "path /v1/{what}/mine, which overlaps with /v1/responses/{response}",
        ),
        ("Mount('/more', routes=[])", "only routes of HTTP requests can be added"),
        ("WebSocketRoute('/socket', None)", "only routes of HTTP requests can be added"),
    ],
)
def test_routes_that_shadow_others_or_are_none_are_refused(install: Install, route: str, reason: str) -> None:
    install(plugin(f"srv_routes(self): return [{route}]", imports=ROUTES))
    with pytest.raises(PluginError, match="srv-audit") as refused:
        asyncio.run(started())
    assert reason in str(refused.value)


async def started() -> None:
    async with serving(hooks=start_hooks("api", {})):
        pass


@every(
    ("one", "other", "reason"),
    [
        ("/mine", "/mine", "path /mine: both claim this path"),
        ("/mine/{id:uuid}", "/mine/{id:uuid}", "path /mine/{id:uuid}: both claim this path"),
        ("/mine/{id}/files", "/mine/all/{name}", "path /mine/{id}/files, which overlaps with /mine/all/{name}: both"),
        ("/mine/{rest:path}", "/mine/{id}/a/b", "path /mine/{rest:path}, which overlaps with /mine/{id}/a/b: both"),
    ],
)
def test_two_plugins_may_not_share_a_path(install: Install, one: str, other: str, reason: str) -> None:
    for name, path in (("audit", one), ("other", other)):
        install(plugin(f"srv_routes(self): return [Route({path!r}, Response('x'))]", imports=ROUTES), name)
    with pytest.raises(PluginError, match="srv-audit and srv-other: ") as refused:
        asyncio.run(started())
    assert reason in str(refused.value)


@every(
    ("one", "other", "asked"),
    [
        ("/mine/{id}", "/mine/{id}/files", ("/mine/7", "/mine/7/files")),
        ("/mine/{id:int}", "/mine/all", ("/mine/7", "/mine/all")),
        ("/a/{x}/{n:int}", "/a/{x}/all", ("/a/b/7", "/a/b/all")),
    ],
)
def test_paths_that_no_request_matches_both_are_accepted(
    install: Install, one: str, other: str, asked: tuple[str, str]
) -> None:
    for name, path in (("audit", one), ("other", other)):
        install(plugin(f"srv_routes(self): return [Route({path!r}, Response({name!r}))]", imports=ROUTES), name)

    async def answers() -> list[str]:
        async with serving(hooks=start_hooks("api", {})) as server:
            return [(await server.http.get(path)).text for path in asked]

    assert asyncio.run(answers()) == ["audit", "other"]


FAILING = """from fastapi import APIRouter, HTTPException

router = APIRouter()

@router.get("/session/{number}")
def session(number: int):
    raise HTTPException(404, f"there is no session {number}")
"""


@pytest.mark.anyio
async def test_errors_of_routes_have_the_format_of_all_others(install: Install, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    observer = f"srv_refused(self, event): print(event.status, event.code, file=open({str(seen)!r}, 'a'))"
    install(plugin("srv_routes(self): return router", observer, imports=FAILING))
    async with serving(hooks=start_hooks("api", {})) as server:
        missing = (await server.http.get("/session/3")).json()["error"]
        invalid = (await server.http.get("/session/x")).json()["error"]
    assert (missing["message"], missing["code"]) == ("there is no session 3", "http_error")
    assert (invalid["param"], invalid["code"]) == ("path.number", "invalid_value")
    assert seen.read_text().splitlines() == ["404 http_error", "422 invalid_value"]


# ---- engine steps


class Executor(FakeExecutor):
    """Without processes, there is nothing to check when the engine is idle."""

    def check(self) -> None:
        pass


def run_engine(hooks: Hooks) -> Stats:
    """One request of 5 tokens with 3 outputs, and the statistics after it."""
    groups = [PageGroup(64, 4)]
    channel = InProcessChannel()
    scheduler = Scheduler(limits(depth=2), groups, frozenset({0}))
    loop = EngineLoop(scheduler, Executor(groups), channel, 2, hooks=hooks)
    channel.put(message("a", [1, 7, 8, 9, 10], 3))
    for _ in range(8):
        loop.step(0)
    channel.put(GetStats(7))
    loop.step(0)
    while not (isinstance(stats := channel.take(0), Stats) and stats.call == 7):
        pass
    return stats


def test_steps_are_observed_in_the_engine(install: Install, tmp_path: Path) -> None:
    install(example())
    seen = tmp_path / "seen"
    assert run_engine(audit_to(seen)).hooks_switched_off == {}
    steps = lines(seen)
    assert [(step["rows"], step["tokens"]) for step in steps[:3]] == [(1, 5), (1, 1), (1, 1)]
    assert sum(step["generated"] for step in steps) == 3
    assert all(0 <= step["seconds"] < 60 for step in steps)


def test_a_step_goes_on_without_a_hook_that_raises(install: Install) -> None:
    install(plugin("srv_step(self, event): 1 / 0"))
    stats = run_engine(start_hooks("engine", {}))
    assert stats.generated_tokens == 3
    assert stats.hooks_switched_off == {"audit": "srv_step raised ZeroDivisionError: division by zero"}


def test_without_an_implementation_nothing_is_bound(install: Install) -> None:
    install(plugin("srv_first_token(self, event): pass"))
    assert Hooks(hook_plugins()).bind("srv_step") is None


# ---- arguments


def test_arguments_come_from_every_source_and_reach_their_plugin(install: Install, tmp_path: Path) -> None:
    install(example())
    file = tmp_path / "serve.yaml"
    file.write_text("audit_every: 5\naudit_file: from-file\n")
    resolved = resolve(given("--config", str(file), "--audit-every=7", SRV_AUDIT_FILE="from-env"))
    assert str(resolved.provenance["audit_every"]).splitlines() == [
        "audit_every = 7 because set by command line",
        f"    overridden: 5 because set by config file {file} line 1",
        "    overridden: 1 because generic default",
    ]
    assert resolved.config.extras == {"audit_every": 7, "audit_file": "from-env"}
    hooks = start_hooks("engine", resolved.config.extras)
    assert resolved.provenance["audit_file"].to_dict()["value"] == "from-env"
    assert hooks.status()[0]["plugin"] == "audit"
    assert explain(find("--audit-file")).startswith("audit_file (plugin srv-audit)")
    with pytest.raises(Refusal, match=r"audit_every = 0 \(set by environment SRV_AUDIT_EVERY\): it must be at least 1"):
        resolve(given(SRV_AUDIT_EVERY="0"))


def test_without_the_plugin_its_arguments_are_unknown() -> None:
    assert not plugin_arguments()
    with pytest.raises(Refusal, match=r"--audit-file.*there is no such flag.*\[unknown_flag\]"):
        resolve(given("--audit-file", "x"))


def test_plan_and_args_show_the_owner(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(example())
    assert main(["plan", "--device", "cpu", "--audit-every", "3"]) == 0
    assert (
        "[plugin srv-audit]\naudit_file = unset because generic default\naudit_every = 3 because"
        in capsys.readouterr().out
    )
    assert main(["args", "list", "--group", "plugin srv-audit"]) == 0
    assert capsys.readouterr().out.startswith("plugin srv-audit\n  audit_file ")
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert "plugin srv-audit:\n  --audit-file FILE" in capsys.readouterr().out


def test_refused_arguments_of_a_launch_are_observed(install: Install, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    method = f"srv_refused(self, event): print(event.code, event.what, event.status, file=open({str(seen)!r}, 'a'))"
    install(plugin(method))
    assert main(["launch", "--device", "cpu", "--page-size", "0"]) == 2
    assert "bad_value page_size None" in seen.read_text().splitlines()


ARGUMENTS = "from typing import Annotated, NamedTuple\nfrom srv.args.spec import Arg\n"


@every(
    ("field", "reason"),
    [
        ("page_size: Annotated[int, Arg('Mine.')] = 1", "srv and srv-audit: argument page_size: both claim this name"),
        ("no_page_size: Annotated[int, Arg('Mine.')] = 1", "srv and srv-audit: argument no_page_size: both claim"),
        ("mine: Annotated[int, Arg('Mine.', aliases=('config',))] = 1", "argument config: both claim this name"),
        ("other: Annotated[int, Arg('Mine.')] = 1", "srv-audit and srv-other: argument other: both claim this name"),
        ("Mine: Annotated[int, Arg('Mine.')] = 1", "'Mine' is not a name of lowercase letters"),
        ("mine: int = 1", "mine is not declared as Annotated[type, Arg(...)]"),
        ("mine: Annotated[int, Arg('Mine.')]", "mine has no default"),
        ("mine: Annotated[int, Arg('Mine.', needs='fp8')] = 1", "mine has needs, which only arguments of srv may have"),
    ],
)
def test_arguments_that_cannot_be_added_are_refused(install: Install, field: str, reason: str) -> None:
    other = f"{ARGUMENTS}\n\nclass Args(NamedTuple):\n    other: Annotated[int, Arg('Other.')] = 1\n"
    install(plugin("srv_arguments(self): return Args", imports=other), "other")
    declared = f"{ARGUMENTS}\n\nclass Args(NamedTuple):\n    {field}\n"
    install(plugin("srv_arguments(self): return Args", imports=declared))
    with pytest.raises(PluginError) as refused:
        plugin_arguments()
    assert reason in str(refused.value)


# ---- plugins that cannot be loaded

ASYNCHRONOUS = """from srv.hooks import hookimpl

class Audit:
    @hookimpl
    async def srv_step(self, event): yield
"""


@every(
    ("source", "code", "reason"),
    [
        (plugin("srv_step(self, event, tokens): pass"), "signature", "tokens"),
        (plugin("srv_steps(self, event): pass"), "unknown_member", "unknown hook 'srv_steps'"),
        (plugin("srv_step(self, event): yield"), "signature", "audit.srv_step: is asynchronous or a generator"),
        (ASYNCHRONOUS, "signature", "audit.srv_step: is asynchronous or a generator"),
        (plugin("srv_setup(self, setup): 1 / 0"), "contract", "audit.srv_setup: raised ZeroDivisionError"),
        ("class Audit:\n    def srv_step(self, event): pass\n", "contract", "srv_step: is not marked"),
        (plugin("srv_setup(self): pass\n    def srv_step(self, event): pass"), "contract", "srv_step: is not marked"),
        (plugin("__init__(self): 1 / 0"), "contract", "creating it raised ZeroDivisionError"),
        ("import jax\n", "impure", "Move that import into the hook that needs it"),
        ("1 / 0\n", "import_failed", "importing it raised ZeroDivisionError"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused_by_name(install: Install, source: str, code: str, reason: str) -> None:
    install(source)
    with pytest.raises(PluginError) as refused:
        start_hooks("api", {})
    assert refused.value.distribution == "srv-audit"
    assert (refused.value.code, reason in str(refused.value)) == (code, True), str(refused.value)


def test_a_plugin_refuses_values_of_its_arguments_with_its_own_remedy(install: Install) -> None:
    refusal = "Refusal([Rejection('bad_audit', 'audit_every', '7', 'command line', 'it is odd', 'Use 8.')])"
    install("from srv.errors import Refusal, Rejection\n" + plugin(f"srv_setup(self, setup): raise {refusal}"))
    with pytest.raises(Refusal, match=r"it is odd. Use 8\. \[bad_audit\]"):
        start_hooks("api", {})


def test_two_distributions_may_not_share_a_name(install: Install, tmp_path: Path) -> None:
    install(plugin("srv_step(self, event): pass"))
    folder = tmp_path / "site-0"
    information = folder / "srv_twin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: srv-twin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[srv.hooks]\naudit = plugin_audit.manifest:Audit\n")
    with pytest.raises(PluginError, match="srv-audit and srv-twin: hooks plugin audit: both claim this name"):
        hook_plugins()


def test_the_doctor_lists_plugins_and_names_a_faulty_one(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("1 / 0\n")
    assert main(["doctor", "--json"]) == 2
    diagnosis = json.loads(capsys.readouterr().out)
    (finding,) = diagnosis["environment"]
    assert (finding["name"], finding["status"]) == ("hooks", "error")
    assert "srv-audit" in finding["detail"]
