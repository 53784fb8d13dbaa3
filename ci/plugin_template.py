"""Renews the template of `srv plugin new` from plugins/toy_device, whose names become those to be filled in.

    python ci/plugin_template.py

The README is the template's own: it speaks to the maker of a new platform. Everything else is copied, so that what
`srv plugin new` makes is what is served and tested as the toy device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "plugins" / "toy_device"
TEMPLATE = ROOT / "core" / "srv" / "plugin_template"
OWN = "README.md"
WORDS = (
    ("srv_toy_device", "{{package}}"),
    ("srv-toy-device", "{{distribution}}"),
    ("TOY", "{{NAME}}"),
    ("Toy", "{{Name}}"),
    ("toy", "{{name}}"),
)


def source_files() -> list[Path]:
    """The toy device's files as the version control system knows them, new ones among them; not its README."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "."]
    listed = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True).stdout.split()
    return [Path(each) for each in sorted(listed) if each != OWN and (SOURCE / each).is_file()]


def template_path(path: Path) -> Path:
    """Where a file of the toy device lies in the template."""
    return Path(str(path).replace("srv_toy_device", "PACKAGE").replace("toy", "NAME") + ".template")


def template_text(text: str) -> str:
    """A text of the toy device, with its names taken out."""
    for word, placeholder in WORDS:
        text = text.replace(word, placeholder)
    return text


def main() -> int:
    for each in TEMPLATE.iterdir() if TEMPLATE.is_dir() else ():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != f"{OWN}.template":
            each.unlink()
    for path in source_files():
        target = TEMPLATE / template_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(template_text((SOURCE / path).read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{TEMPLATE} is equal to {SOURCE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
