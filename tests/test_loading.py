"""Loading a compressed checkpoint: in fresh processes, in both runtimes, saved again, copied, offloaded."""

import copy
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import fips
from fips.models.layers import CompressedLinear
from tests.families import write_model

IDS = torch.arange(3, 35)[None]
UP = "model.layers.0.mlp.up_proj"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def expected(compressed: Path) -> torch.Tensor:
    """Logits of the compressed tiny Llama, loaded the default way."""
    return logits(AutoModelForCausalLM.from_pretrained(compressed))


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


_SCRIPT = """
{imports}
import torch
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained({folder!r})
torch.save(model(input_ids=torch.arange(3, 35)[None]).logits, {result!r})
"""


@pytest.mark.parametrize("imports", [
    "import fips\nfrom transformers import AutoModelForCausalLM",
    "from transformers import AutoModelForCausalLM\nimport fips",
    "from fips.checkpoint.quantizer import FipsConfig\nfrom transformers import AutoModelForCausalLM",
    "import transformers.quantizers.auto\nimport fips\nfrom transformers import AutoModelForCausalLM",
])  # fmt: skip
def test_the_order_of_imports_does_not_matter(imports: str, compressed: Path, expected: torch.Tensor, tmp_path: Path,
                                              ) -> None:  # fmt: skip
    result = tmp_path / "logits.pt"
    done = python(_SCRIPT.format(imports=imports, folder=str(compressed), result=str(result)))
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(result), expected)


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_without_fips_there_is_an_error_and_no_model(name: str, compressed: Path) -> None:
    done = python(f"from transformers import {name}\n{name}.from_pretrained({str(compressed)!r})\nprint('got')")
    assert done.returncode != 0
    assert "got" not in done.stdout
    assert "mismatch" in done.stderr


def test_help_is_quick_and_imports_no_torch() -> None:
    code = ("import sys, fips.cli.main as m\nsys.argv = ['fips', '--help']\ntry: m.main()\nfinally:\n"
            "  heavy = {'torch', 'transformers'} & set(sys.modules)\n  print('heavy:', heavy or 'none')")  # fmt: skip
    times = []
    for _ in range(3):
        started = time.monotonic()
        done = python(code)
        times.append(time.monotonic() - started)
        assert "heavy: none" in done.stdout
        assert "compress" in done.stdout
    assert min(times) < 1.0  # half a second, and as much again for a busy machine


def test_packed_runtime(compressed: Path, expected: torch.Tensor) -> None:
    for model in (
        fips.load(compressed, runtime="packed"),
        AutoModelForCausalLM.from_pretrained(compressed, quantization_config=fips.FipsConfig(runtime="packed")),
    ):
        assert isinstance(model.get_submodule(UP), CompressedLinear)
        assert not model.training
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
        assert model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
        assert "nnz=" in repr(model)
    assert not isinstance(fips.load(compressed).get_submodule(UP), CompressedLinear)
    by_default = AutoModelForCausalLM.from_pretrained(compressed)
    assert not isinstance(by_default.get_submodule(UP), CompressedLinear)


def test_a_packed_model_is_smaller_in_memory(compressed: Path) -> None:
    packed, dense = (fips.load(compressed, runtime=r).get_memory_footprint() for r in ("packed", "dense"))
    assert packed < dense


def test_a_packed_model_saved_again_is_the_same_checkpoint(compressed: Path, tmp_path: Path) -> None:
    fips.load(compressed, runtime="packed").save_pretrained(tmp_path)
    ours, again = load_file(compressed / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[n], again[n]) and ours[n].dtype == again[n].dtype for n in ours)
    configs = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (compressed, tmp_path)]
    assert configs[0] == configs[1]
    for runtime in ("dense", "packed"):
        assert torch.equal(logits(fips.load(tmp_path, runtime=runtime)), logits(fips.load(compressed, runtime=runtime)))


def test_a_dense_model_saved_again_needs_no_fips(compressed: Path, llama: Path, expected: torch.Tensor, tmp_path: Path,
                                                 ) -> None:  # fmt: skip
    AutoModelForCausalLM.from_pretrained(compressed).save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    plain, source = (load_file(f / "model.safetensors") for f in (tmp_path / "plain", llama))
    assert {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in source.items()}
    result = tmp_path / "logits.pt"
    imports = "import sys\nsys.modules['fips'] = None\nfrom transformers import AutoModelForCausalLM"
    done = python(_SCRIPT.format(imports=imports, folder=str(tmp_path / "plain"), result=str(result)))
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(result), expected)


