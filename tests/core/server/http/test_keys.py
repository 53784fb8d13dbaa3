"""The key of a server, from an argument or a file, and the warning of a public server without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from args_world import resolved, user

from srv.cli.main import main
from srv.errors import Refusal
from srv.server.http.access import Access, Caller
from srv.server.http.client_keys import client_keys
from srv.server.http.keys import api_key, is_loopback, public_without_key


def test_the_key_comes_from_the_argument_or_the_first_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  secret \nsecond line\n")
    assert api_key(resolved(user())) is None
    assert api_key(resolved(user(api_key="given"))) == "given"
    assert api_key(resolved(user(api_key_file=file))) == "secret"


@pytest.mark.parametrize("key", ["schlüssel-à", "ключ-Р", "鍵-中", "a\u2028b", "a\u0085b", "Å"])
def test_a_key_of_any_letters_is_read_and_accepted_as_it_is(tmp_path: Path, key: str) -> None:
    file = tmp_path / "key"
    file.write_text(f" {key}\t\n", encoding="utf-8-sig")
    assert api_key(resolved(user(api_key_file=file))) == key
    (client,) = client_keys(resolved(user(api_keys_file=file)))
    assert client.key == key
    for name, value in ((b"authorization", f"bearer \t{key} "), (b"x-api-key", f"{key}\t")):
        scope = {"type": "http", "path": "/v1/models", "headers": [(name, value.encode())]}
        assert isinstance(Access(key=key).admit(scope), Caller), name


def test_a_file_without_a_key_is_refused_with_its_name(tmp_path: Path) -> None:
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.write_text("\nsecond line\n")
    for file, reason in ((empty, "first line is empty"), (missing, "No such file")):
        with pytest.raises(Refusal, match=reason) as caught:
            api_key(resolved(user(api_key_file=file)))
        assert caught.value.rejections[0].what == "api_key_file"


def test_the_help_says_that_others_can_read_a_key_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("api_key", "admin_api_key"):
        assert main(["args", "explain", name]) == 0
        assert "with ps" in capsys.readouterr().out


def test_two_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="set twice"):
        resolved(user(api_key="given", api_key_file=tmp_path / "key"))


def test_a_public_server_without_a_key_is_warned_about() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "my.host"):
        warning = public_without_key(host, None)
        assert warning is not None
        assert host in warning
        assert public_without_key(host, "given") is None
    for host in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert is_loopback(host)
        assert public_without_key(host, None) is None
