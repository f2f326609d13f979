"""`fips evaluate --tasks`: what is refused, what is made of lm-eval's answer, and a real run where it is installed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import BertConfig, BertModel

import fips
from fips import evaluation
from fips.checkpoint.record import read_report
from fips.errors import ConfigError
from fips.metrics.harness import TaskProtocol, Tasks, TaskScores, task_results
from fips.tasks import TaskConfig, parse_tasks
from tests.command import refused, run
from tests.families import tokenizer
from tests.test_card import rows

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")

# The shape of what lm-eval 0.4.13 gives.
ANSWER = {
    "results": {
        "choice": {"name": "choice", "alias": "choice", "sample_len": 5, "acc,none": 0.4, "acc_stderr,none": 0.24,
                   "f1,strict": 0.5, "f1_stderr,strict": "N/A"},
        "group": {"alias": "group", "acc,none": 1},
    },
    "versions": {"choice": 1.0}, "n-shot": {"choice": 2}, "n-samples": {"choice": {"original": 12, "effective": 5}},
    "higher_is_better": {"choice": {"acc": True, "f1": True}},
}  # fmt: skip


def scores(*values: float) -> TaskScores:
    found = json.loads(json.dumps(ANSWER))
    for name, value in zip(("acc,none", "f1,strict"), values, strict=True):
        found["results"]["choice"][name] = value
    protocol = TaskProtocol(("choice", "group"), None, 5, 8, "float32", "cpu", "0.4.13", "2", "5")
    return TaskScores(tuple(task_results(found)), protocol)


class Stub:
    """Takes the place of `Tasks`: lm-eval is not needed to see what is made of its answer."""

    def __init__(self, config: TaskConfig) -> None:
        self.given = iter([scores(0.4, 0.5), scores(0.6, 0.25)])

    def run(self, model: Any, tokenizer: Any, *, quiet: bool) -> TaskScores:
        return next(self.given)


def test_the_answer_is_read() -> None:
    acc, f1, group = task_results(ANSWER)
    assert (acc.task, acc.metric, acc.value, acc.stderr) == ("choice", "acc", 0.4, 0.24)
    assert (acc.shots, acc.version, acc.documents, acc.more_is_better) == (2, "1.0", 5, True)
    assert acc.name == "choice acc (2-shot, version 1.0)"
    assert (f1.filter, f1.stderr, f1.cell()) == ("strict", None, "0.5000")
    assert f1.name == "choice f1 (2-shot, version 1.0, strict)"
    assert (group.name, group.value, group.version, group.documents) == ("group acc", 1.0, None, None)


def test_scores_stand_beside_the_baselines(compressed: Path, llama: Path) -> None:
    with patch.object(evaluation, "Tasks", Stub):
        found = fips.evaluate(compressed, llama, TaskConfig(("choice",), device="cpu"))
        alone = fips.evaluate(compressed, config=TaskConfig(("choice",), device="cpu"))
    values = found.to_dict()
    assert values["differences"] == pytest.approx([-0.2, 0.25, 0.0])
    assert [one["value"] for one in values["tasks"]] == [0.4, 0.5, 1.0]
    assert [one["value"] for one in values["baseline"]["tasks"]] == [0.6, 0.25, 1.0]
    assert values["protocol"]["lm_eval"] == "0.4.13"
    assert json.loads(json.dumps(values)) == values
    table = found.table()
    for word in ("0.4000 ± 0.2400", "0.6000 ± 0.2400", "-0.2000", "lm-eval 0.4.13", "first 5 documents"):
        assert word in table
    assert "not measured" in alone.table()
    assert alone.to_dict()["differences"] is None


@pytest.mark.parametrize("dense", [True, False])
def test_scores_go_into_the_card(dense: bool, compressed: Path, llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compressed, tmp_path / "out"))
    with patch.object(evaluation, "Tasks", Stub):
        fips.evaluate(folder, llama if dense else None, TaskConfig(("choice",), device="cpu", update_card=True))
    assert [one["task"] for one in read_report(folder)["evaluations"][-1]["tasks"]] == ["choice", "choice", "group"]
    card = (folder / "README.md").read_text()
    compared = [["0.6000 ± 0.2400", "-0.2000"], ["0.2500", "+0.2500"], ["1.0000", "+0.0000"]]
    ours = [["choice acc (2-shot, version 1.0)", "0.4000 ± 0.2400"],
            ["choice f1 (2-shot, version 1.0, strict)", "0.5000"], ["group acc", "1.0000"]]  # fmt: skip
    expected = [[*a, *(b if dense else ["not measured", ""])] for a, b in zip(ours, compared, strict=True)]
    assert rows(card, "Quality") == expected
    assert "lm-eval 0.4.13, the first 5 documents" in card


def test_without_lm_eval_there_is_one_clear_line(compressed: Path, tmp_path: Path) -> None:
    with patch.dict(sys.modules, {"lm_eval": None, "lm_eval.tasks": None}):
        words = ["lm-eval", "pip install 'fips[lm-eval]'"]
        refused("evaluate", compressed, "--tasks", "hellaswag", code=2, words=words, watched=tmp_path)


@pytest.mark.parametrize(("options", "words"), [
    (["--tasks", ""], ["tasks", "hellaswag"]),
    (["--tasks", "a,,b"], ["tasks"]),
    (["--tasks", "a,a"], ["tasks", "once"]),
    (["--tasks", "a", "--limit", "0"], ["limit", "0"]),
    (["--tasks", "a", "--num-fewshot", "-1"], ["num_fewshot", "-1"]),
    (["--tasks", "a", "--batch-size", "0"], ["batch_size", "0"]),
    (["--tasks", "a", "--text", "b.txt"], ["--text", "--tasks"]),
    (["--tasks", "a", "--length", "2048"], ["--length", "--tasks"]),
    (["--text", "b.txt", "--num-fewshot", "2"], ["--num-fewshot", "--tasks"]),
    (["--text", "b.txt", "--include-path", "b"], ["--include-path", "--tasks"]),
    (["--tasks", "a", "--include-path", "nowhere"], ["include_path", "nowhere", "no such folder"]),
])  # fmt: skip
def test_wrong_settings_are_refused(options: list[str], words: list[str], compressed: Path, tmp_path: Path) -> None:
    refused("evaluate", compressed, *options, code=2, words=words, watched=tmp_path)


def test_settings_are_public() -> None:
    assert fips.TaskConfig("hellaswag").tasks == ("hellaswag",)
    assert parse_tasks("hellaswag, arc_easy") == ("hellaswag", "arc_easy")
    with pytest.raises(ConfigError, match="runtime"):
        TaskConfig(("a",), runtime="fast")


_YAML = """\
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one multiple-choice task whose data lie beside it."""
    path = tmp_path_factory.mktemp("tasks")
    data = path / "tiny.jsonl"
    rows = [{"question": f"question {i}", "choices": ["one", "two", "three"], "label": i % 3} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "tiny.yaml").write_text(_YAML.format(data=data))
    return path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets are cached below this folder, and none is looked for on the network."""
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@needs_lm_eval
@pytest.mark.usefixtures("cache")
def test_a_task_of_ones_own_runs_offline(compressed: Path, llama: Path, folder: Path) -> None:
    options = ["--tasks", "tiny_choice", "--include-path", folder, "--device", "cpu", "--json", "-q"]
    found: dict[str, dict[str, Any]] = {}
    for runtime in ("dense", "packed"):
        done = run("evaluate", compressed, "--baseline", llama, *options, "--runtime", runtime)
        assert done.code == 0, done.err
        assert done.err == ""
        found[runtime] = json.loads(done.out)
    (result,) = found["dense"]["tasks"]
    assert (result["task"], result["metric"], result["shots"], result["documents"]) == ("tiny_choice", "acc", 0, 12)
    assert (result["version"], result["more_is_better"]) == ("1.0", True)
    assert result["stderr"] > 0
    assert result["value"] * 12 == pytest.approx(round(result["value"] * 12))
    assert found["packed"]["tasks"] == found["dense"]["tasks"]
    assert found["dense"]["baseline"]["tasks"][0]["documents"] == 12
    assert found["dense"]["protocol"]["batch_size"] == 8
    limited = json.loads(run("evaluate", compressed, *options, "--limit", "5", "--num-fewshot", "1", "--batch-size",
                             "2").out)  # fmt: skip
    assert (limited["tasks"][0]["documents"], limited["tasks"][0]["shots"]) == (5, 1)
    assert limited["protocol"]["batch_size"] == 2


