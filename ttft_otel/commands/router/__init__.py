# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel router`: options from flags, environment and YAML, then the application; control/ runs it."""
