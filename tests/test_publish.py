"""Nothing that is not an old model is ever replaced, and the right weights are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import fips
from fips.errors import ArchitectureError, CalibrationError, ConfigError, NumericalError, OutputError, SourceError
from fips.models.discover import features
from fips.progress import Progress
from tests.command import tree
from tests.families import edit_config, tokenizer, write_model
from tests.test_families import logits


class Meanwhile(Progress):
    """Puts a file into OUT while the run is verifying."""

    def __init__(self, out: Path) -> None:
        super().__init__(-1)
        self.out = out

    def note(self, text: str) -> None:
        if "verifying" in text:
            self.out.mkdir(exist_ok=True)
            (self.out / "thesis.tex").write_text("mine")


def test_what_appears_at_out_during_the_run_is_kept(llama: Path, settings, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        fips.compress(llama, tmp_path / "out", settings(), progress=Meanwhile(tmp_path / "out"))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_filled(llama: Path, settings, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fips.compress(llama, tmp_path / "out", settings())
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("content", ["{}", "not json", '{"model_type": "llama"}'])
def test_a_project_with_a_config_is_not_overwritten(content: str, llama: Path, settings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "src").mkdir(parents=True)
    (out / "config.json").write_text(content)
    (out / "src" / "main.c").write_text("mine")
    with pytest.raises(OutputError, match="not overwritten"):
        fips.compress(llama, out, settings(), overwrite=True)
    assert (out / "src" / "main.c").exists()


def test_what_a_trainer_leaves_beside_a_model_is_not_overwritten(
    llama: Path, compressed: Path, settings, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(llama, tmp_path / "out"))
    for name in ("checkpoint-500/model.safetensors", "optimizer.pt", "training_args.bin", "notes.txt"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    before = tree(out)
    words = r"checkpoint-500/model\.safetensors, notes\.txt, optimizer\.pt, training_args\.bin beside"
    with pytest.raises(OutputError, match=words):
        fips.compress(llama, out, settings(steps=0), overwrite=True)
    with pytest.raises(OutputError, match=r"optimizer\.pt"):
        fips.export(compressed, out, overwrite=True)
    assert tree(out) == before


def test_files_that_are_recorded_or_come_again_are_overwritten(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("of the model")
    for _ in range(2):
        fips.compress(source, tmp_path / "out", settings(steps=0), overwrite=True)
        fips.export(tmp_path / "out", tmp_path / "dense", overwrite=True)
    fips.compress(llama, tmp_path / "out", settings(steps=0), overwrite=True)  # the report lists sub/notes.txt
    assert not (tmp_path / "out" / "sub").exists()
    with pytest.raises(OutputError, match=r"sub/notes\.txt"):
        fips.export(tmp_path / "out", tmp_path / "dense", overwrite=True)


def test_a_model_in_a_git_checkout_is_not_overwritten(llama: Path, compressed: Path, settings, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    (out / ".git").mkdir()
    with pytest.raises(OutputError, match="not overwritten"):
        fips.compress(llama, out, settings(), overwrite=True)


def test_an_old_model_that_changes_during_the_run_is_kept(
    llama: Path, compressed: Path, settings, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "out"))

    class Grows(Progress):
        def note(self, text: str) -> None:
            if "verifying" in text:
                (out / ".git").mkdir()

    with pytest.raises(OutputError, match="has changed during the run"):
        fips.compress(llama, out, settings(), overwrite=True, progress=Grows(-1))
    assert (out / ".git").is_dir()


def test_the_current_folder_is_refused(llama: Path, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="name a new folder"):
        fips.compress(llama, ".", settings())


def test_two_sets_of_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "m", shard="20KB")
    shutil.copy(llama / "model.safetensors", folder)
    with pytest.raises(SourceError, match=r"model\.safetensors and model\.safetensors\.index\.json"):
        fips.inspect(folder)


def test_a_linear_that_computes_something_else_is_no_plain_linear() -> None:
    class Half(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0.5

    class Adapter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.lora = nn.Parameter(torch.zeros(4))

    assert features(nn.Linear(4, 8)) == (4, 8)
    assert features(Half(4, 8)) is None
    assert features(Adapter()) is None


@pytest.mark.parametrize("prefixless", [True, False])
def test_packed_models_saved_under_other_names_load_again(prefixless: bool, settings, tmp_path: Path) -> None:
    dense = write_model("gpt2", tmp_path / "dense")
    if prefixless:  # as GPT-2 is on the Hub
        tensors = load_file(dense / "model.safetensors")
        renamed = {n.removeprefix("transformer."): t for n, t in tensors.items()}
        save_file(renamed, dense / "model.safetensors", metadata={"format": "pt"})
    fips.compress(dense, tmp_path / "out", settings())
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    fips.load(tmp_path / "out", runtime="packed").save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected)
    trunk = AutoModel.from_pretrained(tmp_path / "out", quantization_config=fips.FipsConfig(runtime="packed"))
    trunk.save_pretrained(tmp_path / "trunk")
    again = AutoModel.from_pretrained(tmp_path / "trunk")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again(ids).last_hidden_state, AutoModel.from_pretrained(tmp_path / "out")(ids).last_hidden_state)


def test_sizes_of_a_packed_model_saved_in_another_dtype(compressed: Path, tmp_path: Path) -> None:
    fips.load(compressed, "packed", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    whole, half = fips.inspect(compressed), fips.inspect(tmp_path / "half")
    assert half.groups[0]["dtype"] == "bfloat16"
    assert half.sizes.dense_matrix_bytes * 2 == whole.sizes.dense_matrix_bytes
    assert half.sizes.matrix_bytes < whole.sizes.matrix_bytes
    assert half.sizes.parameters == whole.sizes.parameters


def test_a_tensor_of_the_source_that_is_called_mask_is_carried_over(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.mask"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    fips.compress(source, tmp_path / "out", settings())
    assert "model.layers.0.self_attn.mask" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", ["dense", "compressed"])
@pytest.mark.parametrize("objective", ["linear", "mlp", "block"])
def test_reported_errors_are_those_of_the_stored_weights(
    family: str, dtype: str, inputs: str, objective: str, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again from activations: the dense model's targets, the stored weights on the inputs they will see."""
    from fips import stream_groups

    sensitivity: dict[str, torch.Tensor] = {}
    real = stream_groups.collect_moments

    def collect(*args: object, **options: object) -> object:
        moments = real(*args, **options)
        sensitivity.update(moments.sensitivity)
        return moments

    monkeypatch.setattr(stream_groups, "collect_moments", collect)
    dense = write_model(family, tmp_path / "dense")
    config = settings(dtype=dtype, inputs=inputs, objective=objective, group_size=1, batch_tokens=256)
    report = fips.compress(dense, tmp_path / "out", config)
    model = AutoModelForCausalLM.from_pretrained(dense)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    from fips.calibrate import calibrate
    from fips.checkpoint.source import open_source
    from fips.plan import make_plan

    plan = make_plan(open_source(dense), config)
    tokens = calibrate(plan, config, report, Progress(-1)).tokens
    seen: dict[str, list[torch.Tensor]] = {}
    name = next(s.name for s in plan.sites if s.block == 1 and s.role == "up")  # before it all of block 0 is compressed
    for source in (model, packed if inputs == "compressed" else model):
        linear = source.get_submodule(name)
        linear.register_forward_pre_hook(lambda _m, args: seen.setdefault(name, []).append(args[0].flatten(0, -2)))
        if inputs == "compressed" and source is packed:  # attention of block 1 is dense in both
            assert torch.equal(source.get_submodule(name).weight, packed.get_submodule(name).weight)
        with torch.no_grad():
            source(tokens)
    x, z = seen[name][0].double(), seen[name][1].double()
    transposed = family != "gpt2"
    W, new = (m.get_submodule(name).weight.detach().double() for m in (model, packed))
    W, new = (W.T, new.T) if transposed else (W, new)
    target, ours = x @ W, z @ new
    if family == "gpt2":  # a bias takes up the mean
        target, ours = target - target.mean(0), ours - ours.mean(0)
    c = sensitivity.get(name)
    assert (c is None) == (objective == "linear")
    weight = torch.ones(W.shape[1]).double() if c is None else (c / c.mean() + 0.01).double()
    expected = float((weight * (target - ours).square()).sum() / (weight * target.square()).sum())
    assert report.groups[1].error_after[name] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("objective", ["mlp", "linear"])
