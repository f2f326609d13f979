"""More of the contract of image models and text encoders: bit by bit, with other heads, and as a run streams them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fips
from fips import stream_groups
from fips.checkpoint.source import open_source
from fips.models.skeleton import materialized
from fips.plan import Plan, make_plan
from fips.stages.stream import advance, enter_stage, start_stream
from tests.conftest import SETTINGS
from tests.test_families import keeping_everything, rebuilt
from tests.vision_kinds import EVERY, KINDS, load_dense, write_images, write_kind

TOWERS = ("clip", "siglip")
each_kind = pytest.mark.parametrize("kind", KINDS)


def quick(kind: str, images: Path, text: Path, **overrides: Any) -> fips.CompressionConfig:
    """Settings of a quick run."""
    data = text if EVERY[kind].reads_text else images
    return fips.CompressionConfig(**{**SETTINGS, "calibration": str(data), "rounds": 2, **overrides})


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "train", 6)


@pytest.fixture(scope="module")
def settings(images: Path, calibration: Path) -> Callable[..., fips.CompressionConfig]:
    return lambda kind, **overrides: quick(kind, images, calibration, **overrides)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, settings) -> Callable[[str], tuple[Path, Path]]:
    """Makes the dense and the compressed checkpoint of a kind, each once. Do not change them; copy them."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(kind: str) -> tuple[Path, Path]:
        if kind not in known:
            folder = tmp_path_factory.mktemp("kind")
            dense = write_kind(kind, folder / "dense")
            assert fips.compress(dense, folder / "out", settings(kind)).verified
            known[kind] = dense, folder / "out"
        return known[kind]

    return make


def inputs(kind: str, config: Any, count: int = 2) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 96, (count, 12), generator=random)
    if EVERY[kind].reads_text:
        return {"input_ids": ids}
    side = getattr(config, "vision_config", config).image_size
    pixels = {"pixel_values": torch.randn(count, 3, side, side, generator=random)}
    return {**pixels, "input_ids": ids} if kind in TOWERS else pixels


def outputs(kind: str, model: Any) -> dict[str, torch.Tensor]:
    """Every tensor a model gives; what a pooler without weights in the checkpoint gives is random."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some models drop patches at random
        out = model(**inputs(kind, model.config))
    left_out = {"pooler_output"} if "without pooler" in kind else set()
    found = {name: value for name, value in out.items() if isinstance(value, torch.Tensor) and name not in left_out}
    assert found
    return found


@each_kind
def test_compress_save_load_gives_the_saved_outputs(kind: str, pair) -> None:
    dense, out = pair(kind)
    expected = outputs(kind, rebuilt(dense, out, load_dense))
    loaded = load_dense(out)
    found, packed = outputs(kind, loaded), outputs(kind, fips.load(out, runtime="packed"))
    source = outputs(kind, load_dense(dense))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        torch.testing.assert_close(packed[name], value, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(source[name], value) for name, value in expected.items())
    assert type(loaded).__name__ == KINDS[kind].name
    files = ["tokenizer.json"] if KINDS[kind].reads_text else ["preprocessor_config.json"]
    assert [(out / f).read_bytes() for f in files] == [(dense / f).read_bytes() for f in files]


@each_kind
def test_every_matrix_of_every_stage_is_found(kind: str, pair) -> None:
    dense, out = pair(kind)
    plan = make_plan(open_source(dense), fips.CompressionConfig(device="cpu", group_size=99))
    assert plan.found_by == "table"
    assert len(plan.sites) == KINDS[kind].matrices
    assert sorted({(s.block, s.role) for s in plan.sites}) == [
        (b, r) for b in range(KINDS[kind].stages[-1] + 1) for r in ("down", "up")]  # fmt: skip
    assert tuple(group.last for group in plan.groups) == KINDS[kind].stages
    assert all(len({site.d for site in group.sites}) == 1 for group in plan.groups)
    kept = {f"{site.disk_name}.{leaf}" for site in plan.sites for leaf in ("weight", "bias")}
    before, after = load_file(dense / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if name not in kept)
    report = json.loads((out / "fips_report.json").read_text())
    assert sum(len(group["sparsity"]) for group in report["groups"]) == KINDS[kind].matrices


@each_kind
def test_full_rank_without_zeros_gives_the_source_outputs(kind: str, pair, settings, tmp_path: Path) -> None:
    dense, _ = pair(kind)
    with keeping_everything():
        fips.compress(dense, tmp_path / "out", settings(kind, steps=0))
    expected, found = outputs(kind, load_dense(dense)), outputs(kind, load_dense(tmp_path / "out"))
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm(), name


@contextmanager
def watched(model: Any, paths: list[str]) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden state in and out of every block while a model runs."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            entering = args[0] if args else next(v for v in kwargs.values() if isinstance(v, torch.Tensor))
            seen[path] = entering, out[0] if isinstance(out, tuple) else out

        return hook

    handles = [model.get_submodule(p).register_forward_hook(keep(p), with_kwargs=True) for p in paths]
    yield seen
    for handle in handles:
        handle.remove()


def replay(plan: Plan, batch: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What goes in and out of every block when they run one by one, as a compression runs them."""
    outside, read = plan.outside_blocks(), plan.source.read
    first = [(plan.views[0].path, plan.views[0].module)]
    with materialized(outside + first, plan.names, read, "cpu"):
        stream = start_stream(plan.trunk, [batch], "cpu", separate=False)
    found = []
    for view in plan.views:
        entering = stream.dense[0]
        with materialized([(view.path, view.module)], plan.names, read, "cpu"), torch.no_grad():
            stream.dense[0] = advance(stream, [view], 0, None)
        found.append((entering, stream.dense[0]))
        if plan.ends_stage(view.number):
            with materialized(outside, plan.names, read, "cpu"):
                enter_stage(stream, plan.trunk, view.number)
    return found


