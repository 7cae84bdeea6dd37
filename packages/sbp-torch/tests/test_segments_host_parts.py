from __future__ import annotations

import torch

from sbp_core.compile.actors import Actor, Compute, Instruction
from sbp_core.graph.ir import Argument, Phase, Rate, Ref, Symbol
from sbp_torch.segments.host_parts import SegmentParts, part_segment, tensor_keys


def call(op: str, *args: Argument, outputs: tuple[str, ...], **kwargs: Argument) -> Instruction:
    return Instruction(op=op, args=args, kwargs=kwargs, outputs=outputs, node=outputs[0])


def segment(*calls: Instruction, **given: tuple[object, ...]) -> Actor:
    values = {"inputs": ("x",), "reads": (), "outputs": ("y",)} | given
    return Compute(
        name="forward.0.0", stage=0, phase=Phase.FORWARD, rate=Rate.MICRO,
        thread="compute", instructions=calls, **values,
    )  # fmt: skip


#: Host arithmetic, a draw, and what uses both.
MIXED = segment(
    call("host.add", Ref("n"), 1, outputs=("m",)),
    call("aten.mul.Tensor", Ref("x"), Ref("m"), outputs=("a",)),
    call("sbp.random_uniform.default", (2,), Ref("seed"), 3, 0, outputs=("u",)),
    call("aten.add.Tensor", Ref("a"), Ref("u"), outputs=("y",)),
    reads=("n", "seed"),
    writes=(("n", "m"),),
)


def split(actor: Actor, *tensors: str, rank: int = 0) -> SegmentParts:
    return part_segment(actor, rank, (), frozenset(tensors))


def test_numbers_and_draws_are_made_before_the_tensor_part() -> None:
    made = split(MIXED, "x")

    assert [entry.outputs for entry in made.before] == [("m",), ("u",)]
    assert [entry.outputs for entry in made.tensor] == [("a",), ("y",)]
    assert (made.tensor_inputs, made.tensor_outputs) == (("x", "m", "u"), ("y",))


def test_the_parts_together_make_what_the_segment_makes() -> None:
    made = split(MIXED, "x")
    values = {"x": torch.ones(2), "n": 4, "seed": 9}

    made.run_before(values)
    own = made.run_tensor([values[key] for key in made.tensor_inputs])
    y, n = made.results(values, own)

    draw = torch.ops.sbp.random_uniform([2], 9, 3, 0)
    assert torch.equal(y, 5 * torch.ones(2) + draw)
    assert n == 5


def test_a_number_that_is_read_from_a_tensor_of_the_segment_stays_in_order() -> None:
    actor = segment(
        call("aten.sum.default", Ref("x"), outputs=("s",)),
        call("host.item", Ref("s"), outputs=("n",)),
        call("host.add", Ref("n"), 1, outputs=("m",)),
        call("aten.mul.Tensor", Ref("x"), Ref("m"), outputs=("y",)),
    )

    made = split(actor, "x")

    assert (made.before, len(made.tensor)) == ((), 4)
    assert torch.equal(made.run_tensor([torch.ones(2)])[0], torch.full((2,), 3.0))


def test_what_passes_through_is_returned_as_it_came() -> None:
    actor = segment(call("aten.neg.default", Ref("x"), outputs=("y",)), outputs=("x", "y"))
    made = split(actor, "x")
    x = torch.ones(2)

    first, second = made.results({"x": x}, made.run_tensor([x]))

    assert first is x
    assert torch.equal(second, -x)


def test_segments_that_differ_in_names_only_are_identical() -> None:
    def layer(name: str, number: float = 2.0, other: str = "") -> Actor:
        return segment(
            call("aten.mm.default", Ref(f"{name}.x"), Ref(f"{name}.w"), outputs=(f"{name}.a",)),
            call("aten.mul.Tensor", Ref(f"{name}.a"), number, outputs=(f"{name}.y",)),
            call("aten.add.Tensor", Ref(f"{name}.y"), Ref(other or f"{name}.a"),
                 outputs=(f"{name}.z",)),
            inputs=(f"{name}.x", f"{name}.w"),
            outputs=(f"{name}.z",),
        )  # fmt: skip

    one = split(layer("one"), "one.x", "one.w").identity

    assert split(layer("two"), "two.x", "two.w", rank=3).identity == one
    assert split(layer("two", 3.0), "two.x", "two.w").identity != one
    assert split(layer("two", other="two.x"), "two.x", "two.w").identity != one
    assert split(layer("two", other="two.y"), "two.x", "two.w").identity != one


def test_numbers_that_are_equal_but_for_their_type_are_not_identical() -> None:
    def scaled(by: Argument) -> Actor:
        return segment(call("aten.mul.Tensor", Ref("x"), by, outputs=("y",)))

    found = {split(scaled(by), "x").identity for by in (1, 1.0, True, Symbol("dtype", "int8"))}

    assert len(found) == 4


def test_tensors_are_told_from_numbers() -> None:
    assert tensor_keys(("x", "n", "t"), (torch.ones(1), 3, torch.tensor(1))) == {"x", "t"}


def test_copies_to_and_from_the_host_are_not_compiled() -> None:
    device = Symbol("device", "cpu")
    fetch = segment(call("sbp.to_device.default", Ref("x"), outputs=("y",), device=device))
    store = segment(
        call("sbp.to_host_.default", Ref("x"), Ref("v"), outputs=("y",)),
        inputs=("x", "v"), in_place=("x",),
    )  # fmt: skip

    parts = [split(fetch, "x"), split(store, "x", "v")]

    assert not any(one.tensor for one in parts)
    values = {"x": torch.ones(2), "v": torch.zeros(2)}
    parts[0].run_before(values)
    assert torch.equal(values["y"], torch.ones(2))
    assert values["y"] is not values["x"]
    (stored,) = parts[1].results({key: values[key] for key in ("x", "v")}, ())
    assert stored is values["x"]
    assert not stored.any()
