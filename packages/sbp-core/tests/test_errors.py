from __future__ import annotations

import pickle

import pytest

from sbp_core import errors
from sbp_core.errors import (
    BoxingError,
    MemoryLimitError,
    PlanError,
    SbpError,
    SbpLookupError,
    SbpValueError,
    suggestion,
    unknown_name,
    words_of,
)

_CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, SbpError)
]


def test_a_message_says_what_where_what_is_accepted_and_what_to_do() -> None:
    error = SbpValueError(
        "cannot split dim 1", where=["model.py:3", "rank 0"], accepted="S(0)", todo="box it"
    )

    assert str(error).splitlines() == [
        "cannot split dim 1",
        "  in model.py:3",
        "  in rank 0",
        "  accepted here: S(0)",
        "  to fix it: box it",
    ]


def test_a_message_leaves_out_what_is_not_known() -> None:
    assert str(SbpError("it broke", where="")) == "it broke"


def test_one_place_may_be_given_as_text() -> None:
    assert SbpError("it broke", where="rank 3").where == ("rank 3",)


def test_a_replaced_error_says_the_same_but_for_what_is_given() -> None:
    error = SbpValueError("it broke", where=("a", "b"), accepted="c", todo="d")

    found = error.replaced(PlanError, where=("e", *error.where), todo="")

    assert type(found) is PlanError
    assert (found.what, found.where) == ("it broke", ("e", "a", "b"))
    assert (found.accepted, found.todo) == ("c", "")


def test_a_suggestion_is_the_nearest_known_name_or_something_else() -> None:
    assert suggestion("osdq", ["ilp", "osdp"], "choose one") == "did you mean 'osdp'?"
    assert suggestion("mine", ["ilp", "osdp"], "choose one") == "choose one"


@pytest.mark.parametrize("kind", _CLASSES)
def test_every_error_survives_pickling(kind: type[SbpError]) -> None:
    error = kind("it broke", where=("a", "b"), accepted="c", todo="d")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert (copy.what, copy.where, copy.accepted, copy.todo) == ("it broke", ("a", "b"), "c", "d")
    assert str(copy) == str(error)


@pytest.mark.parametrize("kind", [kind for kind in _CLASSES if kind is not SbpError])
def test_every_error_is_also_the_builtin_that_one_would_catch(kind: type[SbpError]) -> None:
    builtins = (AttributeError, ValueError, TypeError, LookupError, RuntimeError)

    # What does not fit a limit is the failure of a plan, and a wrong setting.
    count = 2 if kind is MemoryLimitError else 1
    assert sum(issubclass(kind, builtin) for builtin in builtins) == count


def test_errors_of_plans_can_be_caught_as_runtime_errors() -> None:
    with pytest.raises(RuntimeError, match="no room"):
        raise PlanError("no room")


def test_an_unknown_name_gets_the_closest_match_and_the_list() -> None:
    error = unknown_name("planner", "odsp", ["osdp", "manual"], where="config.yaml")

    assert isinstance(error, SbpLookupError)
    assert error.what == "no planner is called 'odsp'"
    assert error.accepted == "manual, osdp"
    assert error.todo == "did you mean 'osdp'?"
    assert error.where == ("config.yaml",)


def test_an_unknown_name_without_a_close_match_gets_the_list() -> None:
    assert unknown_name("planner", "zzz", ["osdp"]).todo.startswith("choose one of these")
    assert "no planner is installed" in unknown_name("planner", "zzz", []).accepted


def test_an_error_is_quoted_with_its_places_and_that_of_others_with_its_type() -> None:
    ours = BoxingError("a step failed", where=("rank 1", "", "step 2"), todo="see the log")

    assert words_of(ours) == "a step failed\n  in rank 1\n  in step 2"
    assert words_of(KeyError("weight")) == "KeyError: 'weight'"
    assert words_of(ValueError()) == "ValueError"
