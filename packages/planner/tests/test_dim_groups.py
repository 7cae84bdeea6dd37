import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_requests import gpt_step
from small_steps import Experts, LongSequence, Mlp, Table, captured, draws
from torch import nn

from sbp_core.testing.graphs import mlp
from sbp_planner.dim_groups import GroupRole, dim_groups


def group_of(graph, name, dim, num_ranks=2, num_before=1):
    """Return the group that a dim of a parameter is in."""
    shown = dim_groups(graph, num_ranks, num_before)
    (found,) = (group for group in shown.groups if (name, dim) in group.dims)
    return found


def parameters(group, part):
    return [name for use in group.of(part) for name in use.parameters]


def test_hidden_units_are_made_by_one_parameter_and_contracted_by_another():
    graph = captured(Mlp(8, 16), lambda n, seed: {"x": draws(seed, 4 * n, 8)}).graph

    hidden = group_of(graph, "up.weight", 0)

    assert hidden == group_of(graph, "down.weight", 1)
    assert parameters(hidden, GroupRole.MAKES) == ["up.weight"]
    assert parameters(hidden, GroupRole.CONTRACTS) == ["down.weight"]
    assert ("up.bias", 0) in hidden.dims
    assert not hidden.ends


def test_heads_end_where_there_are_fewer_than_ranks():
    graph = gpt_step()  # with 4 heads

    few, many = (
        group_of(graph, "blocks.0.attention.qkv.weight", 0, num_ranks) for num_ranks in (4, 8)
    )

    assert parameters(few, GroupRole.CONTRACTS) == ["blocks.0.attention.proj.weight"]
    assert not parameters(many, GroupRole.CONTRACTS)
    assert many.ends


def test_heads_are_no_samples_however_many_ranks_split_these():
    graph = gpt_step()  # with 4 heads

    heads = group_of(graph, "blocks.0.attention.qkv.weight", 0, num_ranks=2, num_before=4)

    assert parameters(heads, GroupRole.CONTRACTS) == ["blocks.0.attention.proj.weight"]


def test_a_residual_stream_ends_at_a_norm():
    graph = gpt_step()

    stream = group_of(graph, "blocks.0.mlp.down.weight", 0)

    assert parameters(stream, GroupRole.MAKES) == [
        "blocks.0.attention.proj.weight",
        "blocks.0.mlp.down.weight",
    ]
    assert "blocks.0.add" in stream.ends


def test_rows_of_a_table_are_looked_up():
    def batch(n, seed):
        return {"i": torch.arange(8 * n)}

    graph = captured(Table(32, 4), batch).graph

    rows, columns = (group_of(graph, "table.weight", dim) for dim in (0, 1))

    assert parameters(rows, GroupRole.LOOKS_UP) == ["table.weight"]
    assert parameters(columns, GroupRole.CONTRACTS) == ["head.weight"]


def test_experts_have_a_part_of_their_own_of_parameters_and_activations():
    graph = captured(Experts(8, 16, 4), lambda n, seed: {"x": draws(seed, 4 * n, 8)}).graph

    experts, hidden = (group_of(graph, "up", dim) for dim in (0, 2))

    assert parameters(experts, GroupRole.BATCHES) == ["up", "down"]
    assert parameters(hidden, GroupRole.MAKES) == ["up"]
    assert parameters(hidden, GroupRole.CONTRACTS) == ["down"]


def test_rows_that_the_batch_chooses_in_each_part_of_a_parameter_count_as_a_parameter():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.Parameter(draws(0, 4, 6, 8))

        def loss(self, batch):
            places = (batch["y"].sum() % 6).expand(4, 3, 8)
            rows = self.parts.gather(1, places).flatten(0, 1)
            return (batch["x"] @ rows.T).square().mean()

    def batch(n, seed):
        return {"x": draws(seed, 4 * n, 8), "y": torch.arange(4 * n)}

    graph = captured(Chosen(), batch).graph

    parts, width = (group_of(graph, "parts", dim) for dim in (0, 2))

    product = next(node.outputs[0] for node in graph.nodes if node.kind == "mm")
    assert parameters(parts, GroupRole.MAKES) == ["parts"]
    assert (product, 1) in parts.dims
    assert parameters(width, GroupRole.CONTRACTS) == ["parts"]


def test_a_bias_alone_makes_no_dim():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(draws(0, 8))

        def loss(self, batch):
            return (batch["x"] + self.shift).square().mean()

    graph = captured(Shift(), lambda n, seed: {"x": draws(seed, 4 * n, 8)}).graph

    assert not group_of(graph, "shift", 0).uses


@pytest.mark.slow
def test_queries_and_keys_are_of_one_group_that_no_tensor_may_have_twice():
    graph = captured(LongSequence(8), lambda n, seed: {"x": draws(seed, n, 16, 8)}).graph

    (times,) = (group for group in dim_groups(graph, 2).groups if ("x", 1) in group.dims)

    assert times.is_consistent
    assert not times.uses
    assert times.ends  # keys


def test_times_of_rows_are_a_group_behind_an_axis_with_one_sample_each():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def loss(self, batch):
            return self.layer(batch["x"]).square().mean()

    graph = captured(Rows(), lambda n, seed: {"x": draws(seed, 2 * n, 16, 8)}).graph

    product = next(node.outputs[0] for node in graph.nodes if node.kind == "addmm")
    for before, is_linked in ((1, False), (2, True), (4, False)):
        groups = dim_groups(graph, 2, before).groups
        linked = [group for group in groups if {("x", 1), (product, 0)} <= set(group.dims)]
        assert bool(linked) == is_linked, before


@given(st.lists(st.integers(2, 9), min_size=3, max_size=6), st.integers(2, 4))
@settings(deadline=None, max_examples=25)
def test_of_a_chain_of_layers_each_dim_between_is_a_group_of_its_own(widths, num_ranks):
    graph = mlp(tuple(widths))
    weights = [entry.name for entry in graph.inputs if len(graph.types[entry.name].shape) == 2
               and entry.kind.value == "parameter"]  # fmt: skip

    groups = [group for group in dim_groups(graph, num_ranks).groups if group.of(GroupRole.MAKES)]

    inner = [group for group in groups if group.of(GroupRole.CONTRACTS)]
    assert [parameters(group, GroupRole.MAKES) for group in inner] == [
        [one] for one in weights[:-1]
    ]
    assert [parameters(group, GroupRole.CONTRACTS) for group in inner] == [
        [one] for one in weights[1:]
    ]
    assert all(group.is_consistent for group in inner)
