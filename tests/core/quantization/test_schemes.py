"""What a scheme says that a matrix takes."""

from __future__ import annotations

from srv.quantization.schemes import Blocks, Fp8, Matrix


def test_fp8_has_a_scale_for_the_rest_of_a_block() -> None:
    weight, scale = Fp8((128, 128)).tensors(Matrix(("q",), (300,), 200))
    assert (weight.shape, weight.dtype, weight.bytes) == ((300, 200), "float8_e4m3fn", 60_000)
    assert (scale.shape, scale.dtype, scale.bytes) == ((3, 2), "float32", 24)
    assert Fp8().tensors(Matrix(("q",), (300,), 200))[1].shape == (300, 1)


def test_fp8_divides_fused_layers_behind_one_that_ends_within_a_block() -> None:
    shapes = [tensor.shape for tensor in Fp8((128, 128)).tensors(Matrix(("q", "k", "v"), (256, 64, 128), 128))]
    assert shapes == [(320, 128), (3, 1), (128, 128), (1, 1)]


def test_blocks_that_are_repacked_take_at_most_what_is_stated() -> None:
    matrix = Matrix(("gate", "up"), (64, 64), 256)
    scheme = Blocks(("Q4_0", "Q6_K"))
    assert scheme.bytes(matrix) == 64 * 144 + 64 * 210
    assert scheme.prepared_bytes(matrix) == 64 * 256 * 9 // 16 + 64 * 256 * 18 // 16
    columns = Blocks(("Q4_0",), ordered=True).tensors(matrix)[-1]
    assert (columns.shape, columns.bytes, columns.resident) == ((2, 256), 2 * 256 * 8, True)
