"""The parts of `parallelize` that need no planner; the whole is tested in `integration/`."""

from __future__ import annotations

import json
import warnings
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sbp_launch
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.runtime import BatchPart
from sbp_launch import parallelize
from sbp_launch.parallel.arguments import compile_config, in_arguments, takes_former
from sbp_launch.parallel.choices import Choices
from sbp_launch.parallel.micro_batches import MicroBatches
from sbp_launch.parallel.ranks import backend_of, mesh_of
from sbp_launch.step.agreement import compare, compare_batches, digest_of
from sbp_launch.step.saved import as_path
from sbp_launch.step.scalars import UpdateScalars
from sbp_launch.world import World
from sbp_torch.graph_capture import UpdateOptions


def among(*others):
    """Return a gather in which the other ranks, from 1 on, say what is given."""
    return lambda text, what: [text, *others]


def test_a_difference_between_ranks_is_named_with_both_sides():
    own = {"torch": "2.13", "seed": "0"}
    other = json.dumps({"torch": "2.13", "seed": "1"})

    compare(own, among(json.dumps(own)))
    with pytest.raises(ConfigError, match="ranks differ in seed: ranks 0,2: 0; rank 1: 1"):
        compare(own, among(other, json.dumps(own)))
    with pytest.raises(ConfigError, match="differ in the plan: rank 0: none; rank 1: ab"):
        compare(own, among(json.dumps({**own, "the plan": "ab"})))


def test_what_is_shown_of_an_entry_is_not_compared():
    own = {"the step": "1f\0as it was planned"}

    compare(own, among(json.dumps({"the step": "1f\0frozen, and no longer frozen"})))
    with pytest.raises(ConfigError, match="rank 0: as it was planned; rank 1: frozen"):
        compare(own, among(json.dumps({"the step": "2e\0frozen"})))


def test_a_manifest_that_is_too_long_is_compared_by_hashes():
    for count, version in ((100, "1.0" * 50), (2000, "1.0")):
        own = {f"package {index}": version for index in range(count)}
        said = []
        compare(own, lambda text, what, said=said: [said.append(text) or text])
        assert len(said[0]) <= 8192
        assert version not in json.loads(said[0]).values()
        with pytest.raises(ConfigError, match=r"differ in (package 7|the program)"):
            compare({**own, "package 7": "other"}, among(said[0]))


def test_only_ranks_with_the_same_samples_have_to_have_the_same_batch():
    def part(start):
        return BatchPart(name="x", shape=(2,), dtype="float32", samples=(range(start, 2),), of=4)

    batch = {"x": torch.zeros(2), "unread": torch.zeros(1)}
    other = digest_of({"x": torch.ones(2)})
    compare_batches({"x": part(0)}, batch, among(json.dumps({"x": ["samples 2-3 of 4", other]})))
    with pytest.raises(ConfigError, match="ranks 0 and 1 were given different values for samples"):
        compare_batches({"x": part(0)}, batch, among(json.dumps({"x": [str(part(0)), other]})))


def test_a_digest_tells_values_names_and_shapes_apart():
    value = torch.arange(6.0)
    different = [
        {"x": value},
        {"y": value},
        {"x": value.reshape(2, 3)},
        {"x": value.double()},
        {"x": value + 1},
        {"x": torch.zeros(()).expand(6)},
    ]

    assert len({digest_of(tensors) for tensors in different}) == len(different)
    assert digest_of({"x": torch.ones(4, 2)[0:1, :1].T}) == digest_of({"x": torch.ones(1, 1)})
    assert digest_of({"x": value.reshape(2, 3).t()}) == digest_of({"x": value.reshape(2, 3).t()})
    assert digest_of({"x": torch.ones(()).expand(3)}) == digest_of(
        {"x": torch.ones(3)[:1].expand(3)}
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 24))
def test_a_mesh_is_taken_if_and_only_if_it_has_the_ranks_of_the_world(shape, size):
    world = World(rank=0, size=size, local_rank=0, local_size=size, launcher="torchrun")

    assert mesh_of(World(), shape).mesh_shape == tuple(shape)
    assert mesh_of(world, None).rank_list == tuple(range(size))
    if prod(shape) == size or size == 1:
        assert mesh_of(world, shape).rank_list == tuple(range(prod(shape)))
    else:
        with pytest.raises(ConfigError, match=f"torchrun started {size} process"):
            mesh_of(world, shape)


def test_the_ranks_of_one_process_are_threads_whoever_started_it():
    one = World.of_environment({"RANK": "0", "WORLD_SIZE": "1"})
    mesh, choices = mesh_of(one, 4), Choices()

    assert not backend_of(one, None, choices, mesh).spans_processes
    assert not backend_of(one, None, choices, mesh_of(one, None)).spans_processes


@pytest.mark.parametrize("given", ["x", "0.1", None, [0.1], torch.ones(2)], ids=str)
def test_a_rate_that_is_no_number_is_refused(given):
    parameter = torch.nn.Parameter(torch.ones(1))
    scalars = UpdateScalars(torch.optim.SGD([parameter], lr=0.1), UpdateOptions())

    with pytest.raises(SbpValueError, match=r"lr=.* is of type"):
        scalars.now({"lr": given})
    assert scalars.now({"lr": torch.tensor(0.5)}) == {"lr": 0.5}


@pytest.mark.parametrize("given", ["a\0b", 3, b"folder", None], ids=repr)
def test_what_is_no_path_is_refused(given):
    with pytest.raises(ConfigError, match=r"is no path\n  in step.save"):
        as_path(given, "step.save")
    assert as_path("folder", "step.save") == as_path(Path("folder"), "step.save") == Path("folder")