def test_only_up_type_matrices(objective: str, llama: Path, settings, tmp_path: Path) -> None:
    config = settings(solver="gradient", objective=objective, include="*gate_proj", budget=0.4)
    report = fips.compress(llama, tmp_path / "out", config)
    assert all(0 < error < 1 for g in report.groups for error in g.error_after.values())
    assert all(set(g.error_after) == set(g.sparsity) for g in report.groups)


def test_a_tokenizer_of_another_model(llama: Path, calibration: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:60].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, vocab_size=60)
    with pytest.raises(CalibrationError, match="the model has 60 embeddings"):
        fips.compress(source, tmp_path / "out", settings())
    with pytest.raises(CalibrationError, match="the model has 60 embeddings"):
        fips.evaluate(source, config=fips.EvaluationConfig(text=str(calibration)))


def test_either_side_of_a_tie_may_be_on_disk(settings, tmp_path: Path) -> None:
    source = write_model("llama", tmp_path / "source", tied=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert fips.compress(source, tmp_path / "out", settings()).verified


def test_moments_that_overflow_are_named(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name].mul_(1e10)
        if name.endswith("down_proj.weight"):
            tensors[name].mul_(1e-20)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match=r"down_proj overflow|not finite|NaN"):
        fips.compress(source, tmp_path / "out", settings())


