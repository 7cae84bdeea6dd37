import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights
from torch.nn import functional as F  # noqa: N812

from sbp_models.configs import ResnetConfig
from sbp_models.resnet import Bottleneck, Resnet

PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}

#: The names of transformers -> ours.
NAMES = {
    r"^resnet\.embedder\.embedder\.convolution": "conv1",
    r"^resnet\.embedder\.embedder\.normalization": "bn1",
    r"^resnet\.encoder\.stages\.0\.layers\.": "layer1.",
    r"^resnet\.encoder\.stages\.1\.layers\.": "layer2.",
    r"^resnet\.encoder\.stages\.2\.layers\.": "layer3.",
    r"^resnet\.encoder\.stages\.3\.layers\.": "layer4.",
    r"\.layer\.0\.convolution": ".conv1",
    r"\.layer\.1\.convolution": ".conv2",
    r"\.layer\.2\.convolution": ".conv3",
    r"\.layer\.0\.normalization": ".bn1",
    r"\.layer\.1\.normalization": ".bn2",
    r"\.layer\.2\.normalization": ".bn3",
    r"\.shortcut\.convolution": ".downsample.0",
    r"\.shortcut\.normalization": ".downsample.1",
    r"^classifier\.1": "fc",
}


def some_images(size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("depth", "published"), PUBLISHED.items())
def test_the_published_sizes_are_met(depth: int, published: int) -> None:
    config = ResnetConfig(depth=depth, width=64, stem="large", num_classes=1000)

    with torch.device("meta"):
        model = Resnet(config)

    assert num_parameters(model) == published


@pytest.mark.parametrize(("depth", "block"), [(18, "basic"), (50, "bottleneck")])
def test_results_equal_those_of_transformers_with_the_same_weights(depth: int, block: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    expansion = 4 if block == "bottleneck" else 1
    reference = randomised(
        transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8 * expansion * 2**stage for stage in range(4)],
                depths=[2, 2, 2, 2] if depth == 18 else [3, 4, 6, 3],
                layer_type=block,
                num_labels=7,
            )
        )
    )
    model = Resnet(ResnetConfig(depth=depth, width=8, stem="large", num_classes=7)).eval()
    take_weights(model, reference, NAMES)
    images = some_images(64)

    with torch.no_grad():
        assert_equal_results(model(images), reference(images).logits)


def test_names_are_those_of_torchvision() -> None:
    names = set(Resnet(ResnetConfig(depth=50, width=4)).state_dict())

    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv3.weight"} <= names
    assert {"layer1.0.downsample.0.weight", "layer4.2.bn3.bias", "fc.bias"} <= names
    assert "layer1.1.downsample.0.weight" not in names


def test_a_small_stem_keeps_the_resolution_of_a_small_image() -> None:
    small, large = Resnet(ResnetConfig(stem="small")), Resnet(ResnetConfig(stem="large"))

    shapes = []
    for model in (small, large):
        model.layer1.register_forward_hook(lambda _, __, out: shapes.append(out.shape[2:]))
        model(some_images(32))

    assert shapes == [(32, 32), (8, 8)]


@pytest.mark.parametrize("depth", [18, 50])
def test_with_zero_initialised_norms_a_block_starts_as_its_shortcut(depth: int) -> None:
    started = Resnet(ResnetConfig(depth=depth)).layer1[1]
    other = Resnet(ResnetConfig(depth=depth, zero_init=False)).layer1[1]
    width = 64 if isinstance(started, Bottleneck) else 16
    x = torch.rand(2, width, 4, 4)

    assert torch.equal(started(x), x)
    assert not torch.equal(other(x), x)


def test_kaiming_initialisation_keeps_the_variance_of_gradients() -> None:
    torch.manual_seed(0)

    weight = Resnet(ResnetConfig(width=64)).layer2[1].conv1.weight

    fan_out = 128 * 9
    assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.02)


def test_training_moves_the_statistics_and_evaluation_uses_them() -> None:
    model = Resnet(ResnetConfig())
    images = some_images(32, batch=4)

    before = model.bn1.running_mean.clone()
    model.train()(images)
    moved = model.bn1.running_mean.clone()
    whole = model.eval()(images)

    assert not torch.equal(before, moved)
    assert torch.equal(moved, model.bn1.running_mean)
    torch.testing.assert_close(model(images[:1]), whole[:1])


def test_labels_are_smoothed_if_so_configured() -> None:
    torch.manual_seed(0)
    model: Resnet = Resnet(ResnetConfig(label_smoothing=0.2)).eval()
    batch = {"images": some_images(32), "labels": torch.tensor([3, 4])}

    loss = model.loss(batch)

    log_p = F.log_softmax(model(batch["images"]), dim=-1)
    aims = torch.full((2, 10), 0.02)
    aims[torch.arange(2), batch["labels"]] += 0.8
    torch.testing.assert_close(loss, -(aims * log_p).sum(-1).mean())
