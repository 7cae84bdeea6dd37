"""Sharding rules of linear algebra: matrices are whole; batches and right-hand sides may be split.

A line of the tables is the notation for one matrix, `i! j! => i! j!, ()`. Every tensor may have
batch dims in front, which are broadcast. An output that a flag omits is an empty vector.

Fourier transforms are linear, and whole along the dims that they transform. Their other dims may
not have empty shards: MKL refuses an empty batch.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from math import prod

from sbp_aten.rules.formula import by_operator
from sbp_core.signatures import (
    Dependence,
    Dim,
    Dims,
    Notation,
    OpCall,
    Rule,
    along,
    argument,
    broadcast_dims,
    ignored,
    increasing,
    labels,
    linear,
    parse_notation,
    unread,
)

_MIXES = "a factorisation mixes all rows and columns of a matrix"


#: Number of matrices up to which all subsets of them are listed.
_FEW = 3


#: Operator -> notation for one matrix, and work as a multiple of `m n min(m, n)`. Source: Golub and
#: Van Loan, Matrix Computations, 4th edition, the flop counts of each algorithm.
_FACTORISATIONS: dict[str, tuple[str, float]] = {
    "_linalg_det.default": ("i! j! => (), i! j!, i!", 2 / 3),
    "_linalg_eigh.default": ("i! j! => i!, i! j!", 9),
    "_linalg_eigvals.default": ("i! j! => i!", 10),
    "_linalg_slogdet.default": ("i! j! => (), (), i! j!, i!", 2 / 3),
    "_linalg_svd.default": ("m! n! => m! p!, k!, q! n!", 21),
    "cholesky.default": ("i! j! => i! j!", 1 / 3),
    "cholesky_inverse.default": ("i! j! => i! j!", 2 / 3),
    "geqrf.default": ("m! n! => m! n!, k!", 4 / 3),
    "linalg_cholesky_ex.default": ("i! j! => i! j!, ()", 1 / 3),
    "linalg_eig.default": ("i! j! => i!, i! j!", 25),
    "linalg_householder_product.default": ("m! n!, k! => m! n!", 4 / 3),
    "linalg_inv_ex.default": ("i! j! => i! j!, ()", 2),
    "linalg_ldl_factor_ex.default": ("i! j! => i! j!, i!, ()", 1 / 3),
    "linalg_lu.default": ("m! n! => m! m2!, m! k!, k! n!", 2 / 3),
    "linalg_lu_factor_ex.default": ("m! n! => m! n!, k!, ()", 2 / 3),
    "linalg_matrix_exp.default": ("i! j! => i! j!", 20),
    "linalg_qr.default": ("m! n! => m! p!, q! n!", 8 / 3),
}


#: Solver -> position of the right-hand sides, and the notation for one matrix.
_SOLVES: dict[str, tuple[int, str]] = {
    "cholesky_solve.default": (0, "i! k, i! j! => i! k"),
    "linalg_ldl_solve.default": (2, "i! j!, i!, i! k => i! k"),
    "triangular_solve.default": (0, "i! k, i! j! => i! k, i! j!"),
}


#: Solver with an argument `left` -> the same, for `A X = B` and for `X A = B`.
_SIDED_SOLVES: dict[str, tuple[int, str, str]] = {
    "_linalg_solve_ex.default": (
        *(1, "i! j!, i! k => i! k, i! j!, i!, ()"),
        "i! j!, k i! => k i!, i! j!, i!, ()",
    ),
    "linalg_lu_solve.default": (2, "i! j!, i!, i! k => i! k", "i! j!, i!, k i! => k i!"),
    "linalg_solve_triangular.default": (1, "i! j!, i! k => i! k", "i! j!, k i! => k i!"),
    "ormqr.default": (2, "i! j!, p!, i! k => i! k", "i! j!, p!, k i! => k i!"),
}


def _stacked(
    call: OpCall,
    one: Notation,
    *dependences: Dependence,
    work_flop: float | None = None,
    why: str = _MIXES,
) -> Notation:
    """Return the notation of a batch, given the notation of one matrix.

    An output without a label, of the batch or of `one`, does not depend on that dim.
    """
    types = (*call.inputs, *call.outputs)
    inner = (*one.inputs, *one.outputs)
    left_out = [len(entry.shape) < len(dims) for entry, dims in zip(types, inner, strict=True)]
    batches: list[tuple[int, ...]] = [
        () if empty else entry.shape[: len(entry.shape) - len(dims)]
        for entry, dims, empty in zip(types, inner, left_out, strict=True)
    ]
    num_batch = max(map(len, batches))
    padded = [(1,) * (num_batch - len(shape)) + shape for shape in batches]
    wide = tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True)
    )
    made: list[Dims] = []
    for index, (dims, batch, empty) in enumerate(zip(inner, batches, left_out, strict=True)):
        rest: Dims = tuple((name,) for name in labels(f"e{index}_", len(types[index].shape)))
        made.append(rest if empty else (*broadcast_dims(batch, wide), *dims))
    present = {name for tensor in made for dim in tensor for name in dim}
    own = {name for name in present if name.startswith("e")}
    inputs, outputs = made[: len(call.inputs)], made[len(call.inputs) :]
    return Notation(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        dependences=dependences,
        whole=frozenset((one.whole & present) | own),
        nonempty=one.nonempty & present,
        reductions=tuple(
            (f"{name}@{index}", "none")
            for index, dims in enumerate(outputs)
            for name in sorted(present - one.whole - own - {name for dim in dims for name in dim})
        ),
        work_flop=work_flop,
        why=why,
    )


def _factorised(text: str, factor: float) -> Rule:
    def meaning(call: OpCall) -> Notation:
        shape = call.inputs[0].shape
        return _stacked(
            call, parse_notation(text), work_flop=factor * prod(shape) * min(shape[-2:], default=1)
        )

    return Rule(meaning)


def _solution(call: OpCall, position: int, text: str) -> Notation:
    """Return the notation of a solver, linear in its right-hand sides, which may be split.

    A system of n equations and k right-hand sides costs `2 n n k`.
    """
    matrix, right = call.inputs[1 if position == 0 else 0].shape, call.inputs[position].shape
    # A single right-hand side for each matrix lacks the label `k`.
    single = call.op == "aten._linalg_solve_ex.default" and _is_vector(matrix, right)
    one = parse_notation(text.replace(" k", "") if single else text)
    only = None if len(one.outputs) == 1 else (0,)
    return _stacked(
        call,
        one,
        linear(position, outputs=only),
        work_flop=2.0 * prod(call.outputs[0].shape) * matrix[-1],
        why="each unknown depends on every equation",
    )


def _is_vector(matrix: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Return whether right-hand sides of this shape are vectors, one for each matrix."""
    return len(right) == 1 or right == matrix[:-1]


