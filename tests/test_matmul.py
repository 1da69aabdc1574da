"""The kernels that stand in for torch's give the same numbers, and go when they are told to."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lit_align import matmul
from lit_align.errors import UserError

SIZE = 256  # above what is worthwhile

needs_onednn = pytest.mark.skipif(not matmul.is_offered(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def as_before():
    before = matmul.matmul_in_use()
    yield
    matmul.choose_matmul(before)


def layer_and_gradients(dtype=torch.float32, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, 2 * SIZE, bias=bias).to(dtype)
    rows = torch.randn(3, SIZE, SIZE, dtype=dtype, requires_grad=True)
    output = layer(rows)
    return output, *torch.autograd.grad(output.square().mean(), [rows, *layer.parameters()])


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_float64(bias):
    expected = layer_and_gradients(bias=bias)
    matmul.choose_matmul("onednn")
    found = layer_and_gradients(bias=bias)
    for ours, usual in zip(found, expected, strict=True):
        assert_close(ours, usual, rtol=1e-5, atol=1e-6 * usual.abs().max().item())
    assert any(not torch.equal(ours, usual) for ours, usual in zip(found, expected, strict=True))


@needs_onednn
def test_it_goes_without_a_trace():
    expected = layer_and_gradients()
    matmul.choose_matmul("onednn")
    assert matmul.choose_matmul("default") == "default"
    assert all(map(torch.equal, layer_and_gradients(), expected))


@needs_onednn
@pytest.mark.parametrize(
    "bias", [torch.ones(1).expand(SIZE), torch.arange(2.0 * SIZE)[::2]], ids=["expanded", "strided"]
)
def test_a_bias_with_gaps_is_read_right(bias):
    left, right = torch.randn(2, SIZE, SIZE).unbind()
    matmul.choose_matmul("onednn")
    found = torch.addmm(bias, left, right)
    assert_close(
        found.double(), bias.double() + left.double() @ right.double(), rtol=1e-4, atol=1e-3
    )


@needs_onednn
def test_twice_gives_the_same_bits():
    matmul.choose_matmul("onednn")
    assert all(map(torch.equal, layer_and_gradients(), layer_and_gradients()))


@needs_onednn
def test_float64_and_small_matrices_are_left_to_torch():
    small = torch.randn(8, 8)
    exact, little = layer_and_gradients(torch.float64), small @ small
    matmul.choose_matmul("onednn")
    assert all(map(torch.equal, layer_and_gradients(torch.float64), exact))
    assert torch.equal(small @ small, little)


@needs_onednn
def test_autocast_still_computes_in_bfloat16():
    matmul.choose_matmul("onednn")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(SIZE, SIZE)(torch.randn(SIZE, SIZE)).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_no_matrix_with_gaps_between_its_rows_reaches_onednn(turned, monkeypatch):
    """It would take a kernel that is thousands of times slower; on the left it does not."""
    given = []
    kernel = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        matmul.torch.ops.mkldnn,
        "_linear_pointwise",
        lambda left, weights, *rest: given.append(weights) or kernel(left, weights, *rest),
    )
    matmul.choose_matmul("onednn")
    gappy = torch.randn(SIZE, 3, SIZE)[:, 1]
    right = gappy.t() if turned else gappy
    expected = right.double().sum(0).float().expand(SIZE, -1)
    assert_close(torch.ones(SIZE, SIZE) @ right, expected, rtol=1e-4, atol=1e-3)
    weights = given[-1]
    assert weights.shape == right.t().shape
    assert weights.is_contiguous() or weights.t().is_contiguous()


@needs_onednn
def test_strided_and_empty_matrices_and_scaled_sums_are_multiplied_right():
    torch.manual_seed(0)
    strided = torch.randn(2 * SIZE, 2 * SIZE)[::2, ::2]
    expected = strided.double() @ strided.double().T
    matmul.choose_matmul("onednn")
    assert_close((strided @ strided.T).double(), expected, rtol=1e-5, atol=1e-3)
    assert (torch.randn(0, SIZE) @ strided).shape == (0, SIZE)
    scaled = torch.addmm(strided, strided, strided.T, beta=2, alpha=3)
    assert_close(scaled.double(), 2 * strided.double() + 3 * expected, rtol=1e-5, atol=1e-2)


@needs_onednn
def test_matrices_that_do_not_fit_are_refused_in_torch_s_words():
    matmul.choose_matmul("onednn")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.randn(SIZE, SIZE + 1) @ torch.randn(SIZE, SIZE + 1)


def test_auto_takes_what_the_machine_calls_for():
    found = matmul.choose_matmul("auto")
    wanted = matmul.lacks_avx512_in_mkl() and matmul.is_offered()
    assert found == ("onednn" if wanted else "default") == matmul.matmul_in_use()


def test_a_build_without_the_kernel_is_refused_or_left_alone(monkeypatch):
    monkeypatch.setattr(matmul, "_onednn", lambda *_: torch.zeros(2, 4))
    assert matmul.choose_matmul("auto") == "default"
    with pytest.raises(UserError, match="cpu_matmul=onednn"):
        matmul.choose_matmul("onednn")


@pytest.mark.parametrize("choice", ["mkl", None, True])
def test_an_unknown_choice_is_refused(choice):
    with pytest.raises(UserError, match="cpu_matmul must be one of auto, onednn, default"):
        matmul.choose_matmul(choice)
