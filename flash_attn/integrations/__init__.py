# SPDX-License-Identifier: BSD-3-Clause
"""Adapters for other libraries. A module imports the library it serves; none is imported here."""
