# SPDX-License-Identifier: BSD-3-Clause
"""The binaries and packages: symbols they need, what wheel and sdist hold, setup.py's rules."""

import glob
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

import flash_attn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(flash_attn.__file__).parent
HEADERS_AND_SOURCES = {".h", ".cpp", ".cu", ".cuh"}


# ---- symbols

# All that an op library may leave undefined: C symbols of libtorch that are promised to stay,
# Python's limited API, CUDA's runtime, libc and libstdc++ (versioned), what gcc's start files want.
STABLE = re.compile(
    r"(?:aoti_torch_|torch_)\w+|_?Py\w+|_?_?cuda\w+(?:@\S+)?|\S+@(?:GLIBC|GLIBCXX|CXXABI|GCC)_\S+"
    r"|_ITM_\w+TMCloneTable|__gmon_start__|_ZN?K?St\S+|_ZTV?I?N\d+__cxxabi\S+"
)


def libraries(pattern):
    return sorted(glob.glob(str(PACKAGE / pattern)))


def symbols(library, *options):
    done = subprocess.run(
        ["nm", "-D", *options, library], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in done.stdout.splitlines()]


def needed(library):
    done = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
@pytest.mark.parametrize("library", libraries("_C_*.so"), ids=lambda p: Path(p).name)
def test_op_library_needs_stable_symbols_only(library):
    unstable = [s for s in symbols(library, "-u") if not STABLE.fullmatch(s)]
    assert not unstable
    exported = set(symbols(library, "--defined-only"))
    assert exported == {"PyInit_" + Path(library).name.partition(".")[0]}
    allowed = ("libtorch.so", "libtorch_cpu.so", "libcudart.so", "libstdc++", "libm.", "libgcc_s")
    allowed += ("libc.so", "libpthread", "libdl", "librt", "ld-linux")
    assert not [n for n in needed(library) if not n.startswith(allowed)]


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_host_module_knows_no_torch():
    (library,) = libraries(f"_host.{sys.implementation.cache_tag}*.so")
    assert not [s for s in symbols(library, "-u") if "torch" in s or s.startswith("cuda")]
    assert not [n for n in needed(library) if "torch" in n or "cuda" in n]


# ---- packages


@pytest.fixture
def tree(tmp_path):
    """A copy of the project without anything built, beside a torch that must not be imported."""
    names = ["csrc", "flash_attn", "flash_attn_2_cuda", "tests", "benchmarks", "setup.py"]
    names += [
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        ".clang-format",
    ]
    ignore = shutil.ignore_patterns("*.so", "__pycache__", ".*cache")
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignore)
        elif (ROOT / name).exists():
            os.makedirs(tmp_path / "tree", exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    (tmp_path / "poison" / "torch").mkdir(parents=True)
    (tmp_path / "poison" / "torch" / "__init__.py").write_text("raise SystemError('imported')\n")
    return tmp_path / "tree"


def run_setup(tree, *arguments):
    environment = dict(os.environ, PYTHONPATH=str(tree.parent / "poison"))
    command = [sys.executable, "setup.py", "-q", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sdist_holds_the_sources_and_needs_no_torch(tree):
    run_setup(tree, "sdist")
    (archive,) = (tree / "dist").glob("*.tar.gz")
    assert archive.name == "flash_attn-2.8.3.tar.gz"
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
        top = "flash_attn-2.8.3/"
        metadata = tar.extractfile(top + "PKG-INFO").read().decode()
    wanted = {p.relative_to(tree).as_posix() for p in (tree / "csrc").rglob("*.*")}
    wanted |= {p.relative_to(tree).as_posix() for p in (tree / "flash_attn").rglob("*.py")}
    wanted |= {p.relative_to(tree).as_posix() for p in (tree / "tests").rglob("*.*")}
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "flash_attn/py.typed"}
    wanted |= {"flash_attn_2_cuda/__init__.py"}
    assert not {w for w in wanted if (tree / w).is_file()} - held
    assert not [name for name in held if name.endswith((".so", ".o", ".pyc"))]
    assert re.search(r"^Name: flash-attn$", metadata, re.M)
    assert re.search(r"^Version: 2\.8\.3$", metadata, re.M)
    assert re.search(r"^Requires-Dist: torch>=2\.10$", metadata, re.M)
    assert re.search(r"^Provides-Extra: hf$", metadata, re.M)
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)[^\n;]*$", metadata, re.M)
    assert required == ["torch"]


