"""A disk that does not keep what was written is noticed before anybody is told that the run is done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fips
from fips.checkpoint.save import CheckpointWriter
from fips.errors import FormatError

UP = "model.layers.0.mlp.up_proj"


def flip(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[1:2].view(torch.uint8)[:1].bitwise_xor_(1)

    return edit


@pytest.mark.parametrize(("edit", "match"), [
    (flip(f"{UP}.weight"), f"{UP}.weight reads back differently from what was written"),
    (flip(f"{UP}.mask"), f"{UP}.mask reads back differently from what was written"),
    (flip("fips_bases.blocks_0_1"), "fips_bases.blocks_0_1 reads back differently from what was written"),
    (flip("lm_head.weight"), "lm_head.weight reads back differently from the source"),
    (flip("model.layers.2.self_attn.q_proj.weight"), "q_proj.weight reads back differently from the source"),
    (lambda tensors: tensors.pop("model.norm.weight"), "differ in name.*model.norm.weight"),
    (lambda tensors: tensors.update(more=torch.zeros(1)), "differ in name.*more"),
    (lambda tensors: tensors.pop(f"{UP}.mask"), f"{UP}.mask is missing"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_damage_on_the_way_to_the_disk(edit: Callable[[dict[str, torch.Tensor]], object], match: str, llama: Path,
                                       settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    finish = CheckpointWriter.finish

    def finish_and_damage(self: CheckpointWriter, max_shard_size: int) -> int:
        size = finish(self, max_shard_size)
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return size

    monkeypatch.setattr(CheckpointWriter, "finish", finish_and_damage)
    with pytest.raises(FormatError, match=match):
        fips.compress(llama, tmp_path / "out", settings(steps=0))
    assert not list(tmp_path.iterdir())
