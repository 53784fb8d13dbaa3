"""The line that tells an operator where the model runs."""

from __future__ import annotations

from srv.cli.launch import ready_text


def test_the_platform_is_named_if_its_device_has_the_name_of_another() -> None:
    assert ready_text("m", "cpu", "cpu", 1.25) == "m is ready on cpu after 1.2 s"
    assert ready_text("m", "npu", "npu:0", 2.0) == "m is ready on npu:0 after 2.0 s"
    assert ready_text("m", "toy", "cpu", 2.0) == "m is ready on platform toy (PyTorch device cpu) after 2.0 s"
