"""Ways to damage a checkpoint folder, each drawn from a seeded generator.

A damage is *loud* when whoever opens the folder must notice or be unharmed; it is *quiet* when it leaves a folder that
another model could have, so that only a checksum shows it.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOUD, QUIET = True, False
JUNK = [None, True, False, 0, 1, -1, 3, 7, 1.5, -0.5, 10**30, -(10**30), float("nan"), float("inf"), "", "x", "float16",
        "\ud800", "a" * 5000, [], {}, [None], [[]], {"a": 1}, "../x", "model", 2**31, 2**63]  # fmt: skip
NAMES = ["../x.safetensors", "/etc/passwd", "..", ".", "", "sub/x.safetensors", "nothing.safetensors", "\0", "x" * 5000,
         "\ud800.safetensors", "config.json", "model\nx.safetensors", "..\\x.safetensors", None, 3, [], {},
         True]  # fmt: skip
_TEXTS = [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe{", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"NaN",
          b"9" * 10_000, b"\xef\xbb\xbf{}", b'{"weight_map": NaN}', b'{"model_type": "llama"}', b"\0" * 64]  # fmt: skip
Damage = Callable[[random.Random, Path], bool]


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def flip_a_data_bit(rng: random.Random, folder: Path) -> bool:
    path = rng.choice(weights(folder))
    header, data = read_header(path)
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    write_header(path, header, bytes(changed))
    return QUIET


def flip_a_mask_bit(rng: random.Random, folder: Path) -> bool:
    """One entry more or less than there are values."""
    found = [(p, n) for p in weights(folder) for n in read_header(p)[0] if n.endswith(".mask")]
    path, name = rng.choice(found)
    header, data = read_header(path)
    start, end = header[name]["data_offsets"]
    changed = bytearray(data)
    changed[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    write_header(path, header, bytes(changed))
    return LOUD


def flip_a_header_bit(rng: random.Random, folder: Path) -> bool:
    path = rng.choice(weights(folder))
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    raw[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return LOUD


def header_length(rng: random.Random, folder: Path) -> bool:
    path = rng.choice(weights(folder))
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    wrong = rng.choice([0, 1, 7, length - 8, length + 8, len(raw), 10**8, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", wrong) + raw[8:])
    return LOUD


def header_entry(rng: random.Random, folder: Path) -> bool:
    """Shapes, dtypes and offsets of one tensor that cannot be, or that claim too much."""
    path = rng.choice(weights(folder))
    header, data = read_header(path)
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry = header[name]
    start, end = entry["data_offsets"]
    key, value = rng.choice([
        ("shape", [2**40]), ("shape", [2**62, 2**62]), ("shape", [-1]), ("shape", []), ("shape", [0]),
        ("shape", [1.5]), ("shape", "x"), ("shape", None), ("shape", [*entry["shape"], 1]), ("shape", [1] * 5000),
        ("shape", entry["shape"][::-1] if len(set(entry["shape"])) > 1 else [1, *entry["shape"]]),
        ("dtype", "F64"), ("dtype", "I32"), ("dtype", "U8"), ("dtype", "F8_E4M3"), ("dtype", "X"), ("dtype", 3),
        ("dtype", "BOOL"), ("dtype", None), ("data_offsets", [0, end]), ("data_offsets", [end, start]),
        ("data_offsets", [start, 2**62]), ("data_offsets", [-8, end]), ("data_offsets", [start]),
        ("data_offsets", [start, end + 8]), ("data_offsets", [start + 4, end + 4]), ("data_offsets", "x"),
        ("data_offsets", [0, 0]), ("extra", 1),
    ])  # fmt: skip
    header[name] = {**entry, key: value}
    if rng.random() < 0.1:
        del header[name][key]
    write_header(path, header, data)
    return LOUD


def _two_tensors(rng: random.Random, folder: Path) -> tuple[Path, str, str]:
    names = {p: sorted(n for n in read_header(p)[0] if n != "__metadata__") for p in weights(folder)}
    path = rng.choice([p for p in names if len(names[p]) > 1])
    return path, *rng.sample(names[path], 2)


def header_shape(rng: random.Random, folder: Path) -> bool:
    """Renamed, swapped, doubled and dropped entries, and whole headers that are something else."""
    path, first, second = _two_tensors(rng, folder)
    header, data = read_header(path)
    kind = rng.randrange(6)
    if kind == 0:
        other = rng.choice(["", "x", first + "x", first[1:], "\0", second + ".mask", "fips_bases.x"])
        header[other] = header.pop(first)
    elif kind == 1:
        header[first]["data_offsets"] = header[second]["data_offsets"]
    elif kind == 2:
        header.pop(first)
    elif kind == 3:
        text = json.dumps(header)[:-1] + f", {json.dumps(second)}: {json.dumps(header[first])}}}"
        write_header(path, text.encode(), data)
        return LOUD
    elif kind == 4:
        header["__metadata__"] = rng.choice([JUNK[12], 3, [], {"format": 3}, {"format": "x"}, None, {"a": {"b": 1}}])
    else:
        write_header(path, rng.choice(_TEXTS), data)
        return LOUD
    write_header(path, header, data)
    return LOUD


def swap_tensors(rng: random.Random, folder: Path) -> bool:
    """Two names exchanged: where shapes agree, nothing but a checksum can tell."""
    path, first, second = _two_tensors(rng, folder)
    header, data = read_header(path)
    header[first], header[second] = header[second], header[first]
    write_header(path, header, data)
    return QUIET


def cut_or_grow(rng: random.Random, folder: Path) -> bool:
    path = rng.choice([*weights(folder), folder / "config.json", *folder.glob("*.index.json")])
    raw = path.read_bytes()
    cut = raw[: rng.randrange(len(raw))]
    path.write_bytes(rng.choice([cut, cut, raw + b"\0" * rng.randrange(1, 64), raw + raw, raw + b"}", b""]))
    return LOUD


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += _places(value[key])
    return found


def edit_json(rng: random.Random, path: Path, inside: str | None = None) -> None:
    whole = json.loads(path.read_text())
    place, key = rng.choice(_places(whole.get(inside, whole)))
    kind = rng.randrange(5)
    if kind == 0 and isinstance(place, dict):
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[rng.choice(["x", "", "auto_map", "\ud800"])] = rng.choice(JUNK)
    elif kind == 2 and isinstance(place, list):
        place.append(place[key])
    elif kind == 3 and isinstance(place[key], int):
        place[key] += rng.choice([-1, 1, 8, -8])
    else:
        place[key] = rng.choice(JUNK)
    path.write_text(json.dumps(whole))


def config_value(rng: random.Random, folder: Path) -> bool:
    edit_json(rng, folder / "config.json")
    return QUIET


def description(rng: random.Random, folder: Path) -> bool:
    edit_json(rng, folder / "config.json", "quantization_config")
    return LOUD


def config_text(rng: random.Random, folder: Path) -> bool:
    """Bytes of config.json: flipped, doubled keys, nested too deep, something else."""
    path = folder / "config.json"
    raw = path.read_bytes()
    kind = rng.randrange(4)
    if kind == 0:
        changed = bytearray(raw)
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
    elif kind == 1:
        junk = rng.choice(["hidden_size", "model_type", "quantization_config", "architectures", "dtype"])
        path.write_bytes(raw.rstrip()[:-1] + f', "{junk}": {json.dumps(rng.choice(JUNK))}}}'.encode())
    elif kind == 2:
        depth = rng.choice([50, 300, 900, 5000, 200_000])
        path.write_bytes(raw.rstrip()[:-1] + b', "deep": ' + b"[" * depth + b"]" * depth + b"}")
    else:
        path.write_bytes(rng.choice(_TEXTS))
    return QUIET


def index(rng: random.Random, folder: Path) -> bool:
    """The index of the shards: names outside, wrong, missing, of the wrong kind; or an index beside a single file."""
    found = list(folder.glob("*.index.json"))
    path = found[0] if found else folder / "model.safetensors.index.json"
    if not found:
        names = [n for p in weights(folder) for n in read_header(p)[0] if n != "__metadata__"]
        shard = rng.choice([*NAMES, "model.safetensors"])
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard)}))
        return LOUD
    kind = rng.randrange(5)
    whole = json.loads(path.read_text())
    name = rng.choice(sorted(whole["weight_map"]))
    if kind == 0:
        whole["weight_map"][name] = rng.choice([*NAMES, *whole["weight_map"].values()])
    elif kind == 1:
        del whole["weight_map"][name]
    elif kind == 2:
        whole["weight_map"][rng.choice(["x", "", name + "x"])] = rng.choice([*NAMES, whole["weight_map"][name]])
    elif kind == 3:
        path.write_bytes(rng.choice(_TEXTS))
        return LOUD
    else:
        key = rng.choice(["metadata", "weight_map"])
        whole[key] = rng.choice(JUNK)
        if rng.random() < 0.3:
            del whole[key]
    path.write_text(json.dumps(whole))
    return LOUD


def files(rng: random.Random, folder: Path) -> bool:
    """A file that is gone, a folder, a link, a pipe, another one; or one file too many."""
    path = rng.choice([*weights(folder), folder / "config.json", folder / "tokenizer.json"])
    kind = rng.randrange(9)
    outside = folder.parent / "outside" / path.name
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind in (2, 3):
        outside.parent.mkdir(exist_ok=True)
        path.rename(outside)
        path.symlink_to(outside if kind == 2 else Path("..") / "outside" / path.name)
    elif kind == 4:
        path.rename(folder / "elsewhere")
        path.symlink_to("elsewhere")
    elif kind == 5:
        path.unlink()
        rng.choice([lambda: os.mkfifo(path), lambda: path.symlink_to(path.name), lambda: path.symlink_to("none")])()
    elif kind == 6:
        shutil.copy(rng.choice(weights(folder)), folder / "model-00009-of-00009.safetensors")
    elif kind == 7:
        path.write_bytes(rng.choice(weights(folder)).read_bytes())
    else:
        (folder / rng.choice(["x.py", "adapter_model.bin", "pytorch_model.bin"])).write_bytes(b"\x80\x04x.")
    return LOUD


def own_code(rng: random.Random, folder: Path) -> bool:
    """A config.json that asks for code of its own; running it would leave a file."""
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'executed')!r}, 'w').close()\n")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"]
    config["auto_map"] = {name: rng.choice(["evil.Evil", "x--evil.Evil"]) for name in names}
    config["trust_remote_code"] = True
    if rng.random() < 0.7:
        config["model_type"] = "evil"
    if rng.random() < 0.5:
        config["architectures"] = [rng.choice(["Evil", "Trainer", "pipeline", "AutoModel", "os"])]
    path.write_text(json.dumps(config))
    return QUIET


EITHER: list[Damage] = [flip_a_data_bit, flip_a_header_bit, header_length, header_entry, header_shape, swap_tensors,
                        cut_or_grow, config_value, config_text, index, files, own_code]  # fmt: skip
COMPRESSED: list[Damage] = [*EITHER, flip_a_mask_bit, description, description, header_entry]
