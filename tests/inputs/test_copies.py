"""Samples are copied before code that may change them sees them; the copies lie in memory as the samples do."""

import numpy as np
import pytest
import torch

from phalanx.definition.data import own
from tests.engines.test_serialization import STRIDED


@pytest.mark.parametrize("name", STRIDED)
def test_arrays_are_copied_with_their_strides(name):
    """Values, dtype and strides stay, also those of axes of length 1; the memory is another."""
    array = STRIDED[name]
    if type(array) is not np.ndarray:
        assert own(array) is array  # of other classes nobody knows what a copy is
        return
    copied = own(array)
    np.testing.assert_array_equal(copied, array)
    assert copied.dtype == array.dtype
    assert copied.strides == array.strides or array.dtype.hasobject or not array.size
    assert not np.shares_memory(copied, array)


def test_tensors_are_copied_with_their_strides():
    """So are tensors: pictures with their channels last stay so."""
    pictures = torch.arange(96.0).reshape(2, 4, 4, 3).permute(0, 3, 1, 2)
    copied = own([pictures])[0]
    assert copied.stride() == pictures.stride()
    assert torch.equal(copied, pictures)
    assert copied.data_ptr() != pictures.data_ptr()
