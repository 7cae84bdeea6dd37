# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""A classifier by angles, whose loss asks for a margin between the classes: ArcFace, CosFace.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    D width of the features    K classes

Logits are s cos(a), where a is the angle between features and the weight of a class. In the loss,
the logit of the target is s (cos(m1 a + m2) - m3) instead:

    m1    m2    m3
    1.35  0     0      SphereFace: Liu et al., CVPR 2017, section 3
    1     0.5   0      ArcFace: Deng et al., CVPR 2019, section 2.1
    1     0     0.35   CosFace: Wang et al., CVPR 2018, section 3

Source: the three together: Deng et al., "ArcFace: additive angular margin loss for deep face
recognition", CVPR 2019, equation 4; the initialisation: `deepinsight/insightface`,
`recognition/arcface_torch/partial_fc_v2.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

#: Cosines keep this distance from -1 and 1, where the derivative of the angle is infinite.
_EPS = 1e-6


class MarginHead(nn.Module):
    """Cosines of classes, scaled, with margins for targets.

    Args:
        width: Width of the features.
        num_classes: Number of classes.
        scale: The factor s, > 0.
        margins: m1, m2 (radians) and m3.
    """

    def __init__(
        self, width: int, num_classes: int, *, scale: float, margins: Sequence[float]
    ) -> None:
        super().__init__()
        self.scale, self.margins = scale, tuple(margins)
        self.weight = nn.Parameter(torch.empty(num_classes, width))
        nn.init.normal_(self.weight, std=0.01)

    def forward(self, x_BD: torch.Tensor, labels_B: torch.Tensor | None = None) -> torch.Tensor:
        """Map features (B, D) to logits (B, K), with margins if int64 labels (B,) are given."""
        cosines_BK = F.linear(F.normalize(x_BD), F.normalize(self.weight))
        if labels_B is not None:
            # Without indices: operators on elements, and a sum over classes, can be split by
            # classes, and ranks send one number a sample.
            m1, m2, m3 = self.margins
            classes_K = torch.arange(len(self.weight), device=labels_B.device)
            is_own_BK = (labels_B[:, None] == classes_K).to(cosines_BK.dtype)
            own_B1 = (cosines_BK * is_own_BK).sum(dim=1, keepdim=True)
            angles_B1 = own_B1.clamp(_EPS - 1, 1 - _EPS).acos()
            moves_B1 = (m1 * angles_B1 + m2).cos() - m3 - own_B1
            cosines_BK = torch.addcmul(cosines_BK, is_own_BK, moves_B1)
        return self.scale * cosines_BK