@pytest.mark.skipif(not glob.glob(str(ROOT / "build" / "ninja-*")), reason="nothing was built here")
def test_wheel_holds_the_package(tmp_path):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    command += ["--no-build-isolation", "--no-deps"]
    done = subprocess.run([*command, "-w", tmp_path, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    tag = sys.implementation.cache_tag.replace("cpython-", "cp")
    assert wheel.name.startswith(f"flash_attn-2.8.3-{tag}-{tag}-linux_")
    with zipfile.ZipFile(wheel) as archive:
        held = {n for n in archive.namelist() if ".dist-info" not in n}
        scripts = archive.read("flash_attn-2.8.3.dist-info/entry_points.txt").decode()
        top = archive.read("flash_attn-2.8.3.dist-info/top_level.txt").decode().split()
    assert top == ["flash_attn", "flash_attn_2_cuda"]  # clients look a distribution up by these
    assert "flash-attn = flash_attn.cli:main" in scripts
    python = {p.relative_to(ROOT).as_posix() for p in (ROOT / "flash_attn").rglob("*.py")}
    python |= {"flash_attn_2_cuda/__init__.py"}
    assert python | {"flash_attn/py.typed", "flash_attn/_C_cpu.abi3.so"} <= held
    assert f"flash_attn/_host{importlib.machinery.EXTENSION_SUFFIXES[0]}" in held
    assert not [n for n in held if Path(n).suffix in HEADERS_AND_SOURCES or n.startswith("tests")]


# ---- setup.py


@pytest.fixture(scope="module")
def rules():
    """The names that setup.py defines, without a build."""
    here, setup = os.getcwd(), setuptools.setup
    setuptools.setup = lambda **_: None
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = setup
        os.chdir(here)


def test_setup_reads_architectures(rules):
    parse, gencode = rules["parse_archs"], rules["gencode"]
    assert parse("80;90a", "X") == [("80", False), ("90a", False)]
    assert parse("8.0 9.0+PTX, 12.0", "X") == [("80", False), ("90a", True), ("120", False)]
    assert gencode([("80", True), ("90a", False)]) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    for wrong in ("hopper", "70", "80;;x"):
        with pytest.raises(SystemExit, match="X"):
            parse(wrong, "X")


def test_setup_decides_about_cuda(rules, monkeypatch, tmp_path):
    decide = rules["decide_cuda"]
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("FLASH_ATTN_CUDA", "FLASH_ATTENTION_SKIP_CUDA_BUILD"):
        monkeypatch.delenv(name, raising=False)
    for torch_cuda in ("13.2", None):
        assert decide(torch_cuda) == (str(tmp_path), "nvcc 13.0")
    assert decide("12.8")[0] is None
    monkeypatch.setenv("FLASH_ATTN_CUDA", "1")
    with pytest.raises(SystemExit, match="another major version"):
        decide("12.8")
    monkeypatch.setenv("FLASH_ATTN_CUDA", "0")
    assert decide("13.0") == (None, "not built: switched off")
    monkeypatch.delenv("FLASH_ATTN_CUDA")
    monkeypatch.setenv("FLASH_ATTENTION_SKIP_CUDA_BUILD", "TRUE")
    assert decide("13.0")[0] is None
    monkeypatch.delenv("FLASH_ATTENTION_SKIP_CUDA_BUILD")
    monkeypatch.setitem(decide.__globals__, "find_cuda", lambda: None)
    assert decide("13.0") == (
        None,
        "not built: nvcc not found (set CUDA_HOME, or put nvcc on PATH)",
    )
    monkeypatch.setenv("FLASH_ATTN_CUDA", "maybe")
    with pytest.raises(SystemExit, match="auto, 0 or 1"):
        decide("13.0")


def test_setup_chooses_jobs(rules, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert rules["choose_jobs"](1) == (7, "MAX_JOBS")
    monkeypatch.delenv("MAX_JOBS")
    jobs, why = rules["choose_jobs"](1)
    assert 1 <= jobs <= len(os.sched_getaffinity(0)) and "MAX_JOBS" in why


def test_setup_chooses_threads(rules, monkeypatch):
    choose, cores = rules["choose_threads"], len(os.sched_getaffinity(0))
    monkeypatch.delenv("NVCC_THREADS", raising=False)
    assert choose(1, 2) == min(2, cores) and choose(cores, 3) == 1 and choose(0, 0) == 1
    monkeypatch.setenv("NVCC_THREADS", "5")
    assert choose(1, 2) == 5


def test_build_compiles_what_changed(rules, monkeypatch, tmp_path):
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        pytest.skip("ninja is not installed")
    (tmp_path / "a.h").write_text("inline int f() { return 1; }\n")
    (tmp_path / "a.cpp").write_text('#include "a.h"\nint a() { return f(); }\n')
    (tmp_path / "b.cpp").write_text("int b() { return 2; }\n")
    monkeypatch.setitem(rules["Graph"].library.__globals__, "ROOT", str(tmp_path))

    def build():
        graph = rules["Graph"](str(tmp_path / "out"), None)
        graph.library("lib", ["a.cpp", "b.cpp"], {"cxx": ["-fPIC"]}, [])
        graph.run(1, ["lib.so"])
        built = ("lib.so", "lib/a.cpp.o", "lib/b.cpp.o")
        return [(tmp_path / "out" / name).stat().st_mtime_ns for name in built]

    first = build()
    assert build() == first
    (tmp_path / "a.h").write_text("inline int f() { return 3; }\n")
    changed = [new != old for new, old in zip(build(), first, strict=True)]
    assert changed == [True, True, False]
