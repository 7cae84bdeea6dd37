"""Segments that write new values of states over the old ones: in place, or by a copy behind."""

from __future__ import annotations

import pytest

from sbp_core.compile.actors import Compute, Instruction
from sbp_core.compile.overwriting import Overwriting, first_overwrites
from sbp_core.graph.ir import Phase, Rate, Ref

#: Of an instruction: operator, keys that it takes, key that it makes.
_Entry = tuple[str, str, str]


def _rewritten(
    entries: list[_Entry], writes: dict[str, str], outputs: tuple[str, ...] = ()
) -> list[_Entry]:
    """Return the instructions of a segment that overwrites states; `t` is a view of state `v`."""
    actor = Compute(
        name="optimizer.0.0", stage=0, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread="compute",
        writes=tuple(writes.items()), in_place=tuple(writes), outputs=outputs,
        instructions=tuple(
            Instruction(
                op=f"aten.{op}", args=tuple(map(Ref, takes.split())), outputs=(makes,), node=makes
            )
            for op, takes, makes in entries
        ),
    )  # fmt: skip
    memory = {name: frozenset({name}) for name in writes} | {"t": frozenset({"v"})}
    return [
        (entry.op.removeprefix("aten."), " ".join(ref.name for ref in entry.args), entry.outputs[0])
        for entry in Overwriting(memory).of(actor).instructions
    ]


def test_a_chain_of_operators_writes_over_the_state() -> None:
    entries = [("mul.Tensor", "v c", "a"), ("add.Tensor", "a g", "b"), ("sqrt.default", "b", "d")]

    assert _rewritten(entries, {"v": "b"}) == [
        ("mul_.Tensor", "v c", "a"),
        ("add_.Tensor", "a g", "b"),
        ("sqrt.default", "b", "d"),
    ]


@pytest.mark.parametrize(
    ("entries", "outputs"),
    [
        # Something looks at the state when the new value is made.
        ([("add.Tensor", "v g", "b"), ("neg.default", "v", "n")], ()),
        ([("view.default", "v", "t"), ("add.Tensor", "v g", "b"), ("neg.default", "t", "n")], ()),
        ([("view.default", "v", "t"), ("add.Tensor", "v t", "b")], ()),
        ([("add.Tensor", "v v", "b")], ()),
        # Something looks at a value on the way when the next one is made.
        ([("mul.Tensor", "v c", "a"), ("add.Tensor", "a g", "b"), ("neg.default", "a", "n")], ()),
        ([("mul.Tensor", "v c", "a"), ("add.Tensor", "a g", "b")], ("a",)),
        ([("mul.Tensor", "v c", "a"), ("add.Tensor", "a a", "b")], ()),
        (
            [
                ("mul.Tensor", "v c", "a"),
                ("view.default", "a", "s"),
                ("add.Tensor", "a g", "b"),
                ("neg.default", "s", "n"),
            ],
            (),
        ),
        # There is no in-place form.
        ([("mul.Tensor", "v c", "a"), ("mm.default", "a g", "b")], ()),
    ],
)
def test_what_somebody_still_looks_at_is_not_written_over(
    entries: list[_Entry], outputs: tuple[str, ...]
) -> None:
    found = _rewritten(entries, {"v": "b"}, outputs)

    # Instructions stay; the copy comes behind the new value, and behind the last look at the state.
    looks = [at for at, (_, takes, _) in enumerate(entries) if {"v", "t"} & set(takes.split())]
    made = next(at for at, (_, _, makes) in enumerate(entries) if makes == "b")
    behind = max(made, *looks) + 1
    copy = (found[behind][0], "v b", "v <- b")
    assert found == [*entries[:behind], copy, *entries[behind:]]


def test_of_two_states_with_one_new_value_the_second_gets_a_copy() -> None:
    found = _rewritten([("add.Tensor", "v g", "b")], {"v": "b", "w": "b"})

    assert found[0] == ("add_.Tensor", "v g", "b")
    assert found[1][1:] == ("w b", "w <- b")


def test_a_state_is_first_overwritten_by_what_its_chain_begins_with() -> None:
    calls = [
        ("neg.default", "v", "n"),
        ("mul_.Tensor", "v c", "a"),
        ("add_.Tensor", "a n", "b"),
        ("copy_.default", "w b", "w <- b"),
    ]
    actor = Compute(
        name="optimizer.0.0", stage=0, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread="compute",
        writes=(("v", "b"), ("w", "w <- b"), ("u", "boxed")), in_place=("v", "w", "u"),
        instructions=tuple(
            Instruction(
                op=f"aten.{op}", args=tuple(map(Ref, takes.split())), outputs=(makes,), node=makes
            )
            for op, takes, makes in calls
        ),
    )  # fmt: skip

    assert first_overwrites(actor) == {1: ("v",), 3: ("w",)}  # u comes from elsewhere
