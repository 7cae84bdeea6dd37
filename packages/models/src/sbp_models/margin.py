# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""A classifier by angles, whose loss asks for a margin between the classes: ArcFace, CosFace.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    D width of the features    K classes    G groups of classes    N classes of a group

Logits are s cos(a), where a is the angle between features and the weight of a class. In the loss,
the logit of the target is s (cos(m1 a + m2) - m3) instead:

    m1    m2    m3
    1.35  0     0      SphereFace: Liu et al., CVPR 2017, section 3
    1     0.5   0      ArcFace: Deng et al., CVPR 2019, section 2.1
    1     0     0.35   CosFace: Wang et al., CVPR 2018, section 3

A head may train on a sample of its classes (`sample_classes`): those of the batch, and others at
random. The softmax is taken over the sample as it is. No weight corrects for the classes that are
left out, as in the paper; only the sampled centres get gradients.

Source: the three together: Deng et al., "ArcFace: additive angular margin loss for deep face
recognition", CVPR 2019, equation 4; the initialisation: `deepinsight/insightface`,
`recognition/arcface_torch/partial_fc_v2.py`; samples of classes: An et al., "Killing two birds with
one stone: efficient and robust training of face recognition CNNs by partial FC", CVPR 2022,
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_core.errors import ConfigError

#: Cosines keep this distance from -1 and 1, where the derivative of the angle is infinite.
_EPS = 1e-6


class _Rows(torch.autograd.Function):
    """Read rows of each group: weights (G, K/G, D) and places int64 (G, N) to (G, N, D).

    PyTorch's derivative of `gather` calls `new_zeros` on the gradient, which ranks would have to
    gather for that.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, places_GN: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_GN)
        ctx.shape = weight.shape
        return weight.gather(1, places_GN[:, :, None].expand(-1, -1, weight.shape[2]))

    @staticmethod
    def backward(ctx: Any, gradient_GND: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places_GN,) = ctx.saved_tensors
        rows_GND = places_GN[:, :, None].expand(-1, -1, ctx.shape[2])
        zeros = torch.zeros(ctx.shape, dtype=gradient_GND.dtype, device=gradient_GND.device)
        return zeros.scatter_add(1, rows_GND, gradient_GND), None


class MarginHead(nn.Module):
    """Cosines of classes, scaled, with margins for targets.

    Args:
        width: Width of the features.
        num_classes: Number of classes.
        scale: The factor s, > 0.
        margins: m1, m2 (radians) and m3.
        sample_rate: Fraction of the classes on which a training step trains, in (0, 1].
        num_groups: Groups of consecutive classes for `sample_classes`; divides `num_classes`.
    """

    def __init__(
        self,
        width: int,
        num_classes: int,
        *,
        scale: float,
        margins: Sequence[float],
        sample_rate: float = 1.0,
        num_groups: int = 1,
    ) -> None:
        super().__init__()
        self.scale, self.margins = scale, tuple(margins)
        self.sample_rate, self.num_groups = sample_rate, num_groups
        self.weight = nn.Parameter(torch.empty(num_classes, width))
        nn.init.normal_(self.weight, std=0.01)

    def forward(self, x_BD: torch.Tensor, labels_B: torch.Tensor | None = None) -> torch.Tensor:
        """Map features (B, D) to logits (B, K), with margins if int64 labels (B,) are given."""
        return self._logits(x_BD, self.weight, labels_B)

    def classify(
        self, x_BD: torch.Tensor, labels_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits with margins, and the target of each sample among them, int64 (B,).

        In training with `sample_rate` < 1, these are the logits (B, k) of k sampled classes in
        ascending order; else those of all classes, (B, K).

        Args:
            x_BD: Features (B, D).
            labels_B: Classes, int64 (B,); a negative one, which the loss ignores, stays as it is.

        Raises:
            ConfigError: the sample may be too small for the classes of the batch.
        """
        if not self.training or self.sample_rate == 1:
            return self.forward(x_BD, labels_B), labels_B
        num_classes, width = self.weight.shape
        size = num_classes // self.num_groups
        # An ignored sample has no class: that of another sample stands in for it.
        known_B = torch.where(labels_B < 0, labels_B.amax().clamp(min=0), labels_B)
        places_GN = sample_classes(
            known_B, num_groups=self.num_groups, size=size, per_group=round(self.sample_rate * size)
        )
        # Each group reads its own rows, so groups may be split over ranks, and no rank needs the
        # centres of another.
        weight_GND = self.weight.view(self.num_groups, size, width)
        centres_GND: torch.Tensor = _Rows.apply(weight_GND, places_GN)  # type: ignore[no-untyped-call] # torch leaves it untyped
        firsts_G1 = torch.arange(self.num_groups, device=labels_B.device)[:, None] * size
        found_B = torch.searchsorted((places_GN + firsts_G1).flatten(), known_B)
        targets_B = torch.where(labels_B < 0, labels_B, found_B)
        return self._logits(x_BD, centres_GND.flatten(0, 1), targets_B), targets_B

    def _logits(
        self, x_BD: torch.Tensor, centres_KD: torch.Tensor, labels_B: torch.Tensor | None
    ) -> torch.Tensor:
        cosines_BK = F.linear(F.normalize(x_BD), F.normalize(centres_KD))
        if labels_B is not None:
            # Without indices: operators on elements, and a sum over classes, can be split by
            # classes, and ranks send one number a sample.
            m1, m2, m3 = self.margins
            classes_K = torch.arange(len(centres_KD), device=labels_B.device)
            is_own_BK = (labels_B[:, None] == classes_K).to(cosines_BK.dtype)
            own_B1 = (cosines_BK * is_own_BK).sum(dim=1, keepdim=True)
            angles_B1 = own_B1.clamp(_EPS - 1, 1 - _EPS).acos()
            moves_B1 = (m1 * angles_B1 + m2).cos() - m3 - own_B1
            cosines_BK = torch.addcmul(cosines_BK, is_own_BK, moves_B1)
        return self.scale * cosines_BK