def test_python_settings_are_checked_like_the_shell_s(calibration: Path) -> None:
    config = fips.CompressionConfig(calibration=calibration, include="*gate*")
    assert config.calibration == str(calibration)
    assert config.include == ("*gate*",)
    for wrong in ({"budget": "0.5"}, {"steps": 2.5}, {"max_shard_size": "5GB"}, {"seed": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            fips.CompressionConfig(**wrong)
    with pytest.raises(ConfigError, match="rounds has no meaning"):
        fips.CompressionConfig.from_recipe("default", rounds=2, steps=0)


def test_a_damaged_basis_is_noticed_in_both_runtimes(compressed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    tensors = load_file(out / "model.safetensors")
    name = next(n for n in tensors if n.startswith("fips_bases."))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for runtime in ("dense", "packed"):
        with pytest.raises(fips.FipsError, match="NaN or infinity"):
            fips.load(out, runtime)


def test_a_matrix_its_block_never_uses(llama: Path, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))))
    with pytest.raises(ArchitectureError, match=r"up_proj is not used"):
        fips.compress(llama, tmp_path / "out", settings())


def test_both_models_are_measured_on_the_same_windows(llama: Path, calibration: Path, tmp_path: Path) -> None:
    short = Path(shutil.copytree(llama, tmp_path / "short"))
    edit_config(short, max_position_embeddings=32)
    found = fips.evaluate(llama, short, fips.EvaluationConfig(text=str(calibration)))
    assert found.baseline is not None
    assert found.measured.perplexity.protocol == found.baseline.perplexity.protocol
    assert found.measured.perplexity.protocol.length == 32


def test_the_card_of_a_model_in_the_current_folder_names_it(
    llama: Path, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama)
    fips.compress(".", tmp_path / "out", settings())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"\n# {llama.name}-fips\n" in card
    assert "base_model" not in card  # that would be an id on the Hub
    assert json.loads((tmp_path / "out" / "fips_report.json").read_text())["versions"]["threads"] == "1"
    assert tokenizer().bos_token == "<s>"
