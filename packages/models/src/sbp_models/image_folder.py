"""The data set `image_folder`: images in one folder for each class, decoded on access.

    path/cats/1.jpg  path/cats/2.jpg  path/dogs/1.jpg ...                 a part is held out
    path/train/cats/1.jpg ...         path/validation/cats/7.jpg ...      split by the folders

Classes are numbered in the order of their names. A hash of an image's name decides whether it is
held out, so new images do not change the split of the existing ones.
"""

from __future__ import annotations

from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.user_paths import user_path
from sbp_models.configs import ImageFolderConfig
from sbp_models.local_files import files_of, is_held_out
from sbp_models.pictures import SUFFIXES, ImageFiles, Pictures, StoredImage


class ImageFolder(ImageFiles):
    """Images and their classes. Implements `sbp_torch.kinds.Dataset`.

    Raises:
        ConfigError: the folder has no images, too many classes, or a split without images.
    """

    def __init__(self, config: ImageFolderConfig) -> None:
        pictures = Pictures(config, needed_by="data=image_folder")
        root = user_path(config.path, key="data.path")
        splits = [root / "train", root / "validation"]
        if all(folder.is_dir() for folder in splits):
            files = {folder.name: _images(folder) for folder in splits}
        else:
            files = {"train": [], "validation": []}
            for file, name in _images(root):
                held = is_held_out(file.relative_to(root).as_posix(), config.held_out)
                files["validation" if held else "train"].append((file, name))
        self.classes = sorted({name for own in files.values() for _, name in own})
        if len(self.classes) > config.num_classes:
            raise ConfigError(
                f"data.path={config.path} has {len(self.classes)} folders of images, and "
                f"data.num_classes={config.num_classes}",
                accepted=f"data.num_classes >= {len(self.classes)}",
                todo="set model.num_classes, which data.num_classes follows",
            )
        labels = {name: label for label, name in enumerate(self.classes)}
        super().__init__(
            {
                split: [StoredImage(file=file, label=labels[name]) for file, name in own]
                for split, own in files.items()
            },
            pictures,
            label=f"images of {config.path}",
            accepted="more images, a larger data.held_out, or folders `train` and `validation`",
        )

    def describe(self) -> str:
        """Return a line with the numbers of images and classes."""
        return f"{super().describe()}, {len(self.classes)} classes"


def _images(folder: Path) -> list[tuple[Path, str]]:
    """Return the images below each class folder of a folder, with the name of the class."""
    found = []
    for file in files_of(folder, key="data.path", suffixes=SUFFIXES):
        parts = file.relative_to(folder).parts if folder != file else (file.name,)
        if len(parts) < 2:
            raise ConfigError(
                f"{file} is not in the folder of a class",
                accepted="FOLDER/CLASS/IMAGE",
                todo="put it into the folder of its class",
            )
        found.append((file, parts[0]))
    return found


def build(config: ImageFolderConfig) -> ImageFolder:
    """Build the data set."""
    return ImageFolder(config)
