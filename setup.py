"""Compiles the CPU kernels; everything else about the package is in pyproject.toml.

Each instruction set is an extension of its own. They are optional: without a C++ compiler the
package installs, and nanocore computes with torch.
"""

import copy
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_FOLDER = Path("nanocore/kernels/cpu")
_BUILD = runpy.run_path(str(_FOLDER / "build.py"))


class BuildExt(build_ext):
    """Instruction sets are compiled side by side."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext):
        """In a folder of its own: all have the same source, and would share its object file."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name.rpartition(".")[2])
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=[
        Extension(
            f"nanocore.kernels.cpu._{name}",
            sources=[str(_FOLDER / "program.cpp")],
            depends=[str(path) for path in sorted(_FOLDER.glob("*.h"))],
            extra_compile_args=[*_BUILD["COMPILE_FLAGS"], *flags],
            extra_link_args=[*_BUILD["LINK_FLAGS"]],
            language="c++",
            optional=True,
        )
        for name, flags in _BUILD["INSTRUCTION_SETS"].items()
    ],
)
