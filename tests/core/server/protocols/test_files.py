"""`/v1/files` over the fake engine: forms, owners, the folder and its bounds."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from batch_support import COMPLETIONS, FORM, form, jsonl, line, upload, used
from every import every
from server_support import eventually, serving
from starlette.types import Message

from srv.errors import RequestError
from srv.server.batches.files import BatchFile, FileStore
from srv.server.batches.multipart import read_form
from srv.server.protocols.openai.files import Download

pytestmark = pytest.mark.anyio


def field(disposition: bytes, more: bytes = b"") -> dict[str, Any]:
    """A form with a purpose and a field whose header is hostile."""
    sent = form(purpose=b"batch")
    odd = b"--x\r\nContent-Disposition: form-data; " + disposition + b"\r\n\r\na\r\n"
    return {**sent, "content": odd + more + sent["content"]}


@every(
    ("sent", "param", "message"),
    [
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, None, "multipart/form-data"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, None, "with a boundary"),
        ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}}, None, "it has no fields"),
        ({**form(purpose=b"batch"), "content": b"--x\r\n\r\n\r\na"}, None, "has no name"),
        ({**form(purpose=b"batch"), "content": b"--x\r\nabc"}, None, "has no header"),
        ({**form(purpose=b"batch"), "content": form(purpose=b"batch")["content"][:-7]}, None, "does not end"),
        ({**form(), "content": FORM % (b"file", b"", b"a") * 2 + b"--x--"}, None, "occurs twice"),
        (
            {**form(), "content": b"".join(FORM % (b"%d" % index, b"", b"") for index in range(40)) + b"--x--"},
            None,
            "more than 16 fields",
        ),
        (form(file=b"a"), "purpose", "purpose is required"),
        (form(purpose=b"batch"), "file", "file is required"),
        (form(purpose=b"fine-tune", file=b"a"), "purpose", "for batches only"),
        (form(purpose=b"batch", file=b"a", expires_after=b"9"), "expires_after", "unknown field"),
        (form(purpose=b"\xff\xfe", file=b"a"), "purpose", "for batches only"),
        (field(b'name="file"'), "file", "it is a text and no file"),
        (field(b'name="file"; filename="a"', FORM % (b"file", b'; filename="b"', b"")), None, "file occurs twice"),
        (field(b'name="' + b"n" * 3000 + b'"'), "n" * 80 + "... (3000 characters)", "unknown field"),
        (field(b'name="' + b"n" * 5000 + b'"'), None, "a very long one"),
        (field(b"name*=utf-7''%2b2AA-"), "?", "unknown field ?"),
        (field(b"name=file; filename*=\"u\0tf''a\""), None, "the header of a field is not valid"),
        (field(b"name=file; filename*1=a; filename*=a"), None, "the header of a field is not valid"),
        (
            {**form(), "headers": {"content-type": "multipart/form-data; boundary*=idna'a'%2b"}},
            None,
            "its Content-Type",
        ),
    ],
)
async def test_an_upload_that_is_refused_says_why(
    tmp_path: Path, sent: dict[str, Any], param: str | None, message: str
) -> None:
    async with serving(file_storage_path=tmp_path / "none") as server:
        refused = await server.http.post("/v1/files", **sent)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert message in error["message"]
        assert not (tmp_path / "none").exists()


def test_a_form_may_contain_anything_but_its_boundary() -> None:
    data = b"\r\n--\r\n--y\n\x00\xff\r\n\r\n--x"[:-3]
    sent = form(purpose=b"batch", file=data)
    read = read_form(sent["content"], sent["headers"]["content-type"])
    assert read["file"].data == data
    assert read["file"].filename == "a.jsonl"
    odd = b'--x\r\nContent-Disposition: form-data; name="file"; filename="../../etc/\xc3\xa9"\r\n\r\n\r\n--x--'
    assert read_form(odd, 'multipart/form-data; boundary="x"')["file"].filename == "../../etc/é"


async def test_files_stay_in_their_folder_with_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    (tmp_path / "secret.data").write_text("secret")
    async with serving(file_storage_path=folder) as server:
        file = await upload(server, jsonl(line("a")), key="mine")
        mine = {"x-api-key": "mine"}
        assert {path.name for path in folder.iterdir()} == {f"{file}.json", f"{file}.data"}
        for name in (
            "..%2Fsecret",
            "%2e%2e%2fsecret",
            "../secret",
            "file-..%2f",
            "/etc/passwd",
            file + "%00",
            "a" * 3000,
        ):
            assert (await server.http.get(f"/v1/files/{name}/content", headers=mine)).status_code == 404
            assert (await server.http.delete(f"/v1/files/{name}", headers=mine)).status_code in (404, 405)
        for other in ({}, {"x-api-key": "other"}):
            assert (await server.http.get(f"/v1/files/{file}", headers=other)).status_code == 404
            assert (await server.http.get("/v1/files", headers=other)).json()["data"] == []
            assert (await server.http.delete(f"/v1/files/{file}", headers=other)).status_code == 404
            body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
            refused = await server.http.post("/v1/batches", json=body, headers=other)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")
        batch = (await server.http.post("/v1/batches", json=body, headers=mine)).json()["id"]
        assert (await server.http.get(f"/v1/batches/{batch}")).json()["error"]["code"] == "batch_not_found"
        assert (await server.http.get(f"/v1/batches/{batch}", headers=mine)).status_code == 200
        assert (await server.http.get("/v1/batches")).json()["data"] == []
    (folder / "file-00.json").write_text("{")
    (folder / ("file-" + "0" * 32 + ".json")).write_text("{")
    async with serving(file_storage_path=folder) as server:  # files outlive the server
        listed = (await server.http.get("/v1/files", headers=mine)).json()["data"]
        assert file in [entry["id"] for entry in listed]
        assert (await server.http.get(f"/v1/files/{file}/content", headers=mine)).content == jsonl(line("a"))


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        names = sorted([await upload(server, b"%d" % index) for index in range(3)])
        listed = (await server.http.get("/v1/files?order=asc&limit=2")).json()
        assert (len(listed["data"]), listed["has_more"]) == (2, True)
        rest = (await server.http.get(f"/v1/files?order=asc&after={listed['last_id']}")).json()
        assert (len(rest["data"]), rest["has_more"]) == (1, False)
        assert sorted(entry["id"] for entry in listed["data"] + rest["data"]) == names
        assert (await server.http.get("/v1/files?purpose=batch_output")).json()["data"] == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            refused = await server.http.get(f"/v1/files?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await server.http.get("/v1/batches?limit=101")).json()["error"]["param"] == "limit"


async def test_many_files_are_listed_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    shown = BatchFile.shown

    def recorded(file: BatchFile) -> dict[str, object]:
        threads.add(threading.get_ident())
        return shown(file)

    monkeypatch.setattr(BatchFile, "shown", recorded)
    for index in range(300):
        FileStore(tmp_path).writer("", f"{index}", "batch").finish()
    async with serving(file_storage_path=tmp_path) as server:
        listed = (await server.http.get("/v1/files?limit=2&order=asc")).json()
        assert (len(listed["data"]), listed["has_more"]) == (2, True)
        assert len((await server.http.get("/v1/files")).json()["data"]) == 300
    assert threading.get_ident() not in threads


def test_storage_is_bounded_in_files_and_bytes(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_files=2, max_bytes=10)
    first = store.put("", "a", "batch", b"12345")
    with pytest.raises(RequestError, match="its limit is 10 bytes"):
        store.put("", "b", "batch", b"123456")
    assert [path.stem for path in tmp_path.iterdir()] == [first.id] * 2  # nothing of the refused file is left
    store.put("", "b", "batch", b"12345")
    with pytest.raises(RequestError, match="its limit is 2 files"):
        store.put("", "c", "batch", b"")
    with pytest.raises(RequestError, match="its limit is 2 files"):
        FileStore(tmp_path, max_files=2).put("", "c", "batch", b"")  # what an earlier server has stored counts
    store.delete("", first.id)
    assert store.put("", "c", "batch", b"12345").bytes == 5


def test_the_bytes_that_count_are_those_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, max_bytes=100)

    def check(files: int) -> None:
        assert used(store) == sum(path.stat().st_size for path in tmp_path.glob("*.data"))
        assert used(FileStore(tmp_path)) == used(store)
        assert len(list(tmp_path.iterdir())) == 2 * files

    first = store.put("", "a", "batch", b"1" * 60)
    with pytest.raises(RequestError, match="its limit is 100 bytes"):
        store.put("", "b", "batch", b"2" * 60)
    check(1)
    writer = store.writer("", "out", "batch_output")
    writer.append(b"3" * 30)
    with pytest.raises(RequestError, match="its limit is 100 bytes"):
        writer.append(b"4" * 30)  # what was written before is kept
    assert writer.finish().bytes == 30
    check(2)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _broken)
        with pytest.raises(RequestError, match="No space left"):
            store.put("", "c", "batch", b"5")
        patched.setattr(Path, "unlink", _broken)
        with pytest.raises(RequestError, match="No space left"):
            store.delete("", first.id)
    assert store.get("", first.id) == first  # it is not deleted by half
    check(2)
    store.delete("", first.id)
    with pytest.raises(RequestError):
        store.delete("", first.id)
    check(1)


def _broken(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_writer_below_a_lowered_limit_is_discarded(tmp_path: Path) -> None:
    FileStore(tmp_path).put("", "a", "batch", b"1" * 60)
    store = FileStore(tmp_path, max_bytes=10)
    with pytest.raises(RequestError, match="its limit is 10 bytes"):
        store.put("", "b", "batch", b"2")
    assert (used(store), len(list(tmp_path.iterdir()))) == (60, 2)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    writer = store.writer("", "out", "batch_output")
    writer.append(b"12345")
    (content,) = tmp_path.glob("*.data")
    size = content.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, before[1]))  # a disk on which three more bytes fit
    try:
        with pytest.raises(RequestError, match="cannot use its file storage"):
            writer.append(b"67890")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    file = writer.finish()
    assert (file.bytes, used(store), store.path(file).read_bytes()) == (5, 5, b"12345")


def test_files_that_are_being_written_count(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_files=1)
    writer = store.writer("", "a", "batch")
    with pytest.raises(RequestError, match="its limit is 1 files"):
        store.writer("", "b", "batch")
    writer.discard()
    store.put("", "b", "batch", b"")
    with pytest.raises(RequestError, match="its limit is 1 files"):
        store.writer("", "c", "batch")


async def test_what_a_crash_left_is_removed_at_the_start(tmp_path: Path) -> None:
    def name(digit: str, suffix: str) -> str:
        return f"file-{digit * 32}{suffix}"

    writing = FileStore(tmp_path).writer("", "a", "batch")  # of another server
    kept = FileStore(tmp_path).put("", "kept", "batch", b"1")
    stays = {path.name for path in tmp_path.iterdir()} | {"other.data", name("4", ".data"), name("4", ".json")}
    for left in ("other.data", name("1", ".data"), name("2", ".json"), name("3", ".data"), name("3", ".tmp")):
        (tmp_path / left).write_text("left")
    for suffix in (".json", ".data"):
        (tmp_path / name("4", suffix)).write_text("{")  # an operator may mend it
    async with serving(file_storage_path=tmp_path) as server:
        await eventually(lambda: {path.name for path in tmp_path.iterdir()} == stays)
        assert [entry["id"] for entry in (await server.http.get("/v1/files")).json()["data"]] == [kept.id]
    writing.append(b"23")
    assert writing.finish().bytes == 2
    assert used(FileStore(tmp_path)) == 4
    assert len(FileStore(tmp_path).all(kept.owner)) == 2


async def test_a_file_that_is_being_sent_is_not_deleted(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        file = await upload(server, b"1" * 2**20)
        store = FileStore(tmp_path)
        download = await asyncio.to_thread(Download, store, "", file)
        with pytest.raises(RequestError, match="a batch or a download reads it"):
            store.delete("", file)
        sent = bytearray()

        async def send(message: Message) -> None:
            sent.extend(message.get("body", b""))

        await download({"type": "http", "method": "GET", "headers": []}, _never, send)
        assert sent == b"1" * 2**20
        store.delete("", file)
        gone = await server.http.get(f"/v1/files/{file}/content")
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "file_storage_failed")
        assert (await server.http.delete(f"/v1/files/{file}")).status_code == 200
        assert (await server.http.get(f"/v1/files/{file}/content")).status_code == 404


async def _never() -> Message:
    return await asyncio.get_running_loop().create_future()


async def test_a_storage_that_cannot_be_written_is_a_503(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(file_storage_path=tmp_path / "file" / "folder") as server:
        refused = await server.http.post("/v1/files", **form(purpose=b"batch", file=b"a"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "file_storage_failed")


def test_one_owner_may_have_half_of_the_files_and_bytes(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_files=4, max_bytes=20, shared=True)
    store.put("a", "1", "batch", b"x" * 5)
    with pytest.raises(RequestError, match="10 bytes of one API key"):
        store.put("a", "2", "batch", b"x" * 6)
    second = store.put("a", "2", "batch", b"x" * 5)
    again = FileStore(tmp_path, max_files=4, max_bytes=20, shared=True)
    for file_store in (store, again):  # what an earlier server has stored counts
        with pytest.raises(RequestError, match="2 files of one API key"):
            file_store.put("a", "3", "batch", b"")
    store.put("b", "1", "batch", b"x" * 10)
    store.delete("a", second.id)
    store.put("a", "2", "batch", b"x" * 5)
    assert used(store) == 20
