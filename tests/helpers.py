"""What several test modules need."""

import torch
from torch import nn

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


def randomise_(module: nn.Module, std: float) -> nn.Module:
    """Draw every parameter, norm scales and biases too: a default bias or scale would hide an error."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=std)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return module


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-10) -> None:
    """Equality for float64."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