def test_a_precision_of_none_is_none():
    assert not compile_config(None).autocast
    assert compile_config({"autocast": torch.bfloat16}).autocast == "bfloat16"


def test_the_name_is_a_function_also_when_its_old_module_is_imported():
    with pytest.warns(DeprecationWarning, match="is sbp_launch.parallel.LengthBuckets now"):
        from sbp_launch.parallelize import LengthBuckets

    assert LengthBuckets is sbp_launch.LengthBuckets
    assert sbp_launch.parallelize is parallelize


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ("2x2", r"mesh='2x2' is of type str(.|\n)*write mesh=\(2, 2\)$"),
        ("4", r"mesh='4' is of type str(.|\n)*write mesh=4$"),
        (2.0, "mesh=2.0 is of type float"),
        ((2, "2"), "has no ranks"),
    ],
)
def test_a_mesh_of_another_type_is_told_how_to_write_it(mesh, told):
    with pytest.raises(ConfigError, match=told):
        mesh_of(World(), mesh)


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ({"mesh": (2, 2), "axes": ("a", "b")}, {"mesh": {"a": 2, "b": 2}}),
        ({"mesh": 2, "axes": "pipe"}, {"mesh": {"pipe": 2}}),
        ({"axes": "pipe"}, {"mesh": {"pipe": -1}}),
        ({"axes": None, "mesh": 2}, {"mesh": 2}),
        ({"clip_norm": 1.0}, {"update": {"clip_norm": 1.0}}),
        ({"clip_norm": None}, {}),
        (
            {"clip_norm": 1.0, "update": UpdateOptions(ema_decay=0.5)},
            {"update": UpdateOptions(ema_decay=0.5, clip_norm=1.0)},
        ),
        (
            {"autocast": "bfloat16", "prove": False, "compile": {"prefetch": 1}},
            {"compile": {"autocast": "bfloat16", "prove": False, "prefetch": 1}},
        ),
        (
            {"micro_batches": 4, "loss_is": "each_micro_batch", "micro_batches_per_update": 2},
            {"micro_batches": MicroBatches(4, loss="each_micro_batch", per_update=2)},
        ),
    ],
    ids=str,
)
def test_former_arguments_mean_what_they_meant_and_name_what_replaces_them(former, now):
    @takes_former
    def taken(**given):
        return given

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = taken(**former)

    assert found == now
    assert {str(one.message).partition("=")[0] for one in caught} == former.keys() - now.keys()


def test_a_former_argument_with_its_successor_is_refused():
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="are both given"):
        takes_former(dict)(clip_norm=1.0, update=UpdateOptions(clip_norm=2.0))
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match="does not name the axes"):
        takes_former(dict)(mesh=(2, 2), axes="data")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((0,), "micro_batches=0"),
        ((True,), "micro_batches=True"),
        (("4",), "micro_batches='4'"),
        ((4, "mean"), "loss='mean'"),
        ((4, "each_micro_batch", 3), "per_update=3 of 4"),
        ((4, "whole_batch", 2), "has one update a step"),
        (("auto", "each_micro_batch", 0), "per_update=0"),
    ],
    ids=str,
)
def test_micro_batches_that_cannot_be_are_refused(given, told):
    count, *rest = given
    more = dict(zip(("loss", "per_update"), rest, strict=False))

    with pytest.raises(ConfigError, match=told):
        MicroBatches(count, **more)


def test_an_axis_may_take_as_many_ranks_as_there_are_processes():
    world = World(rank=0, size=8, local_rank=0, local_size=8, launcher="torchrun")

    assert mesh_of(world, {"data": -1, "tensor": 2}).mesh_shape == (4, 2)
    assert mesh_of(world, {"tensor": -1}).axes == ("tensor",)
    for wrong in ({"data": -1, "tensor": 3}, {"data": -1, "tensor": -1}, {}, {"": 8}, {"data": 0}):
        with pytest.raises(ConfigError, match="the argument mesh"):
            mesh_of(world, wrong)


def test_errors_speak_of_arguments():
    with pytest.raises(ConfigError) as caught, in_arguments():
        raise ConfigError(
            "cluster.mesh=[2, 2] has 4 ranks",
            where=["trainer.micro_batches=3", "planner osdp"],
            accepted="cluster.axes=[data,tensor]",
            todo="set cluster.mesh=[4] cluster.axes=[data]",
        )

    error = caught.value
    assert (error.what, error.accepted) == (
        "mesh=[2, 2] has 4 ranks",
        "mesh={'data': ..., 'tensor': ...}",
    )
    assert error.where == ("micro_batches=3", "planner osdp")
    assert error.todo == "set mesh={'data': 4}"
    plain = ConfigError("something else")
    with pytest.raises(ConfigError) as caught, in_arguments():
        raise plain
    assert caught.value is plain


def test_scalars_follow_the_groups_unless_they_are_given():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    scalars = UpdateScalars(optimizer, UpdateOptions(scheduled=("momentum",), ema_decay=0.5))

    optimizer.param_groups[0]["momentum"] = 0.7
    assert scalars.now({"lr": 1.0, "lr.1": 0.3, "ema_decay": 0.25}) == {
        "lr.0": 1.0,
        "lr.1": 0.3,
        "momentum.0": 0.7,
        "momentum.1": 0.9,
        "ema_decay": 0.25,
    }
    with pytest.raises(SbpValueError, match="no scalar 'weight_decay'"):
        scalars.now({"weight_decay": 0.0})
