# SPDX-License-Identifier: BSD-3-Clause
"""What no linter checks: lengths, licence lines, words that must not be there; and the linters,
where they are installed (clang-format 14, ruff).
"""

import ast
import re
import shutil
import subprocess
import sys
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


def test_files_have_a_licence_line_and_a_length():
    wrong = []
    for path in FILES:
        lines = path.read_text().splitlines()
        limit = INTERFACE_LINES if path.name == "interface.py" else FILE_LINES
        if len(lines) > limit:
            wrong.append(f"{name_of(path)}: {len(lines)} lines, {limit} are allowed")
        if not any("SPDX-License-Identifier: BSD-3-Clause" in line for line in lines[:2]):
            wrong.append(f"{name_of(path)}: no SPDX line")
        long = [i for i, line in enumerate(lines, 1) if len(line) > COLUMNS]
        if long:
            wrong.append(f"{name_of(path)}: more than {COLUMNS} columns in lines {long}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("word", [MACHINE_PATH, UNFINISHED], ids=["machine", "unfinished"])
def test_files_name_no_machine_and_nothing_unfinished(word):
    found = {name_of(path): word.findall(path.read_text()) for path in FILES}
    assert not {name: words for name, words in found.items() if words}


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


def test_cxx_functions_are_short():
    wrong = []
    for path in CXX_FILES:
        for line, length, header in cxx_functions(path.read_text()):
            limit = KERNEL_LINES if "__global__" in header else FUNCTION_LINES
            if length > limit:
                wrong.append(f"{name_of(path)}:{line}: {length} lines, {limit} are allowed")
    assert not wrong, "\n".join(wrong)


def test_python_functions_are_short():
    wrong = []
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                has_doc = ast.get_docstring(node) is not None and len(node.body) > 1
                length = node.end_lineno - (node.body[1].lineno if has_doc else node.lineno) + 1
                if length > FUNCTION_LINES:
                    wrong.append(f"{name_of(path)}: {node.name}: {length} lines without docstring")
    assert not wrong, "\n".join(wrong)


def test_csrc_prints_nothing_and_has_few_macros():
    wrong = []
    for path in CXX_FILES:
        text = path.read_text()
        if not name_of(path).startswith("csrc/"):
            continue
        wrong += [(path.name, x) for x in re.findall(r"\b(?:printf|fprintf|puts)\s*\(", text)]
        wrong += [(path.name, x) for x in re.findall(r"std::c(?:out|err)\b", text)]
        wrong += [(path.name, x) for x in OLD_CODE.findall(text)]
        macros = re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M)
        wrong += [(path.name, x) for x in macros if not x.startswith("FA_")]
        if path.suffix in {".h", ".cuh"} and "#pragma once" not in text:
            wrong.append((path.name, "no #pragma once"))
    assert not wrong


def test_kernels_are_named_and_have_no_bool_templates():
    for path in CXX_FILES:
        text = path.read_text()
        for header in re.findall(r"template\s*<([^{;]*?)>\s*__global__", text):
            assert "bool" not in header.split() and header.count(",") < 5, f"{path.name}: {header}"
        named = re.findall(r"__global__[^;{]*?(\w+)\s*\(\s*(?:const )?__grid_constant__", text)
        assert all(name.endswith("_kernel") for name in named), f"{path.name}: {named}"


def run_tool(name, *arguments):
    """Runs a tool from this Python's environment, or from PATH; skips where there is none."""
    beside = Path(sys.executable).parent / name
    tool = str(beside) if beside.exists() else shutil.which(name)
    if tool is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_clang_format():
    version = run_tool("clang-format", "--version").stdout
    if "version 14." not in version:
        pytest.skip(f"the tree is formatted by clang-format 14, here is {version.strip()}")
    done = run_tool("clang-format", "--dry-run", "--Werror", *map(str, CXX_FILES))
    assert done.returncode == 0, done.stderr[:4000]


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    targets = ["setup.py", *[f for f in FOLDERS if (ROOT / f).is_dir()]]
    done = run_tool("ruff", *command, *targets)
    assert done.returncode == 0, (done.stdout + done.stderr)[:4000]
