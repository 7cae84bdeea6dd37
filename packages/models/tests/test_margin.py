import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from sbp_core.errors import ConfigError
from sbp_models.configs import ResnetConfig
from sbp_models.margin import MarginHead, sample_classes
from sbp_models.resnet import Resnet
from sbp_torch import counted_random

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
        ({"sample_rate": 0.0}, r"sample_rate=0.0 is no fraction.*\n.*a number in \(0, 1\]"),
        ({"sample_rate": 1.5}, "sample_rate=1.5 is no fraction"),
        ({"sample_rate": math.nan}, "sample_rate=nan is no fraction"),
        ({"sample_rate": 0.5}, "sample_groups=8 does not divide num_classes=10"),
        ({"sample_rate": 0.2, "sample_groups": 5}, "0.2 of the 2 classes of a group is none"),
        ({"sample_groups": 0}, "sample_groups=0 is too small"),
        ({"sample_rate": 0.5, "head": "linear"}, "sample_rate=0.5 has no effect on head=linear"),
    ],
)
def test_margins_without_meaning_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ResnetConfig(**{"head": "margin", **settings})  # type: ignore[arg-type]


@st.composite
def samples(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """Draw labels, the number of groups, their size, and how many classes each of them samples."""
    num_groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    labels = draw(st.lists(st.integers(0, num_groups * size - 1), min_size=1, max_size=16))
    per_group = draw(st.integers(min(len(labels), size), size))
    return torch.tensor(labels), num_groups, size, per_group


@given(samples(), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_sample_has_all_classes_of_the_batch_and_equally_many_of_each_group(
    case: tuple[torch.Tensor, int, int, int], seed: int, step: int
) -> None:
    labels, num_groups, size, per_group = case

    def sampled() -> torch.Tensor:
        with counted_random(seed, step):
            return sample_classes(labels, num_groups=num_groups, size=size, per_group=per_group)

    places = sampled()

    assert places.shape == (num_groups, per_group)
    assert places.min() >= 0
    assert places.max() < size
    assert (places.diff(dim=1) > 0).all()
    classes = places + size * torch.arange(num_groups)[:, None]
    assert set(labels.tolist()) <= set(classes.flatten().tolist())
    assert torch.equal(places, sampled())


def test_other_classes_are_sampled_equally_often_and_differ_by_seed_and_step() -> None:
    def sampled(seed: int, step: int) -> torch.Tensor:
        with counted_random(seed, step):
            return sample_classes(torch.tensor([3, 3, 7]), num_groups=2, size=6, per_group=3)

    assert not torch.equal(sampled(0, 0), sampled(0, 1))
    assert not torch.equal(sampled(0, 0), sampled(1, 0))
    counts = torch.zeros(2, 6)
    for step in range(3000):
        counts.scatter_add_(1, sampled(5, step), torch.ones(2, 3))
    for group, own in ((0, 3), (1, 1)):
        assert counts[group, own] == 3000
        # Each of the 5 others is one of 2: 1200 times, with a standard deviation of 27.
        others = counts[group, torch.arange(6) != own]
        assert (others - 1200).abs().max() < 4 * 27


def test_a_sample_that_the_batch_may_not_fit_into_is_refused() -> None:
    labels = torch.zeros(5, dtype=torch.int64)

    with pytest.raises(ConfigError, match="samples 4 of the 8 classes of a group, and its 5") as no:
        sample_classes(labels, num_groups=2, size=8, per_group=4)
    assert "at least 5 sampled classes of a group" in str(no.value)


def sampling_head() -> MarginHead:
    torch.manual_seed(0)
    margins = (1.0, 0.5, 0.0)
    made = MarginHead(6, 32, scale=16.0, margins=margins, sample_rate=0.5, num_groups=2)
    return made.double()


def test_in_training_logits_and_softmax_are_those_of_the_sampled_classes_without_weights() -> None:
    made, x, labels = sampling_head(), features(), torch.tensor([31, 0, 7, 7, 16])

    with counted_random(0, 0):
        logits, targets = made.classify(x, labels)
    with counted_random(0, 0):
        places = sample_classes(labels, num_groups=2, size=16, per_group=8)

    classes = (places + torch.tensor([[0], [16]])).flatten()
    assert len(classes) == 16
    assert torch.equal(classes[targets], labels)
    torch.testing.assert_close(logits, made(x, labels)[:, classes])


def test_centres_that_are_not_sampled_do_not_change_in_a_step_of_plain_sgd() -> None:
    made, labels = sampling_head(), torch.tensor([31, 0, 7, 7, 16])
    before = made.weight.detach().clone()

    with counted_random(0, 0):
        F.cross_entropy(*made.classify(features(), labels)).backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()

    changed = (made.weight != before).any(dim=1)
    assert changed.sum() == 16
    assert changed[labels].all()


def test_in_evaluation_and_with_a_rate_of_one_all_classes_count() -> None:
    x, labels = features(), torch.tensor([31, 0, 7, 7, 16])
    whole = MarginHead(6, 32, scale=16.0, margins=(1.0, 0.5, 0.0))

    for made in (sampling_head().eval(), whole.double()):
        logits, targets = made.classify(x, labels)
        assert targets is labels
        assert torch.equal(logits, made(x, labels))


def test_samples_that_the_loss_ignores_add_no_class() -> None:
    made, x = sampling_head(), features()
    labels, fewer = torch.tensor([31, -100, 7, -100, 16]), torch.tensor([31, 7, 16])

    for step in range(8):
        with counted_random(0, step):
            logits, targets = made.classify(x, labels)
        with counted_random(0, step):
            wanted = F.cross_entropy(*made.classify(x[[0, 2, 4]], fewer))

        assert targets[[1, 3]].tolist() == [-100, -100]
        torch.testing.assert_close(F.cross_entropy(logits, targets), wanted)