def sample_classes(
    labels_B: torch.Tensor, *, num_groups: int, size: int, per_group: int
) -> torch.Tensor:
    """Sample classes: all of the batch, and others at random, `per_group` of each group.

    Class c is place c mod `size` of group c div `size`. Every class draws a number, those of the
    batch take the least one, and a group takes its `per_group` smallest. In the paper a group is
    the share of a rank. Here the number of groups is a setting, so that the sample is equal on any
    mesh. Where a rank has more classes of the batch than its sample, the paper takes all of these;
    here shapes are static, and a sample that may be too small is refused.

    Args:
        labels_B: Classes of the batch, int64 (B,), in [0, num_groups size).
        num_groups: Number of groups, G.
        size: Classes of a group.
        per_group: Sampled classes of a group, in 1 to `size`.

    Returns:
        Places in the group, ascending: int64 (G, per_group).

    Raises:
        ConfigError: a group may have more classes of the batch than it samples.

    Source: An et al., CVPR 2022, section 3; `partial_fc_v2.py`, `PartialFC_V2.sample`.
    """
    if per_group < min(len(labels_B), size):
        raise ConfigError(
            f"a step samples {per_group} of the {size} classes of a group, and its {len(labels_B)} "
            f"samples may be of {min(len(labels_B), size)} classes of one group",
            where=f"model.sample_rate, with model.sample_groups={num_groups}",
            accepted=f"at least {min(len(labels_B), size)} sampled classes of a group",
            todo="raise model.sample_rate, or choose fewer groups or a smaller batch",
        )
    draws_K = torch.randint(0, 1 << 31, (num_groups * size,), device=labels_B.device)
    draws_GN = draws_K.index_fill(0, labels_B, -1).view(num_groups, size)
    # No two keys of a group are equal, so each device takes the same classes.
    keys_GN = draws_GN * size + torch.arange(size, device=labels_B.device)
    places_GN = keys_GN.topk(per_group, dim=1, largest=False, sorted=False).indices
    return places_GN.sort(dim=1).values