def test_a_deep_copy_keeps_the_sharing_and_is_independent(compressed: Path) -> None:
    model = fips.load(compressed, runtime="packed")
    before = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    bases = {n: p.data_ptr() for n, p in twin.named_parameters() if "fips_bases" in n}
    assert len(bases) == 2
    assert twin.get_submodule(UP).basis().data_ptr() in bases.values()
    with torch.no_grad():
        twin.fips_bases.blocks_0_1.zero_()
    rest = twin.get_submodule(UP).projection()[:32]  # what the identity that is not stored makes of V
    torch.testing.assert_close(twin.get_submodule(UP)(torch.ones(1, 32)), rest.sum(0, keepdim=True))
    assert not torch.equal(logits(twin), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("runtime", ["dense", "packed"])
def test_loading_in_bfloat16(runtime: str, compressed: Path, expected: torch.Tensor) -> None:
    model = fips.load(compressed, runtime=runtime, dtype=torch.bfloat16)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    masks = {n for n in dtypes if n.endswith(".mask")}
    assert len(masks) == (9 if runtime == "packed" else 0)
    assert {dtypes[n] for n in masks} <= {torch.uint8}
    assert {t for n, t in dtypes.items() if n not in masks} == {torch.bfloat16}
    assert (logits(model).float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("runtime", ["dense", "packed"])
def test_a_device_map(runtime: str, compressed: Path) -> None:
    for device_map in ({"": "cpu"}, "cpu"):
        model = fips.load(compressed, runtime=runtime, device_map=device_map)
        assert torch.equal(logits(model), logits(fips.load(compressed, runtime=runtime)))


OFFLOADED = {
    "blocks on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
                       "model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
                       "fips_bases": "cpu"},
    "bases on disk": {"model": "cpu", "lm_head": "cpu", "fips_bases": "disk"},
    "all on disk": {"model": "disk", "lm_head": "cpu", "fips_bases": "disk"},
}  # fmt: skip


@pytest.mark.parametrize("runtime", ["dense", "packed"])
@pytest.mark.parametrize("where", OFFLOADED)
def test_an_offloaded_model_is_right_or_refused(where: str, runtime: str, compressed: Path, expected: torch.Tensor,
                                                tmp_path: Path) -> None:  # fmt: skip
    try:
        model = fips.load(compressed, runtime=runtime, device_map=OFFLOADED[where], offload_folder=tmp_path)
        found = logits(model)
    except fips.FipsError as error:
        assert any(word in str(error) for word in ("offload", "mlp", "fips_bases", "basis"))
        assert runtime == "dense"
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("runtime", ["dense", "packed"])
def test_the_headless_model(runtime: str, compressed: Path) -> None:
    whole = fips.load(compressed, runtime=runtime)
    model = AutoModel.from_pretrained(compressed, quantization_config=fips.FipsConfig(runtime=runtime))
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).last_hidden_state, whole.model(input_ids=IDS).last_hidden_state)


def test_the_models_own_class(compressed: Path, expected: torch.Tensor) -> None:
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(compressed)), expected)


def test_a_basis_without_values_is_an_error(compressed: Path) -> None:
    model = fips.load(compressed, runtime="packed")
    model.fips_bases.to("meta")
    with pytest.raises(fips.FipsError, match="basis blocks_0_1"):
        model.get_submodule(UP)(torch.ones(1, 32))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_embeddings_stay_tied_or_untied_as_they_were(family: str, tied: bool, settings, tmp_path: Path) -> None:
    dense = write_model(family, tmp_path / "dense", tied=tied)
    fips.compress(dense, tmp_path / "out", settings(steps=0))
    source, ours = (load_file(f / "model.safetensors") for f in (dense, tmp_path / "out"))
    heads = {n for n in source if "lm_head" in n or "embed" in n or "wte" in n}
    assert {n for n in ours if "lm_head" in n or "embed" in n or "wte" in n} == heads
    assert all(torch.equal(source[n], ours[n]) for n in heads)
    for runtime in ("dense", "packed"):
        model = fips.load(tmp_path / "out", runtime=runtime)
        same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert same == tied
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == ours.keys()


def test_a_checkpoint_may_be_moved(compressed: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    moved = shutil.copytree(compressed, tmp_path / "a folder with spaces")
    assert torch.equal(logits(fips.load(moved)), expected)
    assert torch.equal(logits(fips.load(str(moved))), expected)


def test_public_names_stay_what_they_are_when_everything_is_imported() -> None:
    code = (
        "import fips, fips.evaluation, fips.inspection, fips.pipeline\n"
        "assert all(callable(getattr(fips, n)) for n in ('compress', 'load', 'evaluate', 'inspect'))\n"
        "assert all(hasattr(fips, n) for n in fips.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
