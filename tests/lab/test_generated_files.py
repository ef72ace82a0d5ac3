# SPDX-License-Identifier: Apache-2.0
"""Generated files are those that would be made now: the collector's, which count what the exporter process
counts, and docs/img/architecture.svg, for which imports are counted.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from opentelemetry.sdk.metrics.export import Metric, Sum

from lab import architecture_picture, collector_config, room_imports
from ttft_otel.exporter.request_metrics import SeriesRegistry
from ttft_otel.exporter.span_batch import ResourceCache
from ttft_otel.model import stages
from ttft_otel.model.metric_table import METRICS, OVERFLOW_LABEL, PLACE_LABELS, STATUS_LABEL
from ttft_otel.model.names import keys, span_names

CONFIG = yaml.safe_load(collector_config.GENERATED_FILES[0].read_text("utf-8"))


@pytest.mark.parametrize("path", collector_config.GENERATED_FILES, ids=lambda path: path.name)
def test_files_are_the_generated_ones(path: Path) -> None:
    """What lies between marks is what model/ gives today."""
    text = path.read_text("utf-8")

    assert text == collector_config.rewrite_config(text), "python -m lab.collector_config"


def test_every_block_has_its_place() -> None:
    """No generated part is missing from the files, and none is there twice."""
    texts = [path.read_text("utf-8") for path in collector_config.GENERATED_FILES]
    found = [name for text in texts for name in re.findall(r"# generated: (\w+)", text)]

    assert sorted(found) == sorted(collector_config.BLOCK_GENERATORS)


def test_every_stage_is_summed() -> None:
    """No stage of the vocabulary, nor any leg's, is missing from the sum."""
    server, router = collector_config.list_full_stage_names()

    assert set(stages.STAGE_NAMES) == set(server)
    assert all(stages.is_known_stage(name) for name in router)
    legs = [role for role in stages.ROLES if role != "router"]
    for role, stage in product(legs, stages.STAGES):
        assert (f"{role}.{stage.name}" in router) == (role in stage.roles)


def test_every_name_is_kept() -> None:
    """Whatever attribute the vocabulary names is among those that our spans may keep."""
    listed = set(re.findall(r'"([^"]+)"', "\n".join(collector_config.generate_own_keys())))
    named = {key: value for key, value in vars(keys).items() if isinstance(value, str)}
    said = {value for key, value in named.items() if key.isupper() and "." in value}
    assert said - listed <= {*METRICS, keys.FOREIGN}
    for stage in (
        *collector_config.list_full_stage_names()[1],
        span_names.FIRST_DECODE,
        stages.UNATTRIBUTED,
    ):
        assert keys.name_handover_attribute(stage) in listed
    assert {keys.name_held_attribute(kind) for kind in stages.HOLDING_KINDS} <= listed


def make_exporter_metric(name: str) -> Metric:
    """What an exporter process sends of one value with all labels that the metric may have."""
    registry = SeriesRegistry(ResourceCache(1), is_delta=False)
    labels = dict.fromkeys(METRICS[name].all_labels, "x")
    registry.get(name, "", labels, 1).add_values((20_000,))
    data = registry.take_data(2)
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    return metric


@pytest.mark.parametrize("name", METRICS)
def test_exporter_and_collector_make_the_same_series(name: str) -> None:
    """Name, unit, labels and buckets of a metric are the same, whichever of the two counts."""
    connector = CONFIG["connectors"][f"span_metrics/{name}"]
    ours = make_exporter_metric(name)
    (point,) = ours.data.data_points

    default = {"service.name", "span.name", "span.kind", STATUS_LABEL, "collector.instance.id"}
    labels = {each["name"] for each in connector["dimensions"]}
    labels |= default - set(connector["exclude_dimensions"])
    assert labels == {*point.attributes, *PLACE_LABELS}
    histogram = connector["histogram"]
    if isinstance(ours.data, Sum):
        assert histogram["explicit"] == {"buckets": ["1s"]}
    elif "explicit" in histogram:
        bounds = [
            float(each.removesuffix("ms")) / 1000 for each in histogram["explicit"]["buckets"]
        ]
        assert list(point.explicit_bounds) == bounds
    else:
        assert histogram["exponential"]["max_size"] == 160 and point.scale
    # The connector names what it makes after its namespace; statements repair what that cannot be.
    changes = str(CONFIG["processors"]["transform/metrics"])
    made = f"{connector['namespace']}.duration"
    assert ours.name == name and (
        made == name
        or f'"{name}") where metric.name == "{made}"' in changes
        or f'(metric.name, "{name}")' in changes
    )
    assert ours.unit == histogram["unit"] or f'(metric.unit, "{ours.unit}")' in changes


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_is_received_keeps_its_labels(name: str) -> None:
    """What an exporter process sends passes with these labels and no others."""
    statements = CONFIG["processors"]["transform/received"]["metric_statements"]
    (found,) = [each for each in statements if name in str(each.get("conditions"))]
    kept = set(re.findall(r'"([^"]+)"', found["statements"][0]))

    assert kept == {*make_exporter_metric(name).data.data_points[0].attributes, OVERFLOW_LABEL}


def test_every_metric_has_spans_and_a_way_out() -> None:
    """Each connector is fed by a pipeline of spans, and read by the one to Prometheus."""
    pipelines = CONFIG["service"]["pipelines"]
    connectors = {f"span_metrics/{name}" for name in collector_config.COUNTED}

    assert connectors <= {each for pipeline in pipelines.values() for each in pipeline["exporters"]}
    assert connectors == set(pipelines["metrics/prometheus"]["receivers"])


def test_picture_is_current() -> None:
    """The committed picture is the one that the script draws now."""
    drawn = architecture_picture.draw_architecture()

    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert architecture_picture.PICTURE.read_text("utf-8") == drawn, (
        "run: .venv/bin/python -m lab.architecture_picture"
    )


def test_router_rooms() -> None:
    """Every folder and file of the router is a room."""
    found = {
        path.stem
        for path in room_imports.ROUTER.iterdir()
        if (path / "__init__.py").is_file() or path.suffix == ".py"
    }

    assert {
        unit for units in room_imports.list_router_rooms().values() for unit in units
    } == found - {"__init__"}


def test_count_imports(tmp_path: Path) -> None:
    """Files count once a room; relative imports, those inside functions, and a file's own room too."""
    package = tmp_path / "package"
    sources = {
        "low": "",
        "high/__init__": "",
        "high/first": "from package import low\nfrom package.low import name\nimport json",
        "high/second": "def read_file():\n    from .. import low\n    from . import first",
        "alone": "import package.high.first",
    }
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, "utf-8")
    rooms = {"low": ("low",), "high": ("high",)}

    assert room_imports.count_imports(package, rooms, package) == {("high", "low"): 2}


def test_file_order(tmp_path: Path) -> None:
    """Single files of a folder stand below those that import them, also where two form a cycle."""
    sources = {
        "alpha": "",
        "beta": "alpha",
        "gamma": "beta",
        "delta": "epsilon",
        "epsilon": "delta",
    }
    for name, imported in sources.items():
        text = f"from {tmp_path.name} import {imported}" if imported else ""
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    names = [
        name
        for name in room_imports.list_router_rooms(tmp_path, tmp_path)
        if not name.endswith("/")
    ]

    assert names.index("gamma") < names.index("beta") < names.index("alpha")
    assert sorted(names) == sorted(sources)
