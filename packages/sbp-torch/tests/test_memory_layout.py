"""How results lie in memory, learned on fake tensors."""

from __future__ import annotations

import pytest
import torch

from sbp_core.boxing import StepKind
from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import Instruction
from sbp_core.errors import PlanError
from sbp_core.graph.ir import Ref, Symbol
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.memory.storage_view import ResultLayout, StorageView, StridedLayout, contiguous
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_torch.memory.layout import Layouts
from sbp_torch.ops.operators import bind, operator_of


def _placed(storage: int, *shape: int, dtype: str = "float32") -> StorageView:
    lies = contiguous(shape, dtype)
    return StorageView(lies, storage, lies.size_bytes)


def _call(op: str, *args: object, outputs: int = 1, **kwargs: object) -> Instruction:
    names = tuple(f"y{index}" for index in range(outputs))
    return Instruction(op=op, args=args, kwargs=kwargs, outputs=names, node="y")


def _one(entry: Instruction, **values: StorageView | float) -> ResultLayout:
    (made,) = Layouts().call(entry, 0, values.__getitem__)
    assert isinstance(made, ResultLayout)
    return made


def test_a_product_lies_in_a_new_storage_of_its_bytes() -> None:
    entry = _call("aten.mm.default", Ref("x"), Ref("w"))

    made = _one(entry, x=_placed(0, 8, 4), w=_placed(1, 4, 6))

    assert made == ResultLayout(StridedLayout((8, 6), (6, 1), 0, "float32"), -1, 0, 8 * 6 * 4)


def test_a_view_lies_in_the_storage_of_its_argument() -> None:
    made = _one(_call("aten.t.default", Ref("w")), w=_placed(7, 4, 6))

    assert (made.source, made.fresh, made.storage_bytes) == (0, -1, 96)
    assert made.layout == StridedLayout((6, 4), (1, 6), 0, "float32")


def test_a_slice_says_where_it_begins() -> None:
    made = _one(_call("aten.slice.Tensor", Ref("w"), 0, 1, 3), w=_placed(0, 4, 6))

    assert made.layout == StridedLayout((2, 6), (6, 1), 6, "float32")


def test_a_reshape_copies_only_what_it_cannot_look_at() -> None:
    entry = _call("aten.reshape.default", Ref("x"), (24,))
    turned = StorageView(StridedLayout((6, 4), (1, 6), 0, "float32"), 0, 96)

    assert _one(entry, x=_placed(0, 6, 4)).source == 0
    assert _one(entry, x=turned).source == -1


def test_results_of_one_operator_have_storages_of_their_own() -> None:
    entry = _call("aten.native_layer_norm.default", Ref("x"), (4,), None, None, 1e-5, outputs=3)

    found = Layouts().call(entry, 0, {"x": _placed(0, 8, 4)}.__getitem__)

    assert [
        (made.fresh, made.storage_bytes) for made in found if isinstance(made, ResultLayout)
    ] == [
        (0, 128),
        (1, 32),
        (2, 32),
    ]


def test_a_result_that_the_mask_leaves_out_lies_nowhere() -> None:
    mask = (False, True, True)
    args = (Ref("g"), Ref("x"), Ref("w"), None, None, Ref("w"), Ref("w"), True, 1e-5, mask)
    entry = _call("aten.native_batch_norm_backward.default", *args, outputs=2)
    values = {"g": _placed(0, 8, 4, 2, 2), "x": _placed(1, 8, 4, 2, 2), "w": _placed(2, 4)}

    made = Layouts().call(entry, 0, values.__getitem__)

    assert [entry.layout.shape for entry in made] == [(4,), (4,)]


def test_equal_calls_are_made_once_whatever_their_keys_are_called() -> None:
    layouts = Layouts()

    for rank, key in enumerate("abc"):
        layouts.call(_call("aten.neg.default", Ref(key)), rank, {key: _placed(rank, 3)}.get)  # type: ignore[arg-type]

    assert layouts.num_calls == 1


