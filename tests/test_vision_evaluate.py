"""Evaluation and calibration on images and of text encoders: what is counted, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, AutoTokenizer, ViTConfig

import fips
from fips.checkpoint.card import render
from fips.progress import Progress
from tests.command import run
from tests.families import edit_config
from tests.vision_families import write_images, write_model, write_processor

CLASSIFIER = Path(__file__).parent / "data" / "vit-fmnist-scratch"
LABELS = ("T-shirt_top", "Trouser", "Ankle boot")
WIDE = ViTConfig(hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, image_size=24,
                 patch_size=8)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "test", 6, LABELS)


@pytest.fixture(scope="module")
def small(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real classifier, truncated so far that it disagrees with the dense one now and then."""
    out = tmp_path_factory.mktemp("small") / "out"
    fips.compress(CLASSIFIER, out, fips.CompressionConfig(budget=0.03, steps=0, calibration=str(images), device="cpu"))
    return out


def by_hand(folder: Path, files: list[Path]) -> torch.Tensor:
    """Classes of images from the most to the least likely, (images, 10)."""
    model = AutoModelForImageClassification.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(CLASSIFIER, backend="pil")
    ranked = []
    for file in files:
        pixels = numpy.asarray(Image.open(file).convert("L"))[:, :, None]
        batch = processor(images=pixels, input_data_format="channels_last", return_tensors="pt")
        with torch.no_grad():
            ranked.append(model(**batch).logits[0].argsort(descending=True))
    return torch.stack(ranked)


def test_accuracy_and_agreement_counted_by_hand(small: Path, images: Path) -> None:
    files = sorted(images.rglob("*.png"))
    truth = torch.tensor([{"T-shirt_top": 0, "Trouser": 1, "Ankle boot": 9}[f.parent.name] for f in files])
    ours, dense = by_hand(small, files), by_hand(CLASSIFIER, files)
    done = run("evaluate", small, "--baseline", CLASSIFIER, "--images", images, "--device", "cpu", "--json")
    found = json.loads(done.out)
    assert set(found) == {"model", "top1", "top5", "images", "protocol", "sizes", "baseline", "agreement"}
    assert found["images"] == 18
    for ranked, measured in ((ours, found), (dense, found["baseline"])):
        assert measured["top1"] == pytest.approx(float((ranked[:, 0] == truth).double().mean()))
        assert measured["top5"] == pytest.approx(float((ranked[:, :5] == truth[:, None]).any(1).double().mean()))
    assert found["agreement"] == pytest.approx(float((ours[:, 0] == dense[:, 0]).double().mean()))
    assert found["agreement"] < 1  # else this test could not fail
    assert found["protocol"]["labels"] == "by name"
    assert "accuracy" in done.err  # progress


def test_without_labels_or_baseline(small: Path, images: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(images.rglob("*.png"))):
        shutil.copyfile(file, flat / f"{number}.png")
    result = fips.evaluate(small, CLASSIFIER, fips.EvaluationConfig(images=str(flat), device="cpu"))
    found = result.to_dict()
    assert found["top1"] is None
    assert 0 < found["agreement"] < 1
    assert "no labels" in result.table()
    alone = fips.evaluate(small, config=fips.EvaluationConfig(images=str(images), device="cpu")).to_dict()
    assert alone["baseline"] is alone["agreement"] is None
    assert alone["top1"] is not None


def test_a_limit_draws_images_at_random_whatever_their_class(small: Path, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", 20, ("Trouser",))
    write_images(tmp_path / "images", 2, ("Ankle boot",))
    config = fips.EvaluationConfig(images=str(images), limit=11, device="cpu")
    score = fips.evaluate(small, config=config).measured.score
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0))[:11].sort().values
    assert score.truth.tolist() == [9 if k < 2 else 1 for k in order.tolist()]
    assert (score.protocol.count, score.protocol.available) == (11, 22)
    assert "11 images of 22, drawn at random" in score.protocol.line()
    assert score.truth.tolist() == fips.evaluate(small, config=config).measured.score.truth.tolist()


def test_labels_are_matched_before_a_limit_is_applied(small: Path, tmp_path: Path) -> None:
    ids = [f"n{k:08}" for k in (7, 3, 9, 1, 0, 4, 2, 8, 6, 5)]  # in sorted order they are the ten classes
    config = fips.EvaluationConfig(images=str(write_images(tmp_path / "images", 1, tuple(ids))), limit=4, device="cpu")
    score = fips.evaluate(small, config=config).measured.score
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))[:4].sort().values
    assert score.truth.tolist() == order.tolist()  # file k lies in the folder of class k
    few = write_images(tmp_path / "few", 1, tuple(f"n{k:08}" for k in range(20)))
    done = run("evaluate", small, "--images", few, "--limit", "10", "--device", "cpu")
    assert done.code == 1
    assert "20 of 20 labels name none" in done.err


