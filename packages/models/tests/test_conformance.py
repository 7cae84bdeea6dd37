from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sbp_core.testing.data import DatasetConformance
from sbp_core.testing.model import ModelConformance
from sbp_models.configs import GptConfig, StdlibConfig, TextConfig
from sbp_models.gpt import Gpt, build
from sbp_models.text import ByteText, build_stdlib, build_text


class TestGpt(ModelConformance):
    vocabulary = 13

    def make_model(self) -> Gpt:
        return build(GptConfig(vocabulary=13, context=6, num_layers=2, num_heads=2, hidden=8))

    def make_batch(self, batch_size: int) -> Mapping[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(0, 13, (batch_size, 6), generator=generator)
            for name in ("tokens", "targets")
        }


class ByteTextConformance(DatasetConformance):
    splits = ("train", "validation")
    prefix_property = True


class TestStdlib(ByteTextConformance):
    def make_dataset(self) -> ByteText:
        return build_stdlib(StdlibConfig(context=64))


class TestText(ByteTextConformance):
    @pytest.fixture(autouse=True)
    def _write_text(self, tmp_path: Path) -> None:
        self.path = tmp_path / "squares.txt"
        self.path.write_text("\n".join(str(i * i) for i in range(2000)), encoding="utf-8")

    def make_dataset(self) -> ByteText:
        return build_text(TextConfig(path=str(self.path), context=32))
