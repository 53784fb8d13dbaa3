"""Deletes weight files that have been loaded. Torch-free.

In the cache of a hub library, files are links to blobs, which take the space:

    models--org--name/snapshots/COMMIT/model.safetensors ──► models--org--name/blobs/HASH

A blob belongs to the cache alone, which downloads it again for the next start; so it does for another commit with the
same blob, whose link then leads nowhere. The target of any other link is someone else's file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from srv.models.checkpoints.safetensors_header import read_checkpoint

logger = logging.getLogger(__name__)


def delete_weights(folder: Path) -> list[Path]:
    """Delete the weight files of a checkpoint, and return them.

    All other files stay: tokenizer and configuration are read later. Of a link, only the link is deleted, unless it is
    one to a blob of a hub library's cache, which is deleted with it. Files in a folder to which a link leads stay: that
    is not the folder of the checkpoint. These, and files that cannot be deleted, are logged.
    """
    checkpoint = read_checkpoint(folder)
    deleted = []
    for path in () if checkpoint is None else checkpoint.files:
        if not path.parent.resolve().is_relative_to(folder.resolve()):
            logger.warning("the weight file %s stays: it is not in the folder of the model", path)
            continue
        try:
            blob = _blob(path)
            path.unlink()
            if blob is not None:
                blob.unlink(missing_ok=True)
            deleted.append(path)
        except OSError as error:
            logger.warning("the weight file %s stays: it cannot be deleted (%s)", path, error.strerror)
    logger.info("deleted %d weight files of %s, which the next start needs again", len(deleted), folder)
    return deleted


def _blob(path: Path) -> Path | None:
    """The blob of a file in the cache of a hub library; None for any other file."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    root = next((parent.parent for parent in path.parents if parent.name == "snapshots"), None)
    return blob if root is not None and blob.parent == root.resolve() / "blobs" else None
