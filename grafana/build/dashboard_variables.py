# SPDX-License-Identifier: Apache-2.0
"""The variables at the head of the TTFT dashboard, for ttft_dashboard.py: sources, filters, the SLO."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from grafana.build import panel_kinds, ttft_queries

# The same as ttft:slo:seconds in grafana/prometheus/rules; each is changed by itself.
SLO_MS: Final = "1000"
# A TraceQL search that finds nothing, and says what to do: an empty box would be an error.
NO_TRACE_QUERY: Final = '{ name = "click a request above" }'


def build_variables() -> list[Any]:
    """Data sources, filters, the SLO, and the request to look at."""
    variable_list = f"{ttft_queries.DURATION_METRIC}{{{ttft_queries.NOT_ENCODE_SELECTOR}}}"
    return [
        panel_kinds.build_datasource_variable("prometheus", "prometheus", "Prometheus"),
        panel_kinds.build_datasource_variable("tempo", "tempo", "Tempo"),
        panel_kinds.build_label_variable(
            "model", "Model", f"label_values({variable_list}, {ttft_queries.MODEL_LABEL})"
        ),
        panel_kinds.build_label_variable(
            "role", "Role", f"label_values({variable_list}, {ttft_queries.ROLE_LABEL})"
        ),
        *_build_place_variables(variable_list),
        panel_kinds.build_label_variable(
            "instance", "Instance", f"label_values({variable_list}, instance)"
        ),
        _build_text_variable("slo", "SLO (ms)", SLO_MS),
        _build_text_variable("trace", "Trace", NO_TRACE_QUERY),
    ]


def _build_place_variables(metric: str) -> list[Any]:
    """Kubernetes' namespace and pod; without it they are empty lists, and All is everything."""
    return [
        panel_kinds.build_label_variable(name, label, f"label_values({metric}, {source})")
        for name, label, source in (
            ("namespace", "Namespace", ttft_queries.NAMESPACE_LABEL),
            ("pod", "Pod", ttft_queries.POD_LABEL),
        )
    ]


def _build_text_variable(name: str, label: str, value: str) -> Any:
    made = dashboard.TextBoxVariable(name).label(label).default_value(value)
    return made.current(models.VariableOption(text=value, value=value, selected=True))
