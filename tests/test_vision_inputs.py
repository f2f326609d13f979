"""Images of every kind, labels by number, limits, and pooled features, through the whole of `fips evaluate`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoTokenizer

import fips
from fips.calibrate import calibration_images
from fips.checkpoint.source import Source, open_source
from fips.plan import make_plan
from fips.progress import Progress
from fips.report import CompressionReport
from tests.command import refused, run
from tests.families import edit_config, random_text
from tests.test_vision_kinds import quick
from tests.vision_kinds import CLASSES, load_dense, write_images, write_kind


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny classifier of seven classes and a compressed copy. Do not change them; copy them."""
    folder = tmp_path_factory.mktemp("vit")
    dense, images = write_kind("vit", folder / "dense"), write_images(folder / "train", 6)
    fips.compress(dense, folder / "out", quick("vit", images, images, budget=0.2))
    return dense, folder / "out"


def evaluate(*argv: object) -> dict[str, Any]:
    done = run("evaluate", *argv, "--device", "cpu", "--json", "-q")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def noise(mode: str, seed: int) -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (6, 5, bands), dtype=np.uint8)
    image = Image.fromarray(values[..., 0]) if bands == 1 else Image.fromarray(values, mode if bands == 3 else None)
    return Image.frombytes("CMYK", (5, 6), values.tobytes()) if mode == "CMYK" else image


