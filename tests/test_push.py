"""`fips push` against a Hub on this machine, spoken to by the real client."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import fips
from fips.errors import ConfigError, FormatError, HubError, SourceError
from fips.publishing import PushConfig
from tests.command import run
from tests.hub_client import REPO, contents, environment, on_hub, point_at
from tests.hub_state import HubServer
from tests.test_families import logits


def test_a_pushed_model_comes_back_byte_for_byte(hub: HubServer, compressed: Path, tmp_path: Path) -> None:
    result = fips.push(compressed, REPO)
    assert on_hub(hub) == contents(compressed)
    assert result.files == {name: len(content) for name, content in contents(compressed).items()}
    assert result.bytes == sum(result.files.values())
    assert (result.url, result.private, result.dry_run) == (f"{hub.url}/{REPO}", True, False)
    assert result.commit == hub.repos[REPO].refs["main"]
    assert {r.token for r in hub.requests} <= {"hf_alice", None}  # an upload's URL is its own permission
    folder = Path(huggingface_hub.snapshot_download(REPO, local_dir=tmp_path / "back"))
    shutil.rmtree(folder / ".cache")
    back = contents(folder)
    back.pop(".gitattributes")
    assert back == contents(compressed)
    for runtime in ("dense", "packed"):
        assert torch.equal(logits(fips.load(folder, runtime)), logits(fips.load(compressed, runtime)))


def test_the_command(hub: HubServer, compressed: Path) -> None:
    done = run("push", compressed, REPO, "-q", "--commit-message", "Small and good")
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in contents(compressed))
    assert f"{hub.url}/{REPO} (private), commit {hub.repos[REPO].refs['main']}" in done.out
    assert hub.repos[REPO].titles == ["initial commit", "Small and good"]
    found = json.loads(run("push", compressed, "bob/small", "--json", "-q", "--token", "hf_bob").out)
    assert found == fips.push(compressed, "bob/small", token="hf_bob").to_dict()
    assert found["bytes"] == sum(found["files"].values())


def test_the_same_folder_again_makes_no_commit(hub: HubServer, compressed: Path) -> None:
    first = fips.push(compressed, REPO)
    assert fips.push(compressed, REPO).commit == first.commit
    assert len(hub.sent("PUT", "/lfs/")) == len(hub.lfs)
    assert len(hub.sent("POST", "/commit/")) == 1


@pytest.mark.parametrize("public", [False, True])
def test_visibility(public: bool, hub: HubServer, compressed: Path) -> None:
    done = run("push", compressed, REPO, "-q", *(["--public"] if public else []))
    assert done.code == 0
    assert hub.sent("POST", "/api/repos/create")[0].json()["visibility"] == ("public" if public else "private")
    assert hub.repos[REPO].private is not public
    with pytest.raises(HubError, match="leave --public out" if not public else "pass --public"):
        fips.push(compressed, REPO, PushConfig(public=not public))


def test_a_branch_is_made_when_it_is_missing(hub: HubServer, compressed: Path) -> None:
    result = fips.push(compressed, REPO, PushConfig(revision="half"))
    assert on_hub(hub, "half") == contents(compressed)
    assert on_hub(hub) == {}
    assert result.commit == hub.repos[REPO].refs["half"]
    assert fips.push(compressed, REPO, PushConfig(revision="half")).commit == result.commit


def test_a_pull_request(hub: HubServer, compressed: Path) -> None:
    result = fips.push(compressed, REPO, PushConfig(create_pr=True))
    assert result.url == f"{hub.url}/{REPO}/discussions/1"
    assert on_hub(hub, "refs/pr/1") == contents(compressed)
    assert on_hub(hub) == {}


def test_a_dry_run_contacts_nothing(hub: HubServer, compressed: Path) -> None:
    done = run("push", compressed, REPO, "--dry-run", "-q")
    assert done.code == 0
    for name, content in contents(compressed).items():
        assert f"{len(content):,}" in next(line for line in done.out.splitlines() if line.startswith(name))
    assert "nothing was sent" in done.out
    assert hub.requests == []
    found = fips.push(compressed, REPO, PushConfig(public=True), dry_run=True)
    assert (found.dry_run, found.url, found.commit, found.private) == (True, None, None, False)


def test_other_files_on_the_hub_are_removed_only_when_told(hub: HubServer, compressed: Path) -> None:
    repo = hub.add_repo(REPO, {"model-00001-of-00002.safetensors": b"old", "notes/a.txt": b"mine"}, private=True)
    with pytest.raises(HubError, match=r"model-00001-of-00002\.safetensors, notes/a\.txt.*--overwrite"):
        fips.push(compressed, REPO)
    assert repo.titles == ["initial commit"]
    assert run("push", compressed, REPO, "--overwrite", "-q").code == 0
    assert on_hub(hub) == contents(compressed)
    assert len(repo.titles) == 2


def fails(*argv: object, code: int = 1) -> str:
    """Runs a push that must fail with one clear line which holds no token, and returns the line."""
    done = run("push", *argv, "-q")
    lines = done.err.strip().splitlines()
    assert (done.code, done.out, len(lines)) == (code, "", 1), done.err
    assert "hf_" not in done.err
    return lines[0]


def test_tokens(hub: HubServer, compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not accept the token" in fails(compressed, REPO, "--token", "hf_wrong")
    assert "the token may not do this" in fails(compressed, REPO, "--token", "hf_reader")
    assert "bob has to be you" in fails(compressed, "bob/small")
    assert "no user or organization nobody" in fails(compressed, "nobody/small")
    assert not hub.repos
    before = len(hub.requests)
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in fails(compressed, REPO)
    assert len(hub.requests) == before
    assert run("push", compressed, REPO, "-q", "-v", "--token", "hf_wrong_again").err.count("hf_wrong_again") == 0


def test_a_token_that_cannot_be_one_is_not_shown(
    hub: HubServer, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("push", compressed, REPO, "-q", "--token", " hf_alice\n").code == 0
    before = len(hub.requests)
    for token in ("hf_al\nice", "hf_al ice", "hf_\u00e4lice"):
        for flags in (["-q"], ["-q", "-v"]):
            done = run("push", compressed, REPO, "--token", token, *flags)
            assert (done.code, done.out) == (1, "")
            assert "copy it again" in done.err
            assert "hf_" not in done.err
    assert len(hub.requests) == before
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", raises_its_token)
    assert "(the token) is odd" in fails(compressed, REPO)
    assert "hf_alice" not in run("push", compressed, REPO, "-q", "-v").err


def raises_its_token(self: huggingface_hub.HfApi, *_args: object, **_kwargs: object) -> None:
    raise ValueError(f"{self.token} is odd")


def test_a_reader_of_an_existing_repository(hub: HubServer, compressed: Path) -> None:
    hub.add_repo(REPO, {}, private=True)
    assert "the token may not do this" in fails(compressed, REPO, "--token", "hf_reader")
    assert on_hub(hub) == {}


def test_no_network(compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    point_at(monkeypatch, tmp_path, url)
    assert f"{url} cannot be reached" in fails(compressed, REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.utils.close_session()
    assert "HF_HUB_OFFLINE is set" in fails(compressed, REPO)
    huggingface_hub.utils.close_session()


@pytest.mark.parametrize("part", ["/api/repos/create", "/commit/"])
def test_a_server_in_trouble(part: str, hub: HubServer, compressed: Path) -> None:
    hub.fail_with = (part, 500)
    assert "status 500 (the server has a bad day" in fails(compressed, REPO)


def test_an_answer_that_makes_no_sense(hub: HubServer, compressed: Path) -> None:
    hub.fail_with = ("/preupload/", 200)
    assert "pushing failed: preupload_info is improperly formatted" in fails(compressed, REPO)


def test_what_the_hub_holds_is_compared(hub: HubServer, compressed: Path) -> None:
    weights = (compressed / "model.safetensors").read_bytes()
    for number, (name, content, words) in enumerate([
        ("model.safetensors", weights[:-1] + b"x", "another content"),
        ("config.json", b"{}", "2 bytes on the Hub"),
        ("tokenizer.json", b"x" * (compressed / "tokenizer.json").stat().st_size, "another content"),
        ("stray.txt", b"x", "holds stray.txt beside the model"),
    ]):  # fmt: skip
        hub.broken = {name: content}
        assert words in fails(compressed, f"alice/m{number}")
    hub.broken = {"model.safetensors": None}
    assert "does not hold model.safetensors" in fails(compressed, "alice/lost")


def test_damaged_and_changed_folders_are_refused_before_any_request(
    hub: HubServer, llama: Path, compressed: Path, tmp_path: Path
) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(compressed, tmp_path / name))

    weights = copy("weights") / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    config = copy("config") / "config.json"
    config.write_text(config.read_text() + "\n")
    (copy("gone") / "tokenizer.json").unlink()
    (copy("no-report") / "fips_report.json").unlink()
    (copy("bad-report") / "fips_report.json").write_text("{")
    (copy("deep-report") / "fips_report.json").write_text("[" * 100_000)
    report = copy("unverified") / "fips_report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "verified": False}))
    for name, error, words in [
        ("weights", FormatError, r"model\.safetensors is not what was written"),
        ("config", FormatError, r"config\.json is not what was written"),
        ("gone", FormatError, r"tokenizer\.json is recorded in fips_report\.json but missing"),
        ("no-report", FormatError, r"has no fips_report\.json"),
        ("bad-report", FormatError, "is damaged"),
        ("deep-report", FormatError, "nested too deeply"),
        ("unverified", FormatError, "lists no verified weights"),
        ("nowhere", SourceError, "no such folder"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            fips.push(tmp_path / name, REPO)
    with pytest.raises(FormatError, match="not a checkpoint compressed by fips"):
        fips.push(llama, REPO)
    assert hub.requests == []


def test_weights_that_do_not_match_their_description(hub: HubServer, compressed: Path, tmp_path: Path) -> None:
    """They are refused even if somebody wrote a report to match."""
    from fips.checkpoint.folder import file_digest

    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.mask"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    report = json.loads((out / "fips_report.json").read_text())
    report["files"]["model.safetensors"] = file_digest(out / "model.safetensors")
    (out / "fips_report.json").write_text(json.dumps(report))
    with pytest.raises(FormatError, match=r"up_proj\.mask is missing"):
        fips.push(out, REPO)
    assert hub.requests == []


@pytest.mark.parametrize("small", [2**24, 0])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "README.md", "fips_report.json"])
def test_a_file_that_changes_after_its_verification_is_not_published(
    name: str, small: int, hub: HubServer, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is what was verified; of large files, which are not kept in memory, a change ends the push."""
    from fips import publishing

    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    real, other = publishing.prepare, bytes(reversed((compressed / name).read_bytes()))
    weights = (out / "model.safetensors").stat().st_size
    monkeypatch.setattr("fips.checkpoint.sealed._SMALL", small or weights - 1)

    def prepare(*args: object) -> None:
        real(*args)
        (out / name).write_bytes(other)

    monkeypatch.setattr(publishing, "prepare", prepare)
    if name == "model.safetensors" and not small:
        with pytest.raises(FormatError, match=r"model\.safetensors has changed since it was verified"):
            fips.push(out, REPO)
        assert on_hub(hub) == {}
        return
    fips.push(out, REPO)
    assert on_hub(hub) == contents(compressed)


