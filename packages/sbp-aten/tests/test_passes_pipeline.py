from __future__ import annotations

import logging
from dataclasses import fields, replace

import pytest

from sbp_aten.pass_options import (
    CastPlacement,
    ClassSplit,
    MixedPrecision,
    PassOptions,
    Slicing,
)
from sbp_aten.passes import prepare_step
from sbp_aten.passes.pipeline import chosen_passes
from sbp_core.errors import ConfigError, GraphError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import SliceAlong
from sbp_core.passes import RecomputeOptions
from sbp_core.plugins.settings import merge_settings
from sbp_core.testing.graphs import mlp

#: Every pass off.
NOTHING = PassOptions(
    tie_step_counters=False,
    fold_constants=False,
    drop_identities=False,
    fold_views=False,
    share_expressions=False,
    place_casts=None,
    split_classes=None,
    sum_losses=False,
    split_batch_norm=False,
    expose_batch_dim=False,
    recompute=None,
    defer_reductions=False,
    update_rows=None,
)

#: Every pass on, by its switch.
ON: dict[str, object] = {
    "tie_step_counters": True,
    "fold_constants": True,
    "drop_identities": True,
    "fold_views": True,
    "share_expressions": True,
    "mixed_precision": MixedPrecision(),
    "place_casts": CastPlacement(),
    "split_classes": ClassSplit(),
    "sum_losses": True,
    "deferred_batch_norm": True,
    "split_batch_norm": True,
    "split_backward": True,
    "slices": {"head": Slicing(count=2)},
    "expose_batch_dim": True,
    "recompute": RecomputeOptions(),
    "defer_reductions": True,
}


def _names(options: PassOptions) -> list[str]:
    return [name for name, _ in chosen_passes(options)]


def test_every_pass_has_its_switch() -> None:
    # Those run at fixed places, whatever passes are chosen.
    no_switches = {"accumulate_addends", "counters_apart", "update_rows"}

    assert {*ON, *no_switches} == {field.name for field in fields(PassOptions)}
    assert _names(NOTHING) == []
    for switch, value in ON.items():
        (name,) = _names(replace(NOTHING, **{switch: value}))
        assert name == {"slices": "slice_operators"}.get(switch, switch)


def test_passes_run_in_the_order_that_is_documented() -> None:
    import sbp_aten.passes.pipeline as module

    names = _names(PassOptions(**ON))  # type: ignore[arg-type]  # as annotated there

    assert module.__doc__ is not None
    documented = [line.split()[0] for line in module.__doc__.splitlines() if line[:4] == " " * 4]
    assert [name for name in documented if name in names] == names


def test_passes_that_change_numbers_are_off_unless_they_are_asked_for() -> None:
    assert not {"mixed_precision", "slice_operators"} & set(_names(PassOptions()))


def test_passes_of_plugins_run_among_the_others() -> None:
    def theirs(graph: LogicalGraph) -> LogicalGraph:
        return graph

    names = [name for name, _ in chosen_passes(PassOptions(**ON), [theirs])]  # type: ignore[arg-type]

    assert names.index("sum_losses") < names.index("theirs") < names.index("recompute")


def test_a_graph_that_goes_through_nothing_stays_as_it_is() -> None:
    graph = mlp()

    assert prepare_step(graph, options=NOTHING) is graph


def test_what_a_pass_does_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sbp_aten.passes")

    def drop_last(graph: LogicalGraph) -> LogicalGraph:
        outputs = tuple(out for out in graph.outputs if out.value != graph.nodes[-1].outputs[0])
        return graph.with_nodes(graph.nodes[:-1], outputs=outputs)

    graph = mlp()
    prepare_step(graph, extra=[drop_last], options=NOTHING)

    assert caplog.messages == [f"pass drop_last: {len(graph.nodes) - 1} nodes, -1"]


def test_a_graph_that_a_pass_breaks_is_an_error_that_names_the_pass() -> None:
    def reverse(graph: LogicalGraph) -> LogicalGraph:
        return replace(graph, nodes=graph.nodes[::-1])

    with pytest.raises(GraphError, match="used before it is made") as caught:
        prepare_step(mlp(), extra=[reverse])

    assert any("pass 'reverse'" in place for place in caught.value.where)


def test_options_are_read_from_plain_settings() -> None:
    options = merge_settings(
        PassOptions,
        {
            "fold_views": False,
            "mixed_precision": {"dtype": "float16", "keep": ["norm*"]},
            "place_casts": {"reduce_dtype": "as_made"},
            "split_classes": None,
            "slices": {"head.weight": {"count": 4, "along": "contraction"}},
        },
        key="passes",
    )

    assert options == PassOptions(
        fold_views=False,
        mixed_precision=MixedPrecision(dtype="float16", keep=("norm*",)),
        place_casts=CastPlacement(reduce_dtype="as_made"),
        split_classes=None,
        slices={"head.weight": Slicing(count=4, along=SliceAlong.CONTRACTION)},
    )
    with pytest.raises(ConfigError, match=r"passes\.mixed_precision\.dtyp"):
        merge_settings(PassOptions, {"mixed_precision": {"dtyp": 1}}, key="passes")


def test_a_graph_is_verified_again_only_if_a_pass_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verified: list[LogicalGraph] = []

    def verify(graph: LogicalGraph) -> LogicalGraph:
        verified.append(graph)
        return graph

    monkeypatch.setattr("sbp_aten.passes.pipeline.verify_graph", verify)
    prepare_step(mlp(), extra=[lambda graph: graph], options=NOTHING)
    once = len(verified)

    def copied(graph: LogicalGraph) -> LogicalGraph:
        return replace(graph, types=dict(graph.types))

    def with_fewer_outputs(graph: LogicalGraph) -> LogicalGraph:
        return replace(graph, outputs=graph.outputs[:-1])

    def with_more_types(graph: LogicalGraph) -> LogicalGraph:
        return replace(graph, types={**graph.types, "more": graph.types["x"]})

    prepare_step(mlp(), extra=[copied, copied, copied], options=NOTHING)
    assert len(verified) == 2 * once
    for changed in (with_fewer_outputs, with_more_types):
        before = len(verified)
        prepare_step(mlp(), extra=[copied, changed], options=NOTHING)
        assert len(verified) == before + once + 1
