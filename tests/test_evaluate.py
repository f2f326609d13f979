"""Perplexity against a computation by hand, the BOS rule, and what `fips evaluate` prints."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fips
from fips.config import BOS_RULES
from fips.data.windows import resolve_bos, token_windows
from fips.errors import ConfigError
from tests.command import refused, run
from tests.families import edit_config, random_text, tokenizer, write_model

BOS = 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "test.txt"
    path.write_text(random_text(220, seed=5))
    return path


def evaluate(*argv: object) -> dict[str, Any]:
    done = run("evaluate", *argv, "--device", "cpu", "--json", "-q")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def by_hand(model: Path, windows: list[list[int]]) -> float:
    """exp of the mean negative log likelihood of every token but the first of its window."""
    network = AutoModelForCausalLM.from_pretrained(model)
    losses = []
    for window in windows:
        with torch.no_grad():
            chances = network(input_ids=torch.tensor([window])).logits[0].double().log_softmax(-1)
        losses += [-float(chances[i, token]) for i, token in enumerate(window[1:])]
    return math.exp(sum(losses) / len(losses))


def cut(ids: list[int], body: int, start: list[int]) -> list[list[int]]:
    return [start + ids[k : k + body] for k in range(0, len(ids) - body + 1, body)]


def token_ids(text: Path) -> list[int]:
    """One token per character, by the vocabulary written down in tests.families."""
    alphabet = {" ": 3, "\n": 4, **{chr(c): 5 + c - 33 for c in range(33, 124)}}
    return [alphabet[c] for c in text.read_text()]


@pytest.mark.parametrize("length", [16, 64, 2048])
def test_perplexity_is_the_one_computed_by_hand(length: int, llama: Path, compressed: Path, text: Path) -> None:
    found = evaluate(compressed, "--baseline", llama, "--text", text, "--length", length)
    size = min(length, 64)  # the model's maximum
    windows = cut(token_ids(text), size, [])
    assert found["perplexity"] == pytest.approx(by_hand(compressed, windows), rel=1e-5)
    assert found["baseline"]["perplexity"] == pytest.approx(by_hand(llama, windows), rel=1e-5)
    assert found["ratio"] == pytest.approx(found["perplexity"] / found["baseline"]["perplexity"])
    protocol = found["protocol"]
    assert protocol["windows"] == len(windows)
    assert (protocol["length"], protocol["predicted"]) == (size, len(windows) * (size - 1))


def test_a_tokenizer_with_bos_gets_exactly_one_at_the_start_of_every_window(text: Path, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", bos=True)
    ids = token_ids(text)
    expected = {"auto": cut(ids, 31, [BOS]), "every": cut(ids, 31, [BOS]), "first": cut([BOS, *ids], 32, []),
                "none": cut(ids, 32, [])}  # fmt: skip
    assert set(expected) == set(BOS_RULES)
    values = {}
    for rule, windows in expected.items():
        found = evaluate(model, "--text", text, "--length", "32", "--bos", rule)
        values[rule] = found["perplexity"]
        assert found["perplexity"] == pytest.approx(by_hand(model, windows), rel=1e-5)
        assert found["protocol"]["bos"] == ("every" if rule == "auto" else rule)
    assert len({round(v, 6) for v in values.values()}) == 3


@pytest.mark.parametrize("bos", [True, False])
def test_windows(bos: bool, text: Path) -> None:
    tokens = tokenizer(bos=bos)
    rule = resolve_bos("auto", tokens)
    assert rule == ("every" if bos else "none")
    windows = token_windows(text.read_text(), tokens, 10, rule)
    assert windows.tolist() == cut(token_ids(text), 9 if bos else 10, [BOS] if bos else [])
    assert (windows == BOS).sum(1).tolist() == [int(bos)] * len(windows)
    assert token_windows("abc", tokens, 10, rule).shape[0] == 0
    with pytest.raises(ConfigError, match="'often'"):
        resolve_bos("often", tokens)


def test_calibration_follows_the_bos_rule(settings, tmp_path: Path) -> None:
    for bos in (True, False):
        model = write_model("llama", tmp_path / f"model{bos}", bos=bos)
        report = fips.compress(model, tmp_path / f"out{bos}", settings(steps=0))
        assert report.calibration["bos"] == ("every" if bos else "none")
        assert report.calibration["tokens"] == 256


def test_the_json_object(llama: Path, compressed: Path, text: Path) -> None:
    done = run("evaluate", compressed, "--baseline", llama, "--text", text, "--device", "cpu", "--json")
    found = json.loads(done.out)  # exactly one object
    assert set(found) == {"model", "perplexity", "protocol", "sizes", "baseline", "ratio"}
    assert set(found["baseline"]) == {"model", "perplexity", "protocol", "sizes"}
    assert found["protocol"] == found["baseline"]["protocol"]
    assert {"text", "text_sha256", "length", "windows", "predicted", "bos", "dtype", "device", "torch", "transformers",
            "method"} <= set(found["protocol"])  # fmt: skip
    report = json.loads((compressed / "fips_report.json").read_text())
    assert found["sizes"] == report["sizes"]
    dense = found["baseline"]["sizes"]
    assert dense["parameters"] == dense["dense_parameters"] == found["sizes"]["dense_parameters"]
    assert dense["checkpoint_bytes"] == found["sizes"]["dense_checkpoint_bytes"]
    assert dense["matrix_share"] == 1
    assert "perplexity" in done.err  # progress


def test_the_table(llama: Path, compressed: Path, text: Path) -> None:
    done = run("evaluate", compressed, "--baseline", llama, "--text", text, "--device", "cpu")
    values = evaluate(compressed, "--baseline", llama, "--text", text)
    for number in (values["perplexity"], values["baseline"]["perplexity"], values["ratio"]):
        assert f"{number:.3f}" in done.out
    assert "3 windows of 64 tokens, BOS none, float32 on cpu" in done.out
    alone = run("evaluate", llama, "--text", text, "--device", "cpu", "-q")
    assert "not measured" in alone.out
    assert alone.err == ""


def test_a_dense_model_alone(llama: Path, text: Path) -> None:
    found = evaluate(llama, "--text", text)
    assert (found["baseline"], found["ratio"]) == (None, None)
    assert evaluate(llama, "--baseline", llama, "--text", text)["ratio"] == 1


def test_runtime_and_dtype(compressed: Path, text: Path) -> None:
    dense, packed = (evaluate(compressed, "--text", text, "--runtime", r) for r in ("dense", "packed"))
    assert packed["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-4)
    half = evaluate(compressed, "--text", text, "--dtype", "bfloat16")
    assert half["protocol"]["dtype"] == "bfloat16"
    assert half["perplexity"] != dense["perplexity"]
    assert half["perplexity"] == pytest.approx(dense["perplexity"], rel=0.2)


def test_jsonl_texts(llama: Path, text: Path, tmp_path: Path) -> None:
    rows = text.read_text().split("\n\n")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps({"text": row, "id": i}) for i, row in enumerate(rows)) + "\n\n")
    plain, joined = evaluate(llama, "--text", text), evaluate(llama, "--text", lines)
    assert joined["perplexity"] == plain["perplexity"]
    assert joined["protocol"]["text_sha256"] == plain["protocol"]["text_sha256"]
    assert (joined["protocol"]["text"], plain["protocol"]["text"]) == ("rows.jsonl", "test.txt")


def test_chats_are_rendered_by_the_models_template(llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    chat, plain = tmp_path / "chat.jsonl", tmp_path / "plain.txt"
    turns = [[{"role": "user", "content": random_text(90, seed=s)}, {"role": "bot", "content": "yes"}] for s in (1, 2)]
    chat.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    plain.write_text("\n\n".join(f"[user]{a['content']}[bot]{b['content']}" for a, b in turns))
    assert evaluate(model, "--text", chat)["perplexity"] == evaluate(model, "--text", plain)["perplexity"]


def test_a_byte_order_mark_is_no_text(llama: Path, text: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_text(text.read_text(), encoding="utf-8-sig")
    assert evaluate(llama, "--text", marked)["perplexity"] == evaluate(llama, "--text", text)["perplexity"]


def test_logits_that_are_not_finite_name_the_window(llama: Path, text: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"].mul_(1e38)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused("evaluate", model, "--text", text, "--device", "cpu", "-q", code=1, words=["window 0", "NaN or infinite"],
            watched=tmp_path)  # fmt: skip


def test_models_that_cannot_be_loaded(llama: Path, compressed: Path, text: Path, tmp_path: Path) -> None:
    model, damaged = (Path(shutil.copytree(f, tmp_path / n)) for f, n in ((llama, "model"), (compressed, "damaged")))
    edit_config(model, vocab_size=100)
    refused("evaluate", model, "--text", text, "--device", "cpu", "-q", code=1, words=["model cannot be loaded"],
            watched=tmp_path)  # fmt: skip
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.mask"][0, 0] ^= 1
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    refused("evaluate", damaged, "--text", text, "--device", "cpu", "-q", code=1, words=["up_proj", "mask counts"],
            watched=tmp_path)  # fmt: skip


def test_the_baseline_runs_in_the_dtype_of_the_model(llama: Path, calibration: Path, settings, tmp_path: Path) -> None:
    fips.compress(llama, tmp_path / "half", settings(dtype="bfloat16"))
    found = fips.evaluate(tmp_path / "half", llama, fips.EvaluationConfig(text=str(calibration), device="cpu"))
    assert found.baseline is not None
    assert found.measured.perplexity.protocol == found.baseline.perplexity.protocol
    assert found.measured.perplexity.protocol.dtype == "bfloat16"