@pytest.mark.parametrize("name", ["tokenizer.json", "fips_report.json"])
def test_a_file_that_changes_right_after_its_verification(
    name: str, hub: HubServer, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fips import publishing

    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    real = publishing.verify

    def verify(*args: object, **kwargs: bool) -> object:
        found = real(*args, **kwargs)
        (out / name).write_text("{")
        return found

    monkeypatch.setattr(publishing, "verify", verify)
    assert f"{name} has changed since it was verified" in fails(out, REPO)
    assert hub.requests == []


def test_what_would_fail_late_is_refused_early(
    hub: HubServer, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    for text in (b"---\nlicense: [\n---\n", b"---\ndate: 2023-02-30\n---\n", b"---\n- a\n---\n", b"\xff"):
        (out / "README.md").write_bytes(text)
        assert "README.md: its YAML block cannot be read" in fails(out, REPO)
    (out / "README.md").unlink()
    (out / "README.md").symlink_to("nowhere")
    assert "README.md leads nowhere" in fails(out, REPO)
    assert "revision is empty" in fails(compressed, REPO, "--revision", "", code=2)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("fips.publishing.verify", lambda *_, **__: pytest.fail("verified without a token"))
    assert "hf auth login" in fails(compressed, REPO)
    assert hub.requests == []


@pytest.mark.parametrize("name", [".env", "notes.txt", "sub/more.safetensors", ".cache/huggingface/x.lock",
                                  "a/.b/c.json"])  # fmt: skip
def test_foreign_and_hidden_files_are_named_and_refused(
    name: str, hub: HubServer, compressed: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("secret")
    assert name in fails(out, REPO)
    assert hub.requests == []


def test_a_report_that_lists_only_weights(hub: HubServer, compressed: Path, tmp_path: Path) -> None:
    """As earlier versions wrote it: the usual files of a model are known, others are not."""
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    report = json.loads((out / "fips_report.json").read_text())
    for name in report["side_files"]:
        if not name.endswith(".json"):
            (out / name).unlink()
    del report["side_files"], report["origin"]
    (out / "fips_report.json").write_text(json.dumps(report))
    done = run("push", out, REPO)
    assert "has no checksums of config.json, generation_config.json, " in done.err
    assert set(on_hub(hub)) == set(contents(out))
    for name in ("more.safetensors", ".hidden.json"):
        (out / name).write_text("")
        assert name in fails(out, REPO)
        (out / name).unlink()


@pytest.mark.parametrize("name", ["small", "a/b/c", "alice/", "/small", "alice/sm all", "alice/x--y", "alice/.x.git",
                                  "https://hub/alice/small", ""])  # fmt: skip
def test_bad_repo_ids(name: str, hub: HubServer, compressed: Path) -> None:
    assert "expected owner/name" in fails(compressed, name, code=2)
    assert hub.requests == []


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        PushConfig(revision="x", create_pr=True)
    with pytest.raises(ConfigError, match="commit_message is empty"):
        PushConfig(commit_message=" ")


def test_interrupted_in_the_middle_of_an_upload(hub: HubServer, compressed: Path, tmp_path: Path) -> None:
    hub.stall = threading.Event()
    command = [sys.executable, "-m", "fips", "push", str(compressed), REPO]
    # A test run in the background ignores Ctrl-C, and so would its children.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment(hub, tmp_path),
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert hub.reached.wait(120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"\nInterrupted; {REPO} may exist by now" in err, repr(err)
    assert "Traceback" not in err
    assert on_hub(hub) == {}
    hub.stall.set()
    assert fips.push(compressed, REPO).commit == hub.repos[REPO].refs["main"]


def test_the_example(hub: HubServer, compressed: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples" / "push.py"
    done = subprocess.run([sys.executable, str(script), str(compressed), REPO], capture_output=True, text=True,
                          check=False, env=environment(hub, tmp_path), cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/{REPO}" in done.stdout
    assert "hf_alice" not in done.stdout + done.stderr
    assert on_hub(hub) == contents(compressed)