def _sided(position: int, left: str, right: str) -> Rule:
    def meaning(call: OpCall) -> Notation:
        on_left = argument(call, 3, "left", True)
        return _solution(call, position, left if on_left else right)

    return Rule(meaning)


def _lstsq(call: OpCall) -> Notation:
    """`m! n!, m! k+ => n! k+, k+, (), p!`: residuals, rank and singular values are optional.

    Residuals are given only if every matrix of the batch has full rank; without right-hand sides
    there is no rank either.
    """
    matrix, right = call.inputs[0].shape, call.inputs[1].shape
    vector = _is_vector(matrix, right)
    residuals, rank, values = call.outputs[1:]
    given = residuals.shape != (0,)
    parts = [
        *("n!" if vector else "n! k+", "e1!" if not given else "()" if vector else "k"),
        "e2!" if rank.shape == (0,) and matrix[:-2] != (0,) else "()",
        "p!" if values.shape != (0,) else "e3!",
    ]
    one = parse_notation(f"m! n!, {'m!' if vector else 'm! k'} => {', '.join(parts)}")
    made = _stacked(
        call,
        one,
        *(() if given else (linear(1, outputs=(0,)),)),
        work_flop=2.0 * prod(matrix) * matrix[-1],
    )
    if not given:
        return made
    batch = {name for dims in made.inputs for dim in dims for name in dim if name.startswith("d")}
    return replace(
        made,
        whole=made.whole | batch,
        why=f"{_MIXES}, and residuals are given only if all of the batch have full rank",
    )


