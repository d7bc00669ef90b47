"""Saving, loading and initial weights of each model type, implicit and explicit."""

from hf_models import Llama, Mamba2, Retrofit
from saving_contract import SavingContract


class TestImplicitMamba2(Mamba2, SavingContract):
    pass


class TestImplicitLlama(Llama, SavingContract):
    pass


class TestRetrofit(Retrofit, SavingContract):
    test_weight_norm = test_weight_norm_is_saved_as_it_is_now = None  # its weights are plain
    test_folded_weights_are_the_same_to_the_last_bit = None
    test_weight_norm_of_some_layers_alone_is_refused_before_anything_is_written = None
    test_a_new_model_is_that_of_the_core = None  # it is that of the decoder's family: test_hf_recurrent_depth
    test_more_weights_than_the_model_has_are_an_error_or_reported = None  # its parts have to add up
    test_weights_of_another_shape_are_an_error = None  # sizes are those of the decoder


class TestExplicitMamba2(Mamba2, SavingContract):
    implicit = False


class TestExplicitLlama(Llama, SavingContract):
    implicit = False
