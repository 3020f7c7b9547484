"""Charts: the drawing says what the numbers say. How it looks is tests/browser/test_report_page.py's."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_pipeline.reports.page import canvas, charts
from spark_pipeline.reports.report import Chart, Series

HOUR_MS = 3_600_000
START_MS = 1_794_830_400_000


def drawn(chart: Chart) -> tuple[charts.Picture, ElementTree.Element]:
    picture = charts.picture(chart)
    assert picture is not None
    ElementTree.fromstring(picture.narrow)
    return picture, ElementTree.fromstring(picture.wide)


def boxes(svg: ElementTree.Element, css: str = "") -> list[dict[str, float]]:
    return [
        {side: float(box.attrib[side]) for side in ("x", "y", "width", "height")}
        for box in svg.iter("rect")
        if css in box.attrib["class"].split() or not css
    ]


def titles(svg: ElementTree.Element) -> list[str]:
    return [str(title.text) for title in svg.iter("title")]


def texts(svg: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in svg.iter("text")]


def hours(*values: float) -> list[tuple[int | str, float]]:
    return [(START_MS + number * HOUR_MS, value) for number, value in enumerate(values)]


def test_bars_are_as_high_as_their_values() -> None:
    _, svg = drawn(Chart(title="t", shape="bars", series=[Series("a", hours(10, 20, 5))]))
    heights = [box["height"] for box in boxes(svg)]
    assert heights == pytest.approx([heights[0], heights[0] * 2, heights[0] / 2], abs=0.2)
    lefts = [box["x"] for box in boxes(svg)]
    assert lefts == sorted(lefts)
    assert len({round(box["y"] + box["height"], 1) for box in boxes(svg)}) == 1, "all stand on the same line"


def test_grouped_bars_stand_beside_each_other() -> None:
    picture, svg = drawn(Chart(title="t", shape="bars", series=[Series("a", hours(1, 2)), Series("b", hours(3, 4))]))
    first, second = boxes(svg, "s0"), boxes(svg, "s1")
    for left, right in zip(first, second, strict=True):
        assert right["x"] == pytest.approx(left["x"] + left["width"], abs=0.2)
    assert [(entry.css, entry.name) for entry in picture.legend] == [("s0", "a"), ("s1", "b")]


def test_stacked_bars_stand_on_each_other() -> None:
    _, svg = drawn(Chart(title="t", shape="stacked", series=[Series("a", hours(1, 2)), Series("b", hours(3, 4))]))
    for below, above in zip(boxes(svg, "s0"), boxes(svg, "s1"), strict=True):
        assert above["y"] + above["height"] == pytest.approx(below["y"], abs=0.2)
        assert above["x"] == below["x"]


def test_bars_below_zero_hang_from_the_line() -> None:
    _, svg = drawn(Chart(title="t", shape="bars", kind="percent", series=[Series("a", hours(50, -50))]))
    up, down = boxes(svg)
    assert up["y"] + up["height"] == pytest.approx(down["y"], abs=0.2)
    assert up["height"] == pytest.approx(down["height"], abs=0.2)


def test_bars_of_names_lie_on_their_side() -> None:
    _, svg = drawn(Chart(title="t", shape="bars", kind="bytes", series=[Series("a", [("x", 2048.0), ("y", 1024.0)])]))
    long, short = boxes(svg)
    assert long["width"] == pytest.approx(2 * short["width"], abs=0.2)
    assert {"x", "y", "2 KiB", "1 KiB"} <= set(texts(svg))
    assert titles(svg) == ["x: 2 KiB", "y: 1 KiB"]


def test_a_stack_of_names_ends_with_its_sum() -> None:
    _, svg = drawn(Chart(title="t", shape="stacked", series=[Series("a", [("x", 2.0)]), Series("b", [("x", 3.0)])]))
    left, right = boxes(svg)
    assert right["x"] == pytest.approx(left["x"] + left["width"], abs=0.2)
    assert "5" in texts(svg)


def test_lines_go_through_their_points_in_order_of_time() -> None:
    points = hours(1, 5, 3)
    _, svg = drawn(Chart(title="t", shape="lines", series=[Series("a", points[::-1])]))
    line = next(path for path in svg.iter("path") if "line" in path.attrib["class"])
    at = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", line.attrib["d"])]
    assert [x for x, _ in at] == sorted(x for x, _ in at)
    assert at[1][1] < at[2][1] < at[0][1], "5 is above 3 is above 1"
    assert titles(svg)[0] == "2026-11-16 12:00:00 UTC: 1"


def test_a_long_line_is_thinned_but_keeps_its_peak() -> None:
    values = [1.0] * 5_000
    values[3_333] = 1_000.0
    picture, svg = drawn(Chart(title="t", shape="lines", series=[Series("a", hours(*values))]))
    line = next(path for path in svg.iter("path") if "line" in path.attrib["class"])
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", line.attrib["d"])]
    assert min(heights) == pytest.approx(10.0), "the top of the frame"
    assert len(heights) < 1_200
    assert len(picture.wide) < 50_000


def test_bars_that_are_too_many_are_joined_and_the_sum_stays() -> None:
    chart = Chart(title="t", shape="bars", series=[Series("a", hours(*[1.0] * 2_400))])
    picture, svg = drawn(chart)
    assert picture.note == "Each bar is 1d."
    assert sum(int(title.rpartition(": ")[2]) for title in titles(svg)) == 2_400


def test_what_does_not_add_up_is_averaged() -> None:
    chart = Chart(title="t", shape="bars", kind="ms", series=[Series("a", hours(*[7.0] * 2_400))])
    _, svg = drawn(chart)
    assert {title.rpartition(": ")[2] for title in titles(svg)} == {"7 ms"}


def test_more_series_than_colours() -> None:
    series = [Series(f"t{n}", hours(float(n))) for n in range(1, 13)]
    picture, svg = drawn(Chart(title="t", shape="stacked", series=series))
    names = [entry.name for entry in picture.legend]
    assert names == ["t6", "t7", "t8", "t9", "t10", "t11", "t12", "5 others"]
    assert "5 others, 2026-11-16 12:00:00 UTC: 15" in titles(svg)
    picture, _ = drawn(Chart(title="t", shape="lines", series=series))
    assert picture.note == "The 8 largest of 12."
    assert len(picture.legend) == 8


def test_only_so_many_names() -> None:
    picture, svg = drawn(Chart(title="t", shape="bars", series=[Series("a", [(f"n{n}", 1.0) for n in range(50)])]))
    assert picture.note == "The first 20 of 50."
    assert len(boxes(svg)) == 20


def test_nothing_to_draw() -> None:
    assert charts.picture(Chart(title="t", shape="lines", series=[])) is None
    assert charts.picture(Chart(title="t", shape="bars", series=[Series("a", [(1, math.nan)])])) is None


def test_a_single_series_needs_no_legend() -> None:
    picture, _ = drawn(Chart(title="t", shape="lines", series=[Series("a", hours(1))]))
    assert picture.legend == []


EVIL = "<script>&\"'"


@pytest.mark.parametrize("shape", ["lines", "bars", "stacked"])
def test_names_are_escaped(shape: str) -> None:
    chart = Chart(title=EVIL, shape=shape, series=[Series(EVIL, [(EVIL, 1.0)]), Series("b", [(EVIL, 1.0)])])  # type: ignore[arg-type]
    picture, svg = drawn(chart)
    assert "<script" not in picture.wide
    assert svg.attrib["aria-label"] == EVIL
    assert f"{EVIL}, {EVIL}: 1" in titles(svg)


values = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e6, 1e6)
xs = st.lists(st.tuples(st.integers(0, 4_102_444_800_000), values), max_size=40)
labelled = st.lists(st.tuples(st.text(max_size=40), values), max_size=40)


@settings(max_examples=60)
@given(
    st.sampled_from(["lines", "bars", "stacked"]),
    st.sampled_from(["count", "bytes", "ms", "percent", "number"]),
    st.lists(xs, max_size=10) | st.lists(labelled, max_size=10),
)
def test_whatever_is_drawn_lies_inside(shape: str, kind: str, series: list[list[tuple[int | str, float]]]) -> None:
    chart = Chart(title="t", shape=shape, kind=kind, series=[Series(f"{n}", one) for n, one in enumerate(series)])  # type: ignore[arg-type]
    picture = charts.picture(chart)
    if picture is None:
        return
    for text in (picture.wide, picture.narrow):
        assert "nan" not in re.sub(r"<title>.*?</title>|<text.*?</text>", "", text, flags=re.S)
        size = re.match(r'<svg .*?width="(\d+)" height="(\d+)"', text)
        assert size is not None
        for x, y in re.findall(r' x="([-\d.]+)" y="([-\d.]+)"', text):
            assert -1 <= float(x) <= float(size[1]) + 1
            assert -1 <= float(y) <= float(size[2]) + 1


@given(st.text(max_size=300), st.floats(0, 400))
def test_cut_labels_fit(label: str, room: float) -> None:
    shown = canvas.cut(label, room)
    assert canvas.text_px(shown) <= room or shown == ""
    assert shown == label or canvas.text_px(label) > room


def test_a_label_is_cut_in_its_middle() -> None:
    assert canvas.cut("sensor.telemetry.building-7.floor-3.humidity", 150) == "sensor.tele…3.humidity"
