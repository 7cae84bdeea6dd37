"""A data set of images in folders, one for each class, decoded when they are asked for.

    path/cats/1.jpg  path/cats/2.jpg  path/dogs/1.jpg ...                 a part is held out
    path/train/cats/1.jpg ...         path/validation/cats/7.jpg ...      as the folders say

Classes are numbered in the order of their names. Which images are held out is told by a hash of
their names, so that images that come later change nothing for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError
from sbp_models.configs import ImageFolderConfig
from sbp_models.local_files import files_of, is_held_out, read_bytes
from sbp_models.pictures import SUFFIXES, Pictures
from sbp_models.splits import checked_numbers, size_of


class ImageFolder:
    """Images and their classes. Fulfils `sbp_torch.kinds.Dataset`.

    Raises:
        ConfigError: the folder has no images, too many classes, or a split without images.
    """

    def __init__(self, config: ImageFolderConfig) -> None:
        root = Path(config.path).expanduser()
        self._pictures = Pictures(
            image_size=config.image_size, channels=config.channels, needed_by="data=image_folder"
        )
        splits = [root / "train", root / "validation"]
        if all(folder.is_dir() for folder in splits):
            self._files = {folder.name: _images(folder) for folder in splits}
        else:
            images = _images(root)
            held = [
                is_held_out(file.relative_to(root).as_posix(), config.held_out)
                for file, _ in images
            ]
            pairs = list(zip(images, held, strict=True))
            self._files = {
                "train": [image for image, out in pairs if not out],
                "validation": [image for image, out in pairs if out],
            }
        self.classes = sorted({name for own in self._files.values() for _, name in own})
        self._label = f"images of {config.path}"
        if len(self.classes) > config.num_classes:
            raise ConfigError(
                f"data.path={config.path} has {len(self.classes)} folders of images, and "
                f"data.num_classes={config.num_classes}",
                accepted=f"data.num_classes >= {len(self.classes)}",
                todo="set model.num_classes, which data.num_classes follows",
            )
        for split, own in self._files.items():
            if not own:
                raise ConfigError(
                    f"data.path={config.path} has no image for the split {split!r}",
                    accepted="more images, or folders `train` and `validation` with images",
                    todo="raise data.held_out" if split == "validation" else "",
                )
        self._splits = {split: len(own) for split, own in self._files.items()}

    def num_samples(self, split: str = "train") -> int:
        """Return how many images a split has."""
        return size_of(self._splits, split, where=self._label)

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return images of `train` or `validation`.

        Returns:
            `images`, float32 (n, channels, image_size, image_size), in [-1, 1]; `labels`, int64
            (n,).

        Raises:
            ConfigError: a file cannot be read, or is no whole image: names the byte.
        """
        found = checked_numbers(numbers, self._splits, split, where=self._label)
        asked = [self._files[split][number] for number in found]
        images = [self._pictures.decoded(read_bytes(file), str(file)) for file, _ in asked]
        labels = [self.classes.index(name) for _, name in asked]
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}

    def describe(self) -> str:
        """Return one line: how many images and classes there are."""
        counts = ", ".join(f"{size:,} {split}" for split, size in self._splits.items())
        return f"{self._label}: {counts}, {len(self.classes)} classes"


def _images(folder: Path) -> Sequence[tuple[Path, str]]:
    """Return the images below the folders of a folder, and the name of their class."""
    found = []
    for file in files_of(folder, key="data.path", suffixes=SUFFIXES):
        parts = file.relative_to(folder).parts if folder != file else (file.name,)
        if len(parts) < 2:
            raise ConfigError(
                f"{file} lies in no folder of a class",
                accepted="FOLDER/CLASS/IMAGE",
                todo="put it into the folder of its class",
            )
        found.append((file, parts[0]))
    return found


def build(config: ImageFolderConfig) -> ImageFolder:
    """Make the data set."""
    return ImageFolder(config)
