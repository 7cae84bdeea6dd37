import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights

from sbp_core.errors import SbpValueError
from sbp_models.configs import VitConfig
from sbp_models.vit import DropPath, Vit

SMALL = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden": 8}

#: Hidden width, layers, heads -> parameters with 1000 classes, 224x224 and patches of 16x16.
PUBLISHED = {
    (192, 12, 3): 5_717_416,
    (384, 12, 6): 22_050_664,
    (768, 12, 12): 86_567_656,
    (1024, 24, 16): 304_326_632,
}

#: The names of transformers -> ours, with three layers for queries, keys and values.
NAMES = {
    r"^vit\.embeddings\.cls_token": "cls_token",
    r"^vit\.embeddings\.position_embeddings": "pos_embed",
    r"^vit\.embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"^vit\.(encoder\.)?layers?\.": "blocks.",
    r"\.attention\.attention\.query": ".attn.q",
    r"\.attention\.attention\.key": ".attn.k",
    r"\.attention\.attention\.value": ".attn.v",
    r"\.attention\.output\.dense": ".attn.proj",
    r"\.attention\.q_proj": ".attn.q",
    r"\.attention\.k_proj": ".attn.k",
    r"\.attention\.v_proj": ".attn.v",
    r"\.attention\.o_proj": ".attn.proj",
    r"\.layernorm_before": ".norm1",
    r"\.layernorm_after": ".norm2",
    r"\.intermediate\.dense": ".mlp.fc1",
    r"\.output\.dense": ".mlp.fc2",
    r"^vit\.layernorm": "norm",
    r"^classifier": "head",
}


def some_images(size: int = 8, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def small(**settings: object) -> Vit:
    torch.manual_seed(0)
    return Vit(VitConfig(**{**SMALL, **settings}))


@pytest.mark.parametrize(("sizes", "published"), PUBLISHED.items())
def test_the_published_sizes_are_met(sizes: tuple[int, int, int], published: int) -> None:
    hidden, num_layers, num_heads = sizes
    config = VitConfig(
        image_size=224,
        patch_size=16,
        num_classes=1000,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
    )

    with torch.device("meta"):
        model = Vit(config)

    assert num_parameters(model) == published


def test_results_equal_those_of_transformers_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = randomised(
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=8,
                patch_size=4,
                hidden_size=8,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_labels=10,
                layer_norm_eps=1e-6,
            )
        )
    )
    model = small(fused_qkv=False).eval()
    take_weights(model, reference, NAMES)

    with torch.no_grad():
        expected = reference(some_images()).logits
        assert_equal_results(model(some_images()), expected)


def test_one_layer_for_queries_keys_and_values_is_three_on_top_of_each_other() -> None:
    fused, separate = randomised(small()), small(fused_qkv=False).eval()
    values = fused.state_dict()
    for name in list(values):
        if ".qkv." in name:
            parts = values.pop(name).chunk(3)
            values |= {name.replace("qkv", part): v for part, v in zip("qkv", parts, strict=True)}
    separate.load_state_dict(values)

    with torch.no_grad():
        assert_equal_results(separate(some_images()), fused(some_images()))


def test_names_are_those_of_timm() -> None:
    names = set(small().state_dict())

    assert {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.bias"} <= names
    assert {"blocks.1.attn.qkv.bias", "blocks.0.mlp.fc1.weight", "norm.weight"} <= names


def test_images_of_another_size_are_refused_with_what_to_change() -> None:
    with pytest.raises(SbpValueError, match="12 x 12") as caught:
        small()(some_images(12))

    assert "data.image_size" in caught.value.todo


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    x = torch.ones(4000, 2, 3)

    y = drop(x)

    torch.testing.assert_close(y.unique(), torch.tensor([0, 4 / 3]))
    assert torch.equal(y, y[:, :1, :1].expand_as(y))
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(x), x)


def test_drop_path_grows_linearly_with_the_depth() -> None:
    model = small(num_layers=5, drop_path=0.4)

    found = [block.drop_path.probability for block in model.blocks]

    assert found == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    with torch.no_grad():
        trained = [model.train()(some_images()) for _ in range(2)]
        evaluated = [model.eval()(some_images()) for _ in range(2)]

    assert not torch.equal(*trained)
    assert torch.equal(*evaluated)


def test_a_patch_is_known_by_its_place() -> None:
    model = randomised(small())
    image = some_images(batch=1)

    moved = image.flip(3)

    with torch.no_grad():
        assert not torch.allclose(model(image), model(moved))
        model.pos_embed.zero_()
        swapped = torch.cat([image[..., 4:], image[..., :4]], dim=3)
        torch.testing.assert_close(model(image), model(swapped))
