"""A fingerprint of a training step that is not traced: equal ones are captured to equal graphs.

Tracing a deep model takes a minute, and a plan that is cached by its graph needs the graph first.
So a start looks up what the step is made of, in milliseconds: the module tree with its classes,
attributes, parameters and buffers (names, shapes, dtypes, ties), the loss, the form of the batch,
the optimizer with its settings, the capture's options, torch's flags and versions. Values of
parameters, buffers and batch tensors do not count, nor do learning rates: graphs take them as
inputs. Everything else that tracing could read counts:

* of functions and classes that are not installed: bytecode, defaults, closures, and what they name
  in their modules, so that a global set at run time, a field of a global configuration, or a
  function patched in a notebook, is seen;
* of installed ones: their names, and any function of the user's that was put into their classes;
* the files of all loaded modules, which a cached plan names (`sources`), as code that is called
  from somewhere deep is in one of them, and so are the constants that it reads.

What cannot be described so that it reads the same in the next process is refused, as are functions
that name the environment (`os.environ`); the step is then captured each time. Not seen are files
that a model reads while it is traced, and changes at run time of what installed packages hold, but
for their classes and what the user's code names of them.

>>> model = torch.nn.Linear(2, 2)
>>> def loss(model, batch):
...     return model(batch).square().mean()
>>> one = fingerprint(model, loss, torch.zeros(3, 2))
>>> torch.nn.init.zeros_(model.weight).sum().item()
0.0
>>> fingerprint(model, loss, torch.ones(3, 2)) == one
True
>>> fingerprint(model, loss, torch.ones(4, 2)) == one
False
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import os
import platform
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.compile.cache import compiler_digest
from sbp_core.compile.depends import SourceFile, loaded_sources
from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import gradient_hooks

#: Packages whose version or code is part of every fingerprint.
_VERSIONED = ("torch", "sbp_core")

#: Settings of a parameter group that become inputs of the graph.
_RATES = ("lr", "initial_lr")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice)
_NAMES_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)

#: Operators, which go by their names.
_OPERATORS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))

_LIBRARY: Any = torch.library  # its class of custom operators is not listed as public
_CUSTOM_OPERATOR = _LIBRARY.CustomOpDef

#: Objects that say nothing about what is computed.
_SILENT = (
    "logging", "threading", "_thread", "weakref", "_weakref", "io", "_io", "warnings", "_abc",
)  # fmt: skip

#: What reads the environment; on Windows there is none of bytes.
_ENVIRONMENT = tuple(
    getattr(os, name) for name in ("environ", "environb", "getenv", "getenvb") if hasattr(os, name)
)

#: Attributes that hold Python's own hashes, which are other ones in each process: transformers'.
_HASHES = ("_original_object_hash",)

_HOOKS = re.compile(r"_(\w+_)?hooks(_\w+)?")


def fingerprint(
    model: nn.Module,
    loss: Callable[..., Any],
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    settings: Any = (),
) -> str:
    """Return 32 hex digits that change whenever the captured graph could.

    Args:
        model: As for `capture`.
        loss: As for `capture`.
        batch: As for `capture`.
        optimizer: As for `capture`.
        settings: Whatever else decides about the result, such as the options of capture, passes,
            planner and cluster: plain values and dataclasses.

    Raises:
        CaptureError: something cannot be described.
    """
    description = _Description()
    description.add(_surroundings())
    description.add_module_tree(model)
    description.add(loss)
    description.add(batch, is_input=True)
    if optimizer is not None:
        description.add_optimizer(optimizer)
    description.add(settings)
    return description.digest()


def sources() -> tuple[SourceFile, ...]:
    """Return the files that the step just captured may depend on, beside its fingerprint."""
    return loaded_sources(without=_VERSIONED)


def _surroundings() -> tuple[Any, ...]:
    """Return versions, and the flags of torch that a trace depends on."""
    backends: Any = torch.backends  # torch leaves its functions untyped
    cuda = backends.cuda
    return (
        sys.version,
        platform.machine(),
        torch.__version__,
        compiler_digest(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.backends.cpu.get_cpu_capability(),
        backends.mkldnn.is_available() and backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.cuda.is_available(),
    )


def _is_installed(path: str) -> bool:
    """Whether code lies where packages are installed, or in the standard library."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return path.startswith((*folders, "<frozen"))


