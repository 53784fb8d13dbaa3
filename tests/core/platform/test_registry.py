"""Discovery of plugins that are really installed, good and broken ones: each broken one is refused by name."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from platform_plugins import manifest_source, write_plugin

from srv import errors
from srv.errors import PluginError
from srv.platform.facts import Requires, Unfit
from srv.platform.registry import InstalledPlatform, find_backends, find_platforms


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refused(platform: InstalledPlatform) -> PluginError:
    assert platform.manifest is None
    assert platform.error is not None
    with pytest.raises(PluginError) as raised:
        _ = platform.loaded
    assert raised.value is platform.error
    return platform.error


def test_a_plugin_is_found_with_its_distribution(plugins: Path) -> None:
    write_plugin(plugins, "good", manifest_source("good"))
    platform = find_platforms()["good"]
    assert (platform.distribution, platform.version, platform.error) == ("srv-good", "3.2.1", None)
    assert platform.loaded.variants == ("one",)


def test_platform_is_loaded_once_and_on_first_access(plugins: Path) -> None:
    write_plugin(plugins, "wanted", manifest_source("wanted"))
    write_plugin(plugins, "unwanted", manifest_source("unwanted"))
    platforms = find_platforms()
    assert {"wanted", "unwanted"} <= set(platforms)
    assert platforms["wanted"] is platforms["wanted"]
    assert "plugin_wanted" in sys.modules
    assert "plugin_unwanted" not in sys.modules
    assert platforms.get("unknown") is None


def test_a_plugin_that_replaces_a_whole_module_of_core_is_refused_and_undone(plugins: Path) -> None:
    import srv.platform.host

    original = srv.platform.host
    patch = "import sys, types\nsys.modules['srv.platform.host'] = types.ModuleType('srv.platform.host')"
    write_plugin(plugins, "swapper", manifest_source("swapper", after=patch))
    assert refused(find_platforms()["swapper"]).member == "srv.platform.host"
    assert sys.modules["srv.platform.host"] is original


def test_plugin_that_cannot_be_imported_does_not_affect_others(plugins: Path) -> None:
    write_plugin(plugins, "fine", manifest_source("fine"))
    write_plugin(plugins, "boom", "raise AssertionError('half written')")
    write_plugin(plugins, "quits", "raise SystemExit(3)")
    platforms = find_platforms()
    assert platforms["fine"].error is None
    assert "AssertionError: half written" in refused(platforms["boom"]).reason
    assert refused(platforms["boom"]).distribution == "srv-boom"
    assert "SystemExit" in refused(platforms["quits"]).reason


def test_two_distributions_that_claim_one_name_are_both_named(plugins: Path) -> None:
    write_plugin(plugins, "same", manifest_source("same"), distribution="srv-first", package="plugin_first")
    write_plugin(plugins, "same", manifest_source("same"), distribution="srv-second", package="plugin_second")
    error = refused(find_platforms()["same"])
    assert "srv-first and srv-second" in str(error)


def test_an_unknown_member_is_named(plugins: Path) -> None:
    write_plugin(plugins, "extra", manifest_source("extra", more="graph_pool=3"))
    error = refused(find_platforms()["extra"])
    assert error.member == "Manifest.graph_pool"
    assert error.distribution == "srv-extra"


def test_object_that_is_not_a_manifest_is_refused(plugins: Path) -> None:
    write_plugin(plugins, "dict", "MANIFEST = {'name': 'dict'}")
    assert "not a srv.platform.manifest.Manifest" in refused(find_platforms()["dict"]).reason


def test_a_wrong_api_range_is_refused(plugins: Path) -> None:
    write_plugin(plugins, "newer", manifest_source("newer").replace("api=(2, 1)", "api=(9, 4)"))
    error = refused(find_platforms()["newer"])
    assert error.member == "Manifest.api"
    assert "9.4" in error.reason
    assert "newer srv" in error.remedy


def test_a_plugin_that_patches_core_is_refused_and_undone(plugins: Path) -> None:
    original = errors.Rejection.__str__
    patch = "import srv.errors\nsrv.errors.Rejection.__str__ = lambda self: 'mine'"
    write_plugin(plugins, "patcher", manifest_source("patcher", after=patch))
    error = refused(find_platforms()["patcher"])
    assert error.member == "srv.errors.Rejection.__str__"
    assert "must not patch core" in error.remedy
    assert errors.Rejection.__str__ is original


def test_a_plugin_that_replaces_a_function_of_core_is_refused_and_undone(plugins: Path) -> None:
    import srv.platform.choose

    original = srv.platform.choose.choose
    patch = "import srv.platform.choose as c\nimport functools\nc.choose = functools.wraps(c.choose)(lambda *a: None)"
    write_plugin(plugins, "wrapper", manifest_source("wrapper", after=patch))
    assert refused(find_platforms()["wrapper"]).member == "srv.platform.choose.choose"
    assert srv.platform.choose.choose is original


@pytest.mark.parametrize("statement", ["import torch", "try:\n    import torch.nn\nexcept ImportError:\n    pass"])
def test_a_manifest_that_imports_torch_is_refused(tmp_path: Path, statement: str) -> None:
    """In a separate process, because another test may have imported torch in this one."""
    write_plugin(tmp_path, "heavy", manifest_source("heavy", after=statement))
    script = """
        import sys
        from srv.platform.registry import find_platforms
        found = find_platforms()
        print(found["heavy"].error)
        assert "torch" not in sys.modules
        assert not any(found[name].error for name in found if name != "heavy")
    """
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(script)}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "plugin srv-heavy" in process.stdout
    assert "imports torch" in process.stdout


BACKEND = """
from srv.platform.facts import BackendSpec, Requires
SPEC = BackendSpec("{name}", 7, lambda context: Requires({{"page_size": (32,)}}), "plugin.attention:Backend", "{order}")
"""


def write_backend(folder: Path, name: str, source: str, distribution: str = "srv-fast") -> None:
    write_plugin(
        folder,
        name,
        source,
        distribution=distribution,
        package=f"backend_{name}_{distribution.replace('-', '_')}",
        group="srv.backends.attention",
        entry=f"cpu.{name}",
        attribute="SPEC",
    )


def test_a_third_party_backend_is_found_for_its_platform_only(plugins: Path) -> None:
    write_backend(plugins, "fast", BACKEND.format(name="fast", order="page_token_head"))
    (spec,) = find_backends("cpu", "attention")
    assert (spec.name, spec.priority) == ("fast", 7)
    assert spec.check(None) == Requires({"page_size": (32,)})  # type: ignore[arg-type]
    assert find_backends("other", "attention") == ()
    assert find_backends("cpu", "sampling") == ()


def test_bad_third_party_backend_never_fits_and_has_a_reason(plugins: Path) -> None:
    write_backend(plugins, "odd", BACKEND.format(name="odd", order=""), distribution="srv-odd")
    write_backend(plugins, "fast", BACKEND.format(name="fast", order="page_token_head"))
    specs = {spec.name: spec for spec in find_backends("cpu", "attention")}
    verdict = specs["odd"].check(None)  # type: ignore[arg-type]
    assert isinstance(verdict, Unfit)
    assert "srv-odd" in verdict.reasons[0]
    assert "kv_order" in verdict.reasons[0]
    assert isinstance(specs["fast"].check(None), Requires)  # type: ignore[arg-type]


def test_two_backends_of_one_name_never_fit(plugins: Path) -> None:
    for distribution in ("srv-left", "srv-right"):
        write_backend(plugins, "twin", BACKEND.format(name="twin", order="page_token_head"), distribution)
    (spec,) = find_backends("cpu", "attention")
    verdict = spec.check(None)  # type: ignore[arg-type]
    assert isinstance(verdict, Unfit)
    assert "srv-left and srv-right" in verdict.reasons[0]


def test_an_unknown_family_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="is not a backend family"):
        find_backends("cpu", "weather")


def test_a_backend_cannot_take_the_name_of_one_of_the_platform(plugins: Path) -> None:
    write_backend(plugins, "native", BACKEND.format(name="native", order="page_token_head"))
    (spec,) = find_backends("cpu", "attention")
    verdict = spec.check(None)  # type: ignore[arg-type]
    assert isinstance(verdict, Unfit)
    assert "srv and srv-fast: backend cpu.native: both claim this name" in verdict.reasons[0]
