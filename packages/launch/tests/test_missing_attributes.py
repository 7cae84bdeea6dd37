"""What a step does not have is answered with what takes its place."""

from __future__ import annotations

import pickle

import pytest

from sbp_core.errors import RunError
from sbp_launch.parallel import ParallelStep, ProgramStep
from sbp_launch.step.missing_attributes import OF_ADDED_STEPS, OF_STEPS


class Broken(ParallelStep):
    """A step whose property fails."""

    @property
    def model(self):
        raise AttributeError("of the property itself")


@pytest.mark.parametrize("kind", [ParallelStep, ProgramStep])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("backward", r"step\(batch\) does forward, backward and update"),
        ("step", "leave this call out"),
        ("eval", r"step\.evaluate\(batch\)"),
        ("train", r"model\.train\(\)"),
        ("parameters", "this attribute of the model"),
        ("zero_grad", "leave this call out"),
        ("param_groups", "this attribute of the optimizer"),
    ],
)
def test_a_step_says_what_takes_the_place_of_an_attribute(kind, name, told):
    step = object.__new__(kind)

    assert not hasattr(step, name)
    with pytest.raises(AttributeError, match=rf"a {kind.__name__} has no '{name}'(.|\n)*{told}"):
        getattr(step, name)


def test_other_attributes_are_as_python_answers_them():
    with pytest.raises(AttributeError, match="'ParallelStep' object has no attribute 'colour'"):
        object.__new__(ParallelStep).colour  # noqa: B018 - raises
    with pytest.raises(AttributeError, match="of the property itself"):
        object.__new__(Broken).model  # noqa: B018 - raises


def test_there_is_a_way_out_only_for_what_a_step_does_not_have():
    assert not [name for name in OF_STEPS if hasattr(ParallelStep, name)]
    assert not [name for name in OF_ADDED_STEPS if hasattr(ProgramStep, name)]
    only_first = OF_ADDED_STEPS.keys() - OF_STEPS.keys()
    assert only_first == {
        name for name in {*dir(ParallelStep)} - {*dir(ProgramStep)} if not name.startswith("_")
    }


def test_a_step_beside_another_is_neither_entered_nor_closed():
    step = object.__new__(ProgramStep)

    with pytest.raises(RunError, match=r"cannot be entered(.|\n)*first step"), step:
        pass
    with pytest.raises(AttributeError, match="use the first step") as caught:
        step.close()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
