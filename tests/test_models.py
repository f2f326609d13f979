"""Blocks run alone with recorded arguments, sites in odd models, skeletons, and architectures outside the table."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, models

import fips
from fips.checkpoint.source import open_source
from fips.errors import ArchitectureError, SourceError
from fips.models import blocks
from fips.models.blocks import record_calls, returned_tuple_length, run_block
from fips.models.sites import find_sites
from fips.models.skeleton import build_skeleton, map_names, materialized
from tests.families import tokenizer

IDS = torch.arange(3, 35)[None]
SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip


class Block(nn.Module):
    def __init__(self, *, tuples: bool) -> None:
        super().__init__()
        self.linear, self.tuples = nn.Linear(4, 4), tuples

    def forward(self, hidden: torch.Tensor, scale: float = 1.0, **_: Any) -> Any:
        out = hidden + scale * self.linear(hidden)
        return (out, "attention", None) if self.tuples else out


class Trunk(nn.Module):
    """Passes the hidden state by position or by name, and every block another scale."""

    main_input_name = "input_ids"

    def __init__(self, how: str, *, tuples: bool = False) -> None:
        super().__init__()
        self.embed, self.how = nn.Embedding(96, 4), how
        self.blocks = nn.ModuleList(Block(tuples=tuples) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for number, block in enumerate(self.blocks[:2] if self.how == "early exit" else self.blocks):
            if self.how == "without":
                out = block(hidden=None, scale=number)
            else:
                out = block(hidden, number) if self.how == "position" else block(scale=number, hidden=hidden)
            if isinstance(out, tuple):
                out, _attention, _state = out
            hidden = out / 2 if self.how == "rescaled" and number == 0 else out
        return hidden


@pytest.mark.parametrize("how", ["position", "name"])
@pytest.mark.parametrize("tuples", [True, False])
def test_blocks_run_alone_give_what_the_model_gives(how: str, tuples: bool) -> None:
    trunk = Trunk(how, tuples=tuples)
    returned = returned_tuple_length(chain := blocks.Trunk.of(trunk, trunk.blocks), IDS)
    assert returned == (3 if tuples else 0)
    hidden, calls = record_calls(chain, IDS, tuples=returned)
    assert torch.equal(hidden, trunk.embed(IDS))
    for block, call in zip(trunk.blocks, calls, strict=True):
        hidden = run_block(block, call, hidden)
    assert torch.equal(hidden, trunk(IDS))
    last, doubled = trunk.blocks[2], {"linear.weight": 2 * trunk.blocks[2].linear.weight}
    assert not torch.equal(run_block(last, calls[2], hidden, doubled), run_block(last, calls[2], hidden))


def test_models_whose_blocks_cannot_be_run_alone() -> None:
    with pytest.raises(ArchitectureError, match="Trunk does not run its blocks"):
        record_calls(blocks.Trunk.of(early := Trunk("early exit"), early.blocks), IDS, tuples=0)
    with pytest.raises(ArchitectureError, match="without a hidden state"):
        record_calls(blocks.Trunk.of(bare := Trunk("without"), bare.blocks), IDS, tuples=0)


def test_models_that_change_the_hidden_state_between_blocks_are_refused() -> None:
    trunk = Trunk("rescaled")
    with pytest.raises(ArchitectureError, match="changes the hidden state before block 1"):
        record_calls(blocks.Trunk.of(trunk, trunk.blocks), IDS, tuples=0)


def test_the_blocks_are_put_back_after_an_error() -> None:
    trunk = Trunk("position")
    real = list(trunk.blocks)
    with pytest.raises(IndexError):
        record_calls(blocks.Trunk.of(trunk, trunk.blocks), torch.tensor([[1000]]), tuples=0)
    assert list(trunk.blocks) == real


def llama() -> Any:
    return build_skeleton(models.llama.LlamaConfig(**SMALL))


def test_a_table_row_that_does_not_fit_the_model() -> None:
    model = llama()
    names = {name: name for name in model.state_dict()}
    assert len(find_sites(model, names)) == 9
    model.model.layers[1].mlp.up_proj = nn.Identity()
    with pytest.raises(ArchitectureError, match=r"model\.layers\.1\.mlp\.up_proj: expected a linear.*found a Identity"):
        find_sites(model, names)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(ArchitectureError, match="found nothing"):
        find_sites(model, names)


def test_a_matrix_that_is_stored_under_another_kind_of_name() -> None:
    model = llama()
    names = {name: name for name in model.state_dict()} | {"model.layers.2.mlp.up_proj.weight": "packed.qweight"}
    with pytest.raises(ArchitectureError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is not .* a plain weight"):
        find_sites(model, names)


def test_tensors_that_transformers_would_rebuild_are_refused() -> None:
    config = models.mixtral.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    with pytest.raises(ArchitectureError, match=f"{name}.*mixtral"):
        map_names(build_skeleton(config), [name])


def test_materializing_and_letting_go() -> None:
    model = llama()
    weight = torch.rand(32)
    norm = [("model.norm", model.model.norm)]
    with materialized(norm, {"model.norm.weight": "on.disk"}, {"on.disk": weight}.__getitem__, "cpu"):
        assert torch.equal(model.model.norm.weight, weight)
    assert model.model.norm.weight.device.type == "meta"
    with pytest.raises(SourceError, match=r"model\.norm\.weight"), materialized(norm, {}, {}.__getitem__, "cpu"):
        pass


UNLISTED = {
    "stablelm": models.stablelm.StableLmConfig(**SMALL, num_key_value_heads=2),
    "starcoder2": models.starcoder2.Starcoder2Config(**SMALL, num_key_value_heads=2),
    "cohere": models.cohere.CohereConfig(**SMALL, num_key_value_heads=2, pad_token_id=0),
    "granite": models.granite.GraniteConfig(**SMALL, num_key_value_heads=2),
    "bloom": models.bloom.BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=96),
    "rwkv": models.rwkv.RwkvConfig(hidden_size=32, attention_hidden_size=32, intermediate_size=80, num_hidden_layers=3,
                                   vocab_size=96, context_length=64),
    "gptj": models.gptj.GPTJConfig(n_embd=32, n_layer=3, n_head=4, n_inner=80, rotary_dim=4, vocab_size=96,
                                   n_positions=64),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNLISTED)
def test_architectures_outside_the_table_are_found_by_structure(kind: str, settings, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(UNLISTED[kind]).save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    from fips.plan import make_plan

    plan = make_plan(open_source(tmp_path / "dense"), settings())
    assert plan.found_by == "structure"
    assert {site.block for site in plan.sites} == {0, 1, 2}
    assert not [site.name for site in plan.sites if "attn" in site.name or "attention" in site.name]
    fips.compress(tmp_path / "dense", tmp_path / "out", settings())
    with torch.no_grad():
        dense, packed = (fips.load(tmp_path / "out", runtime=r)(input_ids=IDS).logits for r in ("dense", "packed"))
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(dense).all()


def test_mixers_are_no_mlps(settings, tmp_path: Path) -> None:
    config = models.mamba.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    with pytest.raises(ArchitectureError, match="no MLP matrix found in a MambaModel"):
        fips.compress(tmp_path / "dense", tmp_path / "out", settings())


def test_only_a_block_in_the_middle(llama: Path, settings, tmp_path: Path) -> None:
    """Groups without a chosen matrix before and behind; everything there stays bit by bit."""
    from safetensors.torch import load_file

    fips.compress(llama, tmp_path / "out", settings(include=("model.layers.1.*",), group_size=1))
    stored, source = (load_file(f / "model.safetensors") for f in (tmp_path / "out", llama))
    masks = {f"model.layers.1.mlp.{x}_proj.mask" for x in ("gate", "up", "down")}
    assert {n for n in stored if n.endswith(".mask")} == masks
    same = [n for n in source if not n.startswith("model.layers.1.mlp.")]
    assert all(torch.equal(stored[n], source[n]) for n in same)
    planned = fips.inspect(llama, settings(include=("model.layers.1.*",), group_size=1)).to_dict()
    assert [g["name"] for g in planned["groups"]] == ["blocks_1_1"]
