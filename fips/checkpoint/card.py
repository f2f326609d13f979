"""The model card: facts of the report, nothing else. It can be written again from fips_report.json at any time."""

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from fips.checkpoint.plot import PLOT_NAME, mean
from fips.config import GRADIENT_ONLY, MOMENTS_ONLY, CompressionConfig
from fips.errors import FormatError
from fips.tasks import TaskResult

CARD_NAME = "README.md"
_PAPER = "2411.09816"
_UNMEASURED = "not measured"
_KEPT = "<!-- What stands below this line is kept when fips writes the card again. -->"
_CARD = """\
# {name}

{source}, made smaller after training by [fips](https://arxiv.org/abs/{paper}): in place of each MLP matrix a sparse
projection is stored, and one dense basis per group of blocks where the table of groups says `shared`.

## Load

```python
import fips
model = fips.load("path/to/{name}"{trust})  # or its id on the Hub, owner/name
```

After `import fips`, `from_pretrained` of transformers loads it as well. Without fips loading fails with a size
mismatch; it never gives a silently wrong model.

## Size

{sizes}

## Groups

{groups}

Errors are relative squared errors of outputs on the calibration data, averaged over the matrices of a group: of a
truncated SVD with as many parameters, and of what is stored.
{plot}
## Quality

{quality}

## How it was made

```bash
{command}
```

{calibration}

All settings, those that were left at their defaults too:

```json
{settings}
```

Computed on {device}; stored as {dtype}. Versions: {versions}.

## Limits

- Speed and memory are the dense model's: loading rebuilds every weight once. What is smaller is the file.
- The errors above are those on the calibration data; judge the model on data of your own.
{notes}
Checksums of all files are in `fips_report.json`.

{kept}
"""


def card_text(folder: Path, report: dict[str, Any]) -> str:
    """README.md of a compressed checkpoint; what somebody wrote below its last line stays.

    Args:
        folder: The checkpoint.
        report: `fips_report.json`, the only thing that the card is made of.

    Raises:
        FormatError: If the card that is there is a link, or no text.
    """
    path, added = folder / CARD_NAME, ""
    if os.path.lexists(path):
        if path.is_symlink() or not path.is_file():
            raise FormatError(f"{path} is no regular file; put the model card itself there, or remove it.")
        try:
            _, _, added = path.read_text(encoding="utf-8").partition(_KEPT + "\n")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not text in UTF-8 ({error}); save it as that, or remove it.") from error
    return render(report) + added


def render(report: dict[str, Any]) -> str:
    """The card as Markdown with its YAML block."""
    origin = _origin(report)
    source = f"[{origin['hub_id']}](https://huggingface.co/{origin['hub_id']})" if origin["hub_id"] else origin["name"]
    if origin["commit"]:
        source += f" at commit `{origin['commit']}`"
    body = _CARD.format(
        name=f"{origin['name'].split('/')[-1]}-fips", kept=_KEPT,
        trust=", trust_remote_code=True" if report.get("trust_remote_code") else "", source=source, paper=_PAPER,
        sizes=_sizes(report), groups=_groups(report["groups"]), plot=_plot(report), quality=_quality(report),
        command=command_line(report), calibration=_calibration(report["calibration"]),
        settings=json.dumps(_shown_settings(report), indent=2), device=report["device"], dtype=report["dtype"],
        versions=", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "threads"),
        notes="".join(f"- {note}\n" for note in report["notes"]),
    )  # fmt: skip
    return f"---\n{yaml.safe_dump(_metadata(origin), sort_keys=False, allow_unicode=True)}---\n\n{body}"


def command_line(report: dict[str, Any]) -> str:
    """The command that makes this checkpoint; of files only the names are shown."""
    origin, default = _origin(report), dataclasses.asdict(CompressionConfig())
    words = ["fips", "compress", origin["name"], f"{origin['name'].split('/')[-1]}-fips"]
    if report["revision"]:
        words += ["--revision", report["revision"]]
    words += ["--trust-remote-code"] if report.get("trust_remote_code") else []
    settings = _shown_settings(report)
    unread = MOMENTS_ONLY if settings["solver"] == "gradient" else GRADIENT_ONLY  # the command refuses these
    for name, value in settings.items():
        if value in (None, []) or value == default.get(name) or (name in unread and (name, value) != ("steps", 0)):
            continue
        option = "--" + name.replace("_", "-")
        if name == "groups":
            value = ",".join(f"{first}-{last}" for first, last in value)
        for single in value if isinstance(value, (list, tuple)) else [value]:
            words += [option] if single is True else [option, str(single)]
    return shlex.join(words)


def _origin(report: dict[str, Any]) -> dict[str, Any]:
    """`origin` of a report, or what reports from before there was one say of the source."""
    name = Path(report["source"]).name or report["source"]
    empty: dict[str, Any] = {"name": name, "hub_id": None, "commit": None, "task": None, "metadata": {}}
    return {**empty, **report.get("origin", {})}


