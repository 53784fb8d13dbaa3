"""Drafters of other distributions: found by entry point, checked, served, and never in the way of other algorithms."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from args_world import manifest, model, resolved, user
from engine_small import Small, engine, make_small, message
from every import every
from host_transfers import HOST_TRANSFERS
from platform_plugins import write_plugin

from srv.args.config import ARGUMENTS
from srv.args.rules.reserve import RESERVED_MEMORY
from srv.cli.main import main
from srv.errors import PluginError, Refusal
from srv.planning.steps import draft_count
from srv.speculative.algorithm import READABLE, VERIFIED_TOKENS, DraftSizes
from srv.speculative.drafter import DrafterContext
from srv.speculative.load_drafter import make_drafter
from srv.speculative.registry import find, further_names

NAME = "SUCCESSOR"
COPIED = "speculative_ngram_branch_length"
FACTS = f"""
from srv.speculative.algorithm import DraftAlgorithm


def device_bytes(sizes):
    return 8 * sizes.vocab_size


ALGORITHM = DraftAlgorithm(
    name="{NAME}",
    drafter="plugin_acme.drafter:Successor",
    reads=("{COPIED}",),
    defaults={{"speculative_num_draft_tokens": 6, "{COPIED}": 3}},
    max_drafts=lambda values: values["{COPIED}"],
    device_bytes=device_bytes,
)
"""
# What followed a token when a row last had it is looked up in a table, which is new for each row.
DRAFTER = """
import torch


class Successor:
    def __init__(self, context):
        self.values = context.values
        self.identity = torch.arange(context.sizes.vocab_size, device=context.transfers.device)

    def propose(self, tokens, lengths, count):
        rows, width = tokens.shape
        table = self.identity.repeat(rows, 1)
        places = torch.arange(width - 1, device=tokens.device)
        for place in range(width - 1):
            known = tokens[:, place : place + 1].long()
            following = tokens[:, place + 1 : place + 2].long()
            table.scatter_(1, known, torch.where(lengths[:, None] > place + 1, following, table.gather(1, known)))
        token = tokens.gather(1, lengths[:, None] - 1).long()
        drafts = []
        for _ in range(count):
            token = table.gather(1, token)
            drafts.append(token)
        return torch.cat(drafts, 1)
"""
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one algorithm. One that was installed before under the same name is hidden."""

    def write(source: str = FACTS, name: str = "acme", entry: str = NAME, drafter: str = DRAFTER) -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        sys.modules.pop(f"plugin_{name}.drafter", None)
        write_plugin(folder, name, source, group="srv.drafters", entry=entry, attribute="ALGORITHM")
        (folder / f"plugin_{name}" / "drafter.py").write_text(drafter)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return write


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("model"))


def test_output_is_that_without_drafts_and_drafts_are_accepted(install: Install, small: Small) -> None:
    install()
    prompts = [small.prompts[index] * 2 for index in (3, 5, 1)]
    kinds = [{}, {"temperature": 0.8, "seed": 11}, {"repetition_penalty": 1.3}]
    requests = [message(f"request {n}", prompts[n], 48, **kind) for n, kind in enumerate(kinds)]
    requests.append(message("five", [7, 8], 24, logit_bias=((5, 100.0),)))
    with engine(small, pool=4096) as plain:
        expected = [result.tokens for result in plain.generate(requests)]
        assert plain.stats().drafts_proposed == 0
        steps = plain.stats().steps
    for flags in ({}, {VERIFIED_TOKENS: 2}):
        with engine(small, pool=4096, speculative_algorithm=NAME, **flags) as served:
            assert [result.tokens for result in served.generate(requests)] == expected
            stats = served.stats()
        assert 0 < stats.drafts_accepted <= stats.drafts_proposed
        assert stats.steps < steps


