"""`SampleSource`: load samples from a data set plugin, and check what the plugin returns.

It casts floating-point tensors to the dtype of the model, applies augmentation, and serialises
calls of the training and the evaluation loader. An error names the sample that failed. By the
fingerprint of a split, a resumed run detects that the data have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from xxhash import xxh3_128

from sbp_core.errors import PluginError, SbpError, words_of
from sbp_core.plugins import PluginEntry
from sbp_torch.kinds import AugmentedDataset, Dataset

_METHODS = ("num_samples", "samples", "describe")

#: Number of samples in the fingerprint of a split, evenly spaced from the first to the last.
_FINGERPRINTED = 8


def checked_dataset(made: object, plugin: PluginEntry) -> Dataset:
    """Check that a plugin has returned a data set, and return it.

    Raises:
        PluginError: it is not a data set.
    """
    if all(callable(getattr(made, name, None)) for name in _METHODS):
        return made  # type: ignore[return-value] # it has the methods of the protocol
    raise plugin.returned(made, f"a data set with the methods {', '.join(_METHODS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The samples of a data set, as a run needs them.

    Args:
        data: The data set.
        plugin: The plugin of the data set, for messages.
        dtype: Dtype for floating-point tensors.
    """

    data: Dataset
    plugin: PluginEntry
    dtype: torch.dtype
    #: The loaders of training and of evaluation call the same data set.
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def num_samples(self, split: str) -> int:
        """Return the number of samples of a split.

        Raises:
            PluginError: the data set does not return an integer >= 1.
            SbpLookupError: no such split.
        """
        with self._lock:
            found = self.data.num_samples(split)
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.plugin.returned(found, "an integer >= 1", by="num_samples")
        if found < 1:
            told = f"split {split!r} has {found} samples"
            raise self._return_error(found, "an integer >= 1", "num_samples", told)
        return found

    def load(
        self,
        numbers: npt.NDArray[np.int64],
        split: str,
        epochs: npt.NDArray[np.int64] | None = None,
    ) -> dict[str, Tensor]:
        """Return samples in the given order, floating-point tensors in the dtype of the model.

        Args:
            numbers: int64 (n,), n >= 1.
            split: The split of the samples.
            epochs: The epoch of each sample, int64 (n,); if given, samples of `train` are
                augmented, if the data set supports that.

        Raises:
            PluginError: the data set returns something else, or fails with an error of its own.
            SbpError: the error that the data set raises, with the number of the sample.
        """
        return {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in self._load(numbers, split, epochs).items()
        }

    def fingerprint(self, split: str) -> str:
        """Return a hash of a few samples of a split, from the first to the last.

        Different data have a different hash, unless all of these samples are equal. The hash does
        not depend on the paths of files.

        Raises:
            PluginError, SbpError: see `load`.
        """
        last = self.num_samples(split) - 1
        numbers = sorted({last * part // (_FINGERPRINTED - 1) for part in range(_FINGERPRINTED)})
        state = xxh3_128()
        for name, value in sorted(self._load(np.array(numbers), split).items()):
            state.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            state.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()

    def _load(
        self,
        numbers: npt.NDArray[np.int64],
        split: str,
        epochs: npt.NDArray[np.int64] | None = None,
    ) -> Mapping[str, Tensor]:
        """Return samples as the data set returns them, checked; raises as `load`."""
        with self._lock:
            try:
                found = self.data.samples(numbers, split)
            except Exception as error:
                failed = error
                # Load the samples one by one, to find the sample that fails.
                for number in numbers[:, None] if len(numbers) > 1 else ():
                    try:
                        self.data.samples(number, split)
                    except Exception as alone:
                        failed, numbers = alone, number
                        break
                raise self._error(failed, numbers, split, "samples") from error
            self._check(found, numbers, "samples")
            if epochs is None or split != "train" or not isinstance(self.data, AugmentedDataset):
                return found
            try:
                found = self.data.augment(found, numbers, epochs)
            except Exception as error:
                raise self._error(error, numbers, split, "augment") from error
            self._check(found, numbers, "augment")
            return found

    def _check(self, found: object, numbers: npt.NDArray[np.int64], by: str) -> None:
        """Check that the method returned tensors with one row for each sample.

        Raises:
            PluginError: it did not; the message names the method.
        """
        if not (isinstance(found, Mapping) and all(map(torch.is_tensor, found.values()))):
            raise self.plugin.returned(found, "a mapping name -> tensor", by=by)
        for name, value in found.items():
            if value.shape[:1] != (len(numbers),):
                accepted = f"tensors whose dim 0 is the {len(numbers)} samples asked for"
                told = f"{name!r} has the shape {tuple(value.shape)}"
                raise self._return_error(value, accepted, by, told)

    def _return_error(self, found: object, accepted: str, by: str, told: str) -> PluginError:
        error = self.plugin.returned(found, accepted, by=by)
        return error.replaced(PluginError, what=f"{error.what}: {told}", accepted=accepted)

    def _error(
        self, found: Exception, numbers: npt.NDArray[np.int64], split: str, by: str
    ) -> SbpError:
        """Return the error to raise for an exception of the data set, with the samples."""
        named = ", ".join(map(str, numbers[:3].tolist())) + (", ..." if len(numbers) > 3 else "")
        sample = f"{'sample' if len(numbers) == 1 else 'samples'} {named} of split {split!r}"
        if isinstance(found, SbpError):
            where = (*found.where, f"{sample} of data {self.plugin.name!r}")
            return found.replaced(type(found), where=where)
        assert self.plugin.factory is not None, "a plugin that is called has a factory"
        return PluginError(
            f"data {self.plugin.name!r} of {self.plugin.distribution} {self.plugin.version} failed "
            f"at {sample}: {words_of(found)}",
            where=f"{self.plugin.factory.build}, method {by}",
            todo="correct the data or the plugin",
        )
