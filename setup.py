# SPDX-License-Identifier: BSD-3-Clause
"""Builds the three binaries of flash_attn with one ninja graph.

    _C_cpu    operators for the CPU and all schemas; LibTorch stable ABI, limited Python API
    _C_cuda   operators for CUDA, where nvcc is found; the same
    _host     the planner for Python; pybind11, for the running CPython alone

Reading the metadata, or making an sdist, needs neither torch nor a compiler; a build needs torch's
headers, but never imports torch and never asks for a GPU. Environment:

    FLASH_ATTN_CUDA        auto (default: if nvcc is there and fits torch), 0 or 1 (fail without)
    FLASH_ATTN_CUDA_ARCHS  "80;90a", with "+PTX" for PTX; default: the GPUs here, else "80+PTX;90a"
    MAX_JOBS, NVCC_THREADS compilers at once; threads of each nvcc
    CUDA_HOME, CXX, CXXFLAGS, LDFLAGS, NVCC_APPEND_FLAGS   as usual

TORCH_CUDA_ARCH_LIST and FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE are read where ours are unset.
"""

import fcntl
import glob
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
TORCH_TARGET = "0x020a000000000000"  # torch 2.10: one byte each for major, minor, patch
LIMITED_API = "0x030A0000"  # CPython 3.10
OLDEST_ARCH = 75
GIB = 1 << 30
JOB_BYTES = 2 * GIB  # budget of one compiler process, design.md 1.9


def sources(*patterns):
    found = [p for pattern in patterns for p in glob.glob(os.path.join("csrc", pattern))]
    return sorted(found)


def stop(text):
    raise SystemExit(f"flash_attn: {text}")


# ---- what is on this machine


def find_torch():
    """(directory, version, CUDA version or None) of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        stop("the build needs torch >= 2.10; install it first, or build with build isolation")
    directory = spec.submodule_search_locations[0]
    info = runpy.run_path(os.path.join(directory, "version.py"))
    version = str(info["__version__"])
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < (2, 10):
        stop(f"the build needs torch >= 2.10, found {version}")
    return directory, version, info.get("cuda")


def find_cuda():
    """The CUDA toolkit's directory, or None."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home and os.path.exists(os.path.join(home, "bin", "nvcc")):
            return home
    nvcc = shutil.which("nvcc")
    if nvcc:
        return os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    return "/usr/local/cuda" if os.path.exists("/usr/local/cuda/bin/nvcc") else None


def output_of(*command):
    """The command's output, empty when it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvcc_version(home):
    text = output_of(os.path.join(home, "bin", "nvcc"), "--version")
    found = re.search(r"release (\d+\.\d+)", text)
    return found.group(1) if found else "0.0"


def free_memory():
    """Bytes that a build may use: what the kernel calls available, within the cgroup's limit."""
    limits = []
    try:
        with open("/proc/meminfo") as f:
            limits.append(int(re.search(r"MemAvailable:\s+(\d+) kB", f.read()).group(1)) * 1024)
    except (OSError, AttributeError):
        limits.append(4 * GIB)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as f:
                limits.append(int(f.read()))
        except (OSError, ValueError):
            continue
    return min(limits)