def test_without_labels_a_classifier_needs_a_baseline(small: Path, images: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    shutil.copyfile(next(images.rglob("*.png")), folder / "overview.png")
    done = run("evaluate", small, "--images", folder, "--device", "cpu")
    assert done.code == 2
    assert "has no labels: 1 of its images are not in one subfolder per class, such as overview.png" in done.err
    assert "loading" not in done.err


def test_features_need_a_baseline(images: Path, calibration: Path, tmp_path: Path) -> None:
    for name, data in (("dinov2", ("--images", images)), ("bert", ("--text", calibration))):
        done = run("evaluate", write_model(name, tmp_path / name), *data, "--device", "cpu")
        assert done.code == 2
        assert "--baseline" in done.err.splitlines()[-1]


def test_models_that_cannot_be_compared(small: Path, images: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(CLASSIFIER, tmp_path / "other"))
    edit_config(other, id2label={str(k): f"class {k}" for k in range(10)})
    done = run("evaluate", small, "--baseline", other, "--images", images, "--device", "cpu")
    assert done.code == 2
    assert "name different classes" in done.err.splitlines()[-1]
    narrow = write_model("dinov2", tmp_path / "narrow")
    wide = write_model("vit backbone", tmp_path / "wide", config=WIDE)
    done = run("evaluate", narrow, "--baseline", wide, "--images", images, "--device", "cpu")
    assert done.code == 2
    assert "features have 32 entries, the baseline's 64" in done.err.splitlines()[-1]


def test_a_processor_of_another_size(images: Path, tmp_path: Path) -> None:
    dense = write_model("vit", tmp_path / "vit")
    write_processor(dense, 48)
    labelled = write_images(tmp_path / "animals", 1, ("cat", "dog"))
    done = run("evaluate", dense, "--images", labelled, "--device", "cpu")
    assert done.code == 1
    assert "cannot run on images of 3x48x48, which its image processor gives" in done.err.splitlines()[-1]


def test_the_first_of_equally_likely_classes_counts(images: Path, tmp_path: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(CLASSIFIER)
    torch.nn.init.zeros_(model.classifier.weight)
    torch.nn.init.zeros_(model.classifier.bias)
    model.save_pretrained(tmp_path / "flat")
    shutil.copy(CLASSIFIER / "preprocessor_config.json", tmp_path / "flat")
    config = fips.EvaluationConfig(images=str(images), device="cpu")
    score = fips.evaluate(tmp_path / "flat", config=config).measured.score
    assert score.ranked.tolist() == [[0, 1, 2, 3, 4]] * 18


def test_five_classes_or_fewer_have_no_top_five(images: Path, tmp_path: Path) -> None:
    dense = write_model("vit", tmp_path / "vit")  # three classes
    config = fips.EvaluationConfig(images=str(write_images(tmp_path / "animals", 2)), device="cpu")
    result = fips.evaluate(dense, dense, config)
    assert result.to_dict()["top1"] is not None
    assert result.to_dict()["top5"] is None
    assert "top-5" not in result.table()
    assert "ratio or difference" in result.table().splitlines()[0]


def test_the_bar_knows_how_many_images_there_are(small: Path, images: Path) -> None:
    class Recorded(Progress):
        totals: tuple[tuple[str, int], ...] = ()

        def start_group(self, label: str, steps: int) -> None:
            self.totals += ((label, steps),)

    progress = Recorded(-1)
    fips.evaluate(small, config=fips.EvaluationConfig(images=str(images), limit=7, device="cpu"), progress=progress)
    assert progress.totals == (("accuracy", 7),)


def test_the_card_of_an_image_model(small: Path, images: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(small, tmp_path / "out"))
    config = fips.EvaluationConfig(images=str(images), device="cpu", update_card=True)
    found = fips.evaluate(out, CLASSIFIER, config).to_dict()
    report = json.loads((out / "fips_report.json").read_text())
    card = (out / "README.md").read_text()
    assert card == render(report)
    assert f"| agreement with the dense model | {100 * found['agreement']:.2f} % |" in card
    assert f"| top-1 | {100 * found['top1']:.2f} % | {100 * found['baseline']['top1']:.2f} % |" in card
    assert "18 images" in card
    assert fips.verify(out, CLASSIFIER).ok


def test_a_broken_image_is_named_and_left_out(small: Path, images: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(images, tmp_path / "images"))
    (folder / "Trouser" / "broken.png").write_bytes(b"\x89PNG no image")
    found = fips.evaluate(small, config=fips.EvaluationConfig(images=str(folder), device="cpu")).to_dict()
    assert found["images"] == 18
    assert found["protocol"]["skipped"] == ["images/Trouser/broken.png"]
    report = fips.compress(CLASSIFIER, tmp_path / "out", fips.CompressionConfig(
        budget=0.1, rounds=1, calibration=str(folder), device="cpu"))  # fmt: skip
    assert report.calibration["images"] == 18
    assert any("1 broken images were left out of the calibration: images/Trouser/broken.png" in n for n in report.notes)
    (folder / "Trouser" / "worse.png").write_bytes(b"")
    for command in (("evaluate", small, "--images", folder), ("compress", CLASSIFIER, tmp_path / "no", "--calibration",
                                                              folder)):  # fmt: skip
        done = run(*command, "--device", "cpu")
        assert done.code == 1
        assert "more than 1 % of the 20 images asked for are broken" in done.err.splitlines()[-1]
    assert not (tmp_path / "no").exists()


def test_labels_that_are_not_the_model_s(small: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "animals", 1, ("cat", "dog"))
    done = run("evaluate", small, "--images", folder, "--device", "cpu")
    assert done.code == 1
    assert "cat" in done.err.splitlines()[-1]
    assert "Trouser" in done.err.splitlines()[-1]


def test_data_of_the_wrong_kind(llama: Path, images: Path, calibration: Path, tmp_path: Path) -> None:
    bert = write_model("bert", tmp_path / "bert")
    for command, words in [
        (("compress", CLASSIFIER, "out"), "is an image model; name a folder of images"),
        (("compress", CLASSIFIER, "out", "--calibration", "self"), "is an image model"),
        (("compress", CLASSIFIER, "out", "--calibration", calibration), "is an image model"),
        (("compress", CLASSIFIER, "out", "--calibration", "no/such/folder"), "no folder of images"),
        (("compress", llama, "out", "--calibration", images), "language model; name a .txt or .jsonl file"),
        (("compress", bert, "out", "--calibration", "self"), "text encoder and cannot write text"),
        (("compress", bert, "out"), "name a text with --calibration"),
        (("evaluate", llama, "--images", images), "is no image model; evaluate it on a text"),
        (("evaluate", CLASSIFIER, "--text", calibration), "is an image model; evaluate it on images"),
        (("evaluate", llama, "--text", images), "name it with --images"),
        (("evaluate", CLASSIFIER), "name exactly one of"),
    ]:  # fmt: skip
        done = run(*[str(tmp_path / "out") if word == "out" else word for word in command], "--device", "cpu")
        assert done.code in (1, 2), command
        assert words in done.err.splitlines()[-1], (command, done.err)
    assert not (tmp_path / "out").exists()


def test_features_of_a_backbone(images: Path, tmp_path: Path) -> None:
    dense = write_model("dinov2", tmp_path / "dense")
    config = fips.CompressionConfig(budget=0.3, rounds=1, calibration=str(images), device="cpu")
    fips.compress(dense, tmp_path / "out", config)
    found = fips.evaluate(tmp_path / "out", dense, fips.EvaluationConfig(images=str(images), device="cpu")).to_dict()
    assert found["images"] == 18
    assert -1 <= found["cosine_min"] < found["cosine"] < 1
    same = fips.evaluate(dense, dense, fips.EvaluationConfig(images=str(images), device="cpu")).to_dict()
    assert same["cosine"] == pytest.approx(1)


@pytest.mark.parametrize("pooling", ["mean", "first token"])
def test_embeddings_of_texts_do_not_depend_on_their_padding(pooling: str, tmp_path: Path) -> None:
    dense = write_model("bert", tmp_path / "dense")
    if pooling == "first token":
        (dense / "1_Pooling").mkdir()
        (dense / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    texts = ["a short one", "and another text that is longer than the first", "x" * 200]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    config = fips.EvaluationConfig(text=str(tmp_path / "text.txt"), device="cpu")
    score = fips.evaluate(dense, dense, config).measured.score
    assert score.protocol.pooling == pooling
    model, tokenizer = AutoModel.from_pretrained(dense), AutoTokenizer.from_pretrained(dense)
    for row, text in zip(score.values, texts, strict=True):
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=ids).last_hidden_state[0]
        expected = hidden[0] if pooling == "first token" else hidden.mean(0)
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_augmentation_changes_the_result_and_is_repeatable(images: Path, tmp_path: Path) -> None:
    def made(name: str, **choices: object) -> fips.CompressionReport:
        config = fips.CompressionConfig(budget=0.1, rounds=1, calibration=str(images), device="cpu", **choices)
        return fips.compress(CLASSIFIER, tmp_path / name, config)

    plain, again = made("a"), made("b")
    crops = [made(name, augment=True, calibration_images=40) for name in ("c", "d")]
    assert plain.files == again.files
    assert crops[0].files == crops[1].files != plain.files
    assert crops[0].calibration["images"] == 40  # of 18 files
    assert plain.calibration["images"] == 18
