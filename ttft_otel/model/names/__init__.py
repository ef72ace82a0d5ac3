# SPDX-License-Identifier: Apache-2.0
"""Names of spans, attributes, metrics, headers and environment variables; defined only here.

tests/golden/vocabulary.json freezes them: a change is a change of the public interface.
"""
