"""The parts of `parallelize` that need no planner; the whole is tested in `integration/`."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.runtime import BatchPart
from sbp_launch import parallelize
from sbp_launch.parallelize.arguments import compile_config, in_arguments
from sbp_launch.parallelize.choices import Choices
from sbp_launch.parallelize.ranks import backend_of, mesh_of
from sbp_launch.step.agreement import compare, compare_batches, digest_of
from sbp_launch.step.saved import as_path
from sbp_launch.step.scalars import UpdateScalars
from sbp_launch.world import World
from sbp_torch.capture import UpdateOptions


def among(*others):
    """Return a gather in which the other ranks, from 1 on, say what is given."""
    return lambda what, text: dict(enumerate((text, *others)))


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
        compare(own, lambda what, text, said=said: {0: said.append(text) or text})
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

    assert mesh_of(World(), shape, None).mesh_shape == tuple(shape)
    assert mesh_of(world, None, None).rank_list == tuple(range(size))
    if prod(shape) == size or size == 1:
        assert mesh_of(world, shape, None).rank_list == tuple(range(prod(shape)))
    else:
        with pytest.raises(ConfigError, match=f"torchrun started {size} process"):
            mesh_of(world, shape, None)


def test_the_ranks_of_one_process_are_threads_whoever_started_it():
    one = World.of_environment({"RANK": "0", "WORLD_SIZE": "1"})
    mesh, choices = mesh_of(one, 4, None), Choices()

    assert not backend_of(one, None, choices, mesh).spans_processes
    assert not backend_of(one, None, choices, mesh_of(one, None, None)).spans_processes
    with pytest.raises(ConfigError, match=r"torchrun has started one \(RANK=0, WORLD_SIZE=1\)"):
        backend_of(one, "torch", choices, mesh)


def test_the_former_name_of_a_planner_is_taken_with_a_warning():
    with pytest.warns(FutureWarning, match="planner=infer has a new name: planner=propagate"):
        option = Choices().option("planner", "infer")

    assert (option.chosen, option.name) == ("propagate", "propagate")


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
    assert not compile_config(None, None).autocast
    assert compile_config(None, torch.bfloat16).autocast == "bfloat16"


def test_help_explains_the_call_of_a_module():
    assert parallelize.__doc__.startswith("parallelize(model: ")
    assert "loss: `loss(model, batch)` returns a 0-d tensor" in parallelize.__doc__


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
        mesh_of(World(), mesh, None)


def test_errors_speak_of_arguments():
    with pytest.raises(ConfigError) as caught, in_arguments():
        raise ConfigError(
            "cluster.mesh=[2, 2] has 4 ranks",
            where=["trainer.micro_batches=3", "planner osdp"],
            accepted="cluster.axes=[data,tensor]",
            todo="set cluster.mesh=[4] cluster.axes=[data]",
        )

    error = caught.value
    assert (error.what, error.accepted) == ("mesh=[2, 2] has 4 ranks", "axes=['data', 'tensor']")
    assert error.where == ("micro_batches=3", "planner osdp")
    assert error.todo == "set mesh=[4] axes=['data']"
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
