"""Regenerates the template of `srv plugin new` from plugins/toy_device, with placeholders for its names.

    python ci/plugin_template.py

The template has its own README, written for the author of a new platform. All other files are copied, so that
`srv plugin new` creates code that is tested as the toy device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "plugins" / "toy_device"
TEMPLATE = ROOT / "core" / "srv" / "plugin_template"
README = "README.md"
PLACEHOLDERS = (
    ("srv_toy_device", "{{package}}"),
    ("srv-toy-device", "{{distribution}}"),
    ("TOY", "{{NAME}}"),
    ("Toy", "{{Name}}"),
    ("toy", "{{name}}"),
)


def source_files() -> list[Path]:
    """The toy device's files that git does not ignore, except its README."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "."]
    listed = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.split()
    return [Path(each) for each in sorted(listed) if each != README and (SOURCE / each).is_file()]


def template_path(path: Path) -> Path:
    """The path in the template of a file of the toy device."""
    return Path(str(path).replace("srv_toy_device", "PACKAGE").replace("toy", "NAME") + ".template")


def template_text(text: str) -> str:
    """A text of the toy device, with placeholders for its names."""
    for name, placeholder in PLACEHOLDERS:
        text = text.replace(name, placeholder)
    return text


def main() -> int:
    for each in TEMPLATE.iterdir() if TEMPLATE.is_dir() else ():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != f"{README}.template":
            each.unlink()
    for path in source_files():
        target = TEMPLATE / template_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(template_text((SOURCE / path).read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{TEMPLATE} is up to date with {SOURCE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
