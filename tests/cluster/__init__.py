# SPDX-License-Identifier: Apache-2.0
"""Chart, manifests and discovery with a real Kubernetes API server."""
