import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from sbp_core.errors import ConfigError
from sbp_models.configs import ResnetConfig
from sbp_models.margin import MarginHead
from sbp_models.resnet import Resnet

KINDS = {
    "no margin": (1.0, 0.0, 0.0),
    "SphereFace": (1.35, 0.0, 0.0),
    "ArcFace": (1.0, 0.5, 0.0),
    "CosFace": (1.0, 0.0, 0.35),
    "combined": (1.1, 0.3, 0.2),
}


def head(margins: tuple[float, float, float] = (1.0, 0.5, 0.0)) -> MarginHead:
    torch.manual_seed(0)
    return MarginHead(6, 9, scale=16.0, margins=margins).double()


def features() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_angle_of_the_target_gets_the_margins(kind: str) -> None:
    made, x, labels = head(KINDS[kind]), features(), torch.tensor([0, 8, 3, 3, 1])
    m1, m2, m3 = KINDS[kind]

    found = made(x, labels)

    for row, label in enumerate(labels.tolist()):
        for at, weight in enumerate(made.weight.detach()):
            angle = math.acos(float(F.cosine_similarity(x[row], weight, dim=0)))
            wanted = math.cos(m1 * angle + m2) - m3 if at == label else math.cos(angle)
            assert found[row, at].item() == pytest.approx(16.0 * wanted, abs=1e-9)


def test_without_labels_logits_are_scaled_cosines() -> None:
    made, x = head(), features()

    torch.testing.assert_close(made(3 * x), head((1.0, 0.0, 0.0))(x, torch.zeros(5).long()))
    assert made(x).abs().max() <= 16.0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_numeric_differences(kind: str) -> None:
    made, labels = head(KINDS[kind]), torch.tensor([0, 8, 3, 3, 1])

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(made, {"weight": weight}, (x, labels))
        return F.cross_entropy(logits, labels)

    assert torch.autograd.gradcheck(loss, (features().requires_grad_(), made.weight))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_are_finite_where_features_point_to_their_class(sign: float) -> None:
    made = head()
    x = (sign * made.weight[:5]).detach().requires_grad_()

    F.cross_entropy(made(x, torch.arange(5)), torch.arange(5)).backward()

    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert made.weight.grad is not None
    assert made.weight.grad.isfinite().all()


def test_a_network_with_a_margin_head_has_one_vector_a_class_and_adds_margins_in_its_loss() -> None:
    config = ResnetConfig(width=2, num_classes=5, head="margin", margin_scale=8.0)
    model = Resnet(config).eval()
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 4, 2])

    assert model.fc.weight.shape == (5, 16)
    assert "fc.bias" not in model.state_dict()
    plain = F.cross_entropy(model(images), labels)
    assert model.loss({"images": images, "labels": labels}) > plain


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"margins": (0.0, 0.5, 0.0)}, r"margins=\[0.0, 0.5, 0.0\] has a margin out of range"),
        ({"margins": (1.0, -0.1, 0.0)}, "out of range"),
        ({"margins": (1.0, 0.0, math.nan)}, "out of range"),
        ({"margin_scale": 0.0}, "margin_scale=0.0 is no scale"),
    ],
)
def test_margins_without_meaning_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ResnetConfig(head="margin", **settings)  # type: ignore[arg-type]
