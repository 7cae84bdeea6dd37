import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights

from sbp_core.errors import SbpValueError
from sbp_models.configs import LlamaConfig
from sbp_models.llama import Llama, Rotary
from sbp_torch.kinds import LanguageModel

SMALL = {"vocabulary": 11, "context": 6, "num_layers": 2, "num_heads": 4, "num_key_heads": 2}
SMALL |= {"hidden": 16, "mlp_hidden": 24}

#: The names of transformers -> ours.
NAMES = {
    r"^model\.embed_tokens": "embed",
    r"^model\.layers\.": "blocks.",
    r"^model\.norm": "norm",
    r"\.input_layernorm": ".norm1",
    r"\.post_attention_layernorm": ".norm2",
    r"\.self_attn\.q_proj": ".attention.query",
    r"\.self_attn\.k_proj": ".attention.key",
    r"\.self_attn\.v_proj": ".attention.value",
    r"\.self_attn\.o_proj": ".attention.output",
    r"\.mlp\.(gate|up|down)_proj": r".mlp.\1",
    r"^lm_head": "head",
}

#: Heads of keys and values, width of the MLP, tokens -> parameters of 32 layers 4096 wide.
PUBLISHED = {
    (32, 11008, 32000): 6_738_415_616,  # Llama 2 7B
    (8, 14336, 128256): 8_030_261_248,  # Llama 3 8B
}


def small(**settings: object) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**SMALL, **settings}))


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("sizes", "published"), PUBLISHED.items())
def test_the_published_sizes_are_met(sizes: tuple[int, int, int], published: int) -> None:
    num_key_heads, mlp_hidden, vocabulary = sizes
    config = LlamaConfig(
        vocabulary=vocabulary,
        num_layers=32,
        num_heads=32,
        num_key_heads=num_key_heads,
        hidden=4096,
        mlp_hidden=mlp_hidden,
    )

    with torch.device("meta"):
        model = Llama(config)

    assert num_parameters(model) == published


@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_results_equal_those_of_transformers_with_the_same_weights(num_key_heads: int) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = randomised(
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=11,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=num_key_heads,
                max_position_embeddings=6,
                rms_norm_eps=1e-5,
                rope_theta=10000.0,
            )
        )
    )
    # The reference's own wavelengths are a buffer, too.
    reference.model.rotary_emb.inv_freq.copy_(10000.0 ** -torch.tensor([0, 0.5]))
    model = small(num_key_heads=num_key_heads)
    take_weights(model, reference, NAMES)

    with torch.no_grad():
        assert_equal_results(model(some_tokens()), reference(some_tokens()).logits)


def test_rotary_positions_make_scores_depend_on_distances_only() -> None:
    rotary = Rotary(context=9, width=4, base=10.0)
    q, k = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))

    scores = rotary(q.expand(1, 1, 9, 4)) @ rotary(k.expand(1, 1, 9, 4)).transpose(2, 3)

    torch.testing.assert_close(scores[0, 0, 1:, 1:], scores[0, 0, :-1, :-1])
    assert scores[0, 0, 0].std() > 0.1


def test_the_model_is_a_language_model_of_the_contract() -> None:
    model = small()

    assert isinstance(model, LanguageModel)
    assert model.logits(some_tokens()).shape == (3, 6, 11)


def test_logits_depend_on_no_later_token() -> None:
    model, tokens = randomised(small()), some_tokens()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11

    before, after = model.logits(tokens), model.logits(changed)

    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(SbpValueError, match="7 tokens are more than the context of 6"):
        small().logits(torch.zeros(1, 7, dtype=torch.int64))


def test_the_tables_of_positions_are_no_part_of_the_saved_state() -> None:
    assert not [name for name in small().state_dict() if "rotary" in name]
