# SPDX-License-Identifier: Apache-2.0
"""Builders for every kind of panel; ttft_dashboard.py and health_dashboard.py fill them with queries.

Everything here is drawn by Grafana from 10.1 on. A panel that needs a newer one goes through
`require_newer_grafana`, which notes it in the description and in REQUIRED_GRAFANA_VERSION, where the
tests look.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    nodegraph,
    prometheus,
    stat,
    table,
    tempo,
    text,
    timeseries,
)
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as shades
from grafana_foundation_sdk.models import prometheus as formats
from grafana_foundation_sdk.models import tempo as tables
from grafana_foundation_sdk.models import text as texts

from grafana.build import series_colors

# Variables, not uids: a Grafana that is there already may hold its data sources under other uids.
PROMETHEUS: Final = shapes.DataSourceRef("prometheus", "${prometheus}")
TEMPO: Final = shapes.DataSourceRef("tempo", "${tempo}")
# Filled by require_newer_grafana() while dashboards are built, so it is empty before that.
REQUIRED_GRAFANA_VERSION: Final[dict[str, str]] = {}  # title of a panel: the Grafana that it needs

# No red in an idle system: an empty answer reads "–".
EMPTY_TEXT: Final = "–"


def build_instant_target(
    query: str, ref: str = "A", legend: str = "", as_table: bool = False
) -> Any:
    """A number now, over the dashboard's whole range."""
    made = prometheus.Dataquery().expr(query).ref_id(ref).instant().datasource(PROMETHEUS)
    # As time series Grafana would make a column per series; tables are joined row by row.
    shape = formats.PromQueryFormat.TABLE if as_table else formats.PromQueryFormat.TIME_SERIES
    return made.legend_format(legend or "__auto").format(shape)


def build_range_target(query: str, legend: str, ref: str = "A", exemplars: bool = False) -> Any:
    """A series over time, with points of single requests where they are wanted."""
    # Exemplars are off unless asked for: each query for them is a second request to Prometheus.
    made = prometheus.Dataquery().expr(query).legend_format(legend).ref_id(ref)
    return made.range().exemplar(exemplars).datasource(PROMETHEUS)


def build_traceql_target(query: str, limit: int = 100) -> Any:
    """A TraceQL search, or one trace where the query is an id."""
    made = tempo.Dataquery().query(query).query_type("traceql").ref_id("A").limit(limit)
    # Rows of spans, because `ttft` is one: a row per trace would show the root span's times.
    return made.table_type(tables.SearchTableType.SPANS).datasource(TEMPO)


def build_number_panel(
    title: str, says: str, query: str, unit: str, hue: str = "", steps: Any = None
) -> Any:
    """One big number; its colour is fixed, or by thresholds `steps` (value, colour)."""
    made = (
        stat.Panel()
        .title(title)
        .description(says)
        .unit(unit)
        .with_target(build_instant_target(query))
    )
    made.datasource(PROMETHEUS).no_value(EMPTY_TEXT).graph_mode(shapes.BigValueGraphMode.NONE)
    made.color_mode(shapes.BigValueColorMode.VALUE).height(4).span(4)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if steps:
        return made.color_scheme(_use_threshold_colors()).thresholds(build_thresholds(steps))
    return made.color_scheme(_use_fixed_color(hue or series_colors.NEUTRAL_COLOR))


def build_lines_panel(title: str, says: str, unit: str, *targets: Any, legend: bool = True) -> Any:
    """Lines over time, with the last and the highest value in the legend."""
    # Durations and rates: an axis that does not begin at 0 makes noise look like a change.
    made = timeseries.Panel().title(title).description(says).unit(unit).min(0)
    made.targets(list(targets)).datasource(PROMETHEUS).line_width(2).fill_opacity(0)
    made.show_points(shapes.VisibilityMode.AUTO).height(9).span(12).no_value(EMPTY_TEXT)
    shown = common.VizLegendOptions().placement(shapes.LegendPlacement.BOTTOM)
    shown.display_mode(shapes.LegendDisplayMode.LIST).show_legend(legend)
    # All series at once, largest first, so that the tooltip reads like the stack.
    tip = common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI)
    return made.legend(shown).tooltip(tip.sort(shapes.SortOrder.DESCENDING))


