# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that are started by hand; each prints tables and takes --json FILE.

Run them from the checkout: `.venv/bin/python -m benchmarks.router`. Goals are for ratios to a reference of
the same run (figures.py); the exit code is 1 when one is missed.
Results that the docs quote are in results/.
"""
