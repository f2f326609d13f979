"""`fips bench`: what is measured, in which processes, what is said of it, and what is refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel, ViTConfig, ViTForImageClassification

import fips
from fips import benchmark
from fips.benchmark_process import _answer, measure
from fips.checkpoint.load import load_any
from fips.errors import ArchitectureError, ConfigError, SourceError
from fips.metrics.speed import random_tokens, speeds
from fips.resources import reset_peak, resident_memory
from fips.timings import BYTES, Benched, Benchmark, Series
from fips.workload import BenchConfig, parse_sizes
from tests.command import refused, run
from tests.families import edit_config, tokenizer, write_model

SMALL = BenchConfig(batch_sizes=(1, 3), prompt_length=8, new_tokens=3, repeats=2, device="cpu")
QUICK = ["--batch-sizes", "2", "--prompt-length", "8", "--new-tokens", "3", "--repeats", "1", "--device", "cpu"]
MEMORY = ["weights", "memory of the loaded model", "peak memory while loading", "peak memory while running"]


def job(folder: Path, config: BenchConfig = SMALL, runtime: str = "dense") -> dict[str, Any]:
    return {"folder": str(folder), "runtime": runtime, "trust_remote_code": False, "threads": 1,
            "config": config.to_dict()}  # fmt: skip


def benched(label: str, *series: Series) -> Benched:
    return Benched(label, f"path/of/{label}", None if label == "dense" else "packed", series)


def compared(dense: Series, other: Series) -> str:
    return Benchmark((benched("dense", dense), benched("packed", other)), {}, {}).sentences()[0]


def test_the_command_measures_three_models_in_fresh_processes(llama: Path, compressed: Path) -> None:
    done = run("bench", compressed, "--baseline", llama, *QUICK, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [(m["label"], m["model"], m["runtime"]) for m in found["models"]] == [
        ("dense", str(llama), None), ("rebuilt", str(compressed), "dense"), ("packed", str(compressed), "packed"),
    ]  # fmt: skip
    for model in found["models"]:
        named = [(one["what"], one["batch"], one["unit"]) for one in model["series"]]
        assert named == [("load time", None, "s"), *((name, None, "bytes") for name in MEMORY),
                         ("prefill", 2, "tokens/s"), ("decode", 2, "tokens/s")]  # fmt: skip
        assert all(one["median"] > 0 or one["unit"] == "bytes" for one in model["series"])
    weights = {m["label"]: m["series"][1]["median"] for m in found["models"]}
    footprints = {r: fips.load(compressed, runtime=r).get_memory_footprint() for r in ("dense", "packed")}
    assert weights["packed"] < weights["rebuilt"] == weights["dense"]
    assert weights["rebuilt"] == pytest.approx(footprints["dense"], rel=0.01)
    assert weights["packed"] == pytest.approx(footprints["packed"], rel=0.01)
    rates = [m["series"][-1]["median"] for m in found["models"]]
    assert found["ratios"]["packed"][-1] == pytest.approx(rates[2] / rates[0])
    assert found["reference"] == "dense"
    assert found["settings"]["dtype"] == "float32"
    assert {"processor", "cores", "threads", "torch", "transformers", "date"} <= set(found["machine"])
    assert found["machine"]["threads"] == "1"
    assert "round 1 of 1: packed" in done.err


def test_every_round_measures_every_model_once_and_in_turn(compressed: Path, llama: Path) -> None:
    jobs: list[tuple[str, str, str]] = []

    def answer(job: dict[str, Any], name: str) -> dict[str, Any]:
        jobs.append((Path(job["folder"]).name, job["runtime"], job["config"]["dtype"]))
        one = {"what": "decode", "batch": 1, "unit": "tokens/s", "values": (float(len(jobs)),)}
        return {"series": [one], "dtype": "bfloat16", "device": "cpu"}

    with patch.object(benchmark, "_run", answer):
        found = fips.bench(compressed, llama, SMALL)
    turn = [("out", "dense"), ("out", "packed"), ("dense", "dense")]
    assert [job[:2] for job in jobs] == 2 * turn
    assert [job[2] for job in jobs] == ["auto"] + 5 * ["bfloat16"]  # the compressed one's, for all
    assert {m.label: m.series[0].values for m in found.models} == {"dense": (3, 6), "rebuilt": (1, 4), "packed": (2, 5)}


def test_without_a_baseline_the_runtimes_are_compared(compressed: Path) -> None:
    done = run("bench", compressed, *QUICK, "-q")
    assert done.code == 0, done.err
    assert done.err == ""
    head = done.out.splitlines()[0]
    assert "rebuilt" in head
    assert "packed" in head
    assert "dense" not in head
    assert "tokens/s" in done.out
    assert "machine: processor" in done.out


def test_the_same_seed_gives_the_same_inputs_to_every_model(llama: Path, compressed: Path) -> None:
    seen = []
    for folder in (llama, compressed):
        model = fips.load(folder) if folder == compressed else load_any(folder)
        ids: list[torch.Tensor] = []
        model.register_forward_pre_hook(lambda _, __, given, ids=ids: ids.append(given["input_ids"]), with_kwargs=True)
        rates = speeds(model, SMALL)
        assert [(one.what, one.batch) for one in rates] == [(w, b) for b in (1, 3) for w in ("prefill", "decode")]
        assert {tuple(t.shape) for t in ids} == {(1, 8), (1, 1), (3, 8), (3, 1)}
        seen.append(next(t for t in ids if t.shape == (3, 8)))
    assert torch.equal(*seen)


def test_seed_and_dtype_change_what_runs(llama: Path) -> None:
    model = load_any(llama)
    drawn = [random_tokens(model, (2, 8), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"]), with_kwargs=True)
    for seed in (0, 1):
        speeds(model, replace(SMALL, seed=seed, batch_sizes=(2,)))
    assert len({tuple(t.flatten().tolist()) for t in seen if t.shape == (2, 8)}) == 2
    with patch("torch.set_num_threads"):
        found = measure(job(llama, replace(SMALL, dtype="bfloat16")))
    assert found["dtype"] == "bfloat16"


def test_a_language_model_without_a_cache_is_refused(llama: Path) -> None:
    model = load_any(llama)
    forward = type(model).forward
    uncached = patch.object(type(model), "forward", lambda self, **kw: forward(self, **{**kw, "use_cache": False}))
    with uncached, pytest.raises(ArchitectureError, match=r"LlamaForCausalLM.*no cache"):
        speeds(model, SMALL)


def test_an_encoder_and_an_image_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vit = ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    ViTForImageClassification(vit).save_pretrained(tmp_path / "vit")
    BertModel(BertConfig(**sizes, vocab_size=50)).save_pretrained(tmp_path / "bert")
    for name, unit in (("vit", "images/s"), ("bert", "texts/s")):
        with patch("torch.set_num_threads"):
            found = measure(job(tmp_path / name))
        rates = [(one["batch"], one["unit"]) for one in found["series"] if one["unit"] not in ("s", BYTES)]
        assert rates == [(1, unit), (3, unit)]


@pytest.mark.skipif(resident_memory() is None, reason="this system does not tell resident memory")
def test_the_peak_of_resident_memory_starts_anew() -> None:
    size = 200_000_000
    torch.ones(size, dtype=torch.uint8)
    reset_peak()
    now, peak = resident_memory() or (0, 0)
    if peak - now > size / 2:
        pytest.skip("this system does not reset the peak")
    torch.ones(size, dtype=torch.uint8)
    after, later = resident_memory() or (0, 0)
    assert later - now > 0.9 * size > after - now


def test_what_is_worse_is_said_plainly() -> None:
    def decode(value: float) -> Series:
        return Series("decode", 8, "tokens/s", (value,))

    def load(value: float) -> Series:
        return Series("load time", None, "s", (value,))

    def held(value: float) -> Series:
        return Series("weights", None, BYTES, (value,))

    assert compared(decode(310), decode(100)) == "packed: decode at batch 8 is 3.1 times slower than dense."
    assert compared(decode(120), decode(100)) == "packed: decode at batch 8 takes 20 % more time than dense."
    assert compared(load(1), load(4)) == "packed: load time is 4.0 times slower than dense."
    assert compared(held(100), held(150)) == "packed takes 50 % more memory than dense (weights)."
    assert compared(held(100), held(250)) == "packed takes 2.5 times the memory of dense (weights)."
    for dense, other in ((decode(100), decode(300)), (load(4), load(1)), (held(9), held(3)), (decode(104), decode(100)),
                         (held(0), held(0))):  # fmt: skip
        assert compared(dense, other).startswith("Nothing is slower")


def test_overlapping_repeats_are_no_proof() -> None:
    dense = [Series("decode", 1, "tokens/s", (100.0, 60.0, 110.0)), Series("load time", None, "s", (1.0, 1.1, 1.2))]
    other = [Series("decode", 1, "tokens/s", (50.0, 65.0, 51.0)), Series("load time", None, "s", (1.3, 1.4, 1.5))]
    told = Benchmark((benched("dense", *dense), benched("packed", *other)), {}, {}).sentences()
    assert told[0] == "packed: load time takes 27 % more time than dense."
    assert told[1] == "packed: worse than dense in the median, but with repeats that overlap: decode at batch 1."


def test_median_spread_and_a_restless_machine() -> None:
    steady = Series("decode", 1, "tokens/s", (100.0, 104.0, 101.0))
    assert (steady.median, steady.cell()) == (101.0, "101 (100-104)")
    assert Series("weights", None, BYTES, (5e6, 5e6)).cell() == "5.00 MB"
    assert Series("memory", None, BYTES, (0, 0)).cell() == "not measured"
    restless = Series("decode", 1, "tokens/s", (50.0, 104.0, 101.0))
    told = [Benchmark((benched("dense", steady), benched("packed", s)), {}, {}).sentences() for s in (steady, restless)]
    assert len(told[0]) == 1
    assert "factor of 2.1" in told[1][-1]


@pytest.mark.parametrize(("options", "words"), [
    (["--batch-sizes", "0"], ["batch_sizes", "0"]),
    (["--batch-sizes", "1,x"], ["batch_sizes", "1,x"]),
    (["--batch-sizes", "2,2"], ["batch_sizes", "(2, 2)"]),
    (["--batch-sizes", ""], ["batch_sizes"]),
    (["--prompt-length", "0"], ["prompt_length", "0"]),
    (["--new-tokens", "-1"], ["new_tokens", "-1"]),
    (["--repeats", "0"], ["repeats", "0"]),
    (["--seed", "-1"], ["seed", "-1"]),
    (["--prompt-length", "60"], ["prompt_length 60", "new_tokens 32", "92 tokens", "64"]),
])  # fmt: skip
def test_wrong_settings_are_refused_before_anything_runs(
    options: list[str], words: list[str], compressed: Path, tmp_path: Path
) -> None:
    with patch.object(benchmark, "_run", side_effect=AssertionError):
        refused("bench", compressed, *options, code=2, words=words, watched=tmp_path)


def test_wrong_checkpoints_are_refused_before_anything_runs(llama: Path, compressed: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "other"))
    edit_config(other, vocab_size=97)
    gpt2 = write_model("gpt2", tmp_path / "gpt2")
    short = ["--prompt-length", "8", "--new-tokens", "3"]
    with patch.object(benchmark, "_run", side_effect=AssertionError):
        for argv, code, words in (
            ([llama], 2, ["is not compressed by fips", str(llama), "--baseline"]),
            ([compressed, "--baseline", compressed], 2, ["baseline", "is compressed by fips"]),
            ([compressed, "--baseline", gpt2], 2, ["gpt2", "model_type", "llama"]),
            ([compressed, "--baseline", other], 2, ["vocab_size", "97", "96"]),
            ([compressed, "--baseline", tmp_path / "none"], 1, ["none", "no such folder"]),
            ([tmp_path / "none"], 1, ["none", "no such folder"]),
        ):
            refused("bench", *argv, *short, code=code, words=words, watched=tmp_path)


def test_errors_of_the_process_become_errors_here(compressed: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(compressed, tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused("bench", damaged, *QUICK, "-q", code=1, words=["damaged", "rebuilt"], watched=tmp_path)
    with pytest.raises(ConfigError, match="name: what"), patch("subprocess.run") as process:
        process.return_value.stdout = json.dumps({"error": "what", "kind": "ConfigError"})
        benchmark._run(job(compressed), "name")
    with pytest.raises(SourceError, match=r"status -9.*memory"), patch("subprocess.run") as process:
        process.return_value.stdout, process.return_value.stderr, process.return_value.returncode = "", "", -9
        benchmark._run(job(compressed), "name")


def test_a_process_needs_neither_the_working_folder_nor_an_installed_fips(
    compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path)]))
    assert benchmark._run(job(compressed, runtime="packed"), "name")["dtype"] == "float32"


def test_code_in_the_working_folder_does_not_run(
    compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cd downloaded-model && fips bench .`: the folder may hold a json.py."""
    for name in ("json", "torch", "tempfile"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert benchmark._run(job(compressed, runtime="packed"), "name")["dtype"] == "float32"
    assert not (tmp_path / "executed").exists()
    assert str(tmp_path) not in benchmark._search_path()


def test_a_peak_that_cannot_be_reset_is_not_measured(compressed: Path) -> None:
    with patch("fips.benchmark_process.reset_peak", return_value=False), patch("torch.set_num_threads"):
        series = [Series(**one) for one in measure(job(compressed))["series"]]
    assert [one.cell() for one in series if one.what.startswith("peak")] == 2 * ["not measured"]


def test_a_text_that_roberta_has_no_places_for_is_refused_early(calibration: Path, settings, tmp_path: Path) -> None:
    """Its places begin behind the padding: of 64 a text gets 62."""
    config = RobertaConfig(hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                           vocab_size=96, max_position_embeddings=64, pad_token_id=1)  # fmt: skip
    RobertaModel(config).save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    fips.compress(tmp_path / "dense", tmp_path / "out", settings(steps=0))
    small = replace(SMALL, prompt_length=63)
    with patch.object(benchmark, "_run", side_effect=AssertionError):
        with pytest.raises(ConfigError, match=r"prompt_length 63 .* reads 62 at most"):
            fips.bench(tmp_path / "out", config=small)
        with pytest.raises(AssertionError):
            fips.bench(tmp_path / "out", config=replace(SMALL, prompt_length=62))


def test_what_other_libraries_raise_is_told_too(compressed: Path) -> None:
    with patch("fips.benchmark_process.measure", side_effect=RuntimeError("out of memory")):
        assert _answer(job(compressed)) == {"error": "RuntimeError: out of memory", "kind": "FipsError"}


def test_settings_are_public() -> None:
    assert parse_sizes("1, 8") == (1, 8)
    for wrong in ({"device": "tpu"}, {"dtype": "int8"}, {"repeats": 1.5}, {"seed": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            fips.BenchConfig(**wrong)
    with pytest.raises(ConfigError, match="batch_sizes"):
        fips.BenchConfig(batch_sizes=())