def build_stacked_panel(title: str, says: str, unit: str, *targets: Any) -> Any:
    """Areas that add up; the legend beside them lists the means."""
    made = (
        rank_series(build_lines_panel(title, says, unit, *targets), "mean")
        .fill_opacity(75)
        .line_width(0)
    )
    made.show_points(shapes.VisibilityMode.NEVER)
    return made.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))


def link_series(panel: Any, pattern: str, link: dict[str, object]) -> Any:
    """Give the series of a panel a link, which a click on one of them shows; `pattern`: on their names."""
    return panel.override_by_regexp(pattern, [series_colors.set_property("links", [link])])


def rank_series(panel: Any, by: str) -> Any:
    """Many series: a table beside them, highest first."""
    shown = common.VizLegendOptions().placement(shapes.LegendPlacement.RIGHT).show_legend(True)
    shown.display_mode(shapes.LegendDisplayMode.TABLE).calcs([by])
    # Grafana sorts by the column's title, which is the calculation's name with a capital.
    return panel.legend(shown.sort_by(by.capitalize()).sort_desc(True))


def build_bars_panel(title: str, says: str, unit: str, query: str, legend: str) -> Any:
    """Horizontal bars, longest first."""
    made = bargauge.Panel().title(title).description(says).unit(unit).min(0).no_value(EMPTY_TEXT)
    made.with_target(build_instant_target(query, legend=legend)).datasource(PROMETHEUS).height(
        11
    ).span(8)
    made.orientation(shapes.VizOrientation.HORIZONTAL).show_unfilled(False)
    made.display_mode(shapes.BarGaugeDisplayMode.BASIC)
    return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def build_heatmap_panel(title: str, says: str, query: str, hue: str) -> Any:
    """A histogram's buckets over time."""
    target = build_range_target(query, "{{le}}").format(formats.PromQueryFormat.HEATMAP)
    made = heatmap.Panel().title(title).description(says).unit("s").with_target(target)
    # Prometheus has counted already: with `calculate` Grafana would make buckets of the counts.
    made.datasource(PROMETHEUS).calculate(False).cell_gap(1).hide_legend().height(9).span(12)
    made.y_axis(heatmap.YAxisConfig().unit("s").axis_placement(shapes.AxisPlacement.LEFT))
    # Empty buckets are not drawn: they would colour the whole panel.
    made.filter_values(heatmap.FilterValueRange().le(1e-9)).no_value(EMPTY_TEXT)
    shade = heatmap.HeatmapColorOptions().mode(shades.HeatmapColorMode.OPACITY).fill(hue).steps(64)
    # The exponent of a square root: single slow requests stay visible beside a thousand fast ones.
    return made.color(shade.scale(shades.HeatmapColorScale.EXPONENTIAL).exponent(0.5))


def build_table_panel(title: str, says: str, unit: str, *targets: Any) -> Any:
    """A table of instant queries, or of a search, one row per thing."""
    made = table.Panel().title(title).description(says).unit(unit).no_value(EMPTY_TEXT)
    return made.targets(list(targets)).height(8).span(24).filterable(True)


def build_joined_table(
    title: str, says: str, by: str, labels: dict[str, str], *columns: tuple[str, str, str]
) -> Any:
    """A table with one row per combination of labels, and a column (title, unit, query) per number."""
    # Grafana names the column of query A "Value #A" once tables are merged.
    refs = "ABCDEFGHIJ"[: len(columns)]
    targets = [
        build_instant_target(query, ref, as_table=True)
        for ref, (_, _, query) in zip(refs, columns, strict=True)
    ]
    made = build_table_panel(title, says, columns[0][1], *targets).datasource(PROMETHEUS)
    order = [*labels, *(f"Value #{ref}" for ref in refs)]
    places = {name: place for place, name in enumerate(order)}
    for id_val, options in (
        # `merge` joins the queries' rows by their labels; `organize` hides the time and orders the columns.
        ("merge", {}),
        ("organize", {"excludeByName": {"Time": True}, "indexByName": places}),
    ):
        made.with_transformation(models.DataTransformerConfig(id_val=id_val, options=options))
    for name, shown in labels.items():
        made.override_by_name(name, [models.DynamicConfigValue("displayName", shown)])
    for ref, (shown, unit, _) in zip(refs, columns, strict=True):
        # The unit belongs to a column; the panel's own unit is that of the first one.
        properties = {"displayName": shown, "unit": unit}
        named = [models.DynamicConfigValue(*pair) for pair in properties.items()]
        made.override_by_name(f"Value #{ref}", named)
    return made.sort_by([common.TableSortByFieldState().display_name(by).desc(True)]).height(7)


