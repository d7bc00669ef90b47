"""A loss that is not finite."""

import pickle

import pytest
import torch

from deqseq.training import NonFiniteLoss, check_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", [True, False])
def test_a_loss_that_is_not_finite_is_an_error_that_says_where(value, tensor):
    loss = torch.tensor(value, requires_grad=True) if tensor else value
    with pytest.raises(NonFiniteLoss, match=r"the loss is .* after step 3 in phase 'free'") as caught:
        check_finite(loss, step=3, phase="free")
    error = caught.value
    assert (error.quantity, error.step, error.phase) == ("loss", 3, "free")
    assert isinstance(error, FloatingPointError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_finite_value_is_returned():
    assert check_finite(torch.tensor([2.5], requires_grad=True), step=0) == 2.5
    with pytest.raises(NonFiniteLoss, match="the gradient norm is nan after step 0"):
        check_finite(torch.tensor(float("nan")), step=0, quantity="gradient norm")
    with pytest.raises(ValueError, match=r"value must be the loss, one number.*\(2,\)"):
        check_finite(torch.zeros(2), step=0)
    with pytest.raises(TypeError, match="value must be the loss, got None"):
        check_finite(None, step=0)


def test_a_complex_number_or_a_flag_is_refused():
    with pytest.raises(ValueError, match=r"one number, got torch\.bool"):
        check_finite(torch.tensor(True), step=0)
    with pytest.raises(ValueError, match="value must be the loss, one number"):
        check_finite(torch.tensor(1j), step=1)
