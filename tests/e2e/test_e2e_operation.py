"""How a server is reached and operated: TLS, Unix socket, proxy paths, keys with limits, pausing, log levels.

`secured` has another value of each argument; the plain values are those of `plain`.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_support import POLL_S, Server, free_port, greedy, launch, launched, wait_until

from srv_matrix.pytest_plugin import covers

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl, which makes certificates"),
]

ADMIN, TEAM, SLOW, PASSWORD = "a key of operators", "key-of-a-team", "key-of-a-slow-one", "a password"
KEYS = f"# keys\n{TEAM} name=team concurrent_requests=1\n\n{SLOW} name=slow requests_per_minute=6\n"


class Certificates:
    """An authority, a server's certificate with an encrypted key, and a client's certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority, self.authority_key = folder / "ca.pem", folder / "ca.key"
        _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority",
                 "-keyout", self.authority_key, "-out", self.authority)  # fmt: skip
        self.server = self._signed("server", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self.client = self._signed("client", "subjectAltName=DNS:client")
        self.encrypted = folder / "server.encrypted"
        _openssl("rsa", "-aes256", "-passout", f"pass:{PASSWORD}", "-in", self.server[1], "-out", self.encrypted)

    def _signed(self, name: str, extension: str) -> tuple[Path, Path]:
        """Certificate and key, signed by the authority."""
        certificate, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(extension)
        _openssl("x509", "-req", "-days", "2", "-in", request, "-CA", self.authority, "-CAkey", self.authority_key,
                 "-CAcreateserial", "-extfile", extensions, "-out", certificate)  # fmt: skip
        return certificate, key

    def context(self, with_client: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority))
        if with_client:
            context.load_cert_chain(*self.client)
        return context


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class SecuredServer(Server):
    """A server behind TLS that only accepts clients with a certificate, and whose operators have a key."""

    certificates: Certificates

    @property
    def base(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def health(self) -> int | None:
        try:
            with self.client() as client:
                return client.get("/health").status_code
        except httpx.TransportError:
            return None

    def client(self, **more: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {ADMIN}", **more.pop("headers", {})}
        return super().client(headers=headers, verify=self.certificates.context(), **more)


def as_client(server: Server, key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    pool = ("--max-running-requests", "2", "--max-total-tokens", "200000")
    return ("--device", srv_device, "--model-path", str(letters_model), "--load-format", "dummy", *pool)


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(tmp_path_factory.mktemp("plain") / "log", *common) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(
    common: tuple[str, ...], certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "keys").write_text(KEYS)
    arguments = (
        *("--ssl-certfile", str(certificates.server[0]), "--ssl-keyfile", str(certificates.encrypted)),
        *("--ssl-keyfile-password", PASSWORD, "--ssl-ca-certs", str(certificates.authority)),
        *("--admin-api-key", ADMIN, "--api-keys-file", str(folder / "keys")),
        *("--root-path", "/llm", "--access-log", "--log-level", "warning"),
    )
    server = SecuredServer((*common, *arguments), folder / "log")
    server.certificates = certificates
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


# ---- how it is reached


@covers("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")
def test_ssl_certfile(plain: Server, secured: SecuredServer, common: tuple[str, ...]) -> None:
    """The server speaks HTTPS with the certificate; with a wrong password for its key it does not start."""
    assert plain.get("/health").status_code == secured.get("/health").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secured.port}/health", timeout=5)
    files = secured.certificates
    flags = (*common, "--port", str(free_port()), "--ssl-certfile", str(files.server[0]))
    for more in (("--ssl-keyfile-password", "another"), ()):
        status, text, _ = launch(*flags, "--ssl-keyfile", str(files.encrypted), *more)
        assert (status, "bad_certificate" in text) == (2, True)
    assert launch(*common, "--port", str(free_port()), "--ssl-keyfile", str(files.encrypted))[0] == 2


@covers("ssl_ca_certs")
def test_ssl_ca_certs(
    secured: SecuredServer, common: tuple[str, ...], certificates: Certificates, tmp_path: Path
) -> None:
    """Only clients with a certificate of the authority are accepted; without the argument, all are."""
    nameless = certificates.context(with_client=False)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{secured.base}/health", verify=nameless, timeout=5)
    bundle = tmp_path / "both.pem"  # certificate and key in one file
    bundle.write_text(certificates.server[0].read_text() + certificates.server[1].read_text())
    open_server = SecuredServer((*common, "--ssl-certfile", str(bundle)), tmp_path / "log")
    open_server.certificates = certificates
    try:
        open_server.start()
        assert httpx.get(f"{open_server.base}/health", verify=nameless, timeout=5).status_code == 200
    finally:
        assert open_server.stop() == 0


@covers("uds")
def test_uds(plain: Server, common: tuple[str, ...], tmp_path: Path) -> None:
    """The server listens on the file alone, takes it over from a server that was killed, and removes it at its end."""
    path = tmp_path / "srv.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = UnixServer((*common, "--uds", str(path)), tmp_path / "log")
    try:
        server.start()
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert len(server.generate(**greedy("a", 3))["output_ids"]) == 3
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=5)
        status, text, _ = launch(*common, "--uds", str(path))
        assert (status, "socket_unavailable" in text) == (2, True)
        assert server.get("/health").status_code == 200
    finally:
        assert server.stop() == 0
    assert not path.exists()


class UnixServer(Server):
    def client(self, **more: Any) -> httpx.Client:
        path = str(self.arguments[-1])
        return httpx.Client(base_url="http://srv", transport=httpx.HTTPTransport(uds=path), timeout=60, **more)

    def health(self) -> int | None:
        try:
            return self.get("/health").status_code
        except httpx.TransportError:
            return None


@covers("root_path")
def test_root_path(plain: Server, secured: SecuredServer) -> None:
    """Requests arrive with the prefix or without it, and the rules of keys hold for both."""
    assert [server.get("/llm/health").status_code for server in (plain, secured)] == [404, 200]
    assert secured.get("/health").status_code == 200
    with secured.client(headers=as_client(secured, TEAM)) as client:
        assert [client.post(f"{prefix}/flush_cache").status_code for prefix in ("", "/llm")] == [401, 401]
        assert client.get("/llmhealth").status_code == 404
    assert secured.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


@covers("access_log=false", "access_log=true")
def test_access_log(plain: Server, secured: SecuredServer) -> None:
    for server in (plain, secured):
        assert server.get("/v1/models?secret=1").status_code == 200
        assert server.get("/no%0Awhere").status_code == 404
    wait_until(lambda: "/no" in secured.log_text(), 10, "the lines are written")
    shown = [line for line in secured.log_text().splitlines() if "/v1/models" in line]
    assert '127.0.0.1 "GET /v1/models" 200 ' in shown[-1]
    assert "secret" not in shown[-1]
    assert '"GET /no\\nwhere" 404' in secured.log_text()
    assert "GET /v1/models" not in plain.log_text()


@covers("api_keys_file")
def test_api_keys_file(plain: Server, secured: SecuredServer, common: tuple[str, ...], tmp_path: Path) -> None:
    """Each key has its own limits, and a request beyond them is refused at once."""
    body = {"prompt": [1], "max_tokens": 1}
    with secured.client(headers=as_client(secured, "wrong")) as client:
        assert client.post("/v1/completions", json=body).status_code == 401
    with secured.client(headers=as_client(secured, SLOW)) as client:
        answers = [client.post("/v1/completions", json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert answers[1].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answers[1].headers["retry-after"]) <= 10
    with secured.client(headers=as_client(secured, TEAM)) as client:
        long = {"prompt": [1], "max_tokens": 60_000, "ignore_eos": True, "rid": "long", "stream": True}
        with client.stream("POST", "/v1/completions", json=long):
            assert client.post("/v1/completions", json=body).status_code == 429
        wait_until(lambda: client.post("/v1/completions", json=body).status_code == 200, 20, "the place is free again")
    keys = tmp_path / "keys"
    keys.write_text("KEY requests_per_minute=many\n")
    status, text, _ = launch(*common, "--port", str(free_port()), "--api-keys-file", str(keys))
    assert (status, "line 1" in text, "KEY req" in text) == (2, True, False)


@covers("share_cache=true", "share_cache=false")
def test_share_cache(secured: SecuredServer, common: tuple[str, ...], tmp_path: Path) -> None:
    """What one key has sent is in the prefix cache of another one only if they share it."""
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    shared = ("--api-keys-file", str(keys), "--admin-api-key", ADMIN, "--share-cache")
    body = {"text": "letters of the first key " * 40, "sampling_params": {"max_new_tokens": 1}}

    def cached(server: Server, key: str) -> int:
        with server.client(headers=as_client(server, key)) as client:
            return int(client.post("/generate", json=body).json()["meta_info"]["cached_tokens"])

    with launched(tmp_path / "log", *common, *shared) as sharing:
        assert cached(sharing, ADMIN) == 0
        assert cached(sharing, TEAM) > 0
    assert cached(secured, ADMIN) == 0
    assert cached(secured, TEAM) == 0
    assert cached(secured, TEAM) > 0


# ---- how it is operated


def steps(server: Server) -> float:
    return server.metrics()["srv_engine_steps_total"]


@covers("endpoint:POST /pause_generation", "endpoint:POST /continue_generation", "endpoint:GET /get_load")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pausing_loses_no_request(plain: Server, mode: str) -> None:
    """Three requests, of which two run, wait while no step is computed, and end with the output that they have without
    a pause."""
    expected = plain.generate(**greedy("a b c", 3000))["output_ids"]
    answers: list[Any] = []
    clients = [
        threading.Thread(target=lambda: answers.append(plain.generate(**greedy("a b c", 3000))), daemon=True)
        for _ in range(3)
    ]
    for client in clients[:2]:
        client.start()
    wait_until(lambda: plain.metrics()["srv_requests_running"] == 2, 20, "both run")
    assert plain.post("/pause_generation", mode=mode).json() == {"status": "ok", "paused": True, "aborted": 0}
    clients[2].start()
    wait_until(lambda: plain.get("/get_load").json()[0]["num_reqs"] == 3, 20, "the third is accepted")
    load = plain.get("/get_load").json()[0]
    assert (load["paused"], load["num_waiting_reqs"]) == (True, 1 if mode == "in_place" else 3)
    before = steps(plain)
    time.sleep(5 * POLL_S)
    assert (steps(plain), answers) == (before, [])
    assert plain.get("/health").json()["paused"] is True
    assert plain.post("/continue_generation").json()["paused"] is False
    for client in clients:
        client.join(60)
    assert [answer["output_ids"] for answer in answers] == [expected] * 3
    assert plain.get("/get_load").json()[0]["paused"] is False
    plain.wait_pages_back()


def test_requests_can_be_aborted_while_generation_is_paused(plain: Server) -> None:
    answers: list[Any] = []
    body = greedy("a b c", 50_000, rid="paused")
    client = threading.Thread(target=lambda: answers.append(plain.generate(**body)), daemon=True)
    client.start()
    wait_until(lambda: plain.metrics()["srv_requests_running"] == 1, 20, "it runs")
    plain.post("/pause_generation")
    assert plain.post("/abort_request", rid="paused").json() == {"aborted": 1}
    client.join(20)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    plain.wait_pages_back()
    plain.post("/continue_generation")
    assert len(plain.generate(**greedy("a", 2))["output_ids"]) == 2


def test_pausing_with_abort_ends_what_runs(plain: Server) -> None:
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(plain.generate(**greedy("a", 50_000))), daemon=True)
    client.start()
    wait_until(lambda: plain.metrics()["srv_requests_running"] == 1, 20, "it runs")
    assert plain.post("/pause_generation", mode="abort").json()["aborted"] == 1
    client.join(20)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    plain.post("/continue_generation")


@covers("endpoint:GET /server_info")
def test_operators_alone_pause_and_see_arguments(secured: SecuredServer) -> None:
    paths = (("POST", "/pause_generation"), ("POST", "/set_log_level"), ("GET", "/server_info"))
    with secured.client(headers=as_client(secured, TEAM)) as client:
        assert [client.request(*path).status_code for path in paths] == [401] * 3
    assert secured.get("/server_info").json()["arguments"]["access_log"]["value"] is True


@covers("endpoint:POST /set_log_level", "endpoint:GET /log_level")
def test_the_log_level_changes_at_run_time(plain: Server) -> None:
    """Debug lines of both processes appear after the change only."""
    assert plain.get("/log_level").json() == {"level": "info"}
    assert " DEBUG " not in plain.log_text()
    assert plain.post("/set_log_level", level="debug").json() == {"level": "debug"}
    refused = plain.post("/set_log_level", level="loud")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")
    lines = (" api DEBUG ", " engine DEBUG ")
    wait_until(lambda: all(line in plain.log_text() for line in lines), 10, "both log more")
    assert plain.post("/set_log_level", level="info").json() == {"level": "info"}
    counts = [plain.log_text().count(line) for line in lines]
    plain.post("/v1/completions", prompt="a", max_tokens=1)
    assert [plain.log_text().count(line) for line in lines] == counts


@covers("endpoint:GET /load", "endpoint:GET /model_info")
def test_details_of_health(plain: Server) -> None:
    shown = plain.get("/health?details").json()
    assert (shown["status"], shown["paused"], shown["running"], shown["model"]) == ("ok", False, 0, "letters")
    assert shown["pages"]["total"] >= shown["pages"]["free"] > 0
    assert plain.get("/load").json() == {"server_load": 0}
    assert plain.get("/model_info").json() == plain.get("/get_model_info").json()


def test_a_shutdown_lets_paused_requests_finish(common: tuple[str, ...], tmp_path: Path) -> None:
    answers: list[Any] = []
    with launched(tmp_path / "log", *common) as server:
        client = threading.Thread(target=lambda: answers.append(server.generate(**greedy("a", 4000))), daemon=True)
        client.start()
        wait_until(lambda: server.metrics()["srv_requests_running"] == 1, 20, "it runs")
        server.post("/pause_generation")
        server.terminate()
        client.join(40)
        assert server.wait() == 0
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
