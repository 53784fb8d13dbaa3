"""Cards on the PCI bus, compared by each platform's probe with driver and torch, on machines made of files."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from every import every
from rich.console import Console

from srv.cli.diagnosis import Diagnosis, ExaminedPlatform, PlatformChoice
from srv.cli.doctor_text import show
from srv.platform.choose import choose, unused_cards
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import ProbeResult
from srv.platform.pci import ACCELERATOR, DISPLAY, cards
from srv.platform.registry import find_platforms
from srv_cuda import probe as cuda
from srv_gpu.cards import Fault
from srv_npu import probe as npu
from srv_rocm import probe as rocm
from srv_xpu import probe as xpu

GIB = 1 << 30
H100 = ("10de", "2330", "030200")
RADEON = ("1002", "744c", "030000")
RADEON_AUDIO = ("1002", "ab30", "040300")
RYZEN = ("1002", "164e", "030000")
INSTINCT = ("1002", "74a1", "120000")
BATTLEMAGE = ("8086", "e20b", "030000")
MAX_1550 = ("8086", "0bd5", "038000")
ALCHEMIST = ("8086", "56a0", "030000")
TIGER_LAKE = ("8086", "9a49", "030000")
ASCEND = ("19e5", "d802", "120000")
HUAWEI_BMC = ("19e5", "1711", "030000")
BRIDGE = ("8086", "0d57", "060000")

CPU_TORCH: dict[str, str | None] = {"cuda": None, "hip": None, "xpu": None}
CUDA_TORCH = {**CPU_TORCH, "cuda": "12.8"}
ROCM_TORCH = {**CPU_TORCH, "hip": "6.4.43482"}
XPU_TORCH = {**CPU_TORCH, "xpu": "20250302"}
NO_DRIVER = Fault("no driver: /dev/it does not exist", "Install it", "driver_missing")


def bus(root: Path, *devices: tuple[str, str, str]) -> Path:
    for number, (vendor, product, code) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:{number + 1:02x}:00.0"
        folder.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("device", product), ("class", code)):
            (folder / name).write_text(f"0x{value}\n")
    return root


def test_cards_are_display_controllers_and_accelerators_of_a_vendor(tmp_path: Path) -> None:
    root = bus(tmp_path, BRIDGE, RADEON, RADEON_AUDIO, H100, INSTINCT)
    (root / "sys/bus/pci/devices/0000:77:00.0").mkdir()  # a device whose files cannot be read
    assert [str(card) for card in cards(0x1002, root)] == ["1002:744c at 0000:02:00.0", "1002:74a1 at 0000:05:00.0"]
    assert [card.base_class for card in cards(0x1002, root)] == [DISPLAY, ACCELERATOR]
    assert cards(0x8086, root) == ()
    assert cards(0x1002, tmp_path / "nowhere") == ()


def rocm_result(root: Path, build: dict[str, str | None], driver: Fault | None = None) -> ProbeResult:
    return rocm.examine(rocm.AMD.find(root), build, driver, lambda: DeviceFacts("gfx1100", 24 * GIB, 1, "RX 7900"))


def cuda_result(root: Path, build: dict[str, str | None], driver: Fault | None = None) -> ProbeResult:
    nvml = cuda.Driver((12, 8), (("NVIDIA H100", 80 * GIB, 9, 0),))
    return cuda.examine(cuda.NVIDIA.find(root), build, driver, lambda: nvml)


def xpu_result(root: Path, build: dict[str, str | None], driver: Fault | None = None) -> ProbeResult:
    return xpu.examine(
        xpu.INTEL.find(root), build, driver, lambda variant: DeviceFacts(variant, 12 * GIB, 1, "Arc B580")
    )


AMD_HERE = "there is an AMD GPU (1002:744c at 0000:01:00.0), but "


@every(
    ("result", "card", "build", "driver", "code", "reason"),
    [
        (rocm_result, RADEON, CUDA_TORCH, None, "torch_without_rocm",
         f"{AMD_HERE}the installed torch is built for CUDA 12.8, not for ROCm"),
        (rocm_result, RADEON, CPU_TORCH, None, "torch_without_rocm",
         f"{AMD_HERE}the installed torch is built for CPUs only, not for ROCm"),
        (rocm_result, RADEON, ROCM_TORCH, NO_DRIVER, "driver_missing", f"{AMD_HERE}{NO_DRIVER.reason}"),
        (rocm_result, RADEON, CUDA_TORCH, NO_DRIVER, "torch_without_rocm",
         f"{AMD_HERE}the installed torch is built for CUDA 12.8, not for ROCm; {NO_DRIVER.reason}"),
        (cuda_result, H100, CPU_TORCH, None, "torch_without_cuda",
         "there is an NVIDIA H100, but the installed torch is built for CPUs only, not for CUDA"),
        (cuda_result, H100, ROCM_TORCH, None, "torch_without_cuda",
         "there is an NVIDIA H100, but the installed torch is built for ROCm 6.4.43482, not for CUDA"),
        (cuda_result, H100, CUDA_TORCH, NO_DRIVER, "driver_missing",
         f"there is an NVIDIA GPU (10de:2330 at 0000:01:00.0), but {NO_DRIVER.reason}"),
        (xpu_result, BATTLEMAGE, CPU_TORCH, None, "torch_without_xpu",
         "there is an Intel GPU (8086:e20b at 0000:01:00.0), but the installed torch is built for CPUs only,"
         " not for XPU"),
        (xpu_result, ALCHEMIST, XPU_TORCH, None, "no_device",
         "there is no Intel GPU of a supported generation: Intel GPU 8086:56a0 at 0000:01:00.0"),
    ],
)  # fmt: skip
def test_a_card_that_cannot_be_used_is_present_and_the_reason_says_why(
    tmp_path: Path,
    result: object,
    card: tuple[str, str, str],
    build: dict[str, str | None],
    driver: Fault | None,
    code: str,
    reason: str,
) -> None:
    assert callable(result)
    examined = result(bus(tmp_path, card), build, driver)
    assert (examined.available, examined.code, examined.reason) == (False, code, reason)
    assert len(examined.present) == 1
    assert examined.remedy
    if "torch" in code and driver is not None:
        assert examined.remedy.startswith("Uninstall that torch, and install one built for ")
        assert examined.remedy.endswith(". Install it")


@every(
    ("result", "card", "build"),
    [
        (rocm_result, RADEON, ROCM_TORCH),
        (rocm_result, INSTINCT, ROCM_TORCH),
        (cuda_result, H100, CUDA_TORCH),
        (xpu_result, BATTLEMAGE, XPU_TORCH),
        (xpu_result, MAX_1550, XPU_TORCH),
        (cuda_result, BRIDGE, CUDA_TORCH),  # a virtual machine that hides the bus
    ],
)
def test_a_card_with_its_driver_and_torch_is_available(
    tmp_path: Path, result: object, card: tuple[str, str, str], build: dict[str, str | None]
) -> None:
    assert callable(result)
    examined = result(bus(tmp_path, card), build)
    assert examined.available, examined.reason
    assert len(examined.present) == (card is not BRIDGE)


@every(("result", "build"), [(rocm_result, CUDA_TORCH), (cuda_result, ROCM_TORCH), (xpu_result, CPU_TORCH)])
def test_without_a_card_the_bus_is_named_and_nothing_is_present(
    tmp_path: Path, result: object, build: dict[str, str | None]
) -> None:
    assert callable(result)
    examined = result(bus(tmp_path, BRIDGE), build, NO_DRIVER)
    assert (examined.code, examined.present, examined.remedy) == ("driver_missing", (), "Install it")
    assert examined.reason.startswith("the PCI bus lists no ")
    assert "torch" not in examined.reason


def test_graphics_of_a_processor_are_named_and_not_taken_for_a_card(tmp_path: Path) -> None:
    root = bus(tmp_path, RYZEN, TIGER_LAKE)
    for result, without, product in ((rocm_result, ROCM_TORCH, "1002:164e"), (xpu_result, XPU_TORCH, "8086:9a49")):
        examined = result(root, without, NO_DRIVER)
        assert (examined.available, examined.present) == (False, ())
        assert f"graphics of the processor ({product} at" in examined.reason
    drawn = xpu_result(root, XPU_TORCH)
    assert (drawn.available, drawn.code) == (False, "no_device")
    assert "8086:9a49" in drawn.reason
    alone = rocm.examine(rocm.AMD.find(root), ROCM_TORCH, None, lambda: DeviceFacts("gfx1036", GIB, 1, "graphics"))
    assert (alone.available, alone.code) == (False, "integrated_graphics")
    assert "there is no other AMD GPU" in alone.reason
    beside = rocm_result(bus(tmp_path / "both", RYZEN, RADEON), ROCM_TORCH)
    assert (beside.available, len(beside.present)) == (True, 1)
    assert "HIP_VISIBLE_DEVICES" in beside.notes[0]


def test_the_management_controller_of_a_server_is_no_npu(tmp_path: Path) -> None:
    assert npu.present_cards(bus(tmp_path / "one", HUAWEI_BMC)) == ()
    present = npu.present_cards(bus(tmp_path / "two", HUAWEI_BMC, ASCEND))
    assert present == ("Ascend NPU 19e5:d802 at 0000:02:00.0",)
    part = npu.missing_part(tmp_path, False, present)
    assert part is not None
    assert (part.code, part.present) == ("torch_npu_missing", present)
    assert part.reason.startswith("there is an Ascend NPU 19e5:d802 at 0000:02:00.0, but torch_npu is not installed")
    assert "HDK" in part.remedy


@every(
    ("versions", "words"),
    [
        ({"torch": "2.8.0+xpu"}, None),
        ({"torch": "2.8.0+xpu", xpu.EXTENSION: "2.8.10+xpu"}, "2.8.10+xpu fits torch 2.8.0+xpu, and is imported"),
        ({"torch": "2.12.0+xpu", xpu.EXTENSION: "2.8.10+xpu"}, "is for torch 2.8, and is not used with torch 2.12.0"),
    ],
)
def test_intel_s_extension_is_used_with_its_own_torch_only(versions: dict[str, str], words: str | None) -> None:
    notes = xpu.extension_notes(DeviceFacts("pvc", GIB, 1, versions=versions))
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_an_automatic_choice_warns_of_a_card_that_it_leaves_unused(tmp_path: Path) -> None:
    platforms = {name: find_platforms()[name] for name in ("cpu", "rocm")}
    unused = rocm_result(bus(tmp_path, RADEON), CUDA_TORCH)
    results = {"cpu": ProbeResult(True, device=DeviceFacts("avx2", GIB, 1)), "rocm": unused}
    chosen = choose(None, platforms, lambda candidates, seconds: results)
    assert chosen.installed.name == "cpu"
    (note,) = chosen.notes
    assert note.startswith("AMD GPU 1002:744c at 0000:01:00.0 is not used: rocm: there is an AMD GPU")
    assert "built for CUDA 12.8, not for ROCm. Uninstall that torch" in note
    asked = choose("cpu", platforms, lambda candidates, seconds: {name: results[name] for name in candidates})
    assert asked.notes == ()


def test_the_doctor_marks_an_unused_card_as_a_warning(tmp_path: Path) -> None:
    unused, absent = rocm_result(bus(tmp_path, RADEON), CUDA_TORCH), xpu_result(tmp_path, CPU_TORCH, NO_DRIVER)
    platforms = find_platforms()
    examined = {name: ExaminedPlatform(platforms[name], probed) for name, probed in (("rocm", unused), ("xpu", absent))}
    warnings = unused_cards({"rocm": unused, "xpu": absent}, "cpu")
    output = StringIO()
    show(
        Diagnosis({"srv": "1"}, (), examined, PlatformChoice(None, "cpu", "it is the only one", unused=warnings)),
        Console(file=output, width=300),
    )
    rows = [line.split(maxsplit=2) for line in output.getvalue().splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["probe"]] == ["warning", "no"]
    (row,) = [row for row in rows if row[1:2] == ["unused"]]
    assert row[2].startswith("AMD GPU 1002:744c at 0000:01:00.0 is not used: rocm: there is an AMD GPU")


def test_the_kernel_drivers_of_amd_and_intel_are_looked_for(tmp_path: Path) -> None:
    device, render = tmp_path / "kfd", tmp_path / "dev" / "dri" / "renderD128"
    for fault in (rocm.missing_driver(device), xpu.missing_driver(tmp_path)):
        assert fault is not None
        assert fault.code == "driver_missing"
    device.touch()
    render.parent.mkdir(parents=True)
    render.touch()
    assert rocm.missing_driver(device) is None
    assert xpu.missing_driver(tmp_path) is None


def test_graphics_of_a_processor_with_a_driver_ask_for_no_other_torch(tmp_path: Path) -> None:
    """As on a desktop with a Ryzen processor, its driver, and a torch for an NVIDIA card."""
    result = rocm.examine(rocm.AMD.find(bus(tmp_path, RYZEN)), CUDA_TORCH, None, lambda: None)
    assert (result.available, result.code) == (False, "integrated_graphics")
    assert "there is no other AMD GPU" in result.reason
