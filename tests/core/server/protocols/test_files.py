"""`/v1/files` over the fake engine: forms, owners, the folder and its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from batch_support import COMPLETIONS, FORM, form, jsonl, line, upload
from every import every
from server_support import serving

from srv.errors import RequestError
from srv.server.batches.files import FileStore
from srv.server.batches.multipart import read_form

pytestmark = pytest.mark.anyio


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
            {**form(), "content": b"".join(FORM % (b"%d" % each, b"", b"") for each in range(40)) + b"--x--"},
            None,
            "more than 16 fields",
        ),
        (form(file=b"a"), "purpose", "purpose is required"),
        (form(purpose=b"batch"), "file", "file is required"),
        (form(purpose=b"fine-tune", file=b"a"), "purpose", "for batches only"),
        (form(purpose=b"batch", file=b"a", expires_after=b"9"), "expires_after", "unknown field"),
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
        assert file in [each["id"] for each in listed]
        assert (await server.http.get(f"/v1/files/{file}/content", headers=mine)).content == jsonl(line("a"))


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        names = sorted([await upload(server, b"%d" % each) for each in range(3)])
        listed = (await server.http.get("/v1/files?order=asc&limit=2")).json()
        assert (len(listed["data"]), listed["has_more"]) == (2, True)
        rest = (await server.http.get(f"/v1/files?order=asc&after={listed['last_id']}")).json()
        assert (len(rest["data"]), rest["has_more"]) == (1, False)
        assert sorted(each["id"] for each in listed["data"] + rest["data"]) == names
        assert (await server.http.get("/v1/files?purpose=batch_output")).json()["data"] == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            refused = await server.http.get(f"/v1/files?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await server.http.get("/v1/batches?limit=101")).json()["error"]["param"] == "limit"


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


async def test_a_storage_that_cannot_be_written_is_a_503(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(file_storage_path=tmp_path / "file" / "folder") as server:
        refused = await server.http.post("/v1/files", **form(purpose=b"batch", file=b"a"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "file_storage_failed")
