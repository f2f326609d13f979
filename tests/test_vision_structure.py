"""Image models and text encoders outside the table: compressed whole, or refused with one clear error."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fips
from fips.checkpoint.reload import weight_files
from fips.checkpoint.source import open_source
from fips.errors import ArchitectureError
from fips.models.discover import discover
from fips.plan import make_plan
from tests.test_families import rebuilt
from tests.test_vision_kinds import check_replay, outputs, quick
from tests.vision_kinds import REFUSED, UNLISTED, load_dense, write_images, write_kind


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "train", 6)


@pytest.mark.parametrize("kind", UNLISTED)
def test_what_is_found_by_structure_is_compressed_whole(kind: str, images: Path, calibration: Path, tmp_path) -> None:
    dense, out = write_kind(kind, tmp_path / "dense"), tmp_path / "out"
    settings = quick(kind, images, calibration)
    plan = make_plan(open_source(dense), settings)
    wanted = UNLISTED[kind]
    assert plan.found_by == "structure"
    assert len(plan.sites) == wanted.matrices == 2 * (wanted.stages[-1] + 1)
    assert set(wanted.stages) <= {group.last for group in plan.groups}
    if kind != "vit mae":  # it drops patches at random
        check_replay(kind, dense)
    fips.compress(dense, out, settings)
    expected, found = outputs(kind, rebuilt(dense, out, load_dense)), outputs(kind, load_dense(out))
    source = outputs(kind, load_dense(dense))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert any(not torch.equal(source[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_compressed_whole_is_refused(kind: str, images: Path, calibration: Path, tmp_path) -> None:
    dense = write_kind(kind, tmp_path / "dense")
    words = {"levit": "in several places", "mobilebert": "in several places", "funnel": "in several places",
             "t5": "an encoder and a decoder", "albert": "cannot be run block by block", "squeezebert": "no MLP matrix",
             "videomae": "cannot be run block by block", "mobilevit": "no MLP matrix"}  # fmt: skip
    with pytest.raises(ArchitectureError, match=words[kind]) as error:
        fips.compress(dense, tmp_path / "out", quick(kind, images, calibration))
    assert re.fullmatch(r"[^\n]+", str(error.value))
    assert not (tmp_path / "out").exists()


def test_random_masks_of_patches_do_not_make_two_runs_differ(images: Path, calibration: Path, tmp_path: Path) -> None:
    dense = write_kind("vit mae", tmp_path / "dense")
    digests = []
    for name in ("one", "two"):
        fips.compress(dense, tmp_path / name, quick("vit mae", images, calibration))
        digests.append([path.read_bytes() for path in weight_files(tmp_path / name)])
    assert digests[0] == digests[1]


class _Trunk(nn.Module):
    """Blocks that are named by their list."""

    config = None

    def __init__(self, **lists: list[nn.Module]) -> None:
        super().__init__()
        for name, blocks in lists.items():
            self.add_module(name, nn.ModuleList(blocks))


def _mlp(d: int = 4, f: int = 10) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(d, f), "down": nn.Linear(f, d)})


def test_matrices_in_several_places() -> None:
    assert discover(_Trunk(layers=[_mlp(), _mlp()])).blocks == "layers"
    stages = [nn.ModuleList([_mlp(4, 10)]), nn.ModuleList([_mlp(6, 14)])]
    assert discover(_Trunk(stages=stages)).blocks == "stages.*"
    two = nn.ModuleDict({"first": _mlp(), "second": _mlp()})
    for trunk in (_Trunk(layers=[two, two]), _Trunk(layers=[_mlp(), two]), _Trunk(a=[_mlp()], b=[_mlp(), _mlp()]),
                  _Trunk(layers=[_mlp()], tail=[nn.Linear(4, 4), _mlp()])):  # fmt: skip
        with pytest.raises(ArchitectureError, match="in several places"):
            discover(trunk)