@needs_lm_eval
@pytest.mark.usefixtures("cache")
def test_wrong_tasks_and_models(compressed: Path, folder: Path, tmp_path: Path) -> None:
    options = ["--include-path", folder, "--device", "cpu", "-q"]
    refused("evaluate", compressed, "--tasks", "tiny_choise", *options, code=2, watched=folder,
            words=["tiny_choise", "tiny_choice", "--include-path"])  # fmt: skip
    shutil.copytree(folder, tmp_path / "lost")
    (tmp_path / "lost" / "tiny.yaml").write_text(_YAML.format(data=tmp_path / "none.jsonl"))
    options[1] = tmp_path / "lost"
    refused("evaluate", compressed, "--tasks", "tiny_choice", *options, code=1, watched=compressed,
            words=["lm-eval cannot run tiny_choice"])  # fmt: skip
    bert = BertModel(BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ConfigError, match="BertModel is no language model"):
        Tasks(TaskConfig(("tiny_choice",), include_path=folder)).run(bert, tokenizer())


@needs_lm_eval
def test_the_command_of_lm_eval_loads_a_compressed_checkpoint(compressed: Path, folder: Path, tmp_path: Path) -> None:
    code = "import fips, lm_eval.__main__ as harness; harness.cli_evaluate()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", "hf", "--model_args", f"pretrained={compressed}", "--tasks",
         "tiny_choice", "--include_path", str(folder), "--device", "cpu"],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "|tiny_choice|" in done.stdout
