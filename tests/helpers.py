"""What several test modules need."""

import torch

from hf_vit_scratch.conversion.parity import randomize_

__all__ = ["TINY", "assert_equal", "randomize_"]

# Small, and with no two equal sizes that could be confused.
TINY = {
    "image_size": [16, 24],
    "patch_size": [4, 8],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 5,
}


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-10) -> None:
    """Equality for float64."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