def test_the_description_decides_defaults_memory_and_what_is_read(install: Install) -> None:
    install()
    result = resolved(user(speculative_algorithm=NAME), manifest(), model=model())
    config = result.config.speculative
    assert (config.speculative_num_draft_tokens, config.speculative_ngram_branch_length) == (6, 3)
    assert draft_count(result.config) == 3
    assert result.provenance[COPIED].reason == "it suits the drafter"
    assert draft_count(resolved(user(speculative_algorithm=NAME, **{COPIED: 9}), model=model()).config) == 5

    def reserved(algorithm: str) -> float:
        flags = {"speculative_algorithm": algorithm, VERIFIED_TOKENS: 4}
        parts = resolved(user(**flags), manifest(), model=model()).quantities[RESERVED_MEMORY].parts
        return next(part.amount for part in parts if part.name == "drafter")

    assert reserved(NAME) - reserved("NGRAM") == 8 * model().vocab_size
    unread = {"speculative_ngram_min_match_window_size": 2}
    with pytest.raises(Refusal, match="the drafter SUCCESSOR does not read it") as caught:
        resolved(user(speculative_algorithm=NAME, **unread), model=model())
    assert [rejection.code for rejection in caught.value.rejections] == ["other_algorithm"]
    resolved(user(speculative_algorithm="NGRAM", **unread), model=model())


