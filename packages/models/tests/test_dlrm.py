import pytest
import torch
from references import num_parameters
from torch.nn import functional as F  # noqa: N812

from sbp_models.configs import DlrmConfig
from sbp_models.dlrm import Dlrm

SMALL = {"num_dense": 3, "rows": (7, 5, 6), "bag": 2, "hidden": 4, "bottom": (6,), "top": (6,)}

#: Rows of the tables of the Criteo Kaggle data, whose model is published with the code of DLRM.
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def small(lookup: str = "bag", seed: int = 0) -> Dlrm:
    torch.manual_seed(seed)
    return Dlrm(DlrmConfig(**{**SMALL, "lookup": lookup}))


def some_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "dense": torch.randn(4, 3, generator=generator),
        "sparse": torch.randint(0, 5, (4, 3, 2), generator=generator),
        "clicks": torch.tensor([0.0, 1.0, 1.0, 0.0]),
    }


def test_the_published_size_is_met() -> None:
    config = DlrmConfig(rows=CRITEO, hidden=16, bottom=(512, 256, 64), top=(512, 256))

    with torch.device("meta"):
        model = Dlrm(config)

    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 16 + 16
    top = (16 + 27 * 26 // 2) * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert num_parameters(model.tables) == 540_201_232
    assert num_parameters(model) == 540_201_232 + bottom + top


@pytest.mark.parametrize("lookup", ["bag", "embedding"])
def test_logits_equal_the_formula_sample_by_sample(lookup: str) -> None:
    model, batch = small(lookup), some_batch()

    found = model(batch["dense"], batch["sparse"])

    for row in range(4):
        hidden = F.relu(model.bottom[0](batch["dense"][row]))
        vectors = [F.relu(model.bottom[2](hidden))]
        for feature, values in enumerate(batch["sparse"][row]):
            vectors.append(model.tables[feature].weight[values].sum(0))
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        joined = torch.cat([vectors[0], torch.stack(dots)])
        expected = model.top[2](F.relu(model.top[0](joined)))
        torch.testing.assert_close(found[row], expected[0])


def test_bags_and_embeddings_give_the_same_logits() -> None:
    bags, embeddings, batch = small("bag"), small("embedding", seed=1), some_batch()
    embeddings.load_state_dict(bags.state_dict())

    found = [model(batch["dense"], batch["sparse"]) for model in (bags, embeddings)]

    assert isinstance(bags.tables[0], torch.nn.EmbeddingBag)
    assert isinstance(embeddings.tables[0], torch.nn.Embedding)
    torch.testing.assert_close(*found)


def test_the_loss_is_the_mean_binary_cross_entropy() -> None:
    model, batch = small(), some_batch()

    loss = model.loss(batch)

    p = torch.sigmoid(model(batch["dense"], batch["sparse"]))
    likelihood = torch.where(batch["clicks"] == 1, p, 1 - p)
    torch.testing.assert_close(loss, -likelihood.log().mean())


def test_only_rows_that_were_looked_up_get_a_gradient() -> None:
    model, batch = small(), some_batch()

    model.loss(batch).backward()

    touched = model.tables[0].weight.grad.abs().sum(1) > 0
    assert set(touched.nonzero().flatten().tolist()) <= set(
        batch["sparse"][:, 0].flatten().tolist()
    )
    assert touched.any()


def test_there_may_be_no_hidden_layers() -> None:
    model = Dlrm(DlrmConfig(**{**SMALL, "bottom": (), "top": ()}))

    assert [name for name, _ in model.top.named_parameters()] == ["0.weight", "0.bias"]
    assert model(some_batch()["dense"], some_batch()["sparse"]).shape == (4,)