def every_kind_of_image(root: Path) -> dict[str, Image.Image]:
    """Writes images of many kinds; returns by file name what a person sees."""
    root.mkdir()
    seen = {}
    for number, mode in enumerate(("RGB", "L", "RGBA", "CMYK")):
        image = noise(mode, number).resize((30 + number, 40))
        name = f"{mode}.tiff"
        image.save(root / name)
        seen[name] = image.convert("RGB")
        if mode == "RGBA":
            seen[name] = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    turned = noise("RGB", 9).resize((36, 28))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(root / "turned.png", exif=exif)
    seen["turned.png"] = turned.transpose(Image.Transpose.ROTATE_270)
    assert seen["turned.png"].tobytes() == ImageOps.exif_transpose(Image.open(root / "turned.png")).tobytes()
    palette = noise("RGB", 11).resize((30, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    palette.save(root / "palette.gif")
    seen["palette.gif"] = palette.convert("RGB")
    deep = np.random.default_rng(5).integers(0, 2**16, (30, 31), dtype=np.uint16)
    Image.fromarray(deep).save(root / "deep.png")
    seen["deep.png"] = Image.fromarray((deep / 257).round().astype(np.uint8)).convert("RGB")
    return seen


@torch.no_grad()
def logits(model: Path, images: list[Image.Image]) -> torch.Tensor:
    """One image at a time, through the model's own processor."""
    network, processor = load_dense(model), AutoImageProcessor.from_pretrained(model, backend="pil")
    return torch.cat([network(**processor(images=image, return_tensors="pt")).logits for image in images])


def test_a_broken_photo_among_augmented_ones(vit: tuple[Path, Path], tmp_path: Path) -> None:
    images = write_images(tmp_path / "photos", 4)
    (images / "broken.png").write_bytes(b"no image")
    settings = quick("vit", images, images, augment=True, calibration_images=60)
    report = fips.compress(vit[0], tmp_path / "out", settings)
    assert report.calibration["skipped"] == ["photos/broken.png"]
    assert report.calibration["images"] == 60 // 5 * 4
    assert "1 broken images" in "".join(report.notes)


def test_batches_are_sized_by_what_the_processor_gives(vit: tuple[Path, Path], tmp_path: Path) -> None:
    """As DINOv2's, which was trained at 518 pixels and is given 224."""
    dense, images = shutil.copytree(vit[0], tmp_path / "dense"), write_images(tmp_path / "train", 2)
    plan = make_plan(open_source(dense), settings := quick("vit", images, images))
    report = CompressionReport("", None, {}, {}, {}, "cpu", "float32")
    trained = calibration_images(plan, settings, report).tokens_each
    edit_config(dense, image_size=10 * plan.model.config.image_size)
    plan = make_plan(open_source(dense), settings)
    assert calibration_images(plan, settings, report).tokens_each == trained


@pytest.mark.parametrize(
    ("missing", "words"),
    [("images", ["no folder of images"]), ("preprocessor_config.json", ["preprocessor_config.json"])],
)
def test_missing_data_are_told_before_the_weights_are_read(
    vit: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, words: list[str]
) -> None:
    dense, images = shutil.copytree(vit[0], tmp_path / "dense"), write_images(tmp_path / "images", 2)
    if missing == "images":
        shutil.rmtree(images)
    else:
        (dense / missing).unlink()
    monkeypatch.setattr(Source, "require_finite", lambda *_: pytest.fail("the weights were read"))
    refused("compress", dense, tmp_path / "out", "--calibration", images, code=1, words=words, watched=tmp_path)


def test_the_first_pass_over_the_images_has_a_bar(
    vit: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "train", 2)
    fips.compress(vit[0], tmp_path / "out", quick("vit", images, images), progress=Progress())
    assert "first hidden states" in capfd.readouterr().err


def test_images_of_every_kind_are_seen_as_a_person_sees_them(vit: tuple[Path, Path], tmp_path: Path) -> None:
    seen = every_kind_of_image(tmp_path / "images")
    ordered = [seen[name] for name in sorted(seen)]
    expected = [logits(folder, ordered).topk(5).indices for folder in vit]
    result = fips.evaluate(vit[1], vit[0], fips.EvaluationConfig(images=str(tmp_path / "images"), device="cpu"))
    assert torch.equal(result.measured.score.ranked, expected[1])
    assert torch.equal(result.baseline.score.ranked, expected[0])
    assert result.to_dict()["agreement"] == pytest.approx(
        float((expected[0][:, 0] == expected[1][:, 0]).double().mean())
    )
    assert (result.to_dict()["top1"], result.to_dict()["protocol"]["labels"]) == (None, None)
    report = fips.compress(vit[0], tmp_path / "out", quick("vit", tmp_path / "images", tmp_path, budget=0.2))
    assert report.calibration["images"] == len(seen)
    assert report.calibration["skipped"] == []


def test_labels_by_name_synonym_and_number_say_the_same(vit: tuple[Path, Path], tmp_path: Path) -> None:
    chosen = {"tabby cat": 1, "red_fox": 3, "hen": 6}
    named = write_images(tmp_path / "named", 12, tuple(chosen))
    numbered = tmp_path / "numbered"
    for name, number in chosen.items():
        shutil.copytree(named / name, numbered / str(number))
    by_name, by_number = (evaluate(vit[1], "--images", folder) for folder in (named, numbered))
    assert (by_name["protocol"]["labels"], by_number["protocol"]["labels"]) == ("by name", "by number")
    assert [by_name[k] for k in ("top1", "top5", "images")] == [by_number[k] for k in ("top1", "top5", "images")]
    files = sorted(named.rglob("*.png"), key=lambda file: file.relative_to(named).as_posix())
    ranked = logits(vit[1], [Image.open(file) for file in files]).argsort(dim=1, descending=True)
    truth = torch.tensor([chosen[file.parent.name] for file in files])
    assert by_name["top1"] == pytest.approx(float((ranked[:, 0] == truth).double().mean()))
    assert by_name["top5"] == pytest.approx(float((ranked[:, :5] == truth[:, None]).any(1).double().mean()))
    assert set(by_name) == {"model", "top1", "top5", "images", "protocol", "sizes", "baseline", "agreement"}
    few = evaluate(vit[1], "--images", named, "--limit", 6)
    assert few["images"] == 6
    assert len(CLASSES) == ranked.shape[1]


def test_one_number_too_high_is_refused(vit: tuple[Path, Path], tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 4, ("1", "7"))
    refused("evaluate", vit[1], "--images", images, "--device", "cpu", code=1, words=["'7'", "cat", "by index"],
            watched=tmp_path, early=False)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dinov2", "clip", "siglip", "siglip without head", "beit backbone", "swinv2",
                                  "vit without pooler", "vit mae"])  # fmt: skip
