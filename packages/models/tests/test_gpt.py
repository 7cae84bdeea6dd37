import pytest
import torch

from sbp_core.errors import SbpValueError
from sbp_models.configs import GptConfig
from sbp_models.gpt import Gpt
from sbp_torch.kinds import LanguageModel

SMALL = GptConfig(vocabulary=11, context=6, num_layers=2, num_heads=2, hidden=8)


def small(seed: int = 0) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(SMALL)


def some_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(seed))


def test_the_default_model_has_a_few_million_parameters() -> None:
    model = Gpt(GptConfig())

    assert sum(parameter.numel() for parameter in model.parameters()) == 3_323_392


def test_parameters_bear_the_names_that_plans_pin() -> None:
    names = {name for name, _ in small().named_parameters()}

    block = ["norm1", "attention.qkv", "attention.proj", "norm2", "mlp.up", "mlp.down"]
    expected = {"embed.tokens.weight", "embed.positions.weight", "head.weight"}
    expected |= {"norm.weight", "norm.bias"}
    for layer in range(2):
        for part in block:
            expected |= {f"blocks.{layer}.{part}.weight", f"blocks.{layer}.{part}.bias"}
    assert names == expected


def test_equal_seeds_make_equal_models_and_other_seeds_others() -> None:
    first, again, other = small(1), small(1), small(2)

    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_the_model_is_a_language_model_of_the_contract() -> None:
    model = small()

    assert isinstance(model, LanguageModel)
    assert model.context == 6
    assert model.logits(some_tokens()).shape == (3, 6, 11)


def test_logits_depend_on_no_later_token() -> None:
    model, tokens = small(), some_tokens()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11

    before, after = model.logits(tokens), model.logits(changed)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_loss_is_the_mean_negative_log_likelihood_of_the_targets() -> None:
    model, tokens, targets = small(), some_tokens(0), some_tokens(1)

    loss = model.loss({"tokens": tokens, "targets": targets})

    log_p = torch.log_softmax(model.logits(tokens), dim=-1)
    picked = log_p.gather(-1, targets[..., None])
    torch.testing.assert_close(loss, -picked.mean())
    assert loss.shape == ()


def test_attention_equals_its_formula_head_by_head() -> None:
    attention = small().blocks[0].attention
    inputs = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))

    found = attention(inputs)

    heads = []
    for head in range(2):
        rows = slice(12 * head, 12 * head + 12)
        q, k, v = (inputs @ attention.qkv.weight[rows].T + attention.qkv.bias[rows]).split(4, -1)
        scores = q @ k.transpose(1, 2) / 2.0
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    expected = attention.proj(torch.cat(heads, -1))
    torch.testing.assert_close(found, expected)


def test_every_parameter_gets_a_gradient() -> None:
    model = small()

    model.loss({"tokens": some_tokens(0), "targets": some_tokens(1)}).backward()

    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(SbpValueError, match="7 tokens are more than the context of 6"):
        small().logits(torch.zeros(1, 7, dtype=torch.int64))


def test_a_few_steps_of_adamw_learn_a_sequence_by_heart() -> None:
    model, tokens = small(), torch.arange(6)[None]
    batch = {"tokens": tokens, "targets": tokens + 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)

    for _ in range(40):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()

    assert model.loss(batch).item() < 0.1
    assert torch.equal(model.logits(tokens).argmax(-1), tokens + 1)
