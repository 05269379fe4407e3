"""Compiles the CPU kernels. All else about the package is in pyproject.toml.

The kernels are a plain shared library without Python.h or a module init: `backends/cpu` finds the file by its module
name and loads it with ctypes. An Extension is the packaging's way to compile it, name it and put it into the wheel.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path("backends/cpu/kernels")
CURE = "Debian/Ubuntu: apt install build-essential; Fedora: dnf install gcc; macOS: xcode-select --install"


class BuildKernels(build_ext):
    """The stock command, all files at once, with the two usual failures told in words."""

    def build_extension(self, ext: Extension) -> None:
        compiler = getattr(self.compiler, "compiler_so", ["cc"])[0]
        if shutil.which(compiler) is None:
            raise CompileError(f"Roost compiles its CPU kernels and found no C compiler ({compiler}). {CURE}.")
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compile_all = self.compiler.compile
                self.compiler.compile = lambda sources, **how: [
                    name for names in pool.map(lambda source: compile_all([source], **how), sources) for name in names
                ]
                super().build_extension(ext)
        except CompileError as exc:
            raise CompileError(f"The CPU kernels did not compile; the compiler's own words are above. {exc}") from exc


setup(
    ext_modules=[
        Extension(
            "backends.cpu._kernels",
            sources=sorted(str(path) for path in KERNELS.glob("*.c")),
            depends=sorted(str(path) for path in KERNELS.glob("*.h")),
            # Instruction sets are chosen at run time: each file carries its own target pragmas, so no -march here.
            # Contraction would fuse a*b+c where the compiler likes, and sums must have one order everywhere.
            extra_compile_args=["-O3", "-g0", "-std=gnu11", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"],
            libraries=["m", "pthread"],
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
