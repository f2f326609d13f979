"""The model card says what the report says, and nothing else; the report can grow by evaluations."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fips
from fips.checkpoint.card import card_text, command_line, render
from fips.checkpoint.checks import checksum_problems, recorded_digests
from fips.checkpoint.origin import origin_of, read_metadata
from fips.checkpoint.plot import PLOT_NAME, draw_groups
from fips.checkpoint.record import read_report, record_evaluation, side_digests
from fips.checkpoint.source import open_source
from fips.cli.compress import command as compress_command
from fips.cli.main import cli
from fips.config import CompressionConfig
from fips.errors import ConfigError, FormatError, OutputError
from tests.command import tree

NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w])")


def split(card: str) -> tuple[dict[str, Any], str]:
    """The YAML block of a card, and the rest."""
    _, block, body = card.split("---\n", 2)
    return yaml.safe_load(block), body


def rows(body: str, section: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    text = body.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "fips_report.json").read_text())
    return report


def evaluation_of(folder: Path, baseline: Path | None, text: Path) -> dict[str, Any]:
    return fips.evaluate(folder, baseline, fips.EvaluationConfig(text=str(text), device="cpu", length=32)).to_dict()


@pytest.fixture(scope="module")
def evaluated(
    compressed: Path, llama: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A compressed model with a recorded evaluation. Do not change it; copy it."""
    folder = Path(shutil.copytree(compressed, tmp_path_factory.mktemp("evaluated") / "out"))
    found = evaluation_of(folder, llama, calibration)
    record_evaluation(folder, found)
    return folder, found


