# SPDX-License-Identifier: Apache-2.0
"""Instances that DNS or a Kubernetes API names: --discover."""
