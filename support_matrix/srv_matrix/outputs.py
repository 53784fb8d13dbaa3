"""The files under `docs/support` in a checkout: written, and compared with what would be written now.

A page that is stale is no fault of the matrix: `srv matrix check` does not look at pages. CI compares them in a step of
its own (`make pages`), which names the one command that mends them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from srv_matrix import inventory
from srv_matrix.matrix import Matrix, read_matrix
from srv_matrix.pages import pages
from srv_matrix.repository import Repository

_SHOWN_LINES = 6  # of the diff of a stale page
_SHOWN_CHARACTERS = 160
REMEDY = (
    "make matrix && git add -A docs/support support_matrix/inventory.json "
    "&& git commit -m 'Regenerate the support pages'"
)


def write_outputs(repository: Repository) -> tuple[str, ...]:
    """Write the inventory and all pages, and remove pages that are no longer generated; returns what changed."""
    repository.inventory.write_text(inventory.to_json(inventory.observe_in_child()), encoding="utf-8")
    return write_pages(read_matrix(repository), repository.pages)


def write_pages(matrix: Matrix, folder: Path) -> tuple[str, ...]:
    """Write all pages, and remove files that are none; returns the names of those that changed."""
    generated = pages(matrix)
    folder.mkdir(parents=True, exist_ok=True)
    changed = [name for name, text in generated.items() if _read(folder / name) != text]
    for name in changed:
        (folder / name).write_text(generated[name], encoding="utf-8")
    for name in _extraneous(generated, folder):
        (folder / name).unlink()
        changed.append(name)
    return tuple(changed)


def stale_outputs(repository: Repository) -> list[str]:
    """What `write_outputs` would change, with the first lines of each difference. Writes nothing."""
    observed = {repository.inventory.name: inventory.to_json(inventory.observe_in_child())}
    generated = pages(read_matrix(repository))
    stale = [*differences(observed, repository.inventory.parent), *differences(generated, repository.pages)]
    return [
        *stale,
        *(
            f"{repository.pages.name}/{name} is not a page of the matrix"
            for name in _extraneous(generated, repository.pages)
        ),
    ]


def differences(generated: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A paragraph for each file of a folder that is missing or differs."""
    for name, text in generated.items():
        present = _read(folder / name)
        if present is None:
            yield f"{folder.name}/{name} is missing"
        elif present != text:
            diff = difflib.unified_diff(
                present.splitlines(), text.splitlines(), "committed", "generated", lineterm="", n=0
            )
            lines = [line[:_SHOWN_CHARACTERS] for line in list(diff)[2 : 2 + _SHOWN_LINES]]
            yield f"{folder.name}/{name} is stale\n    " + "\n    ".join(lines)


def _extraneous(generated: Mapping[str, str], folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*") if path.is_file() and path.name not in generated)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
