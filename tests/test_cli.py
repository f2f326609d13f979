"""The command line: tables and JSON on stdout, progress on stderr, recipes, exit codes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fips
from fips.cli.compress import command as compress_command
from fips.config import CompressionConfig
from tests.command import QUICK, run

# arXiv 2411.09816, language models
PAPER = {"steps": 800, "calibration_tokens": 163_840, "batch_tokens": 8192, "sequence_length": 8192,
         "learning_rate": 3e-5, "weight_decay": 0.1, "group_size": 4, "sparsity": 0.75, "schedule": "accelerated",
         "mask_interval": 50, "objective": "mlp", "inputs": "dense"}  # fmt: skip


def script(*argv: object) -> subprocess.CompletedProcess[str]:
    """The command as users start it, in a process of its own."""
    return subprocess.run([sys.executable, "-m", "fips", *map(str, argv)], capture_output=True, text=True, check=False,
                          timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def test_compress_prints_a_table_and_shows_progress_on_stderr(llama: Path, calibration: Path, tmp_path: Path) -> None:
    done = run("compress", llama, tmp_path / "out", *QUICK, "--calibration", calibration)
    assert done.code == 0
    for word in ("blocks", "rank", "0-1", "2-2", "MLP parameters", "MLP matrices on disk", "checkpoint"):
        assert word in done.out
    report = json.loads((tmp_path / "out" / "fips_report.json").read_text())
    assert f"{report['sizes']['parameter_share']:.3f}" in done.out
    assert f"{report['sizes']['matrix_share']:.3f}" in done.out
    assert "blocks 0-1: error" in done.err
    assert "blocks 2-2: error" in done.err
    assert "blocks 0-1: error" not in done.out


def test_compress_json_is_the_report(llama: Path, calibration: Path, tmp_path: Path) -> None:
    done = run("compress", llama, tmp_path / "out", *QUICK, "--calibration", calibration, "--json")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((tmp_path / "out" / "fips_report.json").read_text())
    assert "blocks 0-1: error" in done.err


def test_quiet_prints_the_result_and_nothing_else(llama: Path, calibration: Path, tmp_path: Path) -> None:
    done = script("compress", llama, tmp_path / "out", *QUICK, "--calibration", calibration, "--json", "-q")
    assert done.returncode == 0
    assert json.loads(done.stdout)["verified"] is True
    assert done.stderr == ""
    done = script("evaluate", tmp_path / "out", "--baseline", llama, "--text", calibration, "--json", "-q")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ratio"] > 0
    assert done.stderr == ""


def test_every_option_reaches_the_settings(llama: Path, calibration: Path, tmp_path: Path) -> None:
    given = {"budget": 0.4, "sparsity": 0.6, "calibration": str(calibration), "calibration_tokens": 128,
             "sequence_length": 16, "objective": "linear", "inputs": "compressed", "schedule": "zhu-gupta", "steps": 3,
             "batch_tokens": 32, "learning_rate": 0.002, "weight_decay": 0.01, "mask_interval": 2, "seed": 7,
             "device": "cpu", "dtype": "bfloat16"}  # fmt: skip
    options = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    done = run("compress", llama, tmp_path / "out", "--recipe", "paper", *options, "--groups", "0-1,2",
               "--max-shard-size", "1MiB", "--include", "*.gate_proj", "--include", "*.down_proj", "--json",
               "-q")  # fmt: skip
    assert done.code == 0, done.err
    settings = json.loads(done.out)["settings"]
    assert {name: settings[name] for name in given} == given
    assert settings["groups"] == [[0, 1], [2, 2]]
    assert settings["max_shard_size"] == 2**20
    assert settings["include"] == ["*.gate_proj", "*.down_proj"]
    named = {name for group in json.loads(done.out)["groups"] for name in group["sparsity"]}
    assert named == {f"model.layers.{b}.mlp.{n}_proj" for b in range(3) for n in ("gate", "down")}


def test_every_setting_has_an_option() -> None:
    assert set(CompressionConfig().to_dict()) <= {parameter.name for parameter in compress_command.params}


def test_the_papers_recipe(llama: Path, calibration: Path, tmp_path: Path) -> None:
    config = CompressionConfig.from_recipe("paper").to_dict()
    assert {name: config[name] for name in PAPER} == PAPER
    done = run("compress", llama, tmp_path / "out", "--recipe", "paper", "--steps", "3", "--budget", "0.4", "--device",
               "cpu", "--calibration", calibration, "--json", "-q")  # fmt: skip
    assert done.code == 0, done.err
    settings = json.loads(done.out)["settings"]
    assert {name: settings[name] for name in PAPER} == {**PAPER, "steps": 3}
    assert settings["budget"] == 0.4


def test_options_given_before_the_recipe_override_it_too(llama: Path, calibration: Path, tmp_path: Path) -> None:
    done = run("compress", llama, tmp_path / "out", *QUICK, "--steps", "6", "--learning-rate", "0.01", "--recipe",
               "paper", "--calibration", calibration, "--json", "-q")  # fmt: skip
    settings = json.loads(done.out)["settings"]
    assert (settings["steps"], settings["learning_rate"], settings["weight_decay"]) == (6, 0.01, 0.1)


def test_inspect_of_a_dense_checkpoint_is_what_compress_then_does(llama: Path, compressed: Path) -> None:
    done = run("inspect", llama, "--group-size", "2")
    assert done.code == 0
    assert "dense; would be compressed" in done.out
    assert "model.layers.2.mlp.down_proj" in done.out
    planned = json.loads(run("inspect", llama, "--group-size", "2", "--json").out)
    found = json.loads(run("inspect", compressed, "--json").out)
    assert (planned["compressed"], found["compressed"]) == (False, True)
    for ours, theirs in zip(planned["groups"], found["groups"], strict=True):
        assert [ours[k] for k in ("name", "d", "rank", "dtype")] == [theirs[k] for k in ("name", "d", "rank", "dtype")]
        names = [[(m["name"], m["role"], m["f"]) for m in group["matrices"]] for group in (ours, theirs)]
        assert names[0] == names[1]
    assert 0 <= planned["sizes"]["matrix_bytes"] - found["sizes"]["matrix_bytes"] < 100  # a few kept values are zero
    assert planned["sizes"]["dense_checkpoint_bytes"] == found["sizes"]["dense_checkpoint_bytes"]
    looser = json.loads(run("inspect", llama, "--budget", "0.7", "--sparsity", "0.5", "--json").out)
    assert looser["sizes"]["parameters"] > planned["sizes"]["parameters"]
    assert looser["groups"][0]["name"] == "blocks_0_2"


def test_inspect_of_a_compressed_checkpoint(compressed: Path) -> None:
    done = run("inspect", compressed)
    assert done.code == 0
    assert "compressed by fips" in done.out
    found = json.loads(run("inspect", compressed, "--json").out)
    report = json.loads((compressed / "fips_report.json").read_text())
    assert found["sizes"] == report["sizes"]
    for group, reported in zip(found["groups"], report["groups"], strict=True):
        assert {m["name"]: m["sparsity"] for m in group["matrices"]} == pytest.approx(reported["sparsity"])
        assert (group["name"], group["rank"]) == (reported["name"], reported["rank"])


def test_the_python_function_and_the_command_agree(llama: Path, compressed: Path) -> None:
    for path in (llama, compressed):
        assert fips.inspect(path, CompressionConfig(group_size=2)).to_dict() == json.loads(
            run("inspect", path, "--group-size", "2", "--json").out
        )


def test_verbose_shows_the_traceback_of_an_error(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "config.json").write_text("{")
    for flag in ("-v", "--verbose"):
        done = run("inspect", source, flag)
        assert done.code == 1
        assert "Traceback" in done.err
        assert done.err.strip().splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in run("inspect", source).err


def test_help_version_and_wrong_commands() -> None:
    done = run("--help")
    assert done.code == 0
    assert all(name in done.out for name in ("bench", "compress", "evaluate", "inspect", "push"))
    assert run("--version").out.strip() == f"fips, version {fips.__version__}"
    for command in ("bench", "compress", "evaluate", "inspect", "push"):
        done = run(command, "--help")
        assert done.code == 0
        assert "--json" in done.out
    assert run("shrink").code == 2
    assert "shrink" in run("shrink").err
    assert run("compress").code == 2
    assert "MODEL" in run("compress").err


def test_the_defaults_in_the_help_are_the_defaults() -> None:
    text = " ".join(run("compress", "--help").out.split())
    for name in ("budget", "group_size", "steps", "calibration_tokens"):
        config = CompressionConfig()
        default = {"budget": config.effective_budget}.get(name, getattr(config, name))
        assert f"[default: {default}]" in text


def test_unknown_public_names() -> None:
    with pytest.raises(AttributeError, match="shrink"):
        fips.shrink  # noqa: B018
    assert all(getattr(fips, name) is not None for name in fips.__all__)


def test_inspect_shows_the_plan_compress_would_follow(llama: Path) -> None:
    out = json.loads(run("inspect", llama, "--json", "--groups", "0-1,2", "--include", "*down_proj", "--dtype",
                         "bfloat16", "--budget", "0.4").out)  # fmt: skip
    assert [g["name"] for g in out["groups"]] == ["blocks_0_1", "blocks_2_2"]
    assert {m["role"] for g in out["groups"] for m in g["matrices"]} == {"down"}
    assert {g["dtype"] for g in out["groups"]} == {"bfloat16"}
    assert 0 < out["sizes"]["parameter_share"] <= 0.4
