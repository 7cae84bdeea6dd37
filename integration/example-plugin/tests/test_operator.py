import pytest
import torch

from sbp_core import legal_signatures
from sbp_core.signatures import RuleRegistry
from sbp_example_plugin.operator import low_rank
from sbp_torch.testing.signatures import check_rule, sample

NAME = "sbp_example.low_rank.default"


def matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_one_line_of_notation_gives_all_signatures() -> None:
    found = [str(part) for part in legal_signatures(NAME, (6, 4), (4, 2), (2, 8))]

    assert found == [
        "S(0), B, B -> S(0)",
        "B, B, S(1) -> S(1)",
        "S(1), S(0), B -> P",
        "B, S(1), S(0) -> P",
        "P, B, B -> P",
        "B, P, B -> P",
        "B, B, P -> P",
        "B, B, B -> B",
    ]


def test_every_signature_holds_when_it_is_run() -> None:
    check_rule(
        NAME, [sample(*matrices((5, 7), (7, 2), (2, 3))), sample(*matrices((4, 6), (6, 4), (4, 8)))]
    )


def test_a_wrong_notation_would_be_found() -> None:
    rules = RuleRegistry({NAME: "n i, i r, r o -> n o; reduce i max"})

    with pytest.raises(AssertionError, match="wrong"):
        check_rule(NAME, [sample(*matrices((5, 7), (7, 2), (2, 3)))], rules=rules)


@pytest.mark.parametrize("index", range(3))
def test_gradients_are_those_of_the_plain_product(index: int) -> None:
    inputs = [part.requires_grad_() for part in matrices((5, 7), (7, 2), (2, 3))]
    weight = matrices((5, 3))[0]

    ours = torch.autograd.grad((low_rank(*inputs) * weight).sum(), inputs)
    plain = torch.autograd.grad(((inputs[0] @ inputs[1] @ inputs[2]) * weight).sum(), inputs)

    assert torch.allclose(ours[index], plain[index])
