"""The types that the command line offers for an export are types that torch has."""

import pytest
import torch

from contract.runs import EXPORT_DTYPES


@pytest.mark.parametrize("name", EXPORT_DTYPES)
def test_every_type_of_an_export_is_one_of_torchs_floats(name: str) -> None:
    dtype = getattr(torch, EXPORT_DTYPES[name])
    assert isinstance(dtype, torch.dtype)
    assert dtype.is_floating_point
    assert str(dtype.itemsize * 8) in name