def check_replay(kind: str, dense: Path) -> None:
    """Blocks run one by one are given, and give, bit by bit what they are given and give in the whole model."""
    plan, model = make_plan(open_source(dense), fips.CompressionConfig(device="cpu", budget=0.1)), load_dense(dense)
    batch = inputs(kind, model.config, 3)
    paths = [view.path for view in plan.views]
    with watched(model, paths) as seen, torch.no_grad():
        model(**batch)
    found = replay(plan, batch[plan.trunk.module.main_input_name])
    assert len(found) == len(seen) == EVERY[kind].stages[-1] + 1
    for path, (entering, leaving) in zip(paths, found, strict=True):
        assert torch.equal(entering, seen[path][0]), path
        assert torch.equal(leaving, seen[path][1]), path


@each_kind
def test_blocks_run_one_by_one_give_the_models_own_hidden_states(kind: str, pair) -> None:
    check_replay(kind, pair(kind)[0])


@pytest.mark.parametrize("kind", ["swin", "bert classifier", "dinov2"])
def test_the_compressed_prefix_is_that_of_the_loaded_model(kind: str, pair, settings, tmp_path, monkeypatch) -> None:
    """With inputs of the compressed prefix every group sees what the compressed model itself gives there."""
    dense, _ = pair(kind)
    batches: list[torch.Tensor] = []
    states: list[tuple[str, list[torch.Tensor]]] = []

    def starting(trunk: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        batches.extend(given)
        return start_stream(trunk, batches, *args, **kwargs)

    def compressing(run: Any, group: Any, views: Any, stream: Any) -> Any:
        states.append((views[0].path, [t.clone() for t in stream.compressed]))
        return real(run, group, views, stream)

    real = stream_groups._compress_group
    monkeypatch.setattr(stream_groups, "start_stream", starting)
    monkeypatch.setattr(stream_groups, "_compress_group", compressing)
    fips.compress(dense, tmp_path / "out", settings(kind, inputs="compressed", group_size=1))
    model = load_dense(tmp_path / "out")
    assert len(states) == KINDS[kind].stages[-1] + 1
    for number, batch in enumerate(batches):
        with watched(model, [path for path, _ in states]) as seen, torch.no_grad():
            model(batch)
        for path, compressed in states:
            torch.testing.assert_close(compressed[number], seen[path][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TOWERS)
def test_the_tower_that_reads_text_stays_as_it_is(kind: str, pair) -> None:
    dense, out = pair(kind)
    models = [load_dense(folder) for folder in (dense, out)]
    ids = inputs(kind, models[0].config)["input_ids"]
    with torch.no_grad():
        before, after = (model.text_model(input_ids=ids).last_hidden_state for model in models)
    assert torch.equal(before, after)
    names = json.loads((out / "config.json").read_text())["quantization_config"]["groups"]
    assert all("text_model" not in member["name"] for group in names for member in group["members"])


def test_a_pooler_may_be_absent_only_where_nothing_reads_it(settings, tmp_path: Path) -> None:
    bare, classifier = (write_kind(kind, tmp_path / kind) for kind in ("bert without pooler", "bert classifier"))
    assert fips.compress(bare, tmp_path / "out", settings("bert without pooler")).verified
    assert fips.verify(tmp_path / "out", bare).ok
    tensors = {n: t for n, t in load_file(classifier / "model.safetensors").items() if "pooler" not in n}
    save_file(tensors, classifier / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(fips.errors.SourceError, match=r"lacks bert\.pooler\.dense"):
        fips.compress(classifier, tmp_path / "no", settings("bert classifier"))
