"""An output of a step is a number where one is expected, and never a float that is kept."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from numbers import Real

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.runtime import StepResult
from sbp_launch.parallel import StepOutput


def output(loss, **metrics):
    return StepOutput(loss=torch.tensor(loss, dtype=torch.float64), metrics=metrics)


def test_an_output_reads_as_its_loss():
    loss, seen = torch.tensor(0.25), torch.tensor(3)

    found = StepOutput.of(StepResult(outputs={"loss": loss, "seen": seen}))

    assert (float(found), found.item(), f"{found:.1f}", f"{found}") == (0.25, 0.25, "0.2", "0.25")
    assert (found.loss, dict(found.metrics)) == (loss, {"seen": seen})
    assert torch.equal(found.detach(), loss)
    assert not math.isnan(found)
    assert math.isnan(output(math.nan))
    assert json.dumps(float(found)) == "0.25"


def test_an_output_shows_metrics_of_every_shape():
    found = output(0.25, seen=torch.tensor(3), one=torch.ones(1), parts=torch.ones(2, 3))

    assert repr(found) == "StepOutput(loss=0.25, seen=3, one=1, parts=<float32 of shape (2, 3)>)"
    assert repr(output(0.5, z=torch.tensor(1 + 2j))) == "StepOutput(loss=0.5, z=1+2j)"


_NUMBERS = st.floats(0.125, 8.0)
_BINARY = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, divmod),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
)


@given(_NUMBERS, _NUMBERS | st.integers(1, 3), st.sampled_from(_BINARY))
def test_outputs_calculate_and_compare_as_floats(one, other, op):
    wanted = op(one, float(other))

    for found in (op(output(one), other), op(one, output(other)), op(output(one), output(other))):
        assert found == wanted
        assert type(found) is type(wanted)


@given(st.floats(-8.0, 8.0))
def test_what_rounds_or_negates_a_float_takes_an_output(value):
    for op in (abs, round, math.floor, math.ceil, math.trunc, int, bool, hash, operator.neg):
        assert op(output(value)) == op(value)
        assert type(op(output(value))) is type(op(value))
    assert round(output(value), 1) == round(value, 1)
    assert +output(value) == value


def test_outputs_are_summed_averaged_and_kept():
    outputs = [output(0.5), output(0.25)]
    total = 0.0
    total += outputs[0]

    assert (total, type(total), sum(outputs)) == (0.5, float, 0.75)
    assert (np.mean(outputs), np.std(outputs)) == (0.375, 0.125)
    assert np.asarray(outputs[0], dtype=np.float32).dtype == np.float32
    assert min(outputs) is outputs[1]
    assert sorted(outputs) == [0.25, 0.5]
    assert torch.equal(torch.ones(2) + outputs[0], torch.full((2,), 1.5))
    assert torch.equal(outputs[0] * torch.ones(2), torch.full((2,), 0.5))
    assert isinstance(outputs[0], Real)


def test_outputs_are_equal_if_their_losses_are():
    same, nan = [output(0.5), output(0.5, seen=torch.tensor(3))], output(math.nan)

    assert same[0] == same[1] == 0.5
    assert {*same, 0.5} == {0.5}
    assert nan != nan
    assert same[0] != "0.5"
    assert same[0] is not None and same[0] != None  # noqa: E711 - as a float
    with pytest.raises(TypeError, match="not supported between"):
        same[0] < "0.5"  # noqa: B015 - raises


def test_an_output_can_be_copied_and_sent():
    found = output(0.5, seen=torch.tensor(3))

    for made in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert repr(made) == repr(found)


def test_an_output_says_what_a_tensor_has_and_it_does_not():
    found = output(0.5)

    with pytest.raises(AttributeError, match="has taken the backward and the update"):
        found.backward()
    with pytest.raises(AttributeError, match=r"output\.loss\.mean"):
        found.mean()
    with pytest.raises(AttributeError, match="has no attribute 'perplexity'"):
        found.perplexity  # noqa: B018 - raises
    assert not hasattr(found, "shape")
