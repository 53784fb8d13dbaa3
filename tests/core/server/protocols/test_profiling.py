"""The folders of `/start_profile`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from server_support import serving

from srv.server.protocols.operators.profiling import MAX_FOLDERS

pytestmark = pytest.mark.anyio


async def test_a_server_makes_few_folders_until_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with serving() as server:
        for _ in range(MAX_FOLDERS):
            assert (await server.post("/start_profile")).status_code == 200
        refused = await server.post("/start_profile")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "profile_refused")
        assert str(tmp_path) in refused.json()["error"]["message"]
        folders = list(tmp_path.iterdir())
        assert len(folders) == MAX_FOLDERS
        folders[0].rmdir()
        assert (await server.post("/start_profile")).status_code == 200