def test_help_and_refusals_list_it(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    argument = ARGUMENTS["speculative_algorithm"]
    assert argument.implemented_choices == ("NGRAM",)
    install()
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert f"--speculative-algorithm {{NGRAM,{NAME}}}" in capsys.readouterr().out
    assert main(["args", "explain", "speculative_algorithm"]) == 0
    assert f"NGRAM | {NAME}\n" in capsys.readouterr().out
    with pytest.raises(Refusal, match=rf"Choose NGRAM, {NAME}\."):
        resolved(user(speculative_algorithm="EAGLE"))
    with pytest.raises(Refusal, match=f"must be one of NGRAM, EAGLE, EAGLE3, NEXTN, STANDALONE, {NAME}"):
        resolved(user(speculative_algorithm="OTHER"))


def test_arguments_that_a_drafter_may_read_are_all_that_are_implemented() -> None:
    group = [
        argument for argument in ARGUMENTS.values() if argument.group == "speculative" and not argument.arg.planned
    ]
    assert {argument.name for argument in group} == {"speculative_algorithm", VERIFIED_TOKENS, *READABLE}
    assert {argument.kind.base for argument in group} - {str} == {int}


def _modules_after(code: str, path: list[str]) -> list[str]:
    print_modules = "print(*sorted({'torch', 'transformers', 'stevedore'} & set(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}; {print_modules}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return process.stdout.split()


def test_it_is_found_without_torch_and_stevedore_is_imported_for_it_only(install: Install) -> None:
    code = "from srv.speculative.registry import find; import srv.args.resolve; assert find({name!r}) is not None"
    path = list(filter(None, sys.path))
    assert _modules_after(code.format(name="NGRAM"), path) == []
    folder = install()
    assert _modules_after(code.format(name="NGRAM"), [str(folder), *path]) == []
    assert _modules_after(code.format(name=NAME), [str(folder), *path]) == ["stevedore"]


@every(
    ("source", "fault"),
    [
        ("raise RuntimeError('half installed')", "importing it raised RuntimeError: half installed"),
        ("ALGORITHM = {}", "is dict, not a DraftAlgorithm"),
        (FACTS.replace(f'name="{NAME}"', 'name="OTHER"'), "SUCCESSOR: has a draft algorithm called 'OTHER'"),
        (FACTS.replace(":Successor", ""), "drafter: is 'plugin_acme.drafter', not"),
        (FACTS.replace("bytes=device_bytes", "bytes=8"), "device_bytes: is not a function"),
        (FACTS.replace(f'("{COPIED}",)', f'"{COPIED}"'), "reads: is 'speculative_ngram_branch_length'"),
        (FACTS.replace(f'("{COPIED}",)', '("page_size",)'), "reads: names 'page_size', which is none of speculative_"),
        (FACTS.replace(f'("{COPIED}",)', "()"), f"defaults: has a value for '{COPIED}', which is not in `reads`"),
    ],
)
def test_a_faulty_algorithm_is_refused_by_name(source: str, fault: str, install: Install) -> None:
    install(source)
    assert NAME in further_names()
    assert resolved(user(speculative_algorithm="NGRAM")) is not None, "another algorithm is affected"
    with pytest.raises(PluginError) as caught:
        resolved(user(speculative_algorithm=NAME))
    assert caught.value.distribution == "srv-acme"
    assert fault in str(caught.value)


@every(
    ("source", "fault"),
    [
        (FACTS.replace('tokens": 6', 'tokens": 99'), "defaults: has 99 for speculative_num_draft_tokens, which must"),
        (FACTS.replace('tokens": 6', "tokens\": '6'"), "has '6' for speculative_num_draft_tokens, which must be an"),
        (FACTS.replace("return 8", "return missing"), "SUCCESSOR.device_bytes: raised NameError"),
        (FACTS.replace("return 8", "return -8"), "SUCCESSOR.device_bytes: returned -"),
        (FACTS.replace("values: values", "values: 0 * values"), "SUCCESSOR.max_drafts: returned 0, not an integer"),
        (FACTS.replace('values["', 'values["no_'), "SUCCESSOR.max_drafts: raised KeyError"),
    ],
)
def test_faults_in_values_and_functions_are_attributed_to_it(source: str, fault: str, install: Install) -> None:
    install(source)
    with pytest.raises(PluginError, match="plugin srv-acme: ") as caught:
        draft_count(resolved(user(speculative_algorithm=NAME), manifest(), model=model()).config)
    assert fault in str(caught.value)


TOKENS, LENGTHS = torch.tensor([[5, 6, 5]], dtype=torch.int32), torch.tensor([3])


def _propose(count: int = 2, vocab_size: int = 9) -> list[list[int]]:
    algorithm = find(NAME)
    assert algorithm is not None
    context = DrafterContext({COPIED: 3}, 3, DraftSizes(1, 8, vocab_size), HOST_TRANSFERS)
    return make_drafter(algorithm, context).propose(TOKENS, LENGTHS, count).tolist()


@every(
    ("drafter", "fault"),
    [
        ("raise RuntimeError('no tables')", "importing plugin_acme.drafter:Successor raised RuntimeError: no tables"),
        (DRAFTER.replace("class Successor", "class Other"), "importing plugin_acme.drafter:Successor raised Attribute"),
        (DRAFTER.replace("def propose", "def suggest"), "is not a subclass of srv.speculative.drafter.Drafter"),
        (DRAFTER.replace("context.values", "context.missing"), "SUCCESSOR.drafter: raised AttributeError"),
        (DRAFTER.replace("width =", "width = 1 /"), "SUCCESSOR.drafter.propose: raised TypeError"),
        (DRAFTER.replace("range(count)", "range(count + 1)"), "propose: returned (torch.int64, (1, 3), device"),
        (DRAFTER.replace("cat(drafts, 1)", "cat(drafts, 1).int()"), "propose: returned (torch.int32, (1, 2), device"),
        (DRAFTER.replace("return torch.cat(drafts, 1)", "return None"), "propose: returned None, not (torch.int64"),
    ],
)
def test_faults_of_a_drafter_are_attributed_to_it(drafter: str, fault: str, install: Install) -> None:
    install(drafter=drafter)
    with pytest.raises(PluginError, match=f"plugin srv-acme: {NAME}.drafter") as caught:
        _propose()
    assert fault in str(caught.value)


def test_drafts_are_ids_of_the_vocabulary(install: Install) -> None:
    """A drafter that counts from another vocabulary costs time, and reads nothing beyond the embeddings."""
    install()
    assert _propose() == [[6, 5]]
    install(drafter=DRAFTER.replace("cat(drafts, 1)", "cat(drafts, 1) * 1000 - 5500"))
    assert _propose() == [[8, 0]]


def test_a_name_that_two_claim_is_refused(install: Install) -> None:
    install(FACTS.replace(f'name="{NAME}"', 'name="NGRAM"'), entry="NGRAM")
    with pytest.raises(PluginError) as caught:
        resolved(user(speculative_algorithm="NGRAM"))
    assert str(caught.value) == (
        "plugin srv and srv-acme: draft algorithm NGRAM: both claim this name. Uninstall srv-acme"
    )
    install(name="one")
    install(name="two")
    with pytest.raises(PluginError, match="srv-one and srv-two: draft algorithm SUCCESSOR: both claim this name"):
        find(NAME)
