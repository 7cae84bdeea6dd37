import json

import pytest
import torch
from plan_requests import gpt_step
from small_steps import Chain, Classes, Experts, LongSequence, Mlp, Table, captured, draws

from sbp_aten.pass_options import PassOptions
from sbp_core.errors import ConfigError
from sbp_core.graph import GRAPH
from sbp_planner.configs import PATTERNS
from sbp_planner.dim_groups import GroupRole
from sbp_planner.patterns import LOOKED_FOR, Patterns, parameter_names


def patterns(graph, size=2, **more):
    return Patterns(graph=graph, axis="tensor", size=size, **more)


def names(groups, *parts):
    return parameter_names(use for group in groups for part in parts for use in group.of(part))


def rows(n, seed, width=8):
    return {"x": draws(seed, 4 * n, width)}


def looked_up(n, seed):
    return {"i": torch.arange(4 * n)}


def labelled(n, seed):
    return {"x": draws(seed, 4 * n, 8), "y": torch.arange(4 * n)}


def test_settings_know_the_patterns():
    assert tuple(LOOKED_FOR) == PATTERNS


def test_columns_and_rows_of_a_gpt_are_those_of_megatron():
    found = patterns(gpt_step()).find("tensor")

    assert names(found, GroupRole.MAKES) == [
        "blocks.*.mlp.up.weight",
        "blocks.*.attention.qkv.weight",
    ]
    assert names(found, GroupRole.CONTRACTS) == [
        "blocks.*.mlp.down.weight",
        "blocks.*.attention.proj.weight",
    ]


def test_nothing_hangs_on_names():
    text = json.dumps(GRAPH.dump(gpt_step()))
    for old, new in {"attention": "a", "qkv": "b", "proj": "c", "mlp": "d", "up": "e"}.items():
        text = text.replace(f".{old}.", f".{new}.")
    renamed = GRAPH.load(json.loads(text))

    found = patterns(renamed).find("tensor")

    assert names(found, GroupRole.MAKES) == ["blocks.*.d.e.weight", "blocks.*.a.b.weight"]


def test_of_a_chain_every_other_layer_is_made_in_columns():
    graph = captured(Chain(8, 4), rows).graph

    found = patterns(graph).find("tensor")

    assert names(found, GroupRole.MAKES) == ["layers.0.weight", "layers.2.weight"]
    assert names(found, GroupRole.CONTRACTS) == ["layers.1.weight", "layers.3.weight"]


def test_wide_dims_are_split_rather_than_narrow_ones():
    class Bottleneck(Mlp):
        """x (8) -> up (32) -> down (8) -> up (32): 8 is between two products, too."""

        def loss(self, batch):
            x = self.down(self.up(batch["x"]).relu())
            return self.up(x.relu()).square().mean()

    graph = captured(Bottleneck(8, 32), rows).graph

    (found,) = patterns(graph).find("tensor")

    assert ("up.weight", 0) in found.dims


def test_a_table_is_split_if_it_is_larger_than_what_is_looked_up_in_it():
    large, small = (captured(Table(size, 4), looked_up).graph for size in (64, 3))

    assert names(patterns(large).find("tables"), GroupRole.LOOKS_UP) == ["table.weight"]
    with pytest.raises(ConfigError, match=r"these tables are not larger: table\.weight"):
        patterns(small).find("tables")


def test_classes_are_split_where_their_softmax_is_in_parts():
    model, whole = Classes(8, 2048), PassOptions(split_classes=None)
    in_parts, one = (captured(model, labelled, options=how).graph for how in (None, whole))

    assert names(patterns(in_parts).find("classes"), GroupRole.MAKES) == ["head.weight"]
    with pytest.raises(ConfigError, match=r"split_classes.when=always.*: trunk|head\.weight"):
        patterns(one).find("classes")


def test_experts_are_split_and_not_their_router():
    graph = captured(Experts(8, 16, 4), rows).graph

    (found,) = patterns(graph).find("experts")

    assert names([found], GroupRole.BATCHES) == ["up", "down"]
    assert "router.weight" not in found.by_value


@pytest.mark.slow
def test_a_sequence_is_split_where_products_go_row_by_row():
    graph = captured(LongSequence(8), lambda n, seed: {"x": draws(seed, n, 16, 8)}).graph

    (found,) = patterns(graph).find("sequence")

    assert ("x", 1) in found.dims


def test_features_are_no_sequence():
    with pytest.raises(ConfigError, match="one sample of a micro-batch"):
        patterns(captured(Mlp(8, 16), rows).graph).find("sequence")


def test_a_value_that_is_split_is_not_split_again():
    graph = captured(Experts(8, 16, 4), rows).graph
    experts = patterns(graph).find("experts")
    split = {value: "experts" for group in experts for value in group.by_value}

    with pytest.raises(ConfigError, match="the pattern 'experts' splits the tensors"):
        patterns(graph, split=split).find("tensor")


def test_a_pattern_that_is_not_there_is_refused_with_those_that_are():
    graph = captured(Experts(8, 16, 4), rows).graph

    with pytest.raises(ConfigError, match="no pattern 'tables' for 2 ranks") as refused:
        patterns(graph).find("tables")

    assert refused.value.accepted == "of this model: tensor, experts"
    assert "planner=auto" in refused.value.todo
    assert refused.value.where == ("planner.patterns",)


def test_heads_that_are_fewer_than_ranks_are_named():
    found = patterns(gpt_step(), size=8).find("tensor")

    assert names(found, GroupRole.MAKES) == ["blocks.*.mlp.up.weight"]
