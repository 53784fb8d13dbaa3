"""`srv plugin new`: names are checked, and the generated package is the toy device with other names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from srv.cli.families import FAMILIES
from srv.cli.main import main
from srv.cli.plugin import EXAMPLE, Names, rendered

ROOT = Path(__file__).resolve().parents[3]
(PLATFORM,) = (family for family in FAMILIES if family.kind == "platform")
CODE = "srv_toy_device"


def test_the_code_is_that_of_the_toy_device_and_the_wheel_has_it() -> None:
    folder = ROOT / "plugins" / "toy_device"
    files = dict(rendered(Names("toy", CODE, "srv-toy-device"), PLATFORM))
    code = {path: (folder / path).read_text() for path in files if (folder / path).is_file()}
    assert len([path for path in code if path.startswith(CODE)]) == len([*(folder / CODE).rglob("*.py")])
    del code["pyproject.toml"], code["README.md"]
    assert code == {path: files[path] for path in code}
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    included = {path: name for path, name in hatch["force-include"].items() if path.startswith("plugins/")}
    assert included == {f"plugins/toy_device/{path}": f"srv/plugin_kinds/platform/{path}" for path in EXAMPLE}


def test_no_name_of_the_toy_device_is_left() -> None:
    texts = dict(rendered(Names("acme", "srv_acme", "srv-acme"), PLATFORM))
    assert [path for path, text in texts.items() if "toy" in text.lower() or "toy" in path] == []


def test_every_name_is_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "my_chip", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "srv-my-chip"
    texts = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "pyproject.toml", "srv_my_chip/manifest.py", "tests/test_my_chip_limits.py"} <= texts.keys()
    assert [path for path, text in texts.items() if "{{" in text or "PACKAGE" in path] == []
    assert '"my_chip" = "srv_my_chip.manifest:MANIFEST"' in texts["pyproject.toml"]
    assert 'name = "srv-my-chip"' in texts["pyproject.toml"]
    assert "class MyChipPlatform" in texts["srv_my_chip/platform.py"]
    assert 'MEMORY_VARIABLE = "SRV_MY_CHIP_MEMORY"' in texts["srv_my_chip/settings.py"]
    assert "srv launch --device my_chip" in capsys.readouterr().out


def test_the_package_is_found_and_its_probe_answers(tmp_path: Path) -> None:
    """With a `.dist-info` as an installer writes it, in a process that finds the package only through it."""
    assert main(["plugin", "new", "acme", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "srv-acme"
    info = folder / "srv_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: srv-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[srv.platforms]\nacme = srv_acme.manifest:MANIFEST\n")
    program = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from srv.platform.probe import probe\n"
        "from srv.platform.registry import find_platforms\n"
        "found = find_platforms()['acme']\n"
        "print(found.distribution, found.loaded.variants, probe(found).available)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout.strip() == "srv-acme ('acme1',) True", process.stderr


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("2chip", "bad_name", "it is not a lower-case Python identifier"),
        ("my-chip", "bad_name", "it is not a lower-case Python identifier"),
        ("Chip", "bad_name", "it is not a lower-case Python identifier"),
        ("class", "bad_name", "it is not a lower-case Python identifier"),
        ("chip2", "bad_name", "names of PyTorch devices have only letters"),
        ("cpu", "name_taken", "provides a platform of this name"),
        ("kernels", "name_taken", "a package srv_kernels is already installed"),
        ("memory", "name_taken", "already uses this name"),
        ("vulkan", "name_taken", "already uses this name"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: str, words: str
) -> None:
    assert main(["plugin", "new", name, "--into", str(tmp_path)]) == 2
    refusal = capsys.readouterr().err
    assert f"[{code}]" in refusal
    assert words in refusal
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "srv-acme").mkdir()
    assert main(["plugin", "new", "acme", "--into", str(tmp_path)]) == 2
    assert "[folder_exists]" in capsys.readouterr().err
    assert list((tmp_path / "srv-acme").iterdir()) == []
