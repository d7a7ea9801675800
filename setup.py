"""What pyproject.toml cannot say: a wheel holds copies of patches, recipes and requirements (`megatron_rl.shipped`)."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the package stays in its checkout, beside the originals
            return
        for name in ("patches", "recipes"):
            target = Path(self.build_lib, "megatron_rl", "shipped", name)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name in ("requirements.txt", "requirements-cpu.txt"):
            shutil.copy(name, Path(self.build_lib, "megatron_rl", "shipped", name))
        stubs = Path(self.build_lib, "megatron_rl", "shipped", "tools", "stubs")  # as requirements-cpu.txt names it
        stubs.mkdir(parents=True, exist_ok=True)
        for wheel in Path("tools", "stubs").glob("*.whl"):
            shutil.copy(wheel, stubs)


setup(cmdclass={"build_py": BuildWithShippedFiles})