def build_plugin_panel(kind: str, title: str, says: str, target: Any) -> Any:
    """A panel that the SDK has no builder for; `kind` is its plug-in's id."""
    made = dashboard.Panel().type(kind).title(title).description(says).with_target(target)
    # Tempo's spans are in nanoseconds.
    return made.unit("ns").height(18).span(24)


def build_text_panel(title: str, says: str, content: str) -> Any:
    """Text in Markdown, in which variables are replaced; Grafana lets no HTML of theirs through."""
    made = text.Panel().title(title).description(says).content(content)
    return made.mode(texts.TextMode.MARKDOWN).height(7).span(24)


def build_node_graph(title: str, says: str, target: Any) -> Any:
    """A graph of who called whom."""
    made = nodegraph.Panel().title(title).description(says).with_target(target)
    return made.unit("ns").datasource(TEMPO).height(11).span(24)


def require_newer_grafana(panel: Any, version: str) -> Any:
    """Mark a panel that Grafana 10.1 cannot draw."""
    built = panel.build()
    REQUIRED_GRAFANA_VERSION[built.title] = version
    return panel.description(f"{built.description} Needs Grafana {version} or newer.")


def color_series(panel: Any, overrides: Iterable[series_colors.Override]) -> Any:
    """Give series their colours, by regular expressions on their names."""
    for pattern, properties in overrides:
        panel.override_by_regexp(pattern, properties)
    return panel


def build_thresholds(steps: Iterable[tuple[float | None, str]]) -> Any:
    """Colours from a value on; the first has no value."""
    found = [models.Threshold(value=value, color=hue) for value, hue in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def build_row(title: str) -> Any:
    """A heading: the question that the panels below it answer."""
    return dashboard.Row(title)


def build_datasource_variable(name: str, plugin: str, label: str) -> Any:
    """A variable to choose a data source by; ours is the one with the same uid."""
    chosen = models.VariableOption(text=label, value=name, selected=True)
    return dashboard.DatasourceVariable(name).label(label).type(plugin).current(chosen)


def build_label_variable(name: str, label: str, query: str) -> Any:
    """A variable with the values of a label; All is the default."""
    made = dashboard.QueryVariable(name).label(label).datasource(PROMETHEUS)
    # `definition` is what Grafana's settings show; `query` is what it runs.
    made.query({"query": query, "refId": name}).definition(query)
    # Values of the visible range only: instances that are long gone are not offered.
    made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    # All is `.*`, not a list: series without the label, or of new instances, match too.
    made.sort(models.VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(".*")
    return made.current(models.VariableOption(text="All", value="$__all", selected=True))


def build_empty_dashboard(title: str, uid: str, says: str, other: tuple[str, str]) -> Any:
    """An empty dashboard with what both have: time, refresh, and a link to the other."""
    made = dashboard.Dashboard(title).uid(uid).description(says).tags(["ttft-otel"]).readonly()
    # 30 s: metrics are pushed every 15 s and scraped every 15 s, so more often shows nothing new.
    made.time("now-1h", "now").refresh("30s").timezone("browser")
    # One time under the cursor in all panels: a peak of TTFT is compared with the stages below it.
    made.tooltip(models.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink(other[0]).type(models.DashboardLinkType.LINK)
    return made.link(link.url(f"/d/{other[1]}").keep_time(True).icon("dashboard"))


def _use_fixed_color(hue: str) -> Any:
    return dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(hue)


def _use_threshold_colors() -> Any:
    return dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS)