def test_numbers_of_another_type_are_another_call() -> None:
    layouts = Layouts()
    whole = _placed(0, 3, dtype="int64")

    dtypes = [
        made.layout.dtype
        for number in (1, 1.0)
        for made in layouts.call(
            _call("aten.mul.Tensor", Ref("x"), number), 0, {"x": whole}.__getitem__
        )
        if isinstance(made, ResultLayout)
    ]

    assert dtypes == ["int64", "float32"]


def test_arguments_that_share_a_storage_are_not_those_that_do_not() -> None:
    layouts = Layouts()
    entry = _call("aten.add.Tensor", Ref("x"), Ref("z"))

    layouts.call(entry, 0, {"x": _placed(0, 3), "z": _placed(0, 3)}.__getitem__)
    layouts.call(entry, 0, {"x": _placed(0, 3), "z": _placed(1, 3)}.__getitem__)

    assert layouts.num_calls == 2


def test_the_layout_is_that_of_real_tensors() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4).transpose(1, 2)
    placed = StorageView(StridedLayout(tuple(x.shape), x.stride(), 0, "float32"), 0, 96)
    whole = Symbol("memory_format", "contiguous_format")
    calls = [
        _call("aten.exp.default", Ref("x")),
        _call("aten.sum.dim_IntList", Ref("x"), (1,), True),
        _call("aten.clone.default", Ref("x"), memory_format=whole),
        _call("aten._softmax.default", Ref("x"), 2, False),
        _call("aten._to_copy.default", Ref("x"), dtype=Symbol("dtype", "bfloat16")),
    ]

    for entry in calls:
        kwargs = {name: bind(value, {}.__getitem__) for name, value in entry.kwargs.items()}
        real = operator_of(entry.op)(*bind(entry.args, {"x": x}.__getitem__), **kwargs)
        made = _one(entry, x=placed)

        assert (made.layout.shape, made.layout.strides) == (tuple(real.shape), real.stride()), (
            entry.op
        )
        assert made.storage_bytes == real.untyped_storage().nbytes(), entry.op


def test_a_local_boxing_step_is_laid_out_for_its_rank() -> None:
    mesh = Placement.grid((2,), ("data",))
    step = BoxingStep(
        kind=StepKind.LOCAL,
        shape=(5, 2),
        dtype="float32",
        source=(mesh, NdSbp(B)),
        target=(mesh, NdSbp(S(0))),
        axes=(0,),
        size_bytes=0,
    )
    layouts = Layouts()
    entry = _call(LOCAL_BOX, Ref("x"), 0)

    shapes = [
        made.layout.shape
        for rank in (0, 1)
        for made in layouts.call(entry, rank, {"x": _placed(0, 5, 2)}.__getitem__, (step,))
        if isinstance(made, ResultLayout)
    ]

    assert shapes == [(3, 2), (2, 2)]


def test_host_numbers_stay_numbers() -> None:
    entry = _call("host.truediv", Ref("a"), Ref("b"))

    found = Layouts().call(entry, 0, {"a": 1.0, "b": 0.0}.__getitem__)

    assert all(isinstance(value, float) for value in found)


@pytest.mark.parametrize(
    ("op", "options"), [("mse_loss", ()), ("smooth_l1_loss", (1.0,)), ("huber_loss", (1.0,))]
)
def test_the_gradient_of_a_mean_over_no_elements_is_empty(op: str, options: tuple[float]) -> None:
    entry = _call(f"aten.{op}_backward.default", Ref("g"), Ref("x"), Ref("y"), 1, *options)

    made = _one(entry, g=_placed(0), x=_placed(1, 0, 3), y=_placed(2, 0, 3))

    assert (made.layout.shape, made.source, made.storage_bytes) == ((0, 3), -1, 0)


def test_an_operator_that_cannot_run_on_fake_tensors_is_named() -> None:
    entry = _call("aten.mm.default", Ref("x"), Ref("x"))

    with pytest.raises(PlanError, match=r"aten\.mm\.default"):
        Layouts().call(entry, 0, {"x": _placed(0, 2, 3)}.__getitem__)


