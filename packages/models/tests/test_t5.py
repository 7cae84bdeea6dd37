import pytest
import torch
from references import assert_equal_results, num_parameters, randomised, take_weights

from sbp_models.configs import T5Config
from sbp_models.t5 import T5, RelativeBias

SMALL = {"vocabulary": 11, "num_layers": 2, "num_heads": 2, "head_width": 4, "hidden": 8}
SMALL |= {"mlp_hidden": 16, "num_buckets": 8, "max_distance": 20}

#: The names of transformers -> ours.
NAMES = {
    r"^shared": "embed",
    r"^(encoder|decoder)\.embed_tokens.*": "(tied)",
    r"^lm_head.*": "(tied)",
    r"\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias": ".bias",
    r"\.block\.": ".blocks.",
    r"\.layer\.0\.SelfAttention": ".attention",
    r"\.layer\.0\.layer_norm": ".norm1",
    r"\.layer\.1\.EncDecAttention": ".cross",
    r"^(decoder.*)\.layer\.1\.layer_norm": r"\1.norm3",
    r"\.layer\.\d\.layer_norm": ".norm2",
    r"\.layer\.\d\.DenseReluDense": ".mlp",
    r"\.mlp\.wi": ".mlp.up",
    r"\.mlp\.wo": ".mlp.down",
    r"\.q\.": ".query.",
    r"\.k\.": ".key.",
    r"\.v\.": ".value.",
    r"\.o\.": ".output.",
    r"\.final_layer_norm": ".norm",
}


def small() -> T5:
    torch.manual_seed(0)
    return T5(T5Config(**SMALL))


def some_tokens(time: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (3, time), generator=torch.Generator().manual_seed(seed))


def test_the_published_size_is_met() -> None:
    config = T5Config(
        vocabulary=32128, num_layers=6, num_heads=8, head_width=64, hidden=512, mlp_hidden=2048
    )

    with torch.device("meta"):
        model = T5(config)

    # t5-small.
    assert num_parameters(model) == 60_506_624


def test_results_equal_those_of_transformers_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    reference = randomised(
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=11,
                d_model=8,
                d_kv=4,
                d_ff=16,
                num_layers=2,
                num_heads=2,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=20,
                decoder_start_token_id=0,
            )
        )
    )
    model = small()
    take_weights(model, reference, NAMES)
    tokens, targets = some_tokens(40), some_tokens(30, seed=1)
    before = torch.cat([torch.zeros(3, 1, dtype=torch.int64), targets[:, :-1]], dim=1)

    with torch.no_grad():
        expected = reference(input_ids=tokens, labels=targets)
        assert_equal_results(model(tokens, before), expected.logits)
        torch.testing.assert_close(
            model.loss({"tokens": tokens, "targets": targets}), expected.loss
        )


def test_a_target_is_predicted_from_those_before_it_only() -> None:
    model, tokens = randomised(small()), some_tokens()
    before = some_tokens(6, seed=1)
    changed = before.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11

    with torch.no_grad():
        first, second = model(tokens, before), model(tokens, changed)

    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.equal(first[:, 4:], second[:, 4:])


def test_near_distances_have_a_bucket_each_and_far_ones_share_the_last() -> None:
    config = T5Config(num_buckets=8, max_distance=20)
    distances = torch.tensor([-100, -20, -19, -2, -1, 0, 1, 2, 19, 100])

    both = RelativeBias(config, causal=False)._buckets(distances)
    causal = RelativeBias(config, causal=True)._buckets(distances)

    assert both.tolist() == [3, 3, 3, 2, 1, 0, 5, 6, 7, 7]
    assert causal.tolist() == [7, 7, 7, 2, 1, 0, 0, 0, 0, 0]
