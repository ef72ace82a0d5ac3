# SPDX-License-Identifier: Apache-2.0
"""What other settings would bring: a model of the engine, fitted to the window and replayed."""
