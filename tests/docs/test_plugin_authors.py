"""The guide for authors of platforms: its snippets run, and its numbers are those of this version."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS, HostMemory

from srv.args.resolve import resolve
from srv.args.statement import Resolved
from srv.cli.main import main
from srv.cli.plugin import PLATFORM, page, pages, template
from srv.errors import Refusal
from srv.platform import API_VERSION
from srv.platform.checks import check_manifest
from srv.platform.facts import Unfit
from srv.platform.interface import BackendContext
from srv.platform.manifest import Manifest
from srv.testing.conformance.facts import small_model
from srv.testing.conformance.sampler import SampledRow, logits, make_batch
from srv.testing.conformance.values import user_input, user_statement
from srv_toy_device.manifest import MANIFEST as TOY
from srv_toy_device.sampling import ToySampling

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "plugin-authors.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def module() -> dict[str, Any]:
    """The names of all snippets, which are one module. The toy device stands for the reader's package."""
    source = (
        "\n".join(SNIPPETS).replace("srv_mychip", "srv_toy_device").replace("Mychip", "Toy").replace("mychip1", "toy1")
    )
    names: dict[str, Any] = {"__name__": "srv_mychip.snippets"}
    exec(compile(source, str(GUIDE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def manifest(module: dict[str, Any]) -> Manifest:
    """The toy device's plugin with every declaration of the guide."""
    backends = TOY.facts.backends
    facts = dataclasses.replace(
        TOY.facts,
        defaults=(*TOY.facts.defaults, *module["DEFAULTS"]),
        constraints=module["CONSTRAINTS"],
        support=module["SUPPORT"],
        contributions=(*TOY.facts.contributions, *module["CONTRIBUTIONS"]),
        backends={
            "attention": (*backends["attention"], module["DECODE"]),
            "sampling": (*backends["sampling"], module["HOST"]),
        },
    )
    return check_manifest(dataclasses.replace(TOY, facts=facts), "srv-toy-device", "0.1.0", "toy")


def resolved(manifest: Manifest, head_dim: int = 64, **values: Any) -> Resolved:
    statements = [user_statement(name, value) for name, value in values.items()]
    device = manifest.facts.profiles["toy1"]
    return resolve(user_input(*statements), manifest=manifest, device=device, model=small_model(head_dim=head_dim))


def test_the_declarations_do_what_the_guide_says(manifest: Manifest) -> None:
    result = resolved(manifest)
    assert result.backends["decode_attention_backend"].spec.name == "mychip_decode"
    assert result.backends["prefill_attention_backend"].spec.name == "toy_paged"
    assert result.config.memory.page_size == 64
    assert result.config.graphs.graph_max_batch_size == 8
    assert resolved(manifest, disable_graphs=True).config.graphs.graph_max_batch_size is None
    assert "split workspace" in {part.name for part in result.quantities["reserved_memory"].parts}
    for head_dim, values in ((80, {}), (64, {"page_size": 16})):
        assert resolved(manifest, head_dim, **values).backends["decode_attention_backend"].spec.name == "toy_paged"


def test_what_the_guide_refuses_is_refused_with_its_reason(manifest: Manifest) -> None:
    for values, reason in (
        ({"graph_max_batch_size": 64}, "this generation records steps of at most 32 rows"),
        ({"kv_cache_dtype": "int8"}, "its kernels read 16 bits"),
        ({"attention_backend": "mychip_decode"}, "it fits only decode_attention_backend here"),
    ):
        with pytest.raises(Refusal, match=reason):
            resolved(manifest, **values)


def test_the_host_sampler_gives_the_tokens_of_the_device(module: dict[str, Any]) -> None:
    kit: Any = type("Kit", (), {"device": torch.device("cpu")})
    context = BackendContext(HostMemory(), kit.device, None, 4, HOST_TRANSFERS)  # type: ignore[arg-type]
    rows = [SampledRow(logits(50, seed), top_k=seed) for seed in range(4)]
    batch = make_batch(kit, rows, np.linspace(0.1, 0.9, 4))
    assert module["HostSampling"](context).sample(batch).tolist() == ToySampling(context).sample(batch).tolist()


def test_a_reason_names_the_value(module: dict[str, Any]) -> None:
    context: Any = type("Context", (), {"model": small_model(head_dim=80)})
    assert module["check_decode"](context) == Unfit(("head_dim 80 is not a multiple of 64",))


def test_versions_and_counts_are_the_present_ones() -> None:
    text, present = GUIDE.read_text(), ".".join(map(str, API_VERSION))
    versions = re.findall(
        r"contract (?:version )?(\d+\.\d+)|^(\d+\.\d+)   the present|api is (\d+\.\d+)", text, re.MULTILINE
    )
    assert {one for match in versions for one in match if one} == {present}
    assert f"api = {API_VERSION}" in text
    assert f"srv-mychip: {len(template(PLATFORM))} files." in text


def test_the_pages_can_be_printed_without_a_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    for name in pages():
        assert page(name) == GUIDE.with_name(f"{name}.md").read_text()
    assert main(["plugin", "docs"]) == 0
    assert capsys.readouterr().out == GUIDE.read_text()