def average(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def test_the_tables_are_the_report_s(evaluated: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = evaluated
    report = report_of(folder)
    _, body = split((folder / "README.md").read_text())
    sizes = report["sizes"]
    expected = [[sizes["parameters"], sizes["dense_parameters"]], [sizes["matrix_bytes"], sizes["dense_matrix_bytes"]],
                [sizes["checkpoint_bytes"], sizes["dense_checkpoint_bytes"]]]  # fmt: skip
    found = rows(body, "Size")
    assert [[int(c.replace(",", "")) for c in row[1:3]] for row in found] == expected
    assert [row[3] for row in found] == [f"{a / b:.3f}" for a, b in expected]
    assert rows(body, "Groups") == [
        [f"{g['first']}-{g['last']}", g["basis"], str(g["rank"]), f"{average(g['sparsity']):.3f}",
         f"{average(g['error_before']):.4f}", f"{average(g['error_after']):.4f}",
         f"{g['packed_bytes'] / g['dense_bytes']:.3f}"] for g in report["groups"]
    ]  # fmt: skip
    (measured,) = report["evaluations"]
    dense = measured["baseline"]["perplexity"]
    assert rows(body, "Quality") == [
        ["perplexity", f"{measured['perplexity']:.3f}", f"{dense:.3f}", f"{measured['perplexity'] / dense:.3f}"]
    ]
    settings = json.loads(re.search(r"```json\n(.*?)```", body, re.DOTALL)[1])  # type: ignore[index]
    assert settings == {**report["settings"], "calibration": Path(report["settings"]["calibration"]).name}


def test_every_number_of_the_card_is_in_the_report(evaluated: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = evaluated
    report = report_of(folder)
    known = {"2411.09816"}  # the paper

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for item in value.values():
                collect(item)
            if value and all(isinstance(item, float) for item in value.values()):
                collect(average(value))
        elif isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, str):
            known.update(NUMBER.findall(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            known.update({str(value), f"{value:,}", f"{value:.3f}", f"{value:.4f}"})

    collect(report)
    for group in report["groups"]:
        known |= {str(group["first"]), str(group["last"]), f"{group['packed_bytes'] / group['dense_bytes']:.3f}"}
    _, body = split((folder / "README.md").read_text())
    found = set(NUMBER.findall(re.sub(r"sha256 `\w+`", "", body)))
    assert len(found) > 30
    assert not {number for number in found if number not in known and number.rstrip(",") not in known}
    for digest in re.findall(r"sha256 `(\w+)`", body):
        assert digest in json.dumps(report)


def test_the_card_is_made_of_the_report_alone(evaluated: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = evaluated
    assert card_text(tmp_path, report_of(folder)).encode() == (folder / "README.md").read_bytes()


def test_what_was_written_below_the_last_line_is_kept(compressed: Path, tmp_path: Path) -> None:
    report = report_of(compressed)
    (tmp_path / "README.md").write_text(card_text(tmp_path, report) + "\nMy own words.\n")
    again = card_text(tmp_path, {**report, "notes": ["a new note"]})
    assert "- a new note\n" in again
    assert again.endswith("\n\nMy own words.\n")


def test_metadata_without_a_hub_id(compressed: Path) -> None:
    found, body = split((compressed / "README.md").read_text())
    assert found == {"library_name": "transformers", "pipeline_tag": "text-generation",
                     "tags": ["fips", "compressed", "arxiv:2411.09816"]}  # fmt: skip
    assert 'fips.load("path/to/dense-fips")' in body
    assert "No evaluation was recorded" in body


def test_metadata_of_a_model_of_the_hub(llama: Path, settings, tmp_path: Path) -> None:
    """A folder in the Hub's cache names its repository and commit, however it was given."""
    commit = "0123456789" * 4
    source = Path(shutil.copytree(llama, tmp_path / "models--some-one--Dense.1" / "snapshots" / commit))
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [en, de]\ndatasets:\n- a/b\ntags: [chat]\nbase_model: x/y\n"
        "pipeline_tag: fill-mask\n---\n# Dense\nlicense: other\n"
    )
    fips.compress(source, tmp_path / "out", settings(steps=0))
    found, body = split((tmp_path / "out" / "README.md").read_text())
    assert found == {"base_model": "some-one/Dense.1", "base_model_relation": "finetune",
                     "library_name": "transformers", "pipeline_tag": "fill-mask", "license": "apache-2.0",
                     "language": ["en", "de"], "datasets": ["a/b"],
                     "tags": ["fips", "compressed", "arxiv:2411.09816"]}  # fmt: skip
    assert f"(https://huggingface.co/some-one/Dense.1) at commit `{commit}`" in body
    assert "fips compress some-one/Dense.1 Dense.1-fips" in body
    assert str(tmp_path) not in body


@pytest.mark.parametrize(("text", "expected"), [
    ("---\nlicense: [unclosed\n---\n", {}),
    ("---\n- a\n- b\n---\n", {}),
    ("no block", {}),
    ("---\nlicense: mit\n", {}),
    ("---\nlicense: mit\nlanguage: no\ndatasets: [1, 2]\npipeline_tag: ''\n---\n", {"license": "mit"}),
    ("---\nlicense: !!python/object/apply:os.system [exit]\n---\n", {}),
    ("---\nlicense: mit\ndate: 2023-02-30\n---\n", {}),
    ("---\nlicense: " + "[" * 5000 + "\n---\n", {}),
    ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
])  # fmt: skip
def test_broken_metadata_is_left_out(text: str, expected: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(text.encode())
    assert read_metadata(tmp_path / "README.md") == expected
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert read_metadata(tmp_path / "README.md") == {}
    assert read_metadata(tmp_path / "none.md") == {}


def test_a_source_of_an_unknown_kind_has_no_task(llama: Path) -> None:
    source = open_source(llama)
    for architectures, task in ((["ViTForImageClassification"], "image-classification"), (None, None)):
        changed = dataclasses.replace(source, config={**source.config, "architectures": architectures})
        assert origin_of(changed)["task"] == task


@pytest.mark.parametrize("given", [
    {"target_size": 0.65, "seed": 3},
    {"budget": 0.4, "groups": ((0, 1), (2, 2)), "include": ("*gate_proj", "*down_proj"), "dtype": "bfloat16"},
    {"solver": "gradient", "steps": 9, "learning_rate": 3e-5, "sparsity": 0.5},
    {"steps": 0, "calibration": "owner/texts:config", "max_shard_size": 10**6},
])  # fmt: skip
def test_the_command_line_gives_the_same_settings(given: dict[str, Any], compressed: Path) -> None:
    settings = json.loads(json.dumps(CompressionConfig(**given).to_dict()))
    report = {**report_of(compressed), "settings": settings, "revision": "v 1"}
    if settings["calibration"]:
        report["calibration"]["origin"] = f"{settings['calibration']}:train"
    words = shlex.split(command_line(report))
    assert words[:4] == ["fips", "compress", "dense", "dense-fips"]
    root = cli.make_context("fips", [], resilient_parsing=True)
    parsed = compress_command.make_context("compress", words[2:], parent=root).params
    assert parsed["revision"] == "v 1"
    options = {name: parsed[name] for name in settings if parsed[name] not in (None, ())}
    for name, parse in (("groups", fips.config.parse_groups), ("max_shard_size", fips.config.parse_size)):
        if name in options:
            options[name] = parse(options[name])
    assert CompressionConfig.from_recipe("default", **options) == CompressionConfig(**given)


def test_the_command_line_leaves_out_what_the_solver_never_reads(compressed: Path) -> None:
    report = report_of(compressed)
    assert report["settings"]["steps"] == 6  # of the gradient solver; the command would refuse it
    assert "--steps" not in command_line(report)


@pytest.mark.parametrize(("given", "origin"), [
    ("../acme-customers/photos", "photos"), ("acme-customers/photos/", "photos"), ("~/acme.customers/a.txt", "a.txt"),
    (".", "photos"), ("../acme-customers/x.parquet", "x.parquet"),
])  # fmt: skip
def test_places_on_one_machine_are_not_shown(given: str, origin: str, compressed: Path) -> None:
    report = report_of(compressed)
    report["settings"]["calibration"], report["calibration"]["origin"] = given, origin
    card = render(report)
    assert f"--calibration {origin}" in card
    assert "acme" not in card


def test_the_command_line_trusts_the_code_that_was_trusted(compressed: Path) -> None:
    report = {**report_of(compressed), "trust_remote_code": True}
    assert shlex.split(command_line(report))[4] == "--trust-remote-code"
    assert "trust_remote_code=True)" in render(report)
    assert "trust" not in render({**report, "trust_remote_code": False})


def test_side_files_are_listed_with_their_checksums(compressed: Path) -> None:
    report = report_of(compressed)
    listed = {*report["files"], *report["side_files"], "README.md", "fips_report.json"}
    assert listed == set(tree(compressed))
    assert not any(checksum_problems(compressed, recorded_digests(compressed)))


def test_an_evaluation_is_added_and_replaced(
    evaluated: tuple[Path, dict[str, Any]], llama: Path, calibration: Path, tmp_path: Path
) -> None:
    folder, found = evaluated
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    before = read_report(out)
    assert before["evaluations"] == [{**found, "model": "out", "baseline": {**found["baseline"], "model": "dense"}}]
    record_evaluation(out, found)
    assert read_report(out) == before
    other = evaluation_of(out, None, calibration)
    other["protocol"]["length"] = 16
    record_evaluation(out, other)
    after = read_report(out)
    assert [e["protocol"]["length"] for e in after["evaluations"]] == [32, 16]
    assert {**after, "evaluations": None} == {**before, "evaluations": None}
    assert not any(checksum_problems(out, recorded_digests(out)))
    assert set(tree(out)) == set(tree(folder))
    card = (out / "README.md").read_text()
    assert card == render(after)
    assert "not measured" in card
    assert "16 tokens" in card


def test_an_evaluation_of_another_checkpoint_is_refused(
    evaluated: tuple[Path, dict[str, Any]], llama: Path, calibration: Path
) -> None:
    folder, _ = evaluated
    before = tree(folder)
    with pytest.raises(ConfigError, match="evaluation is of a checkpoint of"):
        record_evaluation(folder, evaluation_of(llama, None, calibration))
    with pytest.raises(FormatError, match=r"has no fips_report\.json"):
        record_evaluation(llama, evaluation_of(llama, None, calibration))
    assert tree(folder) == before


def test_an_evaluation_that_cannot_be_written(
    evaluated: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    folder, found = evaluated
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OutputError, match=r"cannot be recorded.*No space left"):
        record_evaluation(out, found)
    assert tree(out) == tree(folder)


def test_an_evaluation_writes_through_no_link(
    evaluated: tuple[Path, dict[str, Any]], calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot be written again is refused before the evaluation."""
    folder, found = evaluated
    mine = tmp_path / "mine"
    mine.write_text("keep")

    def damage_card(out: Path) -> None:
        (out / "README.md").write_bytes(b"\xff")

    def damage_report(out: Path) -> None:
        report = report_of(out)
        del report["calibration"]
        (out / "fips_report.json").write_text(json.dumps(report))

    def link(name: str) -> Any:
        def place(out: Path) -> None:
            (out / name).rename(out / f"a-{name}")
            (out / name).symlink_to(mine if name == "README.md" else f"a-{name}")

        return place

    cases = {"models--a--b/snapshots/0": (lambda _: None, "Hub's cache"), "c": (damage_card, "UTF-8"),
             "r": (damage_report, "calibration"), "l": (link("README.md"), "no regular file"),
             "k": (link("fips_report.json"), "is a link")}  # fmt: skip
    monkeypatch.setattr("fips.evaluation.load_any", lambda *_, **__: pytest.fail("evaluated"))
    for name, (place, match) in cases.items():
        out = Path(shutil.copytree(folder, tmp_path / name))
        place(out)
        before = tree(out)
        with pytest.raises(fips.FipsError, match=match):
            fips.evaluate(out, None, fips.EvaluationConfig(text=str(calibration), device="cpu", update_card=True))
        with pytest.raises(fips.FipsError, match=match):
            record_evaluation(out, found)
        assert tree(out) == before
    assert mine.read_text() == "keep"
    out = Path(shutil.copytree(folder, tmp_path / "planted"))
    (out / ".fips_report.json.new").symlink_to(mine)
    record_evaluation(out, found)
    assert mine.read_text() == "keep"


def test_no_picture_without_matplotlib(compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw_groups(tmp_path, report_of(compressed)["groups"])
    assert not list(tmp_path.iterdir())
    assert PLOT_NAME not in render({**report_of(compressed), "side_files": {}})


def test_the_picture(llama: Path, settings, compressed: Path, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    groups = report_of(compressed)["groups"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with matplotlib.rc_context({"figure.facecolor": "red" if name == "b" else "blue", "font.size": 20}):
            assert draw_groups(tmp_path / name, groups)
    assert (tmp_path / "a" / PLOT_NAME).read_bytes() == (tmp_path / "b" / PLOT_NAME).read_bytes()
    fips.compress(llama, tmp_path / "out", settings(steps=0))
    assert PLOT_NAME in report_of(tmp_path / "out")["side_files"]
    assert f"]({PLOT_NAME})" in (tmp_path / "out" / "README.md").read_text()
    assert side_digests(tmp_path / "a", ()).keys() == {PLOT_NAME}
