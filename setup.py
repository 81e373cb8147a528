"""The wheel without tests: those of the kernels lie beside them. All else is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithoutTests(build_py):
    """The files of a wheel, those of tests left out."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file) of what is installed."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[1] != "conftest" and not entry[1].endswith("_test")]


setup(cmdclass={"build_py": WithoutTests})
