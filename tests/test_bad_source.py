"""Sources that are damaged, foreign or dangerous: refused in one line that names the file, tensor or architecture."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, models

import fips
from fips.checkpoint.source import open_source
from fips.errors import SourceError
from tests.command import QUICK, refused
from tests.families import edit_config, tokenizer, write_model

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny Llama in several shards, to be damaged."""
    return write_model("llama", tmp_path / "model", shard="40KB")


@pytest.fixture
def check(calibration: Path, tmp_path: Path) -> Callable[..., str]:
    """Checks that compressing a source is refused."""

    def compress(model: object, *options: object, words: list[str], code: int = 1, early: bool = True) -> str:
        return refused("compress", model, tmp_path / "out", *QUICK, "--calibration", calibration, *options, code=code,
                       words=words, watched=tmp_path, early=early)  # fmt: skip

    return compress


def write(config: object, folder: Path, architecture: str) -> Path:
    """Writes a randomly initialized model of any class."""
    import transformers

    getattr(transformers, architecture)(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_unknown_model_type(source: Path, check) -> None:
    edit_config(source, model_type="newest_model")
    check(source, words=["model", "'newest_model'", "unknown"])


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path, check) -> None:
    source = write(models.bert.BertConfig(**SMALL), tmp_path / "model", "BertModel")
    edit_config(source, architectures=["BertForNothing"])
    check(source, words=["'BertForNothing'", "does not have"])


def test_a_model_that_reads_sound(tmp_path: Path, check) -> None:
    config = models.wav2vec2.Wav2Vec2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                            num_attention_heads=4, vocab_size=96)  # fmt: skip
    check(write(config, tmp_path / "model", "Wav2Vec2Model"), words=["Wav2Vec2Model", "input_values"])


def test_an_encoder_decoder(tmp_path: Path, check) -> None:
    config = models.t5.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=96)
    check(write(config, tmp_path / "model", "T5ForConditionalGeneration"), words=["T5ForConditionalGeneration"])


@pytest.mark.parametrize(("config", "architecture", "words"), [
    (models.mixtral.MixtralConfig(**SMALL, num_local_experts=2), "MixtralForCausalLM", ["mixtral", "2 experts"]),
    (models.qwen2_moe.Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16), "Qwen2MoeForCausalLM",
     ["qwen2_moe", "4 experts"]),
    (models.mixtral.MixtralConfig(**SMALL, num_local_experts=1), "MixtralForCausalLM",
     ["model.layers.0.mlp.experts", "expert weight"]),
])  # fmt: skip
def test_mixtures_of_experts(config: object, architecture: str, words: list[str], tmp_path: Path, check) -> None:
    check(write(config, tmp_path / "model", architecture), words=[*words, "mixture-of-experts"])


@pytest.mark.parametrize("kind", ["llama", "stablelm"])
def test_no_matrix_is_found(kind: str, tmp_path: Path, check) -> None:
    """A model without blocks, of the table and outside of it."""
    config = {"llama": models.llama.LlamaConfig, "stablelm": models.stablelm.StableLmConfig}[kind](
        **{**SMALL, "num_hidden_layers": 0}
    )
    name = {"llama": "LlamaForCausalLM", "stablelm": "StableLmForCausalLM"}[kind]
    check(write(config, tmp_path / "model", name), words=["no MLP matrix found"])


def test_a_config_that_contradicts_the_weights(source: Path, check) -> None:
    edit_config(source, vocab_size=100)
    check(source, words=["model.embed_tokens.weight", "(96, 32)", "(100, 32)"], early=False)


def test_a_config_that_builds_no_model(source: Path, check) -> None:
    edit_config(source, hidden_act="no_such_activation")
    check(source, words=["llama", "no_such_activation"])


def test_a_config_of_wrong_values(source: Path, check) -> None:
    edit_config(source, num_hidden_layers="three")
    check(source, words=["config.json", "model"])


def test_a_quantized_source(source: Path, check) -> None:
    for value in ({"quant_method": "gptq", "bits": 4}, "gptq"):
        edit_config(source, quantization_config=value)
        check(source, words=["model", "quantized", "gptq"])


def test_a_compressed_source(compressed: Path, check) -> None:
    check(compressed, words=["out", "already compressed"])


@pytest.mark.parametrize(("content", "words"), [
    (None, ["no config.json"]),
    (b"{", ["config.json", "not valid JSON"]),
    (b"\xff\xfe", ["config.json", "not valid JSON"]),
    (b"[]", ["config.json", "model_type"]),
    (b'{"hidden_size": 1}', ["config.json", "model_type"]),
    (b'{"model_type": 3}', ["config.json", "model_type"]),
])  # fmt: skip
def test_damaged_configs(content: bytes | None, words: list[str], source: Path, check) -> None:
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_bytes(content)
    check(source, words=words)


def test_sources_that_are_not_there(source: Path, check) -> None:
    check(source / "config.json", words=["config.json is a file"])
    check("./nowhere", words=["./nowhere", "no such folder"])
    check("/a/b/c", words=["/a/b/c", "no such folder"])
    check("someone/nothing", words=["someone/nothing", "Hub"])
    check("not a name", words=["not a name", "Hub"])
    check(source, "--revision", "main", words=["local folder", "revision"])
    (source / "model.safetensors").unlink()
    check(source, words=["model.safetensors", "no"])


def test_no_tokenizer(source: Path, check) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    check(source, words=["tokenizer"])