def choose_threads(files, codes):
    """Threads of each nvcc: as many of its `codes` at once as there are cores beyond one a file."""
    asked = os.environ.get("NVCC_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, min(codes, len(os.sched_getaffinity(0)) // max(files, 1)))


def choose_jobs(threads):
    asked = os.environ.get("MAX_JOBS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked), "MAX_JOBS"
    cores = len(os.sched_getaffinity(0))
    memory = free_memory()
    jobs = max(1, min(-(-cores // threads), memory // (JOB_BYTES * threads)))
    return jobs, f"{cores} cores, {memory / GIB:.0f} GiB free; MAX_JOBS changes it"


# ---- CUDA: whether, and for which architectures


def wanted_cuda():
    value = os.environ.get("FLASH_ATTN_CUDA", "").lower()
    if not value and os.environ.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "").upper() == "TRUE":
        value = "0"
    value = value or "auto"
    if value not in ("auto", "0", "1"):
        stop(f"FLASH_ATTN_CUDA must be auto, 0 or 1, got {value!r}")
    return value


def decide_cuda(torch_cuda):
    """(toolkit directory or None, reason)."""
    wanted = wanted_cuda()
    if wanted == "0":
        return None, "not built: switched off"
    home = find_cuda()
    if home is None:
        reason = "nvcc not found (set CUDA_HOME, or put nvcc on PATH)"
    else:
        version = nvcc_version(home)
        if not torch_cuda or torch_cuda.split(".")[0] == version.split(".")[0]:
            return home, f"nvcc {version}"
        reason = f"nvcc is of CUDA {version}, torch of CUDA {torch_cuda}: another major version"
    if wanted == "1":
        stop(f"FLASH_ATTN_CUDA=1, but {reason}")
    return None, f"not built: {reason}"


def parse_archs(text, name):
    """8.0;9.0+PTX or 80,90a+PTX -> [("80", False), ("90a", True)]."""
    archs = []
    for item in re.split(r"[;,\s]+", text.strip()):
        found = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", item, re.IGNORECASE)
        if not found:
            stop(f"{name} must list architectures like 80;90a or 8.0+PTX, got {item!r}")
        number = found.group(1) + found.group(2)
        if int(number) < OLDEST_ARCH:
            stop(f"{name}: sm_{number} is older than sm_{OLDEST_ARCH}, the oldest supported")
        suffix = "a" if number == "90" else found.group(3)  # wgmma and TMA exist in 90a only
        archs.append((number + suffix, bool(found.group(4))))
    return archs


def present_archs(home):
    """Architectures of this machine's GPUs; empty when nvcc does not know them all."""
    listed = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    numbers = sorted({n.replace(".", "") for n in re.findall(r"^\d+\.\d$", listed, re.MULTILINE)})
    known = output_of(os.path.join(home, "bin", "nvcc"), "--list-gpu-arch")
    if any(int(n) < OLDEST_ARCH or f"compute_{n}" not in known.split() for n in numbers):
        return []
    return [("90a" if n == "90" else n, False) for n in numbers]


def choose_archs(home):
    for name in ("FLASH_ATTN_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if os.environ.get(name, "").strip():
            return parse_archs(os.environ[name], name)
    return present_archs(home) or [("80", True), ("90a", False)]


def gencode(archs):
    flags = []
    for arch, ptx in archs:
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        if ptx:  # PTX of 90a would run on 90 alone, so PTX is of the plain number
            number = arch.rstrip("af")
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


# ---- the ninja graph


def escape(path):
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def quote(flags):
    return " ".join(shlex.quote(f) for f in flags).replace("$", "$$")


RULES = """\
ninja_required_version = 1.5
rule cxx
  command = {cxx} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = g++ $in
rule nvcc
  command = {nvcc} -MD -MF $out.d $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = nvcc $in
rule link
  command = {link} -shared -Wl,--version-script=exports.map $in -o $out $flags
  description = link $out
"""


# Instances of std templates would be exported too, and meet those of other libraries at run time.
EXPORTS = "{ global: PyInit_*; local: *; };\n"


class Graph:
    """Collects build statements; every library has its own objects, so flags never mix."""

    def __init__(self, directory, nvcc):
        ccache = [shutil.which("ccache")] if shutil.which("ccache") else []
        cxx = shlex.split(os.environ.get("CXX", "g++"))
        if shutil.which(cxx[0]) is None:
            stop(f"no C++ compiler: {cxx[0]} not found (on Debian: apt-get install g++)")
        self.directory = directory
        commands = {"cxx": quote(ccache + cxx), "nvcc": quote([*ccache, nvcc or ""])}
        self.text = [RULES.format(link=quote(cxx), **commands)]

    def library(self, name, files, flags, link_flags):
        objects = []
        for rule in ("cxx", "nvcc"):
            self.text.append(f"{name}_{rule} = {quote(flags.get(rule, []))}")
        for path in files:
            rule = "nvcc" if path.endswith(".cu") else "cxx"
            output = escape(os.path.join(name, path + ".o"))
            self.text.append(
                f"build {output}: {rule} {escape(os.path.join(ROOT, path))}\n"
                f"  flags = ${name}_{rule}"
            )
            objects.append(output)
        inputs = " ".join(objects)
        self.text.append(f"build {name}.so: link {inputs}\n  flags = {quote(link_flags)}")

    def run(self, jobs, targets):
        os.makedirs(self.directory, exist_ok=True)
        for name, text in (("build.ninja", "\n".join(self.text) + "\n"), ("exports.map", EXPORTS)):
            with open(os.path.join(self.directory, name), "w") as f:
                f.write(text)
        # One ninja for one interpreter, whatever PATH is: another version's log is thrown away.
        module = importlib.util.find_spec("ninja")
        ninja = [sys.executable, "-m", "ninja"] if module else [shutil.which("ninja") or "ninja"]
        environment = dict(os.environ, NINJA_STATUS="[%f/%t, %es] ")
        command = [*ninja, "-C", self.directory, f"-j{jobs}", *targets]
        with open(os.path.join(self.directory, "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second build of the same tree waits
            if subprocess.run(command, env=environment).returncode != 0:
                stop("the build failed; the first error above says why")


class Build(build_ext):
    """build_ext that compiles every extension in one ninja run.

    --only=_host builds that one alone, for op libraries that came from another CPython.
    """

    user_options = [*build_ext.user_options, ("only=", None, "name of the one binary to build")]

    def initialize_options(self):
        super().initialize_options()
        self.only = None

    def run(self):
        if not sys.platform.startswith("linux"):
            stop(f"the binaries build on Linux only, this is {sys.platform}")
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            stop("free-threaded CPython has no stable C API yet; use an ordinary one")
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.exists(header):
            stop(f"{header} not found (on Debian: apt-get install python3-dev)")
        self.torch, self.torch_version, torch_cuda = find_torch()
        self.cuda, self.cuda_reason = decide_cuda(torch_cuda)
        if self.cuda is None:
            self.extensions = [e for e in self.extensions if e.name != "flash_attn._C_cuda"]
        super().run()

    def build_extensions(self):
        archs = choose_archs(self.cuda) if self.cuda else []
        threads = choose_threads(len(sources("cuda/inst/*.cu")), len(gencode(archs)))
        jobs, why = choose_jobs(threads)
        self.print_plan(archs, jobs, threads, why)
        directory = os.path.join(ROOT, "build", f"ninja-{sys.implementation.cache_tag}")
        graph = Graph(directory, os.path.join(self.cuda, "bin", "nvcc") if self.cuda else None)
        for extension in self.extensions:
            name = extension.name.rpartition(".")[2]
            flags, link_flags = getattr(self, "flags" + name)(archs, threads)
            graph.library(name, extension.sources, flags, link_flags)
        if self.only:  # the graph stays whole: ninja forgets what is not in it
            self.extensions = [e for e in self.extensions if e.name == f"flash_attn.{self.only}"]
        targets = {e.name: e.name.rpartition(".")[2] + ".so" for e in self.extensions}
        graph.run(jobs, targets.values())
        for name, target in targets.items():
            output = self.get_ext_fullpath(name)
            os.makedirs(os.path.dirname(output), exist_ok=True)
            self.copy_file(os.path.join(directory, target), output)

    def print_plan(self, archs, jobs, threads, why):
        cuda = self.cuda_reason
        if self.cuda:
            lists = sources("cuda/inst/*.cu")
            kernels = sum(len(re.findall(r"_row<", open(p).read())) for p in lists)
            names = ", ".join(f"sm_{a}" + (" + PTX" if ptx else "") for a, ptx in archs)
            cuda += f" at {self.cuda}: {kernels} kernels in {len(lists)} .cu files, for {names}"
        counts = ", ".join(f"{e.name} {len(e.sources)}" for e in self.extensions)
        print(
            f"flash_attn {self.distribution.get_version()}, what will be built\n"
            f"  with   CPython {sysconfig.get_python_version()}, torch {self.torch_version}\n"
            f"  files  {counts}\n"
            f"  CUDA   {cuda}\n"
            f"  jobs   {jobs} ({why}), {threads} threads for each nvcc",
            flush=True,
        )

    # Flags of each library: (compilers' flags, link flags). Never -march=native (kernels choose
    # their instruction set at run time), -fopenmp (threads are torch's), -ffast-math (-inf counts).

    def op_library(self, name, table, extra_cxx):
        common = [f"-I{ROOT}/csrc", "-std=c++17", "-O3", "-DNDEBUG"]
        cxx = [
            *common,
            "-fPIC",
            "-fvisibility=hidden",
            "-fvisibility-inlines-hidden",
            "-Wall",
            "-Wextra",
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
            "-DTORCH_STABLE_ONLY",
            f"-DPy_LIMITED_API={LIMITED_API}",
            f"-DFA_INIT=PyInit_{name}",
            f"-DFA_KERNEL_TABLE={table}",
            f"-isystem{self.torch}/include",
            f"-isystem{sysconfig.get_path('include')}",
            *extra_cxx,
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        # libtorch.so pulls in libtorch_cuda.so where torch has it, so that one command serves a
        # CPU-only torch too; the linker would drop it as unneeded.
        link = [
            f"-L{self.torch}/lib",
            "-Wl,--no-as-needed",
            "-ltorch",
            "-ltorch_cpu",
            *shlex.split(os.environ.get("LDFLAGS", "")),
        ]
        return common, cxx, link

    def flags_C_cpu(self, _archs, _threads):
        extra = ["-fno-math-errno", "-fno-trapping-math"]
        _, cxx, link = self.op_library("_C_cpu", "kCpuTable", extra)
        return {"cxx": cxx}, link

    def line_numbers(self):
        """For profilers and the sanitizer. They are four fifths of a binary that is not compressed,
        and drivers before CUDA 13's do not read what this compression gives."""
        modern = int(nvcc_version(self.cuda).split(".")[0]) >= 13
        return ["-lineinfo", "--compress-mode=size"] if modern else []

    def flags_C_cuda(self, archs, threads):
        listed = ";".join(a + ("+PTX" if ptx else "") for a, ptx in archs)
        extra = ["-DUSE_CUDA", f'-DFA_CUDA_ARCHS="{listed}"', f"-isystem{self.cuda}/include"]
        common, cxx, link = self.op_library("_C_cuda", "kCudaTable", extra)
        nvcc = [
            *common,
            *gencode(archs),
            *self.line_numbers(),
            "--expt-relaxed-constexpr",
            f"--threads={threads}",
            "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
        ]
        libraries = [d for d in ("lib64", "lib") if os.path.isdir(os.path.join(self.cuda, d))]
        return {"cxx": cxx, "nvcc": nvcc}, [
            *[f"-L{self.cuda}/{d}" for d in libraries],
            "-lcudart",
            *link,
        ]

    def flags_host(self, _archs, _threads):
        import pybind11

        cxx = [
            f"-I{ROOT}/csrc",
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            f"-isystem{pybind11.get_include()}",
            f"-isystem{sysconfig.get_path('include')}",
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        return {"cxx": cxx}, shlex.split(os.environ.get("LDFLAGS", ""))


os.chdir(ROOT)
PLAN = sources("plan/*.cpp")
CPU = [f"csrc/torch/{name}.cpp" for name in ("schema", "ops_cpu", "ops_cache")]
CUDA = [f"csrc/torch/{name}.cpp" for name in ("cuda_device", "ops_cuda", "ops_cuda_cache")]
BOTH = [path for path in sources("torch/*.cpp") if path not in CPU + CUDA] + PLAN
CPU += sources("cpu/*.cpp")
CUDA += sources("cuda/inst/*.cpp", "cuda/inst/*.cu")
setup(
    ext_modules=[
        Extension("flash_attn._C_cpu", [*CPU, *BOTH], py_limited_api=True),
        Extension("flash_attn._C_cuda", [*CUDA, *BOTH], py_limited_api=True),
        Extension("flash_attn._host", [*sources("host/*.cpp"), *PLAN]),
    ],
    cmdclass={"build_ext": Build},
)
