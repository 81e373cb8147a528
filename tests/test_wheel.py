"""The package as pip installs it: the core alone linearizes, loads and generates; a command that needs more
names the extra in one line."""

import contextlib
import importlib.machinery
import io
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The sources to build, in a folder of their own, since a build leaves folders beside them."""
    copy = tmp_path_factory.mktemp("sources")
    for part in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "src", "kernels"):
        (copy / part).symlink_to(ROOT / part)
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, sources) -> Path:
    """The folder that the wheel unpacks into."""
    made = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(made),
        str(sources),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = made.glob("*.whl")
    with zipfile.ZipFile(found) as file:
        file.extractall(made / "installed")
    return made / "installed"


def test_the_wheel_has_the_code_and_no_tests(wheel):
    names = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*.py")}
    assert {"relinear/cli.py", "relinear_kernels/linear_attention.py"} <= names
    assert not [name for name in names if "test_" in name or name.endswith(("_test.py", "conftest.py"))]
    assert {path.name for path in wheel.glob("*.dist-info/licenses/*")} == {"LICENSE", "NOTICE"}
    [said] = wheel.glob("*.dist-info/METADATA")
    for line in (
        "Project-URL: Lizard, https://arxiv.org/abs/",
        "Classifier: Programming Language :: Python :: 3.12",
        "Provides-Extra: suite",
    ):
        assert f"\n{line}" in said.read_text()


def test_an_editable_installation_is_the_package_beside_a_folder_of_its_name_too(sources, tmp_path):
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [made] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as file:
        file.extractall(tmp_path / "installed")
    (tmp_path / "relinear").mkdir()  # as a clone's
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'installed')!r})\nfrom importlib.util import"
        " find_spec\n"
    )
    code += "for name in ('relinear', 'relinear_kernels'): print(find_spec(name).origin)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    own = [ROOT / folder / "__init__.py" for folder in ("src/relinear", "kernels/relinear_kernels")]
    assert [Path(line).resolve() for line in done.stdout.splitlines()] == own, done.stderr


def installed_with_core() -> set[str]:
    """The packages that pip installs with the core: its requirements and theirs, by canonical name."""
    found, waiting = set(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while waiting:
        need = Requirement(waiting.pop())
        if (name := canonicalize_name(need.name)) in found or (
            need.marker and not need.marker.evaluate({"extra": ""})
        ):
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            waiting += requires(name) or []
    return found


def hide(modules: set[str]) -> None:
    """Hide these top-level modules from this process, as if they were not installed."""

    class Without(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if path is None and name in modules else super().find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without


def command(*args: str) -> str:
    """The output of `relinear`, and its exit status where it fails."""
    from relinear import cli

    out = io.StringIO()
    sys.argv = ["relinear", *args]
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        try:
            cli.main()
        except SystemExit as end:
            return f"{end.code}: {out.getvalue()}" if end.code else out.getvalue()
    return out.getvalue()


def use(wheel: Path, folder: Path) -> None:
    """The steps of a new user with the wheel and the core alone. The test below calls this in a process of
    its own."""
    core = installed_with_core() | {"relinear"}
    hide(
        {
            module
            for module, owners in packages_distributions().items()
            if not core & {canonicalize_name(name) for name in owners}
        }
    )
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    import relinear
    from relinear.cli import SUITE

    assert Path(relinear.__file__).is_relative_to(wheel) and relinear.__version__
    # peft brings that one
    assert not [name for name in SUITE if name != "accelerate" and importlib.util.find_spec(name)]
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    linear = relinear.linearize(LlamaForCausalLM(config), "lolcats", window=4)
    linear.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w7").save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(torch.arange(6)[None]).logits, linear.eval()(torch.arange(6)[None]).logits)

    assert "tokens/s" in command("generate", str(folder), "--prompt", "w1 w2 w3", "--max-new-tokens", "3")
    said = command("export", str(folder), str(folder.parent / "out"))
    assert (folder.parent / "out/modeling_relinear.py").is_file() and (
        folder.parent / "out/LICENSE"
    ).is_file(), said
    own = ["linearize", str(folder), "--data", "x.jsonl", "--method", "lolcats", "--out", "y"]
    run = ["export", str(folder.parent / "run"), "z"]
    for verb in (["distill", "lizard"], ["draw", "lizard", "table1"], ["status"], run, own):
        said = command(*verb)
        assert (
            said.startswith("1: error: this verb reads workflow/, which is in a clone")
            and "Possible, in a clone: `make setup`, or `pip install --editable '.[suite]'`" in said
            and said.count("\n") == 1
        ), said
    said = command("track", "ui", "--results", str(folder / "results"))
    assert (
        said
        == "1: error: this verb needs mlflow, which is not installed; in a clone, `pip install --editable"
        " '.[suite]'` brings it\n"
    ), said


def test_the_core_is_a_whole_program_and_says_what_else_needs(wheel, tmp_path):
    """`import relinear` beside a folder of that name, as beside a clone, is the package all the same."""
    (tmp_path / "relinear").mkdir()
    code = (
        f"import sys; sys.path += [{str(Path(__file__).parent)!r}]\nfrom pathlib import Path\nimport"
        " test_wheel\n"
    )
    code += f"test_wheel.use(Path({str(wheel)!r}), Path({str(tmp_path / 'model')!r}))"
    environment = {
        "PYTHONPATH": str(wheel),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("verb", "module", "lacking"),
    [
        (["tasks", "out"], "relinear.share.tasks", "datasets"),
        (["draw", "lolcats", "figure2"], "relinear.draw.curves", "matplotlib"),
    ],
)
def test_in_a_clone_without_the_suite_a_verb_names_what_it_lacks(
    monkeypatch, tmp_path, verb, module, lacking
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name in [name for name in sys.modules if name.partition(".")[0] == lacking]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacking, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("relinear.tracking.live.install_signal_handlers", lambda: None)
    said = command(*verb)
    assert (
        said == f"1: error: this verb needs {lacking}, which is not installed; in a clone, `pip install"
        " --editable '.[suite]'` brings it\n"
    )
