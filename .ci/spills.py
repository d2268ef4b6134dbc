# SPDX-License-Identifier: BSD-3-Clause
"""Reads a build log (ptxas -v): fails on kernels that spill registers, but for those that
spills.txt explains.

spills.txt: a line a kernel, "architecture, part of its mangled name, bytes at most: reason".
"""

import pathlib
import re
import sys


def spills(log):
    """(architecture, mangled name, bytes) of every kernel that spills."""
    kernel = ("?", "?")
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernel = (found[2], found[1])
        elif found := re.search(r"(\d+) bytes spill stores", line):
            if int(found[1]):
                yield (*kernel, int(found[1]))


def main():
    known = []
    text = pathlib.Path(__file__).with_name("spills.txt").read_text()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            arch, name, most = line.split(":")[0].split(", ")
            known.append((arch, name, int(most)))
    log = pathlib.Path(sys.argv[1]).read_text(errors="replace")
    wrong = False
    for arch, name, size in spills(log):
        fits = any(arch == k[0] and k[1] in name and size <= k[2] for k in known)
        print(f"{arch} {name}: {size} bytes, " + ("explained" if fits else "NOT explained"))
        wrong = wrong or not fits
    return 1 if wrong else 0


sys.exit(main())
