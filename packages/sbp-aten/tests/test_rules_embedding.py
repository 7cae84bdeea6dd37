"""Rules of embeddings and bags: verified by execution, and what a window of the vocabulary does."""

from __future__ import annotations

import pytest
import torch
from ranks_of_a_call import on_each_rank

from sbp_aten.rules import embedding_bag, indexing
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_core.signatures import derive, localize
from sbp_core.strategy import Signature
from sbp_torch.signatures.verification import call_of
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(3)

#: Places on either side of every border between shards of seven rows, over two ranks and three.
PLACES = torch.tensor([[0, 3, 6, 4], [2, 5, 1, 3]])

SUM, MEAN, MAX = 0, 1, 2

_FORWARD = "aten._embedding_bag.default"


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def _bag(mode: int, *, padding: int = -1, weighted: bool = False, last: bool = False) -> Sample:
    offsets = [0, 2, 2, 7, *([8] if last else [])]
    weights = real(8) if weighted else None
    places = torch.tensor([0, 2, 6, 2, 1, 5, 3, 3])
    table, begins = real(7, 3), torch.tensor(offsets)
    return sample(table, places, begins, False, mode, False, weights, last, padding)


def _bag_gradient(mode: int, *, dense: bool, counts: bool = False, padding: int = -1) -> Sample:
    (table, places, offsets, *_, weights, _, _), _ = _bag(mode, weighted=mode == SUM)
    made, *told = torch.ops.aten._embedding_bag.default(
        table, places, offsets, False, mode, False, weights, False, padding
    )
    gradient = torch.randn_like(made)
    if dense:
        return sample(gradient, places, *told, 7, counts, mode, weights, padding)
    return sample(gradient, places, offsets, *told, 7, counts, mode, False, weights, padding)


def _weights_gradient(padding: int) -> Sample:
    (table, places, offsets, *_), _ = _bag(SUM, weighted=True)
    made, bag_of, *_ = torch.ops.aten._embedding_bag.default(table, places, offsets)
    return sample(torch.randn_like(made), table, places, offsets, bag_of, SUM, padding)


_BAGS = [
    _bag(SUM, padding=3, last=True),
    _bag(SUM, weighted=True),
    _bag(MEAN),
    _bag(MEAN, padding=3),
    _bag(MAX, padding=3),
]

CASES: dict[str, list[Sample]] = {
    "aten._embedding_bag.default": _BAGS,
    "aten._embedding_bag_backward.default": [
        _bag_gradient(SUM, dense=False, padding=3),
        _bag_gradient(MEAN, dense=False),
        _bag_gradient(MAX, dense=False),
    ],
    "aten._embedding_bag_dense_backward.default": [
        _bag_gradient(SUM, dense=True, padding=2),
        _bag_gradient(MEAN, dense=True, counts=True),
        _bag_gradient(MAX, dense=True),
    ],
    "aten._embedding_bag_forward_only.default": [_BAGS[0], _BAGS[2]],
    "aten._embedding_bag_per_sample_weights_backward.default": [
        _weights_gradient(-1),
        _weights_gradient(3),
    ],
    "aten.embedding.default": [
        sample(real(7, 3), PLACES),
        sample(real(2, 3), PLACES % 2),
        sample(real(7, 3), PLACES[0, 0]),
    ],
    "aten.embedding_dense_backward.default": [
        sample(real(2, 4, 3), PLACES, 7, 3, False),
        sample(real(2, 4, 3), PLACES, 7, -1, True),
        sample(real(4, 3), PLACES[0] % 2, 2, 0, False),
    ],
    "aten.embedding_renorm.default": [sample(real(7, 3), PLACES, 0.5, 2.0)],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("op", CASES)
def test_embeddings_can_be_cut_as_their_rules_say(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 3))


def test_every_rule_of_embeddings_is_verified() -> None:
    embeddings = {op for op in indexing.RULES if op.startswith("aten.embedding")}

    assert set(CASES) == embeddings | set(embedding_bag.RULES)


