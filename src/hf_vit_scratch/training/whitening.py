"""A patch embedding that starts from what patches have in common, instead of from noise alone."""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.modeling_vit_scratch import ViTScratchEmbeddings, ViTScratchPreTrainedModel

NUM_PATCHES = 64_000  # from which the covariance is estimated: a thousand images in 8 x 8 patches
LEAST_SHARE = 0.04  # of the mean variance, added to that of each direction, so that noise is not blown up


@torch.no_grad()
def whiten_patches(model: ViTScratchPreTrainedModel, pixel_values: Tensor) -> None:
    """Draw the patch embedding's weights such that tokens vary alike in every direction that patches vary in.

    Neighbouring pixels are nearly equal, so a random filter sees little but the mean colour of a patch. Whitening
    (Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images, appendix A: ZCA) makes all directions in
    the space of patches equally large, and random filters on whitened patches see edges and textures as well. As the
    first layer of a small network it was proposed, without being trained further, by Page 2019, How to Train Your
    ResNet, and Jordan 2024, https://arxiv.org/abs/2404.00498, section 3.2; here it is where training starts.

        W = R (S + e I)^(-1/2),  b = -W m,  R_ij ~ N(0, 1 / P)

    for the mean m and the covariance S of the patches, flattened to P numbers, of normalised pixels (B, C, height,
    width).
    """
    projection = cast(ViTScratchEmbeddings, model.base_model.embeddings).patch_embeddings.projection
    size = projection.weight.shape[2:]
    patches = F.unfold(pixel_values, size, stride=size).transpose(1, 2).flatten(0, 1).double()  # (patches, P)
    mean, length = patches.mean(dim=0), patches.shape[1]
    variances, directions = torch.linalg.eigh(patches.T.cov(correction=0))
    variances = variances.clamp(min=0) + LEAST_SHARE * variances.mean()
    whitening = directions * variances.rsqrt() @ directions.T  # symmetric
    random = torch.randn(len(projection.weight), length, dtype=torch.float64) / length**0.5
    weight = random.to(whitening.device) @ whitening
    projection.weight.copy_(weight.unflatten(1, projection.weight.shape[1:]))
    assert projection.bias is not None
    projection.bias.copy_(-weight @ mean)
