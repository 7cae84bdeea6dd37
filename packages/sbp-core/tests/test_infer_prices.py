from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbp_core.boxing import route
from sbp_core.cost import boxing_time_s
from sbp_core.errors import SbpError
from sbp_core.infer.prices import Prices
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_core.testing.graphs import cluster

MESH = Placement.grid((2, 2), ("data", "tensor"))
MACHINE = cluster(num_devices=4)

entries = st.sampled_from([B, P, S(0), S(1), S(2)])
sbps = st.tuples(entries, entries)


@settings(max_examples=60)
@given(
    st.tuples(*[st.sampled_from([1, 2, 3, 4, 8, 12])] * 3),
    sbps,
    sbps,
    st.permutations(range(3)),
)
def test_dims_may_change_places_and_no_price_does(shape, source, target, order):
    prices = Prices((MESH,), range(2), MACHINE)

    def moved(sbp):
        return tuple(S(order.index(one.dim)) if isinstance(one, type(S(0))) else one for one in sbp)

    def direct(shape, source, target):
        ends = (MESH, NdSbp(*source)), (MESH, NdSbp(*target))
        return boxing_time_s(route(shape, "float32", *ends), MACHINE)

    other = tuple(shape[dim] for dim in order)
    try:
        wanted = direct(shape, source, target)
    except SbpError:
        assume(False)
    # The first is asked of the router, and the second is one with it.
    first, _ = prices.price(other, "float32", (0, moved(source)), (0, moved(target)))
    second, _ = prices.price(shape, "float32", (0, source), (0, target))

    assert first == second
    assert second == wanted
    assert direct(other, moved(source), moved(target)) == wanted


def test_of_dims_that_all_ranks_divide_only_the_size_of_the_tensor_matters():
    prices = Prices((MESH,), range(2), MACHINE)
    ends = (0, (S(0), P)), (0, (B, S(1)))

    first, second = (prices.price(shape, "float32", *ends) for shape in ((8, 16, 4), (32, 4, 4)))

    source, target = ((MESH, NdSbp(*end)) for _, end in ends)
    assert first == second
    for shape in ((8, 16, 4), (32, 4, 4)):
        assert boxing_time_s(route(shape, "float32", source, target), MACHINE) == first[0]
    assert prices.price((8, 18, 4), "float32", *ends) != first


def test_one_axis_is_priced_on_a_group_along_it():
    whole = Prices((MESH,), range(2), MACHINE)
    inner = Prices((MESH,), range(1, 2), MACHINE)

    alone = inner.price((8, 8), "float32", (0, (P,)), (0, (B,)))
    both = whole.price((8, 8), "float32", (0, (B, P)), (0, (B, B)))

    assert alone == both  # the bytes are those of both groups


def test_stages_that_lie_alike_have_one_price_and_others_their_own():
    machine = replace(cluster(num_devices=16, bytes_per_s=1e9), devices_per_node=4)
    stages = tuple(
        Placement(ranks, ("data", "tensor"))
        for ranks in ([[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [12, 13]])
    )
    prices = Prices(stages, range(2), machine)
    ends = ((S(0), P), (B, S(1)))

    found = {
        pair: prices.price((8, 16), "float32", (pair[0], ends[0]), (pair[1], ends[1]))
        for pair in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 0), (1, 2))
    }

    for (source, target), (seconds, _) in found.items():
        states = (stages[source], NdSbp(*ends[0])), (stages[target], NdSbp(*ends[1]))
        assert seconds == boxing_time_s(route((8, 16), "float32", *states), machine)
    assert found[0, 0] == found[1, 1] != found[2, 2]
    assert found[0, 1] == found[1, 0] != found[0, 0]


def test_a_table_is_made_once_for_pairs_of_stages_that_are_alike(monkeypatch):
    mesh = Placement.grid((4, 2), ("pipe", "data"))
    stages = tuple(mesh.submesh(0, at) for at in range(4))
    prices = Prices(stages, range(1), cluster(num_devices=8))
    entries = [(entry,) for entry in (B, P, S(0), S(1))]

    def table(first, second):
        ends = ([(stage, entry) for entry in entries] for stage in (first, second))
        return prices.table((8, 6), "float32", *ends)

    within, across = table(0, 0), table(0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(prices, "_priced_table", None)  # nothing is priced again
        assert table(2, 2) is within
        assert table(1, 2) is across

    assert within != across
    for made, pair in ((within, (2, 2)), (across, (1, 2))):
        new = Prices(stages, range(1), cluster(num_devices=8))
        for row, source in zip(made, entries, strict=True):
            for price, target in zip(row, entries, strict=True):
                ends = (pair[0], source), (pair[1], target)
                assert new.price((8, 6), "float32", *ends) == price