def _metadata(origin: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if origin["hub_id"]:
        # Of the relations the Hub knows (adapter, merge, quantized, finetune) this is the true one: the weights are
        # other real numbers, fitted to a text. Nothing is quantized: values keep the source's kind of number.
        found = {"base_model": origin["hub_id"], "base_model_relation": "finetune"}
    found["library_name"] = "transformers"
    if origin["task"]:
        found["pipeline_tag"] = origin["task"]
    return {**found, **origin["metadata"], "tags": ["fips", "compressed", f"arxiv:{_PAPER}"]}


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def _sizes(report: dict[str, Any]) -> str:
    sizes = report["sizes"]
    kinds = (("parameters of the MLP matrices (non-zeros)", "parameters", "parameter_share"),
             ("bytes of the MLP matrices", "matrix_bytes", "matrix_share"),
             ("bytes of the checkpoint", "checkpoint_bytes", "checkpoint_share"))  # fmt: skip
    rows = [[what, f"{sizes[key]:,}", f"{sizes['dense_' + key]:,}", f"{sizes[share]:.3f}"]
            for what, key, share in kinds]  # fmt: skip
    return _table(["size", "compressed", f"dense ({report['dtype']})", "kept"], rows)


def _groups(groups: list[dict[str, Any]]) -> str:
    head = ["blocks", "basis", "rank", "sparsity", "error of the SVD", "error", "bytes kept"]
    rows = [[f"{g['first']}-{g['last']}", g["basis"], str(g["rank"]), f"{mean(g['sparsity']):.3f}",
             f"{mean(g['error_before']):.4f}", f"{mean(g['error_after']):.4f}",
             f"{g['packed_bytes'] / g['dense_bytes']:.3f}"] for g in groups]  # fmt: skip
    return _table(head, rows)


def _plot(report: dict[str, Any]) -> str:
    return f"\n![error and sparsity of every group]({PLOT_NAME})\n" if PLOT_NAME in report.get("side_files", {}) else ""


def _quality(report: dict[str, Any]) -> str:
    evaluations = report.get("evaluations", [])
    if not evaluations:
        return "No evaluation was recorded; `fips evaluate --update-card` makes one, beside the dense model."
    return "\n\n".join(_evaluation(found) for found in evaluations)


def _evaluation(found: dict[str, Any]) -> str:
    protocol, dense = found["protocol"], found["baseline"]
    if "perplexity" in found:
        rows = [["perplexity", f"{found['perplexity']:.3f}", f"{dense['perplexity']:.3f}" if dense else _UNMEASURED,
                 f"{found['ratio']:.3f}" if dense else ""]]  # fmt: skip
        how = (f"{protocol['text']} (sha256 `{protocol['text_sha256']}`), {protocol['windows']} windows of "
               f"{protocol['length']} tokens, {protocol['predicted']:,} predicted tokens, BOS "
               f"{protocol['bos']}; {protocol['method']}")  # fmt: skip
    elif "tasks" in found:
        rows, how = _tasks(found)
    elif "top1" in found:
        rows = [[f"{name[:3]}-{name[3:]}", _percent(found[name]), _percent(dense[name]) if dense else _UNMEASURED, ""]
                for name in ("top1", "top5") if found[name] is not None]  # fmt: skip
        rows += [["agreement with the dense model", _percent(found["agreement"]), "", ""]] if dense else []
        labels = f"labels matched {protocol['labels']}" if protocol["labels"] else "no labels"
        how = (f"{found['images']:,} images of {protocol['images']} (sha256 `{protocol['images_sha256']}`), {labels}, "
               f"{protocol['processor']}")  # fmt: skip
    else:
        what = "images" if "images" in found else "texts"
        cosine = _UNMEASURED if found["cosine"] is None else f"{found['cosine']:.4f}"
        rows = [["mean cosine of the pooled features to the dense model's", cosine, "", ""]]
        origin, digest = (protocol[k] for k in (("images", "images_sha256") if what == "images" else
                                                ("text", "text_sha256")))  # fmt: skip
        how = f"{found[what]:,} {what} of {origin} (sha256 `{digest}`)"
    return _table(["", "compressed", "dense", "ratio"], rows) + (
        f"\n\nProtocol: {how}; {protocol['dtype']} on {protocol['device']}, torch {protocol['torch']}, transformers "
        f"{protocol['transformers']}."
    )


def _tasks(found: dict[str, Any]) -> tuple[list[list[str]], str]:
    """Rows, the last column of which is a difference, and the protocol, of scores on tasks of lm-eval."""
    pairs = zip(found["tasks"], found["baseline"]["tasks"] if found["baseline"] else found["tasks"], strict=True)
    rows = []
    for ours, dense in ((TaskResult(**one), TaskResult(**other)) for one, other in pairs):
        compared = [dense.cell(), f"{ours.value - dense.value:+.4f}"] if found["baseline"] else [_UNMEASURED, ""]
        rows.append([ours.name, ours.cell(), *compared])
    protocol = found["protocol"]
    limit = "all documents" if protocol["limit"] is None else f"the first {protocol['limit']} documents of every task"
    return rows, f"lm-eval {protocol['lm_eval']}, {limit}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _calibration(found: dict[str, Any]) -> str:
    if "images" in found:
        augmented = ", flipped and cropped at random" if found["augmented"] else ""
        return (f"Calibration: {found['images']:,} images of {found['origin']} (sha256 `{found['sha256']}`)"
                f"{augmented}, {found['processor']}.")  # fmt: skip
    text = "text sampled from the model itself" if found["origin"] == "self" else found["origin"]
    return (f"Calibration: {text} (sha256 `{found['sha256']}`), {found['tokens']:,} tokens in {found['windows']:,} "
            f"windows of {found['length']:,}, BOS {found['bos']}.")  # fmt: skip


def _shown_settings(report: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the name of a calibration file or folder instead of its place on one machine."""
    settings, origin = dict(report["settings"]), report["calibration"]["origin"]
    text = settings["calibration"]
    if text and text != "self" and not origin.startswith(f"{text.partition(':')[0]}:"):  # no data set of the Hub
        settings["calibration"] = origin
    return settings
