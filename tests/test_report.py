"""Pages show what their result files say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = Path(__file__).parents[1] / "eval" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_stale(report: ModuleType) -> None:
    assert report.main(check=True) == 0


def test_every_section_is_shown_somewhere(report: ModuleType) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in report.PAGES)
    for name in report.SECTIONS:
        assert f"<!-- report: {name} -->" in pages


def test_a_changed_figure_is_noticed(report: ModuleType) -> None:
    page = "before\n<!-- report: training -->\nold\n<!-- end report -->\nafter\n"
    fresh = report.rendered(page)
    assert fresh.startswith("before\n<!-- report: training -->\n| held-out text | loss |")
    assert fresh.endswith("<!-- end report -->\nafter\n")
    assert report.rendered(fresh) == fresh
    assert report.rendered(fresh.replace("0.94", "0.99")) == fresh
