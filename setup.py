"""The wheel without the kernels' tests, which lie beside the kernels, and an editable installation by path.
All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel


class WithoutTests(build_py):
    """The files of a wheel, those of tests left out."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file) of each module that is installed."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[1] != "conftest" and not entry[1].endswith("_test")]


class ByPath(editable_wheel):
    """An editable installation that puts the folders on sys.path.

    Of sources in two folders setuptools makes an import hook, which is asked after sys.path: beside the
    clone, `import relinear` would be the clone's folder, as an empty namespace.
    """

    def _select_strategy(self, name: str, tag: str, build_lib: str) -> "Paths":
        return Paths([Path(self.project_dir).resolve() / folder for folder in ("src", "kernels")])


class Paths:
    """A strategy, as setuptools calls it: writes a .pth file of these folders into the wheel."""

    def __init__(self, folders: list[Path]):
        self.folders = folders

    def __enter__(self) -> "Paths":
        return self

    def __exit__(self, *_) -> None:
        pass

    def __call__(self, wheel, files, mapping) -> None:
        """Write the .pth file that puts the source folders on the path."""
        wheel.writestr("__editable__.relinear.pth", "".join(f"{folder}\n" for folder in self.folders))


setup(cmdclass={"build_py": WithoutTests, "editable_wheel": ByPath})
