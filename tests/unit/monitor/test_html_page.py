"""The frame of pages: a title that stays text, and tables of cells that are HTML."""

from megatron_rl.monitor.html_page import html_page, html_table


def test_a_page_has_its_title_as_text():
    page = html_page("<b>run", "<p>body</p>", "i { }", "<meta>")
    assert page.startswith("<!doctype html>")
    assert page.count("&lt;b&gt;run") == 2
    assert "<p>body</p>" in page
    assert "<script" not in page


def test_a_table_has_titles_and_rows():
    table = html_table([["name", "value"], ["<i>a</i>", "1"]])
    assert "<tr><th>name</th><th>value</th></tr><tr><td><i>a</i></td><td>1</td></tr>" in table
