"""Write real plugins: a package with a `.dist-info`, in a folder that is then put on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

MANIFEST = """
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv.platform.manifest import Manifest, ProbeResult

DEVICE = DeviceFacts("one", 1 << 30, 2, "Example device", {{"driver": "1.0"}}, ("fast",))
FACTS = PlatformFacts(lambda device: frozenset({{"paged_kv"}}), {{"one": DEVICE}})


def probe(context):
    {probe}


def create(context):
    {create}


MANIFEST = Manifest(
    name="{name}", api=(2, 1), core=">=0.1,<1", variants=("one",), priority={priority}, summary="example",
    facts=FACTS, probe=probe, create=create, {more}
)
{after}
"""

AVAILABLE = "return ProbeResult(True, device=DEVICE)"


def manifest_source(
    name: str,
    *,
    probe: str = AVAILABLE,
    create: str = "raise RuntimeError('no device code')",
    priority: int = 1,
    more: str = "",
    after: str = "",
) -> str:
    return MANIFEST.format(name=name, probe=probe, create=create, priority=priority, more=more, after=after)


def write_plugin(
    folder: Path,
    name: str,
    source: str,
    *,
    distribution: str | None = None,
    package: str | None = None,
    group: str = "srv.platforms",
    entry: str | None = None,
    attribute: str = "MANIFEST",
) -> None:
    """Write a distribution `srv-<name>` with one module and one entry point.

    A package of the same name that an earlier test of this process imported is removed from `sys.modules`.
    """
    distribution = distribution or f"srv-{name}"
    package = package or f"plugin_{name}"
    for module in (package, f"{package}.manifest"):
        sys.modules.pop(module, None)
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("")
    (folder / package / "manifest.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-3.2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.2.1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {package}.manifest:{attribute}\n")


def write_imagined_plugin(folder: Path, manifest: str, name: str = "imagined") -> None:
    """Write a distribution with a platform of `args_world`. `manifest`: an expression, "manifest(backend('plain'))"."""
    names = "CAPABLE, backend, manifest"
    source = (
        f"from dataclasses import replace\n\nfrom args_world import {names}\nfrom srv.platform.facts import Support\n\n"
    )
    write_plugin(folder, name, f"{source}MANIFEST = replace({manifest}, name={name!r})\n")
