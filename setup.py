"""Compiles the CPU kernels; everything else about the package is in pyproject.toml.

Each instruction set is a library of its own. They are optional: without a C++ compiler the package
installs, and nanocore computes with torch. NANOCORE_NO_KERNELS=1 in the environment leaves them
out: clients need none. What an earlier build left is never packed.
"""

import copy
import os
import runpy
import shlex
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

_FOLDER = Path("nanocore/kernels/cpu")
_BUILD = runpy.run_path(str(_FOLDER / "build.py"))


class Build(build):
    """Begins with an empty folder: all that is in it is packed."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    """Instruction sets are compiled side by side, to libraries that know no Python."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extensions(self):
        """With our flags and the user's, and none of the Python's that builds: the same bytes."""
        given = [shlex.split(os.environ.get(name, "")) for name in ("CXX", "CFLAGS", "CXXFLAGS")]
        known = "g++" if shutil.which("g++") else sysconfig.get_config_var("CXX") or "c++"
        compiler = given[0] or shlex.split(known)
        compile_one = [*compiler, "-fPIC", *given[1], *given[2]]
        link_one = [*compiler, "-shared", *shlex.split(os.environ.get("LDFLAGS", ""))]
        for name in ("compiler_so", "compiler_so_cxx"):
            self.compiler.set_executable(name, compile_one)
        for name in ("linker_so", "linker_so_cxx"):
            self.compiler.set_executable(name, link_one)
        super().build_extensions()

    def get_libraries(self, ext):
        """Not Python's own, of which the kernels know nothing."""
        return ext.libraries

    def get_ext_filename(self, fullname):
        """Without the name of a Python, of which ctypes knows nothing."""
        *packages, name = fullname.split(".")
        return str(Path(*packages, _BUILD["library_name"](name.removeprefix("_"))))

    def build_extension(self, ext):
        """In a folder of its own: all have the same source, and would share its object file.

        An editable install stays on its machine, and needs what that uses alone.
        """
        name = ext.name.rpartition(".")[2]
        if self.editable_mode and name.removeprefix("_") not in _BUILD["sets_used_here"]():
            return
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / name)
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        _BUILD["make_once"](
            library,
            lambda: build_ext.build_extension(own, ext),
            Path(ext.sources[0]),
            [*self.compiler.compiler_so_cxx, *ext.extra_compile_args],
            [*self.compiler.linker_so_cxx, *ext.extra_link_args],
        )

    def copy_extensions_to_source(self):
        """The old ones go first: they may be in use, or stay behind where compiling fails."""
        for name in _BUILD["INSTRUCTION_SETS"]:
            (_FOLDER / _BUILD["library_name"](name)).unlink(missing_ok=True)
            for old in _FOLDER.glob(f"_{name}.cpython-*.so"):  # as they were called once
                old.unlink()
        super().copy_extensions_to_source()


class BdistWheel(bdist_wheel):
    """For every Python 3 of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={
        "build": Build,
        "build_ext": BuildExt,
        "bdist_wheel": BdistWheel,
    },
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
        if os.environ.get("NANOCORE_NO_KERNELS") != "1"
    ],
)
