"""The kernels give the same bits on every instruction set, proved on a program that runs them without Python.

AVX-512 is emulated with SIMDe (Debian's libsimde-dev) where the headers are installed, so that machines without the
instructions still run that file's logic. `make test-arm` runs the same program for NEON and compares the same lines.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "backends" / "cpu" / "kernels"
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
X86 = ["-mavx2", "-mfma", "-mf16c"]  # gives plain C the fused multiply-add that the others have


def _compiles(source: str, flags: list[str]) -> bool:
    command = ["cc", *flags, "-x", "c", "-fsyntax-only", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def checksums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Lines of checksums by instruction set."""
    program = tmp_path_factory.mktemp("selftest") / "selftest"
    flags = list(FLAGS)
    sets = ["portable"]
    if _compiles("#ifndef __x86_64__\n#error\n#endif", []):
        flags += X86
        sets.append("avx2")
        if _compiles("#include <simde/x86/avx512.h>", X86):
            flags += ["-DROOST_EMULATED", f"-I{HERE}"]
            sets.append("avx512")
    elif _compiles("#ifndef __aarch64__\n#error\n#endif", []):
        sets.append("neon")
    sources = [str(HERE / "selftest.c"), *sorted(str(path) for path in KERNELS.glob("*.c"))]
    subprocess.run(["cc", *flags, *sources, "-o", str(program), "-lm", "-lpthread"], check=True, timeout=120)
    lines: dict[str, list[str]] = {}
    for name in sets:
        done = subprocess.run([str(program), name], text=True, capture_output=True, check=False, timeout=110)
        assert done.returncode == 0, done.stderr  # not zero when chunks or threads changed a bit
        lines[name] = [line.removeprefix(name) for line in done.stdout.splitlines()]
    return lines


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, as the installation does")
def test_every_instruction_set_gives_the_same_bits(checksums: dict[str, list[str]]) -> None:
    first, *others = checksums.values()
    assert len(first) == 24  # 12 weight formats, with and without norms after the branches
    assert len(set(first)) == 24
    assert others, "only plain C runs here"
    for other in others:
        assert other == first
