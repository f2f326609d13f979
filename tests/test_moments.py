"""Second moments and what is derived from them, on a tiny model's real activations."""

from pathlib import Path

import pytest
import torch

import fips
from fips.checkpoint.source import open_source
from fips.models.skeleton import materialized
from fips.models.trace import trace_block
from fips.plan import Plan, make_plan
from fips.stages.moments import MetricCache, Moments, collect_moments, corrected_bias
from fips.stages.stream import Stream, start_stream
from tests.families import write_model


def stream_of(plan: Plan, *, separate: bool = False) -> Stream:
    tokens = torch.randint(3, 90, (6, 16), generator=torch.Generator().manual_seed(0))
    first = [(plan.views[0].path, plan.views[0].module)]
    with materialized(plan.outside_blocks() + first, plan.names, plan.source.read, "cpu"):
        return start_stream(plan.trunk, tokens.split(2), "cpu", separate=separate)


@pytest.fixture(params=["llama", "gpt2"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    folder = write_model(request.param, tmp_path / "dense")
    return make_plan(open_source(folder), fips.CompressionConfig(group_size=2, device="cpu"))


def blocks_of_first_group(plan: Plan):
    views = plan.views[:2]
    return views, materialized([(v.path, v.module) for v in views], plan.names, plan.source.read, "cpu")


def test_moments_are_those_of_the_activations(plan: Plan) -> None:
    stream = stream_of(plan)
    views, real = blocks_of_first_group(plan)
    with real, torch.no_grad():
        collected = collect_moments(views, stream)
        inputs: dict[str, list[torch.Tensor]] = {}
        for batch, hidden in enumerate(stream.dense):
            for view in views:
                trace = trace_block(view, stream.calls[batch][view.number], hidden)
                hidden = trace.hidden
                for name, x in trace.inputs.items():
                    inputs.setdefault(name, []).append(x.double())
            assert torch.equal(hidden, collected.ahead[batch])
        assert collected.ahead is not stream.dense
        expected = list(collected.ahead)
        assert collect_moments(views, stream, in_place=True).ahead is stream.dense
        assert all(torch.equal(a, b) for a, b in zip(stream.dense, expected, strict=True))
    for name, parts in inputs.items():
        x = torch.cat(parts)
        second, cross = collected.of[name].plain()
        assert cross is None
        torch.testing.assert_close(second, x.T @ x / len(x), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(collected.of[name].centered()[0], torch.cov(x.T, correction=0), rtol=1e-4, atol=1e-6)


def test_gate_and_up_share_one_set_of_moments(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "dense")
    plan = make_plan(open_source(folder), fips.CompressionConfig(group_size=2, device="cpu"))
    views, real = blocks_of_first_group(plan)
    with real:
        of = collect_moments(views, stream_of(plan)).of
    assert of["model.layers.0.mlp.gate_proj"] is of["model.layers.0.mlp.up_proj"]
    assert of["model.layers.0.mlp.gate_proj"] is not of["model.layers.1.mlp.gate_proj"]
    assert len({id(m) for m in of.values()}) == 4


@pytest.mark.parametrize("role", ["up", "down"])
def test_the_corrected_bias_is_the_least_squares_one(role: str, tmp_path: Path) -> None:
    folder = write_model("gpt2", tmp_path / "dense")
    plan = make_plan(open_source(folder), fips.CompressionConfig(group_size=2, device="cpu"))
    site = next(s for s in plan.sites if s.role == role)
    generator = torch.Generator().manual_seed(1)
    n = site.d if role == "up" else site.f
    x = torch.randn(50, n, generator=generator, dtype=torch.float64) + 1
    z = x + 0.3 * torch.randn(50, n, generator=generator, dtype=torch.float64)
    moments = Moments.empty(n, "cpu", crossed=True)
    moments.add(z, x)
    W, new = torch.randn(2, site.d, site.f, generator=generator, dtype=torch.float64)
    out = site.f if role == "up" else site.d
    bias = torch.randn(out, generator=generator, dtype=torch.float64)
    target = x @ (W if role == "up" else W.T) + bias
    ours = z @ (new if role == "up" else new.T) + corrected_bias(site, bias, W, new, moments)
    torch.testing.assert_close((target - ours).mean(0), torch.zeros(out, dtype=torch.float64), rtol=0, atol=1e-12)


def test_with_equal_inputs_the_regressed_target_is_the_weight_itself() -> None:
    from fips.models.sites import Site

    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    moments = Moments.empty(6, "cpu", crossed=True)
    moments.add(x, x)
    W = torch.randn(6, 9)
    quadratic = MetricCache().quadratic(Site("a", "a", 0, "up", 6, 9, transposed=True), W, moments, has_bias=False)
    torch.testing.assert_close(quadratic.W, W, rtol=1e-5, atol=1e-5)


def test_the_regressed_target_lowers_the_error_on_shifted_inputs() -> None:
    from fips.models.sites import Site

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4000, 6, generator=generator)
    z = 0.7 * x + 0.1 * torch.randn(4000, 6, generator=generator)  # the compressed prefix shrinks its activations
    moments = Moments.empty(6, "cpu", crossed=True)
    moments.add(z, x)
    W = torch.randn(6, 9, generator=generator)
    for role, f in (("up", 9), ("down", 6)):
        weight = W if role == "up" else torch.randn(5, 6, generator=generator)
        site = Site("a", "a", 0, role, weight.shape[0], f, transposed=role == "up")
        target = MetricCache().quadratic(site, weight, moments, has_bias=False).W
        y = x @ weight if role == "up" else x @ weight.T
        old, new = (z @ (M if role == "up" else M.T) for M in (weight, target))
        assert (y - new).norm() < 0.5 * (y - old).norm()


def test_inputs_of_the_compressed_prefix_change_the_result(llama: Path, settings, tmp_path: Path) -> None:
    dense = fips.compress(llama, tmp_path / "a", settings(steps=1))
    prefix = fips.compress(llama, tmp_path / "b", settings(steps=1, inputs="compressed"))
    assert dense.groups[0].error_after == pytest.approx(prefix.groups[0].error_after, rel=1e-3)
    assert dense.files["model.safetensors"] != prefix.files["model.safetensors"]


def test_the_sensitivity_is_the_squared_jacobian_of_the_block(plan: Plan) -> None:
    """Averaged over many draws of the signs it is Σ_out (∂out/∂y_k)² per token, here from central differences."""
    stream = stream_of(plan)
    stream.dense, stream.calls = stream.dense[:1], stream.calls[:1]
    stream.compressed = stream.dense
    views, real = blocks_of_first_group(plan)
    site = views[0].sites[0]
    with real:
        drawn = [collect_moments(views[:1], stream, seed).sensitivity[site.name] for seed in range(240)]
        linear, step, exact = views[0].linear(site), 1e-2, []
        for k in (0, 7, 31):
            outs = []
            for sign in (1, -1):
                shift = torch.zeros(site.f)
                shift[k] = sign * step
                handle = linear.register_forward_hook(lambda _m, _a, out, shift=shift: out + shift)
                with torch.no_grad():
                    outs.append(trace_block(views[0], stream.calls[0][0], stream.dense[0]).hidden)
                handle.remove()
            exact.append((((outs[0] - outs[1]) / (2 * step)) ** 2).sum() / stream.dense[0][..., 0].numel())
    found = torch.stack(drawn).mean(0)[[0, 7, 31]]
    torch.testing.assert_close(found, torch.stack(exact), rtol=0.15, atol=1e-7)


def test_activations_that_work_in_place_are_fine(tmp_path: Path) -> None:
    plan = make_plan(open_source(write_model("llama", tmp_path / "dense")),
                     fips.CompressionConfig(group_size=2, device="cpu"))  # fmt: skip
    views, real = blocks_of_first_group(plan)
    with real:
        plain = collect_moments(views, stream_of(plan), 3).sensitivity
        for view in views:
            view.module.mlp.act_fn = torch.nn.SiLU(inplace=True)
        in_place = collect_moments(views, stream_of(plan), 3).sensitivity
    for name, c in plain.items():
        torch.testing.assert_close(in_place[name], c)


def test_channels_weigh_by_the_root_and_never_vanish(plan: Plan) -> None:
    views, real = blocks_of_first_group(plan)
    with real:
        collected = collect_moments(views, stream_of(plan), 0)
        without = collect_moments(views, stream_of(plan))
    up = next(s for s in views[0].sites if s.role == "up")
    down = next(s for s in views[0].sites if s.role == "down")
    c = collected.sensitivity[up.name]
    torch.testing.assert_close(collected.channels(up), (c / c.mean() + 0.01).sqrt())
    assert torch.equal(collected.sensitivity[down.name], torch.ones(down.d))  # it is added to the hidden state
    assert collected.channels(down) is None
    assert without.channels(up) is None
    collected.sensitivity[up.name] = torch.zeros(up.f)
    assert collected.channels(up) is None
    for name, moments in without.of.items():
        assert torch.equal(moments.second, collected.of[name].second)
