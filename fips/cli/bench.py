"""`fips bench`."""

from typing import Any

import click

from fips.cli.options import model_options, output_options, progress_of, show
from fips.workload import BenchConfig, parse_sizes

_DEFAULT = BenchConfig()


@click.command("bench")
@click.argument("path")
@click.option("--baseline", help="The dense checkpoint PATH was made from, measured in the same way.")
@click.option("--batch-sizes", default=",".join(map(str, _DEFAULT.batch_sizes)), show_default=True,
              help="Sequences, texts or images per pass; every size is measured.")  # fmt: skip
@click.option("--prompt-length", type=int, default=_DEFAULT.prompt_length, show_default=True,
              help="Tokens of a prompt, or of a text of a text encoder.")  # fmt: skip
@click.option("--new-tokens", type=int, default=_DEFAULT.new_tokens, show_default=True,
              help="Tokens a language model generates behind the prompt.")  # fmt: skip
@click.option("--repeats", type=int, default=_DEFAULT.repeats, show_default=True,
              help="Rounds; each measures every model once, in a fresh process.")  # fmt: skip
@click.option("--seed", type=int, default=_DEFAULT.seed, show_default=True, help="Seed of the random inputs.")
@model_options
@output_options
def command(path: str, baseline: str | None, batch_sizes: str, **options: Any) -> None:
    """Speed and memory of the compressed checkpoint at PATH in both runtimes, beside the dense one.

    Load time, memory of the loaded model, peaks while loading and running; tokens per second while a prompt is read
    (prefill) and while new ones are generated (decode), or texts or images per second.
    """
    trust = options.pop("trust_remote_code")
    shown = {name: options.pop(name) for name in ("as_json", "quiet", "verbose")}
    config = BenchConfig(batch_sizes=parse_sizes(batch_sizes), **options)
    progress = progress_of(quiet=shown["quiet"], verbose=shown["verbose"])
    from fips.benchmark import bench

    show(bench(path, baseline, config, trust_remote_code=trust, progress=progress), as_json=shown["as_json"])