def test_damaged_safetensors(source: Path, check) -> None:
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-100], whole[:40], b"", whole[:8] + b"[" + whole[9:], b"\xff" * 8 + whole[8:]):
        path.write_bytes(damaged)
        check(source, words=["model.safetensors", "not a whole safetensors file"])
    save_file({}, path)
    check(source, words=["hold no tensor"])


@pytest.mark.parametrize("name", ["lm_head.weight", GATE, "model.norm.weight", GATE.replace("mlp.gate", "self_attn.q")])
def test_a_missing_tensor(name: str, source: Path, check) -> None:
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.pop(name))
    check(source, words=[name])


def test_a_dtype_that_is_not_supported(source: Path, check) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE] = tensors[GATE].to(torch.float8_e4m3fn)

    edit_tensors(source / "model.safetensors", quantize)
    check(source, words=[GATE, "F8_E4M3"])


def test_dtypes_that_cannot_be_stored_as_they_are(source: Path, check) -> None:
    path = source / "model.safetensors"
    edit_tensors(path, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.bfloat16)}))
    check(source, words=["dtype", "several", "--dtype"], code=2)
    edit_tensors(path, lambda t: t.update({n: v.double() for n, v in t.items() if ".mlp." in n}))
    check(source, words=["model", "float64", "--dtype"], code=2)


@pytest.mark.parametrize("name", [GATE, "lm_head.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite(name: str, value: float, source: Path, check) -> None:
    edit_tensors(source / "model.safetensors", lambda tensors: tensors[name].view(-1)[3:5].fill_(value))
    check(source, words=[name, "2 NaN or infinite"])


def test_activations_that_overflow_name_the_block(source: Path, check) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("up", "down"):
            tensors[GATE.replace("gate", name)].mul_(1e30)

    edit_tensors(source / "model.safetensors", enlarge)
    check(source, words=["block 1", "model.layers.1", "NaN or infinite"], early=False)


def test_an_embedding_that_overflows(tmp_path: Path, check) -> None:
    model = write_model("gemma", tmp_path / "model")  # multiplies its embedding by √d
    edit_tensors(model / "model.safetensors", lambda t: t["model.embed_tokens.weight"].fill_(3e38))
    check(model, words=["embedding", "NaN or infinite"], early=False)


def test_factors_that_overflow_in_the_stored_dtype(source: Path, check) -> None:
    edit_tensors(source / "model.safetensors", lambda tensors: tensors[GATE].mul_(1e6))
    check(source, "--dtype", "float16", words=[GATE.removesuffix(".weight"), "float16"], early=False)


def test_kept_tensors_that_overflow_in_the_stored_dtype(source: Path, check) -> None:
    edit_tensors(source / "model.safetensors", lambda tensors: tensors["lm_head.weight"].mul_(1e6))
    check(source, "--dtype", "float16", words=["lm_head.weight", "float16", "bfloat16"], early=False)


def test_damaged_shards(sharded: Path, check) -> None:
    index = sharded / "model.safetensors.index.json"
    whole = index.read_text()
    where = json.loads(whole)["weight_map"]
    other = next(shard for shard in where.values() if shard != where[GATE])

    edit_index(sharded, lambda names: names.update({GATE: other}))
    check(sharded, words=[GATE, other, "not there"])
    edit_index(sharded, lambda names: names.update({GATE: where[GATE], "extra.weight": other}))
    check(sharded, words=["extra.weight", other])
    for outside in ("../x.safetensors", "/etc/x.safetensors", "..", "sub/x.safetensors", ""):
        edit_index(sharded, lambda names, outside=outside: names.update({GATE: outside}))
        check(sharded, words=[repr(outside), "outside its folder"])
    for broken in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": []}}'):
        index.write_text(broken)
        check(sharded, words=["model.safetensors.index.json", "not a valid shard index"])
    index.write_text(whole)
    edit_tensors(sharded / other, lambda tensors: tensors.update({GATE: torch.zeros(80, 32)}))
    for shard in (other, where[GATE]):  # the tensor is now in two shards, and the index names one of them
        edit_index(sharded, lambda names, shard=shard: names.update({GATE: shard}))
        check(sharded, words=[GATE])
    (sharded / other).unlink()
    check(sharded, words=[other, "missing"])


class _Marker:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def as_bin(source: Path, *, legacy: bool = False, **extra: object) -> None:
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save({**tensors, **extra}, source / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_with_code_is_refused_and_not_run(legacy: bool, source: Path, tmp_path: Path, check) -> None:
    marker = tmp_path / "executed"
    as_bin(source, legacy=legacy, evil=_Marker(marker))
    check(source, words=["pytorch_model.bin", "plain tensors"])
    assert not marker.exists()


def test_a_bin_file_of_something_else(source: Path, check) -> None:
    as_bin(source, step=3)
    check(source, words=["pytorch_model.bin", "other than named tensors"])


@pytest.mark.parametrize("legacy", [False, True])
def test_a_good_bin_file_works(legacy: bool, source: Path, llama: Path, compressed: Path, settings, tmp_path: Path,
                               ) -> None:  # fmt: skip
    as_bin(source, legacy=legacy)
    fips.compress(source, tmp_path / "out", settings())
    ours, reference = (load_file(f / "model.safetensors") for f in (tmp_path / "out", compressed))
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


def test_reading_a_tensor_that_is_not_there(source: Path) -> None:
    opened = open_source(source)
    with pytest.raises(SourceError, match=r"nothing\.weight is not in the checkpoint"):
        opened.read("nothing.weight")
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        opened.read(GATE)
