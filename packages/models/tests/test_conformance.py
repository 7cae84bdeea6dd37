import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sbp_models import bert, clicks, dlrm, gpt, images, llama, moe, resnet, t5, vit
from sbp_models.configs import (
    BertConfig,
    ClicksConfig,
    DlrmConfig,
    GptConfig,
    ImagesConfig,
    LlamaConfig,
    MoeConfig,
    ResnetConfig,
    StdlibConfig,
    T5Config,
    TextConfig,
    TextTask,
    VitConfig,
)
from sbp_models.text import ByteText, build_stdlib, build_text
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.data import DatasetConformance
from sbp_torch.testing.model import ModelConformance, model_loss


class TextModelConformance(ModelConformance):
    vocabulary = 13

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(0, 13, (batch_size, 6), generator=generator)
            for name in ("tokens", "targets")
        }


class TestGpt(TextModelConformance):
    def make_model(self) -> nn.Module:
        return gpt.Gpt(GptConfig(vocabulary=13, context=6, num_layers=1, num_heads=2, hidden=8))


class TestLlama(TextModelConformance):
    def make_model(self) -> nn.Module:
        return llama.Llama(
            LlamaConfig(
                vocabulary=13,
                context=6,
                num_layers=1,
                num_heads=4,
                num_key_heads=2,
                hidden=16,
                mlp_hidden=24,
            )
        )


class TestMoe(TextModelConformance):
    capacity = 0.0

    def make_model(self) -> nn.Module:
        return moe.Moe(
            MoeConfig(
                vocabulary=13,
                context=6,
                num_layers=1,
                num_heads=4,
                num_key_heads=2,
                hidden=16,
                mlp_hidden=24,
                balance=0.0,  # it is no mean over samples
                capacity=self.capacity,
            )
        )


@pytest.mark.exhaustive
class TestMoeWithPlacesForAll(TestMoe):
    capacity = 100.0


class TestBert(TextModelConformance):
    def make_model(self) -> nn.Module:
        return bert.Bert(BertConfig(vocabulary=13, context=6, num_layers=1, num_heads=2, hidden=8))

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        batch = dict(super().make_batch(batch_size))
        batch["targets"][:, ::2] = -100
        batch["mask"] = torch.arange(6).expand(batch_size, 6) < 5
        return batch


class TestT5(TextModelConformance):
    def make_model(self) -> nn.Module:
        return t5.T5(
            T5Config(
                vocabulary=13, num_layers=1, num_heads=2, head_width=4, hidden=8, mlp_hidden=16
            )
        )


class ImageModelConformance(ModelConformance):
    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        return images.build(ImagesConfig(image_size=8)).samples(np.arange(batch_size))


@pytest.mark.slow
class TestResnet(ImageModelConformance):
    depth = 18

    def make_model(self) -> nn.Module:
        return resnet.Resnet(ResnetConfig(depth=self.depth, width=4, label_smoothing=0.1))

    def test_the_loss_is_a_mean_over_samples(self) -> None:
        """In evaluation mode: batch norm looks at the whole batch in training."""
        model, make_model = self.make_model().eval(), self.make_model
        try:
            self.make_model = lambda: model
            super().test_the_loss_is_a_mean_over_samples()
        finally:
            self.make_model = make_model


@pytest.mark.exhaustive
class TestResnetWithBottlenecks(TestResnet):
    depth = 50


class TestVit(ImageModelConformance):
    fused = True

    def make_model(self) -> nn.Module:
        return vit.Vit(
            VitConfig(
                image_size=8,
                patch_size=4,
                num_layers=1,
                num_heads=2,
                hidden=8,
                fused_qkv=self.fused,
                label_smoothing=0.1,
            )
        )


@pytest.mark.exhaustive
class TestVitWithThreeLayersForQkv(TestVit):
    fused = False


class TestDlrm(ModelConformance):
    lookup = "bag"

    def make_model(self) -> nn.Module:
        return dlrm.Dlrm(
            DlrmConfig(
                num_dense=3, rows=(7, 5), bag=2, hidden=4, bottom=(6,), top=(6,), lookup=self.lookup
            )
        )

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        return clicks.Clicks(ClicksConfig(num_dense=3, rows=(7, 5), bag=2)).samples(
            np.arange(batch_size)
        )

    def test_the_captured_step_equals_the_eager_one_bit_for_bit(self) -> None:
        """But for the last digit of the loss: while tracing, PyTorch computes it otherwise."""
        model, batch = self.seeded(), self.make_batch(self.batch_size)
        eager = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        graph = capture(model, model_loss, batch, optimizer)
        found: Mapping[str, Any] = initial_states(model, optimizer)
        twin = torch.optim.AdamW(eager.parameters(), lr=1e-2, foreach=False)

        for _ in range(2):
            twin.zero_grad()
            loss = model_loss(eager, batch)
            loss.backward()
            twin.step()
            with torch.no_grad():
                results, found = run_graph(graph, found, [batch], {"lr": 1e-2})

            torch.testing.assert_close(results["loss"], loss.detach(), atol=0, rtol=5e-7)
        for name, value in eager.named_parameters():
            assert torch.equal(found[name], value), name


class TestDlrmOfEmbeddings(TestDlrm):
    lookup = "embedding"


class MadeUpConformance(DatasetConformance):
    splits = ("train", "validation")


class TestImages(MadeUpConformance):
    def make_dataset(self) -> images.StripedImages:
        return images.build(ImagesConfig(image_size=8))


class TestClicks(MadeUpConformance):
    def make_dataset(self) -> clicks.Clicks:
        return clicks.Clicks(ClicksConfig(bag=3))


class TestStdlib(MadeUpConformance):
    def make_dataset(self) -> ByteText:
        return build_stdlib(StdlibConfig(context=64))


class TestText(MadeUpConformance):
    task: TextTask = "next"

    @pytest.fixture(autouse=True)
    def _write_text(self, tmp_path: Path) -> None:
        self.path = tmp_path / "squares.txt"
        self.path.write_text("\n".join(str(i * i) for i in range(2000)), encoding="utf-8")

    def make_dataset(self) -> ByteText:
        return build_text(TextConfig(path=str(self.path), context=32, task=self.task))


class TestTextToContinue(TestText):
    task = "continue"


class TestMaskedText(TestText):
    task = "masked"

    def test_text_comes_back_from_its_tokens(self) -> None:
        """As everywhere, but targets that are not asked for are no tokens."""
        data = self.make_dataset()

        assert [data.decode(data.encode(text)) for text in self.texts] == list(self.texts)
        assert data.samples(np.arange(4))["tokens"].max() < data.vocabulary
