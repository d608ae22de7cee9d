# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""For mkdocs: pages in Chinese have a navigation and a header in Chinese, and each page leads to the other language."""

from __future__ import annotations

import logging
from typing import Any

from mkdocs.structure.nav import Navigation, Section

# By jieba the search finds Chinese words; it is not to print how it loads its dictionary.
logging.getLogger("jieba").setLevel(logging.WARNING)

CHINESE = "中文"
_FIRST = {"en": "README.md", "zh": "README.zh.md"}
_NAMES = {"en": "English", "zh": CHINESE}


def on_page_context(context: dict[str, Any], page: Any, config: Any, nav: Navigation) -> dict[str, Any]:
    """Called before ``page`` is rendered."""
    (chinese,) = (item for item in nav.items if isinstance(item, Section) and item.title == CHINESE)
    own = page.file.src_uri
    language, other = ("zh", "en") if own.endswith(".zh.md") else ("en", "zh")
    config.theme["language"] = language
    pages = {found.file.src_uri: found for found in nav.pages}
    twin = own.replace(".zh.md", ".md") if language == "zh" else own.removesuffix(".md") + ".zh.md"
    context["other_language"] = {"lang": other, "name": _NAMES[other], "url": pages.get(twin, pages[_FIRST[other]]).url}
    items = chinese.children if language == "zh" else [item for item in nav.items if item is not chinese]
    context["nav"] = Navigation(items, nav.pages)
    context["nav"].homepage = pages[_FIRST[language]]
    return context
