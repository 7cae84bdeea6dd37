import pytest
from hypothesis import given, settings
from stage_graphs import graphs

from sbp_core.errors import SbpValueError
from sbp_planner.stages import AtomicBlock, BlockGraph, Flow, chain


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs(max_blocks=7))
def test_the_order_puts_each_block_after_all_that_it_depends_on(graph):
    before = 0
    for at in graph.order:
        assert not graph.ancestors[at] & ~before
        assert not graph.predecessors[at] & ~graph.ancestors[at]
        before |= 1 << at
    assert before == (1 << len(graph.blocks)) - 1


def test_a_value_crosses_once_as_long_as_somebody_outside_uses_it():
    blocks = tuple(AtomicBlock(name=name) for name in "abc")
    flow = Flow(producer="a", consumers=("b", "c"), num_bytes=7)
    graph = BlockGraph(blocks=blocks, flows=(flow,))

    assert [graph.crossing_bytes(mask) for mask in (0b000, 0b001, 0b011, 0b111)] == [0, 7, 7, 0]


def test_a_chain_uses_one_after_the_other():
    graph = chain([AtomicBlock(name="a"), AtomicBlock(name="b"), AtomicBlock(name="c")], [3, 4])

    assert graph.successors == ((1,), (2,), ())
    assert [graph.crossing_bytes(mask) for mask in (0b001, 0b011)] == [3, 4]


def test_a_chain_needs_a_boundary_between_any_two_blocks():
    with pytest.raises(ValueError, match="shorter"):
        chain([AtomicBlock(name="a"), AtomicBlock(name="b")], [])


@pytest.mark.parametrize(
    ("names", "flows", "said"),
    [
        ("", [], "no stages"),
        ("aa", [], "'a'"),
        ("a", [("a", "z")], "'z'"),
        ("a", [("z", "a")], "'z'"),
        ("abc", [("a", "b"), ("b", "a")], "a, b wait for each other"),
        ("a", [("a", "a")], "cycle"),
    ],
)
def test_graphs_that_cannot_be_are_refused(names, flows, said):
    with pytest.raises(SbpValueError, match=said):
        BlockGraph(
            blocks=tuple(AtomicBlock(name=name) for name in names),
            flows=tuple(Flow(producer=p, consumers=(c,), num_bytes=1) for p, c in flows),
        )


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_that_cannot_be_are_refused(value):
    with pytest.raises(SbpValueError, match="no block"):
        AtomicBlock(name="a", forward_s=value)
