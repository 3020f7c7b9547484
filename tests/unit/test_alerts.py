"""deploy/prometheus and deploy/grafana: every alert is explained, fires when it should and not otherwise; every
expression parses; names of reports' metrics are real. tests/e2e/test_operations.py compares the others with a server.

The expressions are evaluated by promtool, Prometheus' own tool; without it only names and forms are checked.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
from alertrules import ALERTS, ROOT, alerts, panels, queries, used_names

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def names_of_reports() -> set[str]:
    found = set()
    for path in (ROOT / "spark_pipeline/reports").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "Metric"
                and isinstance(node.args[0], ast.Constant)
            ):
                name = ast.literal_eval(node.args[0])
                assert isinstance(name, str)
                found.add(f"topics_report_{name}")
    return found


def test_every_rule_has_all_its_parts() -> None:
    text = ALERTS.read_text()
    names = re.findall(r"- alert: (\w+)", text)
    assert len(names) == len(set(names)) >= 20
    assert list(alerts()) == names  # each of them matches the form as a whole
    assert all(alert["anchor"] == name.lower() for name, alert in alerts().items())


def test_every_alert_is_explained() -> None:
    document = (ROOT / "docs/OPERATIONS.md").read_text()
    sections = dict(re.findall(r"^### (Topics\w+)\n(.*?)(?=^#)", document, re.S | re.M))
    assert set(sections) == set(alerts())
    for name, text in sections.items():
        assert "```" in text, f"{name}: says no command"
        assert "**Means**" in text, name
        assert "**Do**" in text, name


def test_the_metrics_of_reports_exist() -> None:
    used = {name for name in used_names() if name.startswith("topics_report_")}
    assert len(used) >= 10
    assert used <= names_of_reports()


def test_the_dashboard_is_laid_out() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    assert [panel["title"] for panel in found if panel["type"] == "row"] == [
        *("Overview", "Shards", "Queues", "Routers", "Guard", "Storage")
    ]
    places = [panel["gridPos"] for panel in found]
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for panel in found:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def promtool(*args: object) -> None:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_and_queries_parse(tmp_path: Path) -> None:
    promtool("check", "rules", ALERTS)
    rules = "".join(f"      - record: q{at}\n        expr: {json.dumps(expr)}\n" for at, expr in enumerate(queries()))
    (tmp_path / "queries.yml").write_text(f"groups:\n  - name: dashboard\n    rules:\n{rules}")
    promtool("check", "rules", tmp_path / "queries.yml")


@needs_promtool
def test_the_scrape_config(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(ROOT / "deploy/prometheus" / name, tmp_path)
    (tmp_path / "topics.token").write_text("secret\n")
    promtool("check", "config", tmp_path / "prometheus.yml")


# --- they fire ------------------------------------------------------------------------------------------

_PROCESS = 'instance="a",process="shard-0"'
_RESTARTS = f"topics_process_restarts_total{{{_PROCESS}}}"
_HTTP = 'topics_http_requests_total{{instance="a",status="{}"}}'
_BUCKETS = 'topics_wal_fsync_latency_us_bucket{{instance="a",le="{}"}}'
_REPORT = 'instance="a"'
# Series of one value a minute: when all is well, and what is different when something is not.
_CALM = {
    'up{job="topics",instance="a"}': "1x150",
    'topics_ready{instance="a"}': "1x150",
    _RESTARTS: "2x150",
    f"topics_process_resident_bytes{{{_PROCESS}}}": "1000x150",
    'topics_wal_read_only{instance="a"}': "0x150",
    'topics_disk_free_bytes{instance="a"}': "90000000000x150",
    _BUCKETS.format(1024): "0+100x150",
    _BUCKETS.format("+Inf"): "0+100x150",
    f"topics_process_loop_lag_seconds{{{_PROCESS}}}": "0.01x150",
    f"topics_process_ring_depth_bytes{{{_PROCESS}}}": "1000x150",
    f"topics_process_ring_full_total{{{_PROCESS}}}": "7x150",
    f"topics_process_pressure{{{_PROCESS}}}": "1x150",
    _HTTP.format(200): "0+6000x150",
    _HTTP.format(429): "0+60x150",
    _HTTP.format(401): "0+10x150",
    _HTTP.format(503): "0+6x150",
    'topics_topic_queue_ready{instance="a",topic="q"}': "5x150",
    'topics_topic_queue_in_flight{instance="a",topic="q"}': "1x150",
    'topics_queue_dead_lettered_total{instance="a"}': "3x150",
    f'topics_report_run_ok{{{_REPORT},report="loss"}}': "1x150",
    f"topics_report_run_timestamp_seconds{{{_REPORT}}}": "0+60x150",
    f"topics_report_run_breaches{{{_REPORT}}}": "0x150",
    f'topics_report_integrity_problems{{{_REPORT},shard="0"}}': "0x150",
    f"topics_report_loss_unexplained_seqs{{{_REPORT}}}": "0x150",
    'topics_router_lag_records{instance="a"}': "200x150",
    'topics_records_evicted_total{instance="a"}': "500x150",
    f'topics_report_loss_records{{{_REPORT},by="lost"}}': "5x150",
    f"topics_report_queues_oldest_ready_seconds{{{_REPORT}}}": "10x150",
    f"topics_report_routers_stalled{{{_REPORT}}}": "0x150",
}
_WRONG: dict[str, dict[str, str]] = {
    "TopicsDown": {'up{job="topics",instance="a"}': "0x150"},
    "TopicsNotReady": {'topics_ready{instance="a"}': "0x150"},
    "TopicsProcessDown": {f"topics_process_resident_bytes{{{_PROCESS}}}": "1000x10 stale"},
    "TopicsProcessRestarted": {_RESTARTS: "2x145 3x5"},
    "TopicsProcessFlapping": {_RESTARTS: "2x140 3+1x10"},
    "TopicsReadOnly": {'topics_wal_read_only{instance="a"}': "1x150"},
    "TopicsDiskLow": {'topics_disk_free_bytes{instance="a"}': "1000000000x150"},
    "TopicsDiskFullSoon": {'topics_disk_free_bytes{instance="a"}': "20000000000-50000000x150"},
    "TopicsSyncSlow": {_BUCKETS.format(1024): "0x150", _BUCKETS.format(262144): "0+100x150"},
    "TopicsLoopLag": {f"topics_process_loop_lag_seconds{{{_PROCESS}}}": "0.6x150"},
    "TopicsRingFilling": {f"topics_process_ring_depth_bytes{{{_PROCESS}}}": "7000000x150"},
    "TopicsRingFull": {f"topics_process_ring_full_total{{{_PROCESS}}}": "0+1x150"},
    "TopicsPressure": {f"topics_process_pressure{{{_PROCESS}}}": "4x150"},
    "TopicsServerErrors": {_HTTP.format(503): "0+100x150"},
    "TopicsRefusals": {_HTTP.format(429): "0+600x150"},
    "TopicsKeysRefused": {_HTTP.format(401): "0+120x150"},
    "TopicsQueueWithoutWorkers": {'topics_topic_queue_in_flight{instance="a",topic="q"}': "0x150"},
    "TopicsQueueGrowing": {'topics_topic_queue_ready{instance="a",topic="q"}': "0+30x150"},
    "TopicsDeadLetters": {'topics_queue_dead_lettered_total{instance="a"}': "3x130 4x20"},
    "TopicsReportFailed": {f'topics_report_run_ok{{{_REPORT},report="loss"}}': "0x150"},
    "TopicsReportStale": {f"topics_report_run_timestamp_seconds{{{_REPORT}}}": "-200000x150"},
    "TopicsReportBreach": {f"topics_report_run_breaches{{{_REPORT}}}": "1x150"},
    "TopicsIntegrity": {f'topics_report_integrity_problems{{{_REPORT},shard="0"}}': "2x150"},
    "TopicsLossUnexplained": {f"topics_report_loss_unexplained_seqs{{{_REPORT}}}": "1x150"},
    "TopicsEvictionBegan": {'topics_records_evicted_total{instance="a"}': "500x100 900x50"},
    "TopicsRecordsLost": {f'topics_report_loss_records{{{_REPORT},by="lost"}}': "5x100 9x50"},
    "TopicsOldJobs": {f"topics_report_queues_oldest_ready_seconds{{{_REPORT}}}": "5000x150"},
    "TopicsRouterLag": {'topics_router_lag_records{instance="a"}': "200x130 200000x20"},
    "TopicsRouterStalled": {f"topics_report_routers_stalled{{{_REPORT}}}": "1x150"},
}
# Who is told of one is told of the other, too.
_TOGETHER = {"TopicsProcessFlapping": {"TopicsProcessRestarted"}}


@needs_promtool
def test_each_alert_fires_for_what_is_wrong_and_no_other(tmp_path: Path) -> None:
    """A server for each thing that can be wrong, and one where all is well; one Prometheus watches all of them."""
    assert set(_WRONG) == set(alerts())
    series, fires = [], []
    for server, wrong in {"well": {}, **_WRONG}.items():
        for name, values in (_CALM | wrong).items():
            series.append({"series": name.replace('instance="a"', f'instance="{server}"'), "values": values})
        for alert in sorted({server, *_TOGETHER.get(server, set())} - {"well"}):
            fires.append({"labels": f'{{alertname="{alert}", instance="{server}"}}', "value": 1})
    firing = {
        "expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})',
        "eval_time": "150m",
        "exp_samples": fires,
    }
    case = {"interval": "1m", "input_series": series, "promql_expr_test": [firing]}
    tests = tmp_path / "tests.yml"  # JSON is YAML
    tests.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", tests)
