# SPDX-License-Identifier: Apache-2.0
"""The dashboards as code: `python -m grafana.build` writes grafana/dashboards/*.json from this folder.

Input are the vocabulary (ttft_otel/model/stages.py, names/), its colours (stages.py) and the
metrics that the collector makes (ttft_queries.py, pipeline_queries.py); Grafana reads the JSON.
"""

import warnings

# The SDK would rather have Grafana's next format, which no Grafana before 12 can read.
warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
