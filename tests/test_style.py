# SPDX-License-Identifier: BSD-3-Clause
"""What no linter checks: lengths, licence lines, words that must not be there; and the linters,
where they are installed (clang-format 14, ruff).
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "flash_attn", "flash_attn_2_cuda", "tests", "benchmarks")
CODE = {".py", ".h", ".cpp", ".cu", ".cuh", ".sh"}
CXX = {".h", ".cpp", ".cu", ".cuh"}
FILE_LINES, INTERFACE_LINES = 500, 700
FUNCTION_LINES, KERNEL_LINES = 80, 200
COLUMNS = 100
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt)/")
OLD_CODE = re.compile(
    r"^\s*//\s*(?:[\w:<>*&.\[\]]+ (?:\w+ )?[-+*]?=.*;|[\w:.>-]+\([^)]*\);|return .*;|[{}])\s*$",
    re.M,
)
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def code_files():
    found = [ROOT / "setup.py"]
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in CODE]
    return sorted(p for p in found if p.name != Path(__file__).name)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


FILES = code_files()
CXX_FILES = [p for p in FILES if p.suffix in CXX]
PYTHON_FILES = [p for p in FILES if p.suffix == ".py"]
every_file = pytest.mark.parametrize("path", FILES, ids=name_of)
every_cxx = pytest.mark.parametrize("path", CXX_FILES, ids=name_of)
every_python = pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)


@every_file
def test_file_has_its_licence_line_and_length(path):
    lines = path.read_text().splitlines()
    limit = INTERFACE_LINES if path.name == "interface.py" else FILE_LINES
    assert len(lines) <= limit, f"{len(lines)} lines, {limit} are allowed"
    assert any("SPDX-License-Identifier: BSD-3-Clause" in line for line in lines[:2])
    long = [i for i, line in enumerate(lines, 1) if len(line) > COLUMNS]
    assert not long, f"lines of more than {COLUMNS} columns: {long}"


@every_file
def test_file_names_no_machine_and_nothing_unfinished(path):
    text = path.read_text()
    assert not MACHINE_PATH.findall(text)
    assert not UNFINISHED.findall(text)


def cxx_functions(text):
    """(line, length, header) of each function: a brace block that opens after a parameter list.

    Comments, literals and preprocessor lines are blanked first. A block counts from the line after
    the last statement, so the header is in it; namespaces and types are entered, not counted.
    """
    text = re.sub(
        r"^\s*#(?:[^\n]*\\\n)*[^\n]*|//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'",
        lambda m: re.sub(r"[^\n]", " ", m.group()),
        text,
        flags=re.S | re.M,
    )
    begin, stack, found = 0, [], []
    for match in re.finditer(r"[{};]", text):
        at = match.end()
        if match.group() == "{":
            header = text[begin : match.start()].strip()
            counted = not any(is_function for is_function, _, _ in stack)
            is_function = (
                counted
                and ")" in header
                and not re.match(r"(namespace|struct|class|enum|union|extern)\b", header)
            )
            stack.append(
                (is_function, begin + len(text[begin:]) - len(text[begin:].lstrip()), header)
            )
        elif match.group() == "}" and stack:
            is_function, start, header = stack.pop()
            if is_function:
                length = text.count("\n", start, at) + 1
                found.append((text.count("\n", 0, start) + 1, length, header))
        begin = at
    return found


@every_cxx
def test_cxx_functions_are_short(path):
    for line, length, header in cxx_functions(path.read_text()):
        limit = KERNEL_LINES if "__global__" in header else FUNCTION_LINES
        assert length <= limit, f"line {line}: {length} lines, {limit} are allowed"


@every_python
def test_python_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            has_doc = ast.get_docstring(node) is not None
            first = node.body[1].lineno if has_doc and len(node.body) > 1 else node.lineno
            length = node.end_lineno - first + 1
            assert length <= FUNCTION_LINES, f"{node.name}: {length} lines without its docstring"


@every_cxx
def test_cxx_prints_nothing_and_has_few_macros(path):
    text = path.read_text()
    in_product = name_of(path).startswith("csrc/")
    if in_product:
        assert not re.findall(r"\b(?:printf|fprintf|puts)\s*\(|std::c(?:out|err)\b", text)
        macros = re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M)
        assert all(m.startswith("FA_") for m in macros), f"macros begin with FA_: {macros}"
        assert not OLD_CODE.findall(text), "code in a comment"


@every_cxx
def test_headers_are_guarded(path):
    if path.suffix in {".h", ".cuh"}:
        assert "#pragma once" in path.read_text()


@every_cxx
def test_kernels_are_named_and_have_no_bool_templates(path):
    text = path.read_text()
    for header in re.findall(r"template\s*<([^{;]*?)>\s*__global__", text):
        assert "bool" not in header.split()
        assert header.count(",") < 5
    for name in re.findall(r"__global__[^;{]*?(\w+)\s*\(\s*(?:const )?__grid_constant__", text):
        assert name.endswith("_kernel")


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not installed")
def test_clang_format():
    version = subprocess.run(["clang-format", "--version"], capture_output=True, text=True).stdout
    if "version 14." not in version:
        pytest.skip(f"the tree is formatted by clang-format 14, here is {version.strip()}")
    command = ["clang-format", "--dry-run", "--Werror", *map(str, CXX_FILES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[:4000]


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    targets = ["setup.py", *[f for f in FOLDERS if (ROOT / f).is_dir()]]
    done = subprocess.run(["ruff", *command, *targets], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
