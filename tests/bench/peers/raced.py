"""What is benchmarked: this project's commit, the model's sizes and weights, and the text for its perplexity."""

from __future__ import annotations

import subprocess
from pathlib import Path

import install
import perplexity
from catalogue import Peer
from floors import Shape


def commit(root: Path = install.ROOT) -> str | None:
    """The commit of a checkout, with "+" if tracked files differ from it; None outside a checkout.

    `docs` may differ, because the results are written there.
    """
    if not (root / ".git").exists():
        return None
    try:
        name = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def model_shape() -> Shape:
    from srv.models.locate import locate
    from srv.models.read import read_facts

    facts = read_facts(locate(None))
    return Shape(
        layers=facts.layers,
        hidden=facts.hidden_size,
        intermediate=int(facts.config["intermediate_size"]),
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        vocab=facts.vocab_size,
        weight_bytes=0,
    )


def weight_bytes(peer: Peer) -> int | None:
    """Bytes of all matrices that a step multiplies (layers and output layer), in the form that is multiplied."""
    from gguf import GGUFReader

    from srv.models.locate import demo_model

    file = demo_model() if peer.engine == "srv" else install.model_file(peer.weights)
    if not file.exists():
        return None
    tensors = {tensor.name: tensor for tensor in GGUFReader(str(file)).tensors if len(tensor.shape) == 2}
    if "output.weight" in tensors:  # otherwise the output layer shares the embedding
        tensors.pop("token_embd.weight", None)
    return sum(
        int(tensor.n_bytes) if peer.packed else peer.item_bytes * int(tensor.n_elements) for tensor in tensors.values()
    )


def text_tokens() -> list[int]:
    from srv.models.locate import locate
    from srv.models.read import read_facts
    from srv.server.text.tokenizer import load_text_processor

    return load_text_processor(read_facts(locate(None))).encode(perplexity.TEXT.read_text())
