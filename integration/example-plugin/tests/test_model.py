import torch

from sbp_example_plugin.model import build
from sbp_example_plugin.plugin import ModelConfig
from sbp_torch.kinds import LanguageModel


def test_the_model_is_a_language_model_of_sbp() -> None:
    model = build(ModelConfig(vocabulary=5, context=4, hidden=3))

    assert isinstance(model, LanguageModel)
    assert model.logits(torch.zeros(2, 4, dtype=torch.int64)).shape == (2, 4, 5)


def test_the_model_learns_which_token_follows_which() -> None:
    torch.manual_seed(0)
    model = build(ModelConfig(vocabulary=5, context=4, hidden=16))
    tokens = torch.tensor([[0, 1, 2, 3]])
    batch = {"tokens": tokens, "targets": tokens + 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)

    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()

    assert torch.equal(model.logits(tokens).argmax(-1), tokens + 1)
