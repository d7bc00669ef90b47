"""A loss that is not finite."""

import pytest
import torch

from deqseq.training import NonFiniteLoss, check_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_that_says_where(value):
    for loss in (torch.tensor(value, requires_grad=True), value):
        with pytest.raises(NonFiniteLoss, match=r"the loss is .* after step 3 in phase 'free'"):
            check_finite(loss, step=3, phase="free")
    with pytest.raises(FloatingPointError, match=r"the gradient norm is .* after step 0: stopped"):
        check_finite(value, step=0, quantity="gradient norm")


def test_a_finite_number_is_returned():
    assert check_finite(torch.tensor([2.5], requires_grad=True), step=0) == 2.5
