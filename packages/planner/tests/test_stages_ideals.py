from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_graphs import graphs

from sbp_planner.stages import AtomicBlock, BlockGraph, Flow, order_ideals


def is_ideal(graph, mask):
    return all(not needed & ~mask for at, needed in enumerate(graph.predecessors) if mask >> at & 1)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs(max_blocks=7))
def test_all_down_closed_sets_are_found(graph):
    count = len(graph.blocks)
    expected = {mask for mask in range(1 << count) if is_ideal(graph, mask)}

    found = order_ideals(graph, 1 << count)

    assert found.complete
    assert set(found.masks) == expected
    assert found.masks[0] == 0
    assert found.masks[-1] == (1 << count) - 1


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs(max_blocks=7), st.integers(1, 12))
def test_some_ideals_are_ideals_of_every_number_of_blocks_and_are_measured(graph, limit):
    found = order_ideals(graph, limit)

    assert all(is_ideal(graph, mask) for mask in found.masks)
    sizes = [mask.bit_count() for mask in found.masks]
    assert set(sizes) == set(range(len(graph.blocks) + 1))
    assert sizes[0] == 0
    assert sizes[-1] == len(graph.blocks)
    assert not np.tril(found.below).any()  # those that an ideal lies in come later
    for at, mask in enumerate(found.masks):
        inside = [block for n, block in enumerate(graph.blocks) if mask >> n & 1]
        assert found.compute_s[at] == sum(block.compute_s for block in inside)
        assert found.parameter_bytes[at] == sum(block.parameter_bytes for block in inside)
        assert found.activation_bytes[at] == sum(block.activation_bytes for block in inside)
        assert found.crossing_bytes[at] == graph.crossing_bytes(mask)
    pairs = [[one != two and not one & ~two for two in found.masks] for one in found.masks]
    assert np.array_equal(found.below, pairs)


def test_light_blocks_of_a_chain_are_merged_before_heavy_ones():
    # Two branches of twenty light blocks and a heavy one: merged, the light ones are few.
    names = [[f"{branch}{at}" for at in range(21)] for branch in "ab"]
    blocks = tuple(
        AtomicBlock(name=name, forward_s=100.0 if own.index(name) == 10 else 0.001)
        for own in names
        for name in own
    )
    flows = tuple(
        Flow(producer=one, consumers=(two,), num_bytes=1)
        for own in names
        for one, two in pairwise(own)
    )
    graph = BlockGraph(blocks=blocks, flows=flows)

    found = order_ideals(graph, 100)

    assert 22**2 > 100  # all ideals
    assert not found.complete
    assert "chains merged up to 1/1024" in found.family
    # Before and behind each heavy block there is a cut, in any combination.
    heavy = [1 << graph.index[f"{branch}10"] for branch in "ab"]
    halves = {tuple(bool(mask & one) for one in heavy) for mask in found.masks}
    assert len(halves) == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(graphs(max_blocks=7), st.integers(1, 9))
def test_some_of_them_hold_what_they_hold_among_all(graph, count):
    every = order_ideals(graph, 200)

    few = every.some(count)

    assert (few.masks[0], few.masks[-1]) == (every.masks[0], every.masks[-1])
    assert len(few.masks) <= count + 2
    chosen = [every.masks.index(mask) for mask in few.masks]
    assert np.array_equal(few.compute_s, every.compute_s[chosen])
    assert np.array_equal(few.crossing_bytes, every.crossing_bytes[chosen])
    assert np.array_equal(few.below, every.below[np.ix_(chosen, chosen)])


@pytest.mark.parametrize("count", [1, 5])
def test_without_edges_every_set_is_an_ideal(count):
    graph = BlockGraph(blocks=tuple(AtomicBlock(name=str(at)) for at in range(count)))

    assert len(order_ideals(graph, 1000).masks) == 2**count
