"""What deploy/prometheus and deploy/grafana ask for: the alerts, the panels, and the metrics named in either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/topics.json"
_RULE = re.compile(
    r"      - alert: (?P<name>\w+)\n"
    r"(?:        #.*\n)*"
    r"        expr: '(?P<expr>[^'\n]+)'\n"
    r"(?:        for: (?P<for>\w+)\n)?"
    r"        labels: \{severity: (?P<severity>warning|critical)\}\n"
    r"        annotations:\n"
    r'          summary: "(?P<summary>[^"\n]+)"\n'
    r"          runbook_url: docs/OPERATIONS\.md#(?P<anchor>[\w-]+)\n"
)


def alerts() -> dict[str, dict[str, str]]:
    return {found["name"]: found.groupdict() for found in _RULE.finditer(ALERTS.read_text())}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> list[str]:
    """Of the dashboard, with its variables filled in."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    return [expr.replace("$__rate_interval", "5m").replace("$instance", ".*") for expr in found]


def names_in(expr: str) -> set[str]:
    """Metrics of ours; the parts of a histogram under the name it has as a whole."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\btopics_[a-z0-9_]+", expr)}


def used_names() -> set[str]:
    exprs = [*(alert["expr"] for alert in alerts().values()), *queries()]
    return {name for expr in exprs for name in names_in(expr)}
