"""The one helper and the one table of tolerances for comparing floats."""

import torch

TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
"""dtype of the computation: (rtol, atol)."""


def assert_close(actual, expected, *, dtype=torch.float32, what="values"):
    """Compare in float64 under the tolerance of `dtype`, the precision of the computation."""
    actual = torch.as_tensor(actual).double().cpu()
    expected = torch.as_tensor(expected).double().cpu()
    rtol, atol = TOLERANCES[dtype]
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
