import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights
from test_llama import NAMES as LLAMA_NAMES
from test_llama import SMALL as SMALL_LLAMA
from torch.nn import functional as F  # noqa: N812

from sbp_core.errors import SbpValueError
from sbp_models.configs import MoeConfig
from sbp_models.moe import Experts, Moe, balance_loss

SMALL = {**SMALL_LLAMA, "num_experts": 4, "top_k": 2}

#: The names of transformers -> ours.
NAMES = {
    **LLAMA_NAMES,
    r"\.mlp\.gate\.weight": ".experts.router.weight",
    r"\.mlp\.experts\.down_proj": ".experts.down",
}


def small(**settings: object) -> Moe:
    torch.manual_seed(0)
    return Moe(MoeConfig(**{**SMALL, **settings}))


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))


def one_by_one(experts: Experts, x: torch.Tensor, places: int) -> torch.Tensor:
    """Compute token by token and expert by expert, as the papers say it."""
    chances = experts.router(x).softmax(-1)
    taken = [0] * experts.num_experts
    results = []
    for token, chance in zip(x, chances, strict=True):
        picked = chance.topk(experts.top_k)
        total = torch.zeros_like(token)
        for weight, number in zip(picked.values, picked.indices.tolist(), strict=True):
            taken[number] += 1
            if taken[number] <= places:
                gate, up = experts.gate[number] @ token, experts.up[number] @ token
                result = experts.down[number] @ (F.silu(gate) * up)
                total = total + weight / picked.values.sum() * result
        results.append(total)
    return torch.stack(results)


def test_the_published_size_is_met() -> None:
    config = MoeConfig(
        vocabulary=32000,
        num_layers=32,
        num_heads=32,
        num_key_heads=8,
        hidden=4096,
        mlp_hidden=14336,
        num_experts=8,
    )

    with torch.device("meta"):
        model = Moe(config)

    # Mixtral 8x7B.
    assert num_parameters(model) == 46_702_792_704


def test_results_equal_those_of_transformers_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = randomised(
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=11,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=6,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                output_router_logits=True,
                router_aux_loss_coef=0.5,
            )
        )
    )
    reference.model.rotary_emb.inv_freq.copy_(10000.0 ** -torch.tensor([0, 0.5]))
    for block in reference.model.layers:  # their gate and up are one tensor
        gate, up = block.mlp.experts.gate_up_proj.data.chunk(2, dim=1)
        del block.mlp.experts.gate_up_proj
        block.mlp.experts.register_buffer("gate", gate.clone())
        block.mlp.experts.register_buffer("up", up.clone())
    model = small(balance=0.5)
    names = {**NAMES, r"\.mlp\.experts\.(gate|up)$": r".experts.\1"}
    take_weights(model, reference, names)
    for block in reference.model.layers:
        experts = block.mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(torch.cat([experts.gate, experts.up], dim=1))

    with torch.no_grad():
        expected = reference(some_tokens())
        logits, balance = model(some_tokens())
    assert_equal_results(logits, expected.logits)
    torch.testing.assert_close(balance, expected.aux_loss)


@pytest.mark.parametrize("capacity", [0.0, 0.3, 1.0, 10.0])
def test_experts_equal_their_formula_token_by_token(capacity: float) -> None:
    experts = randomised(small(capacity=capacity)).blocks[0].experts
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))

    found = experts(x)[0]

    places = {0.0: 18, 0.3: 3, 1.0: 9, 10.0: 18}[capacity]
    expected = one_by_one(experts, x.flatten(0, 1), places).view(x.shape)
    torch.testing.assert_close(found, expected)


def test_a_small_capacity_drops_tokens() -> None:
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))

    dropped, kept = (
        randomised(small(capacity=capacity)).blocks[0].experts(x)[0] for capacity in (0.3, 10.0)
    )

    assert ((dropped == 0).all(-1) & (kept != 0).any(-1)).any()


def test_the_balance_is_lowest_if_all_experts_are_picked_alike() -> None:
    even = torch.full((8, 4), 0.25)
    picked = torch.eye(4).repeat(2, 1)
    one = torch.tensor([1.0, 0, 0, 0]).expand(8, 4)

    assert balance_loss(even, picked).item() == pytest.approx(1.0)
    assert balance_loss(one, one).item() == pytest.approx(4.0)


def test_the_loss_is_reported_with_what_it_is_made_of() -> None:
    model = small(balance=0.5)
    batch = {"tokens": some_tokens(), "targets": some_tokens()}

    losses = model.losses(batch)

    total = losses["cross_entropy"] + 0.5 * losses["balance"]
    torch.testing.assert_close(losses["loss"], total)
    assert torch.equal(model.loss(batch), losses["loss"])
    assert all(value.shape == () for value in losses.values())


def test_the_router_learns_from_the_balance() -> None:
    model = small(balance=1.0)

    model.losses({"tokens": some_tokens(), "targets": some_tokens()})["balance"].backward()

    assert all(block.experts.router.weight.grad.abs().sum() > 0 for block in model.blocks)


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(SbpValueError, match="7 tokens are more than the context of 6"):
        small().logits(torch.zeros(1, 7, dtype=torch.int64))