class _Description:
    """What was described so far, as a running hash.

    An object that comes again is described by its number, which shows ties, and ends cycles.
    Functions and classes are described after everything else, one by one, as they lead to each
    other in long chains.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []
        self._later: deque[Any] = deque()
        self._path: list[str] = []

    def digest(self) -> str:
        """Return the hash of all that was added and of the code that it leads to."""
        while self._later:
            entry = self._later.popleft()
            if isinstance(entry, type):
                self._add_class(entry)
            else:
                self._add_code(entry)
        return self._hash.hexdigest()

    def _put(self, *words: object) -> None:
        for word in words:
            text = str(word).encode()
            self._hash.update(b"%d:" % len(text) + text)

    def _is_new(self, value: object) -> bool:
        """Whether an object comes for the first time; else put its number."""
        number = self._numbers.get(id(value))
        if number is not None:
            self._put("again", number)
            return False
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)  # else its id could come again
        return True

    # The parts of a step.

    def add_module_tree(self, model: nn.Module, *, is_input: bool = True) -> None:
        """Add a module, its parameters and buffers, and all below it.

        Args:
            model: The model, or another module that its code or the loss leads to.
            is_input: Whether parameters and buffers are inputs of the graph, so that their values
                do not count; those of other modules become constants.
        """
        if not self._is_new(model):
            return
        self._put("module", type(model).__qualname__, model.training)
        self._reach(type(model))
        for name, child in model._modules.items():
            with _At(self._path, f".{name}"):
                self._put(name)
                self.add(child, is_input=is_input)
        for key, value in vars(model).items():
            if key == "_modules":
                continue
            with _At(self._path, f".{key}"):
                self._put(key)
                if key in ("_parameters", "_buffers"):
                    self.add(value, is_input=is_input)
                elif _HOOKS.fullmatch(key) and isinstance(value, Mapping):
                    self.add(list(value.values()))  # their keys are counted through the process
                else:
                    self.add(value)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer: its class, settings, states without their values, parameters."""
        self._put("optimizer")
        self._reach(type(optimizer))
        for key, value in vars(optimizer).items():
            with _At(self._path, f"optimizer.{key}"):
                self._put(key)
                if key == "param_groups":
                    self.add([_without_rates(group) for group in value], is_input=True)
                elif key == "defaults":
                    self.add(_without_rates(value))
                elif key == "state":
                    self.add(list(value.items()), is_input=True)
                else:
                    self.add(value)

    # Values.

    def add(self, value: Any, *, is_input: bool = False) -> None:
        """Add any value; of tensors that are inputs of the graph only what they are.

        Raises:
            CaptureError: it cannot be described.
        """
        kind = type(value)
        if any(value is reader for reader in _ENVIRONMENT):
            raise self._of_environment()
        if kind in _PLAIN or isinstance(value, _NAMES_OF_TORCH):
            self._put(kind.__name__, repr(value))
        elif isinstance(value, Tensor):
            self._add_tensor(value, is_input=is_input)
        elif isinstance(value, nn.Module):
            self.add_module_tree(value, is_input=is_input)
        elif isinstance(value, _OPERATORS):
            self._put("operator", str(value))
        elif isinstance(value, Enum):
            self._put("enum", kind.__qualname__, value.name)
        elif isinstance(value, type):
            self._reach(value)
        elif isinstance(value, types.CodeType):
            self._add_bytecode(value)
        elif callable(value) and self._add_callable(value):
            pass
        elif kind in (tuple, frozenset) or self._is_new(value):
            # Whether equal tuples are one object is up to the interpreter.
            self._add_object(value, is_input=is_input)

    def _add_tensor(self, value: Tensor, *, is_input: bool) -> None:
        if not self._is_new(value):
            return
        self._put("tensor", type(value).__qualname__, tuple(value.shape), value.dtype)
        self._put(value.device, value.layout, value.requires_grad)
        if value.layout is torch.strided:
            self._put(value.stride())
        if value.is_leaf and value.requires_grad:
            self.add(gradient_hooks(value))
        if not is_input and value.device.type != "meta":
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._hash.update(hashlib.blake2b(content.numpy().tobytes()).digest())

    def _add_object(self, value: Any, *, is_input: bool) -> None:
        kind = type(value)
        self._put("object", kind.__module__, kind.__qualname__)
        if isinstance(value, Mapping):
            for key, part in value.items():
                with _At(self._path, f"[{key!r}]" if isinstance(key, str | int) else "[...]"):
                    self.add(key, is_input=is_input)
                    self.add(part, is_input=is_input)
        elif isinstance(value, list | tuple | deque):
            for index, part in enumerate(value):
                with _At(self._path, f"[{index}]"):
                    self.add(part, is_input=is_input)
        elif isinstance(value, set | frozenset):
            self._put(sorted(map(_digest_alone, value)))
        elif kind.__module__.split(".")[0] in _SILENT or isinstance(value, types.ModuleType):
            pass
        elif kind is property:
            self.add((value.fget, value.fset))
        elif isinstance(value, _CUSTOM_OPERATOR):
            # How it is differentiated is traced; its kernels are not.
            self.add([part for part in vars(value).values() if _function_of(part)])
        elif kind in (staticmethod, classmethod) or hasattr(value, "__wrapped__"):
            self.add(value.__wrapped__)
        elif is_dataclass(value):
            self._reach(kind)
            for field in fields(value):
                with _At(self._path, f".{field.name}"):
                    self._put(field.name)
                    self.add(getattr(value, field.name, None), is_input=is_input)
        else:
            self._reach(kind)
            self.add(self._state(value), is_input=is_input)

    def _state(self, value: Any) -> Any:
        """Return what an object holds.

        Raises:
            CaptureError: it does not say.
        """
        own = {"__reduce_ex__", "__reduce__", "__getstate__"} & _attributes(type(value))
        if not own and hasattr(value, "__dict__"):
            return {key: part for key, part in vars(value).items() if key not in _HASHES}
        registered = copyreg.dispatch_table.get(type(value))
        try:
            reduced = registered(value) if registered else value.__reduce_ex__(2)
        except Exception as error:
            kind = type(value)
            raise CaptureError(
                f"{self._place()} is a "
                f"{kind.__module__}.{kind.__qualname__}, of which nobody can say whether it is the "
                f"same in the next process: {error}",
                accepted="plain values, tensors, functions, modules, objects that can be pickled",
                todo="keep it outside of the model, or do without cached captures",
            ) from error
        return reduced

    def _place(self) -> str:
        return "".join(self._path).lstrip(".") or "an object"

    def _of_environment(self) -> CaptureError:
        return CaptureError(
            f"{self._place()} names the environment: nobody can say which variables it reads, and "
            f"whether they are the same in the next process",
            accepted="functions that name neither os.environ nor os.getenv",
            todo="read the variable where the module is loaded, into a global",
        )

    # Code.

    def _add_callable(self, value: Any) -> bool:
        """Add a function or what wraps one; return whether it was one."""
        if isinstance(value, functools.partial):
            self.add(("partial", value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._put("method")
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._reach(value)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._put("builtin", value.__module__, value.__qualname__)
        else:
            return False
        return True

    def _reach(self, value: Any) -> None:
        """Name a function or class, and describe it later."""
        if self._is_new(value):
            self._put("code", value.__module__, value.__qualname__)
            self._later.append(value)

    def _add_class(self, cls: type) -> None:
        """Add the classes that a class is made of, and what is in them that is not installed."""
        self._put("class", cls.__qualname__)
        for base in cls.__mro__[1:]:
            if base.__module__.split(".")[0] not in (*_VERSIONED, "builtins", "abc", "typing"):
                self._reach(base)
        ours = cls.__module__.split(".")[0] in _VERSIONED
        if ours or cls.__module__ in sys.stdlib_module_names:
            return
        module = sys.modules.get(cls.__module__)
        is_installed = _is_installed(getattr(module, "__file__", None) or "")
        for key, value in vars(cls).items():
            function = _function_of(value)
            if function is not None:
                self._put(key)
                self._reach(function)
            elif not is_installed and not (key.startswith("__") and key.endswith("__")):
                self._put(key)
                with _At(self._path, f"{cls.__qualname__}.{key}"):
                    self.add(value)

    def _add_code(self, function: types.FunctionType) -> None:
        """Add what a function computes, as far as it is not installed."""
        self._put("function", function.__qualname__)
        top = (function.__module__ or "").split(".")[0]
        if top in _VERSIONED or _is_installed(function.__code__.co_filename):
            return
        with _At(self._path, f"{function.__qualname__}()"):
            self._add_bytecode(function.__code__)
            self.add((function.__defaults__, function.__kwdefaults__))
            for cell in function.__closure__ or ():
                self.add(_content(cell))
            names = set(_names(function.__code__))
            for name in sorted(names & function.__globals__.keys()):
                self._put(name)
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType):
                    self._add_used_of(value, names)
                else:
                    with _At(self._path, f": {name}"):
                        self.add(value)

    def _add_used_of(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """Add what a function may use of a module: what bears a name that it mentions."""
        self._put("module", module.__name__)
        if module.__name__.split(".")[0] in _VERSIONED:
            return
        held = vars(module)
        for name in sorted(set(names) & held.keys()):
            if not isinstance(held[name], types.ModuleType):
                self._put(name)
                with _At(self._path, f": {module.__name__}.{name}"):
                    self.add(held[name])

    def _add_bytecode(self, code: types.CodeType) -> None:
        self._put(code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars)
        self._put(code.co_argcount, code.co_kwonlyargcount, code.co_flags)
        for constant in code.co_consts:
            self.add(constant)


class _At:
    """Where in the program the description is, for messages."""

    def __init__(self, path: list[str], part: str) -> None:
        self._path, self._part = path, part

    def __enter__(self) -> None:
        self._path.append(self._part)

    def __exit__(self, *_: object) -> None:
        self._path.pop()


def _digest_alone(value: Any) -> str:
    description = _Description()
    description.add(value)
    return description.digest()


def _attributes(cls: type) -> set[str]:
    """Return what the classes of an object define, but for `object` itself."""
    return {name for base in cls.__mro__[:-1] for name in vars(base)}


def _without_rates(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group, with what a learning rate is instead of its value."""
    return {key: type(part) if key in _RATES else part for key, part in group.items()}


def _function_of(value: Any) -> types.FunctionType | None:
    """Return the function that a class holds, be it decorated or not."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _content(cell: types.CellType) -> Any:
    """Return what a closure holds; None of a cell that is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code mentions, functions inside it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