def test_pooled_features_of_backbones(kind: str, tmp_path: Path) -> None:
    dense, images = write_kind(kind, tmp_path / "dense"), write_images(tmp_path / "images", 5, ())
    if kind == "swinv2":  # the backbone of a classifier
        load_dense(dense).base_model.save_pretrained(dense)
    fips.compress(dense, tmp_path / "out", quick(kind, images, images, budget=0.2))
    result = fips.evaluate(tmp_path / "out", dense, fips.EvaluationConfig(images=str(images), device="cpu"))
    found = result.to_dict()
    assert found["images"] == 5
    assert found["cosine_min"] <= found["cosine"] < 1
    again = fips.evaluate(dense, dense, fips.EvaluationConfig(images=str(images), device="cpu"))
    assert again.to_dict()["cosine_min"] == pytest.approx(1)
    if kind == "vit mae":  # it drops patches at random
        return
    processor = AutoImageProcessor.from_pretrained(dense, backend="pil")
    pixels = [processor(images=Image.open(f), return_tensors="pt")["pixel_values"] for f in sorted(images.glob("*"))]
    rows: list[torch.Tensor] = []
    for folder in (tmp_path / "out", dense):
        model = load_dense(folder)
        features: Callable[[torch.Tensor], torch.Tensor] = {
            "clip": lambda x, m=model: m.vision_model(pixel_values=x).pooler_output,
            "siglip": lambda x, m=model: m.vision_model(pixel_values=x).pooler_output,
            "siglip without head": lambda x, m=model: m(pixel_values=x).last_hidden_state.mean(1),
            "beit backbone": lambda x, m=model: m(pixel_values=x).pooler_output,
            "swinv2": lambda x, m=model: m(pixel_values=x).last_hidden_state.mean(1),
        }.get(kind, lambda x, m=model: m(pixel_values=x).last_hidden_state[:, 0])
        rows.append(torch.cat([features(x) for x in pixels]))
    named = {"dinov2": "pooled output", "siglip without head": "mean over patches", "vit without pooler": "[CLS]"}
    assert found["protocol"]["pooling"] == named.get(kind, "pooled output")
    cosines = torch.nn.functional.cosine_similarity(*rows)
    assert found["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)


def test_positions_that_count_from_behind_the_padding(tmp_path: Path, calibration: Path) -> None:
    """A RoBERTa with 66 positions reads 64 tokens, also where its tokenizer knows no limit."""
    dense = write_kind("roberta", tmp_path / "dense")
    path = dense / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 10**30}))
    settings = {"sequence_length": 128, "calibration_tokens": 256}
    report = fips.compress(dense, tmp_path / "out", quick("roberta", calibration, calibration, **settings))
    assert report.calibration["length"] == 64
    config = fips.EvaluationConfig(text=str(calibration), limit=2, device="cpu")
    score = fips.evaluate(tmp_path / "out", dense, config).measured.score
    assert (len(score.values), score.protocol.length) == (2, 64)


def test_sequences_without_a_place_for_text(tmp_path: Path, calibration: Path) -> None:
    dense = write_kind("bert classifier", tmp_path / "dense")
    refused("compress", dense, tmp_path / "out", "--calibration", calibration, "--sequence-length", "2", "--device",
            "cpu", code=1, words=["special tokens", "--sequence-length"], watched=tmp_path, early=False)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", ["roberta", "mpnet", "distilbert", "modernbert", "deberta", "xlnet"])
def test_padding_does_not_change_an_embedding(kind: str, tmp_path: Path) -> None:
    dense, text = write_kind(kind, tmp_path / "dense"), tmp_path / "texts.txt"
    texts = ["one", random_text(40, seed=1).replace("\n", " "), "x" * 100]
    text.write_text("\n\n".join(texts))
    score = fips.evaluate(dense, dense, fips.EvaluationConfig(text=str(text), device="cpu")).measured.score
    model, tokenizer = load_dense(dense), AutoTokenizer.from_pretrained(dense)
    assert len(score.values) == 3
    for row, words in zip(score.values, texts, strict=True):
        given = tokenizer(words, return_tensors="pt", truncation=True, max_length=score.protocol.length)
        hidden = model.base_model(**given).last_hidden_state[0]
        torch.testing.assert_close(row, hidden.mean(0), rtol=1e-4, atol=1e-4)