@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_a_gradient_of_another_shape_than_the_output_is_refused(name: str) -> None:
    entry = _call(f"aten.{name}.default", Ref("g"), Ref("y"), -1, Symbol("dtype", "float32"))
    output = _placed(0, 4, 3)

    assert _one(entry, g=_placed(1, 4, 3), y=output).layout.shape == (4, 3)
    with pytest.raises(PlanError, match="does not fit"):
        _one(entry, g=_placed(1), y=output)


def test_shapes_of_which_a_kernel_would_write_beyond_memory_are_refused() -> None:
    # PyTorch's fake kernel takes this; the one with data counts in batches of the argument.
    pooled = ((2, 2), (2, 2), (0, 0), False, True, None)
    entry = _call("aten.avg_pool2d_backward.default", Ref("g"), Ref("x"), *pooled)
    image = _placed(0, 2, 4, 6, 6)

    assert _one(entry, g=_placed(1, 2, 4, 3, 3), x=image).layout.shape == (2, 4, 6, 6)
    with pytest.raises(PlanError, match="does not fit"):
        _one(entry, g=_placed(1, 1, 4, 3, 3), x=image)


def test_an_attention_with_keys_of_fewer_samples_is_refused() -> None:
    entry = _call(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        *(Ref("q"), Ref("k"), Ref("v")),
        outputs=2,
    )
    whole, half = _placed(0, 2, 2, 5, 8), _placed(1, 1, 2, 5, 8)

    assert len(Layouts().call(entry, 0, {"q": whole, "k": whole, "v": whole}.__getitem__)) == 2
    with pytest.raises(PlanError, match="does not fit"):
        Layouts().call(entry, 0, {"q": whole, "k": half, "v": whole}.__getitem__)


def test_calls_are_alike_wherever_in_a_packed_buffer_their_arguments_lie() -> None:
    layouts = Layouts()
    entry = _call("aten.t.default", Ref("w"))

    found = [
        layouts.call(
            entry,
            0,
            {"w": StorageView(StridedLayout((4, 6), (6, 1), at, "float32"), 3, size)}.get,  # type: ignore[arg-type]
        )
        for at, size in ((0, 96), (10, 400), (76, 400))
    ]

    assert layouts.num_calls == 1
    assert [made for (made,) in found] == [
        ResultLayout(StridedLayout((6, 4), (1, 6), at, "float32"), 0, -1, size)
        for at, size in ((0, 96), (10, 400), (76, 400))
    ]


def test_a_view_of_another_dtype_begins_where_its_argument_does() -> None:
    lies = StridedLayout((4,), (1,), 6, "float32")
    entry = _call("aten.view.dtype", Ref("x"), Symbol("dtype", "float16"))

    made = _one(entry, x=StorageView(lies, 0, 400))

    assert made.layout == StridedLayout((8,), (1,), 12, "float16")


def test_a_stride_by_hand_counts_from_the_start_of_the_storage() -> None:
    lies = StridedLayout((4,), (1,), 6, "float32")
    entry = _call("aten.as_strided.default", Ref("x"), (2,), (1,), 3)

    made = _one(entry, x=StorageView(lies, 0, 400))

    assert made.layout == StridedLayout((2,), (1,), 3, "float32")


@pytest.mark.parametrize("extent", [6, 2**40])
def test_fused_updates_of_any_size_are_laid_out_without_data(extent: int) -> None:
    p, g, state = (_placed(storage, extent) for storage in range(3))
    calls = [
        _call(
            "sbp.fused_sgd_.default",
            Ref("p"),
            Ref("g"),
            (Ref("s"),),
            0.1,
            outputs=2,
            momentum=0.9,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            maximize=False,
        ),
        _call(
            "sbp.fused_adagrad_.default",
            Ref("p"),
            Ref("g"),
            Ref("s"),
            1,
            0.1,
            outputs=2,
            lr_decay=0.0,
            weight_decay=0.0,
            eps=1e-10,
            maximize=False,
        ),
    ]

    for entry in calls:
        made = Layouts().call(entry, 0, {"p": p, "g": g, "s": state}.__getitem__)

        assert made == (
            ResultLayout(p.layout, 0, -1, p.storage_bytes),
            ResultLayout(state.layout, 2, -1, state.storage_bytes),
        )
