import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights

from sbp_core.errors import SbpValueError
from sbp_models.bert import Bert
from sbp_models.configs import BertConfig

SMALL = {"vocabulary": 11, "context": 6, "num_layers": 2, "num_heads": 2, "hidden": 8}

#: The names of transformers -> ours.
NAMES = {
    r"^bert\.embeddings\.word_embeddings": "embed.tokens",
    r"^bert\.embeddings\.position_embeddings": "embed.positions",
    r"^bert\.embeddings\.token_type_embeddings": "embed.segments",
    r"^bert\.embeddings\.LayerNorm": "embed.norm",
    r"^bert\.encoder\.layer\.": "blocks.",
    r"\.attention\.self\.": ".attention.",
    r"\.attention\.output\.dense": ".attention.output",
    r"\.attention\.output\.LayerNorm": ".norm1",
    r"\.intermediate\.dense": ".mlp.up",
    r"(\d)\.output\.dense": r"\1.mlp.down",
    r"(\d)\.output\.LayerNorm": r"\1.norm2",
    r"^cls\.predictions\.transform\.dense": "transform",
    r"^cls\.predictions\.transform\.LayerNorm": "norm",
    r"^cls\.predictions\.bias": "bias",
    r"^cls\.predictions\.decoder.*": "(tied)",
}


def small(**settings: object) -> Bert:
    torch.manual_seed(0)
    return Bert(BertConfig(**{**SMALL, **settings}))


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))


def test_the_published_size_is_met() -> None:
    config = BertConfig(vocabulary=30522, context=512, num_layers=12, num_heads=12, hidden=768)

    with torch.device("meta"):
        model = Bert(config)

    # bert-base-uncased with its head for masked tokens, and without its pooler.
    assert num_parameters(model) == 109_514_298


@pytest.mark.slow
def test_results_equal_those_of_transformers_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = randomised(
        transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=11,
                hidden_size=8,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=6,
            )
        )
    )
    model = small().eval()
    take_weights(model, reference, NAMES)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] * 6])
    segments = torch.tensor([0, 0, 0, 1, 1, 1]).expand(3, 6)

    with torch.no_grad():
        found = model(some_tokens(), mask, segments)
        expected = reference(
            some_tokens(), attention_mask=mask.to(torch.int64), token_type_ids=segments
        ).logits
    assert_equal_results(found[mask], expected[mask])


def test_the_loss_asks_only_for_the_targets_that_are_there() -> None:
    model, tokens = randomised(small()), some_tokens()
    targets = torch.full_like(tokens, -100)
    targets[:, 2] = 5

    loss = model.loss({"tokens": tokens, "targets": targets})

    log_p = model(tokens).log_softmax(dim=-1)
    torch.testing.assert_close(loss, -log_p[:, 2, 5].mean())


def test_a_masked_token_is_seen_by_no_other() -> None:
    model, tokens = randomised(small()), some_tokens()
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[:, 4] = False
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11

    with torch.no_grad():
        before, after = model(tokens, mask), model(changed, mask)
        unmasked = model(changed)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, :4], unmasked[:, :4])


def test_a_batch_may_bring_a_mask_and_segments() -> None:
    model, tokens = randomised(small()), some_tokens()
    batch = {"tokens": tokens, "targets": tokens}

    plain = model.loss(batch)
    masked = model.loss({**batch, "mask": tokens > 2})
    second = model.loss({**batch, "segments": torch.ones_like(tokens)})

    assert len({plain.item(), masked.item(), second.item()}) == 3


def test_the_head_is_the_embedding() -> None:
    model = small()

    assert not [name for name, _ in model.named_parameters() if "head" in name or "decoder" in name]
    model.loss({"tokens": some_tokens(), "targets": torch.full((3, 6), 10)}).backward()
    assert model.embed.tokens.weight.grad[10].abs().sum() > 0


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)

    with torch.no_grad():
        trained = [model.train()(some_tokens()) for _ in range(2)]
        evaluated = [model.eval()(some_tokens()) for _ in range(2)]

    assert not torch.equal(*trained)
    assert torch.equal(*evaluated)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(SbpValueError, match="7 tokens are more than the context of 6"):
        small()(torch.zeros(1, 7, dtype=torch.int64))
