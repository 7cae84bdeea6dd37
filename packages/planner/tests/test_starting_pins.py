import pytest
import torch
from plan_requests import gpt_step
from small_steps import Table, captured

from sbp_core.errors import ConfigError
from sbp_core.infer import is_pin_word
from sbp_core.placement import Placement
from sbp_planner.starting_pins import starting_pins


@pytest.mark.parametrize(
    ("mesh_shape", "axes", "name"),
    [
        ((2,), ("data",), "tensor parallel"),
        ((2, 2), ("data", "tensor"), "tensor parallel over tensor"),
    ],
)
def test_columns_and_rows_that_the_graph_shows_are_a_way(mesh_shape, axes, name):
    mesh = Placement.grid(mesh_shape, axes)

    pins = starting_pins(mesh)[name].of(gpt_step(), mesh)

    assert pins["blocks.0.mlp.up.weight"] == {axes[-1]: "S(0)"}
    assert pins["blocks.0.mlp.down.weight"] == {axes[-1]: "S(1)"}


def test_a_graph_without_them_has_no_such_way():
    class Rows(Table):
        def loss(self, batch):
            return self.table(batch["i"]).square().mean() + self.head.weight.square().mean()

    graph = captured(Rows(32, 4), lambda n, seed: {"i": torch.arange(4 * n)}).graph
    mesh = Placement.grid((2,), ("data",))

    with pytest.raises(ConfigError, match="no pattern 'tensor'"):
        starting_pins(mesh)["tensor parallel"].of(graph, mesh)


def test_all_other_ways_are_words():
    for mesh in (Placement.grid((2,), ("data",)), Placement.grid((2, 2), ("data", "tensor"))):
        for name, way in starting_pins(mesh).items():
            if "tensor parallel" not in name:
                assert all(map(is_pin_word, way.of(gpt_step(), mesh))), name
