"""Run a constructor of a model without memory, and record its operators on a tape (`tape`).

Its tensors have no data: they are on the `meta` device, but report the device `cpu`, because
modules skip their initialisation on `meta`. A request for values (`.item()`, `.tolist()`, an `if`
on a tensor) gets the real values: the entries on which they depend are executed, and freed again.
Tensors from outside of PyTorch, or from a file, keep their memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import (
    OpOverload,
    TorchDispatchMode,
    argument_types,
    base_name,
    copied_storage,
    key_of_storage,
    new_storage,
    storage_key,
    trunc_normal_as,
    without_torch_functions,
    written_arguments,
)
from sbp_torch._torch_patches import replaced
from sbp_torch.deferred_init.tape import OwnGenerator, Return, Tape, TapeEntry, TapeReplay, Window
from sbp_torch.graph_capture.diagnostics import user_line

_aten = torch.ops.aten

#: Operators whose results have arbitrary values, like a storage without a write on the tape.
_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))

#: In-place operators that overwrite their first argument completely.
_FILLS = frozenset(
    (
        *("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
        *("random_", "bernoulli_", "zero_", "fill_", "copy_"),
    )
)

#: Tags of operators that depend on values.
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

#: Arguments that operators on `meta` ignore.
_NOT_ON_META = ("generator", "pin_memory")

#: Operators that take only the shape of their first argument -> operator and arguments to fill it.
_LIKE: Mapping[str, tuple[OpOverload, tuple[Any, ...]]] = {
    "zeros_like": (_aten.zero_.default, ()),
    "new_zeros": (_aten.zero_.default, ()),
    "ones_like": (_aten.fill_.Scalar, (1,)),
    "new_ones": (_aten.fill_.Scalar, (1,)),
    "rand_like": (_aten.uniform_.default, (0.0, 1.0)),
    "randn_like": (_aten.normal_.default, (0.0, 1.0)),
}


class ConstructorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Records the operators of a constructor on a tape, and runs them on tensors without data."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.tape = Tape(seed=seed)
        self.replay = TapeReplay(self.tape)
        #: Key of a real storage on the tape -> the storage, and the one without data for it.
        self.stand_ins: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.generator = _GeneratorWatch(self.tape)
        #: Whether operators run normally and are not recorded, because they are our own.
        self.resting = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the operators inside the `with` block; restore the default generator after it."""
        before = torch.default_generator.get_state()
        try:
            self.generator.begin()
            with trunc_normal_as(self._trunc_normal), _Answers(self), self:
                yield
        finally:
            torch.default_generator.set_state(before)

    def at_rest(self) -> AbstractContextManager[None]:
        """Run the operators inside the `with` block normally, without recording."""
        return replaced(self, resting=True)

    def values(self, tensor: Tensor) -> Tensor:
        """Return a real tensor with the present values of a tensor."""
        if not tensor.is_meta:
            return tensor
        return self.replay.values([self.tape.window(tensor)])[0]

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on tensors without data, and record it."""
        if self.resting:
            return func(*args, **(kwargs or {}))
        with without_torch_functions():
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = base_name(op)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise CaptureError(
                f"a constructor that makes tensors on {device} cannot be deferred",
                where=user_line(),
                accepted="constructors that make their tensors on the CPU",
                todo="leave device and .to(device) out: the runtime moves each shard to its device",
            )
        if name == "lift_fresh":
            return self._stand_in(args[0])
        if name == "set_" and any(isinstance(value, torch.UntypedStorage) for value in args):
            return self._set(op, args, kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        for tensor in tensors:
            _check_plain(tensor)
        written = written_arguments(op, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in op.tags
        if tensors and not any(tensor.is_meta for tensor in tensors) and not random:
            self._part(written)
            return op(*args, **kwargs)
        asks_for_values = name == "_local_scalar_dense" or not _BY_VALUE.isdisjoint(op.tags)
        if any(not tensor.is_meta for tensor in written) or asks_for_values:
            return self._now(op, args, kwargs, written, random=random)
        asked = {key for key, value in kwargs.items() if value is not None}
        if (
            name == "_to_copy"
            and "device" in asked
            and asked <= {"device", "dtype", "layout", "non_blocking"}
            and kwargs.get("dtype") in (None, args[0].dtype)
        ):  # copied only because the tensor seems to be on another device
            return _aten.alias.default(args[0])
        return self._record(op, args, kwargs, written, random=random)

    def _record(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        *,
        random: bool,
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs))
        own = kwargs.get("generator")
        if own is torch.default_generator:
            own = kwargs["generator"] = None
        on_meta = {key: None if key in _NOT_ON_META else v for key, v in kwargs.items()}
        if "device" in argument_types(op):
            on_meta["device"] = torch.device("meta")
        known = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        try:
            results = op(*args, **on_meta)
        except NotImplementedError:
            if not written:
                return self._now(op, args, kwargs, written, random=random)
            results = written[0] if len(written) == 1 else tuple(written)
        made = tuple(
            None if storage_key(value) in known else self.tape.window(value)
            for value in tree_leaves(results)
            if isinstance(value, Tensor)
        )
        if base_name(op) in _EMPTY or not (written or any(made)):
            return results
        given = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        if base_name(op) in _LIKE and made[0] is not None:
            op, fill = _LIKE[base_name(op)]
            args, given, written, made = (results, *fill), {}, [results], ()
        private = None
        if own is not None:
            private = own.get_state()
            self._move(op, args, given)
            given["generator"] = OwnGenerator()
        self._append(op, args, given, written, made, private, random=random and own is None)
        return results

    def _append(
        self,
        op: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: Sequence[Tensor],
        made: tuple[Window | None, ...] = (),
        private: Tensor | None = None,
        *,
        random: bool,
    ) -> None:
        event = self.generator.draw() if random else None
        targets = [self.tape.window(value) for value in written]
        fresh = {window.storage for window in made if window is not None}
        name = base_name(op) or "uniform_"
        covers, used = set[int](), [args, {k: v for k, v in kwargs.items() if k != "out"}]
        if name in _FILLS or "out" in kwargs:
            covers = {window.storage for window in targets if self.tape.is_whole(window)}
            used[0] = args if "out" in kwargs else args[1:]
        tensors = [value for value in tree_leaves(used) if isinstance(value, Tensor)]
        reads = {self.tape.window(value).storage for value in tensors}
        self.tape.append(
            TapeEntry(
                op=op,
                args=tree_map_only(Tensor, self.tape.window, args),
                kwargs=tree_map_only(Tensor, self.tape.window, dict(kwargs)),
                made=made,
                reads=frozenset(reads),
                writes=frozenset({window.storage for window in targets} | fresh),
                covers=frozenset(covers | fresh),
                default=torch.get_default_dtype(),
                event=event,
                generator=private,
            )
        )

    def _trunc_normal(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a `trunc_normal_` that is recorded as one entry: it draws until all values fit."""

        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # With a user's generator, each draw moves that generator, and is an ordinary entry.
            plainly = kwargs.get("generator") is not None
            with without_torch_functions(), self.at_rest():
                if not plainly and tensor.is_meta:
                    self._append(original, (tensor.detach(), *args), kwargs, [tensor], random=True)
                    return tensor
            return original(tensor, *args, **kwargs)

        return fill

    # Real values.

    def _now(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        *,
        random: bool,
    ) -> Any:
        """Run an operator with data now, because its result or its target has to be real."""
        if any(tensor.is_meta for tensor in written) or (
            random and kwargs.get("generator") is None
        ):
            raise CaptureError(
                f"a constructor cannot be deferred that calls {op}",
                where=user_line(),
                accepted="operators that fill new tensors, or write to tensors made by PyTorch",
                todo="do this outside of the constructor, or build by deferred(..., whole=True)",
            )
        self._part(written)
        args, kwargs = tree_map_only(Tensor, self.values, (args, kwargs))
        return op(*args, **kwargs)

    def _move(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draw from a user's generator now, so that it moves; drop the numbers."""
        blind = base_name(op) in _FILLS

        real = partial(torch.empty_like, device="cpu") if blind else self.values
        args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
        op(*args, **kwargs)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a tensor without data for a real one."""
        if tensor.is_meta:
            return tensor
        storage = self._stand_in_storage(tensor.untyped_storage())
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        made = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.tape.constants.setdefault(self.tape.window(made).storage, tensor.untyped_storage())
        return made

    def _stand_in_storage(self, real: torch.UntypedStorage) -> torch.UntypedStorage:
        key = key_of_storage(real)
        if key not in self.stand_ins:
            self.stand_ins[key] = (real, new_storage(real.nbytes(), "meta"))
        return self.stand_ins[key][1]

    def _part(self, written: Sequence[Tensor]) -> None:
        """Copy the values of constants that the program is about to change."""
        for tensor in written:
            found = self.stand_ins.pop(storage_key(tensor), None)
            if found is not None:
                real, stand_in = found
                empty = torch.empty(0, dtype=torch.uint8, device="meta").set_(stand_in)
                self.tape.constants[self.tape.window(empty).storage] = copied_storage(real)

    def _set(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set the storage of a tensor, for example to one that was read from a file."""
        target, storage, *rest = args
        if not target.is_meta or storage.device.type == "meta":
            return op(*args, **kwargs)
        made = op(target, self._stand_in_storage(storage), *rest, **kwargs)
        self.tape.constants.setdefault(self.tape.window(made).storage, storage)
        return made


class _GeneratorWatch:
    """Detects that the constructor itself sets PyTorch's default generator.

    During recording, each draw moves the generator by one number only. So its state identifies the
    number of draws before it, and a state that was read and set again, as `torch.random.fork_rng`
    does, is recognised.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.known: dict[bytes, int] = {}
        self.current = b""

    def begin(self) -> None:
        """Seed the generator."""
        torch.default_generator.manual_seed(self.tape.seed)
        self.current = _digest(torch.default_generator.get_state())
        self.known[self.current] = 0

    def draw(self) -> int:
        """Record a draw; return the number of its event."""
        state = torch.default_generator.get_state()
        digest = _digest(state)
        if digest != self.current:
            position = self.known.get(digest)
            self.tape.events.append(state if position is None else Return(position=position))
        number = len(self.tape.events)
        while True:
            torch.empty((), dtype=torch.int64).random_()
            self.current = _digest(torch.default_generator.get_state())
            if self.current not in self.known:  # it may be, if the same seed was set twice
                break
        self.known[self.current] = number + 1
        return number


def _digest(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


class _Answers(TorchFunctionMode):
    """Makes tensors without data answer queries, such as for their device, like real tensors."""

    def __init__(self, recording: ConstructorRecorder) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if args and isinstance(args[0], Tensor):
            first = args[0]
            if func is Tensor.share_memory_:
                raise CaptureError(
                    "a constructor cannot be deferred that shares memory between processes",
                    where=user_line(),
                    accepted="constructors that make tensors of their own process",
                    todo="leave share_memory_() out, or build by deferred(..., whole=True)",
                )
            with without_torch_functions(), self.recording.at_rest():
                if func == _SET_DATA and first.is_meta != args[1].is_meta:
                    alike = self.recording._stand_in if first.is_meta else self.recording.values
                    return func(first, alike(args[1]))
                if first.is_meta and func in _VALUES:
                    return func(self.recording.values(first), *args[1:], **given)
                if first.is_meta and func in _ANSWERS:
                    return _ANSWERS[func](first)
        return func(*args, **given)


_tensor: Any = Tensor  # its properties are descriptors, which the stubs lack
_SET_DATA = _tensor.data.__set__

#: Methods that read values and are no operators.
_VALUES = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__))

#: Query -> answer of a tensor without data.
_ANSWERS: Mapping[Any, Callable[[Tensor], Any]] = {
    _tensor.device.__get__: lambda _: torch.device("cpu"),
    _tensor.is_meta.__get__: lambda _: False,
    _tensor.is_cpu.__get__: lambda _: True,
    Tensor.get_device: lambda _: -1,
    Tensor.data_ptr: lambda tensor: (
        storage_key(tensor) + tensor.storage_offset() * tensor.dtype.itemsize
    ),
}


def _check_plain(tensor: Tensor) -> None:
    lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    named = isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer) and not lazy
    strided = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj())
    if not (strided and (named or type(tensor) is Tensor)):
        raise CaptureError(
            f"a constructor that makes a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}) "
            "cannot be deferred",
            where=user_line(),
            accepted="plain strided tensors",
        )
