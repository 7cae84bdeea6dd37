"""What ranks are fed with: their parts of a whole batch or of a process' part, and refusals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.runtime import BatchIs, batch_parts
from sbp_torch.runtime.feeding import Feeder
from sbp_torch.testing.cases import CASES, compile_case, local_batch

NAMES = (
    "uneven batch",
    "accumulation",
    "tensor parallel",
    "data and tensor parallel",
    "pipeline with boxing threads",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_process_of_some_ranks_is_fed_alike_by_the_whole_and_by_its_part(name: str) -> None:
    plan, step = compile_case(name), CASES[name].step
    batch, ranks = step.batches[0], list(plan.by_rank)
    everyone = Feeder(plan, ranks).feed(batch, step.scalars)

    for here in (ranks[:1], ranks[1:], ranks[::2], ranks):
        feeder = Feeder(plan, here)
        whole = feeder.feed(batch, step.scalars)
        part = feeder.feed(local_batch(batch, batch_parts(plan, here)), step.scalars, "local")
        assert list(whole) == list(part) == here
        for rank in here:
            for index, values in enumerate(everyone[rank]):
                assert whole[rank][index].keys() == part[rank][index].keys() == values.keys()
                for key, value in values.items():
                    for found in (whole[rank][index][key], part[rank][index][key]):
                        assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), key


def refusal(feeder: Feeder, batch: Mapping[str, Tensor], how: str) -> str:
    with pytest.raises(SbpError) as caught:
        feeder.feed(batch, CASES["uneven batch"].step.scalars, how)  # type: ignore[arg-type]
    assert isinstance(caught.value, SbpValueError)
    return str(caught.value)


def test_a_batch_of_the_wrong_extent_is_told_what_is_accepted_and_why() -> None:
    plan, batch = compile_case("uneven batch"), CASES["uneven batch"].step.batches[0]
    feeder = Feeder(plan, [1])
    part = local_batch(batch, batch_parts(plan, [1]))
    features = batch["features"].shape[1]

    whole_as_part = refusal(feeder, batch, "local")
    part_as_whole = refusal(feeder, part, "global")
    other_dtype = refusal(
        Feeder(plan, [0, 1, 2]), {"features": batch["features"].float()}, "global"
    )
    longer = refusal(feeder, {**part, "features": batch["features"][:3]}, "local")
    missing = refusal(feeder, {}, "local")

    assert whole_as_part == (
        f"'features' is torch.float64 of shape (5, {features})\n"
        "  in batch, of which this is the part of rank 1\n"
        f"  accepted here: float64 of shape (1, {features}): samples 2 of 5\n"
        "  to fix it: this is the whole batch, which batch_is='global' takes"
    )
    assert f"accepted here: float64 of shape (5, {features})" in part_as_whole
    assert "batch_is='local' takes the part of this process" in part_as_whole
    assert other_dtype.endswith("to fix it: convert it: .to(torch.float64)")
    assert "shape (3, " in longer
    assert "to fix it" not in longer
    assert "'features' is missing" in missing


def test_of_a_tensor_of_another_stage_a_process_gives_nothing_or_anything() -> None:
    plan, step = compile_case("pipeline, 1F1B"), CASES["pipeline, 1F1B"].step
    batch = step.batches[0]
    last = Feeder(plan, [1])
    (name,) = batch_parts(plan, [1])

    alone = last.feed({name: batch[name]}, step.scalars, "local")
    beside = last.feed({**batch, "features": batch["features"][:1]}, step.scalars, "local")

    assert torch.equal(alone[1][3][name], beside[1][3][name])
    with pytest.raises(SbpValueError, match="'features' is missing"):
        last.feed({name: batch[name]}, step.scalars)  # the whole is checked alike everywhere


@pytest.mark.parametrize("kind", ["meta", "sparse"])
@pytest.mark.parametrize("batch_is", ["global", "local"])
def test_tensors_without_values_are_refused(kind: str, batch_is: BatchIs) -> None:
    plan, step = compile_case("accumulation"), CASES["accumulation"].step
    feeder, batch = Feeder(plan, list(plan.by_rank)), dict(step.batches[0])
    name = next(iter(feeder.tensors))
    batch[name] = batch[name].to("meta") if kind == "meta" else batch[name].to_sparse()

    with pytest.raises(SbpValueError, match=f"{name!r} is (on the device 'meta'|of layout)"):
        feeder.feed(batch, step.scalars, batch_is)