def test_embedding_has_these_signatures() -> None:
    found = derive(call_of("aten.embedding.default", [real(7, 3), PLACES], {})[0], 2)

    assert {(entry.inputs, entry.outputs) for entry in found} == {
        ((S(0), B), (P,)),
        ((S(1), B), (S(2),)),
        ((B, S(0)), (S(0),)),
        ((B, S(1)), (S(1),)),
        ((P, B), (P,)),
        ((P("max"), B), (P("max"),)),
        ((P("min"), B), (P("min"),)),
        ((B, B), (B,)),
    }


def test_a_rank_looks_up_its_rows_and_gives_zeros_for_all_others() -> None:
    table = real(7, 3)

    first, second, third = on_each_rank(
        "aten.embedding.default", [table, PLACES], [S(0), B], [P], 3
    )

    # Rows 0 to 2, 3 and 4, 5 and 6.
    for made, rows in ((first, (0, 1, 2)), (second, (3, 4)), (third, (5, 6))):
        held = torch.isin(PLACES, torch.tensor(rows))
        assert torch.equal(made[held], table[PLACES[held]])
        assert not made[~held].any()


def test_all_ranks_of_a_split_table_do_the_same_but_for_where_their_rows_begin() -> None:
    call, _ = call_of("aten.embedding.default", [real(9, 3), PLACES], {})
    signature = Signature((NdSbp(S(0)), NdSbp(B)), (NdSbp(P),))
    mesh = Placement.grid((3,))

    programs = [localize(call, signature, mesh, rank) for rank in mesh.rank_list]

    first, *others = ([entry.op for entry in program.calls] for program in programs)
    assert len(first) > 1
    assert others == [first, first]


def test_a_row_that_is_not_finite_does_not_spread_to_places_of_other_ranks() -> None:
    table = real(7, 3)
    table[0] = torch.nan

    first, second = on_each_rank("aten.embedding.default", [table, PLACES], [S(0), B], [P], 2)

    assert first.isnan().any(-1).tolist() == (PLACES == 0).tolist()
    assert not second.isnan().any()


def test_a_rank_without_rows_gives_zeros() -> None:
    table, places = real(2, 3), torch.tensor([1, 0, 1])

    made = on_each_rank("aten.embedding.default", [table, places], [S(0), B], [P], 3)

    assert [tuple(part.shape) for part in made] == [(3, 3)] * 3
    assert not made[2].any()
    assert torch.equal(sum(made), table[places])


@pytest.mark.parametrize("padding", [-1, 0, 2, 3, 4, 6])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_gradient_of_a_split_vocabulary_skips_padding_on_the_rank_that_holds_it(
    padding: int, size: int
) -> None:
    op, gradient = "aten.embedding_dense_backward.default", real(2, 4, 3)
    whole = torch.ops.aten.embedding_dense_backward.default(gradient, PLACES, 7, padding, False)

    made = on_each_rank(op, [gradient, PLACES, 7, padding, False], [B, B], [S(0)], size)

    assert torch.allclose(torch.cat(made), whole)
    assert padding < 0 or not whole[padding].any()


def test_counts_of_rows_keep_places_whole_but_not_the_vocabulary() -> None:
    call, _ = call_of(
        "aten.embedding_dense_backward.default", [real(8, 3), PLACES.flatten(), 7, -1, True], {}
    )

    found = {(entry.inputs, entry.outputs) for entry in derive(call, 2)}

    assert ((B, B), (S(0),)) in found
    assert ((S(0), S(0)), (P,)) not in found


def test_bags_are_partial_sums_over_rows_and_over_places() -> None:
    args, _ = _bag(MEAN)

    found = {entry.inputs: entry.outputs for entry in derive(call_of(_FORWARD, args, {})[0], 2)}

    assert found[S(0), B, B] == (P, B, B, B)
    assert found[B, S(0), B] == (P, S(0), P, P)
    assert found[S(1), B, B] == (S(1), B, B, B)


def test_means_of_bags_with_padding_need_all_places() -> None:
    args, _ = _bag(MEAN, padding=3)

    found = {entry.inputs: entry.outputs for entry in derive(call_of(_FORWARD, args, {})[0], 2)}

    assert (S(0), B, B) in found
    assert (B, S(0), B) not in found