def _pinv(call: OpCall) -> Notation:
    """`i! j!, (), () => j! i!`: optional tolerances, one for each matrix."""
    one = parse_notation("i! j!" + ", ()" * (len(call.inputs) - 1) + " => j! i!")
    shape = call.inputs[0].shape
    return _stacked(call, one, work_flop=21.0 * prod(shape) * min(shape[-2:]))


def _lu_unpack(call: OpCall) -> Notation:
    """`m! n!, k! => m! m2!, m! k!, k! n!`, with the requested parts."""
    data, pivots = argument(call, 2, "unpack_data", True), argument(call, 3, "unpack_pivots", True)
    read = [
        increasing(0, outputs=(1, 2)) if data else unread(0),
        *(() if pivots else (ignored(1),)),
    ]
    one = parse_notation("m! n!, k! => m! m2!, m! k!, k! n!")
    return _stacked(call, one, *read, work_flop=0.0, why="triangles of a matrix are cut out")


def _check_errors(call: OpCall) -> Notation:
    """`b => ` without outputs: each rank checks its shard."""
    return Notation(
        inputs=(broadcast_dims(call.inputs[0].shape, call.inputs[0].shape),), outputs=()
    )


def _block_diag(call: OpCall) -> Notation:
    """`i0! j0!, i1! j1! => i! j!; linear 0 1`; a single matrix is unchanged."""
    count = len(call.inputs)
    tensors: list[Dims] = []
    for index, entry in enumerate(call.inputs):
        both: list[Dim] = [("i",), ("j",)] if count == 1 else [(f"i{index}",), (f"j{index}",)]
        tensors.append(tuple(both[2 - len(entry.shape) :]))
    known = {name for dims in tensors for dim in dims for name in dim}
    made: Dims = (("i",), ("j",)) if count > 1 else tuple((n,) if n in known else () for n in "ij")
    every = tuple(range(count))
    # Each element comes from one matrix, so any subset may be partial maxima; list only few.
    some = chain.from_iterable(combinations(every, size) for size in range(1, count))
    sets = [every, *(some if count <= _FEW else ((index,) for index in every))]
    return Notation(
        inputs=tuple(tensors),
        outputs=(made,),
        dependences=(linear(*every), *(increasing(*chosen) for chosen in sets)),
        whole=frozenset() if count == 1 else frozenset(known | {"i", "j"}),
        work_flop=0.0,
        why="" if count == 1 else "blocks stand one after the other",
    )


_FFT = along(1, "dim", linear(0), why="each coefficient is a sum over all elements", nonempty=True)

RULES = by_operator(
    {
        **{name: _factorised(*entry) for name, entry in _FACTORISATIONS.items()},
        **{name: _sided(at, text, text) for name, (at, text) in _SOLVES.items()},
        **{name: _sided(*entry) for name, entry in _SIDED_SOLVES.items()},
        "_fft_c2c _fft_c2r _fft_r2c": _FFT,
        "_linalg_check_errors": Rule(_check_errors),
        "block_diag": Rule(_block_diag),
        "linalg_lstsq": Rule(_lstsq),
        "linalg_pinv.atol_rtol_tensor": Rule(_pinv),
        "lu_unpack": Rule(_lu_unpack),
    }
)
